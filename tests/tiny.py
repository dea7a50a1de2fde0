"""What several files of tests start from: the smallest model that a run trains, a model on a mesh, equal models."""

import operator

import equinox as eqx
import jax

from transforms.sharding import sharding_of
from zoo.config import rows

MODEL = [
    "model.vocab_size=300",
    "model.num_layers=1",
    "model.embed_dim=16",
    "model.mlp_dim=32",
    "model.num_heads=2",
    "model.head_dim=8",
]


def same(one, other):
    """Whether two trees are equal to the bit; in numpy, as JAX would compile a comparison of each shape."""
    return eqx.tree_equal(*jax.device_get((one, other)))


def on_mesh(model, mesh, axes):
    """The model with its parameters where their letters say."""
    for row in rows(model.config):
        get = operator.attrgetter(row.leaf)
        leaf = get(model)
        model = eqx.tree_at(get, model, jax.device_put(leaf, sharding_of(mesh, row.letters, leaf.shape, axes)))
    return model
