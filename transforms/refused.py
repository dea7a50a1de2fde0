"""What JAX refuses to type on a mesh with Explicit axes, and the line to write instead."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Generator
from pathlib import Path

import jax

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
