"""LoRA: computes what the merged model does, learns alone, and goes to disk and back."""

import dataclasses
import json
import math
import operator
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.tiny import same
from tests.zoo import hf_tiny
from tests.zoo.hf_tiny import jit, loaded, loss_fn
from transforms.step import State, make_train_step
from zoo import Gemma4MoeConfig, Granite4MoeConfig, GraniteMoeConfig, Llama4Config, adapters
from zoo.adapters import lora
from zoo.models.layers import linear
from zoo.models.mixtures.experts import ragged_linear

CASES = ["gemma_mqa", "gemma2_gqa", "llama_bias", "mixtral", "qwen3_moe_mixed", "smollm3", "olmo2"]
FUSED = ["gpt2", "neox", "phi3_long"]  # whose folders hold several matrices in one tensor
OTHERS = [
    *FUSED,
    "opt",
    "starcoder2",
    "stablelm_parallel",
    "hunyuan_bias",
    "nemotron_biases",
    "granite4",
    "olmo3",
    "cohere2",
    "olmoe",
    "qwen2_moe",
    "gpt_oss",
    "deepseek_v3",
    "glm4_flash",
    "mistral4",
    "llama4_dense",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "lfm2_moe",
    "granite4_moe",
    "glm4_moe",
    "ernie4_5_moe",
    "gemma4",
    "gemma4_small",
    "gemma4_moe",
]
OTHERS += ["gemma3n"]
ALL = ("q", "k", "v", "o", "gate", "up", "down")


LOSS, MERGE = jit(loss_fn), jit(lora.merge)  # one for all: models of one shape are compiled once


def attached(case: str, targets=ALL, seed: int = 0):
    """The model of a case with an adapter whose B is not zero, drawn in numpy: JAX would compile for each shape."""
    model, rng = loaded(case), np.random.default_rng(seed + 1)
    like = eqx.filter_eval_shape(lora.attach, model, targets, rank=3, alpha=6.0, key=jax.random.key(seed))
    found = list(lora.adapted(like))
    draw = lambda like, size: jax.device_put((size * rng.normal(size=like.shape)).astype(like.dtype))

    def filled(row, part):
        fan_in = math.prod(model.config.dims[letter] for letter in row.fan_in)
        base = operator.attrgetter(row.leaf)(model)
        return dataclasses.replace(part, base=base, a=draw(part.a, fan_in**-0.5), b=draw(part.b, 0.1))

    return lora.put(model, [row for row, _ in found], [filled(*each) for each in found])


@pytest.mark.parametrize("case", CASES + OTHERS)
def test_adapted_equals_merged(case):
    """On every matrix there is: experts, their routers and an untied head too."""
    model = attached(case, ["*"])
    (loss, logits), (merged_loss, merged_logits), (_, plain_logits) = (
        LOSS(m) for m in (model, MERGE(model), loaded(case))
    )
    np.testing.assert_allclose(logits, merged_logits, atol=2e-5)
    assert abs(float(loss) - float(merged_loss)) < 1e-5
    assert np.abs(np.subtract(logits, plain_logits)).max() > 1e-2


def test_a_fresh_adapter_changes_nothing():
    model = lora.attach(loaded(CASES[0]), ALL, rank=2, alpha=4.0, key=jax.random.key(0))
    np.testing.assert_array_equal(LOSS(model)[1], LOSS(loaded(CASES[0]))[1])


def test_the_matrix_is_never_formed():
    """Neither the sum nor its gradient exists: no array of the stack's or a layer's size is made from A and B."""
    model = attached(CASES[0])
    params, frozen = eqx.partition(model, lora.trainable(model))
    text = str(jax.make_jaxpr(jax.grad(lambda p: loss_fn(eqx.combine(p, frozen))[0]))(params))
    config = model.config
    shape = f"f32[{config.embed_dim},{config.mlp_dim}]"
    made = re.findall(rf"{re.escape(shape)} = (\w+)", text)
    assert set(made) <= {"convert_element_type", "squeeze", "transpose", "dynamic_slice"}, made


def test_a_product_with_an_adapted_matrix_is_that_with_the_merged_one():
    key = jax.random.key(0)
    draw = lambda *shape: jax.random.normal(
        jax.random.fold_in(key, len(shape)), shape, jnp.float64 if x64 else jnp.float32
    )
    x64 = jax.config.jax_enable_x64
    cases = {
        "bsd,dnh->bsnh": ((2, 3, 5), (5, 4, 6), (5, 2), (2, 4, 6), "dR,Rnh->dnh"),
        "bsnh,nhd->bsd": ((2, 3, 4, 6), (4, 6, 5), (4, 6, 2), (2, 5), "nhR,Rd->nhd"),
        "...d,vd->...v": ((2, 3, 5), (7, 5), (5, 2), (2, 7), "dR,Rv->vd"),
        "ted,edf->tef": ((8, 3, 5), (3, 5, 4), (3, 5, 2), (3, 2, 4), "edR,eRf->edf"),
    }
    for pattern, (x_shape, base, a, b, together) in cases.items():
        x, part = draw(*x_shape), lora.LowRank(draw(*base), draw(*a), draw(*b), 0.7)
        whole = part.base + 0.7 * jnp.einsum(together, part.a, part.b)
        np.testing.assert_allclose(part.einsum(pattern, x), jnp.einsum(pattern, x, whole), atol=1e-4, err_msg=pattern)


def test_only_the_adapter_learns():
    model = attached(CASES[0], ("q", "down"))
    optimizer = optax.adamw(1e-2)
    state = State.init(model, optimizer, lora.trainable)
    count = sum(part.a.size + part.b.size for _, part in lora.adapted(model))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state[0].mu)) == count
    before = jax.tree.map(np.asarray, eqx.filter(model, eqx.is_array))
    step = make_train_step(lambda m, ids: (loss_fn(m, ids)[0], {}), optimizer, lora.trainable)
    ids = jnp.asarray(hf_tiny.tokens(), jnp.int32)
    losses = []
    for _ in range(8):
        state, metrics = step(ids, state)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1
    changed = jax.tree.map(
        lambda old, new: bool((old != np.asarray(new)).any()), before, eqx.filter(state.model, eqx.is_array)
    )
    assert jax.tree.leaves(changed) == jax.tree.leaves(lora.trainable(model))


@pytest.mark.parametrize(
    ("targets", "leaves"),
    [
        (["q_proj", "v"], ["layers.q", "layers.v"]),
        (["layers.*"], [f"layers.{name}" for name in ALL]),
        (["*_proj"], [f"layers.{name}" for name in ALL]),
        (["model.layers.*.mlp.*"], ["layers.gate", "layers.up", "layers.down"]),
    ],
)
def test_patterns(targets, leaves):
    model = lora.attach(loaded(CASES[0]), targets, rank=1, alpha=1.0, key=jax.random.key(0))
    assert [row.leaf for row, _ in lora.adapted(model)] == leaves


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("llama2", ALL),
        ("gpt2", ("q", "k", "v", "o", "up", "down")),
        ("deepseek_v3", ("q", "o", "gate", "up", "down", "q_down", "kv_down", "kv")),
        ("qwen3_moe_mixed", ALL),
        ("qwen3_next", (*ALL, "qkvz")),
        ("qwen3_5", (*ALL, "qkv", "z")),
        ("lfm2", (*ALL, "before", "behind", "value")),
        ("granite4_hybrid", (*ALL, "z", "xbc")),
    ],
)
def test_usual_matrices_are_those_of_attention_and_of_mlps_that_a_model_has(case, names):
    config = loaded(case).config
    assert lora.usual(config) == list(names)
    found = {row.leaf.rpartition(".")[2] for row in lora.match(config, names)}
    assert found == set(names)  # and no router, which Hugging Face calls `gate` too


def test_patterns_that_match_nothing_list_what_there_is():
    attach = lambda targets, rank=1: lora.attach(loaded(CASES[0]), targets, rank=rank, alpha=1.0, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"`querry`, `embed` matches no matrix[^$]*layers.q \([^$]*layers.down \("):
        attach(["querry", "v", "embed"])
    with pytest.raises(ValueError, match=r"Did you mean `q_proj`\?"):
        attach(["q_prj"])
    with pytest.raises(ValueError, match=r"an empty list of targets"):
        attach([])
    with pytest.raises(ValueError, match=r"rank=0 must be at least 1"):
        attach(["q"], rank=0)


@pytest.mark.parametrize("case", CASES)
def test_folders_keep_adapters(case, tmp_path):
    model = attached(case)
    adapters.save(model, tmp_path)
    again = adapters.load(tmp_path, loaded(case))
    if hasattr(model.config, "num_experts"):  # whose gate and up have one A there, of both ranks
        np.testing.assert_allclose(LOSS(again)[1], LOSS(model)[1], atol=1e-5)
        adapters.save(again, tmp_path / "again")
        assert same(adapters.load(tmp_path / "again", loaded(case)), again)
    else:
        assert same(model, again)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (3, 6.0)
    if case == "gemma_mqa":
        assert settings["target_modules"] == sorted(f"{name}_proj" for name in ALL)


@pytest.mark.crossed("case", "shared")
@pytest.mark.parametrize("shared", [True, False], ids=["one A", "an A each"])
@pytest.mark.parametrize("case", FUSED)
def test_folders_keep_adapters_of_several_matrices_in_one_tensor(case, shared, tmp_path):
    model = attached(case, ["q", "v", "o"])
    if shared:
        model = eqx.tree_at(lambda model: model.layers.v.a, model, model.layers.q.a)
    adapters.save(model, tmp_path)
    held = {name: array.shape for name, array in _held(tmp_path).items() if "layers.0" in name or "h.0" in name}
    config = model.config
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    assert sorted(held.values())[0] == (3, config.embed_dim)
    assert (heads, 3 if shared else 6) in held.values()
    again = adapters.load(tmp_path, loaded(case))
    assert isinstance(again.layers.k, lora.LowRank)  # of a part that had none, an addition of zeros
    np.testing.assert_allclose(LOSS(again)[1], LOSS(model)[1], atol=1e-5)


def test_layers_of_one_module_may_have_other_ranks(tmp_path):
    """Those of two stacks, whose modules have the same names."""
    one, other = (
        lora.attach(loaded("qwen3_5"), ["gate"], rank=rank, alpha=2.0, key=jax.random.key(0)) for rank in (3, 2)
    )
    model = eqx.tree_at(lambda model: model.delta.gate, one, other.delta.gate)
    adapters.save(model, tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["r"] == 3
    assert settings["rank_pattern"] == {r"model\.layers\.(0|1|2)\.mlp\.gate_proj(\.weight)?": 2}
    again = adapters.load(tmp_path, loaded("qwen3_5"))
    assert [part.a.shape[-1] for _, part in lora.adapted(again)] == [3, 2]
    assert same(again, model)


@pytest.mark.parametrize("case", ["gemma3", "qwen3_5"])
def test_the_text_part_of_an_adapter_of_a_multimodal_model_is_read(case, tmp_path):
    from safetensors.numpy import load_file, save_file

    model = attached(case, ["o", "gate"])
    adapters.save(model, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    renamed = {name.replace("model.layers", "model.language_model.layers"): a for name, a in load_file(file).items()}
    renamed["base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"] = np.zeros((3, 8), np.float32)
    save_file(renamed, file)
    assert same(adapters.load(tmp_path, loaded(case)), model)


OWN = {
    "deepseek_v3": ["q", "q_down", "kv", "kv_down", "o", "gate", "shared_up"],
    "qwen3_next": ["q", "q_gate", "k", "o", "qkvz", "ba", "down"],
    "qwen3_5": ["q", "q_gate", "k", "o", "qkv", "z", "b", "a", "down"],
    "lfm2_other": ["q", "o", "before", "behind", "value", "down"],
    "granite4_hybrid": ["q", "o", "z", "xbc", "dt", "down"],
    "gemma3n": ["q", "v", "down", "laurel_up", "input_gate", "inputs_down", "streams.into"],
}


@pytest.mark.parametrize("case", OWN)
def test_folders_keep_adapters_of_matrices_that_one_family_has(case, tmp_path):
    """Of latents; of projections that hold several parts of each head side by side."""
    model = attached(case, OWN[case])
    adapters.save(model, tmp_path)
    again = adapters.load(tmp_path, loaded(case))
    np.testing.assert_allclose(LOSS(again)[1], LOSS(model)[1], atol=1e-5)


def _held(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "adapter_model.safetensors")


MODULE_OF_EXPERTS = {Llama4Config: "feed_forward.experts", Gemma4MoeConfig: "experts"}
MODULE_OF_EXPERTS |= dict.fromkeys((GraniteMoeConfig, Granite4MoeConfig), "block_sparse_moe.experts")


def write_experts(folder, config, targets, rank=3, **settings):
    """Write an adapter of PEFT's `target_parameters` for all layers of a mixture; return what it holds."""
    from safetensors.numpy import save_file

    noise, held, number = np.random.default_rng(0), {}, config.num_experts
    sizes = {"gate_up_proj": (config.embed_dim, 2 * config.mlp_dim), "down_proj": (config.mlp_dim, config.embed_dim)}
    module = MODULE_OF_EXPERTS.get(type(config), "mlp.experts")
    for layer in range(config.num_layers):
        for i, name in enumerate(targets):
            into, out = sizes[name][::-1] if type(config) is Llama4Config else sizes[name]
            inner = "base_layer." * (i + 1 < len(targets))
            stem = f"base_model.model.model.layers.{layer}.{module}.{inner}lora_"
            held[f"{stem}A.weight"] = noise.normal(0, 0.3, (number * rank, into)).astype(np.float32)
            held[f"{stem}B.weight"] = noise.normal(0, 0.3, (out, rank * number)).astype(np.float32)
    save_file(held, folder / "adapter_model.safetensors")
    named = [f"{module}.{name}" for name in targets]
    base = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": [], "target_parameters": named}
    (folder / "adapter_config.json").write_text(json.dumps(base | settings))
    return held


@pytest.mark.crossed("case", "targets")
@pytest.mark.parametrize("targets", [("gate_up_proj", "down_proj"), ("gate_up_proj",), ("down_proj",)], ids=len)
@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "llama4", "gemma4_moe", "granite_moe", "granite4_moe"])
def test_experts_are_the_parameters_that_peft_adapts(case, targets, tmp_path):
    """`scale * einsum("ore,eri->eoi", B, A)` on what transformers has as one parameter, there and back.

    PEFT does not know that Llama 4's lies as inputs by outputs.
    """
    base = loaded(case)
    held = write_experts(tmp_path, base.config, targets, rank_pattern={"experts.down_proj": 3})
    model = adapters.load(tmp_path, base)
    merged, count, width = lora.merge(model), base.config.num_experts, base.config.mlp_dim
    halves = (slice(0, None, 2), slice(1, None, 2)) if case == "gpt_oss" else (slice(width), slice(width, None))
    own = {"gate": ("gate_up_proj", halves[0]), "up": ("gate_up_proj", halves[1]), "down": ("down_proj", slice(None))}
    stacks = base.config.layer_stacks
    for leaf, (parameter, part) in own.items():
        inner = "base_layer." * (parameter == "gate_up_proj" and len(targets) > 1)
        for layer, stack in enumerate(stacks):
            place = stacks[:layer].count(stack)
            added = 0.0
            if parameter in targets:
                module = MODULE_OF_EXPERTS.get(type(base.config), "mlp.experts")
                stem = f"base_model.model.model.layers.{layer}.{module}.{inner}lora_"
                a, b = held[f"{stem}A.weight"], held[f"{stem}B.weight"]
                a, b = a.reshape(count, 3, -1), b.reshape(len(b), 3, count)
                into = "ore,eri->eoi" if case == "llama4" else "ore,eri->eio"
                added = 2.0 * np.einsum(into, b, a)[..., part]
            before, after = (getattr(getattr(one, stack), leaf)[place] for one in (base, merged))
            np.testing.assert_allclose(after, before + added, atol=1e-5, err_msg=leaf)
    adapters.save(model, tmp_path / "again")
    again = _held(tmp_path / "again")
    assert sorted(again) == sorted(held)
    for name, array in held.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)


def test_mlps_beside_experts_are_parameters_too(tmp_path):
    """PEFT takes modules of their names for the experts of the same layer, and leaves out what it finds in no layer."""
    model = attached("deepseek_v3", ("o", "router", "gate", "up", "down", "shared_up"))
    adapters.save(model, tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    names = ["experts.down_proj", "experts.gate_up_proj", "gate.weight", "shared_experts.up_proj.weight"]
    names += [f"{name}_proj.weight" for name in ("down", "gate", "up")]
    assert settings["target_parameters"] == sorted(f"mlp.{name}" for name in names)
    assert settings["target_modules"] == ["o_proj"]
    again = adapters.load(tmp_path, loaded("deepseek_v3"))
    assert same(lora.merge(model), lora.merge(again))


def test_an_adapter_of_other_experts_does_not_belong(tmp_path):
    write_experts(tmp_path, loaded("mixtral").config, ("down_proj",), rank=5)
    with pytest.raises(ValueError, match=r"wrong shape: .*experts.down_proj.0 has A \[4, 80\], must be \[5, 24\]"):
        adapters.load(tmp_path, loaded("qwen3_moe"))
    write_experts(tmp_path, loaded("mixtral").config, ("down_proj",), rank=3)
    with pytest.raises(ValueError, match=r"unexpected: .*mlp.experts.lora_A.weight \[12, 80\]"):
        adapters.load(tmp_path, loaded("qwen3_moe"))


def test_folders_hold_what_peft_computes(tmp_path):
    """`W + alpha / r * B A` in Hugging Face's layout, by hand."""
    from safetensors.numpy import load_file

    import zoo

    model = attached("gemma2_gqa", ("o", "k"))
    adapters.save(model, tmp_path)
    zoo.save(lora.merge(model), tmp_path / "merged")
    zoo.save(loaded("gemma2_gqa"), tmp_path / "plain")
    low, merged, plain = (
        load_file(tmp_path / name)
        for name in ("adapter_model.safetensors", "merged/model.safetensors", "plain/model.safetensors")
    )
    for layer in range(model.config.num_layers):
        for module in ("o_proj", "k_proj"):
            name = f"model.layers.{layer}.self_attn.{module}"
            a, b = (low[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
            np.testing.assert_allclose(merged[f"{name}.weight"], plain[f"{name}.weight"] + 2.0 * b @ a, atol=1e-5)
    assert np.array_equal(merged["model.layers.0.mlp.up_proj.weight"], plain["model.layers.0.mlp.up_proj.weight"])


MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
SHAPES = {"self_attn.q_proj": (48, 48), "self_attn.o_proj": (48, 48), "mlp.down_proj": (48, 80)}


def write_adapter(folder, layers=(0, 1, 2), ranks=lambda module: 4, head=False, **settings):
    """Write an adapter of PEFT's format for `llama2`; return what it holds."""
    from safetensors.numpy import save_file

    noise, held = np.random.default_rng(0), {}
    names = {f"model.layers.{layer}.{module}": SHAPES[module] for layer in layers for module in MODULES}
    for name, (out, into) in (names | ({"lm_head": (97, 48)} if head else {})).items():
        rank = ranks(name)
        held[f"base_model.model.{name}.lora_A.weight"] = noise.normal(0, 0.3, (rank, into))
        held[f"base_model.model.{name}.lora_B.weight"] = noise.normal(0, 0.3, (out, rank))
        if settings.get("use_dora"):
            held[f"base_model.model.{name}.lora_magnitude_vector"] = noise.uniform(0.5, 2, out)
    held = {name: array.astype(np.float32) for name, array in held.items()}
    save_file(held, folder / "adapter_model.safetensors")
    targets = [module.rpartition(".")[2] for module in MODULES] + ["lm_head"] * head
    base = {"peft_type": "LORA", "r": 4, "lora_alpha": 10, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(base | settings))
    return held


def merged_by_hand(weight, a, b, scale, magnitude=None, begin=None):
    """What PEFT makes of one matrix `[out, in]`."""
    rank = len(a)
    if begin == "pissa":
        u, s, vh = np.linalg.svd(weight, full_matrices=False)
        weight = weight - u[:, :rank] @ np.diag(s[:rank]) @ vh[:rank]
    if begin == "olora":
        q, r = np.linalg.qr(weight)
        weight = weight - scale * q[:, :rank] @ r[:rank]
    whole = weight + scale * b @ a
    return whole if magnitude is None else magnitude[:, None] * whole / np.linalg.norm(whole, axis=1, keepdims=True)


KINDS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "some layers": {"layers_to_transform": [0, 2]},
    "head": {"head": True},
    "patterns": {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 3},
        "alpha_pattern": {"o_proj": 5, "model.layers.0.mlp.down_proj": 7},
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_the_formula_of_its_paper(kind, tmp_path):
    from safetensors.numpy import load_file

    import zoo

    settings = KINDS[kind]
    rank = lambda name: 2 if "1.self_attn.q" in name else 3 if "down" in name else 4
    alpha = lambda name: 5 if "o_proj" in name else 7 if "0.mlp.down" in name else 10
    patterns = "rank_pattern" in settings
    layers = settings.get("layers_to_transform", (0, 1, 2))
    held = write_adapter(tmp_path, layers, rank if patterns else lambda _: 4, **settings)
    model = adapters.load(tmp_path, loaded("llama2"))
    whole_model = lora.merge(model)
    zoo.save(whole_model, tmp_path / "merged")
    zoo.save(loaded("llama2"), tmp_path / "plain")
    merged, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "plain"))
    adapted = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in held}
    for name in adapted:
        stem = f"base_model.model.{name}.lora_"
        root = 2.0 if settings.get("use_rslora") else 4.0
        scale = alpha(name) / rank(name) if patterns else 10 / root
        magnitude, begin = held.get(f"{stem}magnitude_vector"), settings.get("init_lora_weights")
        whole = merged_by_hand(
            plain[f"{name}.weight"], held[f"{stem}A.weight"], held[f"{stem}B.weight"], scale, magnitude, begin
        )
        np.testing.assert_allclose(merged[f"{name}.weight"], whole, atol=3e-5, err_msg=name)
    for name in plain:
        if name.removesuffix(".weight") not in adapted:
            np.testing.assert_array_equal(merged[name], plain[name], err_msg=name)
    np.testing.assert_allclose(LOSS(model)[1], LOSS(whole_model)[1], atol=5e-5)
    adapters.save(model, tmp_path / "again")
    again = adapters.load(tmp_path / "again", loaded("llama2"))
    assert same(model, again)


def test_an_adapted_head_brings_its_base(tmp_path):
    from safetensors.numpy import load_file, save_file

    write_adapter(tmp_path, head=True)
    held = load_file(tmp_path / "adapter_model.safetensors")
    held["base_model.model.lm_head.base_layer.weight"] = np.full((97, 48), 0.25, np.float32)
    save_file(held, tmp_path / "adapter_model.safetensors")
    model = adapters.load(tmp_path, loaded("llama2"))
    np.testing.assert_array_equal(model.head.base, 0.25)


def test_the_length_that_dora_learns_is_trained(tmp_path):
    write_adapter(tmp_path, use_dora=True)
    model = adapters.load(tmp_path, loaded("llama2"))
    part = lora.trainable(model).layers.q
    assert (part.base, part.a, part.b, part.magnitude) == (False, True, True, True)


REFUSED = {
    "corda": ({"init_lora_weights": "corda"}, "`init_lora_weights`='corda' is not supported: it changes the base"),
    "loftq": ({"init_lora_weights": "loftq"}, "`init_lora_weights`='loftq' is not supported"),
    "lora-ga": ({"init_lora_weights": "lora_ga"}, "`init_lora_weights`='lora_ga' is not supported"),
    "pissa by chance": ({"init_lora_weights": "pissa_niter_4"}, "`init_lora_weights`='pissa_niter_4'"),
    "alora": ({"alora_invocation_tokens": [1]}, "`alora_invocation_tokens`=[1] is not supported"),
    "qalora": ({"use_qalora": True}, "`use_qalora`=True is not supported"),
    "layers twice": ({"layer_replication": [[0, 2], [1, 3]]}, "`layer_replication`=[[0, 2], [1, 3]] is not supported"),
    "a bias": ({"lora_bias": True}, "`lora_bias`=True is not supported"),
    "what is to come": ({"use_xlora": {"depth": 2}}, "`use_xlora`={'depth': 2} is not supported"),
    "a rank of text": ({"rank_pattern": {"q_proj": "4"}}, "`rank_pattern.q_proj`='4' is not a positive integer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_formula_describes_is_refused_by_name(name, tmp_path):
    settings, words = REFUSED[name]
    write_adapter(tmp_path, **settings)
    with pytest.raises(ValueError, match=r"cannot load an adapter from .*" + re.escape(words)):
        adapters.load(tmp_path, loaded("llama2"))


def test_a_layer_that_should_be_there_is_missed(tmp_path):
    write_adapter(tmp_path, layers=(0, 2))
    with pytest.raises(ValueError, match=r"missing: base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"):
        adapters.load(tmp_path, loaded("llama2"))


def test_adapters_that_do_not_belong(tmp_path):
    model = attached("gemma2_gqa", ("o",))
    adapters.save(model, tmp_path)
    with pytest.raises(ValueError, match=r"does not belong to this model:\n  missing|unexpected|wrong shape"):
        adapters.load(tmp_path, loaded("gemma_mha"))
    with pytest.raises(ValueError, match=r"unexpected: base_model.model.model.layers.3"):
        adapters.load(tmp_path, loaded("gemma_mqa"))
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "use_dora": True}))
    with pytest.raises(ValueError, match=r"missing: .*o_proj.lora_magnitude_vector"):
        adapters.load(tmp_path, loaded("gemma2_gqa"))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"adapter_config.json: KeyError 'lora_alpha'"):
        adapters.load(tmp_path, loaded("gemma2_gqa"))
    with pytest.raises(ValueError, match=r"cannot load an adapter from .*nothing"):
        adapters.load(tmp_path / "nothing", model)
    with pytest.raises(ValueError, match=r"cannot save an adapter at .* it has none"):
        adapters.save(loaded("gemma_mqa"), tmp_path)


def test_a_rows_bits_do_not_depend_on_its_place():
    """Of rank 1 too: a product with a vector rounds the last rows otherwise."""
    rng = np.random.default_rng(0)
    x, base, a, b = (jnp.asarray(rng.normal(size=size), "float32") for size in ((15, 48), (48, 32), (48, 1), (1, 32)))
    run = jax.jit(lambda x: linear("td,df->tf", x, lora.LowRank(base, a, b, 1.0)))
    for turn in range(15):
        np.testing.assert_array_equal(jnp.roll(run(jnp.roll(x, turn, 0)), -turn, 0), run(x))


def test_a_rows_bits_do_not_depend_on_the_other_rows_of_its_expert():
    rng = np.random.default_rng(0)
    sizes = (8, 48), (5, 48, 24), (5, 48, 1), (5, 1, 24)
    rows, base, a, b = (jnp.asarray(rng.normal(size=size), "float32") for size in sizes)
    run = jax.jit(lambda x, counts: ragged_linear(x, lora.LowRank(base, a, b, 1.0), counts))
    known: dict[tuple[int, int], bytes] = {}
    for _ in range(20):
        which, experts = rng.integers(0, 8, 30), np.sort(rng.integers(0, 5, 30))
        out = np.asarray(run(rows[which], jnp.asarray(np.bincount(experts, minlength=5), jnp.int32)))
        for row, expert, found in zip(which.tolist(), experts.tolist(), out, strict=True):
            assert known.setdefault((row, expert), found.tobytes()) == found.tobytes()
