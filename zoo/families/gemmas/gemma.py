"""Gemma 1 (https://arxiv.org/abs/2403.08295), 2 (https://arxiv.org/abs/2408.00118) and 3
(https://arxiv.org/abs/2503.19786), text. Free of JAX."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from zoo.config import (
    LOCAL,
    Config,
    Rope,
    RopeScaling,
    not_positive,
    ropes_by_type,
    scaling_problems,
    window_problems,
    windows,
)
from zoo.dialect import SIZES, Dialect, eps
from zoo.parameters import ATTENTION, ENDS, HEAD, LAYER, MLP, MLP_NORM, QK_NORMS, Row

POST_NORMS = (
    Row("layers.post_attn_norm", LAYER + "post_attention_layernorm.weight", "D -> D"),
    Row("layers.mlp_norm", LAYER + "pre_feedforward_layernorm.weight", "D -> D"),
    Row("layers.post_mlp_norm", LAYER + "post_feedforward_layernorm.weight", "D -> D"),
)
_QUERY: dict[str, tuple[str, float | None]] = {"query_pre_attn_scalar": ("query_scalar", 256.0)}
# Gemma 1's "gelu" has always meant the tanh form; the `hidden_act` of 2 and 3 is not read by anything.
TANH = ("gelu_pytorch_tanh",)
_ONLY = {
    "hidden_activation": TANH,
    "hidden_act": (*TANH, "gelu", None),
    "attention_bias": (False, None),
}
_TIED = {"tie_word_embeddings": ("tied", True)}
_WRITES = {"use_bidirectional_attention": (False, None)}  # and does not see what is behind
_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_GEMMA_3_SIZES = {
    "vocab_size": ("vocab_size", 262_208),
    "num_hidden_layers": ("num_layers", 26),
    "hidden_size": ("embed_dim", 2304),
    "intermediate_size": ("mlp_dim", 9216),
    "num_attention_heads": ("num_heads", 8),
    "num_key_value_heads": ("num_kv_heads", 4),
    "head_dim": ("head_dim", 256),
    "max_position_embeddings": ("context_length", 131_072),
}


@dataclass(frozen=True, kw_only=True)
class GemmaLike(Config):
    """What all Gemmas share.

    Attributes:
        query_scalar: scores are divided by its square root; None means `head_dim`.
        final_softcap: logits become `c * tanh(logit / c)`; None leaves them alone.
        window: on local layers a query sees this many keys, itself included; None lets every layer see all.
        attention_pattern: local (L) and global (G) layers, repeated over the depth.
    """

    model: ClassVar[str] = "zoo.models.gemmas.gemma.Gemma"

    query_scalar: float | None = None
    final_softcap: float | None = None
    window: int | None = None
    attention_pattern: str = "LG"

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        positive = not_positive(self, ("query_scalar", "final_softcap"))
        return positive + window_problems(self.window, self.attention_pattern)

    @property
    def query_scale(self) -> float:
        """What attention scores are multiplied by."""
        scalar = self.head_dim if self.query_scalar is None else self.query_scalar
        return scalar**-0.5 * (self.rope_temperature or 1.0) ** 2

    @property
    def embed_scale(self) -> float:
        """What the rows of the table are multiplied by where they are looked up."""
        return math.sqrt(self.embed_dim)

    @property
    def norm_offset(self) -> float:
        """What is added to the weights of norms, which are stored less one."""
        return 1.0


def _not_gemma_1(config: Any) -> str | None:
    """Say what no Gemma 1 has."""
    extras = {
        "query_scalar": config.query_scalar not in (None, config.head_dim),
        "attn_softcap": config.attn_softcap is not None,
        "final_softcap": config.final_softcap is not None,
        "window": config.window is not None,
    }
    if not any(extras.values()):
        return None
    return (
        f"{', '.join(name for name in extras if extras[name])} "
        "needs Gemma 2, which has post_norms=true. Set it, or leave the others at their defaults"
    )


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(GemmaLike):
    """Gemma 1 and 2. The defaults are Gemma 1's.

    Attributes:
        attn_softcap: scores become `c * tanh(score / c)`; None leaves them alone.
        post_norms: normalise what attention and MLP put out before adding it (Gemma 2's sandwich).
        tied: the embedding table is also the head.
        rope_scaling: how the rotary frequencies are stretched to longer texts.
    """

    dialects: ClassVar = {
        "gemma": Dialect(
            architecture="GemmaForCausalLM",
            sizes=SIZES,
            flags=_TIED,
            only=_ONLY | _WRITES | {"hidden_activation": (*TANH, None)},
            fixed={"post_norms": False},
            written=_IDS,
            refuse=_not_gemma_1,
        ),
        "gemma2": Dialect(
            architecture="Gemma2ForCausalLM",
            sizes=SIZES,
            numbers={
                **eps(1e-6),
                **_QUERY,
                "attn_logit_softcapping": ("attn_softcap", 50.0),
                "final_logit_softcapping": ("final_softcap", 30.0),
            },
            flags=_TIED,
            windows="types",
            only=_ONLY | _WRITES,
            fixed={"post_norms": True},
            written=_IDS,
            ignored=("sliding_window_pattern",),
        ),
    }

    attn_softcap: float | None = None
    post_norms: bool = False
    tied: bool = True
    rope_scaling: RopeScaling | None = None

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        norms = POST_NORMS if self.post_norms else (MLP_NORM,)
        return (*ENDS, *ATTENTION, *MLP, *norms, *(() if self.tied else (HEAD,)))

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + not_positive(self, ("attn_softcap",)) + scaling_problems(self, self.rope_scaling)


def _read_bidirectional(read: Any, num_layers: int) -> dict[str, Any]:
    del num_layers
    given = read.raw.get("use_bidirectional_attention")
    return {"bidirectional": given is not None and read.flag("use_bidirectional_attention", False)}


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaLike):
    """Gemma 3, the text part: normalised queries and keys, and five layers of six local, with frequencies of their own.

    Attributes:
        rope_theta: base of the rotary frequencies of global layers.
        local_rope_theta: that of local layers.
        tied: the embedding table is also the head.
        bidirectional: every token sees those behind it too, on local layers half a window on each side (EmbeddingGemma,
            https://arxiv.org/abs/2509.20354).
        rope_scaling: how the frequencies of global layers are stretched.
    """

    dialects: ClassVar = {
        "gemma3_text": Dialect(
            architecture="Gemma3ForCausalLM",
            outer="gemma3",
            sizes=_GEMMA_3_SIZES,
            numbers={**eps(1e-6), **_QUERY, "final_logit_softcapping": ("final_softcap", None)},
            flags=_TIED,
            windows="types",
            every=("sliding_window_pattern", 6),
            rope="global",
            theta=1_000_000.0,
            only=_ONLY,
            written=_IDS,
            ignored=("attn_logit_softcapping",),  # transformers never reads it
            keys=("use_bidirectional_attention",),
            read=_read_bidirectional,
            write=lambda config: {"use_bidirectional_attention": config.bidirectional},
        )
    }

    rope_theta: float = 1_000_000.0
    window: int | None = 4096
    attention_pattern: str = "LLLLLG"
    local_rope_theta: float = 10_000.0
    tied: bool = True
    bidirectional: bool = False
    rope_scaling: RopeScaling | None = None

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        problems = super().problems() + not_positive(self, ("local_rope_theta",))
        if self.window is None and LOCAL in self.attention_pattern:
            problems.append("window=None leaves local layers without one")
        return problems + scaling_problems(self, self.rope_scaling)

    @property
    def attn_softcap(self) -> float | None:
        """The soft cap of attention scores, which the norms of queries and keys replace."""
        return None

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """How many keys each layer's queries see, themselves included; of those behind, as many as before."""
        halved = self.window if self.window is None or not self.bidirectional else self.window // 2 + 1
        return windows(self.num_layers, halved, self.attention_pattern)

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """The base of each layer's rotary frequencies, and how they are stretched."""
        return ropes_by_type(self)

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return (*ENDS, *ATTENTION, *MLP, *POST_NORMS, *QK_NORMS, *(() if self.tied else (HEAD,)))
