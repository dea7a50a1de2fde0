"""What a run measures and leaves behind."""

from dataclasses import dataclass

from experiments.configs.fields import option, positive, refuse


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How the held-out documents are used; they are always measured before the first and after the last step."""

    every: int | None = option(None, "also every so many steps (0: never)")
    batches: int | None = option(None, "batches per evaluation")

    def __post_init__(self):
        positive(self, "eval.", "batches")
        if self.every is not None and self.every < 0:
            raise refuse("eval.every", self.every, "give a number of steps, or 0 for never")


@dataclass(frozen=True, kw_only=True)
class Save:
    """What a run leaves beside its metrics."""

    final: bool = option(False, "write the trained weights as a Hugging Face folder")
    tensorboard: bool = option(False, "also write TensorBoard's event files (needs the extra `tb`)")
    wandb: bool = option(False, "also log to Weights & Biases (needs the extra `wandb`)")
