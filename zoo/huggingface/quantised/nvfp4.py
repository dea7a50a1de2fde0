"""Four-bit floats that share an eight-bit float, 16 at a time, and one scale for the matrix (NVFP4), and the folders of
NVIDIA's Model Optimizer (https://github.com/NVIDIA/Model-Optimizer), which have these or eight-bit floats."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from zoo.formats import MXFP4
from zoo.huggingface.quantised import fp8
from zoo.huggingface.quantised.decoded import Kept, ends, made
from zoo.huggingface.tensors import Tensor

_VALUES = np.array(MXFP4, np.float32)
_NAMES = ("FP8", "NVFP4", "MIXED_PRECISION", "W4A16_NVFP4", "FP8_PER_CHANNEL_PER_TOKEN")


def read_modelopt(settings: dict[str, Any], tensors: Mapping[str, Tensor], label: str) -> dict[str, Tensor]:
    """Return each matrix of eight-bit or of four-bit floats; each module's tensors say which it has.

    Raises:
        ValueError: the folder has other numbers.
    """
    name = settings.get("quant_algo")
    if name not in _NAMES:
        known = " or ".join(map(repr, _NAMES))
        raise ValueError(f"`quantization_config`'s quant_algo={name!r} is not supported, only {known}.")
    return fp8.read({}, tensors, label) | matrices(tensors, label, "weight", "weight_scale_2", divided=False)


def matrices(tensors: Mapping[str, Tensor], label: str, numbers: str, whole: str, divided: bool) -> dict[str, Tensor]:
    """Return each module's matrix of four-bit floats, whose tensors are `numbers`, `weight_scale` and `whole`.

    Args:
        tensors: the folder's.
        label: the type that they count as.
        numbers: what the numbers are called.
        whole: what the scale of a matrix is called.
        divided: the scale of a matrix divides, in place of multiplying.
    """
    found: dict[str, Tensor] = {}
    for module in ends(tensors, f".{whole}"):
        parts = tuple(tensors[f"{module}.{part}"] for part in (numbers, "weight_scale", whole))
        found[f"{module}.weight"] = _matrix(f"{module}.weight", parts, label, divided)
    return found


def _matrix(name: str, parts: tuple[Tensor, ...], label: str, divided: bool) -> Tensor:
    """Return the matrix `[out, in]` of numbers `[out, in / 2]`, scales `[out, groups]`, and a scale of all."""
    shape, of = parts[0].shape, parts[1].shape
    if parts[0].dtype != "U8" or len(shape) != 2 or len(of) != 2 or shape[0] != of[0] or 2 * shape[1] % max(1, of[1]):
        told = f"{parts[0].dtype} {list(shape)} with scales {list(of)}"
        raise ValueError(f"`{name}` is {told}, and must be U8 [out, in / 2] with scales [out, groups] of equal groups.")
    (out, half), groups = shape, of[1]
    scales = functools.partial(_read, divided=divided)

    def decode(*parts):
        numbers, scale = scales(*parts)
        values = np.stack([_VALUES[numbers & 15], _VALUES[numbers >> 4]], axis=-1).reshape(out, groups, -1)
        return values * scale[..., None]

    return made(name, (out, 2 * half), label, parts, decode, Kept("mxfp4", groups, np.dtype("f4"), scales))


def _read(numbers: np.ndarray, scale: np.ndarray, whole: np.ndarray, *, divided: bool) -> tuple[np.ndarray, ...]:
    """Return numbers of which two are in a byte, and scales in float32."""
    wide, whole = scale.astype(np.float32), whole.astype(np.float32).reshape(())
    return numbers, wide / whole if divided else wide * whole
