"""Scores: every token once, with the context it was promised, and without logits of the whole text."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from experiments import score
from experiments.commandline import schema
from experiments.configs import commands
from experiments.data.tokenizer import Bytes
from experiments.step import weights
from tests.zoo.hf_tiny import FAST, jit, loaded
from zoo.engine.engine import Engine, lowered

MODEL = "gemma2_gqa"


def config(**fields) -> commands.Score:
    """The command's configuration with some fields."""
    made, _ = schema.compose([f"{key}={value}" for key, value in fields.items()], "score")
    return made


def documents(*lengths: int) -> list[score.Document]:
    """Texts of random ids."""
    draw = np.random.default_rng(0)
    return [score.Document(draw.integers(3, 97, length).astype(np.int32), length) for length in lengths]


def scored(texts, how, *finished):
    """Score texts with the model, compiled fast."""
    return score.score(texts, score.scorer(loaded(MODEL), how, options=FAST["compiler_options"]), how, *finished)


@jit
def predict(model, ids):
    """Log-probabilities [B, S, V], untiled."""
    return jax.nn.log_softmax(model(ids))


def logprobs(model, ids: np.ndarray) -> np.ndarray:
    """Log-probability of each id after the first, untiled and in one piece."""
    padded = np.zeros((1, 80), np.int32)
    padded[0, : len(ids)] = ids  # what follows changes nothing, and one program serves every length
    found = predict(model, jnp.asarray(padded))[0]
    return np.asarray(found)[np.arange(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_text_within_a_window_is_scored_as_a_whole(batch_size):
    texts = documents(70, 2, 33, 1, 0)
    scored(texts, config(seq_len=128, batch_size=batch_size, tile=16))
    for text in texts[:3]:
        np.testing.assert_allclose(text.logprobs, logprobs(loaded(MODEL), text.ids), atol=2e-5)
    assert [len(text.logprobs) for text in texts] == [69, 1, 32, 0, 0]


@pytest.mark.parametrize(("seq_len", "stride"), [(16, 16), (16, 5), (16, None), (7, 1)])
def test_windows_give_each_token_its_context(seq_len, stride):
    (text,) = documents(53)
    words = {"seq_len": seq_len} | ({} if stride is None else {"stride": stride})
    scored([text], config(tile=8, **words))
    stride = stride or seq_len // 2
    for window in score.windows(text, seq_len, stride):
        expected = logprobs(loaded(MODEL), text.ids[window.begin : window.end + 1])[window.first - window.begin :]
        np.testing.assert_allclose(text.logprobs[window.first : window.end], expected, atol=2e-5)


@pytest.mark.parametrize(("length", "seq_len", "stride"), [(2, 4, 4), (53, 16, 5), (17, 16, 16), (100, 9, 1)])
def test_windows_score_every_token_once(length, seq_len, stride):
    (text,) = documents(length)
    found = list(score.windows(text, seq_len, stride))
    scored = [target for window in found for target in range(window.first, window.end)]
    assert scored == list(range(length - 1))
    assert all(window.end - window.begin <= seq_len for window in found)
    assert all(window.first - window.begin >= seq_len - stride for window in found[1:])


@pytest.mark.measured
def test_windows_are_no_longer_than_the_positions_that_a_model_has_learned(capsys):
    learned, without = (loaded(case).config for case in ("gpt2", MODEL))
    assert score._readable(config(), without) == config()
    found = score._readable(config(stride=100), learned)
    assert (found.seq_len, found.stride) == (learned.context_length, learned.context_length)
    assert f"note: windows are of {learned.context_length} tokens, not seq_len=2048" in capsys.readouterr().err


def test_no_logits_of_a_hundred_thousand_tokens_exist():
    """256k words: 100 GB of logits untiled. Compiled, not run."""
    tiny = zoo.GemmaConfig(
        vocab_size=256_000, num_layers=1, embed_dim=8, mlp_dim=8, num_heads=1, num_kv_heads=1, head_dim=8
    )
    model = zoo.Gemma.init(tiny, key=jax.random.key(0))
    engine = score.scorer(model, config(seq_len=1600, batch_size=64), options=FAST["compiler_options"])
    assert engine.settings.rows * engine.settings.width == 64 * 512
    compiled = lowered(model, engine.settings, compiler_options=FAST["compiler_options"]).compile()
    logits = 256 * 256_000 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * logits < 64 * 512 * 256_000 * 4 / 30


def test_documents_are_finished_in_turn():
    texts, seen = documents(1, 20, 0, 40, 3, 1), []
    scored(texts, config(seq_len=16, tile=16), seen.append)
    assert [id(text) for text in seen] == [id(text) for text in texts]


def test_a_place_that_cannot_be_written_is_said_before_the_model_is_read(monkeypatch, capsys):

    monkeypatch.setattr(weights, "open_model", None)  # would fail if it were reached
    assert score.main(["data=pydoc", "out=/dev/null/x/y"]) == 1
    assert "error: cannot write out=/dev/null/x/y: Not a directory (/dev/null/x)" in capsys.readouterr().err


def test_what_is_scored_is_written_at_once(tmp_path, monkeypatch, capsys):
    """The third document cannot be scored; the lines of those before it are there, and an earlier file's are not."""

    opened = weights.Opened(loaded(MODEL), jnp.float32, {}, Bytes())
    monkeypatch.setattr(weights, "open_model", lambda *_: opened)
    (tmp_path / "out.jsonl").write_text("old\n")
    texts = documents(9, 9, 9)
    monkeypatch.setattr(score, "read_documents", lambda *_: texts)
    real, calls = Engine.step, []

    def step(engine):
        calls.append(engine)
        if len(calls) == 5:  # whose scores are not yet written
            raise RuntimeError("power cut")
        return real(engine)

    monkeypatch.setattr(Engine, "step", step)
    with pytest.raises(RuntimeError, match="power cut"):
        score.main(["seq_len=16", f"out={tmp_path / 'out.jsonl'}"])
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["ids"] for line in lines] == [text.ids.tolist() for text in texts[:2]]


def test_the_report_is_of_bytes_and_tokens():
    texts = documents(5, 3)
    texts[0].logprobs[:] = -np.log(2)
    texts[1].logprobs[:] = -np.log(4)
    found = score.report(texts)
    assert (found["tokens"], found["bytes"]) == (6, 8)
    assert found["bits_per_byte"] == pytest.approx((4 * 1 + 2 * 2) / 8)
    assert found["perplexity"] == pytest.approx(2 ** (8 / 6))


def test_the_command_scores_text_with_weights(tmp_path, capsys, monkeypatch):
    from experiments.runtime import hardware

    monkeypatch.setattr(hardware, "prepare", lambda platform: hardware.Device("cpu", "a test", 2**32))
    model = zoo.Gemma.init(
        zoo.GemmaConfig(
            vocab_size=300, num_layers=1, embed_dim=16, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8
        ),
        key=jax.random.key(0),
    )
    zoo.save(model, tmp_path / "weights")
    lines = [json.dumps({"text": text}) for text in ("one text", "", "another: é")]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    words = [f"model.weights={tmp_path / 'weights'}", "data=text", f"data.path={tmp_path / 'texts.jsonl'}"]
    assert score.main([*words, f"out={tmp_path / 'scores' / 'out.jsonl'}", "tile=3"]) == 0
    assert "2 documents, 19 tokens, 19 bytes:" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "scores" / "out.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [8, 11]
    ids = np.array([256, *b"one text"])
    np.testing.assert_allclose(rows[0]["logprobs"], logprobs(model, ids), atol=2e-5)
    assert rows[0]["ids"] == ids.tolist()
    for change, status, message in (
        ("model.num_layers=3", 1, "holds another model than the one asked for"),
        ("stride=4096", 2, "bad value stride=4096"),
        ("lora=/nothing", 1, "cannot load an adapter from `/nothing`: there is no such folder"),
        ("data=synthetic", 2, "this needs text: give data=text"),
        ("optimizer=sgd", 2, "there is no `optimizer`"),
    ):
        only = [word for word in words if not (change.startswith("data=") and word.startswith("data"))]
        assert score.main([*only, change]) == status
        assert message in capsys.readouterr().err
