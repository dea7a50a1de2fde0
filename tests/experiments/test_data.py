"""Text to batches: a pure function of seed and step, documents held out by content, and errors before training."""

import json
import random

import numpy as np
import pytest

from experiments import configs
from experiments.commandline import schema
from experiments.data import batches, corpus


@pytest.fixture
def make(tmp_path):
    """Open the source that overrides describe, with its cache in the test's own folder."""

    def open_source(*overrides, batch_size=4, seq_len=32, seed=0):
        words = [*overrides, f"data.cache={tmp_path / 'cache'}", f"seed={seed}"]
        config, _ = schema.compose(words)
        fields = {f: getattr(config, f) for f in config.__dataclass_fields__}
        sizes = {"steps": 1, "log_every": 1, "batch_size": batch_size, "seq_len": seq_len}
        return batches.open_source(configs.Resolved(**{**fields, **sizes}))

    return open_source


@pytest.fixture
def texts(tmp_path):
    """A folder of ten distinguishable documents."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"document {i}: " + "".join(random.Random(i).choices("etaoin", k=2000)))
    return folder


def test_a_batch_depends_on_seed_and_step_alone(make, texts):
    one, two = (make("data=text", f"data.path={texts}") for _ in range(2))
    for step in (0, 3, 1000):
        np.testing.assert_array_equal(one.batch(step).tokens, two.batch(step).tokens)
    other = make("data=text", f"data.path={texts}", seed=1)
    assert not np.array_equal(one.batch(0).tokens, other.batch(0).tokens)
    assert not np.array_equal(one.batch(0).tokens, one.batch(1).tokens)


def test_targets_follow_tokens_and_boundaries_do_not_count(make, texts):
    source = make("data=text", f"data.path={texts}")
    for step in range(20):
        batch = source.batch(step)
        np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
        np.testing.assert_array_equal(batch.mask, batch.targets != corpus.BOS)


def test_an_epoch_sees_every_window_once(make, texts):
    source = make("data=text", f"data.path={texts}", batch_size=1)
    count = len(source.train)
    epochs = [[source.batch(step).tokens.tobytes() for step in range(e * count, (e + 1) * count)] for e in range(2)]
    whole = source.train.read(np.arange(count))[:, :-1]
    assert sorted(epochs[0]) == sorted(row.tobytes() for row in whole)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("count", [1, 2, 3, 10, 1000, 4097])
def test_permutation_is_one(count):
    moved = batches.permute(np.arange(count), count, (3, 1))
    np.testing.assert_array_equal(np.sort(moved), np.arange(count))
    if count > 10:
        assert not np.array_equal(moved, batches.permute(np.arange(count), count, (3, 2)))


def test_split_is_by_content(texts):
    documents = [path.read_bytes() for path in texts.iterdir()]
    train, held_out = corpus.split(documents, 0.3)
    assert sorted(train + held_out) == sorted(documents)
    assert train
    assert held_out
    # A document stays on its side whatever else there is, and copies stay together.
    again, held_again = corpus.split([*documents[::-1], documents[0], b"new"], 0.3)
    assert set(train) <= set(again)
    assert set(held_out) <= set(held_again)


def test_one_document_is_cut_to_hold_some_out(make, tmp_path):
    (tmp_path / "one.txt").write_text("".join(f"line {i} of a long text\n" for i in range(5000)))
    source = make("data=text", f"data.path={tmp_path / 'one.txt'}")
    assert len(source.train) > len(source.held_out) > 0


def test_jsonl(make, tmp_path):
    lines = [json.dumps({"text": f"document {i} " * 30}) for i in range(10)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert len(make("data=text", f"data.path={tmp_path / 'a.jsonl'}").train) > 0
    with pytest.raises(batches.DataError, match=r"a.jsonl:1: no JSON object with text in data.field=body"):
        make("data=text", f"data.path={tmp_path / 'a.jsonl'}", "data.field=body")
    (tmp_path / "a.jsonl").write_text("[" * 100_000)
    with pytest.raises(batches.DataError, match=r"a.jsonl:1: no JSON object with text in data.field=text"):
        make("data=text", f"data.path={tmp_path / 'a.jsonl'}")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize(
    ("content", "offset"),
    [(b"some text\0", "9 is 0x00"), ("naïve".encode("latin-1"), "2 is 0xef"), ("é".encode("utf-16"), "0 is 0xff")],
    ids=["NUL", "Latin-1", "UTF-16"],
)
def test_what_is_no_text_is_refused(make, tmp_path, name, content, offset):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(
        batches.DataError, match=rf"cannot read data.path=.*{name} as text: the byte at offset {offset}"
    ):
        make("data=text", f"data.path={tmp_path / name}")


def test_lines_of_json_are_known_by_their_name_in_any_case(make, texts, tmp_path):
    lines = [json.dumps({"text": path.read_text()}) for path in sorted(texts.iterdir())]
    (tmp_path / "a.JSONL").write_text("\n".join(lines))
    wanted = make("data=text", f"data.path={texts}").batch(0)
    np.testing.assert_array_equal(make("data=text", f"data.path={tmp_path / 'a.JSONL'}").batch(0).tokens, wanted.tokens)


@pytest.mark.parametrize("indent", [None, 1])
def test_json_with_texts_in_it_is_no_text(make, tmp_path, indent):
    made = [{"text": f"document {i} " * 3000} for i in range(3)]
    for content in ("\n".join(map(json.dumps, made)), json.dumps(made, indent=indent), json.dumps(made[0])):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(batches.DataError, match=r"a.json as one text: .* data.field=text. Write these one a line"):
            make("data=text", f"data.path={tmp_path / 'a.json'}")
        assert corpus.texts_of(configs.Text(path=str(tmp_path / "a.json"), field="body")) == [content.encode()]


def test_half_a_character_is_refused_where_it_stands(make, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "whole"}\n{"text": "a \\ud800"}')
    with pytest.raises(
        batches.DataError, match=r"a.jsonl:2: a text holds U\+D800, half of a surrogate pair, as its ch"
    ):
        make("data=text", f"data.path={tmp_path / 'a.jsonl'}")
    (tmp_path / "own.py").write_text("def texts():\n    return ['whole', 'a \\udc00']")
    with pytest.raises(batches.DataError, match=r"cannot read document 1 of data.fn=.*: a text holds U\+DC00"):
        make(f"data={tmp_path / 'own.py'}:texts")


def test_default_texts_are_there(make):
    for name in ("stdlib", "pydoc"):
        source = make(f"data={name}")
        assert len(source.train) > 1000
        assert len(source.held_out) > 10
        assert source.bytes_per_token == 1.0


def test_cache_is_used_again_and_has_no_leftovers(make, texts, tmp_path, monkeypatch):
    make("data=text", f"data.path={texts}")
    monkeypatch.setattr(corpus, "tokenize", None)
    make("data=text", f"data.path={texts}")
    names = sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert names == ["held_out.bin", "train.bin"]


def test_held_out_batches_are_spread_and_never_trained_on(make, texts):
    source = make("data=text", f"data.path={texts}", "data.val_fraction=0.3")
    batches = source.held_out_batches(3)
    rows = {row.tobytes() for i in range(batches) for row in source.held_out_batch(i, batches).tokens}
    assert len(rows) == batches * 4
    trained = {row.tobytes() for step in range(len(source.train)) for row in source.batch(step).tokens}
    assert not rows & trained


def test_synthetic_repeats_itself(make):
    batch = make("data=synthetic", "data.vocab=7").batch(5)
    np.testing.assert_array_equal(batch.tokens[:, 17:], batch.tokens[:, :15])
    assert batch.tokens.max() < 7


@pytest.mark.parametrize("files", [1, 5])
def test_token_files(make, tmp_path, files):
    for i in range(files):
        (np.arange(4000) % 500 + i).astype(np.uint16).tofile(tmp_path / f"{i}.bin")
    source = make("data=tokens", f"data.path={tmp_path}")
    assert isinstance(source.train.arrays[0], np.memmap)
    assert source.bytes_per_token is None
    assert len(source.held_out) > 0
    assert source.batch(0).tokens.dtype == np.int32


def test_ids_outside_the_vocabulary_are_refused(make, tmp_path):
    ids = np.zeros(4000, np.uint16)
    ids[1234] = 512
    ids.tofile(tmp_path / "a.bin")
    with pytest.raises(batches.DataError, match=r"token id 512 in .*a.bin is outside the vocabulary: .*\[0, 512\)"):
        make("data=tokens", f"data.path={tmp_path / 'a.bin'}")
    with pytest.raises(batches.DataError, match=r"token id 256 in bytes .* outside the vocabulary"):
        make("model.vocab_size=256")
    with pytest.raises(batches.DataError, match=r"token id 599 in data=synthetic"):
        make("data=synthetic", "data.vocab=600")


def test_negative_ids_are_refused(make, tmp_path):
    np.full(4000, -1, np.int32).tofile(tmp_path / "a.bin")
    with pytest.raises(batches.DataError, match="token id -1"):
        make("data=tokens", "data.dtype=int32", f"data.path={tmp_path / 'a.bin'}")


def test_nothing_to_read(make, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.bin").touch()
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "short.txt").write_text("too short")
    cases = {
        "data=text data.path={}/missing": "no such file or folder",
        "data=text data.path={}/empty": "no file that matches",
        "data=text data.path={}/empty.txt": "every document is empty",
        "data=text data.path={}/short.txt": "too little text at data.path=.*short.txt: it takes at least two",
        "data=tokens data.path={}/empty.bin": "no such file, or only empty ones",
        "data=tokens data.path={}/missing.bin": "no such file, or only empty ones",
        "data=tokens data.path={}/odd.bin": "no multiple",
    }
    for words, message in cases.items():
        with pytest.raises(batches.DataError, match=message):
            make(*words.format(tmp_path).split())


@pytest.fixture
def written(tmp_path):
    """Name a function whose body is given, as `data=` takes it."""
    return lambda body: (tmp_path / "own.py").write_text(f"def made():\n    {body}") and f"data={tmp_path}/own.py:made"


def test_lists_of_ids_are_packed_apart(make, written):
    """Each list is another document: numbered anew in every window, and no end of one predicts the next."""
    own = written("return [[i] * (1 + i % 50) for i in range(200)]")
    source = make(own, "data.packed=true")
    for step in range(30):
        batch = source.batch(step)
        new = np.diff(batch.tokens, axis=1) != 0
        np.testing.assert_array_equal(np.diff(batch.segments, axis=1), new)
        assert (batch.segments[:, 0] == 0).all() and batch.segments.dtype == np.int32
        np.testing.assert_array_equal(batch.mask, batch.tokens == batch.targets)
    plain = make(own).batch(0)
    assert plain.segments is None and plain.mask.all()
    np.testing.assert_array_equal(plain.tokens, source.batch(0).tokens)


def test_a_row_without_a_mask_counts_whole(make, written):
    own = written("return [{'tokens': [i] * 33, **({'mask': [0.5] * 33} if i % 2 else {})} for i in range(20)]")
    batch = make(own).batch(0)
    np.testing.assert_array_equal(batch.mask[:, 0], np.where(batch.tokens[:, 0] % 2, 0.5, 1))


ROWS = {
    "floats": ("'tokens': [1.7] * 33", "", r"'tokens' of row 0 of data.fn=.* is of type float64: it must hold whole"),
    "text": ("'tokens': 'x' * 33", "", r"'tokens' of row 0 .* has shape \(\): seq_len=32 needs \(33,\)"),
    "ragged": ("'tokens': [[1], [1, 2]]", "", r"'tokens' of row 0 .* is no array"),
    "outside": ("'tokens': [600] * 33", "", r"token id 600 in row 0 .* outside the vocabulary: .* \[0, 512\)"),
    "negative mask": ("'tokens': [1] * 33, 'mask': [-1] * 33", "", r"'mask' of row 0 .* holds -1: it must lie between"),
    "no number": ("'tokens': [1] * 33, 'mask': [float('nan')] * 33", "", r"'mask' of row 0 .* holds nan: it must lie"),
    "text for a mask": (
        "'tokens': [1] * 33, 'mask': ['1'] * 33",
        "",
        r"'mask' of row 0 .* of type <U1: it must hold n",
    ),
    "short mask": ("'tokens': [1] * 33, 'mask': [1] * 32", "", r"'mask' of row 0 .* has shape \(32,\)"),
    "misspelt": ("'tokens': [1] * 33, 'masks': [0] * 33", "", r"row 0 .* has 'masks', and only .* Did you mean 'mask'"),
    "not packed": (
        "'tokens': [1] * 33, 'segments': [0] * 33",
        "",
        r"row 0 .* has 'segments', which are read with data.p",
    ),
    "no segments": (
        "'tokens': [1] * 33",
        "data.packed=true",
        r"row 0 .* has no 'segments': give {'tokens': ids, 'segm",
    ),
    "half segments": (
        "'tokens': [1] * 33, 'segments': [0.5] * 33",
        "data.packed=true",
        r"'segments' of row 0 .* is of type float64",
    ),
}


@pytest.mark.parametrize(("row", "packed", "message"), ROWS.values(), ids=ROWS)
def test_what_is_no_row_is_named(make, written, row, packed, message):
    with pytest.raises(batches.DataError, match=message):
        make(written(f"return [{{{row}}} for i in range(20)]"), *packed.split())


@pytest.mark.parametrize("last", ["{'tokens': [1] * 32}", "'x'"])
def test_every_row_is_checked_and_named_by_its_number(make, written, last):
    source = make(written(f"return [{{'tokens': [1] * 33}} for i in range(18)] + [{last}] * 2"), batch_size=1)
    with pytest.raises(batches.DataError, match="row 18 of"):
        [source.batch(step) for step in range(19)]
    with pytest.raises(batches.DataError, match="row 19 of"):
        source.held_out_batch(0, 1)


def test_text_shorter_than_a_window(make, texts):
    with pytest.raises(batches.DataError, match=r"too little text for seq_len=6000: the .* part has \d+ tokens"):
        make("data=text", f"data.path={texts}", seq_len=6000)
