"""LoRA (https://arxiv.org/abs/2106.09685): a frozen matrix W acts as `x W + scale (x A) B`, and A and B alone learn.

`attach` puts a `LowRank` where a model has a matrix; everything else about the model stays as it is. Stacked layers
have stacked A and B, and are scanned as before. `merge` turns each `LowRank` into one matrix again.

Dimensions: as in `zoo.parameters`, and `R` rank. A leaf of letters `L D N H` has A `L D R` and B `L R N H`.
"""

import difflib
import fnmatch
import math
import operator
from collections.abc import Iterator, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from transforms.sharding import einsum
from zoo.config import Config, rows
from zoo.parameters import Row
from zoo.quantised import AbstractMatrix, Quantised, product, whole

# Matrices of attention and of MLPs; of latent attention (DeepSeek), the delta rule (Qwen), state spaces (Granite), and
# convolutions (LFM).
USUAL = ("q", "k", "v", "o", "gate", "up", "down")
USUAL += ("q_down", "kv_down", "kv", "qkvz", "qkv", "z", "xbc", "before", "behind", "value")


class LowRank(AbstractMatrix):
    """A matrix and what is added to it. Reads like the matrix where a model asks for dtype, shape or a cast.

    The matrix may be `Quantised`: then it is QLoRA (https://arxiv.org/abs/2305.14314).

    With a `magnitude`, one number per output, it is DoRA (https://arxiv.org/abs/2402.09353): the sum's weights of each
    output are brought to that length. There the sum is formed, a layer at a time, to measure it.
    """

    base: Float[Array, "..."] | Quantised
    a: Float[Array, "..."]
    b: Float[Array, "..."]
    scale: float = eqx.field(static=True)
    magnitude: Float[Array, "..."] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape."""
        return self.base.shape

    @property
    def ndim(self) -> int:
        """How many dimensions the matrix has."""
        return self.base.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """The matrix's dtype; A and B may be wider."""
        return self.base.dtype

    def astype(self, dtype: DTypeLike) -> "LowRank":
        """Return all three parts in one dtype."""
        cast = lambda part: part.astype(dtype)
        return jax.tree.map(cast, self, is_leaf=lambda part: isinstance(part, Quantised))

    def einsum(self, pattern: str, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return `jnp.einsum(pattern, x, W)` with the addition, in a dtype; W itself is not formed (but see above)."""
        inputs, output = pattern.split("->")
        left, right = inputs.split(",")
        summed = "".join(letter for letter in right if letter not in output)
        lead = "".join(letter for letter in right if letter in left and letter in output)
        made = "".join(letter for letter in right if letter not in left)
        middle = output.translate({ord(letter): None for letter in made}) + "R"
        a, b = self.columns(len(lead))
        low = einsum(f"{left},{lead}{summed}R->{middle}", x, a)
        added = einsum(f"{middle},{lead}R{made}->{output}", low, b, dtype)
        total = product(pattern, x, self.base, dtype) + added * self.scale
        if self.magnitude is None:
            return total
        summed_up = whole(self.base) + einsum(f"{lead}{summed}R,{lead}R{made}->{right}", self.a, self.b) * self.scale
        length = jax.lax.stop_gradient(_length(summed_up, [right.index(letter) for letter in summed]))
        return total * (self.magnitude / length.reshape(self.magnitude.shape)).astype(total.dtype)

    def columns(self, lead: int) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Return A and B, of two columns at least, where so many dimensions tell matrices apart.

        CPUs round the last rows of a product with a vector otherwise: a row's bits would depend on its place.
        """
        if self.a.shape[-1] > 1:
            return self.a, self.b
        pad = lambda x, dim: jnp.pad(x, [(0, int(i == dim)) for i in range(x.ndim)])
        return pad(self.a, self.a.ndim - 1), pad(self.b, lead)

    def merged(self, row: Row) -> Float[Array, "..."]:
        """Return the one matrix that does the same, in its own dtype; the sum is formed in float32 or wider."""
        a, b = letters_of(row)
        pattern = f"{a},{b}->{''.join(row.letters)}"
        wide = jnp.promote_types(self.base.dtype, jnp.float32)
        added = jnp.einsum(pattern, self.a.astype(wide), self.b.astype(wide))
        total = whole(self.base).astype(wide) + added * self.scale
        if self.magnitude is not None:
            length = _length(total, [row.letters.index(letter) for letter in row.fan_in])
            total = total * (self.magnitude.reshape(length.shape) / length)
        return total.astype(self.base.dtype)


def _length(matrix: Float[Array, "..."], dims: Sequence[int]) -> Float[Array, "..."]:
    """Return how long the weights of each output are, with a 1 where the inputs were."""
    wide = matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32))
    return jnp.sqrt(jnp.sum(wide * wide, axis=tuple(dims), keepdims=True))


def attach(
    model: PyTree,
    targets: Sequence[str],
    *,
    rank: int,
    alpha: float,
    key: PRNGKeyArray,
    dtype: DTypeLike = jnp.float32,
) -> PyTree:
    """Return the model with a `LowRank` in place of every matrix that a pattern names. It computes what it did: B is 0.

    Args:
        model: any model of the zoo.
        targets: names or patterns (`q`, `layers.*`, `*_proj`) of matrices, ours, or where those match none, Hugging
            Face's.
        rank: columns of A.
        alpha: the addition is scaled by `alpha / rank`.
        key: of A, which is normal with variance 1 / fan-in.
        dtype: of A and B. Their steps are small, so keep it float32 where the model is in bfloat16.

    Raises:
        ValueError: the rank is not positive, or patterns match no matrix: all that there are are listed.
    """
    if rank < 1:
        raise ValueError(f"LoRA's rank={rank} must be at least 1.")
    found = match(model.config, targets)
    dims = model.config.dims
    parts = []
    for row, leaf_key in zip(found, jax.random.split(key, len(found)), strict=True):
        matrix = _leaf(model, row)
        a_shape, b_shape = _shapes(row, matrix.shape, rank)
        std = math.prod(dims[letter] for letter in row.fan_in) ** -0.5
        a = std * jax.random.normal(leaf_key, a_shape, dtype)
        parts.append(LowRank(matrix, a, jnp.zeros(b_shape, dtype), alpha / rank))
    return put(model, found, parts)


def merge(model: PyTree) -> PyTree:
    """Return the model with every `LowRank` merged into one matrix; a model without any as it is."""
    found = [row for row, _ in adapted(model)]
    return put(model, found, [_merged(_leaf(model, row), row) for row in found])


_merged = jax.jit(lambda part, row: part.merged(row), static_argnums=1)


def detach(model: PyTree) -> PyTree:
    """Return the model without its additions: what it was before `attach`."""
    found = list(adapted(model))
    return put(model, [row for row, _ in found], [part.base for _, part in found])


def adapted(model: PyTree) -> Iterator[tuple[Row, LowRank]]:
    """Yield the row and the `LowRank` of every matrix that has one."""
    for row in rows(model.config):
        if isinstance(part := _leaf(model, row), LowRank):
            yield row, part


def trainable(model: PyTree) -> PyTree:
    """Return a tree of bools like the model: True for what every `LowRank` adds, False for all else."""

    def mark(node):
        if not isinstance(node, LowRank):
            return False
        return eqx.tree_at(lambda part: part.base, jax.tree.map(lambda _: True, node), False)

    return jax.tree.map(mark, model, is_leaf=lambda node: isinstance(node, LowRank))


def matrices(model: PyTree) -> Iterator[tuple[Row, Float[Array, "..."]]]:
    """Yield the row and the whole of every matrix that can be adapted: all but embeddings, which are looked up."""
    for row in _matrices(model.config):
        part = _leaf(model, row)
        yield row, part.base if isinstance(part, LowRank) else part


def put(model: PyTree, found: Sequence[Row], parts: Sequence) -> PyTree:
    """Return the model with other leaves at some rows."""
    if not found:
        return model
    return eqx.tree_at(lambda m: [_leaf(m, row) for row in found], model, list(parts))


def usual(config: Config) -> list[str]:
    """Return the names of a model's matrices of attention and of MLPs, which are `targets` of `attach`."""
    known = {_names(row)[1] for row in _matrices(config)}
    return [name for name in USUAL if name in known]


def match(config: Config, targets: Sequence[str]) -> list[Row]:
    """Return the rows of the matrices that patterns name, in the model's order.

    Raises:
        ValueError: patterns match no matrix: all that there are are listed.
    """
    known = {row: _names(row) for row in _matrices(config)}
    hits = {target: _hits(target, known) for target in targets}
    missed = [target for target, found in hits.items() if not found]
    if missed or not targets:
        words = [name for names in known.values() for name in (*names[:2], names[3])]
        close = [near for one in missed for near in difflib.get_close_matches(one, words, n=1)]
        hint = f" Did you mean `{close[0]}`?" if close else ""
        listed = "\n".join(f"  {row.leaf} ({names[2]})" for row, names in known.items())
        what = ", ".join(f"`{one}`" for one in missed) or "an empty list of targets"
        raise ValueError(f"LoRA cannot be attached: {what} matches no matrix.{hint} This model has:\n{listed}")
    return [row for row in known if any(row in found for found in hits.values())]


def _matrices(config: Config) -> list[Row]:
    return [row for row in rows(config) if row.fan_in and not row.looked_up]


def _names(row: Row) -> tuple[str, ...]:
    """What a matrix may be called: our path and its end, Hugging Face's module and its end."""
    module = row.tensor.removesuffix(".weight")
    return row.leaf, row.leaf.rpartition(".")[2], module, module.rpartition(".")[2]


def _hits(target: str, known: dict[Row, tuple[str, ...]]) -> list[Row]:
    """Return the rows that a pattern names by our names, or else by theirs: a `gate` is an MLP's, and no router."""
    hit = lambda names: any(fnmatch.fnmatchcase(name, target) for name in names)
    return [row for row, names in known.items() if hit(names[:2])] or [row for row in known if hit(known[row][2:])]


def letters_of(row: Row) -> tuple[str, str]:
    """Return the letters of A and B of a matrix: `("LDR", "LRNH")`."""
    lead = "".join(row.lead)
    made = "".join(letter for letter in row.letters[len(lead) :] if letter not in row.fan_in)
    return f"{lead}{row.fan_in}R", f"{lead}R{made}"


def _shapes(row: Row, shape: Sequence[int], rank: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of A and B of a matrix."""
    sizes = {**dict(zip(row.letters, shape, strict=True)), "R": rank}
    return (tuple(sizes[letter] for letter in letters) for letters in letters_of(row))


def _leaf(model: PyTree, row: Row):
    return operator.attrgetter(row.leaf)(model)
