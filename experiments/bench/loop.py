"""Decoding by the engine beside a loop written by hand: one program, whose loop is over the tokens of one text.

    python -m experiments.bench loop                 # 7 rounds; prints the table and writes loop.json beside this file
    python -m experiments.bench loop --rounds 1 --tokens 8 --small       # a look; writes nothing

A Llama of 57 million parameters with random weights goes on with a text, greedily, on a CPU: in float32 and in
bfloat16, after 64 ids and after 1,000. By hand there is one cache, exactly as long as the text, and layers are scanned,
as one writes it, or written out one after the other, each with its own weights and cache, which compiles longer and
copies nothing. Its weights are float32, into which CPUs would convert those of 16 bits at every token. In one process,
in turn; told is the median of the rounds' ratios of tokens per second. Prompts and compiling are not in the times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zoo
from experiments.bench.made import made_with
from zoo.engine.engine import Engine, Settings

FIGURES = Path(__file__).with_suffix(".json")
SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "num_layers": 12,
    "embed_dim": 512,
    "mlp_dim": 1536,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 64,
}
SMALL = SIZES | {"vocab_size": 512, "num_layers": 2, "embed_dim": 64, "mlp_dim": 128, "num_heads": 2, "num_kv_heads": 2}
PROMPTS = (64, 1000)
SHAPES = ("scanned", "written out")
Array = jax.Array


class ByHand:
    """A loop over the tokens of one text.

    Args:
        model: a Llama.
        length: of the text in the end.
        scanned: whether layers are scanned, or written out.
    """

    def __init__(self, model: zoo.Llama, length: int, *, scanned: bool):
        self.config, self.length, self.dtype = model.config, length, model.embed.dtype
        wide = lambda x: jnp.asarray(x, jnp.float32)
        names = ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")
        stacked = {name: wide(getattr(model.layers, name)) for name in names}
        layers, cache = model.config.num_layers, (model.config.num_kv_heads, length, model.config.head_dim)
        empty = jnp.zeros((layers, *cache), self.dtype)
        apart = lambda tree: [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(layers)]
        ends = {"embed": wide(model.embed), "norm": wide(model.final_norm)}
        self.weights = {**ends, "layers": stacked if scanned else apart(stacked)}
        self.caches = (empty, empty) if scanned else apart((empty, empty))
        self.run = jax.jit(partial(self._run, scanned))

    def _rounded(self, x: Array) -> Array:
        return x.astype(self.dtype).astype(jnp.float32)

    def _norm(self, x: Array, weight: Array) -> Array:
        return self._rounded(x * jax.lax.rsqrt((x * x).mean() + self.config.norm_eps) * weight)

    def _layer(self, at: Array, x: Array, layer: tuple[dict[str, Array], tuple[Array, Array]]) -> tuple[Array, Any]:
        """One layer's output for the token at a place, and its cache."""
        w, (keys, values) = layer
        size = self.config.head_dim
        angles = at * self.config.rope_theta ** (-jnp.arange(0, size, 2) / size)
        cos, sin = jnp.cos(angles), jnp.sin(angles)

        def turned(x: Array) -> Array:
            left, right = jnp.split(x, 2, -1)
            return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

        h = self._norm(x, w["attn_norm"])
        q, k, v = (jnp.einsum("d,dnh->nh", h, w[name]) for name in "qkv")
        put = lambda cache, new: jax.lax.dynamic_update_slice(cache, new.astype(self.dtype)[:, None], (0, at, 0))
        keys, values = put(keys, turned(k)), put(values, v)
        scores = jnp.einsum("nh,nsh->ns", turned(q), keys.astype(jnp.float32)) / size**0.5
        shares = jax.nn.softmax(jnp.where(jnp.arange(self.length) <= at, scores, -jnp.inf))
        seen = self._rounded(jnp.einsum("ns,nsh->nh", shares, values.astype(jnp.float32)))
        x = self._rounded(x + jnp.einsum("nh,nhd->d", seen, w["o"]))
        h = self._norm(x, w["mlp_norm"])
        x = self._rounded(x + self._rounded(jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"])
        return x, (keys, values)

    def _run(self, scanned, weights, caches, ids, first, last):
        """The ids of a text with those behind `first` written up to `last`, and its caches."""

        def step(at, state):
            ids, caches = state
            x = weights["embed"][ids[at]]
            if scanned:
                x, caches = jax.lax.scan(partial(self._layer, at), x, (weights["layers"], caches))
            else:
                new = []
                for layer in zip(weights["layers"], caches, strict=True):
                    x, cache = self._layer(at, x, layer)
                    new.append(cache)
                caches = new
            chosen = jnp.argmax(weights["embed"] @ self._norm(x, weights["norm"]))
            return ids.at[at + 1].set(jnp.where(at + 1 < first, ids[at + 1], chosen)), caches

        return jax.lax.fori_loop(jnp.where(last > first, first - 1, 0), last - 1, step, (ids, caches))


def by_hand(
    model: zoo.Llama, prompt: list[int], tokens: int, *, scanned: bool
) -> Callable[[], tuple[float, list[int]]]:
    """What goes on with a prompt, and returns the seconds that a token takes, and the text."""
    length = len(prompt) + tokens
    loop = ByHand(model, length, scanned=scanned)
    ids = jnp.asarray(prompt + [0] * tokens, jnp.int32)
    read = jax.block_until_ready(loop.run(loop.weights, loop.caches, ids, len(prompt), len(prompt)))

    def go_on() -> tuple[float, list[int]]:
        began = time.perf_counter()
        ids, _ = jax.block_until_ready(loop.run(loop.weights, read[1], read[0], len(prompt), length))
        return (time.perf_counter() - began) / tokens, ids[-tokens:].tolist()

    return go_on


def by_engine(model: zoo.Llama, prompt: list[int], tokens: int) -> Callable[[], tuple[float, list[int]]]:
    """The same by the engine."""
    length = len(prompt) + tokens + 1
    engine = Engine(model, Settings(length=length, rows=1, tokens=2 * length))

    def go_on() -> tuple[float, list[int]]:
        [answer] = engine.submit(prompt, max_tokens=tokens)
        while not answer.tokens:
            engine.step()
        began, written = time.perf_counter(), len(answer.tokens)
        engine.run()
        seconds = time.perf_counter() - began
        return seconds / (tokens - written), [token.id for token in answer.tokens]

    return go_on


def measure(sizes: dict[str, Any], dtype: str, length: int, tokens: int, rounds: int) -> dict[str, Any]:
    """The ratios of one dtype and length of prompt."""
    model = zoo.Llama.init(zoo.LlamaConfig(**sizes, tied=True), key=jax.random.key(0), dtype=jnp.dtype(dtype))
    prompt = np.random.default_rng(0).integers(3, sizes["vocab_size"], length).tolist()
    calls = {name: by_hand(model, prompt, tokens, scanned=name == SHAPES[0]) for name in SHAPES}
    calls["engine"] = by_engine(model, prompt, tokens)
    texts = {name: call()[1] for name, call in calls.items()}
    same = {name: sum(a == b for a, b in zip(texts[name], texts["engine"], strict=True)) for name in SHAPES}
    took = [{name: call()[0] for name, call in calls.items()} for _ in range(rounds)]
    ratio = lambda name: round(statistics.median(one[name] / one["engine"] for one in took), 2)
    seconds = {name: round(1e3 * statistics.median(one[name] for one in took), 2) for name in calls}
    return {
        "dtype": dtype,
        "prompt": length,
        "over": {name: ratio(name) for name in SHAPES},
        "ms": seconds,
        "same": same,
    }


def table(figures: dict[str, Any]) -> str:
    """The figures as a table in Markdown."""
    lines = ["| tokens per second of the engine, over | layers scanned | layers written out |", "|---|---|---|"]
    for row in figures["rows"]:
        cells = " | ".join(f"{row['over'][name]:.2f}" for name in SHAPES)
        lines.append(f"| {row['dtype']}, after {row['prompt']:,} ids | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--small", action="store_true", help="a tiny model and short texts; writes nothing")
    args = parser.parse_args()
    sizes, prompts = (SMALL, (8,)) if args.small else (SIZES, PROMPTS)
    every = [(dtype, length) for dtype in ("float32", "bfloat16") for length in prompts]
    rows = [measure(sizes, dtype, length, args.tokens, args.rounds) for dtype, length in every]
    how = {"made": made_with(), "cores": os.cpu_count(), "rounds": args.rounds, "tokens": args.tokens}
    figures = {"command": "python -m experiments.bench loop", **how, "rows": rows}
    print(table(figures))
    for row in rows:
        print(f"{row['dtype']}, after {row['prompt']}: ms {row['ms']}, of {args.tokens} tokens the same {row['same']}")
    if not args.small:
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
