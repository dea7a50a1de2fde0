"""What a run minimises."""

# ruff: noqa: RUF009 (`option` makes a field, as `dataclasses.field` does)
import dataclasses
from dataclasses import dataclass
from typing import Any

from experiments.configs.fields import FUNCTION, NOT_NEGATIVE, POSITIVE, SHARE, choice, option, refuse


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What every objective has in common: nothing."""


@choice("objective", "pretrain")
@dataclass(frozen=True, kw_only=True)
class Pretrain(Objective):
    """Cross-entropy of every token, with a z-loss and label smoothing where these are given."""

    z_loss: float = option(
        0.0, "weight of the squared log of the softmax's denominator (https://arxiv.org/abs/2204.02311)", NOT_NEGATIVE
    )
    label_smoothing: float = option(0.0, "share of the target that is spread over the vocabulary", SHARE)


@choice("objective", "sft")
@dataclass(frozen=True, kw_only=True)
class Sft(Pretrain):
    """Cross-entropy of what the assistant says: data=chat."""


@dataclass(frozen=True, kw_only=True)
class Paired(Objective):
    """What compares the two answers of a preference."""


@dataclass(frozen=True, kw_only=True)
class Referenced(Paired):
    """What also compares the model with a frozen one: that at `reference`, else what the run starts from."""

    beta: float = option(0.1, "how much an answer's log-probability counts against the reference's", POSITIVE)
    reference: str | None = option(None, "folder of the frozen model (default: what the run starts from)", path=True)


@choice("objective", "dpo")
@dataclass(frozen=True, kw_only=True)
class Dpo(Referenced):
    """Direct preference optimisation against a frozen reference: data=preference.

    https://arxiv.org/abs/2305.18290
    """

    label_smoothing: float = option(0.0, "share of the preferences that are taken to be the wrong way round", SHARE)


@choice("objective", "ipo")
@dataclass(frozen=True, kw_only=True)
class Ipo(Referenced):
    """Identity preference optimisation against a frozen reference: data=preference.

    https://arxiv.org/abs/2310.12036
    """


@choice("objective", "simpo")
@dataclass(frozen=True, kw_only=True)
class Simpo(Paired):
    """Preferences without a reference, by mean log-probability: data=preference.

    https://arxiv.org/abs/2405.14734
    """

    beta: float = option(2.0, "scales the mean log-probabilities", POSITIVE)
    margin: float = option(1.0, "by how much the chosen answer is to win")


@choice("objective", "orpo")
@dataclass(frozen=True, kw_only=True)
class Orpo(Paired):
    """Preferences without a reference, by odds, with cross-entropy: data=preference.

    https://arxiv.org/abs/2403.07691
    """

    beta: float = option(0.1, "weight of the odds", POSITIVE)


@choice("objective", "distill")
@dataclass(frozen=True, kw_only=True)
class Distill(Objective):
    """A teacher of the same vocabulary: objective=distill objective.teacher=FOLDER."""

    teacher: str = option(dataclasses.MISSING, "folder of the teacher, of the same vocabulary", path=True)
    direction: str = option("forward", "forward: KL(teacher, student); reverse: KL(student, teacher)")
    temperature: float = option(1.0, "divides both models' logits", POSITIVE)
    weight: float = option(1.0, "share of the distance; the rest is cross-entropy")

    def __post_init__(self):
        if self.direction not in ("forward", "reverse"):
            raise refuse("objective.direction", self.direction, "choose forward or reverse")
        if not 0 <= self.weight <= 1:
            raise refuse("objective.weight", self.weight, "it must lie between 0 and 1")


@choice("objective", "custom")
@dataclass(frozen=True, kw_only=True)
class Custom(Objective):
    """Your own loss: objective=MODULE:FUNCTION, of logits (or hidden, head), labels, mask; of pairs chosen_logps ...

    With data=preference also of rejected_logps, ref_chosen_logps, ref_rejected_logps, chosen_tokens, rejected_tokens.
    """

    fn: str = option(
        dataclasses.MISSING, "MODULE:FUNCTION or FILE.py:FUNCTION of logits (or hidden, head) and labels", FUNCTION
    )
    kwargs: dict[str, Any] = option({}, "its own arguments: objective.kwargs.NAME=VALUE")
    reference: str | None = option(
        None, "folder of the model that ref_chosen_logps are of (default: what the run starts from)", path=True
    )
