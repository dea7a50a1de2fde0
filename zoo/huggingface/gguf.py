"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), read by the package `gguf`. Free of JAX.

In: a file. Out: what a folder would have: its `config.json`, and its tensors by Hugging Face's names, decoded when they
are read. Undone is what llama.cpp's converter does to some: rows of Llama's queries and keys, whose rotated pairs it
puts side by side, and Gemma's norms, to which it adds one.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zoo.config import Config, rows
from zoo.huggingface.quantised.decoded import Decoded, Kept, made
from zoo.huggingface.tensors import Tensor

SUFFIX = ".gguf"
_MODELS = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
_LABELS = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F64": "F64"}  # others stand for float32
_UNREAD = ("rope_freqs.weight",)  # which `_scaling` reads
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of those whose scores are scaled by another number


class _Bytes(Tensor):
    """A tensor of a file that the package has mapped into memory: its bytes, as rows of blocks."""

    def array(self) -> np.ndarray:
        """Return the bytes."""
        return np.array(_opened(self.file, self.file.stat().st_mtime_ns).tensors[self.start].data)


@functools.lru_cache(maxsize=2)
def _opened(file: Path, changed: int) -> Any:
    """Return the package's reader of a file."""
    from gguf import GGUFReader

    return GGUFReader(file)


def read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the `config.json` that a file's metadata describe, and its tensors by the names that they have there.

    Raises:
        ValueError: the package is missing, the file is damaged, or its architecture is not read.
    """
    refuse = lambda why: ValueError(f"cannot load weights from `{file}`: {why}")
    try:
        reader = _opened(file, file.stat().st_mtime_ns)
    except ImportError:
        raise refuse("reading GGUF files takes the package `gguf`: pip install -e '.[gguf]'.") from None
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
        raise refuse(f"it is damaged, or no GGUF file: {error}.") from None
    told = {name: field.contents() for name, field in reader.fields.items()}
    name = told.get("general.architecture")
    if name not in _MODELS or told.get(f"{name}.expert_count"):
        what = f"{name!r} with experts" if name in _MODELS else repr(name)
        raise refuse(f"its architecture is {what}, and of GGUF files this zoo reads {', '.join(map(repr, _MODELS))}.")
    found = {one.name: index for index, one in enumerate(reader.tensors)}
    own = {key.removeprefix(f"{name}."): value for key, value in told.items()}
    missing = [key for key in ("block_count", "embedding_length", "feed_forward_length") if key not in own]
    missing += [key for key in ("attention.head_count",) if key not in own] + ["token_embd.weight"] * (
        "token_embd.weight" not in found
    )
    if missing:
        raise refuse(f"it lacks {', '.join(missing)}.")
    freqs = reader.tensors[found["rope_freqs.weight"]].data if "rope_freqs.weight" in found else None
    vocab_size = int(reader.tensors[found["token_embd.weight"]].shape[1])
    raw = _config(name, own, vocab_size, set(found), None if freqs is None else np.array(freqs, np.float64))
    return raw, {one: _tensor(file, one, index, reader.tensors[index]) for one, index in found.items()}


def _config(name, told, vocab_size, held, freqs):
    """Return what `config.json` would say."""
    heads, width = told["attention.head_count"], told["embedding_length"]
    head_dim = told.get("attention.key_length", width // heads)
    raw: dict[str, Any] = {
        "model_type": _MODELS[name],
        "vocab_size": vocab_size,
        "num_hidden_layers": told["block_count"],
        "hidden_size": width,
        "intermediate_size": told["feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": told.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": told.get("context_length", 8192),
        "rms_norm_eps": float(np.float64(str(np.float32(told.get("attention.layer_norm_rms_epsilon", 1e-6))))),
        "rope_theta": float(told.get("rope.freq_base", 1e6 if name == "gemma3" else 10000.0)),
    }
    scaling = _scaling(told, freqs, raw["rope_theta"], head_dim)
    raw |= {} if scaling is None else {"rope_scaling": scaling}
    if not name.startswith("gemma"):
        raw["tie_word_embeddings"] = "output.weight" not in held
    if name == "llama":
        raw["attention_bias"] = "blk.0.attn_q.bias" in held
    if name in ("gemma2", "gemma3"):
        large = told["block_count"] == _GEMMA_27B[name]
        raw["query_pre_attn_scalar"] = width // heads if large else head_dim
        raw["sliding_window"] = told.get("attention.sliding_window", 4096 if name == "gemma2" else 512)
        caps = {"attn": "attn_logit_softcapping", "final": "final_logit_softcapping"}
        raw |= {key: told[short] for key in caps.values() if (short := key) in told}
    return raw


def _scaling(told, freqs, theta, head_dim):
    """Return how rotary frequencies are stretched: Llama 3's factors are a tensor, one for each pair."""
    if freqs is not None:
        turns = 8192 / (2 * np.pi / theta ** (-2 * np.arange(head_dim // 2) / head_dim))
        smooth = np.clip((turns - 1) / 3, 0, 1)  # low_freq_factor 1, high_freq_factor 4
        for factor in (8.0, 16.0, 32.0):
            if np.allclose(1 / ((1 - smooth) / factor + smooth), freqs.reshape(-1), rtol=1e-3):
                known = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
                return {"rope_type": "llama3", "factor": factor, **known}
        return {"rope_type": "unknown factors of rope_freqs.weight"}
    stretch = told.get("rope.scaling.type", "none")
    if stretch == "none":
        return None
    scaling = {"rope_type": stretch, "factor": float(told.get("rope.scaling.factor", 1.0))}
    if "rope.scaling.original_context_length" in told and stretch != "linear":
        scaling["original_max_position_embeddings"] = told["rope.scaling.original_context_length"]
    return scaling


def _tensor(file, name, index, held) -> Decoded:
    block, shape = held.tensor_type, tuple(int(size) for size in reversed(held.shape))
    data = _Bytes(file, name, tuple(held.data.shape), "U8", None, index)
    label = _LABELS.get(block.name, "F32")
    return made(name, shape, label, (data,), functools.partial(_decode, block=block), _kept(block.name, shape))


def _decode(data, *, block):
    from gguf.quants import dequantize

    return dequantize(data, block)


def _kept(block, shape):
    """Say how blocks of 32 integers with a scale before them stay; others, of several scales, cannot."""
    if block not in ("Q8_0", "Q4_0") or len(shape) != 2:
        return None

    def split(data):
        blocks = data.reshape(shape[0], shape[1] // 32, -1)
        scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
        if block == "Q8_0":
            return np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(shape), scale
        codes = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1).reshape(shape)
        return codes[:, ::2] | (codes[:, 1::2] << 4), scale

    return Kept("int8" if block == "Q8_0" else "int4", shape[1] // 32, np.dtype("f2"), split)


def named(raw: Mapping[str, Any], config: Config, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's tensors by Hugging Face's names, as they are there."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    name = next(name for name, theirs in _MODELS.items() if theirs == raw["model_type"])
    arch = next(arch for arch, called in MODEL_ARCH_NAMES.items() if called == name)
    table, found = get_tensor_name_map(arch, config.num_layers), {}
    left = {one: tensor for one, tensor in tensors.items() if one not in _UNREAD}
    for row in rows(config):
        for theirs, _ in row.tensors(config.dims):
            base, _, end = theirs.rpartition(".")
            held = left.pop(f"{table.get_name(base)}.{end}", None)
            if held is not None:
                found[theirs] = _undone(held, theirs, name, config)
    return found | left


def _in_order(split, order, data):
    values, scale = split(data)
    return values[order], scale[order]


def _undone(held, theirs, name, config):
    """Return a tensor as it was before it was converted."""
    assert isinstance(held, Decoded)
    if name.startswith("gemma") and theirs.endswith("norm.weight"):
        return made(theirs, held.shape, held.dtype, held.parts, lambda data: held.decode(data) - 1)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(theirs.split(".")[-2])
    if name != "llama" or heads is None:
        return made(theirs, held.shape, held.dtype, held.parts, held.decode, held.kept)
    order = np.arange(held.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    kept = held.kept
    if kept is not None:
        kept = Kept(kept.format, kept.groups, kept.scale, functools.partial(_in_order, kept.read, order))
    decode = lambda data: held.decode(data).reshape(held.shape)[order]
    return made(theirs, held.shape, held.dtype, held.parts, decode, kept)
