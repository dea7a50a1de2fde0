"""What models share of whose layers some hand on a state from token to token in place of attention. Free of JAX."""

from dataclasses import dataclass
from typing import ClassVar

from zoo.config import pattern_problems

ATTEND = "A"


@dataclass(frozen=True, kw_only=True)
class HybridLike:
    """What they share, whatever they grew out of: inherited beside that family's config.

    Attributes:
        layer_pattern: layers that hand on a state, by their letter, and of attention (A), repeated over the depth.
        conv_taps: tokens that the convolution before a state sees, this one included.
    """

    letter: ClassVar[str]  # of the layers that hand on a state
    kind: ClassVar[str]  # what they have in place of attention
    stack: ClassVar[str]  # which of the model's stacks they are in
    optional: ClassVar[bool] = False  # whether there need not be one

    layer_pattern: str
    conv_taps: int = 4

    def pattern_problems(self) -> list[str]:
        """Say what is wrong with the layers."""
        if wrong := pattern_problems(
            "layer_pattern", self.layer_pattern, {self.letter: self.kind, ATTEND: "attention"}
        ):
            return wrong
        recurrent, layers = len(self.recurrent_layers), self._num_layers
        lacks = [self.kind] * (not recurrent and not self.optional) + ["attention"] * (recurrent == layers)
        return [f"layer_pattern={self.layer_pattern!r} gives num_layers={layers} no layer of {what}" for what in lacks]

    @property
    def _num_layers(self) -> int:
        return getattr(self, "num_layers")  # noqa: B009 (a field of what this is inherited beside)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers that hand on a state from token to token."""
        letters = (self.layer_pattern * self._num_layers)[: self._num_layers]
        return tuple(i for i, letter in enumerate(letters) if letter == self.letter)

    @property
    def layer_stacks(self) -> tuple[str, ...]:
        """Which of the model's stacks of blocks each layer is in."""
        return tuple(self.stack if i in self.recurrent_layers else "layers" for i in range(self._num_layers))
