"""What a run names is found: the models that folders of weights describe, and what a user wrote.

That is a loss, an optimizer or data: `module:function` (on Python's path or in the current folder) or
`path/to/file.py:function`. A function is given what its arguments ask for, by their names; its further arguments are
options, `GROUP.kwargs.NAME=VALUE`. None of it knows that `tile` cuts it.

`B` batch `S` sequence `T` tokens `P` pairs `D` embed `V` vocab.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import configs
from experiments.commandline.console import CommandError, install
from transforms import TileError
from transforms.sharding import partitions
from transforms.step import numbers_as_arrays
from zoo.huggingface.config import from_hf
from zoo.huggingface.folder import fingerprint
from zoo.models.head import head

T = TypeVar("T", bound=Any)

LOSS = ("logits", "hidden", "head", "labels", "mask")
MODEL = ("chosen_logps", "rejected_logps")  # of pairs of answers, by TRL's names
REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")
PAIR = (*MODEL, *REFERENCE, "chosen_tokens", "rejected_tokens")
OPTIMIZER = ("learning_rate",)
RECORDED = ("loss", "grad_norm")  # of each step, beside what a loss returns
DATA = ("tokenizer", "vocab_size", "seq_len", "seed")
ENDLESS = 2**48  # elements: what repeats itself claims more
INSTALLED = {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
NOT_THEIRS = ("<", __file__, *INSTALLED)
TRACED = (
    "It is traced once, as jax.jit does, and the values of arrays are not known then: write jnp.where or jax.lax.cond "
    "for an `if`, jnp for numpy, and leave out float(), int() and bool()."
)
MEASURED = (
    "A step gives it gradients, its state and parameters, and no function to measure: take one without a line search"
)
SPREAD = (
    "Logits are spread over the vocabulary here, and one device has a label's: pick it by comparison, "
    "jnp.where(jnp.arange(logits.shape[-1]) == labels[..., None], logits, 0).sum(-1), or use a mesh that does not cut "
    "the vocabulary, such as mesh=fsdp."
)


class OwnError(ValueError):
    """Something that a user wrote cannot be found, or is not what it should be."""


def described(config: configs.Run, argv: Sequence[str] = ()) -> configs.Described:
    """Return a run of which what it names is found: the model that learns, a frozen one, and functions of the user's.

    Args:
        config: the run, as it is asked for.
        argv: the words that ask for it, which may name a model.

    Raises:
        CommandError: the weights, or the frozen model that the objective compares with, are not there, or not those of
            such a model; or a function of the user's is not, or cannot be called.
    """
    config = with_weights(config, argv)
    parts: dict[str, Any] = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    try:
        frozen = reference(config)
        found = sources(config, frozen)
    except OwnError as error:
        raise CommandError(str(error)) from None
    return configs.Described(**parts, reference=frozen, sources=found)


def with_weights(config: T, argv: Sequence[str]) -> T:
    """Return a run (or another command) with the architecture that its weights' folder describes.

    Raises:
        CommandError: there are no such weights, or they are another model's than the one asked for.
    """
    if config.model.weights is None:
        return config
    path = Path(config.model.weights).expanduser()
    fetch = "" if path.is_dir() else ". It names a folder; hf://ORG/NAME fetches a model by its name on the hub"
    found = _architecture(path, f"model.weights={path}", fetch)
    beside = "model.weights=", "model.quantise="
    if any(word.startswith("model") and not word.startswith(beside) for word in argv):
        both = config.model.config, found
        ours, theirs = ({"family": type(one).__name__, **dataclasses.asdict(one)} for one in both)
        if wrong := [f"{k}: {ours[k]} here, {theirs[k]} there" for k in ours if ours[k] != theirs.get(k, ours[k])]:
            raise CommandError(f"model.weights={path} holds another model than the one asked for: {'; '.join(wrong)}")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, config=found, weights=str(path)))


def reference(config: configs.Run) -> configs.Reference | None:
    """Return the frozen model of a run; None where its objective compares with none.

    Raises:
        CommandError: its folder cannot be read, or it has another vocabulary than the model that learns; or a loss of
            the user's does not ask for what the folder is for.
        OwnError: a loss of the user's cannot be found or called.
    """
    objective, ours = config.objective, config.model.config
    if isinstance(objective, configs.Distill):
        folder, option = objective.teacher, "objective.teacher"
    elif isinstance(objective, configs.Referenced) or (
        isinstance(objective, configs.Custom) and config.paired and _compares(objective)
    ):
        folder, option = objective.reference, "objective.reference"
    else:
        return None
    if folder is None:
        origin = configs.Origin.base if isinstance(config.adapter, configs.Lora) else configs.Origin.start
        return configs.Reference(origin, ours)
    path = Path(folder).expanduser()
    found = _architecture(path, f"{option}={folder}")
    if found.vocab_size != ours.vocab_size:
        raise CommandError(
            f"cannot use {option}={folder}: it has a vocabulary of {found.vocab_size}, the model that learns one of "
            f"{ours.vocab_size}. Both must have the same."
        )
    return configs.Reference(configs.Origin.folder, found, folder)


def _compares(objective: configs.Custom) -> bool:
    """Return whether a user's loss of pairs of answers asks what a frozen model makes of them."""
    found = not set(REFERENCE).isdisjoint(_found(objective, paired=True)[1])
    if objective.reference is not None and not found:
        names, said = " nor ".join(f"`{name}`" for name in REFERENCE), objective.reference
        raise CommandError(
            f"cannot use objective.reference={said}: objective.fn={objective.fn} asks for neither {names}"
        )
    return found


def _architecture(folder: Path, said: str, remedy: str = "") -> Any:
    """Return the architecture that the `config.json` of a folder describes."""
    try:
        raw = json.loads((folder / "config.json").read_text("utf-8"))
    except OSError as error:
        raise CommandError(f"cannot read {said}: {error.strerror} ({error.filename}){remedy}") from None
    except (ValueError, RecursionError) as error:
        raise CommandError(f"cannot use {said}: its config.json is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CommandError(f"cannot use {said}: its config.json must hold a JSON object")
    try:
        return from_hf(raw)
    except ValueError as error:
        raise CommandError(f"cannot use {said}: {error}") from None


@contextlib.contextmanager
def _in_words(
    failed: str, spread: Callable[[], bool] = lambda: False, missing: str = ""
) -> Generator[None, None, None]:
    """Say in a sentence what a user's code raises, and at which of its lines.

    Args:
        failed: the beginning of the sentence.
        spread: whether its logits are.
        missing: the remedy where it asks for an argument by name that it is not given.
    """
    try:
        yield
    except (OwnError, TileError):
        raise
    except (Exception, SystemExit) as error:  # it may raise anything
        frames = reversed(traceback.extract_tb(error.__traceback__))
        found = next((frame for frame in frames if not frame.filename.startswith(NOT_THEIRS)), None)
        where = f" at {found.filename}:{found.lineno}" if found else ""
        said = next(iter(str(error).strip().splitlines()), found.line if found else None) or "it says no more"
        traced = isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError)
        remedy = f" {TRACED}" if traced else ""
        if missing and isinstance(error, TypeError) and "required keyword-only argument" in said:
            remedy = f". {missing}"
        if type(error).__name__ == "ShardingTypeError" and spread():  # which has no public name
            remedy = f". {SPREAD}"
        raise OwnError(f"{failed}{where}: {type(error).__name__}: {said}{remedy}") from error


def find(name: str, key: str) -> Callable[..., Any]:
    """Return the function that a name stands for.

    Raises:
        OwnError: there is no such file, module or function.
    """
    where, _, inside = name.rpartition(":")
    with _in_words(f"cannot import {key}={name}"):
        found: Any = _file(where, f"{key}={name}") if where.endswith(".py") else _module(where, f"{key}={name}")
    for part in inside.split("."):
        if not hasattr(found, part):
            known = [one for one in vars(found) if callable(getattr(found, one)) and not one.startswith("_")]
            close = difflib.get_close_matches(part, known, n=1)
            hint = f"Did you mean `{close[0]}`?" if close else f"It has: {', '.join(known[:12]) or 'none'}."
            raise OwnError(f"cannot find {key}={name}: {where} has no function `{part}`. {hint}")
        found = getattr(found, part)
    if not callable(found):
        raise OwnError(f"cannot use {key}={name}: it is no function, but {type(found).__name__}")
    return found


def _module(name: str, said: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # the last: nobody's own `transforms.py` stands in the way of this project's
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        where = f"it is neither installed nor in {here}"
        raise OwnError(f"cannot find {said}: there is no module `{error.name}`, {where}") from None


def _file(name: str, said: str) -> ModuleType:
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        raise OwnError(f"cannot find {said}: there is no file {path}")
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for what it imports from beside it
    named = path.stem if path.stem not in sys.modules else f"{path.stem} at {path.parent}"
    spec = importlib.util.spec_from_file_location(named, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[named] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[named]
        raise
    return module


def wanted(
    fn: Callable[..., Any], given: Sequence[str], group: str, kwargs: Mapping[str, Any], of_pairs: Sequence[str] = ()
) -> list[str]:
    """Return which of what can be given a function asks for; `of_pairs` is what data=preference alone gives.

    Raises:
        OwnError: it asks for more than it is given, or has no such options.
    """
    called = getattr(fn, "__name__", str(fn))
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        raise OwnError(f"cannot call {called}: nothing tells the names of its arguments; wrap it in a `def`") from None
    named = {name: one for name, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    free = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if unknown := [name for name in kwargs if name not in named and not free]:
        own = [name for name in named if name not in given]
        close = difflib.get_close_matches(unknown[0], own, n=1)
        hint = f"Did you mean {group}.kwargs.{close[0]}?" if close else f"Its options are: {', '.join(own) or 'none'}."
        raise OwnError(f"unknown option {group}.kwargs.{unknown[0]}: {called} has no such argument. {hint}")
    if clash := [name for name in kwargs if name in given]:
        raise OwnError(f"cannot set {group}.kwargs.{clash[0]}: {called} is given `{clash[0]}` by the run")
    if needs := [k for k, one in named.items() if one.default is one.empty and k in of_pairs and k not in kwargs]:
        raise OwnError(
            f"cannot call {called}: it asks for `{needs[0]}`, which is of pairs of answers: use data=preference"
        )
    if lacking := [k for k, one in named.items() if one.default is one.empty and k not in (*given, *kwargs)]:
        raise OwnError(
            f"cannot call {called}: it asks for `{lacking[0]}`, and is given {', '.join(given)}. An option of its own "
            f"needs a value: {group}.kwargs.{lacking[0]}=..."
        )
    if fixed := [name for name, one in named.items() if one.kind is one.POSITIONAL_ONLY]:
        raise OwnError(f"cannot call {called}: `{fixed[0]}` cannot be given by name; wrap it in a `def`")
    return [name for name in given if name in named]


def _found(config: configs.Custom, paired: bool) -> tuple[Callable[..., Any], list[str]]:
    """Return a user's loss, and which of what it can be given it asks for."""
    fn = find(config.fn, "objective.fn")
    given, of_pairs = ((*LOSS, *PAIR), ()) if paired else (LOSS, PAIR)
    asked = wanted(fn, given, "objective", config.kwargs, of_pairs)
    learns = ("logits", "hidden", *MODEL) if paired else ("logits", "hidden")
    if not set(learns).intersection(asked):
        names = " nor ".join(f"`{name}`" for name in learns)
        raise OwnError(f"cannot learn from objective.fn={config.fn}: it asks for neither {names}")
    return fn, asked


def objective(config: configs.Custom, answer_sums: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a user's loss as an objective `loss(models, hiddens, targets, mask) -> (scalar, dict of scalars)`.

    It is given, by name, `logits [..., V]`, or `hidden [..., D]` and the model's `head` (`zoo.head`), and `labels` and
    `mask [...]`, 1 where a token counts; these are the sequences of a step [B, S], or of a micro-batch. It returns a
    number, or a loss of every token, whose mean over the mask is taken; or a pair of these and a dict of numbers to
    record.

    Of pairs of answers, where these are [P, 2, S], it is also given `PAIR` [P], and may return a loss of each pair.

    Args:
        config: names it.
        answer_sums: where batches are pairs, returns of what an objective is given the sums over each answer [P, 2]:
            the model's log-probabilities, the frozen model's if there is one, and how many tokens there are.
    """
    fn, asked = _found(config, answer_sums is not None)
    lone = [name for name in asked if name in LOSS]

    def loss(models, hiddens, targets, mask):
        model, hidden = models[0], hiddens[0]
        make = {
            "logits": lambda: model.logits(hidden),
            "hidden": lambda: hidden,
            "head": lambda: head(model),
            "labels": lambda: targets,
            "mask": lambda: mask,
        }
        given = {name: make[name]() for name in lone}
        if answer_sums is not None and len(lone) < len(asked):
            sums = _by_name(*answer_sums(models, hiddens, targets, mask))
            given |= {name: sums[name] for name in asked if name not in lone}
        spread = lambda: partitions(jax.eval_shape(lambda: model.logits(hidden)))[-1] is not None
        with _in_words(f"objective.fn={config.fn} failed", spread):
            made = fn(**given, **config.kwargs)
        pair = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)
        value, beside = (made[0], dict(made[1])) if pair else (made, {})
        if wrong := [name for name in beside if not isinstance(name, str) or name in RECORDED]:
            raise OwnError(
                f"cannot use objective.fn={config.fn}: it calls a number {wrong[0]!r}; give each a name in text, and "
                f"none of {', '.join(RECORDED)}, which are the run's"
            )
        value = _number(value, config.fn, "loss", targets, mask)
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise OwnError(
                f"cannot learn from objective.fn={config.fn}: its loss is of type {value.dtype}, which has no gradient"
            )
        return value, {name: _number(one, config.fn, name, targets, mask) for name, one in beside.items()}

    return loss


def _by_name(model: jax.Array, *others: jax.Array) -> dict[str, jax.Array]:
    """Return the sums over answers [P, 2] as a user's loss is given them, `PAIR` [P]."""
    *reference, tokens = others
    names = (*MODEL, *(REFERENCE if reference else ()), *PAIR[-2:])
    values = [sums[..., answer] for sums in (model, *reference, tokens) for answer in (0, 1)]
    return dict(zip(names, values, strict=True))


def sources(config: configs.Run, frozen: configs.Reference | None) -> dict[str, str | None]:
    """Return hashes of what a run names and reads whenever it goes on, each by its key; None: nothing tells it.

    They are the source of the user's own functions, and weights that no checkpoint holds: of the frozen model, and of
    what an adapter is added to.

    Raises:
        OwnError: there is no such file, module or function.
    """
    read = config.compile_for is None
    groups = ("objective", "optimizer", "data")[: 3 if read else 2]
    found = {f"{group}.fn": _source(one) for group in groups if (one := _own(config, group))}
    folders: dict[str, str | None] = {}
    if isinstance(config.adapter, configs.Lora) or (frozen is not None and frozen.path is None):
        folders["model.weights"] = config.model.weights
    if frozen is not None:
        key = "teacher" if isinstance(config.objective, configs.Distill) else "reference"
        folders[f"objective.{key}"] = frozen.path
    return found | {key: _weights(path) for key, path in folders.items() if path is not None and read}


def _weights(folder: str) -> str | None:
    """Return a hash of a folder's weights; None where they cannot be read, which loading them says."""
    try:
        return fingerprint(Path(folder).expanduser())
    except (OSError, ValueError):
        return None


def _own(config: Any, group: str) -> Callable[..., Any] | None:
    name = getattr(getattr(config, group), "fn", None)
    return None if name is None else find(name, f"{group}.fn")


def _source(fn: Callable[..., Any]) -> str | None:
    """Return a hash of the file that a function is in: what it calls is mostly there too."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(fn))
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return None


def counted(mask: jax.Array, axis: int | None = None) -> jax.Array:
    """Return how much the tokens count together; 1 where none does, so that their mean is 0."""
    total = jnp.sum(mask, axis)
    return jnp.where(total > 0, total, 1.0)


def _number(value: Any, name: str, what: str, targets: Any, mask: Any) -> jax.Array:
    if not isinstance(value, jax.Array | np.ndarray | float | int):
        raise OwnError(f"cannot use objective.fn={name}: its {what} is no number, but {type(value).__name__}")
    value = jnp.asarray(value)
    if value.shape == targets.shape:
        return jnp.sum(value * mask) / counted(mask)
    pairs = targets.shape[:1] if targets.ndim == 3 else ()
    if value.shape not in ((), pairs):
        each = f"each label, {targets.shape}{f', or each pair, {pairs}' if pairs else ''}"
        raise OwnError(
            f"cannot use objective.fn={name}: its {what} has shape {value.shape}; return a number, or one for {each}"
        )
    return value.mean() if value.shape else value


def optimizer(config: configs.CustomOptimizer, rate: Any) -> optax.GradientTransformation:
    """Return what a user's function makes of a schedule of the learning rate."""
    fn, failed = find(config.fn, "optimizer.fn"), f"optimizer.fn={config.fn} failed"
    if not wanted(fn, OPTIMIZER, "optimizer", config.kwargs):
        raise OwnError(f"cannot use optimizer.fn={config.fn}: it must take a `learning_rate`, which is a schedule")
    with _in_words(failed):
        made = fn(learning_rate=rate, **config.kwargs)
    if not isinstance(made, optax.GradientTransformation):
        raise OwnError(
            f"cannot use optimizer.fn={config.fn}: it must return an optax.GradientTransformation, not "
            f"{type(made).__name__}"
        )
    told = _in_words(failed, missing=MEASURED)
    init, move = told(made.init), told(made.update)

    def update(updates: Any, state: Any, *args: Any, **extra: Any) -> tuple[Any, Any]:
        moved, new = move(updates, state, *args, **extra)
        return moved, _alike(new, state, failed)

    return made._replace(init=lambda params: numbers_as_arrays(_of_arrays(init(params), failed)), update=update)


def _of_arrays(state: Any, failed: str) -> Any:
    """Return an optimizer's state.

    Raises:
        OwnError: something in it is no array, number or text: it would stay as it begins.
    """
    known = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | bool | int | float | complex | str | bytes
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not isinstance(leaf, known):
            where, kind = jax.tree_util.keystr(path), type(leaf).__name__
            raise OwnError(
                f"{failed}: its state{where} is of type {kind}, in which nothing would move: use dicts, tuples and "
                f"arrays, or jax.tree_util.register_dataclass"
            )
    return state


def _alike(new: Any, state: Any, failed: str) -> Any:
    """Return an optimizer's new state, whose numbers are arrays.

    Raises:
        OwnError: it is made of other arrays than the state before.
    """
    if jax.tree.structure(new) != jax.tree.structure(state):
        raise OwnError(f"{failed}: `update` returns a state of another structure than `init`: keep what is there")

    def one(path: Any, new: Any, old: Any) -> Any:
        if not isinstance(old, jax.Array):
            return new
        new = new if isinstance(new, jax.Array) else jnp.asarray(new)
        if jax.typeof(new).weak_type and jnp.result_type(old, new) == old.dtype:
            new = new.astype(old.dtype)
        if (was := jax.typeof(old).str_short()) != (becomes := jax.typeof(new).str_short()):
            where = jax.tree_util.keystr(path)
            raise OwnError(
                f"{failed}: its state{where} is {was}, and `update` makes it {becomes}: use .astype, .reshape"
            )
        return new

    return jax.tree_util.tree_map_with_path(one, new, state)


def pipeline(name: str) -> Any:
    """Return the data set that a user's function of a Grain pipeline (https://github.com/google/grain) returns.

    Raises:
        OwnError: Grain (the extra `.[grain]`) or the function is not there, or what it returns is no finite
            random-access data set.
    """
    try:
        import grain
    except ImportError:
        raise OwnError(f"data=grain needs the extra: {install('grain')}") from None
    dataset = find(name, "data.dataset")()
    if not isinstance(dataset, grain.MapDataset) or len(dataset) > ENDLESS:
        what = "one that repeats itself" if isinstance(dataset, grain.MapDataset) else type(dataset).__name__
        raise OwnError(
            f"cannot use data.dataset={name}: it must be MODULE:FUNCTION, which returns a finite "
            f"grain.MapDataset, not {what}. The run itself repeats and shuffles."
        )
    return dataset


def documents(config: configs.CustomData, **given: Any) -> Any:
    """Return what a user's function returns: documents of text or of ids, or rows `{"tokens": ids}`."""
    fn = find(config.fn, "data.fn")
    asked = wanted(fn, DATA, "data", config.kwargs)
    with _in_words(f"data.fn={config.fn} failed"):
        made = fn(**{name: given[name] for name in asked}, **config.kwargs)
        made = made if hasattr(made, "__len__") or not hasattr(made, "__iter__") else list(made)
    if isinstance(made, str | bytes | Mapping) or not hasattr(made, "__len__"):
        raise OwnError(
            f"cannot use data.fn={config.fn}: it must return documents (text or ids, in a list or one after another) "
            f"or rows {{'tokens': ids}}, not {type(made).__name__}"
        )
    if not len(made):
        raise OwnError(f"nothing in data.fn={config.fn}: what it returned is empty")
    return made
