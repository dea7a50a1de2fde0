"""Llama 4 (https://ai.meta.com/blog/llama-4-multimodal-intelligence), the text part: a mixture whose tokens are
multiplied by their expert's probability before it; positions turn in three layers of four, whose queries see no further
than their chunk of the text, and queries of the others grow with what is before them; and MobileLLM-R1
(https://arxiv.org/abs/2509.24945), which is its layers without experts. Free of JAX."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zoo.config import GLOBAL, LOCAL, Chunk, Rope, not_positive, pattern_of, pattern_problems, window_problems, windows
from zoo.dialect import ACTIVATION, BIAS, REQUIRED, TIED, Dialect, eps, sizes
from zoo.families.llamas.llama import Activated
from zoo.families.llamas.smollm import ROTATED, TURNS, UNROTATED, USUAL
from zoo.families.mixture import MixtureLike, dense_row
from zoo.parameters import LAYER, MLP, Row

SPARSE, DENSE = "ED"
_CHUNKED = {LOCAL: "chunked_attention", GLOBAL: "full_attention"}
_HERE = LAYER + "feed_forward."
_EXPERTS = (
    Row("layers.router", _HERE + "router.weight", "E D -> D E", "D"),
    Row("layers.gate", _HERE + "experts.gate_up_proj", "E D F -> E D F", "D", fused="FF", part=0),
    Row("layers.up", _HERE + "experts.gate_up_proj", "E D F -> E D F", "D", fused="FF", part=1),
    Row("layers.down", _HERE + "experts.down_proj", "E F D -> E F D", "F"),
    Row("layers.shared_gate", _HERE + "shared_expert.gate_proj.weight", "U D -> D U", "D"),
    Row("layers.shared_up", _HERE + "shared_expert.up_proj.weight", "U D -> D U", "D"),
    Row("layers.shared_down", _HERE + "shared_expert.down_proj.weight", "D U -> U D", "U"),
)
_MLP = tuple(replace(row, tensor=row.tensor.replace("mlp.", "feed_forward.")) for row in MLP)


def _read_sparse(read: Any, num_layers: int) -> dict[str, Any]:
    """Return which layers have experts, and how all attend."""
    if read.raw.get("moe_layers") is None:
        step = read.count("interleave_moe_layer_step", 1)
        sparse = range(step - 1, num_layers, step)
    else:
        sparse = read.layers("moe_layers", num_layers)
    letters = "".join(SPARSE if layer in sparse else DENSE for layer in range(num_layers))
    return {"expert_pattern": pattern_of(letters, SPARSE)} | _read(read, num_layers)


def _read(read: Any, num_layers: int) -> dict[str, Any]:
    """Return which layers turn, and which see no further than their chunk; and how queries grow."""
    every = read.count("no_rope_layer_interval", 4)
    listed = read.flags("no_rope_layers", num_layers) if read.raw.get("no_rope_layers") else None
    turn = [bool((layer + 1) % every) for layer in range(num_layers)] if listed is None else listed
    chunk = read.raw.get("attention_chunk_size", 8192)
    chunk = None if chunk is None else read.size("attention_chunk_size", 8192, {})
    types = read.types(_CHUNKED, "".join(LOCAL if one and chunk is not None else GLOBAL for one in turn))
    if chunk is None and LOCAL in types:
        read.problems.append(f"`layer_types` names {_CHUNKED[LOCAL]}, and there is no `attention_chunk_size`")
    tuned = read.raw.get("attn_temperature_tuning", True)  # 4 in published files, which is true
    if type(tuned) not in (bool, int):
        read.problems.append(f"`attn_temperature_tuning`={tuned!r} is neither true nor false")
    growth = read.number("attn_scale", 0.1)
    return {
        "rope_pattern": pattern_of("".join(ROTATED if one else UNROTATED for one in turn), USUAL),
        "attention_pattern": pattern_of(types, Llama4Like.attention_pattern),
        "chunk": chunk,
        "growth": growth if tuned and growth else None,
        "growth_length": read.size("floor_scale", 8192, {}),
    }


def _write_sparse(config: Any) -> dict[str, Any]:
    sparse = [layer for layer in range(config.num_layers) if layer not in config.dense_layers]
    return {"moe_layers": sparse} | _write(config)


def _write(config: Any) -> dict[str, Any]:
    local = windows(config.num_layers, 1, config.attention_pattern)
    return {
        "no_rope_layers": [int(rope is not None) for rope in config.layer_ropes],
        "layer_types": [_CHUNKED[GLOBAL if one is None else LOCAL] for one in local],
        "attention_chunk_size": config.chunk,
        "attn_temperature_tuning": config.growth is not None,
        "attn_scale": 0.1 if config.growth is None else config.growth,
        "floor_scale": config.growth_length,
    }


def _dialect(**own: Any) -> Dialect:
    """Return what the files of both kinds have, and this one's own."""
    keys = "no_rope_layers", "no_rope_layer_interval", "layer_types", "attention_chunk_size", "floor_scale"
    return Dialect(
        architecture="Llama4ForCausalLM",
        outer="llama4",
        numbers=eps(1e-5),
        flags=TIED | BIAS | {"use_qk_norm": ("unit_heads", True)},
        choices=ACTIVATION,
        theta=500_000.0,
        only={"router_jitter_noise": (0.0,)},
        written={"pad_token_id": None},
        keys=(*keys, "attn_temperature_tuning", "attn_scale", *own.pop("keys", ())),
        ignored=("router_aux_loss_coef", "for_llm_compressor", *own.pop("ignored", ())),
        **own,
    )


@dataclass(frozen=True, kw_only=True)
class Llama4Like(Activated):
    """What Llama 4's text part is without experts.

    Attributes:
        rope_pattern: layers whose queries and keys turn by their positions (R) and others (N), repeated over the depth.
        chunk: on local layers a query sees the keys before it from the last multiple of this many on; None is all.
        attention_pattern: local (L) and global (G) layers, repeated over the depth.
        attention_bias: biases after the four projections of attention.
        unit_heads: each head's queries and keys, where they turn, are divided by their root mean square.
        growth: where they do not turn, queries grow by this share of the logarithm of how many times `growth_length`
            tokens they end; None is not.
        growth_length: see `growth`.
    """

    rope_theta: float = 500_000.0
    rope_pattern: str = USUAL
    chunk: int | None = 8192
    attention_pattern: str = "LLLG"
    attention_bias: bool = False
    unit_heads: bool = True
    growth: float | None = 0.1
    growth_length: int = 8192

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        own = not_positive(self, ("chunk", "growth", "growth_length")) + window_problems(None, self.attention_pattern)
        return super().problems() + own + pattern_problems("rope_pattern", self.rope_pattern, TURNS)

    @property
    def rotary_pairs(self) -> bool:
        """Whether neighbouring dimensions of a head turn together, in place of those of its halves."""
        return True

    @property
    def rope_temperature(self) -> float | None:
        """What queries and keys of all layers are multiplied by: rotation does it, before they are divided."""
        return None

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """How each layer's positions turn; None where they do not."""
        letters = self.rope_pattern * self.num_layers
        turned = self.rope_theta, self.rope_scaling
        return tuple(turned if letter == ROTATED else None for letter in letters[: self.num_layers])

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """How many keys each layer's queries see, themselves included; None is all of them."""
        return windows(self.num_layers, None if self.chunk is None else Chunk(self.chunk), self.attention_pattern)


@dataclass(frozen=True, kw_only=True)
class MobileLLMR1Config(Llama4Like):
    """MobileLLM-R1, or any other of Llama 4's text parts without experts."""

    model: ClassVar[str] = "zoo.models.llama4.MobileLLMR1"
    dialects: ClassVar = {
        "llama4_text": _dialect(
            sizes=sizes(131_072, 8, 128, intermediate_size_mlp=("mlp_dim", 16_384)),
            where={"moe_layers": ([],)},
            ignored=("intermediate_size", "num_local_experts", "num_experts_per_tok", "interleave_moe_layer_step"),
            read=_read,
            write=_write,
        )
    }

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends(self.attention_rows() + _MLP)


@dataclass(frozen=True, kw_only=True)
class Llama4Config(MixtureLike, Llama4Like):
    """Llama 4, its text part.

    Attributes:
        mlp_dim: hidden width of one expert, and of that which every token meets.
        dense_mlp_dim: hidden width of layers without experts.
        expert_pattern: layers with experts (E) and with one MLP (D), repeated over the depth.
    """

    model: ClassVar[str] = "zoo.models.llama4.Llama4"
    dialects: ClassVar = {
        "llama4_text": _dialect(
            sizes=sizes(
                *(131_072, 8, 128),
                intermediate_size=("mlp_dim", REQUIRED),
                intermediate_size_mlp=("dense_mlp_dim", 16_384),
                num_local_experts=("num_experts", 16),
                num_experts_per_tok=("experts_per_token", 1),
            ),
            keys=("moe_layers", "interleave_moe_layer_step"),
            read=_read_sparse,
            write=_write_sparse,
        )
    }

    num_experts: int = 16
    experts_per_token: int = 1
    balance_weight: float = 0.0
    dense_mlp_dim: int = 16_384
    expert_pattern: str = SPARSE

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        own = not_positive(self, ("dense_mlp_dim",)) + self.router_problems()
        own += pattern_problems("expert_pattern", self.expert_pattern, {SPARSE: "experts", DENSE: "one MLP"})
        if SPARSE not in self.expert_pattern[: self.num_layers]:
            own.append(f"expert_pattern={self.expert_pattern!r} has no layer with experts")
        return super().problems() + own

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers that have one MLP and no router."""
        letters = self.expert_pattern * self.num_layers
        return tuple(layer for layer in range(self.num_layers) if letters[layer] == DENSE)

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return super().dims | {"P": self.dense_mlp_dim, "U": self.mlp_dim}

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        sparse = tuple(layer for layer in range(self.num_layers) if layer not in self.dense_layers)
        attention = self.attention_rows()
        rows = tuple(replace(row, layers=sparse) for row in (*attention, *_EXPERTS))
        dense = tuple(dense_row(row, self.dense_layers) for row in (*attention, *_MLP))
        return self.with_ends(rows + (dense if self.dense_layers else ()))
