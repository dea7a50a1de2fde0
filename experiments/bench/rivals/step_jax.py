"""What takes training steps of a small Llama and decodes with it, in an environment with JAX."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Array = jax.Array
ADAMW: dict[str, Any] = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
WORDS = {"b1": "0.9", "b2": "0.95", "eps": "1e-8", "weight_decay": "0.0", "learning_rate": "1e-3"}  # as run.py's


def run(folder: str, ids: np.ndarray, dtype: str, tiling: str) -> tuple[Any, Any]:
    """run.py's own step: the executable, and a function of it that takes a step and returns the loss."""
    schema = importlib.import_module("experiments.commandline.schema")
    resolve = importlib.import_module("experiments.planning.resolve").resolve
    device = importlib.import_module("experiments.runtime.hardware").Device("cpu", "this one", 2**36)
    words = [f"model.weights={folder}", f"batch_size={ids.shape[0]}", f"seq_len={ids.shape[1]}", "steps=1000"]
    words += ["optimizer=adamw", "optimizer.schedule=constant", "optimizer.warmup=0.0", "remat=none", tiling]
    words += [f"hardware.compute_dtype={dtype}", *(f"optimizer.{name}={value}" for name, value in WORDS.items())]
    programs = importlib.import_module("experiments.step.build").Programs(
        resolve(schema.compose(words)[0], device, words)
    )
    state = programs.init_state(programs.init())
    mask = np.ones(ids.shape, np.float32)
    mask[:, -1] = 0
    batch = tuple(map(jnp.asarray, (ids, np.roll(ids, -1, 1), mask)))
    compiled = programs.train

    def step() -> float:
        nonlocal state
        state, metrics = compiled(batch, state)
        return float(metrics["loss"])

    return compiled.compiled, step


run_untiled = partial(run, tiling="tiling.n=none")
run_tiled = partial(run, tiling="tiling.n=8")


def by_hand(folder: str, ids: np.ndarray, dtype: str) -> tuple[Any, Any]:
    """What one writes with JAX and optax alone: a scan over layers of a dict of arrays."""
    config, params = _read(folder)
    return _trained(params, lambda params, ids: _loss(config, params, ids, dtype), ids)


def _trained(params: Any, loss: Callable[[Any, Array], Array], ids: np.ndarray) -> tuple[Any, Any]:
    """A step of AdamW as one writes it: the executable, and a function of it that takes a step and returns the loss."""
    optimizer, batch = optax.adamw(**ADAMW), jnp.asarray(ids)
    state = params, optimizer.init(params)

    @partial(jax.jit, donate_argnums=0)
    def train(state: Any, batch: Array) -> tuple[Any, Array]:
        value, gradients = jax.value_and_grad(loss)(state[0], batch)
        updates, moments = optimizer.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    compiled = train.lower(state, batch).compile()

    def step() -> float:
        nonlocal state
        state, value = compiled(state, batch)
        return float(value)

    return compiled, step


def _read(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A Hugging Face folder's config, and its weights: matrices [in, out], those of all layers stacked."""
    from safetensors.numpy import load_file

    config = json.loads((Path(folder) / "config.json").read_text())
    found = {name: x for file in Path(folder).glob("*.safetensors") for name, x in load_file(file).items()}
    turned = lambda x: jnp.asarray(x.T if x.ndim == 2 else x)
    names = {name.split(".", 3)[3] for name in found if ".layers." in name}
    every = range(config["num_hidden_layers"])
    layers = {name: jnp.stack([turned(found[f"model.layers.{i}.{name}"]) for i in every]) for name in names}
    beside = {"embed": jnp.asarray(found["model.embed_tokens.weight"]), "norm": jnp.asarray(found["model.norm.weight"])}
    return config, {**beside, "head": turned(found["lm_head.weight"]), "layers": layers}


def _loss(config: dict[str, Any], params: dict[str, Any], ids: Array, dtype: str) -> Array:
    """Mean cross-entropy of the next tokens."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size, eps = config["head_dim"], config["rms_norm_eps"]
    (rows, length), cast = ids.shape, lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    angles = jnp.arange(length)[:, None] * theta ** (-jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    causal = jnp.tril(jnp.ones((length, length), bool))

    def norm(x: Array, weight: Array) -> Array:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + eps)).astype(x.dtype) * weight

    def rope(x: Array) -> Array:
        left, right = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(x.dtype)

    def layer(x: Array, w: dict[str, Array]) -> tuple[Array, None]:
        w = cast(w)
        h = norm(x, w["input_layernorm.weight"])
        project = lambda name, n: (h @ w[f"self_attn.{name}_proj.weight"]).reshape(rows, length, n, size)
        q, k, v = rope(project("q", heads)), rope(project("k", groups)), project("v", groups)
        q = q.reshape(rows, length, groups, heads // groups, size)
        scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k, preferred_element_type=jnp.float32) / size**0.5
        shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).astype(x.dtype)
        mixed = jnp.einsum("bkgqs,bskh->bqkgh", shares, v).reshape(rows, length, heads * size)
        x = x + mixed @ w["self_attn.o_proj.weight"]
        h = norm(x, w["post_attention_layernorm.weight"])
        gate, up = h @ w["mlp.gate_proj.weight"], h @ w["mlp.up_proj.weight"]
        return x + (jax.nn.silu(gate) * up) @ w["mlp.down_proj.weight"], None

    x, _ = jax.lax.scan(layer, params["embed"][ids].astype(dtype), params["layers"])
    x = norm(x, params["norm"].astype(dtype))[:, :-1]
    logits = jnp.dot(x, params["head"].astype(dtype), preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def levanter(folder: str, ids: np.ndarray, dtype: str) -> tuple[Any, Any]:
    """Its Llama and loss, with the gradients and the update in one program."""
    hax, eqx = importlib.import_module("haliax"), importlib.import_module("equinox")
    llama, lm = (importlib.import_module(f"levanter.models.{name}") for name in ("llama", "lm_model"))
    told = json.loads((Path(folder) / "config.json").read_text())
    rope = importlib.import_module("levanter.layers.rotary").DefaultRotaryEmbeddingsConfig
    config = llama.LlamaConfig(
        seq_len=ids.shape[1], hidden_dim=told["hidden_size"], intermediate_dim=told["intermediate_size"],
        num_layers=told["num_hidden_layers"], num_heads=told["num_attention_heads"], head_dim=told["head_dim"],
        num_kv_heads=told["num_key_value_heads"], layer_norm_epsilon=told["rms_norm_eps"], gradient_checkpointing=False,
        rope=rope(theta=told.get("rope_theta") or told["rope_parameters"]["rope_theta"]),
    )  # fmt: skip
    from safetensors.numpy import load_file

    weights = {
        name: jnp.asarray(x) for file in Path(folder).glob("*.safetensors") for name, x in load_file(file).items()
    }
    made = llama.LlamaLMHeadModel.init(hax.Axis("vocab", told["vocab_size"]), config, key=jax.random.key(0))
    model = importlib.import_module("haliax.state_dict").from_torch_compatible_state_dict(made, weights)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    row, position = hax.Axis("batch", ids.shape[0]), hax.Axis("position", ids.shape[1])

    def loss(params: Any, ids: Array) -> Array:
        cast = jax.tree.map(lambda x: x.astype(dtype), params)
        tokens = hax.named(ids, (row, position))
        weights = hax.named(jnp.arange(ids.shape[1]) < ids.shape[1] - 1, position).broadcast_axis(row)
        mask = importlib.import_module("levanter.layers.attention").AttentionMask.causal()
        example = lm.LmExample(tokens=tokens, loss_mask=weights, attn_mask=mask)
        # Its own mean asks for a mask of floats, which this JAX refuses.
        each = lm.compute_next_token_loss(eqx.combine(cast, static), example, reduction=None)
        return each.array[:, :-1].mean()

    return _trained(params, loss, ids)


class Runner:
    """Answers a worker's commands."""

    def __init__(self, build: str):
        self.build = globals()[build]

    def load(self, folder: str, ids: str, dtype: str) -> dict:
        self.program, self.one = self.build(folder, np.load(ids), dtype)
        return {"temporaries": self.program.memory_analysis().temp_size_in_bytes, "hlo": self.program.as_text()}

    def step(self) -> dict:
        began = time.perf_counter()
        loss = self.one()
        return {"seconds": time.perf_counter() - began, "loss": loss}

    def decode(self, folder: str, ids: str, dtype: str, tokens: int) -> dict:
        """Greedy text after each row of ids by the zoo: what it is, and the seconds of a second time."""
        if getattr(self, "model", None) is None:
            self.model = importlib.import_module("zoo").load(folder, dtype=dtype)
        generate = importlib.import_module("zoo.inference.generate").generate
        prompts = np.load(ids).tolist()
        began = time.perf_counter()
        text = generate(self.model, prompts, tokens)
        return {"seconds": time.perf_counter() - began, "ids": [list(map(int, row)) for row in text]}
