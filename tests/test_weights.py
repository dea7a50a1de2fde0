"""Folders: what load and save agree on with transformers, and every way in which a folder can be wrong."""

import json
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests import hf_tiny
from tests.test_configs import SMALL
from zoo import Gemma, GemmaConfig, load, save

GEMMA_2 = GemmaConfig(**SMALL, post_norms=True, query_scalar=24.0, window=4, attn_softcap=5.0, final_softcap=3.0)
CONFIGS = {"gemma": GemmaConfig(**SMALL), "gemma2": GEMMA_2, "gemma2_plain": GemmaConfig(**SMALL, post_norms=True)}
EMBED = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    return hf_tiny.write("gemma2_gqa", tmp_path / "model")


def rewrite(folder: Path, change) -> None:
    """Apply a change to the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def failure(folder: Path) -> str:
    with pytest.raises(ValueError, match=re.escape(str(folder))) as error:
        load(folder)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gemma", jnp.bfloat16), ("gemma2", jnp.float32), ("gemma2_plain", jnp.float16)],
)
def test_load_inverts_save_bit_for_bit(name, dtype, tmp_path):
    model = Gemma.init(CONFIGS[name], key=jax.random.key(0), dtype=dtype)
    model = eqx.tree_at(
        lambda m: m.layers.attn_norm, model, replace_fn=lambda w: w + jnp.arange(3, dtype=dtype)[:, None]
    )
    save(model, tmp_path / "out")
    again = load(tmp_path / "out")
    assert jax.tree.structure(again.layers) == jax.tree.structure(model.layers)
    assert eqx.tree_equal(eqx.filter(again, eqx.is_array), eqx.filter(model, eqx.is_array))


def test_save_shards_at_the_limit_with_an_index(folder, tmp_path):
    model, limit = load(folder), 30_000
    save(model, tmp_path / "out", shard_bytes=limit)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert [file.name for file in files] == sorted(set(index["weight_map"].values()))
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1  # who may read one may read all
    for file in files:
        with safe_open(file, "np") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
            assert all(index["weight_map"][name] == file.name for name in opened.keys())  # noqa: SIM118
            assert opened.metadata()["format"] == "pt"
            assert sorted(json.loads(opened.metadata()["sha256"])) == sorted(opened.keys())
        assert sum(sizes) <= limit or len(sizes) == 1
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    assert eqx.tree_equal(load(tmp_path / "out"), model)


def test_save_replaces_the_model_of_a_folder_and_keeps_other_files(folder, tmp_path):
    model, out = load(folder), tmp_path / "out"
    save(model, out, shard_bytes=30_000)
    (out / "tokenizer.json").write_text("{}")
    save(model, out)
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert eqx.tree_equal(load(out), model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_save_refuses_a_file_as_folder(folder):
    with pytest.raises(ValueError, match=r"cannot save a model at .*config\.json`: it is a file"):
        save(load(folder), folder / "config.json")


SHARDED = ["gemma2_gqa", "llama_bias", "mixtral"]


@pytest.mark.parametrize(
    ("case", "shard_bytes"), [*((case, 2**30) for case in hf_tiny.CASES), *((case, 30_000) for case in SHARDED)]
)
def test_transformers_loads_what_save_writes_without_difference(case, shard_bytes, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    save(load(hf_tiny.write(case, tmp_path / "in")), tmp_path / "out", shard_bytes=shard_bytes)
    original = hf_tiny.reference(case)
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", **how).eval()
    assert again.dtype == torch.float32
    with torch.no_grad():
        ids = torch.from_numpy(hf_tiny.tokens())
        assert (again(ids).logits - original(ids).logits).abs().max().item() == 0.0


@pytest.mark.parametrize(
    "case", ["gemma_mqa", "gemma3", "llama32", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe_mixed"]
)
def test_load_reads_what_transformers_saves(case, tmp_path):
    pytest.importorskip("transformers")
    hf_tiny.reference(case, "bfloat16").save_pretrained(tmp_path / "out", max_shard_size="20KB")
    model = load(tmp_path / "out")
    expected = load(hf_tiny.write(case, tmp_path / "in", ml_dtypes.bfloat16))
    assert model.embed.dtype == jnp.bfloat16
    assert eqx.tree_equal(eqx.filter(model, eqx.is_array), eqx.filter(expected, eqx.is_array))


@pytest.mark.parametrize(("dtype", "stored"), [(None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)])
def test_load_stores_in_the_dtype_asked_for_or_the_one_on_disk(folder, dtype, stored):
    model = load(folder, dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(stored)}
    expected = hf_tiny.tensor("model.layers.2.mlp.up_proj.weight", (80, 48)).astype(model.embed.dtype).T
    np.testing.assert_array_equal(model.layers.up[2], expected)


def test_load_reads_large_tensors_in_pieces(folder, monkeypatch):
    whole = load(folder)
    monkeypatch.setattr("zoo.folder._CHUNK", 48 * 7)
    assert eqx.tree_equal(load(folder), whole)


def test_a_second_copy_of_the_tied_head_and_old_rotary_buffers_are_accepted(folder):
    whole = load(folder)
    rewrite(
        folder,
        lambda t: t.update(
            {"lm_head.weight": t[EMBED].copy(), "model.layers.0.self_attn.rotary_emb.inv_freq": t[EMBED][0]}
        ),
    )
    assert eqx.tree_equal(load(folder), whole)


@pytest.mark.parametrize("other", [lambda w: w + np.float32(1), lambda w: w[:-1], lambda w: w.astype(np.float16)])
def test_a_head_that_is_not_the_embedding_is_refused(folder, other):
    rewrite(folder, lambda t: t.update({"lm_head.weight": np.ascontiguousarray(other(t[EMBED]))}))
    assert "unexpected: lm_head.weight" in failure(folder)
    assert "is not the embedding, to which it is tied" in failure(folder)


def test_every_wrong_tensor_is_named_in_one_error(folder):
    def damage(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.3.mlp.up_proj.weight"]
        tensors["model.layers.4.mlp.up_proj.weight"] = np.zeros((80, 48), np.float32)
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
        tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((48, 32), np.float32)
        tensors["model.layers.2.input_layernorm.weight"] = np.zeros(48, np.int32)

    rewrite(folder, damage)
    message = failure(folder)
    assert message.splitlines()[0] == f"the tensors in `{folder}` are not those that its config.json needs:"
    assert set(message.splitlines()[1:]) == {
        "  missing: model.norm.weight [48]",
        "  missing: model.layers.3.mlp.up_proj.weight [80, 48]",
        "  unexpected: model.layers.4.mlp.up_proj.weight [80, 48]",
        "  unexpected: model.layers.0.self_attn.q_proj.bias [64]",
        "  wrong shape: model.layers.1.self_attn.k_proj.weight is [48, 32], must be [32, 48]",
        "  wrong type: model.layers.2.input_layernorm.weight is I32, must be F32 or BF16 or F16",
    }


# --- what a saved folder holds beside the weights -------------------------------------------------------------------


def flip(file: Path, at: int) -> None:
    """Change one bit of a file."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_flipped_bit_of_a_saved_folder_is_found_and_every_damaged_tensor_named(folder, tmp_path):
    out = tmp_path / "out"
    save(load(folder), out)
    flip(out / "model.safetensors", -1)
    with safe_open(out / "model.safetensors", "np") as opened:
        last = list(opened.offset_keys())[-1]
    message = failure(out)
    assert "files are damaged" in message
    assert f"  model.safetensors: `{last}` is not what was saved: its SHA-256 differs" in message
    flip(out / "model.safetensors", -1)
    load(out)


def test_a_flipped_bit_of_anothers_folder_is_a_valid_file(folder):
    flip(folder / "model.safetensors", -3)
    load(folder)


def test_digests_of_other_tensors_are_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"sha256": json.dumps({EMBED: "0"})})
    assert "model.safetensors: its sha256 are not those of its tensors" in failure(folder)


def test_save_carries_the_sources_tokenizer_and_token_ids(folder, tmp_path):
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "chat_template.jinja").write_text("{{ x }}")
    (folder / "README.md").write_text("no")
    raw = json.loads((folder / "config.json").read_text()) | {"eos_token_id": [1, 107], "pad_token_id": 3}
    (folder / "config.json").write_text(json.dumps(raw))
    save(load(folder), tmp_path / "out", source=folder)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["eos_token_id"], written["pad_token_id"], written["bos_token_id"]) == ([1, 107], 3, 2)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": 1}'
    save(load(folder), folder, source=folder)  # onto itself
    assert (folder / "tokenizer.json").read_text() == '{"a": 1}'


# --- multimodal folders, indices, meshes ----------------------------------------------------------------------------

PREFIXES = {"hub": "language_model.", "new": "model.language_model.", "plain": ""}


def _as_multimodal(folder: Path, prefix: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    strip = "model." if prefix == "model.language_model." else ""
    renamed = {prefix + name.removeprefix(strip): array for name, array in tensors.items()}
    others = ("vision_tower.x", "multi_modal_projector.y", "model.vision_tower.z")
    renamed |= {name: np.zeros((2, 3), np.int64) for name in others}
    save_file(renamed, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    raw = {"model_type": "gemma3", "text_config": text, "vision_config": {"x": 1}, "mm_tokens_per_image": 256}
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_the_text_part_of_a_multimodal_gemma_3_is_read(prefix, tmp_path):
    folder = hf_tiny.write("gemma3_stretched", tmp_path)
    whole = load(folder)
    _as_multimodal(folder, prefix)
    again = load(folder)
    assert again.config == whole.config
    assert eqx.tree_equal(eqx.filter(again, eqx.is_array), eqx.filter(whole, eqx.is_array))


def test_other_tensors_of_a_multimodal_folder_are_still_refused(tmp_path):
    folder = hf_tiny.write("gemma3", tmp_path)
    _as_multimodal(folder, "language_model.")
    rewrite(folder, lambda t: t.update({"audio_tower.x": np.zeros(2, np.float32)}))
    assert "unexpected: audio_tower.x [2]" in failure(folder)


INDICES = {
    "not a map": ({"weight_map": [1]}, "has no weight_map"),
    "nothing": ({}, "has no weight_map"),
    "elsewhere": ({"weight_map": {EMBED: "../model.safetensors"}}, "which is no .safetensors file of the folder"),
    "a number": ({"weight_map": {EMBED: 3}}, "names 3, which is no .safetensors file"),
    "too few": ({"weight_map": {EMBED: "model.safetensors"}}, "is in model.safetensors, and the index says nothing"),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_is_not_one_is_refused(name, folder):
    index, words = INDICES[name]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert words in failure(folder)


def test_an_index_that_misplaces_a_tensor_is_refused(folder, tmp_path):
    save(load(folder), tmp_path / "out", shard_bytes=60_000)
    file = tmp_path / "out" / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][EMBED] = files[-1]
    file.write_text(json.dumps(index))
    assert f"`{EMBED}` is in {files[0]}, and the index says {files[-1]}" in failure(tmp_path / "out")


def test_a_config_of_far_too_many_tensors_is_refused_without_listing_them(tmp_path):
    folder = hf_tiny.write("mixtral", tmp_path)
    raw = json.loads((folder / "config.json").read_text()) | {"num_local_experts": 4096, "num_hidden_layers": 4096}
    (folder / "config.json").write_text(json.dumps(raw))
    assert re.search(r"config\.json describes 503\d{5} tensors, and its files hold \d+\.", failure(folder))


@pytest.mark.parametrize("case", ["gemma3_stretched", "qwen2_windows", "qwen3_moe_mixed"])
def test_a_mesh_holds_the_same_weights_cut_by_their_letters(case, tmp_path):
    folder = hf_tiny.write(case, tmp_path)
    kinds = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("data", "model", "expert"), axis_types=kinds)
    whole, spread = load(folder, dtype=jnp.bfloat16), load(folder, dtype=jnp.bfloat16, mesh=mesh)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(spread), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert spread.layers.q.sharding.spec[1:] == ("data", "model", None)[: len(spread.layers.q.sharding.spec) - 1]
    assert spread.embed.sharding.spec[0] is None  # 97 rows: an axis of two does not divide them
    shard = spread.layers.q.addressable_shards[0].data
    assert shard.size * 4 == spread.layers.q.size


def test_a_damaged_tensor_is_found_on_a_mesh_too(folder, tmp_path):
    save(load(folder), tmp_path / "out")
    flip(tmp_path / "out" / "model.safetensors", -1)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match="its SHA-256 differs"):
        load(tmp_path / "out", mesh=mesh)


def test_unknown_config_keys_are_refused(folder):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"slidin_window": 4}))
    with pytest.raises(ValueError, match=r"`slidin_window` is not known; did you mean `sliding_window`\?"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_files_are_all_named(folder, tmp_path, keep):
    save(load(folder), tmp_path / "out", shard_bytes=60_000)
    first, second, *_ = sorted((tmp_path / "out").glob("*.safetensors"))
    for file in (first, second):
        file.write_bytes(file.read_bytes()[:keep])
    message = failure(tmp_path / "out")
    assert "files are damaged" in message
    assert f"  {first.name}: " in message and f"  {second.name}: " in message


def test_files_that_the_index_names_must_exist(folder, tmp_path):
    save(load(folder), tmp_path / "out", shard_bytes=60_000)
    gone = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    gone.unlink()
    assert f"  {gone.name}: " in failure(tmp_path / "out")


def test_a_tensor_in_two_files_is_refused(folder):
    save_file({EMBED: np.zeros((97, 48), np.float32)}, folder / "other.safetensors")
    assert f"other.safetensors: `{EMBED}` is also in model.safetensors" in failure(folder)


def _nothing(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def _file(folder: Path) -> None:
    _nothing(folder)
    folder.write_text("")


def _empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_nothing, "it does not exist. Pass a folder"),
        (_file, "it is a file. Pass a folder"),
        (_empty, "it has no config.json. It holds: nothing"),
        (lambda folder: (folder / "config.json").unlink(), "it has no config.json. It holds: model.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json must hold a JSON object"),
        (lambda folder: (folder / "model.safetensors").unlink(), "it has no .safetensors files."),
        (_pickled, "pytorch_model.bin may be pickles, which are never opened. Convert them."),
    ],
)
def test_what_is_not_a_model_folder_is_refused(folder, damage, words):
    damage(folder)
    assert words in failure(folder)


def test_loaded_weights_can_be_donated(folder):
    """Buffers that JAX owns are reused in place; borrowed ones would double the first step's memory."""
    model = load(folder)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(model.layers)]
    after = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(model.layers)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == before
