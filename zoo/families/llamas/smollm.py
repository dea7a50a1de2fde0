"""SmolLM 3 (https://huggingface.co/blog/smollm3): Llama, of whose layers some have no rotary embedding
(https://arxiv.org/abs/2501.18795). Free of JAX."""

from dataclasses import dataclass
from typing import Any, ClassVar

from zoo.config import GLOBAL, LOCAL, Rope, pattern_of, pattern_problems, window_problems
from zoo.dialect import ACTIVATION, BIAS, Dialect, eps, sizes
from zoo.families.llamas.llama import LlamaConfig

ROTATED, UNROTATED = "RN"
USUAL = "RRRN"
TURNS = {ROTATED: "rotary embedding", UNROTATED: "none"}


def _read_rope_layers(read: Any, num_layers: int) -> dict[str, Any]:
    """Return which layers have no rotary embedding: a list says so by 0, or it is every fourth.

    Where windows are on and layers are not listed by type, those are the ones that have a window.
    """
    every = read.count("no_rope_layer_interval", 4)
    listed = read.flags("no_rope_layers", num_layers)
    turn = [bool((layer + 1) % every) for layer in range(num_layers)] if listed is None else listed
    fields = {"rope_pattern": pattern_of("".join(ROTATED if turns else UNROTATED for turns in turn), USUAL)}
    window = read.raw.get("sliding_window")
    if window is None or read.raw.get("layer_types") is not None or not read.flag("use_sliding_window", False):
        return fields
    types = "".join(GLOBAL if turns else LOCAL for turns in turn)
    return fields | {"window": window, "attention_pattern": pattern_of(types, LOCAL)}


def _write_rope_layers(config: Any) -> dict[str, Any]:
    return {"no_rope_layers": [int(rope is not None) for rope in config.layer_ropes]}


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(LlamaConfig):
    """SmolLM 3: Llama, of whose layers some have no rotary embedding.

    Attributes:
        rope_pattern: layers whose queries and keys turn by their positions (R) and others (N), repeated over the depth.
        window: on local layers a query sees this many keys, itself included; None lets every layer see all.
        attention_pattern: local (L) and global (G) layers, repeated over the depth.
    """

    dialects: ClassVar = {
        "smollm3": Dialect(
            architecture="SmolLM3ForCausalLM",
            sizes=sizes(32_768, 4),
            numbers=eps(1e-6),
            flags=BIAS | {"tie_word_embeddings": ("tied", True), "mlp_bias": ("mlp_bias", False)},
            theta=2_000_000.0,
            choices=ACTIVATION,
            windows="switch",
            window=None,
            keys=("no_rope_layers", "no_rope_layer_interval"),
            written={"pad_token_id": None},  # or transformers takes one, which small vocabularies do not have
            read=_read_rope_layers,
            write=_write_rope_layers,
        )
    }

    norm_eps: float = 1e-6
    rope_theta: float = 2_000_000.0
    tied: bool = True
    rope_pattern: str = USUAL
    window: int | None = None
    attention_pattern: str = "L"

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        own = window_problems(self.window, self.attention_pattern)
        return super().problems() + own + pattern_problems("rope_pattern", self.rope_pattern, TURNS)

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """How each layer's positions turn; None where they do not."""
        letters = self.rope_pattern * self.num_layers
        turned = self.rope_theta, self.rope_scaling
        return tuple(turned if letter == ROTATED else None for letter in letters[: self.num_layers])
