"""`generate.py`: what it prints, chat, batches, and its errors."""

import json

import jax
import pytest

import zoo
from experiments import generate
from experiments.data.tokenizer import open_tokenizer, train_bpe
from experiments.runtime import hardware
from zoo import adapters
from zoo.adapters import lora
from zoo.inference.generate import generate as generate_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model's folder with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("model")
    config = zoo.LlamaConfig(
        vocab_size=300, num_layers=1, embed_dim=16, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8
    )
    zoo.save(zoo.Llama.init(config, key=jax.random.key(0)), path)
    train_bpe([b"some words, other words"] * 3, 300, path)
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
    )
    return path


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Run the command in this process; return its status, and what it printed on both streams."""
    monkeypatch.setattr(hardware, "prepare", lambda platform: hardware.Device("cpu", "a test", 2**32))

    def start(*words):
        status = generate.main([f"model.weights={folder}", "max_tokens=5", "temperature=0", *words])
        return status, *capsys.readouterr()

    return start


def expected(folder, *prompts: list[int], new: int = 5, model=None) -> list[str]:
    """What follows each prompt, as text."""
    tokenizer, model = open_tokenizer(folder), zoo.load(folder) if model is None else model
    return [tokenizer.decode(ids) for ids in generate_ids(model, prompts, new, stop=tokenizer.stops)]


def test_a_prompt_is_continued(run, folder):
    text = 'words: "a, b" = {x}; $y'  # none of it means anything to the command line
    status, out, err = run(f"prompt={text}")
    assert status == 0
    assert out == text + expected(folder, open_tokenizer(folder).prompt(text))[0] + "\n"
    assert err.splitlines()[-1].startswith("(5 tokens")
    assert f"note: text is the tokenizer in {folder}" in err


def test_prompts_are_a_batch(run, folder):
    tokenizer = open_tokenizer(folder)
    status, out, _ = run("prompt=words", "prompt=some other words")
    follow = expected(folder, tokenizer.prompt("words"), tokenizer.prompt("some other words"))
    assert status == 0
    assert out == f"words{follow[0]}\n\nsome other words{follow[1]}\n"


def test_chat_uses_the_template(run, folder):
    status, out, _ = run("prompt=words", "system=some", "chat=true")
    ids = open_tokenizer(folder).encode("[system]some[user]words[me]").tolist()
    assert status == 0
    assert out == expected(folder, ids)[0] + "\n"


def test_an_adapter_changes_the_text(run, folder, tmp_path):
    model = lora.attach(zoo.load(folder), ["*"], rank=2, alpha=2.0, key=jax.random.key(1))
    found = list(lora.adapted(model))
    model = lora.put(model, [row for row, _ in found], [lora.LowRank(p.base, p.a, p.b + 0.5, 1.0) for _, p in found])
    adapters.save(model, tmp_path)
    status, out, _ = run("prompt=words", f"lora={tmp_path}")
    assert status == 0
    assert out == "words" + expected(folder, open_tokenizer(folder).prompt("words"), model=model)[0] + "\n"
    assert out != run("prompt=words")[1]


def test_stops_end_the_text_and_are_not_printed(run, folder):
    tokenizer = open_tokenizer(folder)
    (ids,) = generate_ids(zoo.load(folder), [tokenizer.prompt("words")], 5)
    last = ids.index(ids[2])
    status, out, err = run("prompt=words", f"stop=[{ids[2]}]")
    assert status == 0
    assert out == "words" + tokenizer.decode(ids[:last]) + "\n"
    assert err.splitlines()[-1].startswith(f"({last + 1} tokens")


def test_random_text_repeats_with_its_seed(run):
    text = lambda seed: run("prompt=words", "temperature=5.0", f"seed={seed}")[1]
    assert text(1) == text(1) != text(2)


@pytest.fixture
def says(folder):
    """Write what the folder says of how tokens are picked."""
    path = folder / "generation_config.json"
    yield lambda said: path.write_text(json.dumps(said))
    path.unlink()


def test_tokens_are_picked_as_the_folder_says_where_nobody_says_otherwise(run, folder, says):
    drawn = "temperature=null"
    text = lambda *words: run("prompt=words", *words)[1]
    greedy, random = text("temperature=0"), text("temperature=5", "seed=1")
    says({"do_sample": True, "temperature": 5.0, "top_k": 1, "repetition_penalty": None})
    status, out, err = run("prompt=words", drawn, "seed=1")
    assert (status, out) == (0, greedy)
    assert "note: generation_config.json says temperature=5, top_k=1\n" in err
    assert text(drawn, "seed=1", "top_k=300") == text(drawn, "seed=1", "top_k=0") == random != greedy
    says({"do_sample": True, "temperature": 5.0, "top_k": 0})
    assert text(drawn, "seed=1") == random
    says({"do_sample": False, "temperature": 5.0, "top_p": 0.5})
    assert text(drawn, "seed=1") == greedy
    assert text("temperature=5", "seed=1") == random
    says({"repetition_penalty": 0.01, "temperature": 0})
    assert text(drawn) == text("repetition_penalty=0.01") != greedy


def test_what_a_folder_says_in_vain_is_told(run, says):
    says({"num_beams": 4, "no_repeat_ngram_size": 3, "typical_p": 1.0, "suppress_tokens": []})
    assert "note: generation_config.json also says num_beams=4, no_repeat_ngram_size=3, which" in run("prompt=words")[2]
    says({"num_beams": 1, "no_repeat_ngram_size": 0, "bad_words_ids": None})
    assert "also says" not in run("prompt=words")[2]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"temperature": "warm"}, "generation_config.json says: temperature='warm' must be numbers"),
        ({"top_p": 2}, "generation_config.json: cannot sample with top_p=2"),
    ],
)
def test_a_folder_that_says_what_cannot_be_is_named(run, says, said, message):
    says(said)
    status, _, err = run("prompt=words")
    assert status == 1
    assert message in err


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 1, 'there is nothing to continue: give prompt="some text"'),
        (["prompt=a", "top_p=2"], 1, "cannot sample with top_p=2.0"),
        (["prompt=a", "top_k=-2"], 2, "bad value top_k=-2: it must be at least 1, or 0 for all"),
        (["prompt=a", "seed=-1"], 2, "bad value seed=-1: it must be zero or more"),
        (["prompt=a", "system=some"], 2, "bad value system=some: it is of a chat; say chat=true too"),
        (["prompt=a", "stop=[5,9999]"], 2, "bad value stop=[9999]: this model picks ids from 0 to 299"),
        (["prompt=a", "max_tokens=0"], 2, "bad value max_tokens=0"),
        (["prompt=a", "max_token=1"], 2, "Did you mean `max_tokens`?"),
        (["prompt=a", "tokenizer=/nothing"], 2, "cannot read a tokenizer at /nothing"),
        (["prompt=a", "model.weights=/nothing"], 1, "cannot read model.weights=/nothing"),
        (["prompt=a", "hardware=cpu", "chat=true", "tokenizer={}/plain"], 1, "and the tokenizer in"),
    ],
)
def test_errors_are_one_line(run, folder, words, status, message):
    (folder / "plain").mkdir(exist_ok=True)
    (folder / "plain" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (folder / "plain" / "tokenizer_config.json").write_text(json.dumps({}))
    found = run(*(word.replace("{}", str(folder)) for word in words))
    assert found[0] == status
    assert message in found[2]
    assert len([line for line in found[2].splitlines() if not line.startswith("note: ")]) == 1


@pytest.mark.parametrize(
    "word", ["mesh.model=2", "mesh=tp mesh.model=2", "drafts=2", "drafter={folder}", "mesh.model=2 model.quantise=int8"]
)
def test_text_is_the_same_on_devices_and_with_drafts(run, folder, word):
    words = word.format(folder=folder).split()
    same = [word for word in words if word.startswith("model.quantise")]
    assert run("prompt=words, other words, ot", *words)[:2] == run("prompt=words, other words, ot", *same)[:2]


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("mesh.data=2", "texts share a step"),
        ("mesh.model=999", "there are 8 devices"),
        ("mesh.model=2 lora=somewhere", "merge it first"),
        ("kv_dtype=int4", "give int8"),
        ("drafts=-1", "0 guesses nothing"),
        ("drafter=nowhere", "cannot draft with drafter"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(run, word, why):
    status, _, err = run("prompt=x", *word.split())
    assert status > 0
    assert why in err
