"""GLM 4 (https://arxiv.org/abs/2406.12793): Llama with biases, gate and up in one tensor, and neighbouring dimensions
of half of each head that turn together; those of 2025 have norms behind attention and MLP too. Free of JAX."""

from dataclasses import dataclass, replace
from typing import ClassVar

from zoo.config import rotary_problems
from zoo.dialect import ACTIVATION, TIED, Dialect, eps, sizes
from zoo.families.llama import Activated
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
class GLMConfig(Activated):
    """GLM 4, as transformers has it.

    Attributes:
        attention_bias: biases after the projections of queries, keys and values.
        rotary_fraction: the share of each head that turns by its position.
        post_norms: normalise what attention and MLP put out before adding it, as in GLM-4-0414.
    """

    dialects: ClassVar = {"glm": _dialect("GlmForCausalLM", False), "glm4": _dialect("Glm4ForCausalLM", True)}

    norm_eps: float = 1.5625e-7
    attention_bias: bool = True
    rotary_fraction: float = 0.5
    post_norms: bool = True

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + rotary_problems(self)

    @property
    def biases(self) -> str:
        """Which projections of attention have a bias, of `qkvo`."""
        return "qkv" if self.attention_bias else ""

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head turn by its position: the first."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def rotary_pairs(self) -> bool:
        """Whether neighbouring dimensions of a head turn together, in place of those of its halves."""
        return True

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends(self.attention_rows() + (_BEHIND if self.post_norms else ()) + _FUSED)
