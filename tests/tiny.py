"""What several tests start from: the smallest model that a run trains, random ones, one on a mesh, equal ones."""

import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from transforms.sharding import sharding_of
from zoo import model_class
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


def drawn(config, dtype=jnp.float32, seed=0):
    """A model with weights as random as `init`'s, drawn in numpy: JAX would compile a draw of each shape."""
    rng = np.random.default_rng(seed)

    def leaf(row):
        shape, std = row.shape(config.dims), row.std(config.dims)
        values = rng.normal(0, std, shape) if std else np.full(shape, row.start)
        return jax.device_put(values.astype(jnp.float32 if row.wide else dtype))

    return model_class(config).build(config, {row.leaf: leaf(row) for row in rows(config)})


def on_mesh(model, mesh, axes):
    """The model with its parameters where their letters say."""
    for row in rows(model.config):
        get = operator.attrgetter(row.leaf)
        leaf = get(model)
        model = eqx.tree_at(get, model, jax.device_put(leaf, sharding_of(mesh, row.letters, leaf.shape, axes)))
    return model
