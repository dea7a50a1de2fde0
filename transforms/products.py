"""Matrix products of bfloat16 as bfloat16: no float32 copies of operands, in the form for which XLA has kernels.

What was made float32 from bfloat16 has the same products as the bfloat16, which every device makes faster.

On CPUs XLA multiplies bfloat16 as it is, sums in float32, and copies nothing, where the result is float32, both
operands have two rows at least, and what is summed lies last in the left one. Of any other product it makes float32
copies of the operands first: twice the time, and the memory of the copies. The same numbers come of products of the
former kind: a float32 result that is rounded in the end, and a summed dimension taken as two, which XLA puts last by a
copy in 16 bits.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, Literal, Var, jaxpr_as_fun
from jax.typing import DTypeLike

from transforms.tiling.ir.jaxprs import rewritten

Dims = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]  # as `lax.dot_general` has them
OPAQUE = ("pallas_call", "shard_map")  # bodies that are not whole programs of one device


def has_kernel(lhs: Any, rhs: Any, dims: Dims, dtype: DTypeLike) -> bool:
    """Whether `multiply` needs no copy in float32, of arrays or what has their shapes and dtypes."""
    contract, batch = dims
    if any(x.dtype != jnp.bfloat16 for x in (lhs, rhs)) or dtype not in (jnp.bfloat16, jnp.float32):
        return False
    for x, summed, batched in zip((lhs, rhs), contract, batch, strict=True):
        known = (n for d, n in enumerate(x.shape) if d not in (*summed, *batched) and isinstance(n, int))
        if math.prod(known) < 2:  # dimensions that are left open may be one
            return False
    length = lhs.shape[contract[0][0]] if _twice(lhs, dims) else 2
    return isinstance(length, int) and length % 2 == 0


def is_kernel(lhs: Any, rhs: Any, dims: Dims, dtype: DTypeLike) -> bool:
    """Whether `lax.dot_general` with a result of `dtype` is of that form as it stands."""
    return has_kernel(lhs, rhs, dims, dtype) and dtype == jnp.float32 and not _twice(lhs, dims)


def multiply(lhs: jax.Array, rhs: jax.Array, dims: Dims, dtype: DTypeLike) -> jax.Array:
    """Return `lax.dot_general(lhs, rhs, dims)` in float32, rounded to `dtype`, in the form that has a kernel."""
    contract, batch = dims
    if _twice(lhs, dims):
        twice = lambda x, d: x.reshape(*x.shape[:d], x.shape[d] // 2, 2, *x.shape[d + 1 :])
        lhs, rhs = (twice(x, d) for x, (d,) in zip((lhs, rhs), contract, strict=True))
        beside = [tuple(b + (b > d) for b in own) for own, (d,) in zip(batch, contract, strict=True)]
        ((left,), (right,)) = contract
        dims = ((left, left + 1), (right, right + 1)), (beside[0], beside[1])
    return lax.dot_general(lhs, rhs, dims, preferred_element_type=jnp.float32).astype(dtype)


def usual(precision: Any) -> bool:
    """Whether a product names no algorithm, which would be one of its operands' dtypes."""
    return precision is None or all(isinstance(one, lax.Precision) for one in jax.tree.leaves(precision))


def _twice(lhs: Any, dims: Dims) -> bool:
    """Whether the one summed dimension does not lie last in the left operand: it is to be taken as two."""
    summed = dims[0][0]
    return len(summed) == 1 and summed[0] != len(lhs.shape) - 1


@jax.custom_jvp
def pulled_back_in_bfloat16(x: jax.Array) -> jax.Array:
    """Return `x`, whose cotangent is rounded to bfloat16.

    Of a float32 sum of products of bfloat16: its gradients are products of bfloat16 then, and summed as widely.
    """
    return x


@pulled_back_in_bfloat16.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (along,) = primals, tangents
    return x, along.astype(jnp.bfloat16).astype(x.dtype)


def narrowed(fn: Callable[..., Any], kernels: bool = False) -> Callable[..., Any]:
    """Return `fn`, of arrays, whose products of bfloat16 are made of bfloat16. What it returns is what it was.

    An operand that was made float32 from bfloat16 is multiplied as the bfloat16 that it was, and summed in float32. It
    rewrites the traced program, so it belongs around whole steps, gradients and all.

    Args:
        fn: a function of arrays, or of trees of them.
        kernels: put products into the form that has a kernel on a CPU: for programs that run on one.
    """

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        results = jaxpr_as_fun(_Narrowing(kernels).within(closed))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


class _Narrowing:
    """A rewriting of one program. Bodies that equations share they share afterwards: each is compiled once."""

    def __init__(self, kernels: bool):
        self.kernels = kernels
        self.known: dict[int, tuple[Any, Any]] = {}  # what a parameter was, and what has become of it
        self.narrow: dict[Any, Any] = {}  # what each float32 array was made from, in bfloat16

    def within(self, param: Any) -> Any:
        """A parameter of an equation, with bodies rewritten; itself, where nothing changes."""
        if id(param) not in self.known:
            self.known[id(param)] = param, rewritten(param, self._equations)
        return self.known[id(param)][1]

    def _equations(self, eqn: Any) -> list[Any]:
        """What stands for an equation: its product, and those of its bodies, of bfloat16 where they can be."""
        name = eqn.primitive.name
        if name == "dot_general" and usual(eqn.params["precision"]):
            return self._product(eqn)
        if name == "convert_element_type":
            self.narrow |= _source(eqn)
        params = eqn.params if name in OPAQUE else {key: self.within(value) for key, value in eqn.params.items()}
        changed = any(params[key] is not value for key, value in eqn.params.items())
        return [eqn.replace(params=params) if changed else eqn]

    def _product(self, eqn: Any) -> list[Any]:
        """The equations of a product, which reads the bfloat16 that both operands were, if its result is float32."""
        (out,), dims = eqn.outvars, eqn.params["dimension_numbers"]
        found = [v if isinstance(v, Literal) else self.narrow.get(v, v) for v in eqn.invars]
        same = out.aval.dtype == jnp.float32 and all(v.aval.dtype == jnp.bfloat16 for v in found)
        operands = found if same else eqn.invars
        ready = is_kernel(*(v.aval for v in operands), dims, out.aval.dtype)
        if self.kernels and not ready and has_kernel(*(v.aval for v in operands), dims, out.aval.dtype):
            return _inlined(_traced(*(v.aval.shape for v in operands), dims, out.aval.dtype), operands, eqn)
        if all(map(operator.is_, operands, eqn.invars)):
            return [eqn]
        params = eqn.params | {"preferred_element_type": jnp.dtype(jnp.float32)}
        return [eqn.replace(invars=operands, params=params)]


def _source(eqn: Any) -> dict[Any, Any]:
    """What a conversion to float32 was made from, in bfloat16."""
    (made,), (source,) = eqn.outvars, eqn.invars
    return {made: source} if (source.aval.dtype, made.aval.dtype) == (jnp.bfloat16, jnp.float32) else {}


@functools.cache
def _traced(lhs: tuple[int, ...], rhs: tuple[int, ...], dims: Dims, dtype: Any) -> Jaxpr:
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (lhs, rhs)]
    return jax.make_jaxpr(lambda lhs, rhs: multiply(lhs, rhs, dims, dtype))(*operands).jaxpr


def _inlined(made: Any, operands: Sequence[Any], eqn: Any) -> list[Any]:
    """The equations of a traced product, in the place of one."""
    own = dict(zip([*made.invars, *made.outvars], [*operands, *eqn.outvars], strict=True))
    for inner in made.eqns:
        own |= {v: Var(v.aval) for v in inner.outvars if v not in own}
    renamed = lambda atoms: [v if isinstance(v, Literal) else own[v] for v in atoms]
    return [
        inner.replace(invars=renamed(inner.invars), outvars=renamed(inner.outvars), source_info=eqn.source_info)
        for inner in made.eqns
    ]
