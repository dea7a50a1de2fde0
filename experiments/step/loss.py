"""The loss of a step's batch: the model makes hidden states of its tokens, of which the objective makes a number.

In: a run and its objective. Out: `loss(model, batch) -> (scalar, dict of scalars)`, each part cut as `tiling` says.

`B` batch `S` sequence `T` tokens (B*S) `D` embed.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from experiments import configs
from experiments.step import tiling
from transforms.offload import fetch
from transforms.remat import Remat
from transforms.sharding import explicit, partitions, place, uncut
from zoo import ForwardPass
from zoo.adapters import lora
from zoo.models.layers import PLAIN, Fetched, Ops
from zoo.models.mixtures.experts import experts


def build(
    config: configs.Resolved, objective: Callable[..., Any], dtype: Any, kept: Remat | None, *, balanced: bool
) -> Callable[..., Any]:
    """Return the loss of a batch, of `inputs`.

    Args:
        config: the run.
        objective: what is minimised, of hidden states (`objectives`).
        dtype: what the model computes in.
        kept: what the backward pass keeps of each layer.
        balanced: whether what a mixture's experts are used unevenly is added, weighted as the model's config says.
    """
    asked, flat = config.tiling, config.head.flat
    ops = functools.partial(tiling.ops, config)
    head = tiling.head(objective, asked, config.head)

    def mean(model, others, arrays):
        tokens, targets, mask, segments = jax.tree.map(jnp.asarray, arrays)
        if "params" in config.hardware.offloaded:
            model, *others = map(_fetched, (model, *others))
        rows: Any = lambda x: None if x is None else x.reshape(-1, x.shape[-1])
        reader, model = _share_table(model, rows(tokens)) if asked.batch is None else (model, model)
        lead = (-1,) if flat else tokens.shape
        as_head = lambda hidden: hidden.reshape(*lead, hidden.shape[-1])
        how: Any = {"segments": rows(segments), "dtype": dtype}
        parts = ops(config.model.config)
        if weight := getattr(model.config, "balance_weight", 0.0) if balanced else 0.0:
            parts = _counting(parts or PLAIN, _until_the_last(rows(mask)))
        hidden, extra = _read(reader, rows(tokens), weight, remat=kept, ops=parts, **how)
        still = lambda one: one.hidden(rows(tokens), ops=ops(one.config), **how)
        fixed = [jax.lax.stop_gradient(still(one)) for one in others]
        hiddens = tuple(map(as_head, (hidden, *fixed)))
        value, aux = head((model, *others), hiddens, targets.reshape(lead), mask.reshape(lead))
        return value + extra, aux

    cut = tiling.batch(mean, asked)

    def loss(model, batch):
        tokens, targets, mask, segments, other = (*batch, None, None)[:5]
        others = () if other is None else (other,)
        if config.beside_its_base:
            others = (lora.detach(model),)
        return cut(model, others, (tokens, targets, mask, segments))

    return loss


def inputs(arrays: tuple[Any, ...], other: Any) -> tuple[Any, ...]:
    """Return a step's batch: a source's arrays, and the frozen model if there is one."""
    return arrays if other is None else (*arrays, *[None] * (4 - len(arrays)), other)


def stacks(model: Any) -> Any:
    """Return which leaves of a model, or of a part of it, are stacks of layers."""
    whole = jax.tree.map(lambda _: False, model)
    found = lambda model: [*model.stacks.values()]
    return eqx.tree_at(found, whole, replace_fn=lambda stack: jax.tree.map(lambda _: True, stack))


def _read(model: Any, ids: Any, weight: float, **asked: Any) -> tuple[jax.Array, Any]:
    """Return hidden states, and what is added to the loss for experts that are used unevenly, weighted so."""
    if not weight:
        return model.hidden(ids, **asked), 0.0
    out = model.forward(ids, ForwardPass(**asked))
    return out.hidden, weight * out.balance


def _until_the_last(mask: jax.Array) -> jax.Array:
    """Return which tokens of each row stand no later than the last whose target is learned: padding stands behind."""
    lies, learned = PartitionSpec(*partitions(mask)), uncut(mask, 1) > 0
    return place(jax.lax.cummax(learned.astype(jnp.int32), axis=1, reverse=True) > 0, lies)


def _counting(ops: Ops, counted: jax.Array) -> Ops:
    """Return how a model's parts run where the balance loss is of some tokens."""
    return dataclasses.replace(ops, experts=functools.partial(ops.experts or experts, counted=counted))


def _fetched(model: Any) -> Any:
    """Return a model in host memory with all on the device but its layers, which their scan fetches one by one."""
    layers, rest = eqx.partition(model, stacks(model))
    return eqx.combine(layers, fetch(rest))


def _share_table(model: Any, tokens: jax.Array) -> tuple[Any, Any]:
    """Return (a model to compute `hidden` of these tokens with, a model for the head), with the same values.

    A tied table has two gradients, dense from the head and a few rows from the lookup. Left to themselves they are two
    arrays [V, D] and their sum; here the rows are added into the head's. The first model has this batch's rows alone.
    """
    if tokens.size >= model.embed.shape[0] or explicit():  # rows would be gathered by all devices
        return model, model
    table, rows = _table_and_rows(model.embed, tokens)
    replace = lambda embed: eqx.tree_at(lambda m: m.embed, model, embed)
    return replace(Fetched(rows)), replace(table)


@jax.custom_vjp
def _table_and_rows(table, ids):
    return table, table[ids].astype(jnp.promote_types(table.dtype, jnp.float32))


def _table_and_rows_fwd(table, ids):
    return _table_and_rows(table, ids), ids


def _table_and_rows_bwd(ids, gradients):
    table, rows = gradients
    return table.astype(rows.dtype).at[ids].add(rows).astype(table.dtype), None


_table_and_rows.defvjp(_table_and_rows_fwd, _table_and_rows_bwd)
