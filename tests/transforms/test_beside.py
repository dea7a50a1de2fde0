"""Neighbours along the cut axis: shifts, windows and convolutions of what is computed, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests import quick
from transforms import TileError, tile

pytestmark = [pytest.mark.symbolic, pytest.mark.usefixtures("float64")]

B, S, D, F = 2, 23, 3, 40  # batch, sequence, embed, hidden


def draw(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape))


def hidden(x, w):
    return jnp.tanh(x @ w)


def conv(x, kernel, padding, groups=1):
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, kernel, (1,), padding, dimension_numbers=numbers, feature_group_count=groups)


def previous(h):
    return jnp.pad(h, ((1, 0), (0, 0)))[:-1]


def token_shift(x, w, v):
    h = hidden(x, w)
    return h + v[:, 0] * (previous(h) - h)


def joined(x, w, v):
    h = hidden(x, w)
    return h * jnp.concatenate([v.T[:1], h[:-1]])


def shift_of_both_sides(x, w, v):
    h = hidden(x, w)
    return (jnp.exp(h[2:] - h[1:-1]) * h[:-2]).sum(-1)


def total_variation(x, w, v):
    h = hidden(x, w)
    return ((h[1:] - h[:-1]) ** 2).sum() + (v**2).sum()


def differences(x, w, v):
    return jnp.abs(jnp.diff(hidden(x, w), axis=0)) @ v


def causal(x, w, v):
    padded = jnp.pad(hidden(x, w), ((3, 0), (0, 0)))
    return jax.nn.silu(sum(padded[i : i + S] * v[:, i] for i in range(4)))


def local_sums(x, w, v):
    padded = jnp.pad(hidden(x, w), ((2, 2), (0, 0)))
    return sum(padded[i : i + S] for i in range(5)) @ v / 5


def depthwise(x, w, v):
    return jax.nn.silu(conv(hidden(x, w)[None], v.T[:, None], [(3, 0)], groups=F)[0])


def dilated(x, w, v):
    numbers = ("NWC", "WIO", "NWC")
    kernel = v.reshape(2, F, 2)
    return lax.conv_general_dilated(
        hidden(x, w)[None], kernel, (1,), [(1, 2)], rhs_dilation=(3,), dimension_numbers=numbers
    )


def average(x, w, v):
    return lax.reduce_window(hidden(x, w), 0.0, lax.add, (3, 1), (1, 1), "SAME") @ v


def rolled(x, w, v):
    h = hidden(x, w)
    return (h * jnp.roll(h, 1, axis=0)) @ v


def consistency(x, w, v):
    logits = jax.nn.log_softmax(x @ w)
    labels = jnp.arange(1, S) % F
    nll = -logits[:-1][jnp.arange(S - 1), labels]
    return nll.mean() + 0.1 * (jnp.exp(logits[1:]) * (logits[1:] - logits[:-1])).sum(-1).mean() + v.sum()


def channel_mix(x, w, v):
    def block(h):
        shifted = previous(h)
        key = jnp.square(jax.nn.relu((h + v[:, 0] * (shifted - h)) @ (w.T @ w)))
        return h + jax.nn.sigmoid(h + v[:, 1] * (shifted - h)) * key

    return (jax.checkpoint(block)(block(hidden(x, w))) ** 2).mean()


def mamba(x, w, v):
    h, gate = jnp.split(x @ w, 2, -1)
    y = conv(h[None], v[: F // 2].T[:, None], [(3, 0)], groups=F // 2)[0]
    return (jax.nn.silu(y) * jax.nn.silu(gate)) @ v[F // 2 :]


def twice(x, w, v):
    return (jnp.diff(hidden(x, w), n=2, axis=0) ** 2 @ v).mean()


def cached(x, w, v):
    padded = jnp.concatenate([v.T[:3], hidden(x, w)])
    return jax.nn.silu(sum(padded[i : i + S] * v[:, i] for i in range(4)))


def unpadded(x, w, v):
    return jax.nn.silu(conv(hidden(x, w)[None], v.reshape(4, F, 1), "VALID")[0])


def unpadded_sums(x, w, v):
    return lax.reduce_window(hidden(x, w), 0.0, lax.add, (3, 1), (1, 1), "VALID") @ v


def images(x, w, v):
    numbers = ("NHWC", "HWIO", "NHWC")
    h = hidden(x, w).reshape(1, S, 5, 8)
    kernel = v[:, :2].reshape(1, 1, 8, 10) * jnp.arange(1.0, 10).reshape(3, 3, 1, 1)
    return jax.nn.relu(lax.conv_general_dilated(h, kernel, (1, 1), "SAME", dimension_numbers=numbers)).mean((0, 2, 3))


def parts_of_parts(x, w, v):
    logits = jax.nn.log_softmax(x @ w)[:-1]
    return (jnp.exp(logits[1:]) * (logits[1:] - logits[:-1])).sum(-1) @ jnp.ones(S - 2) + v.sum()


CASES = [
    twice,
    cached,
    unpadded,
    unpadded_sums,
    images,
    parts_of_parts,
    token_shift,
    joined,
    shift_of_both_sides,
    total_variation,
    differences,
    causal,
    local_sums,
    depthwise,
    dilated,
    average,
    rolled,
    consistency,
    channel_mix,
    mamba,
]


def both(fn, args):
    """Its value, weighted, and the gradients."""

    def weighted(*args):
        out = fn(*args)
        return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum()

    return quick.jit(jax.value_and_grad(weighted, argnums=range(len(args))))(*args)


@pytest.mark.redundant("n")
@pytest.mark.parametrize("n", [2, 4, 7])
@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_values_and_gradients_are_the_untiled_ones(fn, n):
    args = draw(S, D), draw(D, F), draw(F, 4)
    got, want = both(tile(fn, (0, None, None), n), args), both(fn, args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * float(abs(b).max()))


def start(h):
    """Tokens after a start token, of which the last is cut off."""
    return (jnp.concatenate([jnp.zeros((1, F)), h])[:-1] * h).sum()


@pytest.mark.parametrize(
    "fn",
    [
        start,
        lambda h: ((h[1:] - h[:-1]) ** 2).sum(),
        lambda h: (jax.nn.log_softmax(h)[:-1] * h[1:]).sum(),
        lambda h: (conv(h[None], jnp.ones((3, 1, F), h.dtype), "VALID", F) ** 2).sum(),
    ],
    ids=["start", "differences", "next", "unpadded"],
)
def test_a_halo_is_one_whatever_else_is_large(fn):
    """Beside a large weight an array might be whole; it is not, nor does the plan have more loops."""

    def plan(size):
        loss = tile(lambda x, w, large: fn(hidden(x, w)) + large.sum(), (0, None, None), 8)
        found = loss.plan(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, D), (D, F), (size,))))
        return [(run.flops, run.temp, len(run.loops), run.completed) for run in (found.value, found.gradient)]

    small, beside = plan(8), plan(10**6)
    assert [run[2:] for run in small] == [(1, ()), (1, ())]
    assert [(flops, *rest) for flops, _, *rest in small] == [(flops, *rest) for flops, _, *rest in beside]
    assert all(b[1] < 2 * s[1] for s, b in zip(small, beside, strict=True))


def smoothed(h, padding, width=3):
    return conv(h[None], jnp.ones((width, 1, F), h.dtype) / width, padding, F)[0]


def highest(h):
    return lax.reduce_window(h, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME")


WINDOWS = {
    "padded over unpadded": lambda h: smoothed(smoothed(h, "VALID"), "SAME"),
    "the highest": lambda h: highest(smoothed(h, "VALID")),
    "unpadded again": lambda h: smoothed(smoothed(smoothed(h, "VALID"), "SAME"), "VALID", 2),
    "of a part": lambda h: highest(smoothed(h[1:-2], "SAME")),
    "of two parts": lambda h: smoothed(jnp.concatenate([h[:2], h[5:]]), "SAME"),
    "summed": lambda h: jnp.cumsum(smoothed(smoothed(h, "VALID"), "SAME"), 0),
}


@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_over_a_part_have_neighbours(name, n):
    """What is not part of an axis any more is whole, where it may be: a piece of it has no neighbours."""
    loss = lambda x, w: (WINDOWS[name](x @ w) ** 2).sum()
    args = draw(S, D), draw(D, F)
    tiled = tile(loss, (0, None), n, gather="any")
    got, want = (jax.value_and_grad(each, (0, 1))(*args) for each in (tiled, loss))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * float(abs(b).max()))


def counted(h):
    """Rows in a loop, whose counter is whole."""
    return jnp.diff(lax.fori_loop(0, 3, lambda i, rows: jnp.sin(rows) + i, h), axis=0)


def with_a_loss(h):
    """Layers that hand on a loss beside the rows."""
    (rows, loss), losses = lax.scan(lambda c, w: ((jnp.sin(c[0]) * w, c[1] + w), w * c[1]), (h, 1.0), jnp.arange(3.0))
    return rows[1:] * rows[:-1] * loss + losses.sum()


def chosen(h):
    rows, scale = lax.cond(True, lambda h: (jnp.sin(h), 2.0), lambda h: (h, 1.0), h)
    return jnp.roll(rows, 2, axis=0) * rows * scale


def again(h):
    rows, scale = jax.checkpoint(lambda h: (jnp.sin(h), jnp.float64(2)))(h)
    return (rows[2:] - rows[:-2]) * scale


@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("fn", [counted, with_a_loss, chosen, again], ids=lambda fn: fn.__name__)
def test_neighbours_are_read_of_what_is_made_with_something_whole(fn, n):
    loss = lambda x, w: (fn(x @ w) ** 2).sum()
    args = draw(S, D), draw(D, F)
    got, want = (jax.value_and_grad(each, (0, 1))(*args) for each in (tile(loss, (0, None), n), loss))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * float(abs(b).max()))


def pooled(x, padding):
    return lax.reduce_window(jnp.tanh(x), 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), padding)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_windows_over_two_dimensions_take_in_their_padding(padding):
    """The gradient of a sum over windows pads both dimensions; nothing as long as the axis is whole."""
    x = draw(2, S, 6, 3)
    loss = lambda x: (pooled(x, padding) ** 2).sum()
    np.testing.assert_allclose(jax.grad(tile(loss, 1, 4))(x), jax.grad(loss)(x), rtol=1e-9)
    assert not tile(loss, 1, 4).plan(x).gradient.completed


@pytest.mark.measured
@pytest.mark.parametrize("fn", [token_shift, depthwise, differences], ids=lambda fn: fn.__name__)
def test_memory_falls_with_the_tiles(fn):
    def temporary(n):
        loss = tile(lambda *args: (fn(*args) ** 2).mean(), (0, None, None), n)
        return jax.jit(jax.grad(loss, 1)).lower(*args).compile().memory_analysis().temp_size_in_bytes

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((400, D), (D, F), (F, 4))]
    assert temporary(16) < 0.5 * temporary(4) < 0.25 * temporary(1)


def test_what_is_read_twice_is_computed_once():
    plan = tile(token_shift, (0, None, None), 4).plan(draw(S, D), draw(D, F), draw(F, 4))
    (loop,) = plan.value.loops
    assert loop.flops == 2 * S * D * F


def test_vmap_of_grad():
    xs, w, v = draw(B, S, D), draw(D, F), draw(F, 4)
    grads = [
        quick.jit(jax.vmap(jax.grad(f, 1), (0, None, None)))(xs, w, v)
        for f in (tile(channel_mix, (0, None, None), 4), channel_mix)
    ]
    np.testing.assert_allclose(*grads, rtol=1e-9, atol=1e-12)


def test_more_rows_than_a_tile_has_are_refused():
    def far(x, w):
        h = hidden(x, w)
        return (h * jnp.pad(h, ((20, 0), (0, 0)))[:-20]).sum()

    with pytest.raises(TileError, match="20 rows before and 0 after each tile of 11"):
        tile(far, (0, None), 4)(draw(44, D), draw(D, F))


def test_what_a_state_goes_through_is_not_made_beside_the_tile_but_handed_on():
    def fn(x, w):
        total = jnp.cumsum(hidden(x, w), 0)
        return (total * previous(total)).sum()

    args, tiled = (draw(S, D), draw(D, F)), tile(fn, (0, None), 2)
    both = (quick.jit(jax.value_and_grad(f, (0, 1)))(*args) for f in (tiled, fn))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), *both)
    assert all(loop.flops <= 3 * 2 * S * D * F for loop in tiled.plan(*args).gradient.loops)  # no product twice


def test_what_selects_in_windows_is_not_moved_as_windows_are():
    """Derivatives of maxima select rows of one array by those of another."""
    maxima = lambda x: lax.reduce_window(x[1:], -jnp.inf, lax.max, (5, 1), (1, 1), ((1, 2), (0, 0)))
    x, moved = draw(32, D), draw(32, D)
    fn = lambda x: (maxima(x) @ jnp.ones((D, 2 * D)))[:28].sum(1)
    np.testing.assert_allclose(*(jax.jvp(f, (x,), (moved,))[1] for f in (tile(fn, 0, 4), fn)), rtol=1e-6)
    with pytest.raises(TileError, match="takes a part of the cut axis"):
        jax.grad(tile(lambda x: jnp.tanh(maxima(x @ jnp.ones((D, 2 * D)))).sum(), 0, 4))(x)


@pytest.mark.parametrize("several", [1, 3])
def test_kernels_of_single_features_have_their_gradient_over_a_cut_batch(several):
    """JAX makes it by a convolution with groups of batches, of which the cut batch is the feature that is summed."""
    loss = lambda x, kernel: (jnp.sin(conv(x, kernel, "SAME", groups=4)) ** 2).sum()
    args = draw(12, 7, 4), draw(3, 1, 4 * several)
    found, expected = (jax.value_and_grad(fn, (0, 1))(*args) for fn in (tile(loss, (0, None), 5), loss))
    for got, want in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
