"""Seed-OSS (https://github.com/ByteDance-Seed/seed-oss): Llama with biases of queries, keys and values. Free of JAX."""

from dataclasses import dataclass
from typing import ClassVar

from zoo.dialect import ACTIVATION, TIED, Dialect, eps, sizes
from zoo.families.llamas.llama import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class SeedConfig(LlamaConfig):
    """Seed-OSS: Llama with biases.

    Attributes:
        attention_bias: biases after the projections of queries, keys and values.
        attention_out_bias: a bias after that of attention's output.
    """

    dialects: ClassVar = {
        "seed_oss": Dialect(
            architecture="SeedOssForCausalLM",
            sizes=sizes(524_288, 8, 128),
            numbers=eps(1e-6),
            flags=TIED
            | {
                "attention_bias": ("attention_bias", True),
                "attention_out_bias": ("attention_out_bias", False),
                "mlp_bias": ("mlp_bias", False),
            },
            choices=ACTIVATION,
            ignored=("residual_dropout",),
            written={"pad_token_id": None, "residual_dropout": 0.0},
        )
    }

    norm_eps: float = 1e-6
    rope_theta: float = 10_000_000.0
    attention_bias: bool = True
    attention_out_bias: bool = False

    @property
    def biases(self) -> str:
        """Which projections of attention have a bias, of `qkvo`."""
        return "qkv" * self.attention_bias + "o" * self.attention_out_bias
