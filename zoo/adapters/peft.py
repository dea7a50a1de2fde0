"""LoRA adapters as folders of PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

On disk a matrix of `out, in` has `lora_A [R, in]` and `lora_B [out, R]`, under its Hugging Face name; with DoRA also a
`lora_magnitude_vector [out]`. What the settings mean is in `zoo.adapters.settings`, how experts lie in
`zoo.adapters.experts`.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from zoo.adapters import experts
from zoo.adapters.lora import LowRank, adapted, letters_of, matrices, put
from zoo.adapters.settings import CONFIG, Settings, read
from zoo.huggingface.folder import text_part
from zoo.parameters import Row

_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def save(model: PyTree, path: str | os.PathLike, *, base: str | None = None) -> None:
    """Write the adapter of a model as a folder that `load` and PEFT read; the model itself is not written.

    Args:
        model: with the adapter.
        path: of the folder.
        base: where the model without it is found: PEFT's `AutoPeftModelForCausalLM` and transformers open both by that.

    Raises:
        ValueError: the model has no adapter, or one of which only some parts are DoRA.
    """
    parts = list(adapted(model))
    dora = {part.magnitude is not None for _, part in parts}
    if len(dora) != 1:
        what = "it has none" if not dora else "some of its parts are DoRA and some are not, and a folder holds one"
        raise ValueError(f"cannot save an adapter at `{path}`: {what}.")
    groups: dict[Any, list[tuple[Row, LowRank]]] = {}
    for row, part in parts:
        row = experts.as_parameter(row)
        groups.setdefault((row.tensor, row.layers), []).append((row, part))
    modules = [_Module.of(members) for members in groups.values()]
    rank, scale = modules[0].rank, modules[0].scale
    others = {_pattern(one.row): one for one in modules if (one.rank, one.scale) != (rank, scale)}
    arrays = experts.together({name: array for one in modules for name, array in one.tensors(model.config.dims)})
    mixture = "E" in model.config.dims and not any(dora)
    parameters = {one.row.tensor: experts.parameter(one.row, mixture) for one in modules}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": dora.pop(),
        "rank_pattern": {pattern: one.rank for pattern, one in others.items()},
        "alpha_pattern": {pattern: one.scale * one.rank for pattern, one in others.items()},
        "inference_mode": True,
        "base_model_name_or_path": base,
        "target_modules": sorted(
            {_module(tensor).rpartition(".")[2] for tensor in parameters if not parameters[tensor]}
        ),
        "target_parameters": sorted(filter(None, parameters.values())) or None,
    }
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    save_file(arrays, folder / _FILE, metadata={"format": "pt"})


def load(path: str | os.PathLike, model: PyTree) -> PyTree:
    """Return the model with the adapter of a folder; matrices that the folder does not name stay as they are.

    Of an adapter of a model that sees or hears too, the text part.

    Layers of a stack that the settings leave out get an addition of zeros. Where ranks or scales differ between layers,
    all have the largest rank, the rest being zeros, and B holds the scale. What began as a part of its matrix (PiSSA,
    OLoRA) has twice its rank: what it learned, less what it began as.

    Raises:
        ValueError: the path holds no adapter, one of another model, or one that is refused by name.
    """
    folder = Path(path).expanduser()
    settings = read(folder)
    dims = model.config.dims
    held = text_part(model.config, {name.removeprefix(_PREFIX): tensor for name, tensor in _read(folder).items()})
    tensors = {f"{_PREFIX}{name}": tensor for name, tensor in held.items()}
    opened = _Opened(settings, experts.apart(tensors, settings, dims.get("E", 1)), dims)
    found, parts = [], []
    for row, whole in matrices(model):
        held = experts.as_parameter(row) if settings.parameters else row
        if held.stack != held.lead:
            continue
        part = _part(held, whole, opened)
        if part is not None:
            found.append(row)
            parts.append(part)
    left = {name: tensor for name, tensor in opened.tensors.items() if name not in opened.used}
    problems = opened.problems + [f"unexpected: {name} {list(tensor.shape)}" for name, tensor in left.items()]
    if problems or not found:
        lines = "\n".join(f"  {problem}" for problem in problems) or "  it has no tensors"
        raise ValueError(f"the adapter in `{folder}` does not belong to this model:\n{lines}")
    return put(model, found, parts)


@dataclass(frozen=True)
class _Opened:
    """An adapter's settings and tensors, those of them that have been used, and what is wrong with them."""

    settings: Settings
    tensors: dict[str, np.ndarray]
    dims: dict[str, int]
    used: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def _part(row: Row, whole: Any, opened: _Opened) -> LowRank | None:
    """Return a matrix with what is added to it, having noted its tensors as used; None where there is nothing."""
    sides, settings, dims = _sides(row, opened), opened.settings, opened.dims
    if not sides:
        return None
    out, into = _out_in(row, dims)
    scales = {settings.scale_of(target) for target, _, taken in sides if taken}
    scale = scales.pop() if len(scales) == 1 else 1.0
    pairs = []
    for target, index, taken in sides:
        a, b = taken.get("A", np.zeros((0, into), np.float32)), taken.get("B", np.zeros((out, 0), np.float32))
        b = _own(row, b, dims)
        own = settings.scale_of(target)
        if "base" in taken:
            whole = whole.at[index].set(jnp.asarray(_turned(row, taken["base"], dims), whole.dtype))
        if taken and settings.begin is not None:
            first_a, first_b = _first(_on_disk(row, np.asarray(whole[index]), dims), settings.begin, a.shape[0], own)
            a, b = np.concatenate([a, first_a]), np.concatenate([b, -first_b], axis=1)
        pairs.append((a, b if own == scale else b * (own / scale)))
    most = max(len(a) for a, _ in pairs)
    every_a = np.stack([np.pad(a.astype(np.float32), ((0, most - len(a)), (0, 0))).T for a, _ in pairs])
    every_b = np.stack([np.pad(b.astype(np.float32), ((0, 0), (0, most - b.shape[1]))).T for _, b in pairs])
    sizes = zip((every_a, every_b), letters_of(row), strict=True)
    a, b = (_stacked(row, dims, every, letters) for every, letters in sizes)
    dtype = np.result_type(*(tensor.dtype for _, _, taken in sides for tensor in taken.values()))
    magnitude = None
    if settings.dora:
        lengths = np.stack([_own(row, taken["magnitude"], dims) for _, _, taken in sides])
        magnitude = _stacked(row, dims, lengths, letters_of(row)[1].replace("R", ""))
    return LowRank(whole, a.astype(dtype), b.astype(dtype), scale, magnitude)


def _sides(row: Row, opened: _Opened) -> list[tuple[str, tuple[int, ...], dict[str, np.ndarray]]]:
    """Return what settings call each layer's module, its index and its tensors; none, and why, if they are wrong."""
    settings, tensors, problems = opened.settings, opened.tensors, opened.problems
    out, into = _out_in(row, opened.dims)
    sides, missing, before = [], [], len(problems)
    for name, index in row.tensors(opened.dims):
        module = _module(name)
        names, target = dict(_names(module)), experts.target(module)
        taken = {part: tensors[one] for part, one in names.items() if one in tensors}
        opened.used.update(names.values())
        rank = settings.rank_of(target)
        shapes = {"A": (rank, into), "B": (out, rank), "magnitude": (out,), "base": (out, into)}
        problems += [
            f"wrong shape: {_PREFIX}{module} has {part} {list(tensor.shape)}, must be {list(shapes[part])}"
            for part, tensor in taken.items()
            if tensor.shape != shapes[part]
        ]
        sides.append((target, index, taken))
        if taken or settings.adapts(target):
            missing += [names[part] for part in ("A", "B", "magnitude")[: 2 + settings.dora] if part not in taken]
    if not any(taken for _, _, taken in sides):
        return []
    problems += [f"missing: {name}" for name in missing]
    if settings.dora and (any(not taken for _, _, taken in sides) or "E" in row.stack):
        problems.append(f"`use_dora` of some layers or of experts is not supported: {row.leaf}")
    if row.fused and settings.begin is not None:
        problems.append(f"`init_lora_weights`={settings.begin!r} of a tensor that holds several is not supported")
    return sides if len(problems) == before else []


def _first(whole: np.ndarray, begin: str, rank: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the A and B that an adapter began with, as a part of its matrix `[out, in]`.

    PEFT takes them out of the base; here the base stays, and they are taken away beside what was learned. What `pissa`
    takes differs there by up to 4e-6 of small matrices: PyTorch's decomposition in float32 is that far from the exact
    one, NumPy's 6e-8.
    """
    wide = whole.astype(np.float32)
    if begin == "pissa":
        left, sizes, right = np.linalg.svd(wide, full_matrices=False)
        return right[:rank], left[:, :rank] * sizes[:rank] / scale
    q, r = np.linalg.qr(wide)
    return r[:rank], q[:, :rank]


def _made(row: Row, dims: dict[str, int]) -> tuple[list[int], list[int], tuple[slice, ...]]:
    """Return the sizes of a matrix's outputs, those of all that its tensor holds, and where among these its own are."""
    letters, whole = [letter for letter in row.inner if letter not in row.fan_in], row.disk_dims(dims)
    own = tuple(row.slice_on_disk(letter, 0, dims[letter], dims) for letter in letters)
    return [dims[letter] for letter in letters], [whole[letter] for letter in letters], own


def _out_in(row: Row, dims: dict[str, int]) -> tuple[int, int]:
    """Return how many outputs a tensor has, with all that it holds, and how many inputs."""
    return math.prod(_made(row, dims)[1]), math.prod(dims[letter] for letter in row.fan_in)


def _own(row: Row, held: np.ndarray, dims: dict[str, int]) -> np.ndarray:
    """Return of an array `[out, ...]` of a tensor that holds several matrices the rows of this one."""
    sizes, every, own = _made(row, dims)
    return held.reshape(*every, *held.shape[1:])[own].reshape(math.prod(sizes), *held.shape[1:])


def _on_disk(row: Row, whole: np.ndarray, dims: dict[str, int]) -> np.ndarray:
    """Return one matrix as `[out, in]`."""
    summed = [row.inner.index(letter) for letter in row.fan_in]
    made = [i for i in range(len(row.inner)) if i not in summed]
    return whole.transpose(made + summed).reshape(-1, math.prod(dims[letter] for letter in row.fan_in))


def _turned(row: Row, tensor: np.ndarray, dims: dict[str, int]) -> np.ndarray:
    """Return a matrix `[out, in]` as it is in the model."""
    left = [letter for letter in row.inner if letter not in row.fan_in] + list(row.fan_in)
    split = tensor.reshape([dims[letter] for letter in left])
    return split.transpose([left.index(letter) for letter in row.inner])


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _pattern(row: Row) -> str:
    """Return the regular expression of a row's modules, or of their weights, where these are adapted by themselves."""
    name = _module(row.tensor).removesuffix(".{}")  # of experts, the parameter
    before, layer, rest = name.partition("{}")
    if layer:
        layer = r"\d+" if row.layers is None else f"({'|'.join(map(str, row.layers))})"
    rest = r"\d+".join(map(re.escape, rest.split("{}")))
    return re.escape(before) + layer + rest + r"(\.weight)?" * row.tensor.endswith(".weight")


def _names(module: str) -> tuple[tuple[str, str], ...]:
    """Return what PEFT calls the tensors that a module may have."""
    stem = f"{_PREFIX}{module}"
    return (
        ("A", f"{stem}.lora_A.weight"),
        ("B", f"{stem}.lora_B.weight"),
        ("magnitude", f"{stem}.lora_magnitude_vector"),
        ("base", f"{stem}.base_layer.weight"),  # of an adapted head
    )


@dataclass(frozen=True)
class _Module:
    """What is added to a tensor. One that holds several matrices has one A: theirs one below the other, each with the
    columns of B that are its own, or the one that all share."""

    row: Row
    rank: int
    scale: float
    members: list[tuple[Row, LowRank]]
    shared: bool

    @classmethod
    def of(cls, members: list[tuple[Row, LowRank]]) -> "_Module":
        row, first = members[0]
        shared = all(np.array_equal(part.a, first.a) for _, part in members)
        ranks = [part.a.shape[-1] for _, part in members]
        return cls(row, ranks[0] if shared else sum(ranks), first.scale, members, shared)

    def tensors(self, dims: dict[str, int]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each layer's tensors, by name."""
        _, every, _ = _made(self.row, dims)
        arrays = [
            (own, np.asarray(part.a), np.asarray(part.b), part.scale / self.scale, part.magnitude)
            for own, part in self.members
        ]
        dtype = arrays[0][2].dtype
        for name, index in self.row.tensors(dims):
            names = dict(_names(_module(name)))
            sides = [a[index].reshape(-1, a.shape[-1]).T for _, a, *_ in arrays]
            whole, first = np.zeros((*every, self.rank), dtype), 0
            lengths = np.ones(every, dtype)
            for own, a, b, share, magnitude in arrays:
                sizes, _, within = _made(own, dims)
                rank = a.shape[-1]
                side = np.moveaxis(b[index].reshape(rank, *sizes), 0, -1)
                whole[(*within, slice(first, first + rank))] = side if share == 1 else side * share
                first += 0 if self.shared else rank
                if magnitude is not None:
                    lengths[within] = np.asarray(magnitude)[index].reshape(sizes)
            yield names["A"], np.ascontiguousarray(sides[0] if self.shared else np.concatenate(sides))
            yield names["B"], whole.reshape(-1, self.rank)
            if arrays[0][4] is not None:
                yield names["magnitude"], lengths.reshape(-1)


def _stacked(row: Row, dims: dict[str, int], tensors: np.ndarray, letters: str) -> Any:
    """Return a part in the model's dimensions from those of each layer."""
    sizes = {**dims, **dict(zip(row.letters, row.shape(dims), strict=True)), "R": tensors.shape[-1]}
    sizes["R"] = tensors.shape[2] if letters.endswith("R") else tensors.shape[1]
    return jnp.asarray(tensors.reshape([sizes[letter] for letter in letters]))


def _read(folder: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(folder / _FILE, "np") as opened:
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, TypeError) as error:
        raise ValueError(f"cannot load an adapter from `{folder}`: {_FILE}: {error}.") from None
    flat = lambda name: 1 if "lora_magnitude_vector" in name else 2
    odd = [
        name
        for name, array in found.items()
        if array.ndim != flat(name) or not jnp.issubdtype(array.dtype, jnp.floating)
    ]
    if odd:
        raise ValueError(f"cannot load an adapter from `{folder}`: {', '.join(odd)} are no matrices of floats.")
    return {name.removesuffix(".weight") if flat(name) == 1 else name: array for name, array in found.items()}
