"""The compiled programs of a run, made from shapes alone: the training step, the evaluation step, and their parts.

`B` batch `S` sequence `T` tokens (B*S) `D` embed.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Generator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from experiments import configs
from experiments.runtime import meshes
from experiments.step import objectives, optimizer, reference, tiled, tiles
from transforms import TileError
from transforms.remat import remat
from transforms.sharding import explicit
from transforms.step import State, all_parameters, compile_step, make_eval_step, make_train_step
from transforms.tiling.report.plan import TilePlan
from zoo import ForwardPass, Mixture, model_class
from zoo.adapters import lora
from zoo.models.init import draw


class OutOfMemoryError(RuntimeError):
    """The compiler, or the device while it computes, says that a program does not fit, in its own words."""


def make_loss(config: configs.Resolved, *, evaluating: bool = False) -> Any:
    """Return `loss(model, batch) -> (scalar, dict of scalars)`, of batches as `abstract_batch` has them.

    What a mixture's experts are used unevenly is added, weighted as the model's config says. `evaluating` measures text
    instead: nats per token, with nothing added (or the objective itself, where that compares answers).
    """
    how: Any = {"dtype": _dtype(config.hardware.compute_dtype), "ops": tiled.ops(config)}
    kept = remat(config.remat.policy, config.remat.kept)
    objective = objectives.held_out(config.objective) if evaluating else objectives.build(config.objective)
    head = tiled.head(config, objective)

    def mean(model, others, arrays):
        tokens, targets, mask, segments = arrays
        whole = config.tiling.batch is None
        reader, ids, model = _share_table(model, tokens) if whole else (model, tokens, model)
        rows = lambda x: None if x is None else x.reshape(-1, x.shape[-1])
        lead = (-1,) if tiles.flat(config) else tokens.shape
        as_head = lambda hidden: hidden.reshape(*lead, hidden.shape[-1])
        hidden, extra = read(reader, rows(ids), rows(segments))
        fixed = [jax.lax.stop_gradient(one.hidden(rows(tokens), segments=rows(segments), **how)) for one in others]
        hiddens = tuple(map(as_head, (hidden, *fixed)))
        value, aux = head((model, *others), hiddens, targets.reshape(lead), mask.reshape(lead))
        return value + extra, aux

    def read(reader, ids, segments):
        if evaluating or not isinstance(reader, Mixture):
            return reader.hidden(ids, segments=segments, remat=kept, **how), 0.0
        out = reader.forward(ids, ForwardPass(segments=segments, remat=kept, **how))
        return out.hidden, reader.config.balance_weight * out.balance

    cut = tiled.batch(config, mean)

    def loss(model, batch):
        tokens, targets, mask, segments, other = (*batch, None, None)[:5]
        others = () if other is None else (other,)
        if reference.is_base(config):
            others = (lora.detach(model),)
        return cut(model, others, (tokens, targets, mask, segments))

    return loss


def _share_table(model: Any, tokens: jax.Array) -> tuple[Any, jax.Array, Any]:
    """Return (a model to compute `hidden` with, its token ids, a model for the head), with the same values.

    A tied table has two gradients, dense from the head and a few rows from the lookup. Left to themselves they are two
    arrays [V, D] and their sum; here the rows are added into the head's. The first model's table is this batch's rows.
    """
    if tokens.size >= model.embed.shape[0] or explicit():  # rows would be gathered by all devices
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

        model = zoo.load(config.model.weights, dtype=dtype, **meshes.where(config))
    else:
        leaves = draw(config.model.config, key=_key(config.seed), dtype=dtype, **meshes.where(config))
        model = model_class(config.model.config).build(config.model.config, leaves)
    return meshes.placed(_adapt(model, config), config)


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
    model = meshes.abstract(eqx.filter_eval_shape(lambda: _adapt(make(key=_key(config.seed)), config)), config)
    return meshes.everywhere(eqx.filter_eval_shape(State.init, model, build_optimizer(config), trainable(config)))


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


def check_names(config: configs.Resolved) -> None:
    """Trace as much as tells whether everything that objective, optimizer and remat name is there; allocates nothing.

    Raises:
        ValueError: a name or pattern matches nothing.
    """
    objectives.build(config.objective)
    build_optimizer(config)
    if isinstance(config.optimizer, configs.Decayed) and config.optimizer.no_decay is not None:
        state = abstract_state(config)
        optimizer.decayed(config.optimizer, state.model)
    if "names" in config.remat.policy:
        wrapper = remat(config.remat.policy, config.remat.kept)
        make = functools.partial(model_class(config.model.config).init, config.model.config)
        model = eqx.filter_eval_shape(lambda: make(key=_key(config.seed)))
        eqx.filter_eval_shape(lambda model: model.hidden(jnp.zeros((1, 2), jnp.int32), remat=wrapper), model)


def build_optimizer(config: configs.Resolved) -> optax.GradientTransformationExtraArgs:
    """Return the run's optax transformation."""
    dtype = _grad_dtype(config)
    built = optimizer.build(config.optimizer, config.steps, config.seed, model=config.model.config, dtype=dtype)
    return optimizer.finite_alone(built) if config.on_nan is configs.OnNan.skip else built


def _grad_dtype(config: configs.Resolved) -> Any:
    """Return what gradients are computed in, or None where that is what parameters are stored in."""
    found = config.hardware.grad_dtype
    return None if found in (None, config.hardware.param_dtype) else _dtype(found)


def measured(config: configs.Resolved, state: State) -> Any:
    """Return the model that is measured and saved: the mean of the weights where the run keeps one."""
    if config.optimizer.ema is None:
        return state.model
    cast = lambda mean, leaf: None if mean is None else mean.astype(leaf.dtype)
    found = jax.tree.leaves(state.opt_state, is_leaf=lambda part: isinstance(part, optimizer.Averaged))
    averaged = next(part for part in found if isinstance(part, optimizer.Averaged))
    mean = jax.tree.map(cast, averaged.mean, state.model, is_leaf=lambda leaf: leaf is None)
    return eqx.combine(mean, state.model)


def abstract_batch(config: configs.Resolved, *, evaluating: bool = False) -> tuple[Any, ...]:
    """Return the shapes and types of (tokens, targets, mask), and where there are any of segments and a frozen model.

    Each is `[B, S]`; of preferences, `[P, 2, S]`.
    """
    shape = (config.batch_size // 2, 2, config.seq_len) if config.paired else (config.batch_size, config.seq_len)
    one = functools.partial(meshes.abstract_activation, "B 2 S" if config.paired else "B S", shape)
    arrays = one(jnp.int32), one(jnp.int32), one(jnp.float32)
    packed = (one(jnp.int32),) if config.data.packed else ()
    return inputs((*arrays, *packed), None if evaluating and not config.paired else abstract_frozen(config))


def inputs(arrays: tuple[Any, ...], other: Any) -> tuple[Any, ...]:
    """Return a step's batch: a source's arrays, and the frozen model if there is one."""
    return arrays if other is None else (*arrays, *[None] * (4 - len(arrays)), other)


def init_frozen(config: configs.Resolved) -> Any:
    """Return the run's frozen model, a reference or a teacher, or None.

    Raises:
        ValueError: the weights do not make the model that their folder describes.
    """
    path = reference.path(config)
    if path is not None:
        import zoo

        return zoo.load(path, dtype=_dtype(config.hardware.param_dtype), **meshes.where(config))
    return init_model(config) if reference.is_start(config) else None


def abstract_frozen(config: configs.Resolved) -> Any:
    """Return the shapes and types of the run's frozen model, or None; allocates nothing."""
    found = reference.described(config)
    if found is None:
        return None
    make = functools.partial(model_class(found).init, found, dtype=_dtype(config.hardware.param_dtype))
    return meshes.abstract(eqx.filter_eval_shape(lambda: make(key=_key(config.seed))), config)


def compile_train(config: configs.Resolved, state: State) -> Any:
    """Return the executable `(batch, state) -> (state, metrics)`.

    Raises:
        OutOfMemoryError: the compiler finds that it does not fit the device.
    """
    how = build_optimizer(config), trainable(config)
    step = make_train_step(make_loss(config), *how, grad_dtype=_grad_dtype(config))
    return _compiled(config, step, abstract_batch(config), state)


def compile_eval(config: configs.Resolved, state: State) -> Any:
    """Return the executable `(batch, model) -> metrics`.

    Raises:
        OutOfMemoryError: the compiler finds that it does not fit the device.
    """
    step = make_eval_step(make_loss(config, evaluating=True))
    return _compiled(config, step, abstract_batch(config, evaluating=True), state.model)


def _compiled(config: configs.Resolved, step: Any, *args: Any) -> Any:
    with out_of_memory():
        return compile_step(step, *args, compiler_options=config.hardware.compiler_options)


@contextlib.contextmanager
def out_of_memory() -> Generator[None, None, None]:
    """Turn what JAX raises where memory runs out into an OutOfMemoryError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(_shortened(str(error))) from None


def _shortened(text: str) -> str:
    """Return the compiler's message without what each buffer is, and without the stack."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    end = next((i for i, line in enumerate(lines) if re.match(r"\s*(Largest program allocations|=====)", line)), 12)
    return "\n".join(f"  {line}" for line in lines[: min(end, 12)])


def compile_head(config: configs.Resolved, state: State) -> Any:
    """Return the executable of the objective's value and gradients alone, to see what memory it takes."""
    loss = tiled.head(config, objectives.build(config.objective))
    others, args = _read_by_head(config, state.model)

    @eqx.filter_jit
    def head(model, others, hiddens, *args):
        # Only what the head reads is differentiated: gradients of the layers would be arrays of zeros.
        used, rest = eqx.partition(model, eqx.tree_at(lambda m: m.layers, trainable(config)(model), False))
        value = lambda x: loss((eqx.combine(x[0], rest), *others), (x[1], *hiddens[1:]), *args)
        return eqx.filter_value_and_grad(value, has_aux=True)((used, hiddens[0]))

    return _compiled(config, head, state.model, others, *args)


def plan_head(config: configs.Resolved, state: State) -> TilePlan | None:
    """Return what `tile` says of the head, without compiling; None where the objective cannot be cut."""
    others, args = _read_by_head(config, state.model)
    try:
        return tiled.plan(config, objectives.build(config.objective), (state.model, *others), args)
    except TileError:
        return None


def _read_by_head(config: configs.Resolved, model: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the frozen models that the head reads, and the shapes of the (hiddens, targets, mask) given at a time."""
    other = lora.detach(model) if reference.is_base(config) else abstract_frozen(config)
    others = () if other is None else (other,)
    rows, seq = tiles.micro_batch(config), config.seq_len
    if tiles.flat(config):
        letters, shape = "T", (config.tokens_per_step,)
    else:
        letters, shape = ("B 2 S", (rows // 2, 2, seq)) if config.paired else ("B S", (rows, seq))
    one, dtype = meshes.abstract_activation, _dtype(config.hardware.compute_dtype)
    hiddens = tuple(one(f"{letters} D", (*shape, each.config.embed_dim), dtype) for each in (model, *others))
    return others, (hiddens, one(letters, shape, jnp.int32), one(letters, shape, jnp.float32))


def fewest_tiles(config: configs.Resolved) -> int:
    """Return the number of tiles with which the head keeps within `tiling.budget`.

    Raises:
        ValueError: no number does, or the budget is no number of bytes.
    """
    init, dtype = model_class(config.model.config).init, _dtype(config.hardware.param_dtype)
    model = eqx.filter_eval_shape(lambda: init(config.model.config, dtype=dtype, key=_key(config.seed)))
    others, args = _read_by_head(config, model)
    return tiled.fewest(config, objectives.build(config.objective), (model, *others), args)


def _key(seed: int) -> jax.Array:
    """A key whose generator is fast on every device (several times faster than the default on CPU)."""
    return jax.random.key(seed, impl="rbg")


def _dtype(dtype: configs.DType | None) -> Any:
    return jnp.dtype(configs.chosen(dtype).value)
