"""What runs in environments with JAX: functions that give `loss(hidden [N D], weights [D V], labels [N])` for sizes."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Array = jax.Array
Loss = Callable[[Array, Array, Array], Array]


def cross_entropy(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def untiled(tokens: int, vocab: int, slices: int) -> Loss:
    """Logits in the dtype of their operands, losses in float32: the function that PyTorch's systems compute."""
    return lambda h, w, y: cross_entropy(h @ w, y).mean()


def _tile(axes: tuple[int | None, ...], slices: int, **how: Any) -> Loss:
    tile = importlib.import_module("transforms").tile
    return tile(untiled(0, 0, 0), axes, slices, **how)


def tiled(tokens: int, vocab: int, slices: int) -> Loss:
    return _tile((0, None, 0), slices)


def tiled_vocabulary(tokens: int, vocab: int, slices: int) -> Loss:
    return _tile((None, 1, None), slices)


def tiled_lowmem(tokens: int, vocab: int, slices: int) -> Loss:
    return _tile((0, None, 0), slices, lowmem=True)


def tiled_lowmem_uncut(tokens: int, vocab: int, slices: int) -> Loss:
    """All tokens at once, the words in blocks as `lowmem` has them."""
    return _tile((0, None, 0), 1, lowmem=True)


def tiled_narrow(tokens: int, vocab: int, slices: int) -> Loss:
    """Its sums in the dtype of the weights, as the systems of PyTorch have them."""
    return _tile((0, None, 0), slices, accumulate=jnp.bfloat16)


def tiled_lowmem_narrow(tokens: int, vocab: int, slices: int) -> Loss:
    """Likewise, the words in blocks."""
    return _tile((0, None, 0), slices, lowmem=True, accumulate=jnp.bfloat16)


def scanned(tokens: int, vocab: int, slices: int) -> Loss:
    """What one writes by hand: a scan over slices of a checkpointed sum."""

    def loss(h: Array, w: Array, y: Array) -> Array:
        @jax.checkpoint
        def body(total: Array, one: tuple[Array, Array]) -> tuple[Array, None]:
            return total + cross_entropy(one[0] @ w, one[1]).sum(), None

        slices_of = lambda x: x.reshape(slices, -1, *x.shape[1:])
        return jax.lax.scan(body, jnp.float32(0), (slices_of(h), slices_of(y)))[0] / tokens

    return loss


def maxtext(tokens: int, vocab: int, slices: int) -> Loss:
    """The algorithm of MaxText's vocabulary tiling, written anew: two scans under one derivative rule.

    The first adds up losses; the second computes each slice's logits again, and carries the weights' gradient in their
    own dtype. https://github.com/AI-Hypercomputer/maxtext, `vocabulary_tiling.py`
    """

    def of_slice(h: Array, w: Array, y: Array) -> Array:
        logits = (h @ w).astype(jnp.float32)
        return (jax.nn.logsumexp(logits, -1) - (jax.nn.one_hot(y, vocab) * logits).sum(-1)).sum()

    @jax.custom_vjp
    def total(h: Array, w: Array, y: Array) -> Array:
        return jax.lax.scan(lambda s, one: (s + of_slice(one[0], w, one[1]), None), jnp.float32(0), (h, y))[0]

    def forward(h: Array, w: Array, y: Array) -> tuple[Array, Any]:
        return total(h, w, y), (h, w, y)

    def backward(saved: Any, cotangent: Array) -> Any:
        h, w, y = saved

        def body(dw: Array, one: tuple[Array, Array]) -> tuple[Array, Array]:
            dh, more = jax.grad(of_slice, (0, 1))(one[0], w, one[1])
            return dw + more, dh

        dw, dh = jax.lax.scan(body, jnp.zeros_like(w), (h, y))
        return (dh * cotangent).astype(h.dtype), (dw * cotangent).astype(w.dtype), None

    total.defvjp(forward, backward)
    slices_of = lambda x: x.reshape(slices, -1, *x.shape[1:])
    return lambda h, w, y: total(slices_of(h), w, slices_of(y)) / tokens


def levanter(tokens: int, vocab: int, slices: int) -> Loss:
    hax = importlib.import_module("haliax")
    fused = importlib.import_module("levanter.models.loss").fused_cross_entropy_loss_and_logsumexp_penalty

    def loss(h: Array, w: Array, y: Array) -> Array:
        n, d, v = hax.Axis("batch", tokens), hax.Axis("embed", h.shape[1]), hax.Axis("vocab", vocab)
        named = hax.named(h, (n, d)), hax.named(w, (d, v))
        block = -(-vocab // slices)
        more = {"target_y": hax.named(y, n), "block_size": block, "dtype": jnp.float32}
        return fused(*named, Contract=d, Label=v, **more).array

    return loss


def easydel(tokens: int, vocab: int, slices: int) -> Loss:
    utils = importlib.import_module("easydel.infra.loss_utils")
    config = utils.LossConfig(shift_tokens=False)

    def loss(h: Array, w: Array, y: Array) -> Array:
        more = {"vocab_size": vocab, "config": config, "token_chunk_size": -(-tokens // slices)}
        return utils.causal_lm_loss_chunked_lm_head(h[None], y[None], lambda x: x @ w, **more).loss

    return loss


def tokamax(tokens: int, vocab: int, slices: int) -> Loss:
    """Its implementation for CPUs, which makes all logits; the other is a kernel for TPUs."""
    api = importlib.import_module("tokamax")
    if not hasattr(api, "linear_softmax_cross_entropy_loss"):
        api = importlib.import_module("tokamax._src.ops.linear_softmax_cross_entropy_loss.api")
    return lambda h, w, y: api.linear_softmax_cross_entropy_loss(h, y, w, reduction="mean", implementation="xla")


def _reduced(logits: Array, labels: Array, reduction: str) -> Array:
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return each if reduction == "none" else getattr(jnp, reduction)(each)


OWN = {"cross_entropy": _reduced, "logsumexp": jax.nn.logsumexp, "log_softmax": jax.nn.log_softmax}
NAMESPACE = SimpleNamespace(**{**vars(jnp), **OWN})  # what `losses` are written in


class Runner:
    """Answers a worker's commands."""

    def __init__(self, build: str):
        self.build = globals()[build]
        self.name = build

    def load(self, inputs: str, dtype: str, slices: int) -> dict:
        h, w, y = (jnp.asarray(x) for x in np.load(inputs).values())
        self.args = h.astype(dtype), w.astype(dtype), y.astype(jnp.int32)
        loss = self.build(h.shape[0], w.shape[1], slices)
        lowered = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*self.args)
        self.program = lowered.compile()
        jax.block_until_ready(self.program(*self.args))
        analysis = self.program.memory_analysis()
        assert analysis is not None
        return {"temporaries": analysis.temp_size_in_bytes, "hlo": self.program.as_text()}

    def step(self) -> dict:
        began = time.perf_counter()
        self.out = jax.block_until_ready(self.program(*self.args))
        return {"seconds": time.perf_counter() - began}

    def results(self, to: str, every: int) -> dict:
        loss, (dh, dw) = self.out
        loss, dh, dw = (np.asarray(x, np.float64) for x in (loss, dh, dw[:, ::every]))
        np.savez(to, loss=loss, dh=dh, dw=dw)
        return {}

    def oracle(self, inputs: str, to: str, every: int) -> dict:
        """What is right, as `results` writes it."""
        true = importlib.import_module("oracle").oracle(jnp, *(jnp.asarray(x) for x in np.load(inputs).values()))
        np.savez(to, loss=true["loss"], dh=true["dh"], dw=true["dw"][:, ::every])
        return {"device": jax.devices()[0].device_kind}

    def loss(self, name: str, inputs: str, to: str) -> dict:
        """One of `losses`: its value, and gradients at a cotangent of 3. Sliced: in less than 3/4 of the memory."""
        losses = importlib.import_module("losses")
        given = np.load(inputs)
        batch = {k: jnp.asarray(v) for k, v in given.items() if k not in ("h", "w")}
        h, w = jnp.asarray(given["h"]), jnp.asarray(given["w"])
        fn = losses.LOSSES[name]

        def of_logits(h: Array, w: Array, batch: dict[str, Array]) -> Array:
            return fn(NAMESPACE, h @ w, batch)

        def compiled(run: Any) -> Any:
            of_weights = lambda h, w, batch: 3 * run(h, w, batch)
            return jax.jit(jax.value_and_grad(of_weights, (0, 1))).lower(h, w, batch).compile()

        program, sliced = compiled(of_logits), False
        if self.name == "tiled":
            whole = program.memory_analysis().temp_size_in_bytes
            program = compiled(importlib.import_module("transforms").tile(of_logits, (0, None, 0), 4))
            sliced = program.memory_analysis().temp_size_in_bytes < 3 * whole / 4
        value, (dh, dw) = program(h, w, batch)
        np.savez(to, loss=value / 3, dh=dh, dw=dw)
        return {"sliced": sliced}
