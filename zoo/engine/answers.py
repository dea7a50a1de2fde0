"""What is asked of an engine, and what it answers, as its callers see it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from zoo.engine.sampling import Guide, Sampling
from zoo.engine.scheduler import Text


@dataclass(frozen=True)
class Token:
    """An id that was picked, and its log-probabilities: as the model has it, and as it was drawn (`Picked`)."""

    id: int
    logprob: float
    drawn: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Scores:
    """Of every id of a text after the first: its log-probability, the entropy of what could have stood there in nats,
    how many ids were likelier, and the likeliest `[.., top]`; NaN and -1 before the first that is scored."""

    logprobs: np.ndarray
    entropy: np.ndarray
    rank: np.ndarray
    top: np.ndarray
    top_logprobs: np.ndarray

    @classmethod
    def blank(cls, count: int, top: int) -> "Scores":
        """Return the scores of so many ids, none of which is known."""
        nan, none = np.full((2, count), np.nan, np.float32), np.full(count, -1)
        return cls(*nan, none, np.full((count, top), -1), np.full((count, top), np.nan, np.float32))


@dataclass(eq=False)
class Answer:
    """What becomes of a text.

    Attributes:
        text: as the scheduler has it.
        sampling: how it goes on.
        guide: what allows its ids.
        tokens: what followed so far, a stop that ends it included.
        finish: why it has ended: `stop`, `length`, `time`, `cancelled` or `error`; None while it has not.
        error: what went wrong.
        scores: of a text that is scored.
        vector: of a text that is embedded, the sum of its hidden states, or the last one.
    """

    text: Text
    sampling: Sampling
    stop: frozenset[int] = frozenset()
    watch: Callable[[int], bool] | None = None
    top: int = 0
    drafts: int = 0
    guide: Guide | None = None
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    scores: Scores | None = None
    vector: np.ndarray | None = None
    pooling: str = "mean"
    summed: int = 0  # positions that `vector` holds

    @property
    def scored(self) -> list[Token]:
        """The ids of a text that is scored, after its first; NaN before those that are."""
        assert self.scores is not None
        logprobs, top = self.scores.logprobs.tolist(), zip(self.scores.top, self.scores.top_logprobs, strict=True)
        likeliest = [tuple(zip(ids.tolist(), found.tolist(), strict=True)) for ids, found in top]
        return [Token(*one) for one in zip(self.text.ids[1:], logprobs, logprobs, likeliest, strict=True)]

    @property
    def embedding(self) -> np.ndarray:
        """The hidden state of a text as one vector `[D]`, in float32."""
        assert self.vector is not None
        return np.asarray(self.vector / (self.summed if self.pooling == "mean" else 1), np.float32)
