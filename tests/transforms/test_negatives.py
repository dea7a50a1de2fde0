"""Contrastive losses whose negatives lie on other devices: what these gather is whole, and all pairs are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from tests import quick
from tests.helpers import assert_same
from tests.transforms.test_rounding import assert_right, untiled
from transforms import TileError, tile

pytestmark = pytest.mark.symbolic

MESH = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
ROWS, WIDTH, NARROW = 16, 8, 4  # of each device; features, and of what is compared
RNG = np.random.default_rng(0)
ARGS = tuple(RNG.standard_normal(shape).astype(np.float32) for shape in ((64, WIDTH), (64, WIDTH), (WIDTH, NARROW), ()))


def gather(x):
    return lax.all_gather(x, "data", tiled=True)


def stack(x):
    return lax.all_gather(x, "data").reshape(-1, x.shape[-1])


def embed(x, w):
    h = x @ w
    return h / jnp.linalg.norm(h, axis=-1, keepdims=True)


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def own(x, rows=ROWS):
    return lax.axis_index("data") * rows + jnp.arange(len(x))


def clip(x, y, w, scale, gather=gather):
    """https://arxiv.org/abs/2103.00020, as OpenCLIP computes it with local losses."""
    x, y = embed(x, w), embed(y, w)
    both = (x, gather(y)), (y, gather(x))
    return sum(cross_entropy(jnp.exp(scale) * a @ b.T, own(a)) for a, b in both) / 2


def siglip(x, y, w, scale):
    """https://arxiv.org/abs/2303.15343."""
    x, y = embed(x, w), gather(embed(y, w))
    sign = 2 * (own(x)[:, None] == jnp.arange(len(y))) - 1
    return -jax.nn.log_sigmoid(sign * (jnp.exp(scale) * x @ y.T - 1)).sum() / len(x)


def moco(x, y, w, scale):
    """https://arxiv.org/abs/1911.05722, its queue the other devices' keys."""
    x, y = embed(x, w), lax.stop_gradient(embed(y, w))
    logits = jnp.concatenate([(x * y).sum(-1, keepdims=True), x @ gather(y).T], 1)
    return cross_entropy(jnp.exp(scale) * logits, jnp.zeros(len(x), int))


def simclr(x, y, w, scale):
    """https://arxiv.org/abs/2002.05709: two views of each row, and none is a negative of its own."""
    z = jnp.concatenate([embed(x, w), embed(y, w)])
    everyone, me = gather(z), own(z, 2 * ROWS)
    logits = jnp.where(me[:, None] == jnp.arange(len(everyone)), -1e9, jnp.exp(scale) * z @ everyone.T)
    first = lax.axis_index("data") * 2 * ROWS
    return cross_entropy(logits, first + (jnp.arange(len(z)) + ROWS) % len(z))


def views(x, y, w, scale):
    """Two views of each row behind each other, whose rows are stacked: a device's share is larger than an input."""
    z = jnp.stack([x, y], 1)
    everyone = lax.all_gather(z, "data").reshape(-1, 2, WIDTH)
    return jnp.einsum("nvd,mud->nvmu", z * scale, everyone).max((2, 3)).mean() + jnp.sum(w**2)


def temperatures(x, y, w, scale):
    """Three at once: what is gathered for them is larger than the inputs, and stays cut."""
    x, y = x * scale, y @ w @ w.T
    each = lambda t: jax.nn.logsumexp(t * x @ stack(y * t).T, 1).mean()
    return jax.vmap(each)(jnp.arange(1.0, 4.0)).sum()


LOSSES = {
    "clip": clip,
    "clip, stacked": lambda *args: clip(*args, gather=stack),
    "siglip": siglip,
    "moco": moco,
    "simclr": simclr,
    "views": views,
}


def compared(loss, typed, n):
    """The plan of the gradient of a loss's mean over the devices, whose values and gradients are the untiled ones."""
    fn = lambda *args: lax.pmean(loss(*args), "data")
    spread, same = PartitionSpec("data"), PartitionSpec()
    plans, tiled = [], tile(fn, (0, 0, None, None), n)

    def learn(fn):
        mapped = jax.shard_map(fn, mesh=MESH, in_specs=(spread, spread, same, same), out_specs=same, check_vma=typed)
        return quick.jit(jax.value_and_grad(mapped, argnums=(0, 1, 2, 3)))(*ARGS)

    def watched(*args):
        plans.append(tiled.plan(*args).gradient)
        return tiled(*args)

    assert_same(learn(watched), learn(fn), 1e-5, floor=1e-6)
    return plans[0]


@pytest.mark.redundant("n")
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("typed", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_the_untiled_ones(name, typed, n):
    plan = compared(LOSSES[name], typed, n)
    assert plan.largest <= plan.untiled_largest * 1.5 / n
    assert ("joined gathers" in plan.passes) == (name in ("clip, stacked", "views"))


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "untyped"])
def test_what_is_too_large_to_be_gathered_whole_stays_cut(typed):
    assert "joined gathers" not in compared(temperatures, typed, 2).passes


def late(x, y, w, scale):
    """Each device's slope is its own, and known late; what it sums came from another, and of a shared weight."""
    z = lax.ppermute(x @ w, "data", [(0, 1), (1, 2), (2, 3), (3, 0)])
    return jnp.log(jnp.exp(scale * z * (1 + lax.axis_index("data"))).sum())


@pytest.mark.optimised
@pytest.mark.parametrize("typed", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("loss", [clip, late], ids=["clip", "late"])
def test_float32_is_as_close_to_float64_as_untiled(loss, typed):
    """At the compiler's own flags, as people run it."""
    spread, same = PartitionSpec("data"), PartitionSpec()

    def over(wrap):
        mean = wrap(lambda *args: lax.pmean(loss(*args), "data"))
        return jax.shard_map(mean, mesh=MESH, in_specs=(spread, spread, same, same), out_specs=same, check_vma=typed)

    tiled, fn = over(lambda fn: tile(fn, (0, 0, None, None), 4)), over(lambda fn: fn)
    assert_right(tiled, ARGS, untiled(fn, ARGS))


def test_weights_that_are_gathered_do_not_allow_larger_arrays():
    fn = lambda x, w: jnp.sort(x @ gather(w.T).T, 0)[0].sum()
    mapped = lambda fn: jax.shard_map(
        fn,
        mesh=MESH,
        in_specs=(PartitionSpec("data"), PartitionSpec(None, "data")),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    with pytest.raises(TileError, match="cannot tile `sort`"):
        jax.eval_shape(mapped(tile(fn, (0, None), 4)), jnp.ones((16, WIDTH)), jnp.ones((WIDTH, 256)))


def test_what_is_gathered_tile_by_tile_where_it_can_be_stays_so():
    """Rows of all devices, each by itself."""
    fn = lambda x, w: (jnp.tanh(stack(x @ w)) ** 2).sum()
    plans = []

    def learn(fn):
        mapped = jax.shard_map(
            fn, mesh=MESH, in_specs=(PartitionSpec("data"), PartitionSpec()), out_specs=PartitionSpec(), check_vma=False
        )
        return quick.jit(mapped)(ARGS[0], np.ones((WIDTH, 3 * WIDTH), np.float32))

    def watched(x, w):
        tiled = tile(fn, (0, None), 4)
        plans.append(tiled.plan(x, w).value)
        return tiled(x, w)

    assert_same(learn(watched), learn(fn), 1e-5)
    assert not plans[0].completed and not plans[0].passes
