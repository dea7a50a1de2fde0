"""A head and its loss on seven layouts of eight devices, untiled and tiled: what devices send, and temporary memory.

    python -m experiments.bench layouts             # v5e-8, compiled ahead of time; needs jax[tpu]
    python -m experiments.bench layouts h100-8      # needs the CUDA plugin
    python -m experiments.bench layouts cpu         # eight CPU devices, a small head in float32

Value and gradients of hidden states and weights. On the CPU B=32 S=128 D=256 V=8192; otherwise B=32 S=2048 D=2048
V=32768 with float32 parameters, products of bfloat16 and float32 logits. The sequence is cut, n=8.
"""

from __future__ import annotations

import os
import sys

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from experiments.planning import hlo, targets
from transforms import tile

Array = jax.Array
SMALL, LARGE = (32, 128, 256, 8192), (32, 2048, 2048, 32768)
# The mesh, and how hidden states [B, S, D] and weights [D, V] lie on it.
LAYOUTS = {
    "data": ({"data": 8}, P("data", None, None), P(None, None)),
    "FSDP over D": ({"data": 8}, P("data", None, None), P("data", None)),
    "FSDP over V": ({"data": 8}, P("data", None, None), P(None, "data")),
    "tensor": ({"model": 8}, P(None, None, None), P(None, "model")),
    "context": ({"context": 8}, P(None, "context", None), P(None, None)),
    "FSDP x tensor": ({"data": 4, "model": 2}, P("data", None, None), P("data", "model")),
    "FSDP x context": ({"data": 4, "context": 2}, P("data", "context", None), P("data", None)),
}


def loss(weights: Array, hidden: Array, labels: Array, mask: Array) -> Array:
    logits = jnp.einsum("bsd,dv->bsv", hidden, weights.astype(hidden.dtype), preferred_element_type=jnp.float32)
    picked = jnp.where(jnp.arange(logits.shape[-1]) == labels[..., None], logits, 0).sum(-1)
    return ((jax.nn.logsumexp(logits, -1) - picked) * mask).sum() / mask.sum()


def over_vocabulary(weights: Array, *rest: Array) -> Array:
    """The one line that is needed where the vocabulary is spread over the axis that the tokens are, tiled or not."""
    return loss(reshard(weights.astype(rest[0].dtype), P(None, None)), *rest)


def measure(name: str, devices: np.ndarray, sizes: tuple[int, int, int, int], dtype: jnp.dtype) -> list[str]:
    """The columns of one layout."""
    axes, hidden, weights = LAYOUTS[name]
    mesh = Mesh(devices.reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))
    b, s, d, v = sizes
    fn = over_vocabulary if name == "FSDP over V" else loss
    tokens = P(*hidden[:2])
    arrays = [((d, v), jnp.float32, weights), ((b, s, d), dtype, hidden)]
    arrays += [((b, s), jnp.int32, tokens), ((b, s), jnp.float32, tokens)]
    columns: list[list[str]] = [[], []]
    flops, looped = [], 0.0
    with jax.set_mesh(mesh):
        args = [
            jax.ShapeDtypeStruct(shape, number, sharding=NamedSharding(mesh, spec)) for shape, number, spec in arrays
        ]
        for one in (fn, tile(fn, axis=(None, 1, 1, 1), n=8)):
            compiled = jax.jit(jax.value_and_grad(one, argnums=(0, 1))).lower(*args).compile()
            text, memory = compiled.as_text(), compiled.memory_analysis()
            assert text is not None and memory is not None
            sent = hlo.collectives(text, 8)
            edges = memory.argument_size_in_bytes + memory.output_size_in_bytes
            peak = memory.temp_size_in_bytes if dtype == jnp.float32 else memory.peak_memory_in_bytes - edges
            columns[0].append(f"{sum(c.bytes * c.times for c in sent) / 2**20:.1f}")
            columns[1].append(f"{peak / 2**20:.0f}")
            flops.append(hlo.dot_flops(text))
            looped = sum(c.bytes * c.times for c in sent if c.looped)
    return [name, *columns[0], f"{looped / 2**20:.2f}", *columns[1], f"{flops[1] / flops[0]:.3f}"]


def main(argv: list[str]) -> None:
    """Print the table."""
    kind = argv[0] if argv else "v5e-8"
    found = jax.devices("cpu") if kind == "cpu" else list(targets.find(kind).devices)
    sizes, dtype = (SMALL, jnp.dtype(jnp.float32)) if kind == "cpu" else (LARGE, jnp.dtype(jnp.bfloat16))
    print("| | sent, untiled | tiled | of it in the loop | temporary, untiled | tiled | products |")
    print("|---|---|---|---|---|---|---|")
    for name in LAYOUTS:
        print(f"| {' | '.join(measure(name, np.array(found[:8]), sizes, dtype))} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
