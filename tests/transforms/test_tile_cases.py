"""`tile` leaves every function of the table in `cases` unchanged, in value, aux, gradients and the other modes."""

import itertools
import math
import zlib
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import tree_util as jtu

from tests import quick
from tests.helpers import (
    FLOAT32,
    Call,
    as_jax,
    assert_no_large,
    assert_same,
    assert_tiles,
    equations,
    evaluate,
    largest,
    probe,
    relative_error,
    tiled,
)
from tests.transforms.cases import CASES, Case
from transforms import TileError

TILES = [case for case in CASES.values() if case.refused is None]
REFUSED = [case for case in CASES.values() if case.refused is not None]
COUNTS = (4, 7, 2)


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def check(case: Case, n: int | tuple[int, ...], **options: Any) -> bool:
    args, kwargs = case.draw()
    tolerance = None if case.tolerance == FLOAT32 else case.tolerance
    call = partial(assert_tiles, kwargs=kwargs, tolerance=tolerance, closed=case.closed, oracle=case.oracle)
    if case.bitwise:
        options["fast"] = False
        return all([call(case.fn, case.axis, k, args, case.has_aux, **options) for k in np.ravel(n).tolist()])
    return call(case.fn, case.axis, n, args, case.has_aux, **options)


SPECIAL = (np.inf, -np.inf, np.nan, 0.0, -0.0)


def check_special(case: Case) -> None:
    """What is infinite or NaN is so tiled and untiled, and all else agrees, wherever such numbers stand."""
    call = call_of(case, jnp.float32)
    untiled, arrays = probe(call, call.fn)
    other, _ = probe(call, tiled(case.fn, case.axis, 4, case.has_aux, case.closed))
    untiled, other = quick.jit(untiled), quick.jit(other)
    leaves, treedef = jtu.tree_flatten(arrays)
    floats = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and leaf.size]
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    for number, (where, share) in itertools.product(SPECIAL, itertools.product(floats, (0.0, 0.3))):
        array = np.array(leaves[where])
        array.flat[rng.integers(array.size)] = number
        array[rng.random(array.shape) < share] = number
        arrays = jtu.tree_unflatten(treedef, [*leaves[:where], jnp.asarray(array), *leaves[where + 1 :]])
        tolerance = max(case.tolerance, 1e-4)
        assert_same(other(*arrays), untiled(*arrays), tolerance, f"{number} in {where}: ", floor=1e-3)


def call_of(case: Case, dtype: Any) -> Call:
    args, kwargs = as_jax(case.draw(), dtype)
    return Call(fn=case.fn, args=args, kwargs=kwargs, has_aux=case.has_aux)


EVERY = [pytest.param(case, how, id=f"{case.name}-{how}") for case in TILES for how in (*COUNTS, *case.modes)]


@pytest.mark.redundant("how")
@pytest.mark.parametrize(("case", "how"), EVERY)
def test_equals_untiled(case, how):
    """For several counts; and in four tiles as XLA makes it fast, in float64 and under JAX's transformations."""
    if isinstance(how, int):
        check(case, how, fast=True)
    elif how == "optimised":
        check(case, 4)
    elif how == "float64":
        with jax.enable_x64(True):
            check(case, 4, dtype=jnp.float64, fast=True)
    elif how == "special":
        check_special(case)
    elif how == "jvp" and not case.forward_mode:
        with pytest.raises(TypeError, match="forward-mode"):
            check(case, 4, modes=(how,))
    else:
        check(case, 4, modes=(how,), fast=True)


@pytest.mark.heavy
@each(TILES)
def test_equals_untiled_optimised(case):
    check(case, COUNTS)


@each(REFUSED)
def test_is_refused(case):
    with pytest.raises(TileError, match=f"it {case.refused}"):
        check(case, 4)


@each(TILES)
def test_makes_no_untiled_intermediate(case):
    """No array larger than every input and output, nor than a tile's share of the untiled function's largest."""
    n = 7
    call = call_of(case, jnp.float32)
    function, arrays = probe(call, tiled(case.fn, case.axis, n, case.has_aux, case.closed))
    jaxpr = jax.make_jaxpr(function)(*arrays)
    untiled = jax.make_jaxpr(probe(call, call.fn)[0])(*arrays)
    if case.head:
        _assert_no_large(case, jaxpr, untiled, n)
    _assert_small_where_whole(case, jaxpr, untiled, n)


def _assert_no_large(case: Case, jaxpr: Any, untiled: Any, n: int) -> None:
    shapes = [v.aval.shape for v in (*untiled.jaxpr.invars, *untiled.jaxpr.outvars)]
    limit = max(math.prod(shape) for shape in shapes) + 1
    assert largest(untiled) >= limit, "the untiled function makes nothing larger than its inputs and outputs"
    share = math.ceil(largest(untiled) * -(-length(case) // n) / length(case))
    assert_no_large(jaxpr, max(limit, share + 1))


def _assert_small_where_whole(case: Case, jaxpr: Any, untiled: Any, n: int) -> None:
    """In bytes: no more than the tiles of the untiled function's arrays hold, but for arrays of one number."""
    ends = max(_bytes(v.aval) for v in (*jaxpr.jaxpr.invars, *jaxpr.jaxpr.outvars))
    most = max(_bytes(v.aval) for e in equations(untiled) for v in e.outvars)
    limit = max(ends, most * -(-length(case) // n) // length(case) + 1)
    made = [(e, v) for e in equations(jaxpr) for v in e.outvars if _bytes(v.aval) > limit]
    wrong = [f"{e.primitive} makes {v.aval.str_short()}" for e, v in made if not _is_one_number(e)]
    assert not wrong, f"more than {limit} bytes: {', '.join(wrong)}"


def _bytes(aval: Any) -> int:
    """Of an array, if it is of floats in the dtype that sums are formed in."""
    dtype = getattr(aval, "dtype", np.dtype(bool))
    least = 4 if jax.dtypes.issubdtype(dtype, np.inexact) else 1
    return math.prod(getattr(aval, "shape", ())) * max(least, dtype.itemsize)


def _is_one_number(eqn: Any) -> bool:
    return eqn.primitive.name == "broadcast_in_dim" and math.prod(eqn.invars[0].aval.shape) == 1


def length(case: Case) -> int:
    """The length of the cut axis."""
    args = case.draw()[0][case.closed :]
    prefix = case.axis if isinstance(case.axis, tuple) else (case.axis,) * len(args)
    for axis, arg in zip(prefix, args, strict=True):
        if isinstance(axis, int):
            return next(leaf.shape[axis] for leaf in jtu.tree_leaves(arg) if eqx.is_array_like(leaf) and leaf.ndim)
    return args[0][1].shape[0]


@pytest.mark.heavy
@each(list(CASES.values()))
def test_case_is_well_posed(case):
    """The untiled function is finite, has a gradient, and float32 alone does not cost the tolerance."""
    call = call_of(case, jnp.float32)
    single = evaluate(call, case.fn)
    assert all(jnp.isfinite(leaf).all() for leaf in jtu.tree_leaves(single["grads"])), "a gradient is not finite"
    assert any(jnp.any(leaf != 0) for leaf in jtu.tree_leaves(single["grads"])) == case.differentiable
    if not case.x64:
        return
    with jax.enable_x64(True):
        double = evaluate(call_of(case, jnp.float64), case.fn)
    for (path, a), b in zip(jtu.tree_leaves_with_path(single), jtu.tree_leaves(double), strict=True):
        assert relative_error(a, jnp.asarray(b, a.dtype)) < case.tolerance / 4, jtu.keystr(path)
