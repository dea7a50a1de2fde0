"""Phi 3, 3.5 and 4 (https://arxiv.org/abs/2404.14219, https://arxiv.org/abs/2412.08905): Llama, of which queries, keys
and values are one tensor on disk, gate and up another. Free of JAX."""

from dataclasses import dataclass, replace
from typing import ClassVar

from zoo.config import rotary_problems, window_problems
from zoo.dialect import ACTIVATION, TIED, Dialect, eps, sizes
from zoo.families.llamas.llama import Activated
from zoo.parameters import LAYER, Row

_FUSED = {
    "layers.q": (LAYER + "self_attn.qkv_proj.weight", "NKK", 0),
    "layers.k": (LAYER + "self_attn.qkv_proj.weight", "NKK", 1),
    "layers.v": (LAYER + "self_attn.qkv_proj.weight", "NKK", 2),
    "layers.gate": (LAYER + "mlp.gate_up_proj.weight", "FF", 0),
    "layers.up": (LAYER + "mlp.gate_up_proj.weight", "FF", 1),
}


@dataclass(frozen=True, kw_only=True)
class Phi3Config(Activated):
    """Phi 3, 3.5 and 4, but for those with experts or images.

    Attributes:
        rotary_fraction: the share of each head that turns by its position.
        window: how many keys a query sees, itself included; None is all.
    """

    dialects: ClassVar = {
        "phi3": Dialect(
            architecture="Phi3ForCausalLM",
            sizes=sizes(4096),
            numbers=eps(1e-5),
            flags=TIED,
            windows="all",
            window=None,
            partial=("partial_rotary_factor", 1.0),
            original=4096,
            rope_names={"su": "longrope", "yarn": "longrope"},
            choices=ACTIVATION,
            harmless={"full_attn_mod": (1, None), "interpolate_factor": (1, None)},
            keys=("original_max_position_embeddings",),
            written={"pad_token_id": None},  # or transformers takes one, which small vocabularies do not have
            write=lambda config: {"original_max_position_embeddings": original_length(config)},
        )
    }

    rotary_fraction: float = 1.0
    window: int | None = None

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        windows = window_problems(self.window, self.attention_pattern)
        return super().problems() + windows + rotary_problems(self)

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return tuple(_fused(row) for row in super().rows())


def original_length(config: Phi3Config) -> int:
    """Return how long the texts were that a checkpoint was first trained on."""
    return config.context_length if config.rope_scaling is None else config.rope_scaling.original_length


def _fused(row: Row) -> Row:
    if row.leaf not in _FUSED:
        return row
    tensor, fused, part = _FUSED[row.leaf]
    return replace(row, tensor=tensor, fused=fused, part=part)
