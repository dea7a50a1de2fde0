"""`convert.py`: what comes out is what went in, in another format or with an adapter merged."""

import jax
import jax.numpy as jnp
import pytest

import zoo
from experiments import convert
from experiments.data.tokenizer import open_tokenizer, train_bpe
from tests.tiny import same
from zoo import adapters
from zoo.adapters import lora
from zoo.quantised import quantise


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model's folder with a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    config = zoo.GemmaConfig(
        vocab_size=300, num_layers=2, embed_dim=16, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8
    )
    zoo.save(zoo.Gemma.init(config, key=jax.random.key(0)), path)
    train_bpe([b"some words"], 300, path)
    return path


@pytest.fixture(autouse=True)
def stay(monkeypatch):
    """Leave this process's JAX as it is."""
    monkeypatch.setattr(jax.config, "update", lambda *_: None)


def test_a_copy_is_exact_and_has_its_tokenizer(folder, tmp_path, capsys):
    assert convert.main([f"source={folder}", f"out={tmp_path / 'out'}", "shard_gib=0.00001"]) == 0
    assert same(zoo.load(folder), zoo.load(tmp_path / "out"))
    assert open_tokenizer(tmp_path / "out").prompt("words") == open_tokenizer(folder).prompt("words")
    assert "files, in" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_another_format(folder, tmp_path):
    assert convert.main([f"source={folder}", f"out={tmp_path / 'out'}", "dtype=bfloat16"]) == 0
    expected = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), zoo.load(folder))
    assert same(expected, zoo.load(tmp_path / "out"))


def test_float64_stays_float64(folder, tmp_path):
    assert convert.main([f"source={folder}", f"out={tmp_path / 'wide'}", "dtype=float64"]) == 0
    assert convert.main([f"source={tmp_path / 'wide'}", f"out={tmp_path / 'copy'}"]) == 0
    with jax.enable_x64(True):
        expected = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), zoo.load(folder))
        assert same(expected, zoo.load(tmp_path / "copy"))


def test_an_adapter_is_merged(folder, tmp_path):
    model = lora.attach(zoo.load(folder), ["q", "down"], rank=2, alpha=2.0, key=jax.random.key(1))
    found = list(lora.adapted(model))
    model = lora.put(model, [row for row, _ in found], [lora.LowRank(p.base, p.a, p.b + 0.5, 1.0) for _, p in found])
    adapters.save(model, tmp_path / "low")
    assert convert.main([f"source={folder}", f"out={tmp_path / 'out'}", f"lora={tmp_path / 'low'}"]) == 0
    assert same(lora.merge(model), zoo.load(tmp_path / "out"))


def test_matrices_are_kept_in_fewer_bits(folder, tmp_path):
    assert convert.main([f"source={folder}", f"out={tmp_path / 'out'}", "quantise=int4", "group=8"]) == 0
    kept = zoo.load(tmp_path / "out", quantise="as_stored")
    assert same(kept, quantise(zoo.load(folder), "int4", group=8))
    words = [f"source={tmp_path / 'out'}", f"out={tmp_path / 'again'}", "quantise=as_stored", "shard_gib=0.00001"]
    assert convert.main(words) == 0
    assert same(kept, zoo.load(tmp_path / "again", quantise="as_stored"))


def test_errors_are_in_words_and_nothing_is_overwritten(folder, tmp_path, capsys):
    for words, status, message in (
        ([f"source={folder}", f"out={folder}"], 1, "there already is a model at"),
        (["source=/nothing", f"out={tmp_path / 'out'}"], 1, "cannot load weights from `/nothing`"),
        ([f"source={folder}", f"out={tmp_path / 'out'}", "lora=/nothing"], 1, "cannot load an adapter from `/nothing`"),
        ([f"source={folder}", f"out={folder / 'config.json' / 'x'}"], 1, "cannot write out={}: File exists"),
        ([f"source={folder}", "out=x", "group=16"], 2, "bad value group=16: nothing is quantised; say quantise=int8,"),
        ([f"source={folder}"], 2, "missing value: out=... must be given"),
        (
            [f"source={folder}", f"out={tmp_path / 'out'}", "quantise=nf4", "group=64"],
            1,
            "in groups of 64 inputs, which must divide",
        ),
        ([f"source={folder}", "out=x", "quantise=as_stored", "group=8"], 2, "group=8: quantise=as_stored changes no"),
        ([f"source={folder}", "out=x", "dtype=int8"], 2, "expected one of [float64, float32, bfloat16]"),
    ):
        assert convert.main(words) == status
        assert message.format(folder / "config.json" / "x") in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
