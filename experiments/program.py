"""The compiled programs of a run, made from shapes alone: the training step, the evaluation step, and their parts.

`B` batch `S` sequence `T` tokens (B*S) `D` embed.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import ShapeDtypeStruct as Shape

from experiments import configs, optimizer, tiled, tiles
from transforms.remat import remat
from transforms.step import State, all_parameters, compile_step, make_eval_step, make_train_step
from zoo import Mixture, lora, model_class


def head_loss(model: Any, hidden: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the tokens that count, in nats; tokens are [T] or [B, S]."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), targets)
    return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def make_loss(config: configs.Resolved, *, balanced: bool = True) -> Any:
    """Return `loss(model, batch) -> (mean loss, {})` for batches of (tokens, targets, mask), each [B, S].

    With `balanced`, what a mixture's experts are used unevenly is added, weighted as the model's config says.
    """
    how = {"dtype": _dtype(config.hardware.compute_dtype), "remat": remat(config.remat.policy)}
    head, ops = tiled.head(config, head_loss), tiled.ops(config)

    def whole(model, batch):
        tokens, targets, mask = batch
        reader, ids, model = _share_table(model, tokens)
        hidden, extra = read(reader, ids, ops=ops, **how)
        flat = (x.reshape(-1, *x.shape[2:]) for x in (hidden, targets, mask))
        return head(model, *flat) + extra

    def in_micro_batches(model, batch):
        tokens, targets, mask = batch
        hidden, extra = read(model, tokens, ops=ops, **how)
        return head(model, hidden, targets, mask) + extra

    def read(reader, ids, **how):
        if not (balanced and isinstance(reader, Mixture)):
            return reader.hidden(ids, **how), 0.0
        hidden, balance = reader.hidden_and_balance(ids, **how)
        return hidden, reader.config.balance_weight * balance

    mean = whole if config.tiling.batch is None else tiled.batch(config, in_micro_batches)
    return lambda model, batch: (mean(model, batch), {})


def _share_table(model: Any, tokens: jax.Array) -> tuple[Any, jax.Array, Any]:
    """Return (a model to compute `hidden` with, its token ids, a model for the head), with the same values.

    A tied table has two gradients, dense from the head and a few rows from the lookup. Left to themselves they are two
    arrays [V, D] and their sum; here the rows are added into the head's. The first model's table is this batch's rows.
    """
    if tokens.size >= model.embed.shape[0]:
        return model, tokens, model
    table, rows = _table_and_rows(model.embed, tokens.reshape(-1))
    replace = lambda embed: eqx.tree_at(lambda m: m.embed, model, embed)
    return replace(rows), jnp.arange(tokens.size, dtype=tokens.dtype).reshape(tokens.shape), replace(table)


@jax.custom_vjp
def _table_and_rows(table, ids):
    return table, table[ids].astype(jnp.promote_types(table.dtype, jnp.float32))


def _table_and_rows_fwd(table, ids):
    return _table_and_rows(table, ids), ids


def _table_and_rows_bwd(ids, gradients):
    table, rows = gradients
    return table.astype(rows.dtype).at[ids].add(rows).astype(table.dtype), None


_table_and_rows.defvjp(_table_and_rows_fwd, _table_and_rows_bwd)


def init_model(config: configs.Resolved) -> Any:
    """Return a model with random weights, or the one at `model.weights`; with its adapter, where it gets one.

    Raises:
        ValueError: the weights do not make the model that their folder describes, or it has no such matrices to adapt.
    """
    dtype = _dtype(config.hardware.param_dtype)
    if config.model.weights is not None:
        import zoo

        return _adapt(zoo.load(config.model.weights, dtype=dtype), config)
    return _adapt(draw_model(config.model.config, config.seed, configs.chosen(config.hardware.param_dtype)), config)


def draw_model(config: Any, seed: int, dtype: configs.DType) -> Any:
    """Return a model of an architecture, with random weights."""
    return model_class(config).init(config, key=_key(seed), dtype=_dtype(dtype))


def _adapt(model: Any, config: configs.Resolved) -> Any:
    adapter = config.adapter
    if not isinstance(adapter, configs.Lora):
        return model
    return lora.attach(model, adapter.patterns, rank=adapter.rank, alpha=adapter.alpha, key=_key(config.seed + 1))


def trainable(config: configs.Resolved) -> Callable[[Any], Any]:
    """Return what says which leaves of a model are trained."""
    return lora.trainable if isinstance(config.adapter, configs.Lora) else all_parameters


def abstract_state(config: configs.Resolved) -> State:
    """Return the shapes and types of everything that a step changes; allocates nothing."""
    init = model_class(config.model.config).init
    make = functools.partial(init, config.model.config, dtype=_dtype(config.hardware.param_dtype))
    model = eqx.filter_eval_shape(lambda: _adapt(make(key=_key(config.seed)), config))
    return eqx.filter_eval_shape(State.init, model, build_optimizer(config), trainable(config))


def kept(config: configs.Resolved, state: State) -> State:
    """Return what of a state, abstract or not, a checkpoint holds: with an adapter, not the weights that never move."""
    if not isinstance(config.adapter, configs.Lora):
        return state
    return eqx.tree_at(lambda s: s.model, state, eqx.filter(state.model, trainable(config)(state.model)))


def completed(config: configs.Resolved, state: State) -> State:
    """Return a whole state from what `kept` left of it."""
    if not isinstance(config.adapter, configs.Lora):
        return state
    return eqx.tree_at(lambda s: s.model, state, eqx.combine(state.model, init_model(config)))


def build_optimizer(config: configs.Resolved) -> optax.GradientTransformationExtraArgs:
    """Return the run's optax transformation."""
    return optimizer.build(config.optimizer, config.steps, config.seed)


def abstract_batch(config: configs.Resolved) -> tuple[Shape, Shape, Shape]:
    """Return the shapes and types of (tokens, targets, mask)."""
    shape = (config.batch_size, config.seq_len)
    return Shape(shape, jnp.int32), Shape(shape, jnp.int32), Shape(shape, jnp.float32)


def compile_train(config: configs.Resolved, state: State) -> Any:
    """Return the executable `(batch, state) -> (state, metrics)`."""
    step = make_train_step(make_loss(config), build_optimizer(config), trainable(config))
    return compile_step(step, abstract_batch(config), state, compiler_options=config.hardware.compiler_options)


def compile_eval(config: configs.Resolved, state: State) -> Any:
    """Return the executable `(batch, model) -> metrics`."""
    step = make_eval_step(make_loss(config, balanced=False))
    return compile_step(step, abstract_batch(config), state.model, compiler_options=config.hardware.compiler_options)


def compile_head(config: configs.Resolved, state: State) -> Any:
    """Return the executable of the head's loss and gradients alone, to see what memory it takes."""
    loss = tiled.head(config, head_loss)

    @eqx.filter_jit
    def head(model, hidden, targets, mask):
        # Only what the head reads is differentiated: gradients of the layers would be arrays of zeros.
        used, rest = eqx.partition(model, eqx.tree_at(lambda m: m.layers, trainable(config)(model), False))
        return eqx.filter_value_and_grad(lambda x: loss(eqx.combine(x[0], rest), x[1], targets, mask))((used, hidden))

    return compile_step(head, state.model, *_read_by_head(config), compiler_options=config.hardware.compiler_options)


def _read_by_head(config: configs.Resolved) -> tuple[Shape, Shape, Shape]:
    """Return the shapes and types of (hidden, targets, mask) that the head is given at a time."""
    rows, seq = tiles.micro_batch(config), config.seq_len
    shape = (config.tokens_per_step,) if config.tiling.batch is None else (rows, seq)
    hidden = Shape((*shape, config.model.config.embed_dim), _dtype(config.hardware.compute_dtype))
    return hidden, Shape(shape, jnp.int32), Shape(shape, jnp.float32)


def fewest_tiles(config: configs.Resolved) -> int:
    """Return the number of tiles with which the head keeps within `tiling.budget`.

    Raises:
        ValueError: no number does, or the budget is no number of bytes.
    """
    init, dtype = model_class(config.model.config).init, _dtype(config.hardware.param_dtype)
    model = eqx.filter_eval_shape(lambda: init(config.model.config, dtype=dtype, key=_key(config.seed)))
    return tiled.fewest(config, head_loss, model, _read_by_head(config))


def _key(seed: int) -> jax.Array:
    """A key whose generator is fast on every device (several times faster than the default on CPU)."""
    return jax.random.key(seed, impl="rbg")


def _dtype(dtype: configs.DType | None) -> Any:
    return jnp.dtype(configs.chosen(dtype).value)
