"""Random weights, drawn where they lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from transforms.sharding import make_mesh, sharding_of
from zoo.config import rows
from zoo.models import init

SIZES = {"vocab_size": 40, "num_layers": 3, "embed_dim": 16, "mlp_dim": 24, "num_heads": 4, "head_dim": 6}
CONFIG = zoo.MixtralConfig(**SIZES, num_kv_heads=2, num_experts=4, experts_per_token=2)


@pytest.mark.parametrize("letters", ["L D N H", "V D", "L E F D"])
@pytest.mark.parametrize(("sizes", "impl"), [((2, 4), "rbg"), ((2, 2, 1, 2), "threefry2x32")])
def test_devices_draw_their_parts_of_what_one_device_draws(monkeypatch, letters, sizes, impl):
    monkeypatch.setattr(init, "_SLAB", 300)  # several slabs in a leaf, none of which begins where a device's part does
    shape = tuple(CONFIG.dims[letter] for letter in letters.split())
    key, dtype = jax.random.key(1, impl=impl), jnp.dtype(jnp.bfloat16)
    where = sharding_of(make_mesh(*sizes), letters, shape)
    spread = init._program.__wrapped__(init._normal, shape, dtype, where, ())
    np.testing.assert_array_equal(spread(key, 2.0), init._normal(key, 2.0, shape, dtype))


def test_every_leaf_is_drawn_where_it_lies():
    key, sizes = jax.random.key(1, impl="rbg"), (2, 2, 1, 2)
    alone = init.draw(CONFIG, key=key, dtype=jnp.bfloat16)
    mesh = make_mesh(*sizes)
    spread = init.draw(CONFIG, key=key, dtype=jnp.bfloat16, mesh=mesh)
    for row in rows(CONFIG):
        where = sharding_of(mesh, row.letters, spread[row.leaf].shape)
        assert spread[row.leaf].sharding.is_equivalent_to(where, len(row.letters))
        np.testing.assert_array_equal(spread[row.leaf], alone[row.leaf])


def test_leaves_of_a_shape_share_a_program():
    init._program.cache_clear()
    init.draw(CONFIG, key=jax.random.key(0))
    shapes = {(row.shape(CONFIG.dims), bool(row.std(CONFIG.dims))) for row in rows(CONFIG)}
    assert init._program.cache_info().misses == len(shapes) < len(rows(CONFIG))


def test_no_device_holds_a_whole_leaf():
    shape = (4, 512, 1024)
    where = sharding_of(make_mesh(2, 4), "L D F", shape)
    program = init._program(init._normal, shape, jnp.dtype(jnp.float32), where, ())
    compiled = program.lower(jax.random.key(0), 1.0).compile()
    assert compiled.memory_analysis().output_size_in_bytes == 4 * 512 * 1024 * 4 // 8
