"""Four-bit floats that share a power of two, 32 at a time (https://arxiv.org/abs/2310.10537), as gpt-oss has them."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from zoo.formats import MXFP4
from zoo.huggingface.quantised.decoded import Kept, ends, made
from zoo.huggingface.tensors import Tensor

_VALUES = np.array(MXFP4, np.float32)
_SCALE = np.dtype(ml_dtypes.bfloat16)  # which has the exponents of float32


def read(settings: dict[str, Any], tensors: Mapping[str, Tensor], label: str) -> dict[str, Tensor]:
    """Return each tensor that `NAME_blocks` [E, out, groups, 16] and `NAME_scales` [E, out, groups] stand for."""
    found: dict[str, Tensor] = {}
    for name in ends(tensors, "_blocks"):
        blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        *lead, out, groups, half = blocks.shape
        kept = Kept("mxfp4", groups, _SCALE, _read, turned=True) if half == 16 and len(lead) == 1 else None
        found[name] = made(name, (*lead, groups * half * 2, out), label, (blocks, scales), _decode, kept)
    return found


def _read(blocks: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers `[E, out, in / 2]` and scales `[E, out, groups]`."""
    return blocks.reshape(*blocks.shape[:-2], -1), np.ldexp(np.float32(1), scales.astype(np.int32) - 127).astype(_SCALE)


def _decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return `[E, in, out]`; of each byte the low half comes first."""
    values = np.stack([_VALUES[blocks & 15], _VALUES[blocks >> 4]], axis=-1).reshape(*scales.shape, -1)
    scaled = np.ldexp(values, scales.astype(np.int32)[..., None] - 127)
    return scaled.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)
