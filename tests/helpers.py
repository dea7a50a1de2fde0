"""What every test of a tiled function asserts: value, aux, structure, dtypes and gradients equal the untiled ones.

A function is *probed* under one jit: value, aux and the vector-Jacobian product with a random cotangent, for every
inexact array among its arguments. Its forward mode, its batched and its checkpointed forms are probed the same way.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from tests.quick import OPTIMISED, QUICK
from transforms import TileError, tile
from transforms.tiling.autodiff.program import collections_paused
from transforms.tiling.report.plan import TilePlan, explain

FLOAT32, FLOAT64 = 3e-5, 1e-9  # relative to the largest magnitude of each leaf
MODES = ("grad", "jvp", "vmap", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function with its arguments and everything random that a comparison needs."""

    fn: Callable
    args: tuple
    kwargs: dict
    has_aux: bool

    def split(self) -> tuple[Any, Any, Any]:
        """Return the arguments as (differentiated arrays, other arrays, the rest)."""
        differentiated, other = eqx.partition((self.args, self.kwargs), eqx.is_inexact_array)
        return differentiated, *eqx.partition(other, eqx.is_array)

    def apply(self, fn: Callable, differentiated: Any, other: Any) -> tuple[Any, Any]:
        """Return `(out, aux)` of `fn` at these arrays."""
        args, kwargs = eqx.combine(differentiated, other, self.split()[2])
        result = fn(*args, **kwargs)
        return result if self.has_aux else (result, ())


def as_jax(tree: Any, dtype: Any) -> Any:
    """Cast float32 and float64 arrays to `dtype`, no other leaf; nothing is compiled."""

    def cast(leaf):
        if not eqx.is_array(leaf) and not isinstance(leaf, np.ndarray):
            return leaf
        wide = leaf.dtype in (np.dtype("float32"), np.dtype("float64"))
        return jax.device_put(np.asarray(leaf).astype(dtype) if wide else leaf)

    return jtu.tree_map(cast, tree)


def tiled(fn: Callable, axis: Any, n: int, has_aux: bool = False, closed: int = 0) -> Callable:
    """Return `fn` tiled over its arguments after the first `closed`, which the tiled function closes over."""
    if closed == 0:
        return tile(fn, axis, n, has_aux=has_aux)
    return lambda *args: tile(lambda *rest: fn(*args[:closed], *rest), axis, n, has_aux=has_aux)(*args[closed:])


def planned(tiled: Callable, *args: Any) -> tuple[TilePlan, Callable]:
    """Return how this call is tiled, and the call itself of other arrays like these, which is not planned once more."""
    with collections_paused():
        traced = tiled._tracer.trace(args, {})
        plan = explain(traced.program)

    def call(*args):
        with collections_paused():
            return traced.form.build(traced.run(args), [])

    return plan, call


def random_like(tree: Any, seed: int) -> Any:
    """Return standard normal values of the shapes and dtypes of `tree`'s inexact leaves; float0 zeros for others."""
    rng = np.random.default_rng(seed)

    def like(leaf):
        leaf = jax.eval_shape(lambda: leaf) if not hasattr(leaf, "dtype") else leaf
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return np.zeros(leaf.shape, jax.dtypes.float0)
        value = rng.standard_normal(leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            value = value + 1j * rng.standard_normal(leaf.shape)
        return np.asarray(value).astype(leaf.dtype)

    return jtu.tree_map(like, tree)


def probe(call: Call, fn: Callable, mode: str = "grad") -> tuple[Callable, tuple]:
    """Return a jittable function of arrays alone, and its arguments, that gives all that is compared in `mode`."""
    differentiated, other, _ = call.split()
    cotangent = random_like(jax.eval_shape(lambda a, b: call.apply(call.fn, a, b)[0], differentiated, other), 0)

    def pull(f, differentiated, other):
        out, vjp, aux = jax.vjp(lambda a: call.apply(f, a, other), differentiated, has_aux=True)
        return {"out": out, "aux": aux, "grads": vjp(cotangent)[0]}

    if mode == "jvp":
        tangent = random_like(differentiated, 1)

        def push(differentiated, other):
            out, moved = jax.jvp(lambda a: call.apply(fn, a, other)[0], (differentiated,), (tangent,))
            return {"out": out, "jvp": jtu.tree_map(_without_float0, moved)}

        return push, (differentiated, other)
    if mode == "vmap":
        leaves, treedef = jtu.tree_flatten(differentiated)
        first = np.asarray(leaves[0])
        leaves = [np.stack([first, (0.5 * first).astype(first.dtype)]), *leaves[1:]]
        axes = (jtu.tree_unflatten(treedef, [0] + [None] * (len(leaves) - 1)), None)
        return jax.vmap(lambda a, b: pull(fn, a, b), axes), (jtu.tree_unflatten(treedef, leaves), other)
    if mode == "checkpoint":
        return lambda a, b: pull(_checkpointed(fn), a, b), (differentiated, other)
    return lambda a, b: pull(fn, a, b), (differentiated, other)


def _checkpointed(fn: Callable) -> Callable:
    """`jax.checkpoint` for arguments that are not all arrays."""

    def apply(*args, **kwargs):
        arrays, rest = eqx.partition((args, kwargs), eqx.is_array)

        def of_arrays(arrays):
            args, kwargs = eqx.combine(arrays, rest)
            return fn(*args, **kwargs)

        return jax.checkpoint(of_arrays)(arrays)

    return apply


def _without_float0(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, bool) if leaf.dtype == jax.dtypes.float0 else leaf


def evaluate(call: Call, fn: Callable, mode: str = "grad", fast: bool = False) -> Any:
    """Run `probe` under jit; `fast` leaves out the optimisation of machine code, most of the time of small tests."""
    function, arrays = probe(call, fn, mode)
    return jax.jit(function, **(QUICK if fast else {"compiler_options": OPTIMISED}))(*arrays)


def assert_same(got: Any, want: Any, tolerance: float, where: str = "", floor: float = 0.0) -> None:
    """Assert equal structure, shapes and dtypes, equal integers, and floats within `tolerance` of the largest."""
    got_paths, got_tree = jtu.tree_flatten_with_path(got)
    want_paths, want_tree = jtu.tree_flatten_with_path(want)
    assert got_tree == want_tree, f"{where}: structure {got_tree}, untiled {want_tree}"
    wrong = []
    for (path, a), (_, b) in zip(got_paths, want_paths, strict=True):
        name = f"{where}{jtu.keystr(path)}"
        if (jnp.shape(a), jnp.result_type(a)) != (jnp.shape(b), jnp.result_type(b)):
            wrong.append(f"{name}: {jnp.result_type(a)}{jnp.shape(a)}, untiled {jnp.result_type(b)}{jnp.shape(b)}")
        elif (error := relative_error(a, b, floor)) > tolerance:
            wrong.append(f"{name}: relative error {error:.1e} > {tolerance:.0e}")
    assert not wrong, "\n".join(wrong)


def relative_error(got: Any, want: Any, floor: float = 0.0) -> float:
    """Return the largest difference relative to the largest magnitude or `floor`; infinite where integers differ."""
    if jnp.issubdtype(jnp.result_type(want), jnp.inexact):
        wide = np.complex128 if jnp.issubdtype(jnp.result_type(want), jnp.complexfloating) else np.float64
        a, b = np.asarray(got).astype(wide), np.asarray(want).astype(wide)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        if same.all():
            return 0.0
        scale = np.abs(b[np.isfinite(b)]).max(initial=floor)
        error = np.abs(np.where(same, 0.0, a) - np.where(same, 0.0, b)).max()
        return float(error / scale) if np.isfinite(error) and scale > 0 else math.inf
    return 0.0 if np.array_equal(np.asarray(got), np.asarray(want)) else math.inf


def assert_tiles(
    fn: Callable,
    axis: Any,
    n: int | tuple[int, ...],
    args: tuple,
    has_aux: bool = False,
    *,
    kwargs: dict | None = None,
    modes: tuple[str, ...] = ("grad",),
    dtype: Any = jnp.float32,
    tolerance: float | None = None,
    closed: int = 0,
    may_refuse: bool = False,
    fast: bool = False,
    floor: float = 0.0,
    oracle: bool = False,
) -> bool:
    """Assert that `tile(fn, axis, n, has_aux)` equals `fn` in every mode, for every n.

    Args:
      modes: of `MODES`; "grad" compares value, aux and gradients, the others the same under that transformation.
      dtype: float32, or float64 (which needs `jax.enable_x64`).
      closed: how many leading arguments the tiled function closes over.
      may_refuse: whether `TileError` is returned as False; for programs that nobody has seen.
      fast: compile every n with little optimisation, rather than every n but the first.
      floor: a magnitude below which errors are absolute, for gradients that cancel to zero.
      oracle: compare with `fn` in float64, rounded, in place of `fn` itself.

    Returns:
      Whether every call tiled rather than refused.
    """
    tolerance = tolerance or (FLOAT64 if dtype == jnp.float64 else FLOAT32)
    call = Call(fn=fn, args=as_jax(args, dtype), kwargs=as_jax(kwargs or {}, dtype), has_aux=has_aux)
    all_tiled = True
    for mode in modes:
        want = evaluate(call, fn, mode, fast=True)
        if oracle and dtype == jnp.float32:
            with jax.enable_x64(True):
                wide = dataclasses.replace(
                    call, args=as_jax(call.args, jnp.float64), kwargs=as_jax(call.kwargs, jnp.float64)
                )
                exact = evaluate(wide, fn, mode, fast=True)
            want = jtu.tree_map(lambda rounded, value: np.asarray(value).astype(rounded.dtype), want, exact)
        for i, count in enumerate((n,) if isinstance(n, int) else n):
            try:
                got = evaluate(call, tiled(fn, axis, count, has_aux, closed), mode, fast or i > 0)
            except TileError:
                if not may_refuse:
                    raise
                all_tiled = False
                continue
            assert_same(got, want, tolerance, f"n={count} {mode} ", floor)
    return all_tiled


def subjaxprs(value: Any) -> Iterator[Any]:
    """Yield the jaxprs inside one equation's parameter."""
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield from subjaxprs(value.jaxpr)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from subjaxprs(item)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield every equation, those of nested jaxprs after the one that holds them."""
    for eqn in (jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr).eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in subjaxprs(value):
                yield from equations(inner)


def largest(jaxpr: Any) -> int:
    """Return the elements of the largest array that any equation makes."""
    return max((math.prod(v.aval.shape) for e in equations(jaxpr) for v in e.outvars if _is_array(v)), default=0)


def _is_array(var: Any) -> bool:
    return hasattr(var.aval, "shape")


def assert_no_large(jaxpr: Any, limit_elements: int) -> None:
    """Assert that no equation, nested ones included, makes an array of `limit_elements` or more."""
    wrong = [
        f"{eqn.primitive} makes {var.aval.str_short()}"
        for eqn in equations(jaxpr)
        for var in eqn.outvars
        if _is_array(var) and math.prod(var.aval.shape) >= limit_elements
    ]
    assert not wrong, f"arrays of {limit_elements} elements or more: " + ", ".join(sorted(set(wrong)))
