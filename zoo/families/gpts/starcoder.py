"""StarCoder 2 (https://arxiv.org/abs/2402.19173): LayerNorm, biases and an MLP without a gate around Llama's attention;
and what the families share whose tensors have Llama's names beside LayerNorm's biases. Free of JAX."""

from dataclasses import dataclass, replace
from typing import ClassVar

from zoo.config import RopeScaling, rotary_problems, scaling_problems, window_problems
from zoo.dialect import ACTIVATIONS, Dialect, activation_problems, sizes
from zoo.families.gpts.gpt import GPTLike
from zoo.parameters import ATTENTION, BIASES, ENDS, HEAD, LAYER, MLP_NORM, Row

_NORM_BIASES = (
    Row("final_norm_bias", "model.norm.bias", "D -> D"),
    Row("layers.attn_norm_bias", LAYER + "input_layernorm.bias", "D -> D"),
)
NORM_BEHIND = (MLP_NORM, Row("layers.mlp_norm_bias", LAYER + "post_attention_layernorm.bias", "D -> D"))
_MLP = (
    Row("layers.up", LAYER + "mlp.c_fc.weight", "F D -> D F", "D"),
    Row("layers.down", LAYER + "mlp.c_proj.weight", "D F -> F D", "F"),
)
_MLP_BIASES = (
    Row("layers.up_bias", LAYER + "mlp.c_fc.bias", "F -> F"),
    Row("layers.down_bias", LAYER + "mlp.c_proj.bias", "D -> D"),
)


@dataclass(frozen=True, kw_only=True)
class LlamaNamed(GPTLike):
    """What those share whose tensors have Llama's names, and whose norms are LayerNorm with biases.

    Attributes:
        rope_scaling: how the rotary frequencies are stretched to longer texts.
    """

    rope_scaling: RopeScaling | None = None

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        own = activation_problems(self.activation) + rotary_problems(self)
        return own + scaling_problems(self, self.rope_scaling)

    def named(self, *own: Row) -> tuple[Row, ...]:
        """Return the rows of every parameter, given those of layers that are not the same in all such families."""
        embed, norm = ENDS
        ends = (replace(embed, gain=0.3), norm) if self.tied else (replace(embed, gain=1.0), norm, HEAD)
        return self.started((*ends, *_NORM_BIASES, *ATTENTION, *own))


@dataclass(frozen=True, kw_only=True)
class StarCoder2Config(LlamaNamed):
    """StarCoder 2.

    Attributes:
        biases: biases after the projections of attention and MLP.
        window: how many keys a query sees, itself included; None is all.
    """

    dialects: ClassVar = {
        "starcoder2": Dialect(
            architecture="Starcoder2ForCausalLM",
            sizes=sizes(4096, 2),
            numbers={"norm_epsilon": ("norm_eps", 1e-5)},
            flags={"tie_word_embeddings": ("tied", True), "use_bias": ("biases", True)},
            choices={"hidden_act": ("activation", {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS})},
            windows="all",
            window=None,
            harmless={"mlp_type": ("default", None), "norm_type": ("layer_norm", None)},
            ignored=(
                *("residual_dropout", "embedding_dropout", "rms_norm_eps", "scale_attention_softmax_in_fp32"),
                *("attention_softmax_in_fp32", "scale_attn_weights", "activation_function", "layer_norm_epsilon"),
            ),
            written={"pad_token_id": None},
        )
    }

    activation: str = "gelu_tanh"
    biases: bool = True
    window: int | None = None

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + window_problems(self.window, self.attention_pattern)

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        biases = (*BIASES.values(), *_MLP_BIASES) if self.biases else ()
        return self.named(*NORM_BEHIND, *_MLP, *biases)
