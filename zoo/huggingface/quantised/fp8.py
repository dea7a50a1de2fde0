"""Eight-bit floats with a scale for each block of 128 by 128 (https://arxiv.org/abs/2412.19437), or for each row."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from zoo.huggingface.quantised.decoded import MEND, Kept, count, ends, made
from zoo.huggingface.tensors import Tensor


def read(settings: dict[str, Any], tensors: Mapping[str, Tensor], label: str) -> dict[str, Tensor]:
    """Return each matrix `weight` times its `weight_scale_inv` or `weight_scale`."""
    block = settings.get("weight_block_size")
    found: dict[str, Tensor] = {}
    for suffix in (".weight_scale_inv", ".weight_scale"):
        for module in ends(tensors, suffix):
            name, parts = f"{module}.weight", (tensors[f"{module}.weight"], tensors[f"{module}{suffix}"])
            if parts[0].dtype.startswith("F8"):  # others' scales have this name too
                check(*parts, block)
            decode = lambda weight, scale: scaled(weight, scale, block)
            found[name] = made(name, parts[0].shape, label, parts, decode, kept(*parts, block))
    return found


def check(weight: Tensor, scale: Tensor, block: list[int] | None) -> None:
    """Refuse scales of other blocks than the settings name.

    Raises:
        ValueError: there are more of them, or fewer.
    """
    if len(weight.shape) != 2 or count(scale.shape) == 1:
        return
    rows, columns = weight.shape
    wanted = [(rows,), (rows, 1)] + ([] if block is None else [(-(-rows // block[0]), -(-columns // block[1]))])
    if tuple(scale.shape) not in wanted:
        raise ValueError(
            f"`{scale.name}` has shape {list(scale.shape)}, and the {[rows, columns]} of `{weight.name}` have "
            f"{' or '.join(str(list(shape)) for shape in wanted[1:])} scales by `quantization_config`, whose blocks "
            f"are {block or 'rows'}: {MEND}."
        )


def kept(weight: Tensor, scale: Tensor, block: list[int] | None) -> Kept | None:
    """Say how a matrix of floats of 8 bits stays: each row has the scales of its blocks, a few for some hundred."""
    whole = _by_rows(weight.shape, scale.shape, block)
    rows, columns = (1, weight.shape[1]) if whole or block is None else (block[0], min(block[1], weight.shape[1]))
    if weight.dtype != "F8_E4M3" or weight.shape[1] % columns:
        return None
    groups = weight.shape[1] // columns

    def read(weight, scale):
        every = np.broadcast_to(scale.reshape(-1, groups), (len(weight), groups)) if scale.size == 1 or whole else scale
        every = every if len(every) == len(weight) else np.repeat(every, rows, axis=0)[: len(weight)]
        return weight, every.astype(np.float32)

    return Kept("fp8", groups, np.dtype("f4"), read)


def scaled(weight: np.ndarray, scale: np.ndarray, block: list[int] | None) -> np.ndarray:
    """Return a matrix `[out, in]` times the scales of its blocks, of its rows, or of all of it."""
    wide, scale = weight.astype(np.float32), scale.astype(np.float32)
    if scale.size == 1:
        return wide * scale.reshape(())
    if block is None or _by_rows(weight.shape, scale.shape, block):
        return wide * scale.reshape(-1, 1)
    rows, columns = block
    spread = np.repeat(np.repeat(scale, rows, axis=0), columns, axis=1)
    return wide * spread[: wide.shape[0], : wide.shape[1]]


def _by_rows(weight: tuple[int, ...], scale: tuple[int, ...], block: list[int] | None) -> bool:
    """Return whether each row has one scale: blocks of a narrow matrix have one column of scales too, but fewer."""
    return block is None or len(scale) < 2 or (scale[1] == 1 and scale[0] in (1, weight[0]))
