"""EXAONE 4 (https://arxiv.org/abs/2507.11407): Llama with norms behind attention and MLP, as OLMo 2 has them, and of
each head's queries and keys; where some layers are local, the positions of the others do not turn. Free of JAX."""

from dataclasses import dataclass
from typing import Any, ClassVar

from zoo.config import GLOBAL, LOCAL, Rope, pattern_of, window_problems, windows
from zoo.dialect import ACTIVATION, TIED, Dialect, eps, sizes
from zoo.families.llamas.llama import Activated
from zoo.families.llamas.olmo import BEHIND
from zoo.parameters import ATTENTION, QK_NORMS, Row


def _read(read: Any, num_layers: int) -> dict[str, Any]:
    """Return which layers are local where they are not listed: by a number, or by letters, the last being global."""
    every, pattern = read.raw.get("sliding_window_pattern", 4), GLOBAL
    if read.raw.get("layer_types") is not None:
        return {}
    if read.raw.get("sliding_window", 4096) is not None:
        if type(every) is int and every > 0:
            every = LOCAL * (every - 1) + GLOBAL
        if not isinstance(every, str) or not every or set(every) - {LOCAL, GLOBAL}:
            read.problems.append(
                f"`sliding_window_pattern`={every!r} is neither a number nor letters {LOCAL}, {GLOBAL}"
            )
            return {}
        types = "".join(every[layer % len(every)] for layer in range(num_layers))
        pattern = pattern_of(types, ExaoneConfig.attention_pattern)
    return {"attention_pattern": pattern}


@dataclass(frozen=True, kw_only=True)
class ExaoneConfig(Activated):
    """EXAONE 4.

    Attributes:
        window: on local layers a query sees this many keys, itself included; None lets every layer see all, and turns
            positions on every layer.
        attention_pattern: local (L) and global (G) layers, repeated over the depth.
    """

    dialects: ClassVar = {
        "exaone4": Dialect(
            architecture="Exaone4ForCausalLM",
            sizes=sizes(2048, 32),
            numbers=eps(1e-5),
            flags=TIED,
            choices=ACTIVATION,
            windows="types",
            every=(None, 4),
            rope="local",
            keys=("sliding_window_pattern",),
            read=_read,
            written={"pad_token_id": None},
        )
    }

    rope_theta: float = 1_000_000.0
    window: int | None = 4096
    attention_pattern: str = "LLLG"

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + window_problems(self.window, self.attention_pattern)

    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys are normalised."""
        return True

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """How each layer's positions turn; None where they do not: on global layers beside local ones."""
        seen = windows(self.num_layers, self.window, self.attention_pattern)
        turns = (self.window is None or kind is not None for kind in seen)
        return tuple((self.rope_theta, self.rope_scaling) if one else None for one in turns)

    def attention_rows(self) -> tuple[Row, ...]:
        """Return the rows of attention and of the norms."""
        return (*ATTENTION[1:], *BEHIND, *QK_NORMS)
