"""llama.cpp beside the engine, in float32: the file that it reads, and the process of its own that it runs in."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from experiments.bench.rivals.compare import Worker
from experiments.bench.rivals.table import System

LLAMA = System("llama", "with_llama", "greedy", ("numpy>=2.0", "llama-cpp-python==0.3.36"))


def write(model: zoo.Llama, path: Path) -> None:
    """Write a model in float32 as a GGUF file, without a tokenizer."""
    import gguf
    from safetensors.numpy import load_file

    config = model.config
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(config.context_length)
    file.add_embedding_length(config.embed_dim)
    file.add_block_count(config.num_layers)
    file.add_feed_forward_length(config.mlp_dim)
    file.add_head_count(config.num_heads)
    file.add_head_count_kv(config.num_kv_heads)
    file.add_layer_norm_rms_eps(config.norm_eps)
    file.add_rope_freq_base(config.rope_theta)
    file.add_rope_dimension_count(config.head_dim)
    file.add_vocab_size(config.vocab_size)
    file.add_tokenizer_model("no_vocab")
    file.add_file_type(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    turned = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    with tempfile.TemporaryDirectory() as folder:
        zoo.save(model, folder)
        for part in sorted(Path(folder).glob("*.safetensors")):
            for name, tensor in load_file(part).items():
                if heads := turned.get(
                    name.split(".")[-2]
                ):  # the halves that rotary embeddings pair lie in turns there
                    halves = tensor.reshape(heads, 2, -1, tensor.shape[-1])
                    tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
                known = names.get_name(name, try_suffixes=(".weight",))
                assert known is not None, name
                file.add_tensor(known, np.ascontiguousarray(tensor, np.float32))
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_tensors_to_file()
    file.close()


@contextmanager
def running(model: zoo.Llama, rows: int, length: int, tokens: int) -> Generator[dict[str, Callable[..., Any]]]:
    """Run llama.cpp; yield what answers `rows` requests at once, and one by one.

    Raises:
        experiments.bench.rivals.environments.Missing: it cannot be installed, or cannot run.
    """
    worker = Worker(LLAMA)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write(model, path)
            worker("load", file=str(path), rows=rows, length=length, tokens=tokens)
        yield {
            "llama.cpp": lambda prompts: worker("together", prompts=prompts)["ids"],
            "llama.cpp one by one": lambda prompts: worker("alone", prompts=prompts)["ids"],
        }
    finally:
        worker.close()
