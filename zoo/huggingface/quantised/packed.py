"""Integers of 2, 4 or 8 bits in words of 32, with a scale and a zero for each group of inputs: GPTQ
(https://arxiv.org/abs/2210.17323) and AWQ (https://arxiv.org/abs/2306.00978)."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zoo.huggingface.quantised.decoded import Kept, ends, made, nibbles
from zoo.huggingface.tensors import DTYPES, Tensor

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word of 32 bits each of eight neighbours is


def read_gptq(settings: dict[str, Any], tensors: Mapping[str, Tensor], label: str) -> dict[str, Tensor]:
    """Return each matrix that `qweight`, `qzeros`, `scales` and `g_idx` stand for.

    Raises:
        ValueError: the integers do not fill words of 32 bits.
    """
    bits = _bits(settings, (2, 4, 8))
    offset = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1  # the first format stored zeros less one
    decode = functools.partial(_gptq, bits=bits, offset=offset, group=settings.get("group_size", -1))
    found: dict[str, Tensor] = {}
    for module in ends(tensors, ".qweight"):
        parts = tuple(tensors[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
        index = tensors.get(f"{module}.g_idx")
        shape = parts[0].shape[1], parts[0].shape[0] * 32 // bits
        name = f"{module}.weight"
        plain = bits == 4 and not settings.get("desc_act")  # or inputs of a group stand apart
        kept = _kept(parts[2], shape, functools.partial(_gptq_numbers, bits=bits, offset=offset)) if plain else None
        found[name] = made(name, shape, label, parts if index is None else (*parts, index), decode, kept)
    return found


def _gptq_numbers(words, zeros, *, bits, offset):
    """Return the integers `[in, out]` of words `[in / per word, out]`, and the zeros of their groups."""
    values = nibbles(words, bits).transpose(0, 2, 1).reshape(-1, words.shape[1]).astype(np.int32)
    return values, nibbles(zeros, bits).reshape(zeros.shape[0], -1).astype(np.int32) + offset


def _gptq(words, zeros, scales, index=None, *, bits, offset, group):
    """Return `[out, in]`."""
    values, starts = _gptq_numbers(words, zeros, bits=bits, offset=offset)
    if index is None:
        index = np.arange(len(values)) // (len(values) if group < 1 else group)
    return ((values - starts[index]) * scales.astype(np.float32)[index]).T


def _kept(scales: Tensor, shape: tuple[int, ...], numbers: Callable[..., Any]) -> Kept | None:
    """Say how a matrix `[out, in]` stays, whose groups have zeros of their own."""
    groups = scales.shape[0]
    if shape[1] % groups or shape[1] % 2 or scales.dtype not in DTYPES:
        return None

    def read(words, zeros, scales, index=None):
        values, starts = numbers(words, zeros)
        usual = np.arange(len(values)) // (len(values) // groups)
        if index is not None and not np.array_equal(index, usual):
            raise ValueError(
                "inputs of a group stand apart (g_idx), though desc_act says that they do not: such matrices cannot "
                "stay in fewer bits. Leave quantise=as_stored out."
            )
        codes = values.T.astype(np.uint8)
        return codes[:, ::2] | (codes[:, 1::2] << np.uint8(4)), scales.T, (starts.T - 8).astype(np.int8)

    return Kept("int4", groups, DTYPES[scales.dtype], read, zeros=True)


def read_awq(settings: dict[str, Any], tensors: Mapping[str, Tensor], label: str) -> dict[str, Tensor]:
    """Return each matrix that `qweight`, `qzeros` and `scales` stand for.

    Raises:
        ValueError: the integers have other than 4 bits, or lie in another way than `gemm`.
    """
    bits, version = _bits(settings, (4,)), str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise ValueError(f"`quantization_config`'s version={version!r} is not supported, only 'gemm'.")
    found: dict[str, Tensor] = {}
    for module in ends(tensors, ".qweight"):
        parts = tuple(tensors[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
        name, shape = f"{module}.weight", (parts[0].shape[1] * 32 // bits, parts[0].shape[0])
        found[name] = made(name, shape, label, parts, _awq, _kept(parts[2], shape, _awq_numbers))
    return found


def _awq_numbers(words, zeros):
    """Return the integers `[in, out]` of words `[in, out / 8]`, and the zeros of their groups."""
    return tuple(
        nibbles(array, 4)[..., _AWQ_ORDER].reshape(len(array), -1).astype(np.int32) for array in (words, zeros)
    )


def _awq(words, zeros, scales):
    """Return `[out, in]`."""
    values, starts = _awq_numbers(words, zeros)
    index = np.arange(len(values)) // (len(values) // len(starts))
    return ((values - starts[index]) * scales.astype(np.float32)[index]).T


def _bits(settings: dict[str, Any], known: tuple[int, ...]) -> int:
    bits = settings.get("bits", 4)
    if bits not in known:
        words = " or ".join(map(str, known))
        raise ValueError(f"`quantization_config`'s bits={bits!r} is not supported, only {words}.")
    return bits
