"""Llama 2 (https://arxiv.org/abs/2307.09288), Llama 3 (https://arxiv.org/abs/2407.21783), Mistral
(https://arxiv.org/abs/2310.06825), Qwen 2 (https://arxiv.org/abs/2407.10671), Qwen 3 (https://arxiv.org/abs/2505.09388).

Dimensions: `B` batch `S` sequence `D` embed `V` vocab `F` mlp hidden `N` query heads `K` kv heads `H` head size
`L` layers.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from transforms.remat import Cycle, scan_layers
from zoo.families import LlamaLike
from zoo.inference.cache import Past, remembering
from zoo.models import packing
from zoo.models.head import Head
from zoo.models.init import draw
from zoo.models.layers import Ops, check_tokens, linear, lookup, rms_norm, rope, scanned_windows
from zoo.models.rotary import frequencies

Frequency = Float[Array, " half"] | Float[np.ndarray, " half"]


class Block(eqx.Module):
    """Every layer's weights, stacked over a leading `L`; inside the scan, one layer's.

    Biases are Qwen 2's, norms of queries and keys Qwen 3's; a parameter that a family lacks is None.
    """

    attn_norm: Float[Array, "*L D"]
    q: Float[Array, "*L D N H"]
    k: Float[Array, "*L D K H"]
    v: Float[Array, "*L D K H"]
    o: Float[Array, "*L N H D"]
    mlp_norm: Float[Array, "*L D"]
    gate: Float[Array, "*L D F"]
    up: Float[Array, "*L D F"]
    down: Float[Array, "*L F D"]
    q_bias: Float[Array, "*L N H"] | None = None
    k_bias: Float[Array, "*L K H"] | None = None
    v_bias: Float[Array, "*L K H"] | None = None
    o_bias: Float[Array, "*L D"] | None = None
    q_norm: Float[Array, "*L H"] | None = None
    k_norm: Float[Array, "*L H"] | None = None

    def __call__(
        self,
        x: Float[Array, "B S D"],
        config: LlamaLike,
        *,
        frequency: Frequency,
        window: Int[Array, ""] | int | None = None,
        ops: Ops | None = None,
        positions: Integer[Array, "#B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""
        ops = Ops() if ops is None else ops
        q, k, v = project(self, x, config, frequency, positions)
        attended = ops.attention(q, k, v, scale=config.query_scale, cap=None, window=window)
        return self.finish(x, attended, config, ops)

    def finish(
        self, x: Float[Array, "B S D"], attended: Float[Array, "B S N H"], config: LlamaLike, ops: Ops
    ) -> Float[Array, "B S D"]:
        """Return the layer's output, given what its queries attended to."""
        cast = lambda weight: weight.astype(x.dtype)
        x = x + checkpoint_name(join(self, attended), "attn_out")
        h = rms_norm(x, self.mlp_norm, config.norm_eps, offset=0.0)
        h = ops.mlp(h, cast(self.gate), cast(self.up), cast(self.down), activation=jax.nn.silu)
        return x + checkpoint_name(h, "mlp_out")


def project(layer: Any, x, config: LlamaLike, frequency, positions=None):
    """Return a layer's queries, keys and values of `x`: biased, normalised and rotated as the family does.

    Args:
        layer: a block; its attention's parameters are read.
        x: the residual stream `[B, S, D]`.
        config: the model's.
        frequency: radians per position `[H/2]`.
        positions: of every token, `[B, S]`; None counts from 0.
    """
    h = rms_norm(x, layer.attn_norm, config.norm_eps, offset=0.0)
    q, k, v = (
        linear("bsd,dnh->bsnh", h, weight.astype(x.dtype)) + (0 if bias is None else bias.astype(x.dtype))
        for weight, bias in ((layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias))
    )
    if layer.q_norm is not None:
        q, k = (
            rms_norm(heads, weight, config.norm_eps, offset=0.0)
            for heads, weight in ((q, layer.q_norm), (k, layer.k_norm))
        )
    return rope(q, frequency, positions), rope(k, frequency, positions), v


def join(layer: Any, attended):
    """Return what attention adds to the residual stream, from what each head attended to `[B, S, N, H]`."""
    h = linear("bsnh,nhd->bsd", attended, layer.o.astype(attended.dtype))
    return h if layer.o_bias is None else h + layer.o_bias.astype(h.dtype)


class Llama(eqx.Module):
    """A Llama, Mistral or Qwen in two halves: `hidden(tokens)`, then `logits(hidden)`.

    Parameters keep the dtype that they were made with; a pass computes in the `dtype` asked for and casts one layer at
    a time. A tied head is the table itself, stored once, and `head` is None.
    """

    embed: Float[Array, "V D"]
    layers: Block
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | None
    config: LlamaLike = eqx.field(static=True)

    @classmethod
    def init(cls, config: LlamaLike, *, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> "Llama":
        """Return a model with random weights, normal with the standard deviations of `zoo.parameters`."""
        return cls.build(config, draw(config, key=key, dtype=dtype))

    @classmethod
    def build(cls, config: LlamaLike, leaves: dict) -> "Llama":
        """Return the model whose parameters are `leaves`, keyed by the dotted paths of `zoo.parameters`."""
        layers = {path.removeprefix("layers."): leaf for path, leaf in leaves.items() if path.startswith("layers.")}
        return cls(leaves["embed"], Block(**layers), leaves["final_norm"], leaves.get("head"), config)

    def hidden(
        self,
        tokens: Integer[Array, "B S"],
        *,
        dtype: DTypeLike | None = None,
        remat: Callable | Cycle | None = None,
        ops: Ops | None = None,
        segments: Integer[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Return what the head reads: the last layer's output, normalised.

        Args:
            tokens: ids in `[0, vocab_size)`. Traced ids are not checked: one outside makes its sequence NaN.
            dtype: what to compute in; None is the parameters' own.
            remat: what the backward pass keeps of each layer (`transforms.remat`), or any wrapper of its body. The
                names `attn_out` and `mlp_out` mark what a policy may keep.
            ops: how attention and MLP run; None runs them plainly.
            segments: the number of each token's document, where a row holds several (`zoo.models.packing`).

        Raises:
            ValueError: a concrete token id is outside the vocabulary.
        """
        return self.hidden_and_new(tokens, dtype=dtype, remat=remat, ops=ops, segments=segments)[0]

    def hidden_and_new(
        self,
        tokens: Integer[Array, "B S"],
        *,
        dtype: DTypeLike | None = None,
        remat: Callable | Cycle | None = None,
        ops: Ops | None = None,
        past: Past | None = None,
        segments: Integer[Array, "B S"] | None = None,
    ) -> tuple[Float[Array, "B S D"], Any]:
        """Return what the head reads, given what was read before; and the keys and values that each layer made."""
        check_tokens(tokens, self.config.vocab_size)
        seq = tokens.shape[1]
        length, positions, places = (seq, None, None) if past is None else (past.length, past.positions, past.places)
        if segments is not None:
            positions, ops = packing.places(segments), packing.within(ops, segments)
            length = positions.max() + 1
        x = lookup(self.embed, tokens, self.embed.dtype if dtype is None else jnp.dtype(dtype))
        frequency = frequencies(self.config.head_dim, self.config.rope_theta, self.config.rope_scaling, length)

        def body(x, scanned):
            layer, window, place = scanned
            how, new = remembering(ops, past, place)
            return layer(x, self.config, frequency=frequency, window=window, ops=how, positions=positions), new()

        x, new = scan_layers(body, x, (self.layers, scanned_windows(self.config.layer_windows, seq), places), remat)
        return rms_norm(x, self.final_norm, self.config.norm_eps, offset=0.0), new

    def logits(self, hidden: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
        """Return the logits in float32; the product's operands are in the dtype of `hidden`."""
        return self.output()(hidden)

    def output(self) -> Head:
        """Return what makes logits: a matrix of its own, or the table again."""
        return Head(self.embed if self.head is None else self.head)

    def __call__(self, tokens: Integer[Array, "B S"], *, dtype: DTypeLike | None = None) -> Float[Array, "B S V"]:
        """Return the logits of every position. Memory is O(B S V): to train, tile `logits` instead."""
        return self.logits(self.hidden(tokens, dtype=dtype))
