"""One row per parameter: its leaf in the model, its dimensions, and the Hugging Face tensor that holds it.

Everything that must agree about parameters reads these rows: initialisation, loading, saving, counting and sharding.
Free of JAX. Dimensions: `V` vocab `D` embed `F` mlp hidden `N` query heads `K` kv heads `H` head size `L` layers.
"""

import math
from dataclasses import dataclass

from zoo.configs import GemmaConfig


@dataclass(frozen=True)
class Row:
    """Where one parameter lives on both sides.

    Attributes:
        leaf: dotted path in the model; leaves under `layers.` are stacked over a leading `L`.
        tensor: the tensor's name on disk, with `{}` for the layer.
        pattern: its dimensions, `on disk -> in the model (one layer)`; `(N H)` is one dimension on disk.
        fan_in: letters whose product is the number of inputs that each output sums; empty for norms, which start at 0.
        gain: standard deviation at the start, times the square root of the fan-in.
    """

    leaf: str
    tensor: str
    pattern: str
    fan_in: str = ""
    gain: float = 1.0

    @property
    def stacked(self) -> bool:
        return "{}" in self.tensor

    @property
    def disk(self) -> tuple[str, ...]:
        """The dimensions on disk, each a string of letters: `("NH", "D")`."""
        groups, inside = [], False
        for token in self.pattern.split(" -> ")[0].replace("(", " ( ").replace(")", " ) ").split():
            if token in "()":
                inside = token == "("
                groups += [""] if inside else []
            elif inside:
                groups[-1] += token
            else:
                groups.append(token)
        return tuple(groups)

    @property
    def letters(self) -> tuple[str, ...]:
        """The leaf's dimensions in the model, the stacked one included: `("L", "D", "N", "H")`."""
        return (("L",) if self.stacked else ()) + tuple(self.pattern.split(" -> ")[1].split())

    def shape(self, dims: dict[str, int]) -> tuple[int, ...]:
        """The leaf's shape in the model."""
        return tuple(dims[letter] for letter in self.letters)

    def disk_shape(self, dims: dict[str, int]) -> tuple[int, ...]:
        """The shape of one tensor on disk."""
        return tuple(math.prod(dims[letter] for letter in group) for group in self.disk)

    def std(self, dims: dict[str, int]) -> float:
        """The standard deviation that the leaf starts with."""
        return self.gain / math.sqrt(math.prod(dims[letter] for letter in self.fan_in)) if self.fan_in else 0.0

    def names(self, dims: dict[str, int]) -> list[str]:
        """Every tensor that the leaf is made of, in layer order."""
        return [self.tensor.format(layer) for layer in range(dims["L"])] if self.stacked else [self.tensor]


_LAYER = "model.layers.{}."
_COMMON = (
    # The table is also the head: a small gain makes every first logit small, so that the first loss is ln V.
    Row("embed", "model.embed_tokens.weight", "V D -> V D", "D", gain=0.1),
    Row("layers.attn_norm", _LAYER + "input_layernorm.weight", "D -> D"),
    Row("layers.q", _LAYER + "self_attn.q_proj.weight", "(N H) D -> D N H", "D"),
    Row("layers.k", _LAYER + "self_attn.k_proj.weight", "(K H) D -> D K H", "D"),
    Row("layers.v", _LAYER + "self_attn.v_proj.weight", "(K H) D -> D K H", "D"),
    Row("layers.o", _LAYER + "self_attn.o_proj.weight", "D (N H) -> N H D", "NH"),
    Row("layers.gate", _LAYER + "mlp.gate_proj.weight", "F D -> D F", "D"),
    Row("layers.up", _LAYER + "mlp.up_proj.weight", "F D -> D F", "D"),
    Row("layers.down", _LAYER + "mlp.down_proj.weight", "D F -> F D", "F"),
    Row("final_norm", "model.norm.weight", "D -> D"),
)
# Hugging Face's `post_attention_layernorm` is the norm before the MLP in Gemma 1, the one after attention in Gemma 2.
GEMMA_1 = (*_COMMON, Row("layers.mlp_norm", _LAYER + "post_attention_layernorm.weight", "D -> D"))
GEMMA_2 = (
    *_COMMON,
    Row("layers.post_attn_norm", _LAYER + "post_attention_layernorm.weight", "D -> D"),
    Row("layers.mlp_norm", _LAYER + "pre_feedforward_layernorm.weight", "D -> D"),
    Row("layers.post_mlp_norm", _LAYER + "post_feedforward_layernorm.weight", "D -> D"),
)


def rows(config: GemmaConfig) -> tuple[Row, ...]:
    """Return the rows of every parameter that a model of this config has."""
    return GEMMA_2 if config.post_norms else GEMMA_1
