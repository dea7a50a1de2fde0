"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): Llama with four multipliers
(https://arxiv.org/abs/2203.03466); and Granite 4 (https://github.com/ibm-granite/granite-4.0-language-models), of whose
layers most may have a state space in place of attention, and which may be a mixture of experts. Free of JAX."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from zoo.config import Rope, not_positive
from zoo.dialect import ACTIVATION, BIAS, TIED, Dialect, eps, sizes
from zoo.families.llamas.llama import Activated
from zoo.families.mamba import KEYS, MambaLike, read_states, refuse_states, write_states
from zoo.families.mixture import BALANCE, MixtureLike
from zoo.parameters import ATTENTION, LAYER, MLP, MLP_BIASES, MLP_NORM, Row, stacked

_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_NUMBERS = eps(1e-6) | {name: (name, 1.0) for name in _MULTIPLIERS}


@dataclass(frozen=True, kw_only=True)
class GraniteLike(Activated):
    """What Granite 3 and 4 share.

    Attributes:
        attention_bias: biases after the four projections of attention.
        embedding_multiplier: multiplies the embedding's rows where they are looked up.
        attention_multiplier: multiplies attention's scores, in place of one over the root of the head's size.
        residual_multiplier: multiplies what attention and MLP put out, before it is added.
        logits_scaling: divides the logits.
    """

    norm_eps: float = 1e-6
    attention_bias: bool = False
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


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(GraniteLike):
    """Granite 3, its dense models.

    Attributes:
        mlp_bias: biases after the projections of the MLP.
    """

    dialects: ClassVar = {
        "granite": Dialect(
            architecture="GraniteForCausalLM",
            sizes=sizes(2048),
            numbers=_NUMBERS,
            flags=TIED | BIAS | {"mlp_bias": ("mlp_bias", False)},
            choices=ACTIVATION,
            written={"pad_token_id": None},
        )
    }

    mlp_bias: bool = False

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends(self.attention_rows() + MLP + (MLP_BIASES if self.mlp_bias else ()))


_INTO = LAYER + "shared_mlp.input_linear.weight"
_MLP = (
    Row("layers.gate", _INTO, "F D -> D F", "D", fused="FF", part=0),
    Row("layers.up", _INTO, "F D -> D F", "D", fused="FF", part=1),
    Row("layers.down", LAYER + "shared_mlp.output_linear.weight", "D F -> F D", "F"),
)
_SHARED = (
    Row("layers.shared_gate", _INTO, "U D -> D U", "D", fused="UU", part=0),
    Row("layers.shared_up", _INTO, "U D -> D U", "D", fused="UU", part=1),
    Row("layers.shared_down", LAYER + "shared_mlp.output_linear.weight", "D U -> U D", "U"),
)
_EXPERTS_INTO = LAYER + "block_sparse_moe.input_linear.weight"
_EXPERTS = (
    Row("layers.router", LAYER + "block_sparse_moe.router.layer.weight", "E D -> D E", "D"),
    Row("layers.gate", _EXPERTS_INTO, "E F D -> E D F", "D", fused="FF", part=0),
    Row("layers.up", _EXPERTS_INTO, "E F D -> E D F", "D", fused="FF", part=1),
    Row("layers.down", LAYER + "block_sparse_moe.output_linear.weight", "E D F -> E F D", "F"),
)
_CHOICE = {
    "intermediate_size": ("mlp_dim", 11008),
    "num_local_experts": ("num_experts", 8),
    "num_experts_per_tok": ("experts_per_token", 2),
}
_MIXTURE: dict[str, Any] = {
    "numbers": _NUMBERS | BALANCE,
    "flags": TIED | BIAS,
    "choices": ACTIVATION,
    "written": {"pad_token_id": None},
}


@dataclass(frozen=True, kw_only=True)
class GraniteMoeConfig(MixtureLike, GraniteLike):
    """Granite 3, its mixtures of experts.

    Attributes:
        mlp_dim: hidden width of one expert.
        shared_mlp_dim: hidden width of the MLP that all tokens meet; 0 is none.
    """

    dialects: ClassVar = {
        "granitemoe": Dialect(
            architecture="GraniteMoeForCausalLM", sizes=sizes(2048) | _CHOICE, fixed={"shared_mlp_dim": 0}, **_MIXTURE
        ),
        "granitemoeshared": Dialect(
            architecture="GraniteMoeSharedForCausalLM",
            sizes=sizes(2048, shared_intermediate_size=("shared_mlp_dim", 0)) | _CHOICE,
            **_MIXTURE,
        ),
    }

    num_experts: int = 32
    experts_per_token: int = 8
    shared_mlp_dim: int = 0

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        wrong = [f"shared_mlp_dim={self.shared_mlp_dim} must be zero or more"] * (self.shared_mlp_dim < 0)
        return super().problems() + self.router_problems() + wrong

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return super().dims | {"U": self.shared_mlp_dim}

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends(self.attention_rows() + _EXPERTS + (_SHARED if self.shared_mlp_dim else ()))


_IGNORED = ("mamba_chunk_size", "time_step_min", "time_step_max", "time_step_floor")
_IGNORED += ("init_method", "normalization_function")
_DENSE = {key: size for key, size in sizes(2048).items() if key != "intermediate_size"}  # which is that of experts


def _read(read: Any, num_layers: int) -> dict[str, Any]:
    """Return whether positions turn, and what layers are."""
    kind = read.raw.get("position_embedding_type")
    if kind not in ("rope", "nope", None):
        read.problems.append(f"`position_embedding_type`={kind!r} is not supported, only 'rope', 'nope' or null")
    return {"rotated": kind == "rope", **read_states(read, num_layers)}


def _write(config: Any) -> dict[str, Any]:
    return {"position_embedding_type": "rope" if config.rotated else "nope", **write_states(config)}


_READ: dict[str, Any] = {
    "choices": ACTIVATION,
    "only": {"mamba_proj_bias": (False,)},
    "harmless": {"time_step_limit": ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])},
    "keys": (*KEYS, "position_embedding_type"),
    "refuse": refuse_states,
    "read": _read,
    "write": _write,
    "written": {"pad_token_id": None},
}


@dataclass(frozen=True, kw_only=True)
class Granite4Config(MambaLike, GraniteLike):
    """Granite 4, the models without experts.

    Attributes:
        rotated: queries and keys turn by their positions.
    """

    model: ClassVar[str] = "zoo.models.hybrids.mamba.Granite4"
    mlp: ClassVar[tuple[Row, ...]] = _MLP
    dialects: ClassVar = {
        "granitemoehybrid": Dialect(
            architecture="GraniteMoeHybridForCausalLM",
            sizes=_DENSE | {"shared_intermediate_size": ("mlp_dim", 1024)},
            numbers=_NUMBERS,
            flags=TIED | BIAS,
            where={"num_local_experts": (0,)},
            ignored=(*_IGNORED, "intermediate_size", "num_experts_per_tok", *BALANCE),  # of experts
            **_READ,
        )
    }

    rotated: bool = True

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + self.pattern_problems()

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """How each layer's positions turn; None where they do not."""
        return super().layer_ropes if self.rotated else (None,) * self.num_layers

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        tables = {
            "layers": (*self.attention_rows(), *self.mlp),
            "mamba": (ATTENTION[0], MLP_NORM, *self.mamba_rows(), *self.mlp),
        }
        return self.with_ends(stacked(tables, self.layer_stacks))


@dataclass(frozen=True, kw_only=True)
class Granite4MoeConfig(MixtureLike, Granite4Config):
    """Granite 4, the mixtures of experts.

    Attributes:
        mlp_dim: hidden width of one expert.
        shared_mlp_dim: hidden width of the MLP that all tokens meet.
    """

    model: ClassVar[str] = "zoo.models.hybrids.mamba.Granite4Moe"
    mlp: ClassVar = (*_EXPERTS, *_SHARED)
    layer_stacks = Granite4Config.layer_stacks
    dialects: ClassVar = {
        "granitemoehybrid": Dialect(
            architecture="GraniteMoeHybridForCausalLM",
            sizes=_DENSE | {"shared_intermediate_size": ("shared_mlp_dim", 1024)} | _CHOICE,
            numbers=_NUMBERS | BALANCE,
            flags=TIED | BIAS,
            ignored=_IGNORED,
            **_READ,
        )
    }

    num_experts: int = 64
    experts_per_token: int = 6
    shared_mlp_dim: int = 1024

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + self.router_problems() + not_positive(self, ("shared_mlp_dim",))

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return super().dims | {"U": self.shared_mlp_dim}
