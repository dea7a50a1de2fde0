"""Muon (https://arxiv.org/abs/2502.16982) of layers on a mesh, each matrix whole on one of its devices.

Newton-Schulz iterations multiply whole matrices, which a mesh cuts over their inputs and outputs. Devices trade before
them, pieces of all matrices for all of some, and trade back after: no matrix is gathered where it is not needed, and no
product is made twice. Where layers do not divide among devices, matrices of zeros make up the difference.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers, MuonState, scale_by_muon

from transforms import layout
from transforms.sharding import Axes, spec_of


class Matrices:
    """The dimensions of an array of matrices, [L, .., inputs and outputs ..].

    Attributes:
        letters: one for each.
        lead: how many tell matrices apart.
        inputs: the letters of those that every output sums.
        axes: which axes of the mesh that is set, if one is, cut which letter.
    """

    def __init__(self, letters: str, lead: int, inputs: str, axes: Axes):
        self.letters, self.lead, self.inputs, self.axes = letters, lead, inputs, axes

    @property
    def dims(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The numbers of inputs and of outputs."""
        inner = range(self.lead, len(self.letters))
        inputs = tuple(dim for dim in inner if self.letters[dim] in self.inputs)
        return inputs, tuple(dim for dim in inner if dim not in inputs)


def orthogonal(
    kinds: Callable[[Any], Any], *, beta: float, steps: int, rms: float | None
) -> optax.GradientTransformation:
    """Return the steps that Muon makes of gradients of matrices, before weight decay and learning rate.

    Args:
        kinds: gives a tree of gradients' `Matrices`.
        beta: decay of the momentum.
        steps: Newton-Schulz iterations.
        rms: root mean square of a step, as AdamW's; None: by the matrix's shape.
    """
    numbers = lambda updates: jax.tree.map(lambda kind: MuonDimensionNumbers(*kind.dims), kinds(updates))
    inner = scale_by_muon(beta=beta, ns_steps=steps, weight_dimension_numbers=numbers)

    def scaled(update, kind):
        inputs, outputs = (math.prod(update.shape[dim] for dim in dims) for dims in kind.dims)
        return update * (max(1, outputs / inputs) ** 0.5 if rms is None else max(inputs, outputs) ** 0.5 * rms)

    def update(updates, state, params=None):
        del params
        made, state = whole(inner.update, kinds(updates))(updates, state)
        return jax.tree.map(scaled, made, kinds(updates)), state

    return optax.GradientTransformation(inner.init, update)


def whole(update: Callable[[Any, MuonState], Any], kinds: Any) -> Callable[[Any, MuonState], Any]:
    """Return `update`, of gradients and state, to which the matrices that a mesh spreads are whole.

    Args:
        update: does the same with each matrix, whichever others there are.
        kinds: the gradients' `Matrices`.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return update

    def run(updates, state):
        trades = jax.tree.map(_Trade, updates, kinds)
        there = lambda tree: jax.tree.map(lambda leaf, trade: trade.there(leaf), tree, trades)
        back = lambda tree: jax.tree.map(lambda leaf, trade: trade.back(leaf), tree, trades)
        lies = jax.tree.map(lambda trade: trade.way[-1], trades)
        specs = lies, MuonState(count=PartitionSpec(), mu=lies, ns_coeffs=PartitionSpec())  # ty: ignore
        each = jax.shard_map(update, in_specs=specs, out_specs=specs)
        updates, state = each(there(updates), state._replace(mu=there(state.mu)))
        return back(updates), state._replace(mu=back(state.mu))

    return run


class _Trade:
    """How devices trade the pieces of one leaf for whole matrices.

    Attributes:
        way: the layouts in turn, from where it lies to where its matrices are whole: axes move to the first dimension
            one at a time, which is all to all, and first those along which devices hold the same.
        size: of that dimension.
        spare: how many more there are on the way, so that it divides.
    """

    def __init__(self, leaf: jax.Array, kind: Matrices):
        mesh = jax.sharding.get_abstract_mesh()
        way = [layout.entries_of(spec_of(tuple(kind.letters), leaf.shape, mesh, kind.axes))]
        cuts, stay = layout.axes_of(way[0]), layout.axes_of(way[0][: kind.lead])
        for axis in sorted(set(mesh.axis_names) - set(stay), key=lambda one: (one in cuts, mesh.axis_names.index(one))):
            first, *rest = [tuple(one for one in entry if one != axis) for entry in way[-1]]
            way.append([(*first, axis), *rest])
        self.way = [layout.layout(step) for step in way]
        self.size = len(leaf)
        self.spare = -self.size % math.prod(mesh.shape[axis] for axis in way[-1][0])

    def there(self, leaf: jax.Array) -> jax.Array:
        filled = jnp.pad(leaf, [(0, self.spare), *[(0, 0)] * (leaf.ndim - 1)])
        return functools.reduce(jax.lax.with_sharding_constraint, self.way, filled)

    def back(self, leaf: jax.Array) -> jax.Array:
        return functools.reduce(jax.lax.with_sharding_constraint, reversed(self.way), leaf)[: self.size]
