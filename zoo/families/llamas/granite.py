"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): Llama with four multipliers
(https://arxiv.org/abs/2203.03466); and of Granite 4 the dense models, whose gate and up are one tensor. Free of JAX."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zoo.config import Rope, not_positive
from zoo.dialect import ACTIVATION, BIAS, TIED, Dialect, eps, sizes
from zoo.families.llamas.llama import LlamaConfig
from zoo.parameters import LAYER, MLP, Row

_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    """Granite 3, its dense models.

    Attributes:
        embedding_multiplier: multiplies the embedding's rows where they are looked up.
        attention_multiplier: multiplies attention's scores, in place of one over the root of the head's size.
        residual_multiplier: multiplies what attention and MLP put out, before it is added.
        logits_scaling: divides the logits.
    """

    dialects: ClassVar = {
        "granite": Dialect(
            architecture="GraniteForCausalLM",
            sizes=sizes(2048),
            numbers=eps(1e-6) | {name: (name, 1.0) for name in _MULTIPLIERS},
            flags=TIED | BIAS | {"mlp_bias": ("mlp_bias", False)},
            choices=ACTIVATION,
            written={"pad_token_id": None},
        )
    }

    norm_eps: float = 1e-6
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + not_positive(self, _MULTIPLIERS)

    @property
    def query_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.attention_multiplier * (self.rope_temperature or 1.0) ** 2

    @property
    def embed_scale(self) -> float | None:
        """What the rows of the table are multiplied by where they are looked up."""
        return None if self.embedding_multiplier == 1 else self.embedding_multiplier

    @property
    def residual_scale(self) -> float:
        """What attention and MLP put out is multiplied by before it is added."""
        return self.residual_multiplier

    @property
    def logit_scale(self) -> float | None:
        """What logits are multiplied by."""
        return None if self.logits_scaling == 1 else 1 / self.logits_scaling


_SIZES = sizes(2048, shared_intermediate_size=("mlp_dim", 1024))
del _SIZES["intermediate_size"]  # of experts


def _read(read: Any, num_layers: int) -> dict[str, Any]:
    """Return whether positions turn; what else layers may be than attention is not here."""
    listed = read.raw.get("layer_types", read.raw.get("layers_block_type"))
    known = {"attention", "full_attention"}
    if not isinstance(listed, list) or len(listed) != num_layers or not set(map(str, listed)) <= known:
        read.problems.append(f"`layer_types`={listed!r} is not supported, only {num_layers} times 'attention'")
    if "num_local_experts" not in read.raw:
        read.problems.append("`num_local_experts` is missing, which stands for 8, and is not supported, only 0")
    kind = read.raw.get("position_embedding_type")
    if kind not in ("rope", "nope", None):
        read.problems.append(f"`position_embedding_type`={kind!r} is not supported, only 'rope', 'nope' or null")
    return {"rotated": kind == "rope"}


def _write(config: Any) -> dict[str, Any]:
    types = ["attention"] * config.num_layers
    return {"layer_types": types, "position_embedding_type": "rope" if config.rotated else "nope"}


@dataclass(frozen=True, kw_only=True)
class Granite4Config(GraniteConfig):
    """Granite 4, its dense models: those with neither experts nor state spaces.

    Attributes:
        rotated: queries and keys turn by their positions.
    """

    dialects: ClassVar = {
        "granitemoehybrid": Dialect(
            architecture="GraniteMoeHybridForCausalLM",
            sizes=_SIZES,
            numbers=eps(1e-6) | {name: (name, 1.0) for name in _MULTIPLIERS},
            flags=TIED | BIAS,
            choices=ACTIVATION,
            only={"num_local_experts": (0,)},
            keys=("layer_types", "layers_block_type", "position_embedding_type"),
            # Of experts and of state spaces, of which there are none.
            ignored=(
                *("intermediate_size", "num_experts_per_tok", "router_aux_loss_coef", "init_method"),
                *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand"),
                *("mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "time_step_min"),
                *("time_step_max", "time_step_floor", "normalization_function"),
            ),
            read=_read,
            write=_write,
            # transformers compares the sizes of state spaces with the width, of which there are none.
            written={"pad_token_id": None, "mamba_n_heads": 1, "mamba_expand": 1},
        )
    }

    rotated: bool = True

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """How each layer's positions turn; None where they do not."""
        return super().layer_ropes if self.rotated else (None,) * self.num_layers

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        gate, up, down = MLP
        tensor = LAYER + "shared_mlp.input_linear.weight"
        fused = (replace(row, tensor=tensor, fused="FF", part=part) for part, row in enumerate((gate, up)))
        down = replace(down, tensor=LAYER + "shared_mlp.output_linear.weight")
        return self.with_ends((*self.attention_rows(), *fused, down))
