"""Folders beside their tensors: digests, indices, what is carried along, multimodal ones, and loading onto a mesh."""

import json
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.tiny import same
from tests.zoo import hf_tiny
from tests.zoo.test_weights import EMBED, failure, rewrite
from zoo import load, save


@pytest.fixture
def folder(tmp_path) -> Path:
    return hf_tiny.write("gemma2_gqa", tmp_path / "model")


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
    (folder / "modules.json").write_text("[]")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ y }}")
    raw = json.loads((folder / "config.json").read_text()) | {"eos_token_id": [1, 107], "pad_token_id": 3}
    (folder / "config.json").write_text(json.dumps(raw))
    save(load(folder), tmp_path / "out", source=folder)
    written = {file.relative_to(tmp_path / "out").as_posix() for file in (tmp_path / "out").rglob("*.*")}
    assert written == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "modules.json",
        "1_Pooling/config.json",
    }
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["eos_token_id"], written["pad_token_id"], written["bos_token_id"]) == ([1, 107], 3, 2)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": 1}'
    save(load(folder), folder, source=folder)  # onto itself
    assert (folder / "tokenizer.json").read_text() == '{"a": 1}'
    assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ y }}"


def test_ids_of_the_text_part_are_kept(tmp_path):
    folder = hf_tiny.write("gemma3", tmp_path)
    _as_multimodal(folder, "language_model.")
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"] |= {"eos_token_id": [1, 107]}
    (folder / "config.json").write_text(json.dumps({key: raw[key] for key in raw if not key.endswith("token_id")}))
    save(load(folder), tmp_path / "out", source=folder)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [1, 107]


# --- multimodal folders, indices, meshes ----------------------------------------------------------------------------

PREFIXES = {"hub": "language_model.", "new": "model.language_model.", "plain": ""}


def _as_multimodal(folder: Path, prefix: str, kind: str = "gemma3") -> None:
    tensors = load_file(folder / "model.safetensors")
    strip = "model." if prefix == "model.language_model." else ""
    own = lambda name: "" if strip and name.startswith("lm_head") else prefix  # where the head is beside the rest
    renamed = {own(name) + name.removeprefix(strip): array for name, array in tensors.items()}
    others = (
        "vision_tower.x",
        "multi_modal_projector.y",
        "model.vision_tower.z",
        "model.visual.x",
        "visual.y",
        "mm_projector.x",
        "vision_model.x",
    )
    renamed |= {name: np.zeros((2, 3), np.int64) for name in others}
    save_file(renamed, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    raw = {"model_type": kind, "text_config": text, "vision_config": {"x": 1}}
    own = {
        "gemma3": {"mm_tokens_per_image": 256},
        "gemma3n": {"audio_config": {}, "vision_soft_tokens_per_image": 256},
        "gemma4": {"audio_config": None, "video_token_id": 91, "eoa_token_index": 92},
        "mistral3": {"spatial_merge_size": 2, "tie_word_embeddings": False},
        "qwen3_5": {"video_token_id": 90, "vision_start_token_id": 91, "tie_word_embeddings": False},
        "llama4": {"boi_token_index": 90, "eoi_token_index": 91, "image_token_index": 92, "tie_word_embeddings": False},
        "kimi_k25": {"media_placeholder_token_id": 90, "video_placeholder": "", "tie_word_embeddings": False},
    }
    if kind == "kimi_k25":
        raw["text_config"] = text | {"model_type": "kimi_k2"}
    raw |= own[kind]
    (folder / "config.json").write_text(json.dumps(raw))


PARTS = {"gemma3_stretched": "gemma3", "mistral": "mistral3", "ministral3": "mistral3", "gemma3n": "gemma3n"}
PARTS |= {
    "mistral4": "mistral3",
    "qwen3_5": "qwen3_5",
    "gemma4_small": "gemma4",
    "gemma4_moe": "gemma4",
    "deepseek_v3": "kimi_k25",
    "llama4": "llama4",
}


@pytest.mark.crossed("prefix", "case")
@pytest.mark.parametrize("case", PARTS)
@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_the_text_part_of_a_multimodal_folder_is_read(prefix, case, tmp_path):
    folder = hf_tiny.write(case, tmp_path)
    whole = load(folder)
    _as_multimodal(folder, prefix, PARTS[case])
    again = load(folder)
    assert again.config == whole.config
    assert same(eqx.filter(again, eqx.is_array), eqx.filter(whole, eqx.is_array))


def test_a_gemma_4_that_sees_by_a_matrix_is_read_for_its_text(tmp_path):
    """12B: there is no tower, and text has a `model_type` of its own."""
    folder = hf_tiny.write("gemma4", tmp_path)
    whole = load(folder)
    _as_multimodal(folder, "model.language_model.", "gemma4")
    rewrite(folder, lambda tensors: tensors.update({"model.vision_embedder.pos_norm.weight": np.zeros(3, np.float32)}))
    raw = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in raw["text_config"].items() if key != "hidden_size_per_layer_input"}
    raw |= {"model_type": "gemma4_unified", "text_config": text | {"model_type": "gemma4_unified_text"}}
    (folder / "config.json").write_text(json.dumps(raw))
    assert same(load(folder), whole)


# Qwen's models that see, as transformers makes them: what their text part has beside `SEEING`, and their vision.
SEEING = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
SEEING |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SEES = {
    "qwen2_vl": ({}, {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2}),
    "qwen2_5_vl": (
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48},
    ),
    "qwen3_vl": (
        {"head_dim": 10},
        {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
        | {"deepstack_visual_indexes": [0]},
    ),
}


SEES["qwen3_vl_moe"] = (
    {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    SEES["qwen3_vl"][1],
)


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("kind", SEES)
def test_texts_of_qwens_that_see_are_read_as_transformers_reads_them(kind, tied, tmp_path):
    """Also from files of old, which have the keys of the text beside those of the other parts; saved as text alone."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    own, vision = SEES[kind]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 1 + (kind != "qwen3_vl")]}
    text = SEEING | own | {"rope_parameters": rope, "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    theirs = transformers.AutoModelForImageTextToText.from_config(config).eval()
    if kind.endswith("moe"):
        theirs.set_experts_implementation("eager")
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
    theirs.save_pretrained(tmp_path / "theirs")
    model, ids = load(tmp_path / "theirs"), hf_tiny.tokens()
    with torch.no_grad():
        expected = theirs(input_ids=torch.from_numpy(ids)).logits.numpy()
    logits = hf_tiny.jit(lambda model, ids: model.logits(model.hidden(ids)))(model, jnp.asarray(ids, jnp.int32))
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    save(model, tmp_path / "text")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype="float32").eval()
    if kind.endswith("moe"):
        again.set_experts_implementation("eager")
    with torch.no_grad():
        np.testing.assert_array_equal(again(input_ids=torch.from_numpy(ids)).logits.numpy(), expected)
    raw = json.loads((tmp_path / "theirs" / "config.json").read_text())
    text = {key: value for key, value in raw.pop("text_config").items() if key not in ("model_type", "rope_parameters")}
    text |= {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(text | raw))
    rewrite(tmp_path / "theirs", _experts_turned)  # as those of Qwen 3 are on the hub
    assert same(load(tmp_path / "theirs"), model)


def _experts_turned(tensors):
    for name in [name for name in tensors if ".mlp.experts." in name]:
        tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))


def test_experts_that_a_folder_has_together_are_read_one_by_one(tmp_path):
    """As those of Qwen 3.5 on the hub are; on a mesh too, where devices read their parts."""
    folder = hf_tiny.write("qwen3_5_moe", tmp_path)
    whole = load(folder)

    def together(tensors):
        for layer in range(4):
            experts = f"model.layers.{layer}.mlp.experts."
            gates, ups, downs = (
                [tensors.pop(f"{experts}{i}.{part}.weight") for i in range(6)]
                for part in ("gate_proj", "up_proj", "down_proj")
            )
            halves = [np.concatenate(pair) for pair in zip(gates, ups, strict=True)]
            tensors |= {f"{experts}gate_up_proj": np.stack(halves), f"{experts}down_proj": np.stack(downs)}
        tensors["mtp.fc.weight"] = np.zeros((2, 3), np.float32)

    rewrite(folder, together)
    assert same(load(folder), whole)
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Explicit,))
    spread = load(folder, mesh=mesh)
    assert all(np.array_equal(one, other) for one, other in zip(*map(jax.tree.leaves, (spread, whole)), strict=True))


def test_what_gemma_3n_hears_and_keys_that_nothing_reads_are_left(tmp_path):
    """The published folders hold keys and values of the layers that share those of others."""
    folder = hf_tiny.write("gemma3n", tmp_path)
    whole, some = load(folder), np.zeros((2, 3), np.float32)
    names = ("k_proj", "v_proj", "k_norm")
    unread = {f"model.layers.4.self_attn.{name}.weight": some for name in names} | {"model.embed_audio.x": some}
    rewrite(folder, lambda tensors: tensors.update(unread))
    assert same(load(folder), whole)
    rewrite(folder, lambda tensors: tensors.update({"model.layers.4.self_attn.x_proj.weight": some}))
    assert "unexpected: model.layers.4.self_attn.x_proj.weight" in failure(folder)


def test_a_multimodal_folder_is_tied_as_its_outer_part_says(tmp_path):
    """Whatever its text part says; and untied where it has a head that is another matrix."""
    folder = hf_tiny.write("mistral", tmp_path)
    _as_multimodal(folder, "language_model.", "mistral3")
    raw = json.loads((folder / "config.json").read_text())
    del raw["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(raw))
    assert not load(folder).config.tied
    rewrite(folder, lambda tensors: tensors.pop("language_model.lm_head.weight"))
    assert load(folder).config.tied


def test_other_tensors_of_a_multimodal_folder_are_still_refused(tmp_path):
    folder = hf_tiny.write("gemma3", tmp_path)
    _as_multimodal(folder, "language_model.")
    rewrite(folder, lambda t: t.update({"audio_tower.x": np.zeros(2, np.float32)}))
    assert "unexpected: audio_tower.x [2]" in failure(folder)


def test_layers_behind_the_last_are_another_model_where_there_is_one(tmp_path):
    """DeepSeek V3's files have one that guesses several tokens; V2's have none."""
    behind = {"model.layers.3.eh_proj.weight": np.zeros((2, 3), np.float32)}
    for case in ("deepseek_v3", "deepseek_v2"):
        rewrite(hf_tiny.write(case, tmp_path / case), lambda tensors: tensors.update(behind))
    load(tmp_path / "deepseek_v3")
    assert "unexpected: model.layers.3.eh_proj.weight [2, 3]" in failure(tmp_path / "deepseek_v2")


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


def test_what_lies_beside_the_whole_model_is_not_read(folder):
    expected = jax.tree.leaves(load(folder))
    save_file({"layers.0.wq": np.zeros((2, 2), np.float32)}, folder / "consolidated.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {EMBED: "model-1.safetensors"}}))
    for one, other in zip(jax.tree.leaves(load(folder)), expected, strict=True):
        np.testing.assert_array_equal(one, other)
