"""What no function may do that is tiled: what JAX refuses to type on a mesh with Explicit axes, and mutable arrays."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
from jax.extend import source_info_util

from transforms.placement import TileError

OURS = (str(Path(jax.__file__).parent), str(Path(__file__).parent))
REMEDIES = {
    "dot_general": (
        "Both operands bring the same mesh axis to the result. Gather the weight for this product first: "
        "w = jax.sharding.reshard(w, jax.P(None, None)); or pass out_sharding= to the product."
    ),
    ".at[": (
        "Pick labels by comparison, which runs on each device's share: "
        "jnp.where(jnp.arange(logits.shape[-1]) == labels[..., None], logits, 0).sum(-1); "
        "or look rows up by table.at[ids].get(out_sharding=jax.P(...))."
    ),
    "": "Bring one operand into the form of the other first: x = jax.sharding.reshard(x, jax.P(...)).",
}


def check_pure(eqn: Any) -> None:
    """Refuse mutable arrays: the loops run when their results are needed, not in the order of the program."""
    if any("RefEffect" in c.__name__ or "MutableArray" in c.__name__ for e in eqn.effects for c in type(e).__mro__):
        where = source_info_util.summarize(eqn.source_info)
        raise TileError(
            f"cannot tile `{eqn.primitive.name}` at {where}: it reads or writes a mutable array, and tiles have an "
            "order of their own. Return the new value instead, or leave it out of the tiled function."
        )


@contextlib.contextmanager
def explained() -> Generator[None]:
    """Say of an error of sharding types where it is and what to write.

    Raises:
        TileError: JAX refused to type what the function, or its derivative, does on this mesh.
    """
    try:
        yield
    except Exception as error:
        if type(error).__name__ not in ("ShardingTypeError", "DuplicateSpecError"):  # which have no public name
            raise
        remedy = next(text for part, text in REMEDIES.items() if part in str(error))
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(OURS)]
        where = f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else "its derivative"
        raise TileError(f"cannot run on this mesh, at {where}: {error}\n  {remedy}") from error
