"""GPT-2 (https://cdn.openai.com/better-language-models/language_models.pdf), and what the families with LayerNorm and
biases share. Free of JAX."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zoo.config import Config, Rope
from zoo.dialect import ACTIVATIONS, Dialect, activation_problems
from zoo.parameters import Row

HEADS_FUSED = "NKK"  # queries, keys and values in one tensor, one after the other


@dataclass(frozen=True, kw_only=True)
class GPTLike(Config):
    """What the families with LayerNorm share.

    Attributes:
        norm_eps: added to the variance in every norm.
        context_length: tokens of the longest text; of families that learn positions, how many they have learned.
        tied: the embedding table is also the head.
        activation: of the MLP: `silu`, `gelu`, `gelu_tanh`, `relu` or `relu_squared`.
    """

    model: ClassVar[str] = "zoo.models.gpt.GPT"

    norm_eps: float = 1e-5
    tied: bool = True
    activation: str = "gelu"

    @property
    def parallel(self) -> bool:
        """Whether the MLP reads what attention read, and not what attention made of it."""
        return False

    @property
    def centred_norms(self) -> bool:
        """Whether norms take the mean away, those of queries and keys each head's own."""
        return True

    @property
    def position_offset(self) -> int:
        """The row of the learned positions that is the first token's."""
        return 0

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return super().dims | {"M": self.context_length + self.position_offset}

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        problems = activation_problems(self.activation)
        if self.num_heads * self.head_dim != self.embed_dim or self.num_kv_heads != self.num_heads:
            problems.append(
                f"num_heads={self.num_heads} of head_dim={self.head_dim} and num_kv_heads={self.num_kv_heads} must be "
                f"as many, and together embed_dim={self.embed_dim}"
            )
        return problems

    def started(self, table: tuple[Row, ...]) -> tuple[Row, ...]:
        """Return rows with the weights of norms where they multiply by one."""
        return tuple(replace(row, start=1.0 - self.norm_offset) if row.leaf.endswith("norm") else row for row in table)


def whole_heads(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that these files leave out: all heads have keys of their own, and share the width."""
    heads = fields["num_heads"]
    return {"num_kv_heads": heads, "head_dim": fields["embed_dim"] // heads if heads > 0 else 0}


_LAYER = "transformer.h.{}."


def _layer(
    leaf: str, name: str, matrix: str, bias: str, fan_in: str, fused: str = "", part: int = 0
) -> tuple[Row, Row]:
    """Return the rows of a projection and of its bias."""
    weight = Row(f"layers.{leaf}", f"{_LAYER}{name}.weight", matrix, fan_in, fused=fused, part=part)
    return weight, Row(f"layers.{leaf}_bias", f"{_LAYER}{name}.bias", bias, fused=fused, part=part)


_ROWS = (
    Row("embed", "transformer.wte.weight", "V D -> V D", "D", gain=0.3),
    Row("positions", "transformer.wpe.weight", "M D -> M D", "D", gain=0.1),
    Row("final_norm", "transformer.ln_f.weight", "D -> D"),
    Row("final_norm_bias", "transformer.ln_f.bias", "D -> D"),
    Row("layers.attn_norm", _LAYER + "ln_1.weight", "D -> D"),
    Row("layers.attn_norm_bias", _LAYER + "ln_1.bias", "D -> D"),
    *_layer("q", "attn.c_attn", "D (N H) -> D N H", "(N H) -> N H", "D", HEADS_FUSED, 0),
    *_layer("k", "attn.c_attn", "D (K H) -> D K H", "(K H) -> K H", "D", HEADS_FUSED, 1),
    *_layer("v", "attn.c_attn", "D (K H) -> D K H", "(K H) -> K H", "D", HEADS_FUSED, 2),
    *_layer("o", "attn.c_proj", "(N H) D -> N H D", "D -> D", "NH"),
    Row("layers.mlp_norm", _LAYER + "ln_2.weight", "D -> D"),
    Row("layers.mlp_norm_bias", _LAYER + "ln_2.bias", "D -> D"),
    *_layer("up", "mlp.c_fc", "D F -> D F", "F -> F", "D"),
    *_layer("down", "mlp.c_proj", "F D -> F D", "D -> D", "F"),
)


@dataclass(frozen=True, kw_only=True)
class GPT2Config(GPTLike):
    """GPT-2: learned positions, and matrices that lie the other way round on disk."""

    prefix: ClassVar[str] = "transformer."
    unread: ClassVar[tuple[str, ...]] = (".attn.bias", ".attn.masked_bias")  # masks
    dialects: ClassVar = {
        "gpt2": Dialect(
            architecture="GPT2LMHeadModel",
            sizes={
                "vocab_size": ("vocab_size", 50_257),
                "n_layer": ("num_layers", 12),
                "n_embd": ("embed_dim", 768),
                "n_head": ("num_heads", 12),
                "n_inner": ("mlp_dim", lambda fields: 4 * fields["embed_dim"]),
                "n_positions": ("context_length", 1024),
            },
            derived=whole_heads,
            numbers={"layer_norm_epsilon": ("norm_eps", 1e-5)},
            flags={"tie_word_embeddings": ("tied", True)},
            choices={"activation_function": ("activation", {"gelu_new": "gelu_tanh", **ACTIVATIONS})},
            rope="absent",
            only={
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
            },
            ignored=(
                *("n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation"),
                *("summary_proj_to_labels", "summary_first_dropout", "n_special", "predict_special_tokens"),
            ),
        )
    }

    activation: str = "gelu_tanh"

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """How each layer's positions turn: they do not."""
        return (None,) * self.num_layers

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head turn by its position: none."""
        return 0

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        head = () if self.tied else (Row("head", "lm_head.weight", "V D -> V D", "D", gain=0.1),)
        return self.started((*_ROWS, *head))
