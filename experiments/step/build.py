"""The programs of a run, built here and nowhere else, from shapes alone: the training step and the evaluation step.

`B` batch `S` sequence `T` tokens (B*S) `D` embed.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zoo
import zoo.accounting
from experiments import configs
from experiments.commandline.console import CommandError
from experiments.runtime import hardware, meshes
from experiments.runtime.memory import out_of_memory
from experiments.step import loss, objectives, optimizer, tiling
from transforms.remat import Remat, remat
from transforms.sharding import uneven
from transforms.step import State, all_parameters, compile_step, make_eval_step, make_train_step
from zoo import kernels, model_class
from zoo.adapters import lora
from zoo.families.mixture import MixtureLike
from zoo.formats import Format
from zoo.huggingface.config import to_hf
from zoo.huggingface.weights import shapes

AT_SCALE = 8192  # tokens: where tiling the head of a large vocabulary pays


class Begun(NamedTuple):
    """What training goes on from, in memory.

    Attributes:
        first: the step that it comes after.
        state: everything that a step changes.
        frozen: the frozen model, where there is one.
        memory: of a run that begins, bytes in use and the most so far, when there was no optimizer's state yet.
    """

    first: int
    state: State
    frozen: Any
    memory: tuple[int, int] | None


class Programs:
    """What a resolved run computes: its functions, their shapes, and what they compile to, each made when first read.

    On a mesh it is to be made and read where the mesh is set (`meshes.spread`). Nothing here allocates an array but the
    methods that say so.

    Args:
        config: the run.
    """

    def __init__(self, config: configs.Resolved):
        self.config = config
        self.dtype, self.compute_dtype = _dtype(config.hardware.param_dtype), _dtype(config.hardware.compute_dtype)
        wanted = config.hardware.grad_dtype
        self.grad_dtype = None if wanted in (None, config.hardware.param_dtype) else _dtype(wanted)
        self.trainable = lora.trainable if config.adapted else all_parameters
        self.offloaded = config.hardware.offloaded

    @functools.cached_property
    def train(self) -> Any:
        """The executable `(batch, state) -> (state, metrics)`.

        Raises:
            OutOfMemoryError: the compiler finds that it does not fit the device.
        """
        return self.compiled(self.step, self.batch, self.state)

    @functools.cached_property
    def step(self) -> Any:
        """The function `(batch, state) -> (state, metrics)`."""
        stacks = loss.stacks if self.offloaded else None
        return make_train_step(self.loss, self.optimizer, self.trainable, self.grad_dtype, stacks)

    @functools.cached_property
    def evaluate(self) -> Any:
        """The executable `(batch, model) -> metrics`.

        Raises:
            OutOfMemoryError: the compiler finds that it does not fit the device.
        """
        return self.compiled(make_eval_step(self.held_out_loss), self.held_out_batch, self.state.model)

    def compiled(self, step: Any, *args: Any) -> Any:
        """Return a function compiled for abstract arguments, with the run's options."""
        with out_of_memory():
            return compile_step(step, *args, compiler_options=self.config.hardware.compiler_options)

    @functools.cached_property
    def flops(self) -> int:
        """The FLOPs of a step, as utilisation counts them: nothing for what is frozen but passing gradients on."""
        config, other = self.config, self.config.reference
        size = config.batch_size, config.seq_len
        frozen = 0 if other is None else zoo.accounting.forward_flops(other.config, *size)
        if not config.adapted:
            return frozen + zoo.accounting.train_flops(config.model.config, *size)
        adapters = sum(leaf.size for leaf in jax.tree.leaves(self.kept_state.model))
        passed = 2 * zoo.accounting.forward_flops(config.model.config, *size)
        return frozen + passed + 6 * config.tokens_per_step * adapters

    @functools.cached_property
    def cuts(self) -> list[tuple[str, str]]:
        """Each part that is cut, and how, in words."""
        return tiling.describe(self.config)

    @functools.cached_property
    def whole(self) -> list[str]:
        """Which dimensions of parameters every device has whole, although the mesh has an axis for them, in words."""
        sizes = {name: size or 1 for name, size in self.config.mesh.sizes.items()}
        notes = uneven(self.config.model.config.dims, sizes, self.config.axes)
        return [note.replace(": ", ": mesh.", 1) for note in notes]

    @functools.cached_property
    def head_bytes(self) -> tuple[int, int]:
        """The temporary memory that the head's loss and gradients take at most, and untiled, as `tile` estimates it."""
        return tiling.head_bytes(self.objective, self.config.tiling, self.config.head, *self.head_args)

    @property
    def compiled_head(self) -> Any:
        """The head alone, an executable of the objective's value and gradients.

        Raises:
            OutOfMemoryError: the compiler finds that it does not fit the device.
        """
        loss = tiling.head(self.objective, self.config.tiling, self.config.head)
        models, args = self.head_args

        @eqx.filter_jit
        def head(models, hiddens, *args):
            # Only what the head reads is differentiated: gradients of the layers would be arrays of zeros.
            read = eqx.tree_at(lambda m: [*m.stacks.values()], self.trainable(models[0]), replace_fn=lambda _: False)
            used, rest = eqx.partition(models[0], read)
            value = lambda x: loss((eqx.combine(x[0], rest), *models[1:]), (x[1], *hiddens[1:]), *args)
            return eqx.filter_value_and_grad(value, has_aux=True)((used, hiddens[0]))

        return self.compiled(head, models, *args)

    @property
    def untiled(self) -> "Programs":
        """The programs of this run with nothing cut, made anew."""
        attention = "plain" if self.config.attention == "tiled" else self.config.attention
        return Programs(dataclasses.replace(self.config, tiling=configs.Tiling(n="none"), attention=attention))

    @property
    def longer(self) -> "Programs":
        """The programs of one sequence of `AT_SCALE` tokens, made anew."""
        return Programs(dataclasses.replace(self.config, batch_size=1, seq_len=AT_SCALE))

    @functools.cached_property
    def feeder(self) -> Callable[[Callable[[slice], tuple[np.ndarray, ...]]], tuple[jax.Array, ...]]:
        """What puts the arrays of a batch where `batch` lies: `meshes.feeder`."""
        return meshes.feeder(self._arrays[0].shape[0])

    @functools.cached_property
    def loss(self) -> Any:
        """The loss that is learned from, `loss(model, batch) -> (scalar, dict of scalars)`, of batches like `batch`.

        What a mixture's experts are used unevenly is added, weighted as the model's config says.
        """
        return self._loss(self.objective, balanced=True)

    @functools.cached_property
    def held_out_loss(self) -> Any:
        """The loss that measures text: nats per token, or of pairs of answers the objective itself."""
        return self._loss(objectives.held_out(self.config.objective, self.config.paired), balanced=False)

    @functools.cached_property
    def objective(self) -> objectives.Loss:
        """What is minimised, of hidden states, before anything cuts it."""
        return objectives.build(self.config.objective, self.config.paired)

    @functools.cached_property
    def remat(self) -> Remat | None:
        """What the backward pass keeps of each layer."""
        return remat(self.config.remat.policy, self.config.remat.kept)

    def _loss(self, objective: objectives.Loss, *, balanced: bool) -> Callable[..., Any]:
        return loss.build(self.config, objective, self.compute_dtype, self.remat, balanced=balanced)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The run's optax transformation."""
        config, model = self.config, self.config.model.config
        how = {"model": model, "axes": config.axes, "dtype": self.grad_dtype}
        built = optimizer.build(config.optimizer, config.steps, config.seed, **how)
        return optimizer.finite_alone(built) if config.on_nan is configs.OnNan.skip else built

    @functools.cached_property
    def rates(self) -> np.ndarray:
        """The learning rate of each update."""
        rate = optimizer.schedule(self.config.optimizer, self.config.steps)
        return np.asarray(jax.vmap(lambda step: jnp.asarray(rate(step)))(jnp.arange(self.config.steps)))

    @functools.cached_property
    def model(self) -> Any:
        """The shapes and types of the model that learns, with its adapter."""
        return meshes.stowed(self._on_device) if "params" in self.offloaded else self._on_device

    @functools.cached_property
    def _on_device(self) -> Any:
        """The model as it is where it is computed with."""
        config = self.config
        return meshes.abstract(shape_of(config.model, config.adapter, self.dtype, config.seed), config.axes)

    @functools.cached_property
    def state(self) -> State:
        """The shapes and types of everything that a step changes."""
        state = meshes.everywhere(eqx.filter_eval_shape(State.init, self.model, self.optimizer, self.trainable))
        moments = meshes.stowed(state.opt_state) if "optimizer" in self.offloaded else state.opt_state
        return jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves((self.model, moments, state.step)))

    @functools.cached_property
    def frozen(self) -> Any:
        """The shapes and types of the frozen model, where there is one with weights of its own."""
        if self.config.reference is None or self.config.beside_its_base:
            return None
        found = self.config.reference.config
        return meshes.abstract(self._shape(found), self.config.axes)

    def _shape(self, config: Any) -> Any:
        return shape_of(configs.Model(config=config), configs.Adapter(), self.dtype, self.config.seed)

    @functools.cached_property
    def batch(self) -> tuple[Any, ...]:
        """The shapes and types of (tokens, targets, mask), and where there are any of segments and a frozen model.

        Each is `[B, S]`; of preferences, `[P, 2, S]`.
        """
        return loss.inputs(self._arrays, self.frozen)

    @functools.cached_property
    def held_out_batch(self) -> tuple[Any, ...]:
        """As `batch`, for the evaluation: it needs the frozen model only to compare answers."""
        return loss.inputs(self._arrays, self.frozen if self.config.paired else None)

    @functools.cached_property
    def _arrays(self) -> tuple[Any, ...]:
        config = self.config
        shape = (config.batch_size // 2, 2, config.seq_len) if config.paired else (config.batch_size, config.seq_len)
        one = functools.partial(meshes.abstract_activation, "B 2 S" if config.paired else "B S", shape)
        arrays = one(jnp.int32), one(jnp.int32), one(jnp.float32)
        return (*arrays, one(jnp.int32)) if config.data.packed else arrays

    def begun(self, restored: tuple[int, Any] | None, say: Callable[[str], None], ask: Callable[[], None]) -> Begun:
        """Return what training goes on from: the beginning, or what a checkpoint had, with what it left out.

        Args:
            restored: the step, and what `kept` had left of the state after it; None: the beginning.
            say: is told where the weights are from.
            ask: may raise, where the process was told to end.

        Raises:
            ValueError: the weights do not make the model that their folder describes.
            OutOfMemoryError: the evaluation does not compile.
        """
        _ = self.evaluate  # compiled while nothing is allocated
        ask()
        frozen = self.init_frozen()
        ask()
        if restored is not None:
            return Begun(restored[0], self.completed(restored[1]), frozen, None)
        began, weights = time.perf_counter(), self.config.model.weights
        model = jax.block_until_ready(self.init())
        origin = "drawn" if weights is None else f"read from {weights}"
        say(f"  weights {origin} in {time.perf_counter() - began:.1f} s")
        memory = hardware.used_memory()
        return Begun(0, self.init_state(model), frozen, memory)

    def init(self) -> Any:
        """Return a model with random weights, or the one at `model.weights`; with its adapter, where it gets one.

        Raises:
            ValueError: the weights do not make the model that their folder describes, or it has no such matrices.
        """
        config, options = self.config, self.config.hardware.compiler_options
        host = "params" in self.offloaded
        if host and config.hardware.platform is not configs.Platform.cpu:
            options = None  # of the device, which computes nothing here
        with meshes.by_host() if host else contextlib.nullcontext():
            made = load_or_draw(config.model, config.seed, self.dtype, options, **meshes.where(config.axes))
            made = adapted(config.adapter, made, config.seed)
            return meshes.stowed(made) if host else meshes.placed(made, self._on_device)

    def init_state(self, model: Any) -> State:
        """Return the state before the first step of a model that is in memory."""
        init = eqx.filter_jit(lambda model: self.optimizer.init(eqx.filter(model, self.trainable(model))))
        if not self.offloaded:
            return State(model, init(model), jnp.zeros((), jnp.int32))
        with meshes.by_host() as brought:
            made = init(brought(model))
        lie = meshes.stowed if "optimizer" in self.offloaded else meshes.on_device
        return State(model, lie(made), jnp.zeros((), jnp.int32))

    def init_frozen(self) -> Any:
        """Return the run's frozen model, a reference or a teacher, or None.

        Raises:
            ValueError: the weights do not make the model that their folder describes.
        """
        if self.config.reference is None or self.config.beside_its_base:
            return None
        if self.config.reference.path is None:
            return self.init()
        return zoo.load(self.config.reference.path, dtype=self.dtype, **meshes.where(self.config.axes))

    def kept(self, state: State) -> State:
        """Return what of a state, abstract or not, a checkpoint holds: with an adapter, not what never moves."""
        if not self.config.adapted:
            return state
        return eqx.tree_at(lambda s: s.model, state, eqx.filter(state.model, self.trainable(state.model)))

    @functools.cached_property
    def kept_state(self) -> State:
        """The shapes and types of what a checkpoint holds."""
        return self.kept(self.state)

    def completed(self, state: State) -> State:
        """Return a whole state from what `kept` left of it."""
        if not self.config.adapted:
            return state
        return eqx.tree_at(lambda s: s.model, state, eqx.combine(state.model, self.init()))

    def measured(self, state: State) -> Any:
        """Return the model that is measured and saved: the mean of the weights where the run keeps one."""
        return state.model if self.config.optimizer.ema is None else optimizer.mean_of(state)

    def check(self) -> None:
        """Trace as much as tells whether everything that objective, optimizer, remat and compiler name is there.

        Raises:
            ValueError: a name or pattern matches nothing, or XLA knows no such option.
        """
        config = self.config
        _ = self.objective, self.optimizer
        options = config.hardware.compiler_options
        try:
            if options:  # a run without any compiles nothing for this
                jax.jit(lambda: 0, compiler_options=options).lower().compile()
        except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"cannot use hardware.compiler_options={options}: {str(error).splitlines()[0]}") from None
        if "names" in config.remat.policy:
            model = self._shape(config.model.config)
            eqx.filter_eval_shape(lambda model: model.hidden(jnp.zeros((1, 2), jnp.int32), remat=self.remat), model)
        if isinstance(config.optimizer, configs.Decayed) and config.optimizer.no_decay is not None:
            _ = self.state  # its optimizer's finds what each pattern names

    @functools.cached_property
    def head_args(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The shapes of what the head is given at a time: its models, the first learns; hiddens, targets and mask."""
        config, how = self.config, self.config.head
        model = self._on_device
        other = lora.detach(model) if self.config.beside_its_base else self.frozen
        models = (model,) if other is None else (model, other)
        if how.flat:
            letters, shape = "T", (config.tokens_per_step,)
        elif config.paired:
            letters, shape = "B 2 S", (how.rows // 2, 2, config.seq_len)
        else:
            letters, shape = "B S", (how.rows, config.seq_len)
        one, widths = meshes.abstract_activation, [model.config.embed_dim for model in models]
        hiddens = tuple(one(f"{letters} D", (*shape, width), self.compute_dtype) for width in widths)
        return models, (hiddens, one(letters, shape, jnp.int32), one(letters, shape, jnp.float32))


def _experts(config: configs.Resolved) -> str | None:
    """Return why a mixture's products cannot be those that are asked for; None where they can."""
    if config.experts == "auto":
        return None
    if not isinstance(config.model.config, MixtureLike):
        return "this model has no experts"
    dtype = configs.chosen(config.hardware.compute_dtype).value
    why = kernels.experts.KERNELS[config.experts].refusal(config.hardware.platform.value, dtype)
    return None if why is None else f"{config.experts} {why}"


def _unsaveable(config: configs.Resolved) -> str | None:
    """Return why no folder can describe the model; None where one can."""
    try:
        to_hf(config.model.config, "float32")
    except ValueError as error:
        return str(error)
    return None


def problem(config: configs.Resolved) -> str | None:
    """Return why a run cannot be carried out as it is asked for, before anything is compiled; None where it can."""
    if (why := config.problem) is not None:
        return why
    attention = kernels.attention.KERNELS[config.attention]
    if (why := attention.refusal(tiling.asked(config, config.model.config))) is not None:
        return f"cannot run with attention={config.attention}: {config.attention} {why}; or use attention=auto."
    if (why := _experts(config)) is not None:
        return f"cannot run with experts={config.experts}: {why}; or use experts=auto."
    if config.hardware.offloaded and (why := meshes.refusal()) is not None:
        return f"cannot use hardware.offload={config.hardware.offload}: {why}."
    if config.save.final and (why := _unsaveable(config)) is not None:
        return f"cannot save what is trained, as save.final=true asks: {why} Or leave save.final out."
    return adapter_problem(config.adapter, config.model.config)


def adapter_problem(adapter: configs.Adapter, model: Any) -> str | None:
    """Return why an adapter cannot be put on a model of a config; None where it can."""
    if isinstance(adapter, configs.Lora):
        try:
            lora.match(model, adapter.patterns)
        except ValueError as error:
            said = str(error).replace(":\n  ", ": ").replace("\n  ", ", ")
            return f"bad value adapter.targets={adapter.targets}: {said}"
    return None


def checked(config: configs.Resolved) -> Programs:
    """Return the programs of a run that can be carried out as it is asked for; to be called on its mesh.

    Raises:
        CommandError: it cannot, or something that it names is not there.
    """
    if why := problem(config):
        raise CommandError(why)
    try:
        programs = Programs(config)
        programs.check()
    except ValueError as error:
        raise CommandError(str(error)) from None
    return programs


@functools.singledispatch
def adapted(adapter: configs.Adapter, model: Any, seed: int) -> Any:
    """Return a model with what an adapter adds to it, drawn at random."""
    return model


@adapted.register
def _(adapter: configs.Lora, model: Any, seed: int) -> Any:
    return lora.attach(model, adapter.patterns, rank=adapter.rank, alpha=adapter.alpha, key=_key(seed + 1))


def load_or_draw(
    model: configs.Model, seed: int, dtype: Any, compiler_options: dict[str, Any] | None = None, **where: Any
) -> Any:
    """Return the model at `model.weights`, or one with random weights; in fewer bits where that is asked for.

    Args:
        model: the part of a run.
        seed: of random weights.
        dtype: of parameters; None is that of the folder.
        compiler_options: XLA options for the programs that draw.
        where: the mesh and what its axes cut, where there is one.
    """
    if model.weights is not None:
        return zoo.load(model.weights, dtype=dtype, quantise=model.quantise, **where)
    bits = None if model.quantise is None else Format(model.quantise)
    how = {"dtype": dtype, "quantise": bits, "compiler_options": compiler_options, **where}
    return model_class(model.config).init(model.config, key=_key(seed), **how)


def shape_of(model: configs.Model, adapter: configs.Adapter, dtype: Any, seed: int) -> Any:
    """Return the shapes and types of the model that learns, with its adapter, before it lies anywhere.

    Args:
        model: the part of a run.
        adapter: likewise.
        dtype: of parameters.
        seed: of random weights.

    Raises:
        ValueError: its matrices cannot be in so few bits, or it has none that the adapter is for.
    """

    def made():
        if model.quantise is not configs.Quantise.as_stored:
            return load_or_draw(dataclasses.replace(model, weights=None), seed, dtype)
        like = shapes(configs.chosen(model.weights), dtype=dtype, quantise=model.quantise)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)

    return eqx.filter_eval_shape(lambda: adapted(adapter, made(), seed))


def _key(seed: int) -> jax.Array:
    """A key whose generator is fast on every device (several times faster than the default on CPU)."""
    return jax.random.key(seed, impl="rbg")


def _dtype(dtype: configs.DType | None) -> Any:
    return jnp.dtype(configs.chosen(dtype).value)
