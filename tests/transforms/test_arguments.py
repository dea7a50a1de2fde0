"""`axis` is read like `jax.vmap`'s `in_axes`, and what does not fit ends in one error that names it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transforms import tile
from transforms.tiling.inputs.axes import place, rows
from transforms.tiling.ir.placement import WHOLE, Tiled

H, W, Y = jnp.ones((24, 5)), jnp.ones((5, 7)), jnp.zeros(24, int)


class Head(eqx.Module):
    weight: jax.Array

    def __call__(self, hidden):
        return hidden @ self.weight


def loss(h, w, y):
    return jax.nn.logsumexp(h @ w, -1).mean() + y.sum()


READS = {
    "tuple": ((0, None, 0), (H, W, Y), {}, [Tiled(0), WHOLE, Tiled(0)]),
    "list": ([0, None, 0], (H, W, Y), {}, [Tiled(0), WHOLE, Tiled(0)]),
    "negative": ((-2, None, -1), (H, W, Y), {}, [Tiled(0), WHOLE, Tiled(0)]),
    "different dimensions": ((1, 0, None), (H, W, Y), {}, [Tiled(1), Tiled(0), WHOLE]),
    "bare int": (0, (H, jnp.float32(1.0), Y), {}, [Tiled(0), WHOLE, Tiled(0)]),
    "bare int, fewer dimensions": (1, (H, Y, Y), {}, [Tiled(1), WHOLE, WHOLE]),
    "bare int leaves modules whole": (0, (H, Head(W), Y), {}, [Tiled(0), WHOLE, Tiled(0)]),
    "bare int leaves random keys whole": (0, (H, jax.random.split(jax.random.key(0), 24)), {}, [Tiled(0), WHOLE]),
    "bare int leaves keywords whole": (0, (H, jnp.ones(())), {"y": Y}, [Tiled(0), WHOLE, WHOLE]),
    "dict of names": ({"h": 0, "y": 0}, (H, W), {"y": Y}, [Tiled(0), WHOLE, Tiled(0)]),
    "prefix": (({"a": 0, "b": None}, None), ({"a": H, "b": W}, W), {}, [Tiled(0), WHOLE, WHOLE]),
    "one entry for a pytree": ((0, None), ({"a": H, "b": Y}, W), {}, [Tiled(0), Tiled(0), WHOLE]),
    "static leaves have no placement": ((0, None, None), (H, "mean", 3.0), {}, [Tiled(0)]),
    "None among the leaves": (((0, 0), None), ((H, None), W), {}, [Tiled(0), WHOLE]),
    "numpy arrays": ((0, None), (np.ones((24, 5)), np.float32(2)), {}, [Tiled(0), WHOLE]),
}


@pytest.mark.parametrize("name", READS)
def test_reads_like_in_axes(name):
    axis, args, kwargs, expected = READS[name]
    placements, total = place(loss, axis, args, kwargs)
    assert placements == expected
    assert total == (5 if "different" in name or "fewer" in name else 24)


WRONG = {
    "lengths differ": ((0, None, 0), (H, W, Y[1:]), ValueError, r"y: dimension 0 of int\w+\[23\] has 23"),
    "bare int on weights": (0, (H, W, Y), ValueError, r"w: dimension 0 of float32\[5,7\] has 5"),
    "out of range": ((2, None, 0), (H, W, Y), ValueError, r"axis 2 is out of range for `h`, float32\[24,5\]"),
    "negative out of range": ((-3, None, 0), (H, W, Y), ValueError, r"axis -3 is out of range for `h`"),
    "too few entries": ((0, None), (H, W, Y), ValueError, r"has 2 entries, but the call has 3 positional"),
    "prefix does not fit": ((0, None, {"a": 0}), (H, W, Y), ValueError, r"for argument `y` does not fit"),
    "unknown name": ({"hidden": 0}, (H, W, Y), ValueError, r"axis names \['hidden'\].*\['h', 'w', 'y'\]"),
    "nothing cut": ((None, None, None), (H, W, Y), ValueError, r"cuts none of the arguments"),
    "a bare float": (0.0, (H, W, Y), TypeError, r"axis must be an int, a tuple or a dict .* not 0.0"),
    "a bare bool": (True, (H, W, Y), TypeError, r"axis must be an int, .* not True"),
    "a name in a tuple": (("tokens", None, 0), (H, W, Y), TypeError, r"only an int or None|is no prefix"),
    "a float": ((0.0, None, 0), (H, W, Y), TypeError, r"only an int or None|is no prefix"),
    "a bool": ((True, None, 0), (H, W, Y), TypeError, r"axis has True for `h`"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses_what_does_not_fit(name):
    axis, args, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        tile(loss, axis, 4)(*args)


COUNTS = {
    "zero": ({"n": 0}, ValueError, "n=0, but it must be at least 1"),
    "negative": ({"n": -2}, ValueError, "n=-2"),
    "fraction": ({"n": 1.5}, TypeError, "1.5"),
    "bool": ({"n": True}, TypeError, "n must be an int"),
    "zero size": ({"size": 0}, ValueError, "size=0"),
    "an unknown word": ({"n": "autoo"}, TypeError, "n must be an int or \"auto\", not 'autoo'"),
    "size as a word": ({"size": "auto"}, TypeError, "size must be an int, not 'auto'"),
    "auto without budget": ({"n": "auto"}, ValueError, 'budget="2GiB"'),
    "budget without auto": ({"n": 4, "budget": 100}, ValueError, 'budget=100 goes with n="auto"; n=4'),
    "budget with size": ({"size": 4, "budget": 100}, ValueError, 'budget=100 goes with n="auto"'),
    "budget in no unit": ({"n": "auto", "budget": "2 apples"}, ValueError, "'2 apples' is no number of bytes"),
    "budget of nothing": ({"n": "auto", "budget": 0}, ValueError, "budget=0, but it must be at least 1"),
    "budget of a fraction": ({"n": "auto", "budget": 1.5}, TypeError, "must be a number of bytes.* not 1.5"),
    "neither": ({}, ValueError, "n=None, size=None"),
    "both": ({"n": 2, "size": 3}, ValueError, "n=2, size=3"),
    "gather": ({"n": 2, "gather": "all"}, ValueError, "gather='all' is none of 'small', 'any', 'none'"),
    "policy": ({"n": 2, "policy": "dots"}, TypeError, "policy must be a policy of jax.checkpoint, .* not 'dots'"),
    "no dtype": ({"n": 2, "accumulate": "float33"}, TypeError, "accumulate must be a floating.* not 'float33'"),
    "no dtype at all": ({"n": 2, "accumulate": None}, TypeError, "accumulate must be a floating-point dtype"),
    "whole numbers": ({"n": 2, "reduce_dtype": jnp.int32}, TypeError, "reduce_dtype must be a floating.*int32"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_refuses_bad_counts_at_once(name):
    options, error, message = COUNTS[name]
    with pytest.raises(error, match=message):
        tile(loss, 0, **options)


def test_refuses_what_is_no_function():
    with pytest.raises(TypeError, match="the first argument must be a function, not 3"):
        tile(3, 0, 2)


def test_refuses_a_missing_axis():
    with pytest.raises(TypeError, match="give axis, the dimension to cut"):
        tile(loss, n=2)


ROWS = {
    "tokens": (({"h": 0, "y": 0}, (H, W), {"y": Y}), 1),
    "batch of sequences": ((0, (jnp.ones((4, 9, 5)), jnp.zeros((4, 9), int)), {}), 9),
    "features of weights": (((None, 1, None), (H, W, Y), {}), 1),
}


@pytest.mark.parametrize("name", ROWS)
def test_counts_the_rows_of_a_step(name):
    (axis, args, kwargs), expected = ROWS[name]
    placements, _ = place(loss, axis, args, kwargs)
    assert rows((args, kwargs), placements) == expected
