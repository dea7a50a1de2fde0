"""GPT-NeoX (https://arxiv.org/abs/2204.06745) and Pythia (https://arxiv.org/abs/2304.01373). Free of JAX."""

from dataclasses import dataclass
from typing import ClassVar

from zoo.config import RopeScaling, rotary_problems, scaling_problems
from zoo.dialect import ACTIVATIONS, REQUIRED, Dialect
from zoo.families.gpts.gpt import GPTLike, whole_heads
from zoo.parameters import Row

_LAYER = "gpt_neox.layers.{}."
_NORMS = (
    Row("layers.attn_norm", _LAYER + "input_layernorm.weight", "D -> D"),
    Row("layers.attn_norm_bias", _LAYER + "input_layernorm.bias", "D -> D"),
    Row("layers.mlp_norm", _LAYER + "post_attention_layernorm.weight", "D -> D"),
    Row("layers.mlp_norm_bias", _LAYER + "post_attention_layernorm.bias", "D -> D"),
)
_QKV = _LAYER + "attention.query_key_value."  # of each head its queries, keys and values, one after the other
_HEADS = (
    Row("layers.q", _QKV + "weight", "(N H) D -> D N H", "D", fused="HHH", part=0),
    Row("layers.k", _QKV + "weight", "(K H) D -> D K H", "D", fused="HHH", part=1),
    Row("layers.v", _QKV + "weight", "(K H) D -> D K H", "D", fused="HHH", part=2),
    Row("layers.o", _LAYER + "attention.dense.weight", "D (N H) -> N H D", "NH"),
)
_BIASES = (
    Row("layers.q_bias", _QKV + "bias", "(N H) -> N H", fused="HHH", part=0),
    Row("layers.k_bias", _QKV + "bias", "(K H) -> K H", fused="HHH", part=1),
    Row("layers.v_bias", _QKV + "bias", "(K H) -> K H", fused="HHH", part=2),
    Row("layers.o_bias", _LAYER + "attention.dense.bias", "D -> D"),
)
_MLP = (
    Row("layers.up", _LAYER + "mlp.dense_h_to_4h.weight", "F D -> D F", "D"),
    Row("layers.up_bias", _LAYER + "mlp.dense_h_to_4h.bias", "F -> F"),
    Row("layers.down", _LAYER + "mlp.dense_4h_to_h.weight", "D F -> F D", "F"),
    Row("layers.down_bias", _LAYER + "mlp.dense_4h_to_h.bias", "D -> D"),
)
_ENDS = (
    Row("embed", "gpt_neox.embed_in.weight", "V D -> V D", "D"),
    Row("final_norm", "gpt_neox.final_layer_norm.weight", "D -> D"),
    Row("final_norm_bias", "gpt_neox.final_layer_norm.bias", "D -> D"),
)
_HEAD = Row("head", "embed_out.weight", "V D -> V D", "D", gain=0.1)


@dataclass(frozen=True, kw_only=True)
class NeoXConfig(GPTLike):
    """GPT-NeoX and Pythia: attention and MLP side by side, and a part of each head turns.

    Attributes:
        parallel_residual: the MLP reads what attention read, and not what attention made of it.
        attention_bias: biases after the four projections of attention.
        rotary_fraction: the share of each head that turns by its position.
        rope_scaling: how the rotary frequencies are stretched to longer texts.
    """

    prefix: ClassVar[str] = "gpt_neox."
    unread: ClassVar[tuple[str, ...]] = (".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq")
    dialects: ClassVar = {
        "gpt_neox": Dialect(
            architecture="GPTNeoXForCausalLM",
            sizes={
                "vocab_size": ("vocab_size", REQUIRED),
                "num_hidden_layers": ("num_layers", REQUIRED),
                "hidden_size": ("embed_dim", REQUIRED),
                "num_attention_heads": ("num_heads", REQUIRED),
                "intermediate_size": ("mlp_dim", REQUIRED),
                "max_position_embeddings": ("context_length", 2048),
            },
            derived=whole_heads,
            numbers={"layer_norm_eps": ("norm_eps", 1e-5)},
            flags={
                "tie_word_embeddings": ("tied", False),
                "use_parallel_residual": ("parallel_residual", True),
                "attention_bias": ("attention_bias", True),
            },
            choices={"hidden_act": ("activation", {"gelu": "gelu", **ACTIVATIONS})},
            theta_key="rotary_emb_base",
            partial=("rotary_pct", 0.25),
            harmless={"gpt_j_residual": (False, None)},
            ignored=("classifier_dropout", "type_vocab_size"),
        )
    }

    tied: bool = False
    parallel_residual: bool = True
    attention_bias: bool = True
    rotary_fraction: float = 0.25
    rope_scaling: RopeScaling | None = None

    @property
    def parallel(self) -> bool:
        """Whether the MLP reads what attention read, and not what attention made of it."""
        return self.parallel_residual

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + rotary_problems(self) + scaling_problems(self, self.rope_scaling)

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        biases, head = _BIASES if self.attention_bias else (), () if self.tied else (_HEAD,)
        return self.started((*_ENDS, *_NORMS, *_HEADS, *biases, *_MLP, *head))
