"""Qwen 2 and 2.5 (https://arxiv.org/abs/2407.10671), Qwen 3 and its mixtures (https://arxiv.org/abs/2505.09388).

Free of JAX.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zoo.config import LOCAL, not_positive, pattern_of, window_problems
from zoo.dialect import ACTIVATION, BIAS, TIED, Dialect, eps, sizes
from zoo.families.llamas.llama import Activated
from zoo.families.mixture import BALANCE, EXPERTS, SHARED, MixtureLike, dense_row
from zoo.parameters import MLP, Row

_NORMS = {"use_qk_norm": (True, None)}
# Of models that see, whose texts' positions are plain numbers.
_SEEING: dict[str, Any] = {
    "rope_names": {"mrope": "default"},
    "rope_ignored": ("mrope_section", "mrope_interleaved"),
    "outer_keys": ("video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id"),
    "choices": ACTIVATION,
}


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(Activated):
    """Qwen 2 and 2.5: biases after the projections of queries, keys and values; of those that see, the text part.

    Attributes:
        window: on local layers a query sees this many keys, itself included; None lets every layer see all.
        attention_pattern: local (L) and global (G) layers, repeated over the depth.
    """

    dialects: ClassVar = {
        "qwen2": Dialect(
            architecture="Qwen2ForCausalLM",
            sizes=sizes(32_768, 32),
            flags=TIED,
            windows="switch",
            choices=ACTIVATION,
            harmless={"qkv_bias": (True, None)},
        )
    } | {
        f"{name}_text": Dialect(
            architecture="Qwen2ForCausalLM",
            outer=name,
            sizes=sizes(32_768, 8),
            numbers=eps(1e-5),
            flags=TIED,
            windows="switch",
            theta=1_000_000.0,
            **_SEEING,
        )
        for name in ("qwen2_vl", "qwen2_5_vl")
    }

    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    window: int | None = None
    attention_pattern: str = "L"

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + window_problems(self.window, self.attention_pattern)

    @property
    def biases(self) -> str:
        """Which projections of attention have a bias, of `qkvo`."""
        return "qkv"


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """Qwen 3: normalised queries and keys in place of biases; of those that see, the text part.

    Attributes:
        attention_bias: biases after the four projections of attention.
    """

    dialects: ClassVar = {
        "qwen3": Dialect(
            architecture="Qwen3ForCausalLM",
            sizes=sizes(32_768, 32, 128),
            flags=TIED | BIAS,
            windows="switch",
            choices=ACTIVATION,
            harmless=_NORMS,
        ),
        "qwen3_vl_text": Dialect(
            architecture="Qwen3ForCausalLM",
            outer="qwen3_vl",
            sizes=sizes(128_000, 32, 128),
            theta=500_000.0,
            flags=TIED | BIAS,
            **_SEEING,
        ),
    }

    attention_bias: bool = False

    @property
    def biases(self) -> str:
        """Which projections of attention have a bias, of `qkvo`."""
        return "qkvo" if self.attention_bias else ""

    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys are normalised."""
        return True


def _read_dense_layers(read: Any, num_layers: int) -> dict[str, Any]:
    step = read.count("decoder_sparse_step", 1)
    dense = read.layers("mlp_only_layers", num_layers) | {i for i in range(num_layers) if (i + 1) % step}
    return {"dense_layers": tuple(sorted(dense))}


def _write_dense_layers(config: Any) -> dict[str, Any]:
    return {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}


_DENSE_KEYS: dict[str, Any] = {
    "keys": ("mlp_only_layers", "decoder_sparse_step"),
    "read": _read_dense_layers,
    "write": _write_dense_layers,
}
_SPARSE = {
    "intermediate_size": ("dense_mlp_dim", 6144),
    "moe_intermediate_size": ("mlp_dim", 768),
    "num_experts": ("num_experts", 128),
    "num_experts_per_tok": ("experts_per_token", 8),
}


@dataclass(frozen=True, kw_only=True)
class QwenMixtureLike(MixtureLike, Qwen2Config):
    """What Qwen's mixtures of experts share.

    Attributes:
        mlp_dim: hidden width of one expert.
        normalise_weights: the weights of the chosen experts sum to one.
        dense_layers: layers that have one MLP and no router.
        dense_mlp_dim: hidden width of those.
    """

    num_experts: int = 128
    experts_per_token: int = 8
    normalise_weights: bool = True
    dense_layers: tuple[int, ...] = ()
    dense_mlp_dim: int = 6144

    def expert_rows(self) -> tuple[Row, ...]:
        """Return the rows of what layers with experts have in place of an MLP."""
        return EXPERTS

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        problems = super().problems() + self.router_problems() + not_positive(self, ("dense_mlp_dim",))
        within = sorted(set(self.dense_layers) & set(range(self.num_layers)))
        if list(self.dense_layers) != within or len(within) == self.num_layers:
            most = self.num_layers - 1
            problems.append(f"dense_layers={self.dense_layers} must be in order, from 0 to {most}, and leave one out")
        return problems

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return super().dims | {"P": self.dense_mlp_dim}

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        dense = tuple(dense_row(row, self.dense_layers) for row in self.attention_rows() + MLP)
        sparse = tuple(i for i in range(self.num_layers) if i not in self.dense_layers)
        layers = tuple(replace(row, layers=sparse) for row in self.attention_rows() + self.expert_rows())
        return self.with_ends(layers + (dense if self.dense_layers else ()))


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(QwenMixtureLike, Qwen3Config):
    """Qwen 3's mixtures of experts; of those that see, the text part."""

    dialects: ClassVar = {
        "qwen3_moe": Dialect(
            architecture="Qwen3MoeForCausalLM",
            sizes=sizes(32_768, 4, **_SPARSE),
            aliases={"num_experts": "num_local_experts"},
            numbers=eps(1e-6) | BALANCE,
            flags=TIED | BIAS | {"norm_topk_prob": ("normalise_weights", False)},
            windows="flag",
            choices=ACTIVATION,
            harmless=_NORMS,
            **_DENSE_KEYS,
        ),
        "qwen3_vl_moe_text": Dialect(
            architecture="Qwen3MoeForCausalLM",
            outer="qwen3_vl_moe",
            sizes=sizes(128_000, 16, **_SPARSE),
            aliases={"num_experts": "num_local_experts"},
            numbers=eps(1e-6) | BALANCE,
            flags=TIED | BIAS,
            theta=500_000.0,
            harmless={"norm_topk_prob": (True, None)},  # which transformers takes it for
            fixed={"normalise_weights": True},
            **_SEEING,
            **_DENSE_KEYS,
        ),
    }


def _read_qwen2_moe(read: Any, num_layers: int) -> dict[str, Any]:
    """Return which layers are dense, and which local where they are not listed: every other one of the first."""
    fields, first = _read_dense_layers(read, num_layers), read.raw.get("max_window_layers", 28)
    window = read.raw.get("sliding_window", 4096) if read.flag("use_sliding_window", False) else None
    if window is None or read.raw.get("layer_types") is not None or type(first) is not int:
        return fields
    local = [layer % 2 == 0 and layer < first for layer in range(num_layers)]
    return fields | {"window": window, "attention_pattern": pattern_of("".join("GL"[one] for one in local), LOCAL)}


_QWEN_2_SIZES = {
    "intermediate_size": ("dense_mlp_dim", 5632),
    "moe_intermediate_size": ("mlp_dim", 1408),
    "shared_expert_intermediate_size": ("shared_mlp_dim", 5632),
    "num_experts": ("num_experts", 60),
    "num_experts_per_tok": ("experts_per_token", 4),
}


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(QwenMixtureLike):
    """Qwen 1.5's and 2's mixtures of experts, beside which each token meets one that all share.

    Attributes:
        shared_mlp_dim: hidden width of the shared expert, which has a gate of its own.
        attention_bias: biases after the projections of queries, keys and values.
    """

    dialects: ClassVar = {
        "qwen2_moe": Dialect(
            architecture="Qwen2MoeForCausalLM",
            sizes=sizes(32_768, 16, **_QWEN_2_SIZES),
            aliases={"num_experts": "num_local_experts"},
            numbers=eps(1e-6) | BALANCE,
            flags=TIED | {"norm_topk_prob": ("normalise_weights", False), "qkv_bias": ("attention_bias", True)},
            windows="switch",
            theta=10_000.0,
            choices=ACTIVATION,
            keys=("mlp_only_layers", "decoder_sparse_step"),
            read=_read_qwen2_moe,
            write=_write_dense_layers,
        )
    }

    num_experts: int = 60
    experts_per_token: int = 4
    normalise_weights: bool = False
    dense_mlp_dim: int = 5632
    shared_mlp_dim: int = 5632
    attention_bias: bool = True

    @property
    def biases(self) -> str:
        """Which projections of attention have a bias, of `qkvo`."""
        return "qkv" if self.attention_bias else ""

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + not_positive(self, ("shared_mlp_dim",))

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return super().dims | {"U": self.shared_mlp_dim, "G": 1}

    def expert_rows(self) -> tuple[Row, ...]:
        """Return the rows of what layers with experts have in place of an MLP."""
        return EXPERTS + SHARED
