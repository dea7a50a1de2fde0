"""Integers of 2, 4 or 8 bits in words of 32, with a scale and a zero for each group of inputs: GPTQ
(https://arxiv.org/abs/2210.17323) and AWQ (https://arxiv.org/abs/2306.00978)."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zoo.huggingface.quantised.decoded import Kept, ends, group_of, made, nibbles, together
from zoo.huggingface.tensors import DTYPES, Tensor

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word of 32 bits each of eight neighbours is


def read_gptq(settings: dict[str, Any], tensors: Mapping[str, Tensor], label: str) -> dict[str, Tensor]:
    """Return each matrix that `qweight`, `qzeros`, `scales` and `g_idx` stand for.

    Raises:
        ValueError: the integers do not fill words of 32 bits, or are stored for one kernel.
    """
    _bits(settings.get("bits", 4), (2, 4, 8))
    format = settings.get("checkpoint_format") or "gptq"
    if format not in ("gptq", "gptq_v2"):
        raise ValueError(
            f"`quantization_config`'s checkpoint_format={format!r} is not supported, only 'gptq' or 'gptq_v2'."
        )
    quantizer = str((settings.get("meta") or {}).get("quantizer"))
    plus = None if format == "gptq_v2" else "words" if "gptqmodel" in quantizer else "numbers"
    found: dict[str, Tensor] = {}
    for module in ends(tensors, ".qweight"):
        parts = tuple(tensors[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
        words, zeros, scales = (part.shape for part in parts)
        bits = _bits(32 * zeros[1] // words[1], (2, 4, 8))  # some modules may have others than the settings say
        shape = words[1], words[0] * 32 // bits
        name = f"{module}.weight"
        group = group_of(name, shape[1], scales[0], _sizes(settings), tensors.get(f"{module}.g_idx"))
        numbers = functools.partial(_gptq_numbers, bits=bits, plus=plus)
        decode = functools.partial(_scaled, numbers=numbers, group=group)
        kept = together(_kept(parts[2], shape, bits, numbers), group)
        found[name] = made(name, shape, label, parts, decode, kept)
    return found


def _sizes(settings: dict[str, Any]) -> list[Any]:
    """Return what groups may be large: in all modules, and in those of which GPTQModel or AutoRound say otherwise."""
    told = [settings.get(key) for key in ("dynamic", "extra_config")]
    own = [each for modules in told if isinstance(modules, dict) for each in modules.values()]
    return [one.get("group_size") for one in (settings, *own) if isinstance(one, dict)]


def _gptq_numbers(words, zeros, *, bits, plus):
    """Return the integers `[in, out]` of words `[in / per word, out]`, and the zeros of their groups.

    The first format stores zeros less one, whose 0 is the largest number then. GPTQModel takes the ones from whole
    words, so that a number above a 0 lends to it; others take them from each number.
    """
    values = nibbles(words, bits).transpose(0, 2, 1).reshape(-1, words.shape[1]).astype(np.int32)
    if plus == "words":
        zeros = (zeros.view(np.uint32) + np.uint32((2**32 - 1) // (2**bits - 1))).view(np.int32)
    starts = nibbles(zeros, bits).reshape(zeros.shape[0], -1).astype(np.int32)
    return values, (starts + 1) % 2**bits if plus == "numbers" else starts


def _scaled(words, zeros, scales, *, numbers, group):
    """Return `[out, in]`."""
    values, starts = numbers(words, zeros)
    return ((values - starts[group]) * scales.astype(np.float32)[group]).T


def _kept(scales: Tensor, shape: tuple[int, ...], bits: int, numbers: Callable[..., Any]) -> Kept | None:
    """Say how a matrix `[out, in]` stays, whose groups have zeros of their own, if they are neighbours."""
    if bits not in (4, 8) or shape[1] % 2 or scales.dtype not in DTYPES:
        return None

    def read(words, zeros, scales):
        values, starts = numbers(words, zeros)
        starts = (starts.T - 2 ** (bits - 1)).astype(np.int8)
        if bits == 8:
            return (values.T - 128).astype(np.int8), scales.T, starts
        codes = values.T.astype(np.uint8)
        return codes[:, ::2] | (codes[:, 1::2] << np.uint8(4)), scales.T, starts

    return Kept(f"int{bits}", scales.shape[0], DTYPES[scales.dtype], read, zeros=True)


def read_awq(settings: dict[str, Any], tensors: Mapping[str, Tensor], label: str) -> dict[str, Tensor]:
    """Return each matrix that `qweight`, `qzeros` and `scales` stand for.

    Raises:
        ValueError: the integers have other than 4 bits, or lie in another way than `gemm`.
    """
    bits = _bits(settings.get("bits", 4), (4,))
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if version != "gemm":
        raise ValueError(f"`quantization_config`'s version={version!r} is not supported, only 'gemm'.")
    found: dict[str, Tensor] = {}
    for module in ends(tensors, ".qweight"):
        parts = tuple(tensors[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
        name, shape, groups = f"{module}.weight", (parts[0].shape[1] * 32 // bits, parts[0].shape[0]), parts[2].shape[0]
        group = group_of(name, shape[1], groups, _sizes(settings))
        decode = functools.partial(_scaled, numbers=_awq_numbers, group=group)
        kept = together(_kept(parts[2], shape, bits, _awq_numbers), group)
        found[name] = made(name, shape, label, parts, decode, kept)
    return found


def _awq_numbers(words, zeros):
    """Return the integers `[in, out]` of words `[in, out / 8]`, and the zeros of their groups."""
    return tuple(
        nibbles(array, 4)[..., _AWQ_ORDER].reshape(len(array), -1).astype(np.int32) for array in (words, zeros)
    )


def read_auto_round(settings: dict[str, Any], tensors: Mapping[str, Tensor], label: str) -> dict[str, Tensor]:
    """Return each matrix of a folder of AutoRound (https://arxiv.org/abs/2309.05516), packed as GPTQ or AWQ has it.

    Raises:
        ValueError: it is packed in another way.
    """
    readers = {"auto_round:auto_gptq": read_gptq, "auto_round:auto_awq": read_awq}
    packing = settings.get("packing_format")
    if packing not in readers:
        known = " or ".join(map(repr, readers))
        raise ValueError(f"`quantization_config`'s packing_format={packing!r} is not supported, only {known}.")
    return readers[packing](settings, tensors, label)


def _bits(bits: Any, known: tuple[int, ...]) -> int:
    if bits not in known:
        words = " or ".join(map(str, known))
        raise ValueError(f"`quantization_config`'s bits={bits!r} is not supported, only {words}.")
    return bits
