"""The format compressed-tensors: eight-bit floats or integers with scales, or integers packed in words of 32 bits
(https://github.com/neuralmagic/compressed-tensors)."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from zoo.huggingface.quantised import fp8
from zoo.huggingface.quantised.decoded import Kept, ends, made, nibbles
from zoo.huggingface.tensors import DTYPES, Tensor

_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")


def read(settings: dict[str, Any], tensors: Mapping[str, Tensor], label: str) -> dict[str, Tensor]:
    """Return each matrix that `weight` or `weight_packed` stands for.

    Raises:
        ValueError: the format is another, or integers that are not packed have zeros of their own.
    """
    format = settings.get("format")
    if format not in _FORMATS:
        raise ValueError(f"`quantization_config`'s format={format!r} is not supported, only {', '.join(_FORMATS)}.")
    if zeros := [one for one in ends(tensors, ".weight_zero_point") if f"{one}.weight_packed" not in tensors]:
        raise ValueError(f"`{zeros[0]}.weight_zero_point` is not supported: only that of packed integers is.")
    weights = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    bits = {one.get("num_bits", 8) for one in weights} or {8}
    blocks = [one["block_structure"] for one in weights if one.get("block_structure")]
    found: dict[str, Tensor] = {}
    for module in ends(tensors, ".weight_scale"):
        name, scale = f"{module}.weight", tensors[f"{module}.weight_scale"]
        if f"{module}.weight_packed" not in tensors:
            parts = tensors[name], scale
            decode = functools.partial(_scaled, block=blocks[0] if blocks else None)
            kept = _kept(parts[0].shape, scale, 8) if parts[0].dtype == "I8" and not blocks else None
            if kept is None and (len(scale.shape) < 2 or scale.shape[1] == 1 or blocks):  # not groups of a row's inputs
                kept = fp8.kept(*parts, blocks[0] if blocks else None)
            found[name] = made(name, parts[0].shape, label, parts, decode, kept)
            continue
        if len(bits) > 1 or not bits <= {4, 8}:
            raise ValueError(f"`quantization_config`'s num_bits={sorted(bits)} is not supported, only 4 or 8.")
        (width,) = bits
        words = tensors[f"{module}.weight_packed"]
        shape = tuple(int(size) for size in tensors[f"{module}.weight_shape"].array())
        zeros = tensors.get(f"{module}.weight_zero_point")
        parts = (words, scale, tensors[f"{module}.weight_shape"], *(() if zeros is None else (zeros,)))
        decode = functools.partial(_unpacked, bits=width)
        found[name] = made(name, shape, label, parts, decode, _kept(shape, scale, width, zeros is not None))
    return found


def _kept(shape, scale, bits, zeros=False):
    """Say how a matrix `[out, in]` of integers stays, where groups of its inputs are equally long."""
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    if scale.dtype not in DTYPES or shape[1] % groups or (bits == 4 and shape[1] % 2):
        return None

    def read(weight, scale, _=None, zero=None):
        if weight.dtype != np.int8:  # words
            weight = weight.view(np.uint8).reshape(shape[0], -1)[:, : shape[1] * bits // 8]
            weight = weight if bits == 4 else (weight ^ np.uint8(128)).view(np.int8)
        scales = np.broadcast_to(scale.reshape(-1, groups), (shape[0], groups))
        return (weight, scales) if zero is None else (weight, scales, _zeros(zero, shape[0], bits).astype(np.int8))

    return Kept(f"int{bits}", groups, DTYPES[scale.dtype], read, zeros=zeros)


def _scaled(weight, scale, block):
    if scale.ndim == 2 and scale.shape[1] > 1 and block is None:  # a scale for each group of inputs
        return weight.astype(np.float32) * np.repeat(
            scale.astype(np.float32), weight.shape[1] // scale.shape[1], axis=1
        )
    return fp8.scaled(weight, scale, block)


def _unpacked(words, scale, shape, zero=None, *, bits):
    """Return `[out, in]` of words `[out, in / per word]`, whose integers are stored with half their range added."""
    rows, columns = (int(size) for size in shape)
    values = nibbles(words, bits).reshape(rows, -1)[:, :columns].astype(np.int32) - 2 ** (bits - 1)
    spread = lambda groups: np.repeat(groups, -(-columns // scale.shape[1]), axis=1)[:, :columns]
    values = values if zero is None else values - spread(_zeros(zero, rows, bits))
    return values * spread(scale.astype(np.float32))


def _zeros(words, rows, bits):
    """Return which integers stand for zero `[out, groups]`, of words `[out / per word, groups]`."""
    return nibbles(words, bits).transpose(0, 2, 1).reshape(-1, words.shape[1])[:rows].astype(np.int32) - 2 ** (bits - 1)


def write(name: str, values: np.ndarray, scale: np.ndarray, bits: int) -> dict[str, np.ndarray]:
    """Return the tensors of a matrix `[out, in]` in the format `pack-quantized`, given as `Kept.read` returns it."""
    module = name.removesuffix(".weight")
    shape = np.array([len(values), values.shape[1] * 8 // bits], np.int64)
    numbers = values if bits == 4 else values.view(np.uint8) ^ np.uint8(128)
    filled = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % 4)))
    return {
        f"{module}.weight_packed": np.ascontiguousarray(filled).view(np.int32),
        f"{module}.weight_scale": scale,
        f"{module}.weight_shape": shape,
    }


def settings(skipped: list[str], bits: int, group: int | None) -> dict[str, Any]:
    """Return the `quantization_config` of a folder in `pack-quantized`, of which some modules are as they were."""
    strategy = "channel" if group is None else "group"
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group}
    of_linear = {"targets": ["Linear"], "weights": weights | {"dynamic": False}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": of_linear | {"input_activations": None, "output_activations": None}},
        "ignore": skipped,
    }
