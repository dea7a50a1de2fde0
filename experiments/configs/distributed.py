"""The processes that a run is made of."""

from dataclasses import dataclass

from experiments.configs.fields import option, positive, refuse


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """Which other processes a run is carried out with; by default none."""

    auto: bool = option(False, "join the processes that SLURM, Open MPI, a TPU pod or GKE has started")
    coordinator: str | None = option(None, "HOST:PORT of process 0, where nothing of that kind is there")
    processes: int | None = option(None, "how many processes there are (with distributed.coordinator)")
    process: int | None = option(None, "which of them this is, from 0 (with distributed.coordinator)")
    timeout: int = option(15, "seconds after which a process that is not heard of counts as dead")

    def __post_init__(self):
        positive(self, "distributed.", "processes", "timeout")
        given = {"coordinator": self.coordinator, "processes": self.processes, "process": self.process}
        missing = [f"distributed.{name}=..." for name, value in given.items() if value is None]
        if 0 < len(missing) < 3:
            first = next(name for name, value in given.items() if value is not None)
            raise refuse(f"distributed.{first}", given[first], f"{' and '.join(missing)} must be given as well")
        if not missing and self.auto:
            raise refuse("distributed.auto", "true", "distributed.coordinator says already which processes there are")
        if self.processes is not None and self.process is not None and not 0 <= self.process < self.processes:
            raise refuse("distributed.process", self.process, f"there are {self.processes}, counted from 0")

    @property
    def wanted(self) -> bool:
        """Whether there are other processes."""
        return self.auto or self.coordinator is not None
