"""`tile`: a function, walked along one axis a slice at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from transforms.derive import call
from transforms.placement import WHOLE, Placement, Tiled
from transforms.program import Options, Program


def tile(
    fn: Callable[..., Any],
    axis: Any,
    n: int | None = None,
    *,
    size: int | None = None,
    has_aux: bool = False,
    gather: str = "small",
    accumulate: Any = jnp.float32,
) -> Callable[..., Any]:
    def prepare(args, kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_array = [eqx.is_array(x) or isinstance(x, (np.ndarray, np.generic, jax.ShapeDtypeStruct)) for x in leaves]
        arrays = [x for x, k in zip(leaves, is_array) if k]
        dims_tree = jax.tree.broadcast if False else None
        placements, total = place(axis, args, kwargs)
        out = {}

        def flat(*arrays):
            it = iter(arrays)
            a, k = jax.tree.unflatten(tree, [next(it) if k else x for x, k in zip(leaves, is_array)])
            result = fn(*a, **k)
            dyn, out["static"] = eqx.partition(result, eqx.is_array_like)
            flat_out, out["tree"] = jax.tree.flatten(dyn)
            if has_aux:
                out["main"] = len(jax.tree.leaves(dyn[0]))
                flat_out = flat_out[: out["main"]] + [jax.lax.stop_gradient(x) for x in flat_out[out["main"] :]]
            return flat_out

        closed = jax.make_jaxpr(flat)(*arrays)
        consts = closed.consts
        jaxpr = closed.jaxpr.replace(constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars])
        closed = jax.extend.core.ClosedJaxpr(jaxpr, ())
        t = size if size is not None else -(-total // n)
        options = Options(total, t, gather, accumulate)
        program = Program(closed, (WHOLE,) * len(consts) + tuple(placements), options)
        return program, [*consts, *arrays], out

    @functools.wraps(fn)
    def tiled(*args, **kwargs):
        program, inputs, out = prepare(args, kwargs)
        results = call(program, *inputs)
        return eqx.combine(jax.tree.unflatten(out["tree"], results), out["static"])

    tiled.prepare = prepare
    return tiled


def place(axis, args, kwargs):
    placements, totals = [], set()

    def one(x, d):
        if not (eqx.is_array(x) or isinstance(x, (np.ndarray, np.generic, jax.ShapeDtypeStruct))):
            return
        if d is None or x.ndim == 0:
            placements.append(WHOLE)
        else:
            totals.add(x.shape[d])
            placements.append(Tiled(d % x.ndim))

    axes = axis if isinstance(axis, (tuple, list)) else (axis,) * len(args)
    for a, d in zip(args, axes):
        for x in jax.tree.leaves(a):
            one(x, None if isinstance(a, eqx.Module) else d)
    for x in jax.tree.leaves(kwargs):
        one(x, None)
    (total,) = totals
    return placements, total
