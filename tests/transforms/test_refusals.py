"""What rules say when an operand has to be whole: every reason they know has a case, and none is said of another."""

import ast
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Primitive

from transforms import TileError, tile
from transforms.tiling import regions, rules
from transforms.tiling.analysis.limits import Limits
from transforms.tiling.analysis.propagate import analyse
from transforms.tiling.frontend.flatten import flatten
from transforms.tiling.ir.obstacles import Complete
from transforms.tiling.ir.placement import WHOLE, Tiled
from transforms.tiling.rules import RULES, indexing
from transforms.tiling.rules.random import ONE_STREAM

L, D = 10, 3
IDS = np.arange(L)[::-1].copy()
UNKNOWN = Primitive("unknown")
UNKNOWN.def_abstract_eval(lambda x: x)


def words(x):
    """Keys of another generator, one for each place along the cut axis."""
    return jnp.concatenate([x, x[:, :1]], 1).astype(jnp.uint32)


# What a rule says, and functions that it says it of, for `x` [L, D] that is cut; or `x` of another length.
REFUSED = {
    "runs along the cut axis": (
        lambda x: jnp.sort(x, 0),
        lambda x: lax.approx_max_k(x.T, 2),
        lambda x: lax.reduce_xor(x.astype(int), (0,)),
    ),
    "has operands that are cut along different dimensions": (
        lambda x: x[:, :1] + x[:, :1].T,
        lambda x: x @ x.T,
        lambda x: (x[:, :1] * jnp.ones((1, L))) @ x,
        lambda x: x.T[x[:, 0].astype(int)],
    ),
    "splits the cut axis over several dimensions": (lambda x: x.reshape(D, L),),
    "joins along the cut axis": (lambda x: jnp.concatenate([x, jnp.ones((1, D))]),),
    "pads the cut axis": (lambda x: jnp.pad(x, ((0, 1), (0, 0))),),
    "takes a part of the cut axis": (
        lambda x: x[1:],
        lambda x: lax.dynamic_slice_in_dim(x, x.astype(int).sum(), L - 1),
        lambda x: jax.vmap(lambda i: lax.dynamic_slice_in_dim(x, i, 2))(jnp.arange(3)),
    ),
    "reverses the cut axis": (lambda x: x[::-1],),
    "splits the cut axis": (lambda x: lax.split(x, (4, 6)),),
    "takes the cut axis apart": (
        lambda x: jnp.unstack(x),
        (lambda x: lax.bitcast_convert_type(x.T.astype(jnp.uint16), jnp.uint32), 2),
        (lambda x: jax.random.key_data(jax.random.wrap_key_data(x.T.astype(jnp.uint32))), 2),
    ),
    "overwrites a part of the cut axis": (lambda x: lax.dynamic_update_slice(jnp.ones((L + 1, D)), x, (1, 0)),),
    "looks up arbitrary places along the cut axis": (
        lambda x: x[IDS],
        lambda x: jnp.ones((L, D)).at[IDS].set(x),
        lambda x: jnp.ones((L, D)).at[IDS].multiply(x, unique_indices=True),
    ),
    "looks up places that are cut themselves": (lambda x: x[x[:, 0].astype(int)],),
    "slides over the cut axis": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME"),),
    "transforms the cut axis": (lambda x: jnp.fft.fft(x, axis=0), lambda x: jnp.fft.rfft2(x)),
    "combines the cut axis by a function of its own": (lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + b, (0,)),),
    "groups the cut axis": (
        lambda x: lax.ragged_dot(jnp.ones((4, D)), jnp.stack([x, x], 2), jnp.array([1] * L, jnp.int32)),
        lambda x: lax.ragged_dot(jnp.tile(x, (2, 1)), jnp.ones((2, D, 3)), jnp.array([1, 2], jnp.int32)),
    ),
    "needs the sizes of all groups": (
        lambda x: lax.ragged_dot(jnp.ones((4, D)), jnp.ones((L, D, 2)), x[:, 0].astype(jnp.int32)),
    ),
    ONE_STREAM: (
        lambda x: jax.vmap(lambda d: jax.random.bits(jax.random.wrap_key_data(d, impl="rbg")))(words(x)),
        lambda x: jax.vmap(lambda d, i: jax.random.fold_in(jax.random.wrap_key_data(d, impl="rbg"), i))(words(x), IDS),
        (lambda x: lax.rng_bit_generator(words(x)[:, 0], (3,))[1], 4),
    ),
    "splits its key for all of the cut axis": (lambda x: jax.random.gamma(jax.random.key(0), x),),
    "takes whole matrices along the cut axis": (lambda x: lax.linalg.qr(x, full_matrices=False),),
    "slides over the cut axis, or groups it": (
        lambda x: lax.conv_general_dilated(x.T[None], jnp.ones((D, D, 2)), (3,), "SAME"),
    ),
    "is a callback whose results have the whole shape": (
        lambda x: io_callback(lambda v: v, jax.ShapeDtypeStruct((L, D), jnp.float32), x),
    ),
}
# The same of operands that are parts of a sum, which need one more loop but no more memory: the plan lists them.
COMPLETED = {
    "is not linear in it": lambda x: jnp.sin(x.sum(0)),
    "would make it larger": lambda x: (
        jnp.broadcast_to(x.sum(0), (2, D)),
        jnp.tensordot(x.sum(0), jnp.ones((1, 4)), 0),
    ),
    "is not run on partial sums": lambda x: jnp.convolve(x.sum(0), jnp.ones(2)),
    "keeps it": lambda x: lax.dce_sink(x.sum(0)),
    "reports it": lambda x: jax.debug.print("{}", x.sum(0)),
    "fills in a value that each tile would add": lambda x: x.sum(0).at[jnp.array([9])].get(mode="fill", fill_value=1),
    "needs it whole": lambda x: UNKNOWN.bind(x.sum(0)),
}
# Rules of control flow; those that speak of devices: see test_collective.py; and of kernels: see test_kernel.py and
# test_cudnn.py.
ELSEWHERE = {
    "attends along the cut axis",
    "reads one kv head for several query heads, some of which are in other tiles",
    "chooses by it",
    "combines it otherwise over the devices",
    "makes several copies of it",
    "is a kernel that was written for whole arrays",
    "is a kernel that takes other blocks than those that the grid is at along the cut axis",
    "is a kernel whose operands have other numbers of blocks along the cut axis",
    "moves parts of the cut axis between devices",
    "spreads the cut axis over devices",
    "puts it somewhere",
}
# Rules that no operand of theirs can bring to say this today: scalars cannot be cut, and one row is one tile.
UNREACHED = {
    "removes the cut axis, whose length is 1": ((lambda x: lax.squeeze(x[:1], (0,)), (Tiled(0),)),),
    "starts at a place that differs from tile to tile": (
        (lambda x: lax.dynamic_slice(x, (0, x.astype(int)[0, 0]), (L, 1)), (WHOLE, WHOLE, Tiled(0))),
        (lambda x: lax.dynamic_update_slice(x, x, (0, x.astype(int)[0, 0])), (Tiled(0), Tiled(0), WHOLE, Tiled(0))),
    ),
}


@pytest.mark.parametrize(("reason", "fn"), [(reason, fn) for reason, fns in REFUSED.items() for fn in fns])
def test_refusal(reason, fn):
    fn, length = fn if isinstance(fn, tuple) else (fn, L)
    size = min(4, length // 2)
    with pytest.raises(TileError, match=f"it {re.escape(reason)}, so its operand would have to be whole"):
        tile(lambda x: fn(jnp.sin(x)), 0, size=size, gather="none").plan(jax.ShapeDtypeStruct((length, D), jnp.float32))


@pytest.mark.parametrize("reason", COMPLETED)
def test_part_of_a_sum_is_completed(reason):
    closed = jax.make_jaxpr(lambda x: COMPLETED[reason](jnp.sin(x)))(jnp.ones((L, D)))
    found = analyse(flatten(closed), [Tiled(0)], Limits("none", 0))
    assert reason in [c.reason for c in found.completions]


@pytest.mark.parametrize("reason", UNREACHED)
def test_rule_asks_for_it_all_the_same(reason):
    for fn, placements in UNREACHED[reason]:
        nodes = flatten(jax.make_jaxpr(fn)(jnp.ones((L, D)))).nodes
        dynamic = [n for n in nodes if n.name.startswith("dynamic")]
        (node,) = dynamic or [n for n in nodes if n.name == "squeeze"]
        asked = RULES[node.name].push(node, placements)
        assert isinstance(asked, Complete)
        assert asked.reason == reason


def reasons():
    """All that the rules say when they ask for an operand to be whole."""
    folders = [pathlib.Path(folder.__file__).parent for folder in (rules, regions)]
    for path in (path for folder in folders for path in folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else getattr(node, "name", "")
            if name in ("Complete", "refuse_partial", "Factors"):
                texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
                yield from (t for t in texts if " " in t and not t.rstrip().endswith("."))
    yield from (indexing.ARBITRARY, ONE_STREAM)


def test_every_reason_has_a_case():
    assert set(reasons()) == {*REFUSED, *COMPLETED, *UNREACHED, *ELSEWHERE}
