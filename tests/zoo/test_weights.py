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

from tests.tiny import same
from tests.zoo import hf_tiny
from tests.zoo.test_configs import SMALL
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
    assert same(eqx.filter(again, eqx.is_array), eqx.filter(model, eqx.is_array))


def test_weights_in_the_memory_of_the_host_are_written_too(tmp_path):
    """As several processes gather them: the first one writes what NumPy holds."""
    model = Gemma.init(CONFIGS["gemma2"], key=jax.random.key(0))
    save(model, tmp_path / "out")
    save(jax.tree.map(np.asarray, model), tmp_path / "host")
    assert (tmp_path / "host" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()


def test_equal_weights_are_equal_bytes(tmp_path):
    """The order of metadata was another one at each save, and in each process."""
    model = Gemma.init(CONFIGS["gemma"], key=jax.random.key(0))
    files = set()
    for i in range(12):
        save(model, tmp_path / str(i))
        files.add((tmp_path / str(i) / "model.safetensors").read_bytes())
    assert len(files) == 1
    with safe_open(tmp_path / "0" / "model.safetensors", "np") as file:
        assert file.metadata()["format"] == "pt"
    load(tmp_path / "0")


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
    assert same(load(tmp_path / "out"), model)


def test_save_replaces_the_model_of_a_folder_and_keeps_other_files(folder, tmp_path):
    model, out = load(folder), tmp_path / "out"
    save(model, out, shard_bytes=30_000)
    (out / "tokenizer.json").write_text("{}")
    save(model, out)
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert same(load(out), model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_save_refuses_a_file_as_folder(folder):
    with pytest.raises(ValueError, match=r"cannot save a model at .*config\.json`: it is a file"):
        save(load(folder), folder / "config.json")


SHARDED = ["gemma2_gqa", "llama_bias", "mixtral"]


@pytest.mark.parametrize(
    ("case", "shard_bytes"), [*((case, 2**30) for case in hf_tiny.CASES), *((case, 30_000) for case in SHARDED)]
)
def test_transformers_loads_what_save_writes_without_difference(case, shard_bytes, tmp_path):
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("transformers")
    save(hf_tiny.loaded(case), tmp_path / "out", shard_bytes=shard_bytes)
    original = hf_tiny.reference(case)
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    again = type(original).from_pretrained(tmp_path / "out", **how).eval()
    assert again.dtype == torch.float32
    with torch.no_grad():
        ids = torch.from_numpy(hf_tiny.tokens())
        for parameter in (*again.parameters(), *original.parameters()):
            parameter.data = parameter.data.clone()  # or roundings would depend on where in the file it lies
        # torch solves triangular systems by where its operands lie: there the weights are equal, and logits nearly.
        allowed = 1e-5 if case.startswith(("qwen3_next", "qwen3_5")) else 0.0
        assert (again(ids).logits - original(ids).logits).abs().max().item() <= allowed
        held = original.state_dict()
        assert all(torch.equal(weights, held[name]) for name, weights in again.state_dict().items())


@pytest.mark.parametrize(
    "case",
    [
        *("gemma_mqa", "gemma3", "llama32", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe_mixed", "gpt2", "neox"),
        *("opt", "phi3_long", "olmoe", "qwen2_moe", "gpt_oss", "gemma3n", "ministral3", "mistral4"),
    ],
)
def test_load_reads_what_transformers_saves(case, tmp_path):
    pytest.importorskip("transformers")
    hf_tiny.reference(case, "bfloat16").save_pretrained(tmp_path / "out", max_shard_size="20KB")
    model = load(tmp_path / "out")
    expected = load(hf_tiny.write(case, tmp_path / "in", ml_dtypes.bfloat16))
    assert model.embed.dtype == jnp.bfloat16
    assert same(eqx.filter(model, eqx.is_array), eqx.filter(expected, eqx.is_array))


@pytest.mark.parametrize(("dtype", "stored"), [(None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)])
def test_load_stores_in_the_dtype_asked_for_or_the_one_on_disk(folder, dtype, stored):
    model = load(folder, dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(stored)}
    expected = hf_tiny.tensor("model.layers.2.mlp.up_proj.weight", (80, 48)).astype(model.embed.dtype).T
    np.testing.assert_array_equal(model.layers.up[2], expected)


def test_load_reads_large_tensors_in_pieces(folder, monkeypatch):
    whole = load(folder)
    monkeypatch.setattr("zoo.huggingface.tensors._CHUNK", 48 * 7)
    assert same(load(folder), whole)


def test_a_second_copy_of_the_tied_head_and_old_rotary_buffers_are_accepted(folder):
    whole = load(folder)
    rewrite(
        folder,
        lambda t: t.update(
            {"lm_head.weight": t[EMBED].copy(), "model.layers.0.self_attn.rotary_emb.inv_freq": t[EMBED][0]}
        ),
    )
    assert same(load(folder), whole)


@pytest.mark.parametrize("other", [lambda w: w + np.float32(1), lambda w: w[:-1], lambda w: w.astype(np.float16)])
def test_a_head_that_is_not_the_embedding_is_refused(tmp_path, other):
    """Of a family that is always tied."""
    folder = hf_tiny.write("gemma3n", tmp_path)
    rewrite(folder, lambda t: t.update({"lm_head.weight": np.ascontiguousarray(other(t[EMBED]))}))
    assert "unexpected: lm_head.weight" in failure(folder)
    assert "is not the embedding, to which it is tied" in failure(folder)


def _bare(tensors):
    held = {name.removeprefix("model."): array for name, array in tensors.items()}
    tensors.clear()
    tensors.update(held)


def _head_alone(tensors):
    tensors["lm_head.weight"] = tensors.pop(EMBED)


def _wide(tensors):
    tensors.update({name: array.astype(np.float64) for name, array in tensors.items()})


@pytest.mark.parametrize("change", [_bare, _head_alone, _wide])
@pytest.mark.parametrize("case", ["gemma_mqa", "llama32"])
def test_folders_of_bare_models_heads_alone_and_64_bits_are_read(case, change, tmp_path):
    folder = hf_tiny.write(case, tmp_path)
    whole = load(folder)
    rewrite(folder, change)
    assert same(load(folder), whole)


@pytest.mark.parametrize("case", ["llama32", "gemma3"])
def test_a_head_that_is_not_the_embedding_unties_the_model(case, tmp_path):
    """As transformers 5 reads it; saved and read again, it stays so."""
    folder = hf_tiny.write(case, tmp_path)
    rewrite(folder, lambda t: t.update({"lm_head.weight": 2 * t[EMBED]}))
    model = load(folder)
    assert not model.config.tied
    np.testing.assert_array_equal(model.head, 2 * model.embed)
    save(model, tmp_path / "again")
    assert same(load(tmp_path / "again"), model)


def test_every_wrong_tensor_is_named_in_one_error(folder):
    def damage(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.3.mlp.up_proj.weight"]
        tensors["model.layers.4.mlp.up_proj.weight"] = np.zeros((80, 48), np.float32)
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.full(64, 1e-9, np.float32)
        tensors["model.layers.0.self_attn.k_proj.bias"] = np.zeros(32, np.float32)  # which some tools write
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
        "  wrong type: model.layers.2.input_layernorm.weight is I32, must be F32 or BF16 or F16 or F64",
    }


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
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({EMBED: np.zeros((97, 48), np.float32)}, folder / "b.safetensors")
    assert f"b.safetensors: `{EMBED}` is also in a.safetensors" in failure(folder)


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
