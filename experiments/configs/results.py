"""What a run measures and leaves behind."""

from dataclasses import dataclass

from experiments.configs.fields import POSITIVE, choice, option, refuse


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How the held-out documents are used; they are always measured before the first and after the last step."""

    every: int | None = option(None, "also every so many steps (0: never)", auto=True)
    batches: int | None = option(None, "batches per evaluation", POSITIVE, auto=True)

    def __post_init__(self):
        if self.every is not None and self.every < 0:
            raise refuse("eval.every", self.every, "give a number of steps, or 0 for never")


@dataclass(frozen=True, kw_only=True)
class Save:
    """What a run leaves beside its metrics."""

    final: bool = option(False, "write the trained weights as a Hugging Face folder")
    tensorboard: bool = option(False, "also write TensorBoard's event files (needs the extra `tb`)")
    wandb: bool = option(False, "also log to Weights & Biases (needs the extra `wandb`)")


@choice(
    "checkpoint",
    "auto",
    "Every ten minutes, after the last step where that is small, and when the run is told to stop.",
)
@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When everything that a step changes is written to the run's directory, and how much of it stays there."""

    every: int | None = option(None, "steps between checkpoints (default: by the clock)", POSITIVE)
    minutes: float | None = option(10.0, "minutes between checkpoints, where `every` is not given", POSITIVE)
    last: bool | None = option(None, "also after the last step (default: where it takes less than 1 GiB)", auto=True)
    keep: int = option(2, "how many of the newest stay", POSITIVE)
    keep_every: int | None = option(None, "those of every so many steps stay as well", POSITIVE)
    verify: bool = option(True, "hash every file, and check all before a run goes on: one more reading of each")
    background: bool | None = option(None, "train on while one is written (default: where memory allows)")

    @property
    def wanted(self) -> bool:
        """Whether there are checkpoints at all."""
        return self.every is not None or self.minutes is not None or self.last is True


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Which steps are traced by JAX's profiler."""

    steps: str = option("none", "trace these steps: FIRST:LAST, such as 10:13")

    def __post_init__(self):
        if self.steps != "none" and (self.span is None or not 0 < self.span[0] <= self.span[1]):
            raise refuse("profile.steps", self.steps, "give the first and the last step, such as 10:13")

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the last step that are traced."""
        first, colon, last = self.steps.partition(":")
        return (int(first), int(last)) if colon and first.isdecimal() and last.isdecimal() else None
