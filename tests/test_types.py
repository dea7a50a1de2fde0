"""While tests run, calls are checked: the types of all arguments in `zoo`, and shapes where a module names them."""

import jax.numpy as jnp
import pytest

from zoo.engine.engine import guess
from zoo.engine.sizes import Settings
from zoo.models.layers import rms_norm


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: guess([1, 2], most="3"), "most"),
        (lambda: Settings(length="long"), "length"),
        (lambda: rms_norm(jnp.ones((2, 3)), jnp.ones(4), 1e-6), "weight"),
    ],
    ids=["function", "dataclass", "shapes"],
)
def test_a_wrong_argument_is_refused(call, named):
    with pytest.raises(TypeError, match=named):
        call()
