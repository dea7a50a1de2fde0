"""Every function of every table of the tests, with the ways to cut it: what `golden_plans` writes the plans of.

A row is a function with its arguments and an axis, and the numbers of tiles that it is planned for. Rows are read off
the tables of the tests themselves, so that a case that is added to one of them has a plan here too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests import quick
from tests.helpers import Call, as_jax, probe
from tests.transforms import (
    regions,
    test_along,
    test_beside,
    test_collective,
    test_control_flow,
    test_divide,
    test_effects,
    test_estimate,
    test_keep,
    test_kernel,
    test_linear,
    test_losses,
    test_lowmem,
    test_online,
    test_online_attention,
    test_random,
    test_recut,
    test_residuals,
    test_rounding,
    test_rules,
    test_sequence,
    test_sizes,
    test_solves,
    test_spread,
    test_states,
    transformer,
)
from tests.transforms.cases import CASES
from tests.transforms.rows import arrays as operands
from tests.transforms.rows import sums
from tests.transforms.rule_table import GROUPS
from transforms import tile
from transforms.tiling.report.plan import TilePlan
from zoo.models.mixtures.experts import experts


@dataclass(frozen=True, kw_only=True)
class Row:
    """A function to be planned.

    Args:
      table, name: together they name it, once.
      fn: the function; returns `(out, aux)` if `has_aux`.
      axis: as `tile`'s, for the arguments after the first `closed`, which `fn` closes over.
      draw: makes positional and keyword arguments.
      counts: numbers of tiles, each a plan; lengths of tiles if `by` is "size".
      options: further arguments of `tile`.
      around: the context in which it is traced: a mesh.
      memory: the number of tiles for which it is compiled, too, with its gradients.
    """

    table: str
    name: str
    fn: Callable
    axis: Any
    draw: Callable[[], tuple[tuple, dict]]
    counts: tuple[int, ...] = (4,)
    by: str = "n"
    options: dict[str, Any] = field(default_factory=dict)
    closed: int = 0
    has_aux: bool = False
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    inside: Callable[[Callable], Callable] = lambda fn: fn
    memory: int | None = None

    def tiled(self, count: int, fn: Callable, closed: tuple = ()) -> Any:
        named = lambda *args, **kwargs: fn(*closed, *args, **kwargs)
        cut = functools.wraps(fn)(named) if closed else fn
        return tile(cut, self.axis, has_aux=self.has_aux, **{self.by: count}, **self.options)

    def plan(self, count: int, stopped: bool = False) -> TilePlan:
        """The plan; `stopped` for that of the value alone, where the gradient's is refused."""

        found = []
        with self.around(), quick.by_default():
            args, kwargs = self.draw()
            closed, rest = args[: self.closed], args[self.closed :]
            tiled = self.tiled(count, frozen(self.fn) if stopped else self.fn, closed)

            def note(*rest: Any) -> Any:
                found.append(tiled.plan(*rest, **kwargs))
                return rest[0]

            if self.inside is Row.inside:
                note(*rest)
            else:
                jax.eval_shape(self.inside(note), *rest)
        return found[0]

    def temporary(self, count: int) -> int:
        """Bytes of temporary memory of the compiled function with its gradients."""
        with self.around():
            args, kwargs = self.draw()
            call = Call(fn=self.fn, args=args, kwargs=kwargs, has_aux=self.has_aux)
            assert not self.closed
            function, given = probe(call, self.tiled(count, self.fn))
            return jax.jit(function).lower(*given).compile().memory_analysis().temp_size_in_bytes


def frozen(fn: Callable) -> Callable:
    """A function whose results have no derivative."""
    stop = lambda leaf: lax.stop_gradient(leaf) if isinstance(leaf, jax.Array) else leaf
    return functools.wraps(fn)(lambda *args, **kwargs: jax.tree.map(stop, fn(*args, **kwargs)))


def drawn(*args: Any) -> Callable[[], tuple[tuple, dict]]:
    """Arguments in float32 that are there already, or shapes."""
    return lambda: (jax.tree.map(_array, args), {})


def _array(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.zeros(leaf.shape, leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return jnp.asarray(leaf)
    return leaf.astype(jnp.float32) if isinstance(leaf, jax.Array) and leaf.dtype == jnp.float64 else leaf


def rows_of(table: str, functions: Any, axis: Any, args: Any, *counts: int, **more: Any) -> Iterator[Row]:
    """Rows of functions that share their arguments and axis: a dictionary, or a list that their names are read off."""
    named = functions if isinstance(functions, dict) else {fn.__name__: fn for fn in functions}
    draw = args if callable(args) else drawn(*args)
    for name, fn in named.items():
        yield Row(table=table, name=name, fn=fn, axis=axis, draw=draw, counts=counts, **more)


# ---------------------------------------------------------------------------------------------------------- the tables


def cases() -> Iterator[Row]:
    for case in CASES.values():
        draw = lambda case=case: as_jax(case.draw(), jnp.float32)
        shared = {"fn": case.fn, "axis": case.axis, "closed": case.closed, "has_aux": case.has_aux}
        yield Row(table="cases", name=case.name, draw=draw, counts=(4, 7), **shared)


def regions_and_loops() -> Iterator[Row]:
    yield from rows_of("regions", regions.FUNCTIONS, regions.BATCH, regions.ARGS, 4, 2)
    for axis in (0, 1):
        args = regions.draw(7, 7, regions.D), regions.draw(regions.D, regions.D)
        named = {f"recurrence along dimension {axis}": test_control_flow.recurrent}
        yield from rows_of("regions", named, (axis, None), args, 4, 2)
    mask = np.arange(16) < np.array([16, 16, 1, 2, 1, 1, 4, 3])[:, None]
    batch = lambda: ((*transformer.parameters(), *transformer.draw_tokens(8, 16), jnp.asarray(mask, jnp.float32)), {})
    accumulated = {"gradient accumulation": transformer.training_loss}
    yield from rows_of("regions", accumulated, (None, None, 0, 0, 0), batch, 2, 8, memory=8)


def sequences() -> Iterator[Row]:
    block = lambda: ((jnp.ones((2, 10, 16)), test_sequence.first_layer()), {})
    losses = {
        "block": transformer.block,
        "loss of a block": lambda x, w: (transformer.block(x, w) ** 2).mean(),
        "loss of a checkpointed block": lambda x, w: (jax.checkpoint(transformer.block)(x, w) ** 2).mean(),
    }
    yield from rows_of("sequence", losses, test_sequence.BLOCK, block, 4, 2, memory=4)
    mask = jnp.asarray(np.arange(10) < np.array([[10], [3]]), jnp.float32)
    model = lambda: ((*transformer.parameters(), *transformer.draw_tokens(2, 10), mask), {})
    yield from rows_of("sequence", {"model": transformer.training_loss}, test_sequence.MODEL, model, 2, 4, memory=4)


def rules() -> Iterator[Row]:
    given = lambda: ((jax.tree.map(_array, operands.arrays()),), {})
    read = lambda: ((jax.tree.map(_array, operands.arrays()), jnp.asarray(test_rules.KEPT)), {})
    for group in GROUPS:
        there = test_rules.existing(GROUPS[group])
        yield from rows_of("rules", {f"{group}, {k}": v for k, v in there.items()}, (operands.AXES,), given, 4)
        for name, fn in there.items():

            def masked(a: Any, kept: Any, fn: Callable = fn) -> Any:
                outs = jax.tree.leaves(fn(a))
                return [test_rules.read(o, kept) for o in outs if operands.L in o.shape]

            if any(operands.L in out.shape for out in jax.tree.leaves(jax.eval_shape(fn, operands.arrays()))):
                named = {f"{group}, {name}, read tile by tile": masked}
                yield from rows_of("rules", named, (test_rules.WHOLES, 0), read, 3)
    for op, table in {"sum": sums.SUMS, "max": sums.MAXIMA, "min": sums.MINIMA}.items():
        reduce = getattr(jnp, op)
        parts = draw32((operands.L, 4), (4, operands.D), (4, operands.D))
        for name, fn in test_rules.existing(table).items():

            def of_parts(x: Any, y: Any, w: Any, fn: Callable = fn, reduce: Callable = reduce) -> Any:
                return fn(reduce(jnp.sin(x[:, :, None] * y), 0), w)

            yield from rows_of("rules", {f"of a {op}, {name}": of_parts}, (0, None, None), parts, 4)
    once = test_rules.ONCE_WRONG
    for name, (fn, x) in once.items():
        counts = (min(4, len(x)),)
        yield from rows_of("rules", {name: fn}, 0, (x,), *counts, options={"gather": "any"})


def draw32(*shapes: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(jnp.asarray(np.random.default_rng(i).normal(size=s), jnp.float32) for i, s in enumerate(shapes))


def online() -> Iterator[Row]:
    (x,) = draw32((test_online.T, test_online.V))
    yield from rows_of("online", {k: fn for k, (fn, _) in test_online.REDUCTIONS.items()}, 1, (x,), 4, 2)
    losses = {f"{fn.__name__} over the vocabulary": fn for fn in test_online.LOSSES}
    yield from rows_of("online", losses, test_online.HEAD, test_online.tokens(), 4, 3)
    over_tokens = {f"{fn.__name__} over tokens": fn for fn in test_online.LOSSES}
    yield from rows_of("online", over_tokens, (0, None, 0), test_online.tokens(), 4, 3)
    some = [test_online.integer_labels, test_online.one_hot, test_online.softcap_and_z_loss, test_online.indexed]
    large = {f"{fn.__name__} over the vocabulary, large": fn for fn in some}
    yield from rows_of("online", large, test_online.HEAD, test_online.SHAPES, 8, memory=8)
    args = (*draw32((test_linear.T, test_linear.V)), jnp.asarray(test_linear.LABELS))
    yield from rows_of("online", {f"linear, {k}": v for k, v in test_linear.SUMS.items()}, test_linear.CUT, args, 4)
    heads = {f"head, {k}": functools.partial(_head, v) for k, v in test_linear.SUMS.items()}
    shapes = (*draw32((test_linear.T, test_linear.D), (test_linear.D, test_linear.V)), args[1])
    yield from rows_of("online", heads, (None, 1, None), shapes, 4)
    for name, (fn, *given) in test_rounding.SUMS.items():
        yield from rows_of("online", {f"bounded, {name}": fn}, 0, given, 2, 3)


def _head(fn: Callable, h: Any, w: Any, y: Any) -> Any:
    return -fn(h @ w, y).mean()


def attention() -> Iterator[Row]:
    there, args = test_online_attention, test_online_attention.operands()
    large = (jax.ShapeDtypeStruct((256, 16), jnp.float32),) * 3
    over = {"keys": there.KEYS, "queries": there.QUERIES}
    for name, axis in over.items():
        functions = {f"{fn.__name__} over {name}": fn for fn in there.ATTENTION}
        yield from rows_of("attention", functions, axis, args, 4, 2)
        some = {f"{fn.__name__} over {name}, large": fn for fn in (there.plain, there.causal, there.softcap)}
        yield from rows_of("attention", some, axis, large, 8, memory=8)
        library = {f"{kind} of the library over {name}": fn for kind, fn in there.LIBRARY.items()}
        axes = {"keys": (None, 1, 1), "queries": (1, None, None)}[name]
        yield from rows_of("attention", library, axes, draw32(*[(2, 6, 2, 4)] * 3), 4)
    nested = {
        "keys within queries": (lambda q, k, v: tile(there.softcap, there.KEYS, 3)(q, k, v), there.QUERIES),
        "queries within keys": (lambda q, k, v: tile(there.softcap, there.QUERIES, 2)(q, k, v), there.KEYS),
    }
    for name, (fn, axis) in nested.items():
        yield from rows_of("attention", {name: fn}, axis, args, 2)
    functions = {f"{fn.__name__}, backward": fn for fn in (*test_residuals.ONE_LOOP_BACK, test_residuals.moments)}
    functions["denominator, backward"] = test_residuals.denominator
    yield from rows_of("attention", functions, test_residuals.KEYS, test_residuals.operands(), 4, 2)
    narrow = tuple(x.astype(jnp.bfloat16) for x in draw32(*[(64, 3, 8)] * 3))
    yield from rows_of("attention", [there.heads, there.library], there.KEYS, narrow, 4, memory=4)
    rows, weights = draw32((test_recut.S, test_recut.D), (3, test_recut.D, test_recut.D))
    recut = {f"of rows to themselves, {k}": v for k, v in test_recut.FUNCTIONS.items()}
    yield from rows_of("attention", recut, (0, None), (rows, weights), 7, 12)


def neighbours() -> Iterator[Row]:
    b = test_beside
    args = draw32((b.S, b.D), (b.D, b.F), (b.F, 4))
    yield from rows_of("neighbours", b.CASES, (0, None, None), args, 4, 7)
    large = draw32((400, b.D), (b.D, b.F), (b.F, 4))
    some = {
        f"loss of {fn.__name__}, large": lambda *args, fn=fn: (fn(*args) ** 2).mean()
        for fn in (b.token_shift, b.depthwise, b.differences)
    }
    yield from rows_of("neighbours", some, (0, None, None), large, 16, memory=16)
    for fn, axis, given in test_divide.CASES:
        yield from rows_of("neighbours", {f"pieces, {fn.__name__}": fn}, axis, given, 4, 7)


def recurrences() -> Iterator[Row]:
    a = test_along
    (x,), (w,) = draw32((7, 3)), draw32((3, 3))
    for cumulative in a.CUMULATIVE:
        for reverse in (False, True):
            name = f"{cumulative.__name__}{', backwards' if reverse else ''}"
            fn = lambda x, f=cumulative, reverse=reverse: f(jnp.sin(x), axis=0, reverse=reverse)
            yield from rows_of("recurrences", {name: fn}, 0, (x,), 3, 4)
    squares = {"cumsum of outer products": lambda x: jnp.cumsum(x[:, :, None] * x[:, None, :], 0).max((1, 2))}
    yield from rows_of("recurrences", squares, 0, draw32((23, 5)), 4)
    yield from rows_of("recurrences", a.CHOICES, 1, draw32((6, 11)), 3, 4)
    words = {
        "top words": lambda h, w: lax.top_k(h @ w, 3)[0],
        "the most probable word": lambda h, w: jax.nn.softmax(h @ w)[jnp.arange(6), jnp.argmax(h @ w, -1)],
        "accuracy": lambda h, w: (jnp.argmax(h @ w, -1) == 2).mean(),
    }
    yield from rows_of("recurrences", words, (None, 1), draw32((6, 4), (4, 11)), 4)
    each = [a.mapped, a.losses, a.of_layers]
    yield from rows_of("recurrences", each, (None, 0), draw32((3, 3), (7, 4, 3)), 3)

    def recurrent(w: Any, x: Any) -> Any:
        return lax.scan(lambda s, row: ((s := jnp.tanh(s @ w + row)), 2 * s), jnp.zeros(3), x)

    yield from rows_of("recurrences", [recurrent], (None, 0), (w, x), 3, 4)
    for name, (fn, axis, args) in test_states.CASES.items():
        yield from rows_of("recurrences", {name: fn}, axis, args, 4, 3, memory=4)


def mixtures() -> Iterator[Row]:
    B, S, D, F, E = 10, 3, 8, 12, 5
    args = draw32((B, S, D), (D, E), (E, D, F), (E, D, F), (E, F, D))
    axis = (0, None, None, None, None)
    layer = functools.partial(experts, chosen=2, normalise=True)
    by_sequence = functools.partial(experts, by_sequence=True, chosen=2, normalise=True)
    functions = {
        "experts": lambda *args: layer(*args)[0],
        "experts by sequence": lambda *args: by_sequence(*args)[0],
        "experts by sequence, balanced": lambda *args: by_sequence(*args),
        "loss of experts by sequence": lambda *args: (by_sequence(*args)[0] ** 2).mean(),
    }
    for name, fn in functions.items():
        memory = 5 if "sequence" in name else None
        yield from rows_of("mixtures", {name: fn}, axis, args, 3, 5, memory=memory)


def sizes() -> Iterator[Row]:
    args = test_sizes.draw()
    functions = [test_sizes.hops, test_sizes.power, test_sizes.transport]
    yield from rows_of("sizes", functions, (0, None), args, 5, 12)
    for gather in ("small", "none"):
        picks = {
            f"{name}, gather={gather}": lambda x, w, fn=fn: (fn(jnp.tanh(x @ w)) ** 2).mean(0)
            for name, fn in test_sizes.PICKS.items()
        }
        yield from rows_of("sizes", picks, (0, None), args, 5, 12, options={"gather": gather})
    ids, segments = jnp.arange(test_sizes.L // 2) * 5 % test_sizes.L, jnp.arange(test_sizes.L) // 2
    large = {
        "rows that are picked": lambda x, w: (jnp.tanh(x @ w)[ids] ** 2).mean(),
        "sums of segments": lambda x, w: (
            jax.ops.segment_sum(jnp.tanh(x @ w), segments, test_sizes.L // 2) ** 2
        ).mean(),
    }
    for gather in ("small", "any"):
        named = {f"{name}, gather={gather}": fn for name, fn in large.items()}
        yield from rows_of("sizes", named, (0, None), args, 12, options={"gather": gather})
    a, x = draw32((5, 5), (48, 5))
    a = jnp.tril(a) + 3 * jnp.eye(5)
    yield from rows_of("sizes", {f"solve, {k}": v for k, v in test_solves.SOLVES.items()}, (None, 0), (a, x), 7)
    shape = (test_random.L, test_random.D)
    random = {f"random {k}": test_random.added(v, test_random.KEY, shape) for k, v in test_random.MAKES.items()}
    yield from rows_of("sizes", random, 0, (jnp.ones(shape),), 4)


def comparisons() -> Iterator[Row]:
    r = test_rounding
    yield from rows_of("comparisons", r.STORED, 0, (r.X, r.Y), 2, 7)
    agreed = {f"{name} over the vocabulary": fn for name, fn in r.AGREED.items()}
    yield from rows_of("comparisons", agreed, (None, 1, None), (r.H, r.W, r.LABELS), 3, 7)
    placed = {f"{name} of groups": fn for name, fn in r.PLACED.items()}
    yield from rows_of("comparisons", placed, (0, None), (r.draw(7, 24, 4), r.W), 3)
    median = {"above the median of the vocabulary": lambda h, w: (h @ w >= jnp.sort(h @ w, -1)[:, 30:31]).sum()}
    yield from rows_of("comparisons", median, (None, 1), (r.H, r.W), 4)


def losses() -> Iterator[Row]:
    for axis, along in enumerate(("examples", "classes")):
        for name, (names, fn) in test_losses.LOSSES.items():
            args = tuple(test_losses.data()[n] for n in names)
            named = {f"{name} over {along}": fn}
            yield from rows_of("losses", named, test_losses.cut(names, axis), args, 4)
    axes = {"examples": (0, 0, 0, 0), "steps": (1, 1, None, None), "classes": (2, None, None, None)}
    for along, axis in axes.items():
        named = {
            f"{name} over {along}": lambda *args, fn=fn: jax.tree.leaves(fn(*args))[0]
            for name, fn in test_losses.SEQUENCES.items()
        }
        yield from rows_of("losses", named, axis, test_losses.sequences(), 4)


def options() -> Iterator[Row]:
    policies = jax.checkpoint_policies
    named = {
        "none": None,
        "up": policies.save_only_these_names("up"),
        "other": policies.save_only_these_names("other"),
        "dots": policies.dots_saveable,
        "everything": policies.everything_saveable,
        "offloaded": test_keep.OFFLOAD,
    }
    for name, policy in named.items():
        row = {f"mlp, policy {name}": test_keep.mlp}
        yield from rows_of("options", row, (0, None, None), test_keep.arrays(), 4, options={"policy": policy}, memory=4)
    lowmem = [test_lowmem.mean_loss, test_lowmem.perplexity, test_lowmem.softcapped, test_lowmem.token_losses]
    low = {f"{fn.__name__}, lowmem": fn for fn in lowmem}
    yield from rows_of("options", low, (0, None, 0), test_lowmem.draw(), 3, options={"lowmem": True}, memory=3)
    for name, (fn, weights, _) in test_effects.CASES.items():
        yield from rows_of("options", {f"effects, {name}": fn}, (0, None), (test_effects.X, weights), 3)
    kernels = [frozen(test_kernel.rows), frozen(test_kernel.turned), frozen(test_kernel.added)]
    both = {f"kernel, {fn.__name__}": fn for fn in (*kernels, test_kernel.differentiated)}
    yield from rows_of("options", both, (0, None), (test_kernel.X, test_kernel.W), 4, 8, by="size")
    for reason, (fn, size) in test_kernel.REFUSED.items():
        row = {f"kernel that {reason}": frozen(lambda x, fn=fn: fn(jnp.sin(x)) * 2)}
        yield from rows_of("options", row, 0, (test_kernel.X,), size, by="size", options={"gather": "none"})


MEASURED = (
    "head, 8 tiles",
    "head, ragged",
    "head, transposed",
    "softcap and z-loss",
    "perplexity",
    "distillation",
    "preference",
    "entropy",
    "gated MLP, 4 tiles",
    "gated MLP, hidden axis",
    "regression",
    "attention over queries, 8 tiles",
    "heads over keys",
    "layers",
)


def estimates() -> Iterator[Row]:
    for name, (fn, axis, n, shapes) in test_estimate.CASES.items():
        memory = n if name in MEASURED else None
        yield from rows_of("estimates", {name: fn}, axis, shapes, n, memory=memory)


def meshes() -> Iterator[Row]:
    there = test_spread
    for name in there.LAYOUTS:

        def draw(name: str = name) -> tuple[tuple, dict]:
            return tuple(there.spread(there.mesh_of(name), name, there.arguments())), {}

        around = lambda name=name: jax.set_mesh(there.mesh_of(name))
        for number, fn in enumerate(there.FUNCTIONS):
            axis = (number + len(name)) % 2
            row = {f"{fn.__name__}, {name}, dimension {axis}": there.gathering(name, fn)}
            yield from rows_of("meshes", row, (None, axis, axis, axis), draw, 3 + number, around=around)
        for sync in ("once", "tile"):
            row = {f"cross_entropy, {name}, sync={sync}": there.gathering(name, there.cross_entropy)}
            axis = (None, 1, 1, 1)
            yield from rows_of("meshes", row, axis, draw, 3, around=around, options={"sync": sync})
    smooth = ("psum", "ppermute", "all_gather", "reduce_scatter")
    table = test_collective.COLLECTIVES.items()
    collective = {f"in shard_map, {k}": fn if k in smooth else frozen(fn) for k, fn in table}
    block = drawn(jnp.ones((test_collective.L, 8), jnp.float32))
    yield from rows_of("meshes", collective, 0, block, 3, inside=test_collective.on_devices)


TABLES: Iterable[Callable[[], Iterator[Row]]] = (
    cases,
    regions_and_loops,
    sequences,
    rules,
    online,
    attention,
    neighbours,
    recurrences,
    mixtures,
    sizes,
    comparisons,
    losses,
    options,
    estimates,
    meshes,
)


@functools.cache
def rows() -> dict[str, Row]:
    """All rows by their full names."""
    found: dict[str, Row] = {}
    for table in TABLES:
        for row in table():
            name = f"{row.table}: {row.name}"
            assert name not in found, f"two rows are named {name}"
            found[name] = row
    return found
