"""Embeddings of texts: folders of sentence-transformers (https://sbert.net), whose `modules.json` says what is made of
a model's hidden states: pooled, multiplied, normalised.

Dimensions: `B` batch `S` sequence `D` embed `I` inputs `O` outputs of a matrix.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer
from safetensors.numpy import load_file

from zoo.huggingface.folder import read_json, refusal
from zoo.huggingface.weights import load
from zoo.models.layers import accumulator

POOLINGS = ("mean", "lasttoken", "cls")
_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_cls_token": "cls",
}
_ACTIVATIONS: dict[str, Callable] = {"Identity": lambda x: x, "Tanh": jnp.tanh, "ReLU": jax.nn.relu}


class Dense(eqx.Module):
    """`activation(x W + b)`, of a whole text."""

    weight: Float[Array, "O I"]
    bias: Float[Array, " O"] | None
    activation: str = eqx.field(static=True)

    def __call__(self, x: Float[Array, "B I"]) -> Float[Array, "B O"]:
        """Return the product."""
        out = x @ self.weight.astype(x.dtype).T
        return _ACTIVATIONS[self.activation](out if self.bias is None else out + self.bias.astype(x.dtype))


class Embedder(eqx.Module):
    """What makes one vector of a text.

    Attributes:
        model: what reads it; its head is not used.
        pooling: `mean` of its tokens' hidden states, that of its `lasttoken`, or of the first, `cls`.
        dense: what the vector is multiplied by.
        normalise: its length becomes 1.
    """

    model: Any
    pooling: str = eqx.field(static=True)
    dense: tuple[Dense, ...] = ()
    normalise: bool = eqx.field(static=True, default=True)

    @classmethod
    def load(cls, path: str | os.PathLike, **how: Any) -> "Embedder":
        """Return the embedder in a folder: a model as `zoo.load` reads it, and `modules.json`.

        Args:
            path: the folder.
            how: as `zoo.load` is told.

        Raises:
            ValueError: as `zoo.load` does, or a module or its settings are not known.
        """
        folder = Path(path)
        found: dict[str, Any] = {"pooling": None, "dense": (), "normalise": False}
        if not (folder / "modules.json").is_file():
            raise refusal(folder, "it has no modules.json, which says how hidden states are pooled. Use zoo.load.")
        modules = read_modules(folder)
        for module, inside in modules:
            if module == "Pooling":
                found["pooling"] = _pooling(folder, read_json(inside, "config.json"))
            elif module == "Dense":
                found["dense"] += (_dense(folder, inside),)
            elif module == "Normalize":
                found["normalise"] = True
            elif module != "Transformer":
                known = "Transformer, Pooling, Dense and Normalize"
                raise refusal(folder, f"modules.json names {module!r}, and only {known} are known.")
        if found["pooling"] is None or [module for module, _ in modules][:2] != ["Transformer", "Pooling"]:
            raise refusal(folder, "modules.json must begin with a Transformer and a Pooling.")
        of_model = next(inside for module, inside in modules if module == "Transformer")
        return cls(load(of_model, **how), **found)

    def __call__(
        self, tokens: Integer[Array, "B S"], lengths: Integer[Array, " B"], *, dtype: DTypeLike | None = None
    ) -> Float[Array, "B D"]:
        """Return the vectors of texts, in float32; what stands behind a text's end is not read.

        Args:
            tokens: ids, each text at the beginning of its row.
            lengths: how many tokens each text has, at least one.
            dtype: what the model computes in; None is its parameters' own.
        """
        inside = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
        hidden = self.model.hidden(tokens, dtype=dtype, segments=inside.astype(jnp.int32))
        wide = hidden.astype(accumulator(hidden.dtype))
        if self.pooling == "mean":
            vectors = jnp.where(inside[..., None], wide, 0).sum(1) / lengths[:, None]
        else:
            last = jnp.zeros_like(lengths) if self.pooling == "cls" else lengths - 1
            vectors = jnp.take_along_axis(wide, last[:, None, None], axis=1)[:, 0]
        for dense in self.dense:
            vectors = dense(vectors)
        if not self.normalise:
            return vectors
        return vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)

    def embed(self, texts: Sequence[Sequence[int]], *, dtype: DTypeLike | None = None) -> Float[Array, "B D"]:
        """Return the vectors of texts of ids, of any lengths.

        Raises:
            ValueError: a text is empty.
        """
        lengths = np.array([len(text) for text in texts])
        if not lengths.size or not lengths.min():
            raise ValueError("cannot embed a text without tokens. Leave it out.")
        tokens = np.zeros((len(texts), lengths.max()), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        return self(jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32), dtype=dtype)


def read_modules(folder: Path) -> list[tuple[str, Path]]:
    """Return the class and the folder of each module, in order."""
    try:
        listed = json.loads((folder / "modules.json").read_text("utf-8"))
        return [(one["type"].rpartition(".")[2], folder / one["path"]) for one in listed]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise refusal(folder, f"modules.json is no list of modules: {error!r}.") from None


def _pooling(folder: Path, settings: dict[str, Any]) -> str:
    named = settings.get("pooling_mode")
    chosen = [named] if isinstance(named, str) else [key for key, on in settings.items() if key in _MODES and on]
    others = [key for key, on in settings.items() if key.startswith("pooling_mode_") and key not in _MODES and on]
    known = [_MODES.get(one, one) for one in chosen + others]
    if len(known) != 1 or known[0] not in POOLINGS:
        said = " and ".join(map(str, known)) or "none"
        raise refusal(folder, f"its pooling is {said}, and only one of {', '.join(POOLINGS)} is known.")
    if settings.get("include_prompt", True) is not True:
        raise refusal(folder, "its pooling leaves prompts out (include_prompt=false), which is not supported.")
    return known[0]


def _dense(folder: Path, inside: Path) -> Dense:
    settings = read_json(inside, "config.json")
    activation = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise refusal(folder, f"{inside.name}'s activation_function is {activation}, and only {known} are known.")
    held = load_file(inside / "model.safetensors")
    bias = jnp.asarray(held["linear.bias"]) if settings.get("bias", True) else None
    return Dense(jnp.asarray(held["linear.weight"]), bias, activation)
