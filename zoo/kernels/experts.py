"""Which products of rows and the matrices of their groups a mixture's experts run with: what each can do, as data.

What a kernel cannot do it refuses in a sentence, before anything is traced (`Kernel.refusal`). Every adapter is called
as `zoo.models.mixtures.grouped.ragged` is.

Dimensions: `M` rows `G` groups `I` inputs `O` outputs.
"""

import importlib
import importlib.util
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transforms.cotangents import linear_rules
from zoo.models.mixtures.grouped import Product, grouped, of_groups_alone, of_matrices, ragged

BLOCKS = (512, 256, 128)  # rows, inputs and outputs of a block of megablox, of which a TPU's registers hold 128


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A way to compute products of rows with the matrices of their groups.

    Attributes:
        name: as `experts=` has it.
        product: the adapter.
        platforms: where it runs.
        dtypes: of rows and matrices.
        typed: whether results say over which devices they differ (`zoo.models.mixtures.experts.experts`).
        library: the package that must be installed beside JAX, if one must.
    """

    name: str
    product: Product
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")
    typed: bool = True
    library: str | None = None

    def refusal(self, platform: str, dtype: str) -> str | None:
        """Return why this cannot be had, in words that follow the kernel's name; None where it can."""
        if platform not in self.platforms:
            return f"runs on {' and '.join(self.platforms)}, and this is a {platform}"
        if dtype not in self.dtypes:
            return f"computes in {' or '.join(self.dtypes)}, and this run in {dtype}: set hardware.compute_dtype"
        if self.library is not None and not importlib.util.find_spec(self.library):
            return f"is not installed: pip install {self.library}"
        return None


def choose(platform: str) -> tuple[str, str]:
    """Return the kernel that suits a platform, and why."""
    if platform == "tpu":
        return "ragged", "XLA has a kernel of a TPU for it"
    return "grouped", f"of jax.lax.ragged_dot XLA makes products with every expert's matrix on a {platform}"


@of_matrices
def megablox(
    x: Float[Array, "M I"], weight: Float[Array, "G I O"], counts: Int[Array, " G"], *, interpret: bool = False
) -> Float[Array, "M O"]:
    """Return what `ragged` does by the Pallas kernel that JAX ships (https://arxiv.org/abs/2211.15841), for TPUs.

    Args:
        x: rows, sorted by group; they are filled up to a multiple of 128.
        weight: each group's matrix.
        counts: how many rows each group has. Rows that are left are zeros.
        interpret: whether the kernel is computed without a TPU, slowly.
    """
    from jax.experimental.pallas.ops.tpu.megablox import gmm  # slow to import

    rows = -(-len(x) // BLOCKS[-1]) * BLOCKS[-1]
    of_rows = next(block for block in BLOCKS if rows % block == 0)
    of_matrix = next((block for block in BLOCKS if block <= min(weight.shape[1:])), BLOCKS[-1])

    def run(x, weight, counts):
        padded = jnp.pad(x, ((0, rows - len(x)), (0, 0)))
        out = gmm(
            padded, weight, counts, x.dtype, (of_rows, of_matrix, of_matrix), None, None, False, interpret
        )  # its derivatives are told of no words
        return out[: len(x)]

    return _masked(run, x, weight, counts.astype(jnp.int32))


@of_matrices
def tokamax(x: Float[Array, "M I"], weight: Float[Array, "G I O"], counts: Int[Array, " G"]) -> Float[Array, "M O"]:
    """Return what `ragged` does by the kernels of tokamax, which chooses among its own (https://github.com/openxla/tokamax)."""
    library = importlib.import_module("tokamax")
    return _masked(library.ragged_dot, x, weight, counts.astype(jnp.int32))


def _masked(run, x, weight, counts):
    """Return `run` of rows that are a group's; kernels leave anything in the others, in gradients too."""
    return of_groups_alone(linear_rules(run)(of_groups_alone(x, counts), weight, counts), counts)


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(name="ragged", product=ragged),
        Kernel(name="grouped", product=grouped),
        Kernel(name="megablox", product=megablox, platforms=("tpu",), dtypes=("float32", "bfloat16"), typed=False),
        Kernel(name="tokamax", product=tokamax, platforms=("gpu", "tpu"), typed=False, library="tokamax"),
    )
}
