"""The memory of Gemma-2 2B's head and loss, compiled for a TPU or a GPU that is not here.

    python -m experiments.bench floor tpu           # v5p; needs jax[tpu]
    python -m experiments.bench floor gpu           # needs a JAX with CUDA; uses the first GPU

N=8192 tokens, D=2304, V=256,000, bfloat16: value and gradients of hidden states and table. The gradients alone are
1161 MiB. What is printed is the peak beyond the arguments.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies

from transforms import tile

Array = jax.Array
TOKENS, EMBED, VOCAB = 8192, 2304, 256_000


def loss(hidden: Array, table: Array, labels: Array) -> Array:
    logits = (hidden @ table.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def device(kind: str) -> jax.Device:
    """A device to compile for."""
    if kind == "gpu":
        return jax.devices("gpu")[0]
    # libtpu would ask its host which slice it is part of.
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,4,1",
    }
    jax.config.update("jax_platforms", "cpu")
    return topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("tpu", "gpu"))
    args = parser.parse_args()
    sharding = jax.sharding.SingleDeviceSharding(device(args.kind))
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in (
            ((TOKENS, EMBED), jnp.bfloat16),
            ((VOCAB, EMBED), jnp.bfloat16),
            ((TOKENS,), jnp.int32),
        )
    ]
    programs: dict[str, Callable[..., Array]] = {"untiled": loss}
    programs |= {f"tile, n={n}": tile(loss, (0, None, 0), n) for n in (8, 32, 64, 128)}
    programs["tile, n=32, lowmem"] = tile(loss, (0, None, 0), 32, lowmem=True)
    for name, fn in programs.items():
        compiled = jax.jit(jax.value_and_grad(fn, (0, 1))).lower(*shapes).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        peak = analysis.peak_memory_in_bytes - analysis.argument_size_in_bytes
        print(f"{name:20}{peak / 2**20:10.0f} MiB")


if __name__ == "__main__":
    main()
