"""Weights in fewer bits, read as what they stand for, or as they are, and written. In: a folder's tensors, and what its
`config.json` says of them. Out: the tensors that they are made of, decoded in float32 when they are read. Free of
JAX."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zoo.formats import Format
from zoo.huggingface.folder import said
from zoo.huggingface.quantised import bitsandbytes, compressed, fp8, mxfp4, nvfp4, packed
from zoo.huggingface.quantised.decoded import Decoded as Decoded
from zoo.huggingface.quantised.decoded import Kept as Kept
from zoo.huggingface.tensors import Tensor


class _Held(dict[str, Tensor]):
    """Tensors by name."""

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(f"the folder has no tensor `{name}`, without which others of its module mean nothing.")


Reader = Callable[[dict[str, Any], Mapping[str, Tensor], str], dict[str, Tensor]]
READERS: dict[str, Reader] = {
    "fp8": fp8.read,
    "fbgemm_fp8": fp8.read,
    "compressed-tensors": compressed.read,
    "mxfp4": mxfp4.read,
    "gptq": packed.read_gptq,
    "awq": packed.read_awq,
    "auto-round": packed.read_auto_round,
    "bitsandbytes": bitsandbytes.read,
    "modelopt": nvfp4.read_modelopt,
}
_LABELS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# What some folders hold of activations and caches, which stay as they are here; and what says how a matrix lies, which
# readers look at beforehand.
_UNREAD = (
    ".input_scale",
    ".output_scale",
    ".input_global_scale",
    ".k_scale",
    ".v_scale",
    ".weight_format",
    ".weight_shape",
    "g_idx",
)


def problem(settings: Any) -> str | None:
    """Say why weights cannot be read; None where they can, or are as they are."""
    if settings is None:
        return None
    method = _method(settings)
    if method in READERS:
        return None
    known = ", ".join(map(repr, READERS))
    return f"`quantization_config`'s quant_method={method!r} is not supported, only {known}"


def _method(settings: Any) -> str | None:
    """Return what made the numbers; early files of Model Optimizer name it as their producer."""
    if not isinstance(settings, dict):
        return None
    producer = settings.get("producer")
    return settings.get("quant_method") or (producer.get("name") if isinstance(producer, dict) else None)


def beside(told: dict[str, Any]) -> dict[str, Any]:
    """Return what Model Optimizer's `hf_quant_config.json` says as a `quantization_config`, which its folder lacks."""
    settings = told.get("quantization")
    return {"quant_method": "modelopt"} | (settings if isinstance(settings, dict) else {})


def decoded(raw: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that a folder's stand for.

    They count as the type that its `config.json` names, float32 where it names none.

    Raises:
        ValueError: the settings say what is not read, or a part of a matrix is missing.
    """
    settings = said(raw, "quantization_config")
    if settings is None:
        return tensors
    label = _LABELS.get(said(raw, "dtype", "torch_dtype") or "float32", "F32")
    found = READERS[str(_method(settings))](settings, _Held(tensors), label)
    used = {part.name for one in found.values() if isinstance(one, Decoded) for part in one.parts}
    rest = {name: one for name, one in tensors.items() if name not in used and not name.endswith(_UNREAD)}
    return rest | found


def written(format: Format, name: str, values: np.ndarray, scale: np.ndarray, dtype: str) -> dict[str, np.ndarray]:
    """Return the tensors that a matrix `[out, in]` in fewer bits is on disk, given as `Kept.read` returns it.

    Integers are written in compressed-tensors' format, nf4 in that of bitsandbytes.

    Args:
        format: what the integers stand for.
        name: of the tensor that it stands for.
        values: integers.
        scale: of each output's groups.
        dtype: what the matrix counts as.
    """
    if format is Format.nf4:
        return bitsandbytes.write(name, values, scale, dtype)
    return compressed.write(name, values, scale, format.bits)


def described(format: Format, group: int | None, skipped: list[str], dtype: str) -> dict[str, Any]:
    """Return the `quantization_config` of a folder of which all linear modules but some are kept so."""
    if format is Format.nf4:
        return bitsandbytes.settings(skipped, dtype)
    return compressed.settings(skipped, format.bits, group)
