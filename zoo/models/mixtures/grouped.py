"""Products of rows with the matrix of their group: grouped matrix products, by XLA or a block of rows at a time.

XLA has a kernel for `jax.lax.ragged_dot` on TPUs, and none for the gradients of its matrices. Of these, and elsewhere
of all, it makes the products of all rows with every group's matrix, of which a mask leaves one: `G` times the FLOPs, on
`G` copies of the rows. Here rows, which are sorted by group, are cut into blocks that begin where groups do (as
MegaBlocks pads groups to blocks, https://arxiv.org/abs/2211.15841), and a scan multiplies each block with the one
matrix that is its own. A group's last block reads on into the next group's rows, of which nothing is written. A device
that holds some of the groups has the rows of all, and its loop ends behind the blocks of its own (`divided`).

`ragged` and `grouped` are differentiated; `stepped` is for few rows of which nobody asks for gradients, and takes as
long as there are blocks of them.

Dimensions: `M` rows `G` groups `I` inputs `O` outputs `N` blocks `K` rows of a block.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import dynamic_slice_in_dim
from jaxtyping import Array, Float, Int

from transforms.cotangents import linear_rules
from transforms.sharding import vary_alike
from zoo.models.layers import Widened, linear
from zoo.quantised import AbstractMatrix, Quantised, whole

Matrices = Float[Array, "G I O"] | AbstractMatrix
Product = Callable[[Float[Array, "M I"], Matrices, Int[Array, " G"]], Float[Array, "M O"]]

LEAST, MOST = 16, 512  # rows of a block
FEW = 8  # rows of a block where rows are few
SLACK = 4  # how many times as many rows there are as those that groups' last blocks could read too many
TURN = 8  # blocks, at most, after which a loop asks whether there are more: a GPU's host waits for the answer


def of_groups_alone(rows: Float[Array, "M D"], counts: Int[Array, " G"]) -> Float[Array, "M D"]:
    """Return rows with zeros beyond the groups, where a kernel may leave anything."""
    return jnp.where(jnp.arange(len(rows))[:, None] < counts.sum(), rows, 0)


def of_matrices(dot: Callable) -> Product:
    """Return a product with matrices of whatever kind, by one with arrays. A backward pass makes them again."""

    @functools.wraps(dot)
    def product(x: Float[Array, "M I"], weight: Matrices, counts: Int[Array, " G"], **how: Any) -> Float[Array, "M O"]:
        if isinstance(weight, Widened):
            return dot(x.astype(weight.array.dtype), weight.array, counts, **how).astype(x.dtype)
        multiply = lambda x, weight: dot(x, whole(weight), counts, **how)
        return (jax.checkpoint(multiply, prevent_cse=False) if isinstance(weight, Quantised) else multiply)(x, weight)

    return product


def divided(product: Callable, devices: int) -> Product:
    """Return a product that is told among how many devices the groups of all rows are divided: most rows are left.

    The loops of `grouped`, and those for `ragged`'s gradients of matrices, then take as long as there are blocks of
    rows that are a group's, however many those are. They have no second derivatives in reverse mode.
    """
    return functools.partial(product, devices=devices) if product in (grouped, ragged) else product


@of_matrices
def ragged(
    x: Float[Array, "M I"], weight: Float[Array, "G I O"], counts: Int[Array, " G"], *, devices: int = 1
) -> Float[Array, "M O"]:
    """Return `jax.lax.ragged_dot(x, weight, counts)`, for which XLA has a kernel of a TPU.

    Rows that are left may be anything. Gradients of matrices are summed as `grouped` sums them: XLA multiplies all rows
    for each of these, there too. There is no forward-mode derivative.
    """
    return _grouped(x, weight, counts, devices, True)


def stepped(x: Float[Array, "M I"], weight: Matrices, counts: Int[Array, " G"]) -> Float[Array, "M O"]:
    """Return what `ragged` does, in one step for each block that has rows: of few bits, one matrix at a time is made.

    What a row makes does not depend on the others: every step is one product of `FEW` rows. It has no derivative.
    """
    group_N, first_N, _ = _blocks(counts, len(x), FEW)
    x, counts, *leaves = vary_alike(x, counts, *jax.tree.leaves(weight))
    weight = jax.tree.unflatten(jax.tree.structure(weight), leaves)
    padded = jnp.concatenate([x, _zeros(x, FEW, x.shape[1])])
    out = _zeros(x, len(padded), weight.shape[2])

    def step(number, out):
        rows = dynamic_slice_in_dim(padded, first_N[number], FEW)
        made = linear("mi,io->mo", rows, jax.tree.map(lambda leaf: leaf[group_N[number]], weight))
        return jax.lax.dynamic_update_slice_in_dim(out, made, first_N[number], 0)

    with jax.named_scope("experts"):
        out = jax.lax.fori_loop(0, (-(-counts // FEW)).sum(), step, out)[: len(x)]
    return of_groups_alone(out, counts)


@of_matrices
def grouped(
    x: Float[Array, "M I"], weight: Float[Array, "G I O"], counts: Int[Array, " G"], *, devices: int = 1
) -> Float[Array, "M O"]:
    """Return what `ragged` does, with about `2 M I O` FLOPs; it has no forward-mode derivative.

    Args:
        x: rows, sorted by group.
        weight: each group's matrix.
        counts: how many rows each group has. Rows that are left are zeros.
        devices: as `divided` tells it.
    """
    return _grouped(x, weight, counts, devices, False)


def _grouped(x, weight, counts, devices, kernel):
    """Return a product by XLA's kernel or in blocks; of few rows, what XLA makes of all of it."""
    rows, groups = len(x), len(weight)
    block = min(max(1 << (rows // (SLACK * groups)).bit_length() >> 1, LEAST), MOST)
    if 2 * (rows + groups * block) > rows * groups:
        return jax.lax.ragged_dot(x, weight, counts)
    product = linear_rules(lambda *args: _product(*args, block, devices, kernel))
    return product(*vary_alike(x, weight, counts))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _product(x, weight, counts, block, devices, kernel):
    return _of_rows(x, weight, counts, block, devices, kernel, 1)


def _forward(x, weight, counts, *how):
    return _product(x, weight, counts, *how), (x, weight, counts)


def _backward(block, devices, kernel, kept, slope):
    x, weight, counts = kept
    of_weight = _of_groups(x, slope, weight, counts, block, devices)
    return _of_rows(slope, weight, counts, block, devices, kernel, 2), of_weight, None


_product.defvjp(_forward, _backward)


def _of_rows(x, weight, counts, block, devices, kernel, summed):
    """Return the product of each row with its group's matrix, of which a dimension is summed over."""
    if kernel:
        dot = ((1,), (summed,)), ((), ())
        numbers = jax.lax.RaggedDotDimensionNumbers(dot, lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
        return jax.lax.ragged_dot_general(x, weight, counts, numbers)

    def step(out, at):
        group, first, own = at
        rows = dynamic_slice_in_dim(x, first, block)
        made = jax.lax.dot_general(rows, weight[group], (((1,), (summed - 1,)), ((), ())))
        made = jnp.where(_own(len(x), first, own, block), made, dynamic_slice_in_dim(out, first, block))
        return jax.lax.dynamic_update_slice_in_dim(out, made, first, 0), None

    return _scan(step, _zeros(x, len(x), weight.shape[3 - summed]), counts, len(x), block, devices)


def _of_groups(x, slope, weight, counts, block, devices):
    """Return the gradient of each group's matrix, summed in float32 or wider and written after each of its blocks."""
    wide = jnp.promote_types(weight.dtype, jnp.float32)

    def step(carry, at):
        made, total, before = carry
        group, first, own = at
        mine = _own(len(x), first, own, block)
        blocks = (dynamic_slice_in_dim(array, first, block) for array in (x, slope))
        rows, theirs = (jnp.where(mine, array, 0) for array in blocks)  # 0 * nan is no 0
        added = jax.lax.dot_general(rows, theirs, (((0,), (0,)), ((), ())), preferred_element_type=wide)
        total = jnp.where(group == before, total, 0) + added
        made = jax.lax.dynamic_update_index_in_dim(made, total.astype(made.dtype), group, 0)
        return (made, total, group), None

    begin = _zeros(weight, *weight.shape), _zeros(weight, *weight.shape[1:]).astype(wide), _zeros(counts)
    return _scan(step, begin, counts, len(x), block, devices)[0]


def _scan(step, carry, counts, rows, block, devices):
    """Return what a scan over blocks carries to its end; where devices divide the groups, over those that have rows."""
    if devices == 1:
        return jax.lax.scan(step, carry, _blocks(counts, rows, block))[0]
    expected = -(-rows // (devices * block)) + len(counts) // 2  # half of a group's last block is of no use
    turn = min(TURN, -(-expected // (2 * TURN)))  # of the last turn some may be of no rows
    blocks, needed = _blocks(counts, rows, block, turn), (-(-counts // block)).sum(dtype=counts.dtype)

    def take(number, carry):
        here = tuple(dynamic_slice_in_dim(array, number * turn, turn) for array in blocks)
        return jax.lax.scan(step, carry, here)[0]

    with jax.named_scope(f"turns_{-(-expected // turn)}"):  # of even routing, for who counts what the text tells
        return jax.lax.fori_loop(0, -(-needed // turn), take, carry)


def _own(rows, first, own, block):
    """Return which rows of a slice that begins at `first`, or earlier where rows end, are the `own` from there on."""
    behind = jnp.arange(block)[:, None] + jnp.minimum(first, rows - block) - first
    return (behind >= 0) & (behind < own)


def _blocks(counts: Int[Array, " G"], rows: int, block: int, turn: int = 1) -> tuple[Int[Array, " N"], ...]:
    """Return of each block its group, its first row, and how many rows are its group's: of one too many, none.

    They are as many as there may be, and others until whole turns are full.
    """
    most = (rows + len(counts) * (block - 1)) // block
    number = jnp.arange(-(-most // turn) * turn, dtype=counts.dtype)
    needed = -(-counts // block)
    ends, begins = jnp.cumsum(needed), jnp.cumsum(counts) - counts
    group = jnp.minimum((number[:, None] >= ends).sum(1, dtype=counts.dtype), len(counts) - 1)
    first = begins[group] + (number - (ends - needed)[group]) * block
    there = number < ends[-1]
    own = jnp.where(there, jnp.clip(begins[group] + counts[group] - first, 0, block), 0)
    return group, jnp.where(there, first, rows), own


def _zeros(like, *shape):
    """Return zeros that differ between devices as an array does, and are of its dtype."""
    return vary_alike(jnp.zeros(shape, like.dtype), like)[0]
