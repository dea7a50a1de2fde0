"""Loads and saves Hugging Face folders of safetensors, driven by the rows of `zoo.tables`. Nothing is ever unpickled.

Dimensions: as in `zoo.tables`. Host memory: beside the model itself, one tensor at a time when loading, and one shard
when saving from an accelerator.
"""

import functools
import itertools
import json
import math
import operator
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from zoo.configs import GemmaConfig
from zoo.gemma import Gemma
from zoo.hf import from_hf, to_hf
from zoo.tables import Row, rows

_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16}
_HEAD = "lm_head.weight"  # some tools write the tied head a second time
_CHUNK = 2**26  # elements of one tensor on the host at a time


class _Tensor(NamedTuple):
    """A tensor on disk, of which only the header has been read."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load(path: str | os.PathLike, *, dtype: DTypeLike | None = None) -> Gemma:
    """Return the model in a Hugging Face folder: `config.json` and one or many `.safetensors` files.

    Args:
        path: the folder.
        dtype: what to store parameters in; None keeps what is on disk.

    Raises:
        ValueError: the path is no such folder, a file is damaged, the config holds something unknown, or tensors are
            missing, unexpected, misshapen or of an unsupported type: all of them in one message.
    """
    folder = Path(path)
    config = from_hf(_read_json(folder, "config.json"))
    tensors = _read_headers(folder)
    _check(folder, config, tensors)
    leaves = {row.leaf: _load_leaf(row, config.dims, tensors, dtype) for row in rows(config)}
    return Gemma.build(config, leaves)


def save(model: Gemma, path: str | os.PathLike, *, shard_bytes: int = 2**30) -> None:
    """Write the model as a Hugging Face folder that transformers loads without any difference.

    Files are written beside the folder and moved in when all are complete; what the folder held of a model before is
    replaced, and other files (a tokenizer) stay.

    Args:
        model: the model; parameters are written in their own dtypes.
        path: the folder, made if there is none.
        shard_bytes: files are at most this large, unless one tensor alone is larger.
    """
    folder, dims = Path(path), model.config.dims
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"cannot save a model at `{folder}`: it is a file. Pass a folder.")
    raw = to_hf(model.config, jnp.dtype(model.embed.dtype).name)
    shards = _plan_shards(model, shard_bytes)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        Path(scratch, "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
        weight_map, total = {}, 0
        for i, shard in enumerate(shards):
            file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
            arrays = {name: _take(_leaf(model, row), layer, row, dims) for name, row, layer in shard}
            save_file(arrays, Path(scratch, file), metadata={"format": "pt"})
            shutil.copymode(Path(scratch, "config.json"), Path(scratch, file))  # safetensors lets only the owner read
            weight_map |= dict.fromkeys(arrays, file)
            total += sum(array.nbytes for array in arrays.values())
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            Path(scratch, _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        folder.mkdir(exist_ok=True)
        for stale in itertools.chain(folder.glob("*.safetensors"), folder.glob(_INDEX)):
            stale.unlink()
        for file in Path(scratch).iterdir():
            shutil.move(file, folder / file.name)


def _leaf(model: Gemma, row: Row) -> jax.Array:
    return operator.attrgetter(row.leaf)(model)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from the folder, or say what is wrong with the folder."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"cannot load weights from `{folder}`: it {what}. Pass a folder that holds config.json.")
    if not (folder / name).is_file():
        held = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
        raise ValueError(f"cannot load weights from `{folder}`: it has no {name}. It holds: {held}.")
    try:
        raw = json.loads((folder / name).read_text())
    except ValueError as error:
        raise ValueError(f"cannot load weights from `{folder}`: {name} is not valid JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"cannot load weights from `{folder}`: {name} must hold a JSON object.")
    return raw


def _read_headers(folder: Path) -> dict[str, _Tensor]:
    """Read what every safetensors file of the folder holds, without reading the tensors."""
    files = sorted(folder.glob("*.safetensors"))
    if (folder / _INDEX).is_file():
        named = _read_json(folder, _INDEX).get("weight_map", {}).values()
        files = [folder / name for name in sorted(set(named))]
    if not files:
        pickled = [file.name for suffix in ("*.bin", "*.pt", "*.pth") for file in sorted(folder.glob(suffix))]
        why = f"; {', '.join(pickled)} may be pickles, which are never opened. Convert them" if pickled else ""
        raise ValueError(f"cannot load weights from `{folder}`: it has no .safetensors files{why}.")
    tensors, problems = {}, []
    for file in files:
        try:
            with safe_open(file, "np") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    if name in tensors:
                        problems.append(f"{file.name}: `{name}` is also in {tensors[name].file.name}")
                    view = opened.get_slice(name)
                    tensors[name] = _Tensor(file, tuple(view.get_shape()), view.get_dtype())
        except (SafetensorError, OSError) as error:
            problems.append(f"{file.name}: {error}")
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"cannot load weights from `{folder}`: files are damaged; copy them again.\n{lines}")
    return tensors


def _check(folder: Path, config: GemmaConfig, tensors: dict[str, _Tensor]) -> None:
    """Compare what is on disk with what the config needs, and report every difference at once."""
    table, dims = rows(config), config.dims
    expected = {name: row.disk_shape(dims) for row in table for name in row.names(dims)}
    present = expected.keys() & tensors.keys()
    problems = [f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in tensors]
    for name, tensor in tensors.items():
        if name == _HEAD and "model.embed_tokens.weight" in tensors:
            if not _same(tensor, tensors["model.embed_tokens.weight"], name):
                problems.append(f"unexpected: {name} {list(tensor.shape)} is not the embedding, to which Gemma ties it")
        elif name not in expected and not name.endswith("rotary_emb.inv_freq"):
            problems.append(f"unexpected: {name} {list(tensor.shape)}")
    for name in sorted(present):
        if tensors[name].shape != expected[name]:
            problems.append(f"wrong shape: {name} is {list(tensors[name].shape)}, must be {list(expected[name])}")
        if tensors[name].dtype not in _DTYPES:
            problems.append(f"wrong type: {name} is {tensors[name].dtype}, must be {' or '.join(_DTYPES)}")
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"the tensors in `{folder}` are not those that its config.json needs:\n{lines}")


def _same(head: _Tensor, embed: _Tensor, name: str) -> bool:
    if head.shape != embed.shape or head.dtype != embed.dtype or len(head.shape) != 2:
        return False
    pairs = zip(_pieces(head, name), _pieces(embed, "model.embed_tokens.weight"), strict=True)
    return all(np.array_equal(one, other) for (_, one), (_, other) in pairs)


def _pieces(tensor: _Tensor, name: str, whole: bool = False):
    """Yield `(first row, rows)` of a tensor. The file is reopened for each, so that pages already read are let go."""
    count = tensor.shape[0]
    step = count if whole else max(1, _CHUNK // math.prod(tensor.shape[1:]))
    for start in range(0, count, step):
        with safe_open(tensor.file, "np") as opened:
            yield start, opened.get_slice(name)[start : min(start + step, count)]


def _load_leaf(row: Row, dims: dict[str, int], tensors: dict[str, _Tensor], dtype: DTypeLike | None) -> jax.Array:
    """Fill one leaf in place, a layer (or, for an unstacked one, a run of rows) at a time."""
    names = row.names(dims)
    dtype = jnp.result_type(*(_DTYPES[tensors[name].dtype] for name in names)) if dtype is None else jnp.dtype(dtype)
    leaf = jnp.zeros(row.shape(dims), dtype)
    for layer, name in enumerate(names):
        for start, piece in _pieces(tensors[name], name, whole=row.stacked):
            leaf = _put(leaf, piece, layer if row.stacked else start, row=row, sizes=tuple(dims.items()))
    return leaf


@functools.partial(jax.jit, static_argnames=("row", "sizes"), donate_argnums=0)
def _put(leaf, piece, start, *, row, sizes):
    """Write a tensor from disk into its place in a leaf."""
    if row.stacked:
        left, right = "".join(row.disk), row.letters[1:]
        split = piece.reshape([dict(sizes)[letter] for letter in left])
        piece = split.transpose([left.index(letter) for letter in right])[None]
    return jax.lax.dynamic_update_slice(leaf, piece.astype(leaf.dtype), (start,) + (0,) * (leaf.ndim - 1))


def _take(leaf: jax.Array, layer: int, row: Row, dims: dict[str, int]) -> np.ndarray:
    """Return one tensor as it is on disk."""
    if not row.stacked:
        return np.ascontiguousarray(leaf)
    right, left = row.letters[1:], "".join(row.disk)
    piece = np.asarray(leaf[layer]).transpose([right.index(letter) for letter in left])
    return np.ascontiguousarray(piece.reshape(row.disk_shape(dims)))


def _plan_shards(model: Gemma, shard_bytes: int) -> list[list[tuple[str, Row, int]]]:
    """Split the tensors, whole layers in order, into runs of at most `shard_bytes`."""
    dims, shards, room = model.config.dims, [], 0
    tensors = [
        (name, row, layer) for row in rows(model.config) for layer, name in enumerate(row.names(dims))
    ]  # `layer` is 0 for what is not stacked
    for name, row, layer in sorted(tensors, key=lambda tensor: (tensor[1].stacked, tensor[2])):
        size = math.prod(row.disk_shape(dims)) * _leaf(model, row).dtype.itemsize
        if size > room or not shards:
            shards.append([])
            room = shard_bytes
        shards[-1].append((name, row, layer))
        room -= size
    return shards
