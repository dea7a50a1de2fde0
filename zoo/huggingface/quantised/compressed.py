"""The format compressed-tensors: eight-bit floats or integers with scales, or integers packed in words of 32 bits
(https://github.com/neuralmagic/compressed-tensors)."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from zoo.huggingface.quantised.decoded import ends, made, nibbles
from zoo.huggingface.quantised.fp8 import scaled
from zoo.huggingface.tensors import Tensor

_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")


def read(settings: dict[str, Any], tensors: Mapping[str, Tensor], label: str) -> dict[str, Tensor]:
    """Return each matrix that `weight` or `weight_packed` stands for.

    Raises:
        ValueError: the format is another, or its integers have zeros of their own.
    """
    kind = settings.get("format")
    if kind not in _FORMATS:
        raise ValueError(f"`quantization_config`'s format={kind!r} is not supported, only {', '.join(_FORMATS)}.")
    if zeros := ends(tensors, ".weight_zero_point"):
        raise ValueError(f"`{zeros[0]}.weight_zero_point` is not supported: only symmetric integers are.")
    weights = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    bits = {one.get("num_bits", 8) for one in weights} or {8}
    blocks = [one["block_structure"] for one in weights if one.get("block_structure")]
    found: dict[str, Tensor] = {}
    for module in ends(tensors, ".weight_scale"):
        name, scale = f"{module}.weight", tensors[f"{module}.weight_scale"]
        if f"{module}.weight_packed" not in tensors:
            parts = tensors[name], scale
            decode = functools.partial(_scaled, block=blocks[0] if blocks else None)
            found[name] = made(name, parts[0].shape, label, parts, decode)
            continue
        if len(bits) > 1 or not bits <= {4, 8}:
            raise ValueError(f"`quantization_config`'s num_bits={sorted(bits)} is not supported, only 4 or 8.")
        (width,) = bits
        words = tensors[f"{module}.weight_packed"]
        shape = tuple(int(size) for size in tensors[f"{module}.weight_shape"].array())
        parts = (words, scale, tensors[f"{module}.weight_shape"])
        found[name] = made(name, shape, label, parts, functools.partial(_unpacked, bits=width))
    return found


def _scaled(weight, scale, block):
    if scale.ndim == 2 and scale.shape[1] > 1 and block is None:  # a scale for each group of inputs
        return weight.astype(np.float32) * np.repeat(
            scale.astype(np.float32), weight.shape[1] // scale.shape[1], axis=1
        )
    return scaled(weight, scale, block)


def _unpacked(words, scale, shape, *, bits):
    """Return `[out, in]` of words `[out, in / per word]`, whose integers are stored with half their range added."""
    rows, columns = (int(size) for size in shape)
    values = nibbles(words, bits).reshape(rows, -1)[:, :columns].astype(np.int32) - 2 ** (bits - 1)
    return values * np.repeat(scale.astype(np.float32), -(-columns // scale.shape[1]), axis=1)[:, :columns]
