"""Comparisons of what loops compute again with copies of it from before, in float32 as people run it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn

from tests import quick
from tests.helpers import relative_error
from transforms import TileError, tile
from transforms.tiling.analysis import rounding
from transforms.tiling.passes import agreement

L, D = 40, 4


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X, Y = draw(0, L, D), draw(1, L, D)
H, W, LABELS = draw(2, 24, D), draw(3, D, 60), jnp.arange(24) * 7 % 60


def made(x, y):
    """Products that a compiler fuses into an addition in some loops and not in others."""
    return x * y - 1.1 * y


def grown(x, y):
    """An exponential that is computed otherwise where more is fused with it."""
    return jnp.exp(0.3 * x) * y


def shift(h):
    return jnp.pad(h, ((1, 0), (0, 0)))[: len(h)]


# Functions of two arrays [L, D], cut along L. What is compared is no larger than they are: it is stored.
STORED = {
    "maximum": lambda x, y: made(x, y).max(0),
    "minimum of all": lambda x, y: made(x, y).min(),
    "equal to the maximum": lambda x, y: (made(x, y) == made(x, y).max(0)).sum(0) * 1.0,
    "at least the third": lambda x, y: (made(x, y) >= lax.top_k(made(x, y).T, 3)[0][:, -1]).sum(0) * 1.0,
    "above the median": lambda x, y: jnp.where(made(x, y) >= jnp.median(made(x, y), 0), made(x, y), 0).sum(0),
    "rank of a row": lambda x, y: (made(x, y) > made(x, y)[5]).sum(0) * 1.0,
    "rank of what a mask picks": lambda x, y: (
        (made(x, y) >= jnp.where(x == x[3, 0], made(x, y), 0).sum(0)).sum(0) * 1.0
    ),
    "rank among absolute values": lambda x, y: (
        (made(x, y) >= lax.top_k(jnp.abs(made(x, y)).T, 3)[0][:, -1]).sum(0) * 1.0
    ),
    "maximum of some": lambda x, y: (made(x, y) >= jnp.max(made(x, y), 0, where=x > 0, initial=-9.0)).sum(0) * 1.0,
    "relative to the maximum": lambda x, y: nn.relu(made(x, y) - made(x, y).max(0) + 0.0),
    "below the maximum": lambda x, y: nn.relu(-made(x, y).max(0) + made(x, y)),
    "clamped": lambda x, y: lax.clamp(0.0, grown(x, y) - grown(x, y).max(0), 1.0),
    "root of the distance": lambda x, y: jnp.sqrt(made(x, y).max(0) - made(x, y)).sum(0),
    "logarithm of the distance": lambda x, y: jnp.exp(-jnp.log(made(x, y) - made(x, y).min(0))).astype(jnp.int32),
    "angle": lambda x, y: jnp.acos(made(x, y) / jnp.abs(made(x, y)).max(0)),
    "sign": lambda x, y: jnp.sign(made(x, y) - made(x, y).max(0)).sum(0),
    "quantised": lambda x, y: jnp.floor(made(x, y) / made(x, y).max(0)),
    "integers": lambda x, y: (made(x, y) / jnp.abs(made(x, y)).max(0)).astype(jnp.int32),
    "maximum of a softmax": lambda x, y: (nn.softmax(made(x, y), 0) >= nn.softmax(made(x, y), 0).max(0)) * x,
    "checkpointed": lambda x, y: jax.checkpoint(lambda h: h.max(0))(made(x, y)),
    "beside the tile": lambda x, y: (made(x + shift(x), y).max(0) ** 2) + (shift(jnp.tanh(made(x, y))) * y).sum(0),
    "ties": lambda x, y: made(x[:20].repeat(2, 0), y[:20].repeat(2, 0)).max(0),
    "saturated": lambda x, y: jnp.tanh(40 * made(x, y)).max(0),
    "nothing but zeros": lambda x, y: nn.relu(made(x, y) - 100).max(0),
}


# Of h, a function of products: comparisons with elements of it that no rounding has changed.
UNROUNDED = {
    "absolute": lambda h: h == jnp.abs(h)[7],
    "rank of absolute ones": lambda h: h >= lax.top_k(jnp.abs(h).T, 5)[0][:, -1],
    "rank of masked ones": lambda h: h >= lax.top_k((h * (jnp.arange(61) > 3)[:, None]).T, 5)[0][:, -1],
    "masked": lambda h: h == (h * (jnp.arange(61) > 3)[:, None])[7],
    "half": lambda h: h == (h * 0.5)[7] * 2,
    "an absolute one that a mask picks": lambda h: h == ((jnp.arange(61) == 7)[:, None] * jnp.abs(h)).sum(0),
    "stacked": lambda h: h == jnp.stack([h, -h])[0, 7],
    "a part of a complex number": lambda h: h == jnp.real(lax.complex(h, -h))[7],
    "no more than the maximum": lambda h: (
        ~jnp.isnan(jax.scipy.special.betainc(0.5, 0.5, jnp.maximum(h / h.max(0), 0.01)))
    ),
}


RANDOM = np.random.default_rng(1)
OPERANDS = tuple(RANDOM.standard_normal(shape).astype(np.float32) for shape in ((37, 19), (61, 37)))


def positive(w, x):
    return jnp.exp(jnp.sin(x @ w)) * 1.1 + jnp.cos(x @ w) * 0.7


@pytest.mark.parametrize("name", UNROUNDED)
def test_what_no_rounding_changes_is_the_same_number(name):
    count = lambda w, x: UNROUNDED[name](positive(w, x)).sum(0)
    np.testing.assert_array_equal(jax.jit(tile(count, (None, 0), 7))(*OPERANDS), jax.jit(count)(*OPERANDS))


# Of h, a function of products: comparisons with copies that are cut, whole, in bodies, added to, or of groups of one.
TARGETS, TURNED = jnp.arange(61) * 7 % 24, jnp.arange(61) * 7 % 61
COPIED = {
    "rank among all": lambda h: h[:, :1] >= h[:, 0],
    "row of itself": lambda h: (h[:, None, :4] == h[:, :4]).all(-1),
    "order of pairs": lambda h: jnp.abs(jnp.sign(h[:, :1] - h[:, 0])),
    "no distance": lambda h: ((h[:, None, :8] - h[:, :8]) ** 2).sum(-1) == 0,
    "inverse of a distance": lambda h: jnp.isinf(1 / jnp.abs(h[:, :1] - h[:, 0])),
    "least of what rows look up": lambda h: h == jnp.take_along_axis(h, TARGETS[:, None], 1).min(),
    "least of what rows pick": lambda h: h == (h * nn.one_hot(TARGETS, 24)).sum(1).min(),
    "largest of each class": lambda h: h[:, None] == jax.ops.segment_max(h[:, 3], TARGETS, 24)[:, None],
    "what 0 or 1 picks": lambda h: h == (h * jnp.where(jnp.arange(61) == 11, 1.0, 0.0)[:, None]).sum(0),
    "rows of the identity": lambda h: h[:, None] == jnp.eye(61)[3:5] @ h,
    "with a mask added": lambda h: h == (h + jnp.where(jnp.arange(61) < 40, 0.0, -1e9)[:, None]).max(0),
    "groups of one": lambda h: h[:, 0] == jax.ops.segment_sum(h[:, 0], TURNED, 61)[TURNED],
    "checkpointed": lambda h: h == jax.checkpoint(lambda h: h.max(0))(h),
    "logarithm of 1 less 1": lambda h: jnp.isnan(jnp.log1p(-jnp.exp(h - h.max(0)))),
    "reciprocal of no difference": lambda h: jnp.isinf(((h.max(0) - h) ** -2).max(0)),
    "logarithm of no distance": lambda h: jnp.where(jnp.isfinite(jnp.log(((h - h[5]) ** 2).sum(1))), 0, 1),
}
NARROW = tuple(np.random.default_rng(7).standard_normal(shape).astype(np.float32) for shape in ((61, 16), (16, 24)))


@pytest.mark.parametrize("name", COPIED)
def test_what_is_a_copy_is_the_same_number(name):
    x, w = NARROW
    alone = lambda w, x: (COPIED[name](positive(w, x)).sum(),)
    beside = lambda w, x: (*alone(w, x), positive(w, x).sum(1))  # products are fused in another way
    for count in (alone, beside):
        assert int(tile(count, (None, 0), 7, gather="any")(w / 2, x)[0]) == int(count(w / 2, x)[0])


@pytest.mark.parametrize("dtype", [bool, int, jnp.float32])
def test_a_mask_of_one_column_picks_a_row_that_is_too_large_to_store(dtype):
    x, w = NARROW
    mask = (jnp.arange(61) == 4)[:, None].astype(dtype)
    count = lambda w, x: (positive(w, x) == (positive(w, x) * mask).sum(0)).sum()
    assert int(tile(count, (None, 0), 7)(w / 2, x)) == int(count(w / 2, x))


def test_what_a_loop_returns_of_what_it_reads_is_a_copy():
    """The body computes it again, or it is stored for the loop alone: what is compared is larger than inputs."""
    x, w = NARROW
    largest = lambda h: lax.fori_loop(0, 61, lambda i, c: jnp.maximum(c, h[i]), jnp.full(24, -9.0))
    with pytest.raises(TileError, match="copies of them"):
        tile(lambda w, x: (positive(w, x) == largest(positive(w, x))).sum(), (None, 0), 7)(w / 2, x)


def test_what_is_too_large_to_store_agrees_with_its_largest_absolute_value():
    """All are negative: none is below minus the largest, and what is put in its place has its sign."""
    w, x = OPERANDS
    wide = np.concatenate([w] * 8, 1) * np.linspace(0.5, 1.5, 8 * 19, dtype=np.float32)

    def quantised(w, x):
        h = positive(w, x) - 9.0
        return jnp.floor(h / jnp.abs(h).max(0)).sum(1)

    found, expected = (jax.jit(fn)(wide, x) for fn in (tile(quantised, (None, 0), 7), quantised))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("saturated", [jnp.tanh, nn.sigmoid])
def test_what_saturates_has_its_maximum_where_it_is_that_number(saturated):
    """Others are as near to it as two computations of one element: several elements are the maximum, these are not."""
    w, x = OPERANDS
    made = lambda w, x: saturated(5 * (x @ jnp.concatenate([w] * 3, 1)))  # too large to store
    ties = lambda w, x: (made(w, x) == made(w, x).max(0)).sum(0)
    slope = jax.grad(lambda w, x: (made(w, x).max(0) * jnp.arange(57)).sum())
    assert (ties(w, x) > 1).any()
    np.testing.assert_array_equal(jax.jit(tile(ties, (None, 0), 7))(w, x), jax.jit(ties)(w, x))
    tiled = jax.grad(lambda w, x: tile(lambda w, x: (made(w, x).max(0) * jnp.arange(57)).sum(), (None, 0), 7)(w, x))
    np.testing.assert_allclose(tiled(w, x), slope(w, x), rtol=1e-5, atol=1e-7)


def peeled(w, x):
    h = positive(w, x)
    return lax.scan(lambda c, _: (jnp.where(h < c, h, -9.0).max(0), (h >= c).sum()), h.max(0), None, 4)[1]


def above_a_row(w, x):
    h = positive(w, x)
    row = h[5]
    return lax.scan(lambda c, _: (jnp.tanh(h.T @ nn.softmax(h @ c)), (h == row).sum()), jnp.ones(19), None, 3)[1]


@pytest.mark.parametrize("fn", [peeled, above_a_row])
def test_the_body_of_a_loop_does_not_make_again_what_it_compares(fn):
    w, x = OPERANDS
    narrow = x[:, :9], w[:9]  # so that what the loop reads is larger than inputs
    count = lambda x, w: fn(w, x)
    np.testing.assert_array_equal(jax.jit(tile(count, (0, None), 7))(*narrow), jax.jit(count)(*narrow))


def test_ranks_of_what_is_too_large_to_store_are_refused():
    """Of scores of all pairs, their diagonal: rows of them are computed again, and none is below itself."""
    a, b = draw(0, 61, 16), draw(1, 61, 16)
    scores = lambda a, b: positive(b.T, a)
    ranks = lambda a, b: (scores(a, b) >= jnp.diag(scores(a, b))).sum(0)
    with pytest.raises(TileError, match="copies of them"):
        tile(ranks, (0, 0), 7)(a, b)


def test_a_quotient_by_the_maximum_is_at_most_one():
    """Beyond it an incomplete beta function is not a number."""

    def total(w, x):
        h = positive(w, x)
        return jax.scipy.special.betainc(0.5, 0.5, jnp.maximum(h / h.max(0), 0.01)).sum(0)

    np.testing.assert_allclose(tile(total, (None, 0), 7)(*OPERANDS), total(*OPERANDS), rtol=1e-5)


def pulled(fn, args, jit=jax.jit):
    def run(*args):
        out, vjp = jax.vjp(fn, *args)
        float0 = not jnp.issubdtype(out.dtype, jnp.inexact)
        return out, vjp(np.zeros(out.shape, jax.dtypes.float0) if float0 else jnp.full_like(out, 1.5))

    return jax.tree.leaves(jit(run)(*args))


def untiled(fn, args):
    """What the function makes of float32, and of float64."""
    with jax.enable_x64():
        right = pulled(fn, [jnp.asarray(a, jnp.float64) for a in args], quick.jit)
    return pulled(fn, args), right


def assert_right(tiled, args, untiled):
    """As close to the function in float64 as the untiled one, which is not always right itself."""
    for got, want, oracle in zip(pulled(tiled, args), *untiled, strict=True):
        assert got.dtype == want.dtype
        assert relative_error(got, oracle, 1e-3) <= max(4 * relative_error(want, oracle, 1e-3), 2e-6)


@functools.cache
def stored(name):
    return untiled(STORED[name], (X, Y))


@pytest.mark.redundant("n")
@pytest.mark.parametrize("n", [2, 7])
@pytest.mark.parametrize("name", STORED)
def test_comparison_is_that_of_the_untiled_function(name, n):
    assert_right(tile(STORED[name], 0, n), (X, Y), stored(name))


def labelled(u):
    """The logit of each row's label."""
    return u[jnp.arange(13), jnp.arange(13) % 5]


def sorted_beside(h):
    """Every row's number times one that an order of all rows gives: both a tile of it and the whole of it are read."""
    return (h * jnp.sort(h, 0)).sum()


# Functions of a product [13, 5], cut along its rows, and copies of some elements of each row. The loop that computes
# the copies stores them, for all are sorted; a later one computes the rows again, in products of another size.
ROWS = {
    "maximum": lambda u, x: sorted_beside(u.max(-1)),
    "two largest": lambda u, x: sorted_beside(lax.top_k(u, 2)[0]),
    "middle of a row": lambda u, x: sorted_beside(jnp.sort(u, -1)[:, 1:3]),
    "function of the maximum": lambda u, x: sorted_beside(jnp.tanh(u.max(-1))),
    "maximum and minimum": lambda u, x: (u.max(-1) * jnp.sort(u.min(-1))).sum(),
    "distance from the maximum": lambda u, x: (
        nn.relu(0.3 + u - u.max(-1, keepdims=True)).sum() * sorted_beside(u.max(-1))
    ),
    "equal to the maximum": lambda u, x: ((u == u.max(-1, keepdims=True)) @ jnp.sort(u.max(-1))[:5]) @ x,
    "rank of the label": lambda u, x: ((u > labelled(u)[:, None]).sum(-1) * jnp.sort(labelled(u))).sum(),
    "rank of a column": lambda u, x: ((u >= u[:, 2:3]).sum(-1) * jnp.sort(u[:, 2])).sum(),
    "vector": lambda u, x: u.max(-1) * jnp.sort(u.max(-1)),
}
POLICIES = {
    "recomputed": None,
    "everything": jax.checkpoint_policies.everything_saveable,
    "copies": lambda prim, *_, **__: prim.name in ("reduce_max", "reduce_min", "top_k", "sort"),
}


def of_product(name):
    return lambda x, w: ROWS[name](x @ w, x)


@functools.cache
def rows(name):
    return untiled(of_product(name), (draw(4, 13, 6), draw(5, 6, 5)))


@pytest.mark.redundant("n", "policy")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("name", ROWS)
def test_rows_computed_again_meet_their_own_copies(name, n, policy):
    tiled = tile(of_product(name), (0, None), n, policy=POLICIES[policy])
    assert_right(tiled, (draw(4, 13, 6), draw(5, 6, 5)), rows(name))


def distances(a, b):
    return ((a[:, None] - b) ** 2).sum(-1)


# Of distances [24, 20], which are larger than both sets of points, each row's nearest is compared with the others'.
NEAREST = {
    "Hausdorff": lambda a, b: distances(a, b).min(1).max(),
    "Hausdorff, both ways": lambda a, b: jnp.maximum(distances(a, b).min(1).max(), distances(a, b).min(0).max()),
    "median": lambda a, b: jnp.median(distances(a, b).min(1)),
    "five farthest": lambda a, b: lax.top_k(distances(a, b).min(1), 5)[0].mean(),
    "how many of all": lambda a, b: (distances(a, b).min(1) == distances(a, b).min()).sum() * distances(a, b).sum(),
}


@pytest.mark.redundant("axis", "n")
@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("axis", [(0, None), (None, 0)], ids=["rows", "columns"])
@pytest.mark.parametrize("name", NEAREST)
def test_extrema_of_rows_are_stored_and_computed_again_beside_their_rows(name, axis, n):
    points = draw(4, 24, 3), draw(5, 20, 3)
    assert_right(tile(NEAREST[name], axis, n), points, untiled(NEAREST[name], points))


@pytest.mark.parametrize("other", [lambda h: h[7], lambda h: jnp.where(jnp.arange(61)[:, None] > 7, h, 9.0).min(0)])
def test_a_value_agrees_with_no_other_copy_than_it_was_told(other):
    """What is chosen from a product agrees with its own maximum; an element of the product itself it was not told."""

    def above(x, w, told=lambda h: jnp.inf):
        picked = jnp.where(jnp.arange(61)[:, None] % 3 == 0, x @ w / 2, x @ w)
        return (picked >= jnp.minimum(picked.max(0), told(x @ w))).sum()

    arrays = draw(4, 61, 4), draw(5, 4, 24)
    assert tile(above, (0, None), 7)(*arrays) == above(*arrays)
    with pytest.raises(TileError, match="it compares values that one loop computes with copies of them"):
        tile(lambda x, w: above(x, w, other), (0, None), 7)(*arrays)


def softmax_by_hand(h, w, y):
    logits = h @ w
    p = jnp.exp(logits - logits.max(-1, keepdims=True))
    return -jnp.log(jnp.take_along_axis(p / p.sum(-1, keepdims=True), y[:, None], 1)).sum()


# Functions of hidden states, a head and labels, cut along the vocabulary: the logits are larger than all of these.
AGREED = {
    "maximum": lambda h, w, y: (h @ w).max(-1).sum(),
    "maximum of all": lambda h, w, y: (h @ w).max(),
    "softmax by hand": softmax_by_hand,
    "hinge": lambda h, w, y: nn.relu(1 + h @ w - jnp.take_along_axis(h @ w, y[:, None], 1)).sum(),
    "rank": lambda h, w, y: (h @ w > jnp.take_along_axis(h @ w, y[:, None], 1)).sum(-1).astype(jnp.float32).sum(),
    "rank by indices": lambda h, w, y: ((h @ w > (h @ w)[jnp.arange(24), y][:, None]).sum(-1) * 1.0).sum(),
    "rank by one-hot": lambda h, w, y: ((h @ w > (h @ w * nn.one_hot(y, 60)).sum(-1, keepdims=True)) * 1.0).sum(),
    "is the maximum": lambda h, w, y: ((h @ w == (h @ w).max(-1, keepdims=True)) * 1.0).sum(),
}


@functools.cache
def agreed(name):
    return untiled(lambda h, w: AGREED[name](h, w, LABELS), (H, W))


@pytest.mark.redundant("n")
@pytest.mark.parametrize("n", [3, 7])
@pytest.mark.parametrize("name", AGREED)
def test_what_is_too_large_to_store_agrees_with_what_is_known_of_it(name, n):
    tiled = tile(AGREED[name], (None, 1, None), n)
    assert_right(lambda h, w: tiled(h, w, LABELS), (H, W), agreed(name))
    assert not tiled.plan(H, W, LABELS).value.completed


def probable(h, w):
    return nn.softmax(h @ w)


def of_label(array, y):
    return jnp.take_along_axis(array, y[:, None], 1)


# Of whole numbers, many of whose products are equal: what a label is compared with is divided alike, and so are others.
TIES = {
    "rank": lambda h, w, y: (probable(h, w) > of_label(probable(h, w), y)).sum(1),
    "rank by one-hot": lambda h, w, y: ((p := probable(h, w)) > (p * nn.one_hot(y, 60)).sum(1, keepdims=True)).sum(1),
    "what is no less probable": lambda h, w, y: jnp.where((p := probable(h, w)) >= of_label(p, y), p, 0).sum(1),
    "of a norm": lambda h, w, y: ((p := h @ w / jnp.linalg.norm(h @ w, axis=1, keepdims=True)) > of_label(p, y)).sum(1),
    "of a sum": lambda h, w, y: (
        (p := jnp.abs(h @ w) / (jnp.abs(h @ w).sum(1, keepdims=True) + 0.3)) > of_label(p, y)
    ).sum(1),
}


@pytest.mark.parametrize("n", [2, 7])
@pytest.mark.parametrize("name", TIES)
def test_what_equals_a_label_does_so_divided_by_a_total(name, n):
    h, w = jnp.round(draw(8, 24, 4)), jnp.round(draw(9, 4, 60))
    got, want = (jax.jit(fn)(h, w, LABELS) for fn in (tile(TIES[name], (None, 1, None), n), TIES[name]))
    np.testing.assert_allclose(got, want, rtol=1e-6)


# Of tokens [24, 4] or [2, 12, 4] and a head, cut along the sequence: extrema of what indices send to one place, and of
# what stands in another order. The products are larger than both.
GROUP = jnp.arange(24) * 7 % 5
KEPT = (jnp.arange(24) % 3 > 0)[:, None]
whole = lambda array: array - lax.stop_gradient(array - array // 1)  # with the gradients of all numbers
finite = lambda array: jnp.where(jnp.isfinite(array), array, 0)
PLACED = {
    "maximum of each group": lambda h, w: jax.ops.segment_max(h @ w, GROUP, 5),
    "least of each group, some of which are empty": lambda h, w: finite(jax.ops.segment_min(h @ w, GROUP // 2 * 2, 5)),
    "largest of each group": lambda h, w: jax.ops.segment_max(jnp.abs(h @ w), GROUP, 5),
    "ties": lambda h, w: jax.ops.segment_max((h // 1) @ (w // 1), GROUP, 5),
    "saturated": lambda h, w: jax.ops.segment_max(jnp.tanh(9 * h @ w), GROUP, 5),
    "no less than 0": lambda h, w: jnp.zeros((5, 60)).at[GROUP].max(h @ w),
    "no less than 0, as often": lambda h, w: jnp.zeros((5, 60)).at[GROUP].max(nn.relu(h @ w)),
    "no less than a row of the head": lambda h, w: jnp.broadcast_to(w[0] * 3, (5, 60)).at[GROUP].max(h @ w),
    "as large as what a group begins with": lambda h, w: jnp.full((5, 60), 3.0).at[GROUP].max(whole(h) @ whole(w)),
    "an ulp or two below that": lambda h, w: jnp.full((5, 60), 3.0000004).at[GROUP].max(whole(h) @ whole(w)),
    "some are dropped": lambda h, w: jnp.full((4, 60), -9.0).at[GROUP].max(h @ w),
    "some are clamped": lambda h, w: jnp.full((4, 60), -9.0).at[GROUP].max(h @ w, mode="clip"),
    "masked": lambda h, w: finite(jax.ops.segment_max(jnp.where(KEPT, h @ w, -jnp.inf), jnp.arange(24) // 8, 5)),
    "of rows and columns": lambda h, w: jnp.full((5, 6), -9.0).at[GROUP[:, None], jnp.arange(60) // 10].max(h @ w),
    "relative to the group's": lambda h, w: (
        ((x := h @ w) / jax.ops.segment_max(jnp.abs(x), GROUP, 5)[GROUP]) ** 3
    ).sum(0),
    "is its group's": lambda h, w: jnp.where((x := h @ w) == jax.ops.segment_max(x, GROUP, 5)[GROUP], x, 0).sum(0),
    "of each sequence": lambda h, w: jax.vmap(lambda h, i: jax.ops.segment_max(h @ w, i, 5))(
        h.reshape(2, 12, 4), GROUP.reshape(2, 12)
    ),
    "of all tokens": lambda h, w: (h.reshape(2, 12, 4) @ w).reshape(24, 60).max(0),
    "of all, turned": lambda h, w: (h @ w).T.reshape(4, 15, 24).max(2),
    "of one more dimension": lambda h, w: (h @ w)[:, None].max(0),
}


@pytest.mark.redundant("n", "shape")
@pytest.mark.parametrize("shape", [(24, 4), (2, 12, 4)], ids=["tokens", "sequences"])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", PLACED)
def test_extrema_stand_at_their_places_whatever_says_where(name, n, shape):
    fn = lambda h, w: PLACED[name](h.reshape(24, 4), w)
    args = draw(7, *shape), W
    tiled = tile(fn, (len(shape) - 2, None), n)
    assert_right(tiled, args, untiled(fn, args))
    assert not tiled.plan(*args).gradient.completed


def test_the_extremum_of_a_group_is_told_no_number_that_is_none():
    """A NaN in one group is in no other, and infinities are as equal as untiled."""
    for odd in (jnp.nan, jnp.inf, -jnp.inf):
        h = jnp.ones((24, 1)).at[3].set(odd) * jnp.arange(1.0, 25)[:, None]
        loss = lambda h, w: (jax.ops.segment_max(h @ w, GROUP, 5) * jnp.arange(5.0)[:, None]).sum()
        got, want = (jax.value_and_grad(fn, (0, 1))(h, W[:1]) for fn in (tile(loss, (0, None), 3), loss))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def noise():
    """Whole, but each loop makes its own part of it: what is added to an input is computed again."""
    return jax.random.normal(jax.random.key(0), (L, 60), jnp.float32)


# Of an input as large as the noise, which may be stored, and of one column, where the sum is too large for that.
NOISY = {
    "maximum": lambda x: (x + noise()).max(0).sum(),
    "minimum of all": lambda x: (noise() - x).min(),
    "maximum of what a mask lets through": lambda x: jnp.where(noise() > 0, x + noise(), -jnp.inf).max(0).sum(),
    "is the maximum": lambda x: ((x + noise() == (x + noise()).max(0)) * x).sum(),
}


@pytest.mark.parametrize("width", [1, 60])
@pytest.mark.parametrize("name", NOISY)
def test_sums_with_noise_that_loops_make_meet_their_extremum(name, width):
    x = draw(4, L, width)
    assert_right(tile(NOISY[name], 0, 7), (x,), untiled(NOISY[name], (x,)))


def test_comparison_with_a_sorted_copy_that_is_too_large_is_refused():
    def above_the_median(h, w):
        return (h @ w >= jnp.sort(h @ w, -1)[:, 30:31]).sum()

    with pytest.raises(TileError, match=r"(?s)`sort`|`ge`.*compares values.*`dot_general`"):
        tile(above_the_median, (None, 1), 4)(H, W)
    assert tile(above_the_median, (None, 1), 4, gather="any")(H, W) == above_the_median(H, W)


# Sums that wait for what only a loop's end tells, of numbers that no anchor but the right one keeps in range.
FAR = jnp.asarray([-200.0, -201.0, -202.0, -203.0, -190.0, -195.0])
HIGH = jnp.asarray([100.0, 100.0, 0.0, 0.0, 50.0, 99.0])
SUMS = {
    "importance weights": (lambda x, y: jnp.exp(x - nn.logsumexp(x)) @ y, FAR, FAR + 200),
    "relative to the mean": (lambda x, y: jnp.exp(x - x.mean()).sum() + 0 * y.sum(), HIGH * 0 + 100, HIGH),
    "maximum of another array": (lambda x, y: jnp.exp(x - y.max()).sum(), HIGH, HIGH[::-1] * 1.5),
    "biased after the maximum": (lambda x, y: jnp.exp(x - x.max() + y).sum(), FAR, 200 - HIGH * 3),
    "deviations from the mean": (lambda x, y: ((x - x.mean()) * y).sum(), HIGH / 100 + 1e4, FAR + 195),
    "squares of quotients": (lambda x, y: ((x / jnp.abs(x).sum()) ** 2 * y).sum(), HIGH * 1e28, FAR),
}


@pytest.mark.redundant("n")
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", SUMS)
def test_what_a_sum_leaves_out_keeps_it_in_range(name, n):
    fn, *args = SUMS[name]
    assert_right(tile(fn, 0, n), args, untiled(fn, args))


def test_rows_of_minus_infinity_masked_afterwards_are_as_untiled():
    x, mask = jnp.full((2, 8), -jnp.inf).at[1, 6].set(0.0), jnp.arange(8) < jnp.asarray([[3], [0]])
    fn = lambda x, mask: jnp.where(mask, jnp.exp(x - x.max(-1, keepdims=True)), 0).sum(-1)
    np.testing.assert_array_equal(tile(fn, 1, 4)(x, mask), fn(x, mask))


def test_a_sum_divided_by_a_count_of_none_is_as_untiled():
    """Parts of what is divided are 0 where the sum is not, and 0 / 0 is no number."""

    def fn(x, y):
        rank = jnp.cumsum(x, 1)
        count = (x > jnp.sort(y, 1)).sum(1, keepdims=True)
        return (jnp.take_along_axis(rank, jnp.maximum(count - 1, 0), 1) - 1) / count

    x, y = jnp.arange(1.0, 27).reshape(2, 13), jnp.asarray([[0.0], [99.0]]) * jnp.ones((2, 13))
    np.testing.assert_array_equal(tile(fn, 1, 3, gather="any")(x, y), fn(x, y))
    assert np.isinf(fn(x, y)).any()


def test_online_sums_run_without_jit():
    with jax.disable_jit():
        got = tile(SUMS["importance weights"][0], 0, 3)(FAR, FAR + 200)
    np.testing.assert_allclose(got, SUMS["importance weights"][0](FAR, FAR + 200), rtol=1e-4)


def test_no_schedule_breaks_the_rule(monkeypatch):
    monkeypatch.setattr(agreement, "store", lambda graph, value: None)  # what mends it
    with pytest.raises(TileError, match=r"(?s)`eq` at .*compares values.*made by `sub`"):
        tile(STORED["equal to the maximum"], 0, 4)(X, Y)


def test_what_is_seen_in_the_loops_alone_is_mended_too(monkeypatch):
    monkeypatch.setattr(rounding, "meeting", lambda found: None)
    fn = STORED["equal to the maximum"]
    assert_right(tile(fn, 0, 4), (X, Y), untiled(fn, (X, Y)))


def test_values_without_rounding_are_not_stored():
    for fn in (lambda x: x.max(0), lambda x: jnp.where(x.T > 0, -x.T, 0).max(1), lambda x: (x - x[:1]).max(0)):
        plan = tile(fn, 0, 4).plan(X)
        assert not plan.value.completed and not plan.gradient.completed


# Of weights and tokens, whose attention to those before them makes gradients from masked copies of the products.
DIVIDED = {
    "the variance, which counts its elements": lambda w, x: x / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5),
    "a standard deviation less a degree of freedom": lambda w, x: x / (x.std(-1, keepdims=True, ddof=1) + 1e-5),
    "a number less another": lambda w, x: jnp.tanh(x @ w) / (1 - w[0, 0] ** 2),
    "odds": lambda w, x: x / (1.01 - nn.sigmoid(x @ w)),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_quotient_jumps_where_its_divisor_does_alone(name):
    def attention(w, x):
        h = DIVIDED[name](w, x)
        scores = jnp.where(jnp.tri(24, dtype=bool), (h @ w) @ (h @ w).T, -jnp.inf)
        return nn.softmax(scores) @ (h @ w)

    args = 0.3 * draw(6, D, D), H
    assert_right(tile(attention, (None, 0), 4), args, untiled(attention, args))


# Of a value for each row: what is stored for comparisons is not computed again for what the checkpoint compares inside.
AFTERWARDS = {
    "maximum": lambda h: jnp.square(h).max(),
    "minimum": lambda h: jnp.square(h).min(),
    "equal to the maximum": lambda h: jnp.where(jnp.square(h) == jnp.square(h).max(), h, 0).sum(),
}


@pytest.mark.redundant("seed")
@pytest.mark.parametrize("seed", [1, 9, 12])
@pytest.mark.parametrize("name", AFTERWARDS)
def test_rows_of_a_checkpoint_meet_their_extremum(name, seed):
    inside = jax.checkpoint(lambda x, w: nn.logsumexp(30 * jnp.tanh((x @ w) / 30), -1))
    fn = lambda x, w: AFTERWARDS[name](inside(x, w))
    args = draw(seed, 13, 6), 0.6 * draw(seed + 50, 6, 5)
    assert_right(tile(fn, (0, None), 4), args, untiled(fn, args))


def test_a_value_compared_with_itself_asks_for_nan():
    fn = lambda h, w: jnp.where(jnp.isnan(h @ w - (h @ w).max(-1, keepdims=True)), 0.0, h @ w).sum()
    assert not tile(fn, (None, 1), 4).plan(H, W).value.completed


def earth_mover(x, w):
    """The last of each row's cumulative probabilities is 1, as the other distribution's, up to rounding."""
    size = w.shape[1]
    return jnp.abs(jnp.cumsum(nn.softmax(x @ w), 1) - (jnp.arange(size) + 1.0) / size).sum(1)


@pytest.mark.parametrize(("n", "seed"), [(2, 2), (3, 2), (2, 5), (3, 5)])
def test_all_loops_see_a_cumulative_sum_pass_a_number_alike(n, seed):
    x, w, cotangent = draw(seed, 24, 6), draw(seed + 50, 6, 9), draw(6, 24)
    pull = lambda fn: jax.jit(lambda x, w: jax.vjp(fn, x, w)[1](cotangent))(x, w)
    for got, want in zip(pull(tile(earth_mover, (None, 1), n, gather="any")), pull(earth_mover), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


def test_a_cumulative_sum_that_is_too_large_to_store_is_refused():
    with pytest.raises(TileError, match="several loops ask where a cumulative sum passes a number"):
        jax.grad(lambda h, w: tile(earth_mover, (None, 1), 3)(h, w).sum())(H, W)
