"""What mixtures of experts share: a router sends each token to a few of many MLPs. Free of JAX."""

import math
from dataclasses import dataclass
from typing import ClassVar

from zoo.parameters import LAYER, Row

_MOST = 4096
EXPERTS = (
    Row("layers.router", LAYER + "mlp.gate.weight", "E D -> D E", "D"),
    Row("layers.gate", LAYER + "mlp.experts.{}.gate_proj.weight", "F D -> D F", "D"),
    Row("layers.up", LAYER + "mlp.experts.{}.up_proj.weight", "F D -> D F", "D"),
    Row("layers.down", LAYER + "mlp.experts.{}.down_proj.weight", "D F -> F D", "F"),
)
SHARED = (  # an expert that every token meets, and its gate
    Row("layers.shared_router", LAYER + "mlp.shared_expert_gate.weight", "G D -> D G", "D"),
    Row("layers.shared_gate", LAYER + "mlp.shared_expert.gate_proj.weight", "U D -> D U", "D"),
    Row("layers.shared_up", LAYER + "mlp.shared_expert.up_proj.weight", "U D -> D U", "D"),
    Row("layers.shared_down", LAYER + "mlp.shared_expert.down_proj.weight", "D U -> U D", "U"),
)
BALANCE: dict[str, tuple[str, float | None]] = {"router_aux_loss_coef": ("balance_weight", 0.001)}


@dataclass(frozen=True, kw_only=True)
class MixtureLike:
    """What mixtures of experts share, whatever they grew out of: inherited beside that family's config.

    It has no base of its own, or the defaults of that base would replace the family's.

    Attributes:
        mlp_dim: hidden width of one expert.
        num_experts: MLPs in every sparse layer.
        experts_per_token: how many of them each token goes to.
        balance_weight: what the balance loss is multiplied by in training.
    """

    model: ClassVar[str] = "zoo.models.mixture.Mixture"

    num_experts: int
    experts_per_token: int
    balance_weight: float = 0.001

    def router_problems(self) -> list[str]:
        """Say what is wrong with the numbers of the router."""
        problems = []
        if not 1 <= self.num_experts <= _MOST:
            problems.append(f"num_experts={self.num_experts} must be from 1 to {_MOST}")
        if not 1 <= self.experts_per_token <= self.num_experts:
            problems.append(f"experts_per_token={self.experts_per_token} must be from 1 to {self.num_experts}")
        if not 0 <= self.balance_weight < math.inf:
            problems.append(f"balance_weight={self.balance_weight} must be zero or more")
        return problems

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return getattr(super(), "dims") | {"E": self.num_experts}  # noqa: B009 (of what this is inherited beside)

    # These are fields of the families that have them.
    @property
    def normalise_weights(self) -> bool:
        """Whether the weights of the chosen experts sum to one."""
        return True

    @property
    def gate_limit(self) -> float | None:
        """How large the experts' gates and what they multiply may be; None where their MLPs are Llama's."""
        return None

    @property
    def gate_slope(self) -> float:
        """Of the experts' activation, `gate * sigmoid(slope * gate)`."""
        return 1.0

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers that have one MLP and no router."""
        return ()

    @property
    def layer_stacks(self) -> tuple[str, ...]:
        """Which of the model's stacks of blocks each layer is in."""
        count = getattr(self, "num_layers")  # noqa: B009 (a field of what this is inherited beside)
        return tuple("dense" if layer in self.dense_layers else "layers" for layer in range(count))
