"""What mixtures of experts share: a router sends each token to a few of many MLPs. Free of JAX."""

import math
from dataclasses import dataclass
from typing import ClassVar

_MOST = 4096
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

    # These two are fields of the families that have them.
    @property
    def normalise_weights(self) -> bool:
        """Whether the weights of the chosen experts sum to one."""
        return True

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers that have one MLP and no router."""
        return ()
