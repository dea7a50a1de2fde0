"""Embedders: folders as sentence-transformers has them, against the same steps in torch on transformers' models."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import zoo
from tests.zoo import hf_tiny
from zoo.inference.generate import generate

TEXTS = [[5, 9, 11, 3, 7, 60, 44, 31, 8, 90, 2, 13], [4, 8, 15], [16]]
BIDIRECTIONAL = {"use_bidirectional_attention": True, "sliding_window": 6}


def folder(path, case, pooling, dense=0, normalise=True, **changed):
    """Write a model without head and prefix, and the modules around it."""
    hf_tiny.write(case, path)
    raw = json.loads((path / "config.json").read_text()) | changed
    (path / "config.json").write_text(json.dumps(raw))
    held = load_file(path / "model.safetensors")
    bare = {name.removeprefix("model."): array for name, array in held.items() if name != "lm_head.weight"}
    save_file(bare, path / "model.safetensors")
    modules = [("Transformer", "")] + [("Pooling", "1_Pooling")] + [("Dense", f"{i + 2}_Dense") for i in range(dense)]
    modules += [("Normalize", "9_Normalize")] * normalise
    listed = [
        {"idx": i, "path": at, "type": f"sentence_transformers.models.{kind}"} for i, (kind, at) in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    for _, place in modules[1:]:
        (path / place).mkdir()
    (path / "1_Pooling" / "config.json").write_text(
        json.dumps({f"pooling_mode_{pooling}": True, "include_prompt": True})
    )
    for i in range(dense):
        weight = np.random.default_rng(i).normal(size=(48 + 16 * (i == 0), 48 + 16 * (i == 1))).astype(np.float32)
        settings = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
        (path / f"{i + 2}_Dense" / "config.json").write_text(json.dumps(settings))
        save_file({"linear.weight": weight}, path / f"{i + 2}_Dense" / "model.safetensors")
    return path


CASES = {
    "gemma, both ways": ("gemma3", "mean_tokens", 2, BIDIRECTIONAL),
    "modernbert": ("modernbert", "cls_token", 0, {}),
    "modernbert, mean": ("modernbert_biases", "mean_tokens", 1, {}),
    "qwen 3": ("qwen3", "lasttoken", 0, {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_transformers(name, tmp_path):
    """Each text by itself there; here all in one batch, whatever stands behind their ends."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    case, pooling, dense, changed = CASES[name]
    path = folder(tmp_path, case, pooling, dense, **changed)
    theirs, expected = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval(), []
    for text in TEXTS:
        hidden = theirs(torch.tensor([text])).last_hidden_state[0].detach()
        vector = {"mean_tokens": hidden.mean(0), "lasttoken": hidden[-1], "cls_token": hidden[0]}[pooling]
        for i in range(dense):
            vector = torch.tensor(load_file(path / f"{i + 2}_Dense" / "model.safetensors")["linear.weight"]) @ vector
        expected.append(torch.nn.functional.normalize(vector, dim=0).numpy())
    embedder = zoo.Embedder.load(path)
    np.testing.assert_allclose(embedder.embed(TEXTS), np.stack(expected), atol=2e-6)
    narrow = embedder.embed(TEXTS, dtype=jnp.bfloat16)
    assert float((narrow * np.stack(expected)).sum(-1).min()) > 0.99


def test_tokens_behind_are_seen_half_a_window_on_each_side():
    sizes = dict(vocab_size=97, num_layers=1, embed_dim=48, mlp_dim=80, num_heads=4, num_kv_heads=2, head_dim=16)
    config = zoo.Gemma3Config(**sizes, window=6, attention_pattern="L", bidirectional=True)
    model = zoo.Gemma.init(config, key=jax.random.key(0))
    ids = np.arange(3, 15)[None]
    changed = ids.copy()
    changed[0, 6] = 77
    moved = np.abs(model.hidden(jnp.asarray(ids)) - model.hidden(jnp.asarray(changed))).max(-1)[0] > 1e-6
    assert list(np.flatnonzero(moved)) == [3, 4, 5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="every token of this Gemma3Config sees those behind it"):
        generate(model, [[3, 4]], max_tokens=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: (path / "modules.json").unlink(), "it has no modules.json"),
        (lambda path: (path / "modules.json").write_text("{}"), "must begin with a Transformer and a Pooling"),
        (
            lambda path: (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}'),
            "its pooling is pooling_mode_max_tokens, and only one of mean, lasttoken, cls is known",
        ),
    ],
)
def test_what_is_not_known_is_refused(change, words, tmp_path):
    path = folder(tmp_path, "qwen3", "lasttoken")
    change(path)
    with pytest.raises(ValueError, match=words):
        zoo.Embedder.load(path)


@pytest.mark.parametrize("case", hf_tiny.ENCODERS)
def test_encoders_and_their_gradients_are_those_of_transformers(case, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = zoo.load(hf_tiny.write(case, tmp_path / case))
    theirs = transformers.AutoModel.from_pretrained(tmp_path / case, dtype=torch.float32, attn_implementation="eager")
    ids = hf_tiny.tokens()
    weights = np.random.default_rng(0).normal(size=(*ids.shape, 48)).astype(np.float32)
    hidden = theirs.eval()(torch.from_numpy(ids)).last_hidden_state
    (hidden * torch.from_numpy(weights)).sum().backward()

    def weighed(model, ids):
        found = model.hidden(ids)
        return (found * weights).sum(), found

    gradients, found = hf_tiny.jit(eqx.filter_grad(weighed, has_aux=True))(model, jnp.asarray(ids))
    np.testing.assert_allclose(found, hidden.detach().numpy(), atol=2e-5)
    zoo.save(gradients, tmp_path / "gradients")
    expected = dict(theirs.named_parameters())
    for name, array in load_file(tmp_path / "gradients" / "model.safetensors").items():
        of_theirs = expected[name.removeprefix("model.")].grad.numpy()
        np.testing.assert_allclose(array, of_theirs, atol=1e-5 * np.abs(of_theirs).max(), err_msg=name)
    zoo.save(model, tmp_path / "saved")
    again = transformers.AutoModel.from_pretrained(tmp_path / "saved", dtype=torch.float32, attn_implementation="eager")
    assert float((again.eval()(torch.from_numpy(ids)).last_hidden_state - hidden).detach().abs().max()) == 0
    with pytest.raises(ValueError, match="a ModernBertConfig reads texts and has no head"):
        model(jnp.asarray(ids))


ENCODER_MUTANTS = {
    "a window too long": {"window": 9},
    "a window too short": {"window": 4},
    "windows elsewhere": {"attention_pattern": "LGL"},
    "bases swapped": {"rope_theta": 1e4, "local_rope_theta": 16e4},
    "gelu of the tanh form": {"activation": "gelu_tanh"},
}


@pytest.mark.parametrize("name", ENCODER_MUTANTS)
def test_a_flipped_convention_of_an_encoder_is_seen(name, tmp_path):
    model = zoo.load(hf_tiny.write("modernbert", tmp_path))
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    changed = dataclasses.replace(model.config, **ENCODER_MUTANTS[name])
    mutant = type(model)(**fields | {"config": changed})
    ids = jnp.asarray(hf_tiny.tokens())
    assert float(jnp.abs(model.hidden(ids) - mutant.hidden(ids)).max()) > 1e-4
