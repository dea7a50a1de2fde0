"""Hunyuan's dense models (https://github.com/Tencent-Hunyuan/Hunyuan-7B): Llama, each of whose heads' queries and keys
are normalised after they turn. Free of JAX."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zoo.config import RopeType
from zoo.dialect import ACTIVATION, BIAS, SHARE, TIED, Dialect, eps, sizes
from zoo.families.llamas.llama import Activated
from zoo.parameters import Row

_NAMES = {"layers.q_norm": "query_layernorm", "layers.k_norm": "key_layernorm"}


def _read(read: Any, num_layers: int) -> dict[str, Any]:
    """Return the base of a stretch that is called dynamic, and with an `alpha` is a larger base for all texts."""
    del num_layers
    rope = read.raw.get("rope_scaling") or read.raw.get("rope_parameters") or {}
    alpha = rope.get("alpha")
    if not alpha or rope.get("rope_type", rope.get("type")) != RopeType.dynamic:
        return {}
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or alpha < 0:
        read.problems.append(f"`rope_scaling.alpha`={alpha!r} is not a positive number")
        return {}
    sizes = {"embed_dim": read.raw["hidden_size"], "num_heads": read.raw["num_attention_heads"]}
    size = read.size("head_dim", SHARE, sizes)
    theta = float(rope.get("rope_theta", read.raw.get("rope_theta", 10_000.0)))
    return {"rope_theta": theta * alpha ** (size / (size - 2)), "rope_scaling": None}


@dataclass(frozen=True, kw_only=True)
class HunyuanConfig(Activated):
    """Hunyuan 0.5B to 7B.

    Attributes:
        attention_bias: biases after the four projections of attention.
    """

    dialects: ClassVar = {
        "hunyuan_v1_dense": Dialect(
            architecture="HunYuanDenseV1ForCausalLM",
            sizes=sizes(2048),
            numbers=eps(1e-5),
            flags=TIED | BIAS,
            choices=ACTIVATION,
            rope_ignored=("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
            aliases={"head_dim": "attention_head_dim"},
            harmless={
                "use_qk_norm": (True, None),
                "use_cla": (False, None),
                "use_rotary_pos_emb": (True, None),
                "norm_type": ("rms", None),
                "add_classification_head": (False, None),
            },
            ignored=(
                *("eod_token_id", "pad_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id"),
                *("text_end_id", "mask_init_id", "org_vocab_size", "cla_share_factor"),
                *("class_num", "dense_list", "pool_type"),  # of a head that classifies texts
            ),
            read=_read,
            written={"pad_token_id": None},  # or transformers takes one, which small vocabularies do not have
        )
    }

    attention_bias: bool = False

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        found = None if self.rope_scaling is None else self.rope_scaling.rope_type
        own = (
            [f"rope_scaling.rope_type={found} is not supported"] if found in (RopeType.yarn, RopeType.longrope) else []
        )
        return super().problems() + own

    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys are normalised."""
        return True

    @property
    def turned_first(self) -> bool:
        """Whether queries and keys are normalised after they turn."""
        return True

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        named = lambda row: row.tensor.replace(row.leaf.removeprefix("layers."), _NAMES[row.leaf])
        return tuple(replace(row, tensor=named(row)) if row.leaf in _NAMES else row for row in super().rows())
