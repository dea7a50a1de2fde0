"""The mesh of devices that a run is spread over."""

import math
from dataclasses import dataclass

from experiments.configs.fields import option, refuse


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the mesh's axes, which multiply to the number of devices; all 1 is one device and no mesh."""

    data: int | None = option(
        None, "devices that share the batch (and under mesh.fsdp parameters); -1: the rest", auto=True
    )
    model: int = option(1, "devices that share heads, MLPs and the vocabulary; -1: the rest")
    context: int = option(1, "devices that share each sequence; -1: the rest")
    expert: int = option(1, "devices that share a mixture's experts, and the batch; -1: the rest")
    fsdp: str = option("D", "which dim of parameters mesh.data cuts: D embed, V vocabulary (else D), none: copies")

    def __post_init__(self):
        for name, size in self.sizes.items():
            if size is not None and size < 1 and size != -1:
                raise refuse(f"mesh.{name}", size, "give a number of devices, or -1 for those that the others leave")
        if self.fsdp not in ("D", "V", "none"):
            raise refuse("mesh.fsdp", self.fsdp, "choose D, V or none")

    @property
    def sizes(self) -> dict[str, int | None]:
        """The size of every axis by its name."""
        return {"data": self.data, "expert": self.expert, "context": self.context, "model": self.model}

    @property
    def devices(self) -> int:
        """How many devices there are, once every size is known."""
        return math.prod(size or 1 for size in self.sizes.values())
