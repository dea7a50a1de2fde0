"""The other ways: what is to be installed for each, and who builds it."""

from __future__ import annotations

from typing import NamedTuple

JAX = ("jax==0.10.2", "optax>=0.2.8", "numpy>=2.0")
TORCH = ("torch==2.13.0", "numpy>=2.0", "array-api-compat>=1.12", "setuptools")


class System(NamedTuple):
    """A way to compute a head's loss.

    Attributes:
        environment: its name, of those that are made on demand; None for the one that runs this.
        build: a function of `with_jax` or `with_torch`.
        requires: what pip installs there.
        alone: what pip installs there without its dependencies.
        tiles: whether it holds a slice of the logits at a time; the others are what one compares with.
        any_loss: whether it takes a user's own loss of logits.
        dtypes: in which it is something else than the others.
        devices: where it runs: "cpu", "gpu".
    """

    environment: str | None
    side: str
    build: str
    requires: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    tiles: bool = True
    any_loss: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    devices: tuple[str, ...] = ("cpu", "gpu")


SYSTEMS = {
    "JAX, untiled": System(None, "with_jax", "untiled", tiles=False, any_loss=True),
    "tile": System(None, "with_jax", "tiled", any_loss=True),
    "tile, vocabulary": System(None, "with_jax", "tiled_vocabulary"),
    "tile, lowmem": System(None, "with_jax", "tiled_lowmem"),
    "tile, lowmem, n=1": System(None, "with_jax", "tiled_lowmem_uncut", devices=("gpu",)),
    "tile, sums in bfloat16": System(None, "with_jax", "tiled_narrow", dtypes=("bfloat16",)),
    "tile, lowmem, sums in bfloat16": System(
        None, "with_jax", "tiled_lowmem_narrow", dtypes=("bfloat16",), devices=("gpu",)
    ),
    "scan + checkpoint": System(None, "with_jax", "scanned"),
    "MaxText's algorithm": System(None, "with_jax", "maxtext"),
    "Levanter": System(
        "levanter", "with_jax", "levanter", (*JAX, "--pre", "levanter==1.2.dev1644", "haliax", "gitpython", "chex")
    ),
    "EasyDeL": System("easydel", "with_jax", "easydel", ("easydel==0.3.0", "optax")),
    "tokamax": System("tokamax", "with_jax", "tokamax", (*JAX, "tokamax==0.0.12"), devices=("cpu",)),
    "PyTorch, eager": System("torch", "with_torch", "eager", TORCH, tiles=False, any_loss=True),
    "PyTorch, compiled": System("torch", "with_torch", "compiled", TORCH, tiles=False),
    "F.linear_cross_entropy": System("torch", "with_torch", "linear_cross_entropy", TORCH),
    "Inductor auto_chunker": System("torch", "with_torch", "auto_chunker", TORCH, any_loss=True),
    "torchtune": System(
        "torchtune",
        "with_torch",
        "torchtune",
        (
            *TORCH,
            "omegaconf",
            "tqdm",
            "datasets",
            "huggingface_hub",
            "safetensors",
            "tiktoken",
            "sentencepiece",
            "tokenizers",
            "kagglehub",
        ),
        ("torchtune==0.6.1", "torchao==0.10.0"),
    ),
    "torchtitan": System(
        "torchtitan",
        "with_torch",
        "torchtitan",
        (*TORCH, "spmd_types", "tyro", "docstring_parser", "tabulate", "fsspec", "torchdata", "datasets"),
        ("torchtitan==0.3.0",),
        any_loss=True,
    ),
    "TRL": System("trl", "with_torch", "trl", (*TORCH, "trl==1.16.0", "transformers")),
    "DeepSpeed": System(
        "deepspeed",
        "with_torch",
        "deepspeed_fused",
        (*TORCH, "hjson", "ninja", "py-cpuinfo", "einops", "msgpack", "pydantic", "psutil", "packaging", "tqdm"),
        ("deepspeed==0.19.8",),
        any_loss=True,
    ),
    "Liger": System(
        "liger", "with_torch", "liger", (*TORCH, "transformers"), ("liger-kernel==0.8.5",), devices=("cpu",)
    ),
    "Liger's kernel": System(
        "liger", "with_torch", "liger_kernel", (*TORCH, "transformers"), ("liger-kernel==0.8.5",), devices=("gpu",)
    ),
    "CCE": System("cce", "with_torch", "cce", TORCH, ("cut-cross-entropy==25.1.1",), devices=("gpu",)),
    "CCE, unfiltered": System(
        "cce", "with_torch", "cce_unfiltered", TORCH, ("cut-cross-entropy==25.1.1",), devices=("gpu",)
    ),
}
