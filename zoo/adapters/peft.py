"""LoRA adapters as folders of PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

On disk a matrix of `out, in` has `lora_A [R, in]` and `lora_B [R, out]` transposed, under its Hugging Face name.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from zoo.adapters.lora import LowRank, adapted, letters_of, matrices, put
from zoo.parameters import Row

_CONFIG, _FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Settings that change what an adapter computes, and the values under which they do not.
_PLAIN: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "trainable_token_indices": ([], None),
}


def save(model: PyTree, path: str | os.PathLike) -> None:
    """Write the adapter of a model as a folder that `load` and PEFT read; the model itself is not written.

    Raises:
        ValueError: the model has no adapter, or one whose parts differ in rank or scale.
    """
    parts = list(adapted(model))
    kinds = {(part.a.shape[-1], part.scale) for _, part in parts}
    if len(kinds) != 1:
        what = "it has none" if not kinds else f"its parts have (rank, scale) {sorted(kinds)}, and a folder holds one"
        raise ValueError(f"cannot save an adapter at `{path}`: {what}.")
    rank, scale = kinds.pop()
    arrays = {name: array for row, part in parts for name, array in _tensors(row, part, model.config.dims)}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "base_model_name_or_path": None,
        "target_modules": sorted({_module(row.tensor).rpartition(".")[2] for row, _ in parts}),
    }
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    save_file(arrays, folder / _FILE, metadata={"format": "pt"})


def load(path: str | os.PathLike, model: PyTree) -> PyTree:
    """Return the model with the adapter of a folder; matrices that the folder does not name stay as they are.

    Raises:
        ValueError: the path holds no adapter, or one of another model or of a kind that is not plain LoRA.
    """
    folder = Path(path).expanduser()
    scale = _scale(folder)
    tensors = _read(folder)
    dims, found, parts, problems = model.config.dims, [], [], []
    for row, whole in matrices(model):
        names = [_names(name) for name, _ in row.places(dims)]
        present = [name for pair in names for name in pair if name in tensors]
        if not present:
            continue
        missing = [name for pair in names for name in pair if name not in tensors]
        problems += [f"missing: {name}" for name in missing]
        shapes = _disk_shapes(row, dims, tensors[present[0]])
        wrong = [
            name
            for pair in names
            for name, shape in zip(pair, shapes, strict=True)
            if name in tensors and tensors[name].shape != shape
        ]
        problems += [f"wrong shape: {name} is {list(tensors[name].shape)}" for name in wrong]
        if not missing and not wrong:
            a, b = (_stack(row, dims, [tensors[pair[i]] for pair in names], i) for i in (0, 1))
            found.append(row)
            parts.append(LowRank(whole, a, b, scale / a.shape[-1]))
        for name in present:
            tensors.pop(name)
    problems += [f"unexpected: {name} {list(tensor.shape)}" for name, tensor in tensors.items()]
    if problems or not found:
        lines = "\n".join(f"  {problem}" for problem in problems) or "  it has no tensors"
        raise ValueError(f"the adapter in `{folder}` does not belong to this model:\n{lines}")
    return put(model, found, parts)


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _names(tensor: str) -> tuple[str, str]:
    """Return what PEFT calls the A and the B of a tensor."""
    stem = f"{_PREFIX}{_module(tensor)}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def _tensors(row: Row, part: LowRank, dims: dict[str, int]) -> Iterator[tuple[str, np.ndarray]]:
    rank = part.a.shape[-1]
    a, b = np.asarray(part.a), np.asarray(part.b)
    for name, place in row.places(dims):
        name_a, name_b = _names(name)
        yield name_a, np.ascontiguousarray(a[place].reshape(-1, rank).T)
        yield name_b, np.ascontiguousarray(b[place].reshape(rank, -1).T)


def _disk_shapes(row: Row, dims: dict[str, int], sample: np.ndarray) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes that A and B have on disk: the rank is the smaller side of the first one."""
    out, into = row.disk_shape(dims)
    rank = sample.shape[0] if sample.shape[-1] == into else sample.shape[-1]
    return (rank, into), (out, rank)


def _stack(row: Row, dims: dict[str, int], tensors: list[np.ndarray], which: int):
    """Return A (0) or B (1) in the model's dimensions from its tensors on disk."""
    letters = letters_of(row)[which]
    rank = tensors[0].shape[which]
    sizes = {**dims, **dict(zip(row.letters, row.shape(dims), strict=True)), "R": rank}
    return jnp.asarray(np.stack([tensor.T for tensor in tensors]).reshape([sizes[letter] for letter in letters]))


def _scale(folder: Path) -> float:
    """Return `lora_alpha`, having checked that the adapter is plain LoRA."""
    try:
        settings: dict[str, Any] = json.loads((folder / _CONFIG).read_text())
        problems = [
            f"`{key}`={settings[key]!r} is not supported, only {values[0]!r}"
            for key, values in _PLAIN.items()
            if settings.get(key, values[0]) not in values
        ]
        alpha = settings["lora_alpha"]
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            problems.append(f"`lora_alpha`={alpha!r} is not a number")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"cannot load an adapter from `{folder}`: {_CONFIG}: {type(error).__name__} {error}."
        ) from None
    if problems:
        raise ValueError(f"cannot load an adapter from `{folder}`: {'; '.join(problems)}.")
    return float(alpha)


def _read(folder: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(folder / _FILE, "np") as opened:
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, TypeError) as error:
        raise ValueError(f"cannot load an adapter from `{folder}`: {_FILE}: {error}.") from None
    odd = [name for name, array in found.items() if array.ndim != 2 or not jnp.issubdtype(array.dtype, jnp.floating)]
    if odd:
        raise ValueError(f"cannot load an adapter from `{folder}`: {', '.join(odd)} are no matrices of floats.")
    return found
