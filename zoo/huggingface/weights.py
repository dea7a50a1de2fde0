"""Loads and saves Hugging Face folders of safetensors, driven by the rows of `zoo.parameters`. Nothing is unpickled.

Dimensions: as in `zoo.parameters`. Host memory: beside the model itself, one tensor at a time when loading, and one
shard when saving from an accelerator.
"""

import ctypes
import functools
import hashlib
import itertools
import json
import math
import operator
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from transforms.sharding import AXES, Axes
from zoo.config import rows
from zoo.families import model_class
from zoo.huggingface.config import from_hf, to_hf
from zoo.huggingface.folder import (
    DIGESTS,
    INDEX,
    as_stored,
    expected,
    read_headers,
    read_json,
    refusal,
)
from zoo.huggingface.quantised import decoded
from zoo.huggingface.sharded import load_leaf
from zoo.huggingface.tensors import DamagedError, Scratch, Tensor, as_bytes
from zoo.parameters import Row

_DTYPES = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16, "F64": jnp.float64}
_CARRIED = (  # what goes with a model and is not its weights
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_ROWS = 16
Part = tuple[Row, tuple[int, ...]]  # a parameter, and where in its stack the tensor stands
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load(
    path: str | os.PathLike,
    *,
    dtype: DTypeLike | None = None,
    mesh: jax.sharding.Mesh | None = None,
    axes: Axes = AXES,
) -> Any:
    """Return the model in a Hugging Face folder: `config.json` and one or many `.safetensors` files.

    Args:
        path: the folder. Weights in fewer bits are read as what they stand for (`zoo.huggingface.quantised`).
        dtype: what to store parameters in; None keeps what is on disk (float32 for float64, unless JAX has 64 bits).
        mesh: the devices to spread parameters over, of which each process reads its own parts; None puts them on one.
        axes: which axes of the mesh cut each dimension letter of `zoo.parameters` (see `transforms.sharding.spec_of`).

    Raises:
        ValueError: the path is no such folder, a file is damaged, the config holds something unknown, or tensors are
            missing, unexpected, misshapen or of an unsupported type: all of them in one message.
    """
    folder = Path(path)
    raw = read_json(folder, "config.json")
    config, tensors = as_stored(from_hf(raw), decoded(raw, read_headers(folder)))
    tensors = expected(folder, config, tensors)
    leaves, damaged, scratch = {}, [], Scratch()
    for row in rows(config):
        on_disk = {_DTYPES[tensors[name].dtype] for name, _ in row.places(config.dims)}
        kind = jnp.result_type(*on_disk) if dtype is None else jnp.dtype(dtype)
        try:
            if mesh is None:
                leaves[row.leaf] = _load_leaf(row, config.dims, tensors, kind, scratch)
            else:
                leaves[row.leaf] = load_leaf(row, config.dims, tensors, kind, mesh, axes)
        except DamagedError as error:
            damaged.append(str(error))
    if damaged:
        lines = "\n".join(f"  {problem}" for problem in damaged)
        raise refusal(folder, f"files are damaged; copy them again.\n{lines}")
    return model_class(config).build(config, leaves)


def save(
    model: Any, path: str | os.PathLike, *, source: str | os.PathLike | None = None, shard_bytes: int = 2**30
) -> None:
    """Write the model as a Hugging Face folder that transformers loads without any difference.

    Files are written beside the folder and moved in when all are complete; what the folder held of a model before is
    replaced, and other files (a tokenizer) stay. Each file holds the digests of its tensors, which `load` checks.

    Args:
        model: the model; parameters are written in their own dtypes.
        path: the folder, made if there is none.
        source: the folder that the model came from: its tokenizer, chat template and generation settings are copied,
            and its special token ids kept.
        shard_bytes: files are at most this large, unless one tensor alone is larger.
    """
    folder, config = Path(path), model.config
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"cannot save a model at `{folder}`: it is a file. Pass a folder.")
    raw = to_hf(config, jnp.dtype(model.embed.dtype).name) | ({} if source is None else _ids(Path(source)))
    shards = _plan_shards(model, shard_bytes)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        scratch = Path(name)
        (scratch / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
        _write_shards(model, shards, scratch)
        if source is not None:
            for file in (Path(source, carried) for carried in _CARRIED):
                if file.is_file():
                    shutil.copyfile(file, scratch / file.name)
        folder.mkdir(exist_ok=True)
        for stale in itertools.chain(folder.glob("*.safetensors"), folder.glob(INDEX)):
            stale.unlink()
        for file in scratch.iterdir():
            shutil.move(file, folder / file.name)


def _ids(source: Path) -> dict[str, Any]:
    """Return the special token ids that a folder's config.json names."""
    raw = read_json(source, "config.json")
    return {key: raw[key] for key in _IDS if key in raw}


def _write_shards(model: Any, shards: list[dict[str, list[Part]]], folder: Path) -> None:
    """Write the files of tensors, and their index where there are several."""
    weight_map, total = {}, 0
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        arrays = {name: _take(model, parts) for name, parts in shard.items()}
        digests = {name: hashlib.sha256(as_bytes(array)).hexdigest() for name, array in arrays.items()}
        save_file(arrays, folder / file, metadata={"format": "pt", DIGESTS: json.dumps(digests)})
        _sort_metadata(folder / file)
        shutil.copymode(folder / "config.json", folder / file)  # safetensors lets only the owner read
        weight_map |= dict.fromkeys(arrays, file)
        total += sum(array.nbytes for array in arrays.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _sort_metadata(path: Path) -> None:
    """Put a file's metadata in the order of its keys, so that equal weights are equal bytes.

    The package writes them in the order of a hash map, which is another one in every process.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "the same keys and values take the same space"
        file.seek(8)
        file.write(text.ljust(length))


def _leaf(model: Any, row: Row) -> jax.Array:
    return operator.attrgetter(row.leaf)(model)


def _load_leaf(
    row: Row, dims: dict[str, int], tensors: dict[str, Tensor], dtype: jnp.dtype, scratch: Scratch
) -> jax.Array:
    """Fill one leaf in place, a tensor (or, for an unstacked one, a run of rows) at a time."""
    leaf, sizes = jnp.zeros(row.shape(dims), dtype), tuple(dims.items())
    if next(iter(leaf.devices())).platform == "cpu":
        memory = _memory(leaf.block_until_ready())
        for name, place in row.places(dims):
            for start, piece in tensors[name].pieces(bool(row.stack), scratch):
                into = memory[place] if row.stack else memory[start : start + len(piece)]
                _copy(into, row.turned(piece, dims) if row.stack else piece)
        return leaf
    for name, place in row.places(dims):
        for start, piece in tensors[name].pieces(bool(row.stack), scratch):
            turned = _turn(piece, row=row, sizes=sizes, dtype=dtype)
            # One piece at a time: those that wait for their turn would be in memory beside the leaf.
            leaf = _put(leaf, turned, place or (start,)).block_until_ready()
    return leaf


def _memory(leaf: jax.Array) -> np.ndarray:
    """Return the memory of an array on the host that nobody has read yet, to be filled before anybody does.

    Programs that fill it would each be compiled, which takes longer than reading a gigabyte.
    """
    raw = (ctypes.c_uint8 * leaf.nbytes).from_address(leaf.unsafe_buffer_pointer())
    return np.ctypeslib.as_array(raw).view(leaf.dtype).reshape(leaf.shape)


def _copy(into: np.ndarray, turned: np.ndarray) -> None:
    """Copy a tensor that may lie in another order, some rows of what it was read from at a time.

    So many that what they are turned into stays in the processor's first cache: five times as fast as all at once.
    """
    put: Callable = np.copyto
    if into.dtype == turned.dtype:  # as integers, which NumPy copies faster than floats that it does not know
        into, turned = (array.view(f"u{array.itemsize}") for array in (into, turned))
    elif turned.dtype == jnp.bfloat16 and into.dtype == np.float32:  # whose upper half it is
        into, turned, put = into.view(np.uint32), turned.view(np.uint16), _shift
    slowest = max(range(turned.ndim), key=lambda dim: abs(turned.strides[dim])) if turned.ndim else 0
    if slowest == 0 or turned.ndim < 2:
        put(into, turned)
        return
    into, turned = np.moveaxis(into, slowest, 0), np.moveaxis(turned, slowest, 0)
    for start in range(0, len(turned), _ROWS):
        put(into[start : start + _ROWS], turned[start : start + _ROWS])


def _shift(into: np.ndarray, halves: np.ndarray) -> None:
    into[...] = np.left_shift(halves, np.uint32(16))


@functools.partial(jax.jit, static_argnames=("row", "sizes", "dtype"))
def _turn(piece, *, row, sizes, dtype):
    """Return a tensor from disk as it is in the model."""
    return (row.turned(piece, dict(sizes)) if row.stack else piece).astype(dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _put(leaf, turned, starts):
    """Write a tensor into its place in a leaf."""
    starts = tuple(starts) + (0,) * (leaf.ndim - len(starts))
    return jax.lax.dynamic_update_slice(leaf, turned.reshape((1,) * (leaf.ndim - turned.ndim) + turned.shape), starts)


def _take(model: Any, parts: list[Part]) -> np.ndarray:
    """Return one tensor as it is on disk, with all that it holds."""
    row, place = parts[0]
    leaf, dims = _leaf(model, row), model.config.dims
    if not row.stack:
        return np.ascontiguousarray(leaf if leaf.is_fully_addressable else _gathered(leaf, (...,)))
    tensor = np.empty(row.disk_shape(dims), leaf.dtype)
    for row, place in parts:
        leaf = _leaf(model, row)
        on_mesh = isinstance(leaf.sharding, NamedSharding)
        row.write(np.asarray(_gathered(leaf, place) if on_mesh else leaf[place]), tensor, dims)
    return tensor


def _gathered(leaf: jax.Array, place: tuple[Any, ...]) -> jax.Array:
    """Return one tensor of a leaf that lies on a mesh, whole on every device: any process may then write it."""
    assert isinstance(leaf.sharding, NamedSharding)
    return leaf.at[place].get(out_sharding=NamedSharding(leaf.sharding.mesh, PartitionSpec()))


def _plan_shards(model: Any, shard_bytes: int) -> list[dict[str, list[Part]]]:
    """Split the tensors, whole layers in order, into runs of at most `shard_bytes`."""
    dims, shards, room = model.config.dims, [], 0
    tensors: dict[str, list[Part]] = {}
    for row in rows(model.config):
        for name, place in row.places(dims):
            tensors.setdefault(name, []).append((row, place))
    for name, parts in sorted(tensors.items(), key=lambda one: (len(one[1][0][0].stack) > 0, one[1][0][1][:1])):
        row = parts[0][0]
        size = math.prod(row.disk_shape(dims)) * _leaf(model, row).dtype.itemsize
        if size > room or not shards:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = parts
        room -= size
    return shards
