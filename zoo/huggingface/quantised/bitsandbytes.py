"""bitsandbytes: integers with a scale for each row (https://arxiv.org/abs/2208.07339), or four bits that stand for the
numbers of a table, with a scale for each block, which may be of eight bits itself (https://arxiv.org/abs/2305.14314)."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from zoo.huggingface.quantised.decoded import count, ends, made
from zoo.huggingface.tensors import Tensor

_STATES = tuple(f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_NESTED = ("nested_absmax", "nested_quant_map")


def read(settings: dict[str, Any], tensors: Mapping[str, Tensor], label: str) -> dict[str, Tensor]:
    """Return each matrix that `weight` and what belongs to it stand for."""
    found: dict[str, Tensor] = {}
    for module in ends(tensors, ".SCB"):
        parts = tensors[f"{module}.weight"], tensors[f"{module}.SCB"]
        found[f"{module}.weight"] = made(f"{module}.weight", parts[0].shape, label, parts, _rows)
    for state in _STATES:
        for name in ends(tensors, state):
            told = json.loads(tensors[f"{name}{state}"].array().tobytes())
            nested = _NESTED if f"{name}.nested_absmax" in tensors else ()
            own = [f"{name}.{part}" for part in ("absmax", "quant_map", *nested)]
            parts = (tensors[name], *(tensors[one] for one in own), tensors[f"{name}{state}"])
            found[name] = made(name, tuple(told["shape"]), label, parts, functools.partial(_table, told=told))
    return found


def _rows(weight, scale):
    return weight.astype(np.float32) * (scale.astype(np.float32)[:, None] / 127)


def _table(packed, scale, table, *rest, told):
    """Look each four bits up, the high half of a byte first, and multiply by the scale of its block."""
    if len(rest) > 1:  # the scales are numbers of a table too
        outer, outer_table = rest[0], rest[1]
        blocks = np.arange(scale.size) // told["nested_blocksize"]
        scale = outer_table[scale.reshape(-1)] * outer[blocks] + told["nested_offset"]
    flat = packed.reshape(-1)
    values = table[np.stack([flat >> 4, flat & 15], axis=-1).reshape(-1)][: count(tuple(told["shape"]))]
    return values * np.repeat(scale.astype(np.float32).reshape(-1), told["blocksize"])[: len(values)]
