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

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from transforms.sharding import AXES, Axes
from zoo.config import Config, rows
from zoo.families import model_class
from zoo.formats import AS_STORED
from zoo.huggingface import gguf
from zoo.huggingface.config import from_hf, to_hf
from zoo.huggingface.folder import (
    DIGESTS,
    INDEX,
    as_stored,
    expected,
    read_headers,
    read_json,
    refusal,
    said,
)
from zoo.huggingface.kept import as_quantised, kept_rows, kept_together, load_kept, quantisation
from zoo.huggingface.quantised import beside, decoded, written
from zoo.huggingface.sharded import load_leaf
from zoo.huggingface.tensors import DamagedError, Tensor, as_bytes
from zoo.parameters import Row
from zoo.quantised import quantise as quantised
from zoo.quantised import whole

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
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "modules.json",  # of sentence-transformers: what is done with hidden states
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]*_*/config.json",
    "[0-9]*_*/model.safetensors",
)
_OPTIMISED = "hf_quant_config.json"  # says what numbers there are, in folders of Model Optimizer
_ROWS = 16
Part = tuple[Row, tuple[int, ...]]  # a parameter, and where in its stack the tensor stands
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load(
    path: str | os.PathLike,
    *,
    dtype: DTypeLike | None = None,
    mesh: jax.sharding.Mesh | None = None,
    axes: Axes = AXES,
    quantise: str | None = None,
) -> Any:
    """Return the model in a Hugging Face folder: `config.json` and one or many `.safetensors` files.

    Args:
        path: the folder. Weights in fewer bits are read as what they stand for (`zoo.huggingface.quantised`). Or a
            file of llama.cpp's, `NAME.gguf` (`zoo.huggingface.gguf`).
        dtype: what to store parameters in; None keeps what is on disk (float32 for float64, unless JAX has 64 bits).
        mesh: the devices to spread parameters over, of which each process reads its own parts; None puts them on one.
        axes: which axes of the mesh cut each dimension letter of `zoo.parameters` (see `transforms.sharding.spec_of`).
        quantise: `as_stored` keeps matrices that the folder has in fewer bits so, as `zoo.quantised.Quantised`;
            `int8`, `int4` or `nf4` makes those of it (`zoo.quantised.quantise`).

    Raises:
        ValueError: the path is no such folder, a file is damaged, the config holds something unknown, or tensors are
            missing, unexpected, misshapen or of an unsupported type: all of them in one message; or matrices cannot be
            kept in fewer bits.
    """
    folder, config, tensors = _opened(path)
    kept = kept_rows(folder, config, tensors) if quantise == AS_STORED else ()
    leaves, damaged = {}, []
    for row in rows(config):
        own = _dtype_of(row, config, tensors, dtype)
        try:
            if row in kept:
                leaves[row.leaf] = load_kept(row, config.dims, tensors, own, mesh, axes)
            elif mesh is None:
                leaves[row.leaf] = _load_leaf(row, config.dims, tensors, own)
            else:
                leaves[row.leaf] = load_leaf(row, config.dims, tensors, own, mesh, axes)
        except DamagedError as error:
            damaged.append(str(error))
    if damaged:
        lines = "\n".join(f"  {problem}" for problem in damaged)
        raise refusal(folder, f"files are damaged; copy them again.\n{lines}")
    model = model_class(config).build(config, leaves)
    return model if quantise in (None, AS_STORED) else quantised(model, quantise)


def shapes(path: str | os.PathLike, *, dtype: DTypeLike | None = None, quantise: str | None = None) -> Any:
    """Return the abstract model that `load` would return, from headers alone: its leaves are `jax.ShapeDtypeStruct`s.

    Raises:
        ValueError: as `load` does, of what headers tell.
    """
    folder, config, tensors = _opened(path)
    kept = kept_rows(folder, config, tensors) if quantise == AS_STORED else ()

    def build():
        leaves = {}
        for row in rows(config):
            own = _dtype_of(row, config, tensors, dtype)
            if row in kept:
                leaves[row.leaf] = as_quantised(row, config.dims, tensors, own, jnp.zeros)
            else:
                leaves[row.leaf] = jnp.zeros(row.shape(config.dims), own)
        model = model_class(config).build(config, leaves)
        return model if quantise in (None, AS_STORED) else quantised(model, quantise)

    return eqx.filter_eval_shape(build)


def _opened(path: str | os.PathLike) -> tuple[Path, Config, dict[str, Tensor]]:
    """Return a folder, its config, and the tensors that the config needs."""
    folder = Path(path)
    if folder.suffix == gguf.SUFFIX and folder.is_file():
        raw, held = gguf.read(folder)
        config = from_hf(raw)
        return folder, config, expected(folder, config, gguf.named(raw, config, held))
    raw = read_json(folder, "config.json")
    if said(raw, "quantization_config") is None and (folder / _OPTIMISED).is_file():
        raw["quantization_config"] = beside(read_json(folder, _OPTIMISED))
    config, tensors = as_stored(from_hf(raw), decoded(raw, read_headers(folder)))
    return folder, config, expected(folder, config, tensors)


def _dtype_of(row: Row, config: Config, tensors: dict[str, Tensor], dtype: DTypeLike | None) -> jnp.dtype:
    """Return what to store a parameter in."""
    if row.wide:
        return jnp.dtype(jnp.float32)
    on_disk = {_DTYPES[tensors[name].dtype] for name, _ in row.tensors(config.dims)}
    return jnp.result_type(*on_disk) if dtype is None else jnp.dtype(dtype)


def save(
    model: Any, path: str | os.PathLike, *, source: str | os.PathLike | None = None, shard_bytes: int = 2**30
) -> None:
    """Write the model as a Hugging Face folder that transformers loads without any difference.

    Files are written beside the folder and moved in when all are complete; what the folder held of a model before is
    replaced, and other files (a tokenizer) stay. Each file holds the digests of its tensors, which `load` checks.

    Args:
        model: the model; parameters are written in their own dtypes.
        path: the folder, made if there is none.
        source: the folder that the model came from: its tokenizer, chat template, generation settings and modules of
            sentence-transformers are copied, and its special token ids kept, and its word for an activation that has
            several (transformers rounds each otherwise).
        shard_bytes: files are at most this large, unless one tensor alone is larger.
    """
    folder, config = Path(path), model.config
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"cannot save a model at `{folder}`: it is a file. Pass a folder.")
    dtype = jnp.dtype(model.embed.dtype).name
    told = {} if source is None else read_json(Path(source), "config.json")
    raw = to_hf(config, dtype, told) | {key: ids for key in _IDS if (ids := said(told, key)) is not None}
    held = {name: [(row, _leaf(model, row)) for row, _ in parts] for name, parts in _tensors(model).items()}
    raw |= quantisation(held, dtype)
    shards = _plan_shards(model, shard_bytes)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        scratch = Path(name)
        (scratch / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
        _write_shards(model, shards, scratch)
        if source is not None:
            for file in (file for pattern in _CARRIED for file in Path(source).glob(pattern) if file.is_file()):
                (scratch / file.relative_to(source)).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, scratch / file.relative_to(source))
        folder.mkdir(exist_ok=True)
        for stale in itertools.chain(folder.glob("*.safetensors"), folder.glob(INDEX)):
            stale.unlink()
        for file in (file for file in scratch.rglob("*") if file.is_file()):
            (folder / file.relative_to(scratch)).parent.mkdir(exist_ok=True)
            shutil.move(file, folder / file.relative_to(scratch))


def _write_shards(model: Any, shards: list[dict[str, list[Part]]], folder: Path) -> None:
    """Write the files of tensors, and their index where there are several."""
    weight_map, total = {}, 0
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        arrays: dict[str, np.ndarray] = {}
        for name, parts in shard.items():
            arrays |= _take(model, name, parts)
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


def _leaf(model: Any, row: Row) -> Any:
    return operator.attrgetter(row.leaf)(model)


def _load_leaf(row: Row, dims: dict[str, int], tensors: dict[str, Tensor], dtype: jnp.dtype) -> jax.Array:
    """Fill one leaf in place, a tensor (or, for an unstacked one, a run of rows) at a time."""
    sizes = tuple(dims.items())
    if next(iter(jnp.zeros(0).devices())).platform == "cpu":
        # Copied, and so JAX's own; a program that makes zeros would be compiled for each shape.
        leaf = jax.device_put(_unaligned(row.shape(dims), dtype), may_alias=False)
        memory = _memory(leaf.block_until_ready())
        for name, index in row.tensors(dims):
            for start, piece in tensors[name].pieces(bool(row.stack)):
                into = memory[index] if row.stack else memory[start : start + len(piece)]
                _copy(into, row.turned(piece, dims) if row.stack else piece)
        return leaf
    leaf = jnp.zeros(row.shape(dims), dtype)
    for name, index in row.tensors(dims):
        for start, piece in tensors[name].pieces(bool(row.stack)):
            turned = _turn(piece, row=row, sizes=sizes, dtype=dtype)
            # One piece at a time: those that wait for their turn would be in memory beside the leaf.
            leaf = _put(leaf, turned, index or (start,)).block_until_ready()
    return leaf


def _unaligned(shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    """Return zeros that JAX copies: memory that begins with a cache line it would share, whatever it is asked."""
    flat = np.zeros(math.prod(shape) + 1, dtype)
    return (flat[:-1] if flat.ctypes.data % 64 else flat[1:]).reshape(shape)


def _memory(leaf: jax.Array) -> np.ndarray:
    """Return the memory of an array on the host that nobody has read yet, to be filled before anybody does.

    Programs that fill it would each be compiled, which takes longer than reading a gigabyte. An array that JAX shares
    with NumPy instead (by `dlpack`, or `device_put` with `may_alias`) is read as fast, but its memory is not JAX's to
    give away: a step that is given such a model holds it twice.
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
    """Write a tensor into a leaf, at its index."""
    starts = tuple(starts) + (0,) * (leaf.ndim - len(starts))
    return jax.lax.dynamic_update_slice(leaf, turned.reshape((1,) * (leaf.ndim - turned.ndim) + turned.shape), starts)


def _take(model: Any, name: str, parts: list[Part]) -> dict[str, np.ndarray]:
    """Return one tensor as it is on disk, with all that it holds; of one in fewer bits, the tensors that it is."""
    (row, index), dims = parts[0], model.config.dims
    leaves: list[Any] = [_leaf(model, row) for row, _ in parts]
    if kept_together(leaves):
        own = [(_at(leaf.values, at), _at(leaf.scale, at)) for leaf, (_, at) in zip(leaves, parts, strict=True)]
        values, scale = (np.concatenate(arrays) for arrays in zip(*own, strict=True))
        return written(leaves[0].format, name, values, scale, leaves[0].dtype.name)
    if not row.stack:
        leaf = leaves[0] if isinstance(leaves[0], np.ndarray) else whole(leaves[0])
        here = isinstance(leaf, np.ndarray) or leaf.is_fully_addressable
        return {name: np.ascontiguousarray(leaf if here else _gathered(leaf, (...,)))}
    tensor = np.empty(row.disk_shape(dims), leaves[0].dtype)
    for row, index in parts:
        leaf = _leaf(model, row)
        part = jax.tree.map(lambda array, index=index: _at(array, index), leaf)
        row.write(np.asarray(whole(jax.tree.map(jnp.asarray, part))), tensor, dims)
    return {name: tensor}


def _at(array: jax.Array | np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    """Return one tensor of a stack, on the host."""
    on_mesh = isinstance(array, jax.Array) and isinstance(array.sharding, NamedSharding)
    return np.asarray(_gathered(array, index or (...,)) if on_mesh else array[index])


def _gathered(leaf: jax.Array, index: tuple[Any, ...]) -> jax.Array:
    """Return one tensor of a leaf that lies on a mesh, whole on every device: any process may then write it."""
    assert isinstance(leaf.sharding, NamedSharding)
    return leaf.at[index].get(out_sharding=NamedSharding(leaf.sharding.mesh, PartitionSpec()))


def _tensors(model: Any) -> dict[str, list[Part]]:
    """Return every tensor on disk, and what it holds."""
    tensors: dict[str, list[Part]] = {}
    for row in rows(model.config):
        for name, index in row.tensors(model.config.dims):
            tensors.setdefault(name, []).append((row, index))
    return tensors


def _plan_shards(model: Any, shard_bytes: int) -> list[dict[str, list[Part]]]:
    """Split the tensors, whole layers in order, into runs of at most `shard_bytes`."""
    shards, room = [], 0
    in_order = sorted(_tensors(model).items(), key=lambda one: (len(one[1][0][0].stack) > 0, one[1][0][1][:1]))
    for name, parts in in_order:
        leaves = [(row, _leaf(model, row)) for row, _ in parts]
        held = lambda leaf: sum(array.nbytes for array in jax.tree.leaves(leaf))
        size = sum(held(leaf) // math.prod(leaf.shape[: len(row.stack)]) for row, leaf in leaves)
        if size > room or not shards:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = parts
        room -= size
    return shards
