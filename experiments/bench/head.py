"""A linear head with softcapped cross-entropy and z-loss: untiled, tiled, and as `lax.scan` + `jax.checkpoint`.

    python -m experiments.bench head                # N=2048 D=512 V=32768 float32, n=8
    python -m experiments.bench head --dtype bfloat16 --n 16 --rounds 0     # compile only

Temporary memory and products are the compiler's; times are minima over rounds in which the programs take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.planning.hlo import dot_flops
from transforms import tile

Array = jax.Array


def token_losses(h: Array, w: Array, y: Array) -> Array:
    logits = 30 * jnp.tanh((h @ w).astype(jnp.float32) / 30)
    return (
        optax.softmax_cross_entropy_with_integer_labels(logits, y) + 1e-4 * jax.scipy.special.logsumexp(logits, -1) ** 2
    )


def loss(h: Array, w: Array, y: Array, m: Array) -> Array:
    return (token_losses(h, w, y) * m).sum() / m.sum()


def scanned(n: int) -> Callable[..., Array]:
    """What one writes by hand: a scan over tiles of a checkpointed loss. `n` must divide the tokens."""

    def run(h: Array, w: Array, y: Array, m: Array) -> Array:
        def body(total: Array, tile: tuple[Array, ...]) -> tuple[Array, None]:
            h, y, m = tile
            return total + jax.checkpoint(lambda h, w: (token_losses(h, w, y) * m).sum())(h, w), None

        tiles = tuple(x.reshape(n, -1, *x.shape[1:]) for x in (h, y, m))
        return jax.lax.scan(body, jnp.float32(0), tiles)[0] / m.sum()

    return run


def compile_gradient(fn: Callable[..., Array], tokens: int, embed: int, vocab: int, dtype: str) -> jax.stages.Compiled:
    """Return the compiled value and gradients (hidden, weights) of `fn`."""
    shapes = (
        jax.ShapeDtypeStruct((tokens, embed), dtype),
        jax.ShapeDtypeStruct((embed, vocab), dtype),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )
    return jax.jit(jax.value_and_grad(fn, (0, 1))).lower(*shapes).compile()


def temp_bytes(compiled: jax.stages.Compiled) -> int:
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 2048), ("embed", 512), ("vocab", 32768), ("n", 8), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    sizes = (args.tokens, args.embed, args.vocab)
    programs = {
        "untiled": loss,
        "tile": tile(loss, (0, None, 0, 0), args.n),
        "tile, vocabulary": tile(loss, (None, 1, None, None), args.n),
        "tile, lowmem": tile(loss, (0, None, 0, 0), args.n, lowmem=True),
    }
    if args.tokens % args.n == 0:
        programs["scan + checkpoint"] = scanned(args.n)
    compiled = {name: compile_gradient(fn, *sizes, args.dtype) for name, fn in programs.items()}
    rng = np.random.default_rng(0)
    inputs = (
        jnp.asarray(rng.normal(size=(args.tokens, args.embed)), args.dtype),
        jnp.asarray(rng.normal(size=(args.embed, args.vocab)) / args.embed**0.5, args.dtype),
        jnp.asarray(rng.integers(0, args.vocab, args.tokens)),
        jnp.ones(args.tokens),
    )
    best = dict.fromkeys(compiled, float("inf"))
    for _ in range(args.rounds):
        for name, program in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*inputs))
            best[name] = min(best[name], time.perf_counter() - start)
    print(f"N={args.tokens} D={args.embed} V={args.vocab} {args.dtype}, n={args.n}, JAX {jax.__version__}")
    print(f"{'':20}{'temp MiB':>10}{'dots / 2NDV':>14}{'time':>8}")
    unit = 2 * args.tokens * args.embed * args.vocab
    for name, program in compiled.items():
        ratio = best[name] / best["untiled"] if args.rounds else float("nan")
        flops = dot_flops(program.as_text() or "") / unit
        print(f"{name:20}{temp_bytes(program) / 2**20:10.1f}{flops:14.3f}{ratio:8.2f}")


if __name__ == "__main__":
    main()
