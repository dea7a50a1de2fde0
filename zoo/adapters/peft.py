"""LoRA adapters as folders of PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

On disk a matrix of `out, in` has `lora_A [R, in]` and `lora_B [out, R]`, under its Hugging Face name; with DoRA also a
`lora_magnitude_vector [out]`. What the settings mean is in `zoo.adapters.settings`.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from zoo.adapters.lora import LowRank, adapted, letters_of, matrices, put
from zoo.adapters.settings import CONFIG, Settings, read
from zoo.parameters import Row

_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def save(model: PyTree, path: str | os.PathLike) -> None:
    """Write the adapter of a model as a folder that `load` and PEFT read; the model itself is not written.

    Raises:
        ValueError: the model has no adapter, or one of which only some parts are DoRA.
    """
    parts = list(adapted(model))
    kinds = {part.magnitude is not None for _, part in parts}
    if len(kinds) != 1:
        what = "it has none" if not kinds else "some of its parts are DoRA and some are not, and a folder holds one"
        raise ValueError(f"cannot save an adapter at `{path}`: {what}.")
    rank, scale = parts[0][1].a.shape[-1], parts[0][1].scale
    others = {_pattern(row): part for row, part in parts if (part.a.shape[-1], part.scale) != (rank, scale)}
    arrays = {name: array for row, part in parts for name, array in _tensors(row, part, model.config.dims)}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": kinds.pop(),
        "rank_pattern": {pattern: part.a.shape[-1] for pattern, part in others.items()},
        "alpha_pattern": {pattern: part.scale * part.a.shape[-1] for pattern, part in others.items()},
        "inference_mode": True,
        "base_model_name_or_path": None,
        "target_modules": sorted({_module(row.tensor).rpartition(".")[2] for row, _ in parts}),
    }
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    save_file(arrays, folder / _FILE, metadata={"format": "pt"})


def load(path: str | os.PathLike, model: PyTree) -> PyTree:
    """Return the model with the adapter of a folder; matrices that the folder does not name stay as they are.

    Layers of a stack that the settings leave out get an addition of zeros. Where ranks or scales differ between layers,
    all have the largest rank, the rest being zeros, and B holds the scale. What began as a part of its matrix (PiSSA,
    OLoRA) has twice its rank: what it learned, less what it began as.

    Raises:
        ValueError: the path holds no adapter, or one of another model or of a kind that is refused by name.
    """
    folder = Path(path).expanduser()
    settings = read(folder)
    tensors = _read(folder)
    found, parts, problems = [], [], []
    for row, whole in matrices(model):
        part = _part(row, whole, settings, tensors, model.config.dims, problems)
        if part is not None:
            found.append(row)
            parts.append(part)
    problems += [f"unexpected: {name} {list(tensor.shape)}" for name, tensor in tensors.items()]
    if problems or not found:
        lines = "\n".join(f"  {problem}" for problem in problems) or "  it has no tensors"
        raise ValueError(f"the adapter in `{folder}` does not belong to this model:\n{lines}")
    return put(model, found, parts)


def _part(
    row: Row, whole: Any, settings: Settings, tensors: dict[str, np.ndarray], dims: dict[str, int], problems: list[str]
) -> LowRank | None:
    """Return a matrix with what is added to it, having taken its tensors; None where there is nothing."""
    sides = _sides(row, settings, tensors, dims, problems)
    if not sides:
        return None
    out, into = row.disk_shape(dims)
    scales = {settings.scale_of(module) for module, _, taken, _ in sides if taken}
    scale = scales.pop() if len(scales) == 1 else 1.0
    pairs = []
    for module, place, taken, _ in sides:
        a, b = taken.get("A", np.zeros((0, into), np.float32)), taken.get("B", np.zeros((out, 0), np.float32))
        own = settings.scale_of(module)
        if "base" in taken:
            whole = whole.at[place].set(jnp.asarray(_turned(row, taken["base"], dims), whole.dtype))
        if taken and settings.begin is not None:
            first_a, first_b = _first(_on_disk(row, np.asarray(whole[place]), dims), settings.begin, a.shape[0], own)
            a, b = np.concatenate([a, first_a]), np.concatenate([b, -first_b], axis=1)
        pairs.append((a, b if own == scale else b * (own / scale)))
    most = max(len(a) for a, _ in pairs)
    every_a = np.stack([np.pad(a.astype(np.float32), ((0, most - len(a)), (0, 0))).T for a, _ in pairs])
    every_b = np.stack([np.pad(b.astype(np.float32), ((0, 0), (0, most - b.shape[1]))).T for _, b in pairs])
    sizes = zip((every_a, every_b), letters_of(row), strict=True)
    a, b = (_stacked(row, dims, every, letters) for every, letters in sizes)
    dtype = np.result_type(*(tensor.dtype for _, _, taken, _ in sides for tensor in taken.values()))
    magnitude = None
    if settings.dora:
        lengths = np.stack([taken["magnitude"] for _, _, taken, _ in sides])
        magnitude = _stacked(row, dims, lengths, letters_of(row)[1].replace("R", ""))
    return LowRank(whole, a.astype(dtype), b.astype(dtype), scale, magnitude)


def _sides(
    row: Row, settings: Settings, tensors: dict[str, np.ndarray], dims: dict[str, int], problems: list[str]
) -> list[tuple[str, tuple[int, ...], dict[str, np.ndarray], list[str]]]:
    """Return each layer's module, its index, its tensors and the names of those it lacks; none, and why, if wrong."""
    out, into = row.disk_shape(dims)
    sides, before = [], len(problems)
    for name, place in row.places(dims):
        module = _module(name)
        taken = {kind: tensors.pop(one) for kind, one in _names(module) if one in tensors}
        rank = settings.rank_of(module)
        shapes = {"A": (rank, into), "B": (out, rank), "magnitude": (out,), "base": (out, into)}
        problems += [
            f"wrong shape: {_PREFIX}{module} has {kind} {list(tensor.shape)}, must be {list(shapes[kind])}"
            for kind, tensor in taken.items()
            if tensor.shape != shapes[kind]
        ]
        needed = ("A", "B", "magnitude") if settings.dora else ("A", "B")
        sides.append((module, place, taken, [kind for kind in needed if kind not in taken]))
    if not any(taken for _, _, taken, _ in sides):
        return []
    problems += [
        f"missing: {dict(_names(module))[kind]}"
        for module, _, taken, missing in sides
        for kind in missing
        if taken or settings.adapts(module)
    ]
    if settings.dora and (any(not taken for _, _, taken, _ in sides) or "E" in row.stack):
        problems.append(f"`use_dora` of some layers or of experts is not supported: {row.leaf}")
    return sides if len(problems) == before else []


def _first(whole: np.ndarray, begin: str, rank: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the A and B that an adapter began with, as a part of its matrix `[out, in]`.

    PEFT takes them out of the base; here the base stays, and they are taken away beside what was learned.
    """
    wide = whole.astype(np.float32)
    if begin == "pissa":
        left, sizes, right = np.linalg.svd(wide, full_matrices=False)
        return right[:rank], left[:, :rank] * sizes[:rank] / scale
    q, r = np.linalg.qr(wide)
    return r[:rank], q[:, :rank]


def _on_disk(row: Row, whole: np.ndarray, dims: dict[str, int]) -> np.ndarray:
    """Return one matrix as it is on disk, `[out, in]`."""
    letters = row.letters[len(row.stack) :]
    return whole.transpose([letters.index(letter) for letter in "".join(row.disk)]).reshape(row.disk_shape(dims))


def _turned(row: Row, tensor: np.ndarray, dims: dict[str, int]) -> np.ndarray:
    """Return one matrix of a disk as it is in the model."""
    left = "".join(row.disk)
    split = tensor.reshape([dims[letter] for letter in left])
    return split.transpose([left.index(letter) for letter in row.letters[len(row.stack) :]])


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _pattern(row: Row) -> str:
    """Return the regular expression of a row's modules."""
    return r"\d+".join(map(re.escape, _module(row.tensor).split("{}")))


def _names(module: str) -> tuple[tuple[str, str], ...]:
    """Return what PEFT calls the tensors that a module may have."""
    stem = f"{_PREFIX}{module}"
    return (
        ("A", f"{stem}.lora_A.weight"),
        ("B", f"{stem}.lora_B.weight"),
        ("magnitude", f"{stem}.lora_magnitude_vector"),
        ("base", f"{stem}.base_layer.weight"),  # of an adapted head
    )


def _tensors(row: Row, part: LowRank, dims: dict[str, int]) -> Iterator[tuple[str, np.ndarray]]:
    rank = part.a.shape[-1]
    a, b = np.asarray(part.a), np.asarray(part.b)
    for name, place in row.places(dims):
        names = dict(_names(_module(name)))
        yield names["A"], np.ascontiguousarray(a[place].reshape(-1, rank).T)
        yield names["B"], np.ascontiguousarray(b[place].reshape(rank, -1).T)
        if part.magnitude is not None:
            yield names["magnitude"], np.asarray(part.magnitude)[place].reshape(-1)


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
