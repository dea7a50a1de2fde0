"""bitsandbytes: integers with a scale for each row (https://arxiv.org/abs/2208.07339), or four bits that stand for the
numbers of a table, with a scale for each block, which may be of eight bits itself (https://arxiv.org/abs/2305.14314)."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from zoo.formats import NF4
from zoo.huggingface.quantised.decoded import Kept, count, ends, made
from zoo.huggingface.tensors import Tensor

_STATES = tuple(f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_NESTED = ("nested_absmax", "nested_quant_map")


def read(settings: dict[str, Any], tensors: Mapping[str, Tensor], label: str) -> dict[str, Tensor]:
    """Return each matrix that `weight` and what belongs to it stand for."""
    found: dict[str, Tensor] = {}
    for module in ends(tensors, ".SCB"):
        parts = tensors[f"{module}.weight"], tensors[f"{module}.SCB"]
        kept = Kept("int8", 1, np.dtype("f4"), lambda weight, scale: (weight, scale.astype(np.float32)[:, None] / 127))
        found[f"{module}.weight"] = made(f"{module}.weight", parts[0].shape, label, parts, _rows, kept)
    for state in _STATES:
        for name in ends(tensors, state):
            told = json.loads(tensors[f"{name}{state}"].array().tobytes())
            nested = _NESTED if f"{name}.nested_absmax" in tensors else ()
            own = [f"{name}.{part}" for part in ("absmax", "quant_map", *nested)]
            parts = (tensors[name], *(tensors[one] for one in own), tensors[f"{name}{state}"])
            shape = tuple(told["shape"])
            decode = functools.partial(_table, told=told)
            found[name] = made(name, shape, label, parts, decode, _kept(shape, told))
    return found


def _kept(shape, told):
    """Say how blocks of a flat matrix stay, where they are groups of its rows."""
    if told["quant_type"] != "nf4" or len(shape) != 2 or shape[1] % told["blocksize"]:
        return None
    groups = shape[1] // told["blocksize"]

    def read(packed, scale, table, *rest):
        if not np.allclose(table, NF4, atol=1e-6):
            raise ValueError("its `quant_map` is not the table of nf4. Load it without quantise=as_stored.")
        swapped = (packed.reshape(shape[0], -1) >> 4) | (packed.reshape(shape[0], -1) << 4)
        return swapped, _scales(scale, rest, told).astype(np.float32).reshape(shape[0], groups)

    return Kept("nf4", groups, np.dtype("f4"), read)


def _rows(weight, scale):
    return weight.astype(np.float32) * (scale.astype(np.float32)[:, None] / 127)


def _table(packed, scale, table, *rest, told):
    """Look each four bits up, the high half of a byte first, and multiply by the scale of its block."""
    scale = _scales(scale, rest, told)
    flat = packed.reshape(-1)
    values = table[np.stack([flat >> 4, flat & 15], axis=-1).reshape(-1)][: count(tuple(told["shape"]))]
    return values * np.repeat(scale.astype(np.float32).reshape(-1), told["blocksize"])[: len(values)]


def _scales(scale, rest, told):
    """Return the scale of each block, which may be a number of a table too."""
    if len(rest) < 2:
        return scale
    outer, outer_table = rest[0], rest[1]
    blocks = np.arange(scale.size) // told["nested_blocksize"]
    return outer_table[scale.reshape(-1)] * outer[blocks] + told["nested_offset"]


def write(name: str, values: np.ndarray, scale: np.ndarray, dtype: str) -> dict[str, np.ndarray]:
    """Return the tensors of a matrix `[out, in]` in nf4, given as `Kept.read` returns it.

    Args:
        name: of the tensor that it stands for.
        values: two numbers in a byte.
        scale: of each row's blocks.
        dtype: what the matrix counts as.
    """
    shape = [len(values), 2 * values.shape[1]]
    told = {"quant_type": "nf4", "blocksize": shape[1] // scale.shape[1], "dtype": dtype, "shape": shape}
    return {
        name: ((values >> 4) | (values << 4)).reshape(-1, 1),
        f"{name}.absmax": scale.astype(np.float32).reshape(-1),
        f"{name}.quant_map": np.array(NF4, np.float32),
        f"{name}{_STATES[0]}": np.frombuffer(json.dumps(told).encode(), np.uint8).copy(),
    }


def settings(skipped: list[str], dtype: str) -> dict[str, Any]:
    """Return the `quantization_config` of a folder in nf4, of which some modules are as they were."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": skipped,
    }
