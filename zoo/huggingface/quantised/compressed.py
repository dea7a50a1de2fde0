"""The format compressed-tensors: eight-bit floats or integers with scales, or integers packed in words of 32 bits
(https://github.com/neuralmagic/compressed-tensors)."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from zoo.huggingface.quantised import fp8, nvfp4
from zoo.huggingface.quantised.decoded import MEND, Kept, ends, group_of, made, nibbles, together
from zoo.huggingface.tensors import DTYPES, Tensor

_FOURS = "nvfp4-pack-quantized"
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", _FOURS)


def read(settings: dict[str, Any], tensors: Mapping[str, Tensor], label: str) -> dict[str, Tensor]:
    """Return each matrix that `weight` or `weight_packed` stands for.

    Raises:
        ValueError: the format is another, packed integers have other than 4 or 8 bits, weights are rotated or sparse,
            or tensors are not what the settings say.
    """
    if _format(settings) == _FOURS:
        return nvfp4.matrices(tensors, label, "weight_packed", "weight_global_scale", divided=True)
    told = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    found: dict[str, Tensor] = {}
    for module in ends(tensors, ".weight_scale"):
        if f"{module}.weight_zero_point" not in tensors and told and all(one.get("symmetric") is False for one in told):
            raise ValueError(
                f"`{module}.weight` has no weight_zero_point, and `quantization_config` says symmetric=false: {MEND}."
            )
        matrix = _packed if f"{module}.weight_packed" in tensors else _apart
        found[f"{module}.weight"] = matrix(module, told, tensors, label)
    return found


def _format(settings: dict[str, Any]) -> str:
    """Return in which of its formats a folder is; refuse others, and weights that are rotated or sparse."""
    format = settings.get("format")
    if format not in _FORMATS:
        raise ValueError(f"`quantization_config`'s format={format!r} is not supported, only {', '.join(_FORMATS)}.")
    sparse = (settings.get("sparsity_config") or {}).get("format", "dense")
    rotated = "transform_config, which rotates them," if settings.get("transform_config") else None
    if which := rotated if sparse == "dense" else f"sparsity_config of format={sparse!r}":
        raise ValueError(f"`quantization_config`'s {which} is not supported: save the weights without it.")
    return format


def _apart(module: str, told: list[dict[str, Any]], tensors: Mapping[str, Tensor], label: str) -> Tensor:
    """Return the matrix of floats or integers of 8 bits, with scales of blocks, rows, groups of inputs or of all."""
    name, (scale, zeros, groups, index) = f"{module}.weight", _beside(module, tensors)
    parts = tensors[name], scale, *zeros
    shape, block = parts[0].shape, next((one["block_structure"] for one in told if one.get("block_structure")), None)
    if block is not None or groups == 1:
        fp8.check(*parts[:2], block)
    group = group_of(name, shape[1], groups, [one.get("group_size") for one in told], index)
    whole = parts[0].dtype == "I8" and block is None
    kept = together(_kept(shape, scale, 8, bool(zeros)), group) if whole else None
    if kept is None and not zeros and (groups == 1 or block is not None):  # not groups of a row's inputs
        kept = fp8.kept(*parts[:2], block)
    return made(name, shape, label, parts, functools.partial(_scaled, block=block, group=group), kept)


def _packed(module: str, told: list[dict[str, Any]], tensors: Mapping[str, Tensor], label: str) -> Tensor:
    """Return the matrix of integers that lie in words of 32 bits."""
    name, (scale, zeros, groups, index) = f"{module}.weight", _beside(module, tensors)
    bits: list[int] = sorted({one.get("num_bits", 8) for one in told} or {8})
    types: list[str] = sorted({one.get("type", "int") for one in told} or {"int"})
    if not {*bits} <= {4, 8}:
        raise ValueError(f"`quantization_config`'s num_bits={bits} is not supported, only 4 or 8.")
    words = tensors[f"{module}.weight_packed"]
    shape = tuple(int(size) for size in tensors[f"{module}.weight_shape"].array())
    width = next((one for one in bits if -(-shape[1] * one // 32) == words.shape[1]), None)
    if width is None or types != ["int"]:
        raise ValueError(
            f"`{words.name}` has {words.shape[1]} words of 32 bits for each {shape[1]} numbers, and "
            f"`quantization_config` says type={' and '.join(types)} of num_bits={' and '.join(map(str, bits))}: {MEND}."
        )
    group = group_of(name, shape[1], groups, [one.get("group_size") for one in told], index)
    decode = functools.partial(_unpacked, shape=shape, group=group, bits=width)
    kept = together(_kept(shape, scale, width, bool(zeros)), group)
    return made(name, shape, label, (words, scale, *zeros), decode, kept)


def _beside(module: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...], int, Tensor | None]:
    """Return a matrix's scales; its zeros, if it has any; how many groups a row has; and the group of each input."""
    scale, zero = tensors[f"{module}.weight_scale"], tensors.get(f"{module}.weight_zero_point")
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    return scale, () if zero is None else (zero,), groups, tensors.get(f"{module}.weight_g_idx")


def _kept(shape, scale, bits, zeros):
    """Say how a matrix `[out, in]` of integers stays, if groups of its inputs are equally long and neighbours."""
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    if scale.dtype not in DTYPES or (bits == 4 and shape[1] % 2):
        return None

    def read(weight, scale, zero=None):
        spread = lambda own: np.broadcast_to(own.reshape(-1, groups), (shape[0], groups))
        if weight.dtype == np.int8:
            return (weight, spread(scale)) if zero is None else (weight, spread(scale), spread(zero).astype(np.int8))
        weight = weight.view(np.uint8).reshape(shape[0], -1)[:, : shape[1] * bits // 8]
        weight = weight if bits == 4 else (weight ^ np.uint8(128)).view(np.int8)
        return (weight, spread(scale), *(() if zero is None else (_zeros(zero, shape[0], bits).astype(np.int8),)))

    return Kept(f"int{bits}", groups, DTYPES[scale.dtype], read, zeros=zeros)


def _scaled(weight, scale, zero=None, *, block, group):
    """Return `[out, in]` of numbers that are not packed, with scales of blocks, rows, groups of inputs or of all."""
    grouped = lambda own: own.astype(np.float32).reshape(len(own), -1)[:, group] if own.size > 1 else own.reshape(())
    wide = weight.astype(np.float32) - (np.float32(0) if zero is None else grouped(zero).astype(np.float32))
    if scale.ndim == 2 and scale.shape[1] > 1 and block is None:
        return wide * grouped(scale)
    return fp8.scaled(wide, scale, block)


def _unpacked(words, scale, zero=None, *, shape, group, bits):
    """Return `[out, in]` of words `[out, in / per word]`, whose integers are stored with half their range added."""
    rows, columns = shape
    values = nibbles(words, bits).reshape(rows, -1)[:, :columns].astype(np.int32) - 2 ** (bits - 1)
    values = values if zero is None else values - _zeros(zero, rows, bits)[:, group]
    return values * scale.astype(np.float32).reshape(len(scale), -1)[:, group]


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
