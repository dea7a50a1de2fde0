"""Attention by kernels: each against plain attention, what it refuses, and which one suits."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import zoo
from experiments.configs.compute import ATTENTION
from experiments.planning import targets
from experiments.planning.hlo import collectives, dot_flops
from tests.helpers import equations
from transforms import tile
from transforms.remat import remat
from transforms.sharding import make_mesh, place
from zoo.kernels.attention import KERNELS, Asked, choose, cudnn_attention, splash_attention, tiled
from zoo.models.layers import Ops, attention, few_windows

B, S, N, K, H = 1, 384, 4, 2, 64
SPLASH = functools.partial(splash_attention, interpret=True)
CUDNN = functools.partial(cudnn_attention, implementation="xla")  # the same function's other implementation
SEGMENTS = jnp.asarray([[0] * 100 + [1] * (S - 100)], jnp.int32)
CASES = {
    "window, cap, documents": {"window": 70, "cap": 5.0, "q_segments": SEGMENTS, "k_segments": SEGMENTS},
    "sinks": {"sinks": jnp.linspace(-1.0, 2.0, N)},
    "all": {},
    "window": {"window": 70},
    "window of all": {"window": S},
    "one key": {"window": 1},
    "both ways": {"causal": False},
    "window, both ways": {"window": 70, "causal": False},
}
ROWS = [
    pytest.param(kernel, case, marks=[] if (kernel, case) in LIGHT else [pytest.mark.heavy])
    for LIGHT in [
        {
            ("splash", "window, both ways"),
            ("splash", "window, cap, documents"),
            ("splash", "sinks"),
            ("splash in pieces", "window, cap, documents"),
            ("cudnn", "window"),
            ("tiled", "all"),
        }
    ]
    for kernel, cases in {
        "splash": CASES,
        "splash in pieces": CASES,
        "tiled": CASES,
        "cudnn": ("all", "window", "window of all", "one key", "both ways", "window, both ways"),
    }.items()
    for case in cases
]
PIECES = functools.partial(SPLASH, piece=128)  # four, of which the last is empty
ADAPTERS = {"splash": SPLASH, "splash in pieces": PIECES, "cudnn": CUDNN, "tiled": tiled(3)}


def drawn(*shapes, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def pulled(run, how, q, k, v, out):
    """The value and the gradients of queries, keys, values and sinks."""

    def call(q, k, v, sinks):
        return run(q, k, v, scale=0.125, **how | ({} if sinks is None else {"sinks": sinks}))

    value, pull = jax.vjp(jax.jit(call), q, k, v, how.get("sinks"))
    return jax.tree.leaves((value, pull(out)))


def close(found, wanted):
    """To the largest of each; of what is zeros, where equal terms cancel, to the largest of all."""
    most = max(np.abs(one).max() for one in wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6 * (np.abs(other).max() or most))


@pytest.mark.parametrize(("kernel", "case"), ROWS)
def test_kernels_are_plain_attention(kernel, case):
    args = drawn((B, S, N, H), (B, S, K, H), (B, S, K, H), (B, S, N, H))
    close(pulled(ADAPTERS[kernel], CASES[case], *args), pulled(attention, CASES[case], *args))


KEEPING = [
    pytest.param(kernel, case, marks=[] if (kernel, case) in light else [pytest.mark.heavy])
    for light in [{("splash", "sinks"), ("splash in pieces", "sinks"), ("tiled", "window, cap, documents")}]
    for kernel in ("splash", "splash in pieces", "tiled")
    for case in CASES
]


@pytest.mark.parametrize(("kernel", "case"), KEEPING)
def test_gradients_follow_from_what_a_kernel_keeps(kernel, case):
    """Of rows without a gradient too, to which no multiple of it points."""
    *args, out = drawn((B, S, N, H), (B, S, K, H), (B, S, K, H), (B, S, N, H))
    out, how = out.at[:, 3].set(0), CASES[case]
    seen, logs = ADAPTERS[kernel](*args, scale=0.125, **how, keep=True)
    assert logs.shape == (B, N, S)
    own = jnp.moveaxis((out * seen).sum(-1), 1, -1)
    again = functools.partial(ADAPTERS[kernel], kept=(logs, own))
    value, *wanted = pulled(attention, how, *args, out)
    close((seen, *pulled(again, how, *args, out)[1:]), (value, *wanted))


def test_the_program_of_a_long_text_is_that_of_a_longer_one():
    """What a kernel knows of its blocks beforehand would be 64 times as much, and is made by the processor."""

    def program(length):
        x, kv = (jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16) for heads in (4, 2))
        loss = lambda *args: splash_attention(*args, scale=1.0, window=9000).astype(jnp.float32).sum()
        found = list(equations(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, kv, kv)))
        return len(found), [e.params["grid_mapping"].grid for e in found if e.primitive.name == "pallas_call"]

    count, grids = program(2**17)
    assert (count, grids) == program(2**20)
    assert grids and all(np.prod(grid) <= 2 * 2 * 16 * 16 for grid in grids)


def test_a_backward_pass_that_keeps_other_things_is_refused_by_what_it_keeps():
    """As that of attention without a kernel: its sums are no logarithms."""
    args = drawn((B, S, N, H), (B, S, K, H), (B, S, K, H))
    plain = functools.partial(ADAPTERS["cudnn"], scale=0.125)
    with pytest.raises(RuntimeError, match=rf"JAX {jax.__version__} keeps .* one float32 array of {B * S * N} log"):
        plain(*args, keep=True)


def test_splash_is_traced_for_devices_that_compute_nothing():
    if not importlib.util.find_spec("libtpu"):
        pytest.skip("the compiler for TPUs is not installed")
    x = jax.ShapeDtypeStruct((B, 256, N, H), jnp.bfloat16)
    with jax.set_mesh(make_mesh(1, devices=targets.find("v5e-1").devices)):
        traced = jax.jit(functools.partial(ADAPTERS["splash"], scale=0.125)).trace(x, x, x)
    assert traced.out_info.shape == x.shape


@pytest.mark.measured
@pytest.mark.parametrize("kernel", ["splash", "cudnn"])
def test_on_a_mesh_each_device_runs_its_own_heads_and_rows(kernel):
    q, k, v = drawn((4, 128, N, H), (4, 128, K, H), (4, 128, K, H))
    wanted = attention(q, k, v, scale=0.125)
    with jax.set_mesh(make_mesh(2, 4)):  # four devices cut four heads; two kv heads stay whole, and are repeated
        spread = [place(x, PartitionSpec("data", None, "model" if x is q else None, None)) for x in (q, k, v)]
        run = jax.jit(lambda *args: ADAPTERS[kernel](*args, scale=0.125))
        text = run.lower(*spread).compile().as_text()
        np.testing.assert_allclose(run(*spread), wanted, atol=1e-5)
    assert not any(word in text for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_tiles_of_queries_whose_sequence_and_heads_devices_share(kv_heads):
    """Keys whose heads are fewer than devices are repeated; sums over devices are made once, not for each tile."""
    q, k, v, out = drawn((2, 64, 8, 16), *((2, 64, kv_heads, 16),) * 2, (2, 64, 8, 16))
    how = {"window": 9, "cap": 5.0}
    wanted = pulled(attention, how, q, k, v, out)
    with jax.set_mesh(make_mesh(1, 4, 2)):
        heads = lambda x: "model" if x.shape[2] % 4 == 0 else None
        put = [place(x, PartitionSpec(None, "context", heads(x))) for x in (q, k, v, out)]
        close(pulled(tiled(4), how, *put), wanted)
        pull = jax.jit(lambda q, k, v, out: pulled(tiled(4), how, q, k, v, out))
        sums = [one for one in collectives(pull.lower(*put).compile().as_text(), 8) if one.op != "all-gather"]
        assert sums and all(one.times == 1 for one in sums)


SMALL = Asked(platform="gpu", dtype="bfloat16", length=256, head_dim=64)
REFUSALS = [
    ("cudnn", {"softcap": True}, "caps no scores, and this model's are capped"),
    ("cudnn", {"packed": True}, "does not keep documents of one row apart"),
    ("cudnn", {"chunks": True}, "does not keep chunks of a text apart"),
    ("cudnn", {"sinks": True}, "has no sinks"),
    ("cudnn", {"platform": "cpu"}, "runs on gpu, and this is a cpu"),
    ("cudnn", {"dtype": "float32"}, "computes in bfloat16, and this run in float32: set hardware.compute_dtype"),
    ("cudnn", {"spread": 2}, "needs whole sequences, and mesh.context=2 devices share each"),
    ("splash", {}, "runs on tpu, and this is a gpu"),
    ("splash", {"platform": "tpu", "length": 300}, "takes sequences of a multiple of 128 tokens, and these have 300"),
    ("splash", {"platform": "tpu", "spread": 4}, "mesh.context=4 devices share each"),
    ("splash", {"platform": "tpu", "dtype": "float64"}, "computes in float32 or bfloat16, and this run in float64"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSALS)
def test_what_a_kernel_cannot_do_is_said(name, changes, message):
    assert message in KERNELS[name].refusal(dataclasses.replace(SMALL, **changes))


def test_windows_are_refused_by_a_kernel_without_them():
    kernel = dataclasses.replace(KERNELS["plain"], window=False)
    assert "has no windows" in kernel.refusal(dataclasses.replace(SMALL, windows=(None, 8)))
    assert kernel.refusal(SMALL) is None


def test_texts_longer_than_a_chunk_are_refused_by_a_kernel_without_chunks():
    sizes = {"vocab_size": 64, "num_layers": 2, "embed_dim": 32, "mlp_dim": 32, "num_heads": 8, "head_dim": 64}
    config = zoo.Llama4Config(**sizes, num_kv_heads=2, attention_pattern="LG", chunk=256)
    of = lambda length: Asked.of(config, platform="gpu", dtype="bfloat16", length=length)
    assert not of(256).chunks
    assert choose(of(257)) == ("plain", "cudnn does not keep chunks of a text apart, and layers of this model do")


def test_what_suits_is_chosen_with_the_reason():
    choice = lambda **changes: choose(dataclasses.replace(SMALL, **changes))
    assert choice(platform="cpu") == ("plain", "there is no kernel for a cpu")
    assert choice(platform="tpu") == ("splash", "the kernel of a tpu")
    assert choice(platform="gpu", softcap=True) == ("plain", "cudnn caps no scores, and this model's are capped")
    plain, why = choice(platform="tpu", length=100)
    assert plain == "plain" and why.startswith("splash takes sequences of a multiple of 128")


def test_the_configuration_names_the_kernels():
    assert set(ATTENTION) == set(KERNELS)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"q_positions": jnp.zeros((1, 8), jnp.int32)}, "reads sequences from their beginning"),
        ({"window": jnp.asarray(3)}, "takes windows as numbers"),
    ],
)
@pytest.mark.parametrize("run", [SPLASH, CUDNN])
def test_calls_for_what_a_kernel_does_not_do_are_refused(run, how, message):
    q, k, v = drawn((1, 8, 2, 8), (1, 8, 2, 8), (1, 8, 2, 8))
    with pytest.raises(ValueError, match=message):
        run(q, k, v, scale=1.0, **how)


@pytest.mark.parametrize("word", ["cap", "sinks", "q_segments"])
def test_cudnn_refuses_what_it_lacks(word):
    q, k, v = drawn((1, 8, 2, 8), (1, 8, 2, 8), (1, 8, 2, 8))
    given = {"cap": 5.0, "sinks": jnp.zeros(2), "q_segments": jnp.zeros((1, 8), jnp.int32)}
    with pytest.raises(ValueError, match=f"cudnn attention has no {word}"):
        CUDNN(q, k, v, scale=1.0, **{word: given[word]})


def test_splash_refuses_other_lengths_and_cut_sequences():
    with pytest.raises(ValueError, match="a multiple of 128 tokens, and these have 8"):
        SPLASH(*drawn((1, 8, 2, 8), (1, 8, 2, 8), (1, 8, 2, 8)), scale=1.0)
    with jax.set_mesh(make_mesh(1, context=8)):
        q, k, v = (place(x, PartitionSpec(None, "context")) for x in drawn(*((1, 1024, 2, 8),) * 3))
        with pytest.raises(ValueError, match="needs whole sequences, and context cuts them"):
            SPLASH(q, k, v, scale=1.0)


def test_layers_of_few_windows_each_have_their_own():
    assert few_windows((8, None, 8, 99), 64)[0] == (8, None)
    assert few_windows((8, None, 8, 99), 64)[1].tolist() == [0, 1, 0, 1]
    assert few_windows((8, 8), 64) == ((8,), None)
    assert few_windows((None, 99), 64) == ((None,), None)


def needs_numbers(*args, window, **how):
    assert window is None or isinstance(window, int)
    return attention(*args, window=window, **how)


@pytest.mark.parametrize(("pattern", "packed"), [("LG", False), ("LLLG", True), ("L", False)])
def test_windows_are_numbers_where_attention_needs_them(pattern, packed):
    sizes = {"vocab_size": 64, "num_layers": 5, "embed_dim": 16, "mlp_dim": 32, "num_heads": 2, "num_kv_heads": 1}
    config = zoo.GemmaConfig(**sizes, head_dim=8, window=3, attention_pattern=pattern)
    model = zoo.Gemma.init(config, key=jax.random.key(0))
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 64, (2, 12)))
    segments = jnp.asarray([[0] * 5 + [1] * 7] * 2, jnp.int32) if packed else None

    def gradients(ops):
        (weights,) = drawn((2, 12, 16))
        loss = lambda model: (model.hidden(ids, ops=ops, remat=remat("full"), segments=segments) * weights).sum()
        return jax.jit(jax.grad(loss))(model)

    wanted, found = gradients(None), gradients(Ops(attention=needs_numbers, static_windows=True))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * (np.abs(other).max() + 1))


@pytest.mark.parametrize(
    ("kv_heads", "axis", "n"),
    [
        (2, (0, 0, 0, 0), 2),
        pytest.param(2, (2, 2, 2, None), 2, marks=pytest.mark.heavy),
        (1, (3, None, None, None), 4),
    ],
)
def test_a_kernel_runs_a_tile_of_the_batch_or_of_heads_at_a_time(kv_heads, axis, n):
    shapes = (2, 256, kv_heads, 4 // kv_heads, 16), (2, 256, kv_heads, 16), (2, 256, kv_heads, 16)
    args = (*drawn(*shapes), jnp.asarray([[0] * 100 + [1] * 156] * 2, jnp.int32))

    def loss(run, q, k, v, segments):
        q = q.reshape(2 if q.shape[0] == 2 else 1, 256, -1, 16)
        return jnp.sin(run(q, k, v, scale=0.25, window=150, q_segments=segments, k_segments=segments)).sum()

    tiled = tile(functools.partial(loss, SPLASH), axis=axis, n=n)
    wanted = jax.grad(functools.partial(loss, attention), argnums=(0, 1, 2))(*args)
    run = jax.jit(jax.grad(tiled, argnums=(0, 1, 2)))
    for one, other in zip(run(*args), wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6 * np.abs(other).max())
    grids = {
        e.params["grid_mapping"].grid for e in equations(run.trace(*args).jaxpr) if e.primitive.name == "pallas_call"
    }
    assert {np.prod(grid[:2]) for grid in grids} == {2 * {1: 4, 2: 2}[kv_heads] // n}


# ------------------------------------------------------------------- compiled for devices that are not here


def compiled(name, adapter, length=1024, mesh=None):
    """The gradient of an adapter on a device of a kind, compiled; skipped where there is no compiler."""
    from experiments.planning import targets

    try:
        devices = targets.find(name).devices
    except targets.TargetError as error:
        pytest.skip(str(error))
    made = make_mesh(*mesh or (1, 1), devices=devices)
    with jax.set_mesh(made):
        spec = PartitionSpec("data", None, "model") if mesh else PartitionSpec()
        spread = jax.NamedSharding(made, spec)
        q = jax.ShapeDtypeStruct((8, length, 16, 128), jnp.bfloat16, sharding=spread)
        kv = jax.ShapeDtypeStruct((8, length, 8, 128), jnp.bfloat16, sharding=spread)
        loss = lambda *args: adapter(*args, scale=0.1, window=512).astype(jnp.float32).sum()
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, kv, kv).compile()


@pytest.mark.optimised
@pytest.mark.parametrize("mesh", [None, (4, 2)])
@pytest.mark.parametrize(
    ("name", "adapter", "call"),
    [("h100", cudnn_attention, "__cudnn$fmhaSoftmaxBackward"), ("v5e", splash_attention, "tpu_custom_call")],
)
def test_kernels_compile_without_a_device(name, adapter, call, mesh):
    if name == "h100" and not (importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn")):
        pytest.skip("cuDNN's files are not installed")
    found = compiled(f"{name}-{8 if mesh else 1}", adapter, mesh=mesh)
    text = found.as_text()
    assert call in text
    assert not any(f"{word}(" in text for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    scores = 8 * 16 * 1024 * 1024 * 4 // (8 if mesh else 1)
    assert found.memory_analysis().temp_size_in_bytes < scores / 2


def test_of_a_choice_among_windows_the_most_products_count():
    """Not those of all of them: a layer has one."""
    x = jnp.ones((8, 8))
    product = 2 * 8**3
    times = lambda n: lambda x: functools.reduce(lambda made, _: made @ x, range(n), x)
    several = jax.jit(lambda i, x: jax.lax.switch(i, [times(1), times(3), times(2)], x))
    either = jax.jit(lambda i, x: jax.lax.cond(i > 1, times(1), times(2), x))
    assert dot_flops(several.lower(1, x).compile().as_text()) == 3 * product
    assert dot_flops(either.lower(1, x).compile().as_text()) == 2 * product


@pytest.mark.parametrize("kernel", ["tiled", "splash"])
def test_a_loss_over_its_batch_runs_forward_once(kernel):
    """`tile` does not look into loops and kernels of derivative rules: it is promised what it would look for."""

    def loss(weights, x):
        q = (x @ weights).reshape(*x.shape[:2], 4, 8)
        return jnp.square(x + ADAPTERS[kernel](q, q, q, scale=0.3).reshape(x.shape)).mean()

    args = jax.ShapeDtypeStruct((32, 32), "float32"), jax.ShapeDtypeStruct((8, 128, 32), "float32")
    plan = tile(loss, (None, 0), 4).plan(*args)
    assert len(plan.value.loops) == len(plan.gradient.loops) == 1


def test_what_is_given_how_it_points_to_the_gradient_makes_no_promise():
    """Its gradients are not linear in what is given alone."""

    def loss(weights, x, logs, own):
        q = (x @ weights).reshape(*x.shape[:2], 4, 8)
        return jnp.square(ADAPTERS["tiled"](q, q, q, scale=0.3, kept=(logs, own))).mean()

    shapes = (32, 32), (8, 128, 32), (8, 4, 128), (8, 4, 128)
    plan = tile(loss, (None, 0, 0, 0), 4).plan(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
    assert len(plan.gradient.loops) == 2
