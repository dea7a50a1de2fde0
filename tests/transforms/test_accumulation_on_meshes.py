"""Gradient accumulation on meshes: `tile` over the batch of a whole model's loss sums gradients over devices once."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from experiments.planning.hlo import collectives
from tests.quick import QUICK
from tests.tiny import on_mesh
from transforms import tile
from transforms.remat import remat
from transforms.sharding import AXES, make_mesh, sharding_of

pytestmark = pytest.mark.symbolic
SIZES = {"vocab_size": 64, "num_layers": 2, "embed_dim": 16, "mlp_dim": 32, "num_heads": 8, "head_dim": 4}
TIED = zoo.GemmaConfig(**SIZES, num_kv_heads=4, post_norms=True, final_softcap=5.0, window=3, attention_pattern="LG")
UNTIED = zoo.Qwen2Config(**SIZES, num_kv_heads=2)
COPIED = {letter: axes for letter, axes in AXES.items() if letter != "D"}
LAYOUTS = {"data": ((8, 1), COPIED), "fsdp": ((8, 1), AXES), "fsdp and model": ((4, 2), AXES)}


def loss_of(policy):
    def loss(model, batch):
        tokens, targets, mask = batch
        logits = model.logits(model.hidden(tokens, remat=remat(policy)))
        picked = jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0).sum(-1)
        return ((jax.nn.logsumexp(logits, -1) - picked) * mask).sum() / mask.sum()

    return loss


def compiled(loss, *args):
    return eqx.filter_jit(eqx.filter_value_and_grad(loss), **QUICK).lower(*args).compile()


def exchanged(text, looped):
    """The bytes that each device sends, in loops or outside."""
    return sum(c.bytes * c.times for c in collectives(text, 8) if c.looped == looped)


CASES = [(UNTIED, "fsdp", "none"), (TIED, "fsdp and model", "full"), (TIED, "fsdp", "full"), (UNTIED, "data", "full")]


@pytest.mark.parametrize(("config", "layout", "policy"), CASES)
def test_gradients_are_summed_over_devices_once(config, layout, policy):
    model = zoo.model_class(config).init(config, key=jax.random.key(0))
    random = np.random.default_rng(0)
    tokens = random.integers(0, 64, (16, 16), dtype=np.int32)
    batch = (tokens, np.roll(tokens, -1, 1), (random.uniform(size=(16, 16)) > 0.3).astype(np.float32))
    batch = tuple(map(jnp.asarray, batch))
    loss = loss_of(policy)
    expected, gradients = eqx.filter_jit(eqx.filter_value_and_grad(loss), **QUICK)(model, batch)
    (data, width), axes = LAYOUTS[layout]
    mesh = make_mesh(data, width)
    with jax.set_mesh(mesh):
        args = (
            on_mesh(model, mesh, axes),
            tuple(jax.device_put(x, sharding_of(mesh, "B S", x.shape, axes)) for x in batch),
        )
        step = compiled(tile(loss, axis=(None, 0), n=2), *args)
        (value, found), text = step(*args), step.compiled.as_text()
        untiled = compiled(loss, *args).compiled.as_text() if width == 1 else None
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))
    in_loops, once = exchanged(text, True), exchanged(text, False)
    assert once >= sum(4 * x.size for x in jax.tree.leaves(found)) / data  # the gradients, after the loop
    if untiled is not None:  # nothing but looked-up rows goes between devices in a loop
        assert in_loops < exchanged(untiled, True) / 4
