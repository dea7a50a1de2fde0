"""GLM 4 (https://arxiv.org/abs/2406.12793): Llama with biases, gate and up in one tensor, and neighbouring dimensions
of half of each head that turn together; those of 2025 have norms behind attention and MLP too. And GLM 4.5 to 4.7
(https://arxiv.org/abs/2508.06471) and dots.llm1, mixtures of experts. Free of JAX."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zoo.config import rotary_problems
from zoo.dialect import ACTIVATION, BIAS, REQUIRED, TIED, Dialect, eps, sizes
from zoo.families.llamas.llama import Activated
from zoo.families.mixture import SIGMOID, GroupedLike
from zoo.parameters import LAYER, MLP, Row

_BEHIND = (
    Row("layers.post_attn_norm", LAYER + "post_self_attn_layernorm.weight", "D -> D"),
    Row("layers.post_mlp_norm", LAYER + "post_mlp_layernorm.weight", "D -> D"),
)
_GATE, _UP, _DOWN = MLP
_FUSED = (
    replace(_GATE, tensor=LAYER + "mlp.gate_up_proj.weight", fused="FF", part=0),
    replace(_UP, tensor=LAYER + "mlp.gate_up_proj.weight", fused="FF", part=1),
    _DOWN,
)


_SPARSE: dict[str, tuple[str, Any]] = {
    "intermediate_size": ("dense_mlp_dim", 10_944),
    "moe_intermediate_size": ("mlp_dim", 1408),
    "n_routed_experts": ("num_experts", 128),
    "num_experts_per_tok": ("experts_per_token", 8),
    "n_shared_experts": ("shared_experts", 1),
    "first_k_dense_replace": ("first_dense", 1),
    "n_group": ("router_groups", 1),
    "topk_group": ("groups_per_token", 1),
}
_TOLD = {
    "n_routed_experts": ("num_experts", REQUIRED),
    "num_experts_per_tok": ("experts_per_token", REQUIRED),
    "n_shared_experts": ("shared_experts", REQUIRED),
    "first_k_dense_replace": ("first_dense", 0),
}
_DOTS = {"qk_norm": True, "rotary_fraction": 1.0, "attention_bias": False}
_SCALE = {"routed_scaling_factor": ("weight_scale", 1.0)}


def _read_dots(read: Any, num_layers: int) -> dict[str, Any]:
    """Say what is wrong where a layer sees a window, as those from `max_window_layers` on do if there is one."""
    listed, first = read.raw.get("layer_types"), read.raw.get("max_window_layers", num_layers)
    if listed is None and read.raw.get("sliding_window") is not None and type(first) is int and first < num_layers:
        listed = ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)
    if listed not in (None, ["full_attention"] * num_layers):
        read.problems.append(f"`layer_types`={listed!r} is not supported, only full_attention on every layer")
    return {}


def _dialect(architecture: str, post_norms: bool) -> Dialect:
    return Dialect(
        architecture=architecture,
        sizes=sizes(131_072, 2, 128),
        numbers=eps(1.5625e-7),
        flags=TIED | {"attention_bias": ("attention_bias", True)},
        partial=("partial_rotary_factor", 0.5),
        choices=ACTIVATION,
        fixed={"post_norms": post_norms},
        written={"pad_token_id": None},  # or transformers takes one, which small vocabularies do not have
    )


@dataclass(frozen=True, kw_only=True)
class GLMLike(Activated):
    """What dense GLMs and mixtures share.

    Attributes:
        attention_bias: biases after the projections of queries, keys and values.
        rotary_fraction: the share of each head that turns by its position.
    """

    attention_bias: bool = True
    rotary_fraction: float = 0.5

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + rotary_problems(self)

    @property
    def biases(self) -> str:
        """Which projections of attention have a bias, of `qkvo`."""
        return "qkv" if self.attention_bias else ""


@dataclass(frozen=True, kw_only=True)
class GLMConfig(GLMLike):
    """GLM 4, as transformers has it.

    Attributes:
        post_norms: normalise what attention and MLP put out before adding it, as in GLM-4-0414.
    """

    dialects: ClassVar = {"glm": _dialect("GlmForCausalLM", False), "glm4": _dialect("Glm4ForCausalLM", True)}

    norm_eps: float = 1.5625e-7
    post_norms: bool = True

    @property
    def rotary_pairs(self) -> bool:
        """Whether neighbouring dimensions of a head turn together, in place of those of its halves."""
        return True

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends(self.attention_rows() + (_BEHIND if self.post_norms else ()) + _FUSED)


@dataclass(frozen=True, kw_only=True)
class GLMMoeConfig(GroupedLike, GLMLike):
    """GLM 4.5, 4.6 and 4.7: each expert's probability is its own, and a bias takes part in choosing.

    Attributes:
        mlp_dim: hidden width of one expert.
        qk_norm: each head's queries and keys are normalised.
        normalise_weights: the weights of the chosen experts sum to one before they are scaled.
    """

    dialects: ClassVar = {
        "glm4_moe": Dialect(
            architecture="Glm4MoeForCausalLM",
            sizes=sizes(131_072, 8, **_SPARSE),
            numbers=eps(1e-5) | _SCALE,
            flags=TIED | BIAS | {"norm_topk_prob": ("normalise_weights", True), "use_qk_norm": ("qk_norm", False)},
            partial=("partial_rotary_factor", 0.5),
            choices=ACTIVATION,
            harmless=SIGMOID,
            ignored=("num_nextn_predict_layers", "num_mtp_layers"),
        ),
    }
    model: ClassVar[str] = "zoo.models.mixture.Mixture"

    dense_mlp_dim: int = 10_944
    qk_norm: bool = False
    normalise_weights: bool = True

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + self.router_problems()

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends(self.grouped_rows(self.attention_rows()))


@dataclass(frozen=True, kw_only=True)
class DotsConfig(GLMMoeConfig):
    """dots.llm1 (https://arxiv.org/abs/2506.05767): GLM 4.5 whose queries and keys are normalised, and turn whole."""

    dialects: ClassVar = {
        "dots1": Dialect(
            architecture="Dots1ForCausalLM",
            sizes=sizes(2048, 32, **_SPARSE | _TOLD),
            numbers=eps(1e-6) | _SCALE,
            flags=TIED | {"norm_topk_prob": ("normalise_weights", False)},
            choices=ACTIVATION,
            only={"attention_bias": (False,)},
            harmless=SIGMOID | {"scoring_func": ("sigmoid", "noaux_tc", None), "moe_layer_freq": (1, None)},
            keys=("sliding_window", "layer_types"),
            read=_read_dots,
            fixed=_DOTS,
        ),
    }

    norm_eps: float = 1e-6
    first_dense: int = 0
    attention_bias: bool = False
    rotary_fraction: float = 1.0
    qk_norm: bool = True
    normalise_weights: bool = False

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        wrong = {name: getattr(self, name) for name, one in _DOTS.items() if getattr(self, name) != one}
        return super().problems() + [f"{name}={one} is of GLM, not of dots.llm1" for name, one in wrong.items()]
