"""What mixtures of experts share: a router sends each token to a few of many MLPs. Free of JAX."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from zoo.config import not_positive
from zoo.parameters import LAYER, MLP, Row

_MOST = 4096
EXPERTS = (
    Row("layers.router", LAYER + "mlp.gate.weight", "E D -> D E", "D"),
    Row("layers.gate", LAYER + "mlp.experts.{}.gate_proj.weight", "F D -> D F", "D"),
    Row("layers.up", LAYER + "mlp.experts.{}.up_proj.weight", "F D -> D F", "D"),
    Row("layers.down", LAYER + "mlp.experts.{}.down_proj.weight", "D F -> F D", "F"),
)
TOGETHER = (  # of files that have all experts of a layer in one tensor
    EXPERTS[0],
    Row("layers.gate", LAYER + "mlp.experts.gate_up_proj", "E F D -> E D F", "D", fused="FF", part=0),
    Row("layers.up", LAYER + "mlp.experts.gate_up_proj", "E F D -> E D F", "D", fused="FF", part=1),
    Row("layers.down", LAYER + "mlp.experts.down_proj", "E D F -> E F D", "F"),
)
SHARED = (  # an expert that every token meets, and its gate
    Row("layers.shared_router", LAYER + "mlp.shared_expert_gate.weight", "G D -> D G", "D"),
    Row("layers.shared_gate", LAYER + "mlp.shared_expert.gate_proj.weight", "U D -> D U", "D"),
    Row("layers.shared_up", LAYER + "mlp.shared_expert.up_proj.weight", "U D -> D U", "D"),
    Row("layers.shared_down", LAYER + "mlp.shared_expert.down_proj.weight", "D U -> U D", "U"),
)
_SHARED_UNGATED = (
    Row("layers.shared_gate", LAYER + "mlp.shared_experts.gate_proj.weight", "U D -> D U", "D"),
    Row("layers.shared_up", LAYER + "mlp.shared_experts.up_proj.weight", "U D -> D U", "D"),
    Row("layers.shared_down", LAYER + "mlp.shared_experts.down_proj.weight", "D U -> U D", "U"),
)
CHOICE = Row("layers.router_bias", LAYER + "mlp.gate.e_score_correction_bias", "E -> E", wide=True)
# How experts are chosen, in files of those whose `sigmoid_router` is true.
SIGMOID: dict[str, tuple] = {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)}
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
    def sigmoid_router(self) -> bool:
        """Whether each expert's probability is its own, of a sigmoid; elsewhere they sum to one."""
        return False

    @property
    def chosen_by_bias(self) -> bool:
        """Whether a bias takes part in choosing experts, and not in weighing them."""
        return self.sigmoid_router

    @property
    def router_groups(self) -> int:
        """Into how many groups experts are divided."""
        return 1

    @property
    def groups_per_token(self) -> int:
        """From how many of them a token's experts may be."""
        return 1

    @property
    def weight_scale(self) -> float:
        """What the weights of experts are multiplied by."""
        return 1.0

    @property
    def weight_floor(self) -> float:
        """What is added to the sum of a token's weights before they are divided by it."""
        return 1e-20

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


@dataclass(frozen=True, kw_only=True)
class DenseFirst(MixtureLike):
    """What mixtures share whose first layers are dense, and each of whose experts has a probability of its own.
    Inherited as `MixtureLike` is.

    Attributes:
        first_dense: how many layers have one MLP and no router: the first ones.
        dense_mlp_dim: hidden width of layers without experts.
        weight_scale: multiplies the weights of experts.
    """

    balance_weight: float = 0.0
    first_dense: int = 0
    dense_mlp_dim: int = 18_432
    weight_scale: float = 1.0

    def router_problems(self) -> list[str]:
        """Say what is wrong with the numbers of the router, and of the layers without one."""
        problems = super().router_problems() + not_positive(self, ("dense_mlp_dim", "weight_scale"))
        layers: int = getattr(self, "num_layers")  # noqa: B009 (a field of what this is inherited beside)
        if not 0 <= self.first_dense < layers:
            problems.append(f"first_dense={self.first_dense} must be from 0 to {layers - 1}")
        return problems

    @property
    def sigmoid_router(self) -> bool:
        """Whether each expert's probability is its own, of a sigmoid; elsewhere they sum to one."""
        return True

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers that have one MLP and no router."""
        return tuple(range(self.first_dense))

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return super().dims | {"P": self.dense_mlp_dim}


@dataclass(frozen=True, kw_only=True)
class GroupedLike(DenseFirst):
    """What mixtures like DeepSeek's share: an expert without a gate is met by every token, and the others may be chosen
    in groups. Inherited as `MixtureLike` is.

    Attributes:
        shared_experts: experts that every token meets, as one MLP so many times as wide; 0 is none.
        router_groups: into how many groups experts are divided.
        groups_per_token: from how many of them a token's experts may be.
    """

    shared_experts: int = 1
    router_groups: int = 1
    groups_per_token: int = 1

    def router_problems(self) -> list[str]:
        """Say what is wrong with the numbers of the router, and of the layers without one."""
        problems = super().router_problems()
        if self.shared_experts < 0:
            problems.append(f"shared_experts={self.shared_experts} must be zero or more")
        if not 1 <= self.groups_per_token <= self.router_groups or self.num_experts % max(1, self.router_groups):
            problems.append(
                f"router_groups={self.router_groups} must divide num_experts={self.num_experts}, and "
                f"groups_per_token={self.groups_per_token} be from 1 to it"
            )
        return problems

    @property
    def beside(self) -> tuple[str, ...]:
        """The beginnings of the names of a model that guesses several tokens at once, behind the last layer."""
        layers: int = getattr(self, "num_layers")  # noqa: B009 (a field of what this is inherited beside)
        return tuple(f"model.layers.{layers + extra}." for extra in range(8)) if self.sigmoid_router else ()

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        dims = super().dims
        return dims | {"U": self.shared_experts * dims["F"]}

    def grouped_rows(
        self, attention: tuple[Row, ...], experts: tuple[Row, ...] = EXPERTS, choice: Row = CHOICE
    ) -> tuple[Row, ...]:
        """Return the rows of all layers, given those of attention and norms, and of experts."""
        layers: int = getattr(self, "num_layers")  # noqa: B009 (a field of what this is inherited beside)
        sparse = tuple(range(self.first_dense, layers))
        behind = (choice,) * self.chosen_by_bias + (_SHARED_UNGATED if self.shared_experts else ())
        rows = tuple(replace(row, layers=sparse) for row in (*attention, *experts, *behind))
        dense = tuple(dense_row(row, self.dense_layers) for row in (*attention, *MLP))
        return rows + (dense if self.dense_layers else ())


def dense_row(row: Row, layers: tuple[int, ...]) -> Row:
    """Return a row of the layers without experts, whose MLP has a width `P` of its own."""
    leaf = row.leaf.replace("layers.", "dense.")
    return replace(
        row, leaf=leaf, pattern=row.pattern.replace("F", "P"), fan_in=row.fan_in.replace("F", "P"), layers=layers
    )
