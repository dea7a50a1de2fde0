"""Matrices of a folder that stay in fewer bits, both ways: files to `zoo.quantised.Quantised`, and back.

Dimensions: as in `zoo.parameters`.
"""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transforms.sharding import Axes
from zoo.config import Config, rows
from zoo.formats import Format
from zoo.huggingface.folder import refusal
from zoo.huggingface.quantised import Decoded, Kept, described
from zoo.huggingface.tensors import Tensor
from zoo.parameters import Row
from zoo.quantised import Quantised, layout, outputs_by_inputs, shardings


def _kept_of(row: Row, dims: dict[str, int], tensors: dict[str, Tensor]) -> list[Kept | None]:
    """Return how each tensor of a parameter stays in fewer bits; None for those that are not."""
    found = [tensors[name] for name, _ in row.tensors(dims)]
    return [one.kept if isinstance(one, Decoded) else None for one in found]


def kept_rows(folder: Path, config: Config, tensors: dict[str, Tensor]) -> list[Row]:
    """Return the parameters that stay in fewer bits as they are, and warn of those that cannot, which are dequantised.

    Raises:
        ValueError: there are none.
    """
    made = lambda row: any(isinstance(tensors[name], Decoded) for name, _ in row.tensors(config.dims))
    found = [row for row in rows(config) if not row.looked_up and row.fan_in and made(row)]
    if not found:
        raise refusal(folder, "its weights are not in fewer bits, so quantise=as_stored has nothing to keep. Leave it.")

    def stays(row):
        kept = _kept_of(row, config.dims, tensors)
        alike = {None if one is None else (one.format, one.groups, one.scale, one.zeros, one.apart) for one in kept}
        lies = outputs_by_inputs(row) or all(one is not None and one.turned for one in kept)
        return len(alike) == 1 and None not in alike and lies

    wrong = [row for row in found if not stays(row)]
    if wrong:
        names, dims = ", ".join(row.leaf for row in wrong), config.dims
        why = (
            f"{names} cannot stay in fewer bits: only floats of 8 bits, integers of 8 or 4, nf4 and mxfp4 can, in "
            "equal groups of inputs, all layers alike"
        )
        if len(wrong) == len(found):
            raise refusal(folder, f"{why}. Leave quantise=as_stored out to read what they stand for.")
        numbers = sum(math.prod(row.shape(dims)) for row in wrong)
        warnings.warn(f"`{folder}`: {why}. They are read as the {numbers:,} numbers that they stand for.", stacklevel=3)
    return [row for row in found if row not in wrong]


def as_quantised(row: Row, dims: dict[str, int], tensors: dict[str, Tensor], dtype: jnp.dtype, zeros: Any) -> Any:
    """Return a parameter in fewer bits as its files have it, of zeros yet."""
    kept = _kept_of(row, dims, tensors)[0]
    assert kept is not None
    format, shape = Format(kept.format), row.shape(dims)
    inputs = math.prod(dims[letter] for letter in row.fan_in)
    lead = *shape[: len(row.lead)], math.prod(shape[len(row.lead) :]) // inputs
    stored = {Format.int8: jnp.int8, Format.fp8: jnp.float8_e4m3fn}.get(format, jnp.uint8)
    values = zeros((*lead, inputs * format.bits // 8), stored)
    scale = zeros((*lead, kept.groups), kept.scale)
    zero = zeros((*lead, kept.groups), jnp.int8) if kept.zeros else None
    order = zeros((*shape[: len(row.lead)], inputs), jnp.int32) if kept.apart else None
    return Quantised(values, scale, zero=zero, order=order, **layout(row, dims, format, dtype))


def load_kept(
    row: Row, dims: dict[str, int], tensors: dict[str, Tensor], dtype: jnp.dtype, mesh: Mesh | None, axes: Axes
) -> Quantised:
    """Return a parameter that stays in fewer bits, read a tensor at a time; on a mesh it lies as its letters say."""
    parts: tuple[np.ndarray, ...] = ()
    for name, index in row.tensors(dims):
        tensor = tensors[name]
        assert isinstance(tensor, Decoded) and tensor.kept is not None
        read = tensor.kept.read(*(one.array() for one in tensor.parts))
        own = [array if array.ndim == 1 else _own_outputs(row, dims, array) for array in read]  # of inputs alone
        parts = parts or tuple(np.empty((*row.shape(dims)[: len(row.stack)], *one.shape), one.dtype) for one in own)
        for part, one in zip(parts, own, strict=True):
            part[index] = one
    like = eqx.filter_eval_shape(as_quantised, row, dims, tensors, dtype, jnp.zeros)
    read = jax.tree.unflatten(jax.tree.structure(like), parts)
    return jax.device_put(read, None if mesh is None else shardings(like, row.letters, mesh, axes))


def _own_outputs(row: Row, dims: dict[str, int], array: np.ndarray) -> np.ndarray:
    """Return the rows of a matrix `[*lead, out, ...]` on disk that are one parameter's, where it holds several."""
    letters = [letter for letter in "".join(row.disk) if letter not in row.fan_in]  # of experts, these too
    every, lead, last = row.disk_dims(dims), array.shape[:-2], array.shape[-1]
    own = tuple(row.slice_on_disk(letter, 0, dims[letter], dims) for letter in letters)
    return array.reshape(*(every[letter] for letter in letters), last)[own].reshape(*lead, -1, last)


def kept_together(leaves: list[Any]) -> bool:
    """Return whether all that a tensor on disk holds is in fewer bits, and may be written so."""
    alike = {(leaf.format, leaf.group) if isinstance(leaf, Quantised) else None for leaf in leaves}
    return len(alike) == 1 and None not in alike


def quantisation(tensors: Mapping[str, list[tuple[Row, Any]]], dtype: str) -> dict[str, Any]:
    """Return what `config.json` says of matrices in fewer bits, where there are any.

    Args:
        tensors: every tensor on disk, and the parameters that it holds, with their rows.
        dtype: what they count as.

    Raises:
        ValueError: they are not all kept alike, or as no folder has them.
    """
    kept = {name: parts[0][1] for name, parts in tensors.items() if kept_together([leaf for _, leaf in parts])}
    if not kept:
        return {}
    if any(not leaf.format.made or leaf.zero is not None or leaf.order is not None for leaf in kept.values()):
        raise ValueError(
            "cannot save a model whose matrices are kept as floats of 8 or 4 bits, with zeros of their own or in an "
            "order of their own: load it without quantise=as_stored, and save that; adapters over it are saved by "
            "themselves."
        )
    unknown = sorted({row.leaf for name in kept for row, _ in tensors[name] if not outputs_by_inputs(row)})
    if unknown:
        raise ValueError(
            f"cannot save {', '.join(unknown)} in fewer bits: no format of files has matrices that lie as inputs by "
            "outputs, or experts of which one tensor holds all. `zoo.quantised.quantise(model, format, "
            "to_be_saved=True)` leaves them whole; adapters over them are saved by themselves."
        )
    whole = all(leaf.scale.shape[-1] == 1 for leaf in kept.values())
    alike = {(leaf.format, None if whole else leaf.group) for leaf in kept.values()}
    if len(alike) > 1:
        said = ", ".join(sorted(f"{format} in groups of {group}" for format, group in alike))
        raise ValueError(f"cannot save a model whose matrices are {said}: a folder has one kind. Quantise all alike.")
    ((format, group),) = alike
    linear = {name for name, parts in tensors.items() if parts[0][0].fan_in and not parts[0][0].looked_up}
    skipped = sorted({name.removesuffix(".weight") for name in linear - set(kept)} | {"lm_head"})
    return {"quantization_config": described(format, group, skipped, dtype)}
