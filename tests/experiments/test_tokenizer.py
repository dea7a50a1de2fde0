"""Text to ids and back: nothing lost, the folders of others read as transformers reads them, errors in words."""

import json
import shutil
import sys

import numpy as np
import pytest

from experiments import configs
from experiments import tokenizer as command
from experiments.commandline import schema
from experiments.data import DataError, batches, corpus
from experiments.data.chat import read_message
from experiments.data.tokenizer import Bytes, open_tokenizer, train_bpe
from experiments.results.summary import copy_tokenizer
from experiments.serving.worker import Listener

TEXTS = ["plain words, plain words", "naïve café — 東京 🙂🙂", "tabs\tand\r\nlines\n\n", " leading", "", "\x00\x7f"]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 < 3?"},
    {"role": "assistant", "content": "True"},
    {"role": "user", "content": "é?"},
]
TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
    {%- if message.role == "system" and loop.index0 > 0 %}{{ raise_exception("system comes first") }}{% endif %}
    {%- if message.role == "nobody" %}{% continue %}{% endif %}
<|{{ message.role }}|>{{ message.content | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% generation %}{{ {"a": "<é>"} | tojson }}{% endgeneration %}{% endif %}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BPE trained on a little prose, as a folder with a chat template."""
    path = tmp_path_factory.mktemp("bpe")
    train_bpe(corpus.documents(configs.Pydoc()), 600, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def either(request, folder):
    return open_tokenizer(None if request.param == "bytes" else folder)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_survive(either, text):
    ids = either.encode(text)
    assert either.decode(ids) == text
    assert either.prompt(text) == [either.start, *ids]
    np.testing.assert_array_equal(either.encode_batch([text.encode()])[0], ids)
    assert ids.max(initial=0) < either.vocab_size


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text_and_no_character_is_broken(either, text):
    step = either.stream()
    pieces = [step(int(token)) for token in either.prompt(text)]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["bytes", "folder", "sentences"])
def test_bytes_of_ids_are_those_of_the_text_one_by_one(request, kind):
    made = open_tokenizer(None if kind == "bytes" else request.getfixturevalue(kind))
    text = "naïve 東 🙂, \t<0x41> plain"
    spelled = [made.spell(int(token)) for token in made.encode(text)]
    assert b"".join(each for _, each in spelled).decode().lstrip() == text
    assert (made.spell(made.start)[1], len({name for name, _ in spelled if name.startswith("\\x")}) > 2) == (None, True)


def test_training_fills_the_vocabulary_and_shortens_text(folder):
    made = open_tokenizer(folder)
    assert made.vocab_size == 600
    text = next(corpus.documents(configs.Pydoc()))
    assert len(made.encode(text)) < len(text) / 1.8
    assert made.start == 1
    assert made.stops == (0,)
    assert made.separator == 1


def test_transformers_reads_the_folder_alike(folder):
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), open_tokenizer(folder)
    for text in TEXTS:
        assert theirs(text).input_ids == ours.prompt(text)
    assert theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == ours.chat.render(
        MESSAGES
    )
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.start, ours.stops[0])


ABOUT = {"tools": [{"name": "f"}], "level": {"a": 1}}


@pytest.mark.parametrize("told", [{}, ABOUT])
@pytest.mark.parametrize(
    "template",
    [
        "{% if tools is not none %}{{ tools | tojson }}{% endif %}{{ documents is none }}{{ level is defined }}",
        "{% for m in messages %}{{ m.thinking }},{{ m.reasoning_content }}{{ m.name is defined }}{% endfor %}",
        "{{ cls_token }}{{ sep_token }}{{ level }}",
    ],
)
def test_templates_are_told_what_transformers_tells_them(folder, tmp_path, template, told):
    transformers = pytest.importorskip("transformers")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "cls_token": "<bos>"}))
    (tmp_path / "chat_template.jinja").write_text(template)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), open_tokenizer(tmp_path).chat
    told = {name: value for name, value in told.items() if name in ours.variables}
    messages = [MESSAGES[0], {**MESSAGES[2], "name": None, "reasoning": "so"}, {**MESSAGES[2], "thinking": ""}]
    expected = theirs.apply_chat_template(messages, tokenize=False, **told)
    assert ours.render([read_message(one) for one in messages], told, answer=False) == expected


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("added_tokens.json", {"<new>": 601, "<first>": 600}),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"600": {"content": "<new>", "special": True, "lstrip": True}}},
        ),
        ("tokenizer_config.json", {"additional_special_tokens": ["<new>", "<eos>"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "<new>"}}),
    ],
)
def test_tokens_that_only_other_files_name_are_found_as_transformers_finds_them(folder, tmp_path, name, told):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    plain = open_tokenizer(tmp_path).identity
    (tmp_path / name).write_text(json.dumps({"bos_token": "<bos>", **told} if "config" in name else told))
    (tmp_path / "chat_template.jinja").write_text("{{ image_token }}{{ messages[0].content }}")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), open_tokenizer(tmp_path)
    text = "one <new> two"
    assert ours.prompt(text) == theirs(text).input_ids
    assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), skip_special_tokens=True)
    assert ours.chat.render(MESSAGES) == theirs.apply_chat_template(MESSAGES, tokenize=False)
    assert ours.vocab_size == len(theirs) and ours.identity != plain


def test_a_folders_template_for_tools_is_used_where_there_are_any(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    named = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].name }}{{ messages[0].tool_calls }}"}
    templates = [{"name": name, "template": template} for name, template in named.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), open_tokenizer(tmp_path).chat
    for chat, told in ((ours, {}), (ours.for_tools, {"tools": ABOUT["tools"]})):
        assert chat.render(MESSAGES, told) == theirs.apply_chat_template(MESSAGES, tokenize=False, **told)
    assert (ours.variables, ours.for_tools.variables, ours.for_tools.for_tools) == (set(), {"tools"}, ours.for_tools)
    identity = ours.identity
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates[:1]}))
    alone = open_tokenizer(tmp_path).chat
    assert alone.for_tools is alone and alone.identity != identity


def test_a_template_in_a_file_of_older_folders_is_read(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    assert open_tokenizer(tmp_path).chat.render(MESSAGES) == "Be brief.!"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{"}))
    with pytest.raises(DataError, match=r"cannot read the chat template in .*chat_template.json: "):
        open_tokenizer(tmp_path)


def test_chat_templates_render_and_refuse(folder, tmp_path):
    chat = open_tokenizer(folder).chat
    first = "<bos><|system|>Be brief.<eos>\n<|user|>What is 2 < 3?<eos>\n"
    assert chat.render(MESSAGES[:2], answer=False) == first
    assert chat.render(MESSAGES[:2]) == first + '<|assistant|>{"a": "<é>"}'
    with pytest.raises(DataError, match=r"chat_template.jinja fails: system comes first"):
        chat.render(MESSAGES[1:] + MESSAGES[:1])
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    for source in (named, named[1]["template"]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
        assert open_tokenizer(tmp_path).chat.render(MESSAGES) == "Be brief.!"


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% for i in range(10**9) %}{% endfor %}"]
)
def test_chat_templates_cannot_leave_their_sandbox(folder, tmp_path, template):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(DataError, match=r"chat_template.jinja fails"):
        open_tokenizer(tmp_path).chat.render(MESSAGES)


def test_what_ends_a_text_may_stand_in_the_text_part(folder, tmp_path):
    """Of the model's settings, as transformers 5 writes them; what stands outside counts first."""
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    for raw, stops in (({}, (5, 6)), ({"eos_token_id": 7}, (7,)), ({"eos_token_id": None}, (5, 6))):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"text_config": {"eos_token_id": [6, 5]}}))
        assert open_tokenizer(tmp_path).stops == stops


def test_special_tokens_that_older_folders_name_apart_are_read(folder, tmp_path):
    """In templates too, which name all four; a template that does not is the same as before."""
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>"}))
    plain = open_tokenizer(tmp_path).chat.identity
    named = {"eos_token": {"content": "<eos>"}, "pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<other>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    opened = open_tokenizer(tmp_path)
    assert opened.stops == (0,) and opened.start == opened._id("<bos>")
    assert opened.chat.identity == plain.replace('"eos_token": ""', '"eos_token": "<eos>"')
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ pad_token }}{{ unk_token }}{{ eos_token }}")
    assert open_tokenizer(tmp_path).chat.render(MESSAGES) == "<bos><pad><unk><eos>"


def test_stops_come_from_both_files(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert open_tokenizer(tmp_path).stops == ()
    with pytest.raises(DataError, match="no bos_token and no eos_token"):
        _ = open_tokenizer(tmp_path).separator
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert open_tokenizer(tmp_path).stops == (0, 7, 9)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert open_tokenizer(tmp_path).stops == (0, 7, 9)
    (tmp_path / "generation_config.json").unlink()
    assert open_tokenizer(tmp_path).stops == (0, 5)  # the model's own, where there is no generation config
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"generation_config.json: it must hold a JSON object"):
        open_tokenizer(tmp_path)


def test_weights_bring_their_tokenizer(folder, tmp_path):
    assert isinstance(open_tokenizer(None, tmp_path), Bytes)
    assert open_tokenizer(None, folder).vocab_size == 600


def test_weights_of_many_words_without_a_tokenizer_are_no_bytes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 256_000}}))
    with pytest.raises(DataError, match=r"has 256,000 words, and it holds no tokenizer.json and no tokenizer.model"):
        open_tokenizer(None, tmp_path)
    assert isinstance(open_tokenizer("bytes", tmp_path), Bytes)
    copy_tokenizer(None, tmp_path)  # as a run that has trained on bytes does
    assert isinstance(open_tokenizer(None, tmp_path), Bytes)


@pytest.mark.parametrize("how", ["files", "object"])
def test_a_template_for_tools_may_stand_beside(how, tmp_path):
    pytest.importorskip("tokenizers")
    train_bpe([b"one two three"] * 3, 300, tmp_path)
    if how == "files":
        (tmp_path / "chat_template.jinja").write_text("plain")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].name }}")
    else:
        named = {"chat_template": {"default": "plain", "tool_use": "{{ tools[0].name }}"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    made = open_tokenizer(tmp_path).chat
    assert (made.render(MESSAGES), made.for_tools.render(MESSAGES, {"tools": [{"name": "f"}]})) == ("plain", "f")


def test_lengths_in_a_tokenizers_file_are_not_heeded(tmp_path):
    """Training with transformers leaves them there, which heed them no more than this."""
    tokenizers = pytest.importorskip("tokenizers")
    made = train_bpe([b"one two three"] * 3, 300, tmp_path)
    text = "one two three four five"
    ids, prompt, before = made.encode(text).tolist(), made.prompt(text), made.identity
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=40)
    inner.save(str(tmp_path / "tokenizer.json"))
    cut = open_tokenizer(tmp_path)
    assert (cut.encode(text).tolist(), cut.prompt(text)) == (ids, prompt)
    assert [len(one) for one in cut.encode_batch([text.encode(), b"one"])] == [len(ids), len(made.encode("one"))]
    assert cut.encode_pieces([(text, True)])[0].tolist() == ids
    assert cut.identity != before


def test_a_tokenizer_of_its_own_takes_the_place_of_the_weights(tmp_path):
    pytest.importorskip("tokenizers")
    own, out = tmp_path / "own", tmp_path / "out"
    for folder in (own, out):
        train_bpe([b"one two three"] * 3, 300, folder)
    (out / "chat_template.jinja").write_text("the weights'")
    (own / "tokenizer_config.json").write_text(json.dumps({"chat_template": "its own"}))
    (own / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    copy_tokenizer(own, out)
    before, after = open_tokenizer(own), open_tokenizer(out)
    assert (after.chat.render(MESSAGES), after.start, after.stops) == ("its own", before.start, before.stops)
    assert before.start is not None


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """A SentencePiece model of a little prose, with Llama's special tokens and bytes for what it does not know."""
    sentencepiece = pytest.importorskip("sentencepiece")
    path = tmp_path_factory.mktemp("sentences")
    texts = [text.decode() for text in corpus.documents(configs.Pydoc())][:40]
    how = {"vocab_size": 600, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    how |= {
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
        "character_coverage": 0.99,
        "max_sentence_length": 10**5,
    }
    with (path / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=file, **how)
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "added_tokens.json").write_text(json.dumps({"<|assistant|>": 600}))
    return path


def test_a_sentencepiece_model_alone_is_a_tokenizer(sentences):
    made = open_tokenizer(None, sentences)
    for text in TEXTS[:4]:
        ids = made.encode(text)
        assert made.decode(ids) == text
        step = made.stream()
        assert "".join(step(i) for i in ids) == text
    assert (made.start, made.stops, made.vocab_size, made.separator) == (1, (2,), 601, 1)
    assert made.prompt("plain")[0] == 1
    ids = made.encode("<s>one<|assistant|>two</s>").tolist()
    assert [i for i in ids if i in (1, 2, 600)] == [1, 600, 2]
    assert ids[1:-1] == [*made.encode("one"), 600, *made.encode("two")]
    ids, counts = made.encode_pieces([("naïve", False), (" café", True), (" end", False)])
    assert made.decode(ids[counts]).strip() == "café"
    assert "Be brief." in made.chat.render(MESSAGES)


@pytest.fixture
def llamas(tmp_path):
    """A tokenizer as Llama 2's, whose decoder takes the space from the beginning of a text."""
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    decoders = tokenizers.decoders
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    inner.train_from_iterator(["the sky is blue and the grass is green"] * 3, trainer)
    told = json.loads(inner.to_str())
    told["added_tokens"] = told["added_tokens"][:3]  # bytes are no special tokens
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return tmp_path


@pytest.fixture(params=["llamas", "sentences", "folder", "bytes"])
def any_tokenizer(request):
    return Bytes() if request.param == "bytes" else open_tokenizer(request.getfixturevalue(request.param))


LONG = "hello \u65e5\u672c\u8a9e\u65e5\u672c\u8a9e\u65e5\u672c is good"


@pytest.mark.parametrize(
    "text", ["the sky is blue and green", "a\u00e9 \U0001f600\u00e9x  y", " the", LONG, "a\n\u672c\n"]
)
def test_a_text_goes_on_from_another_with_the_space_between(any_tokenizer, text):
    """At every one of its ids: what is before, less half a character there, and what follows, is the whole."""
    ids = [int(i) for i in any_tokenizer.prompt(text)]
    for at in range(len(ids) + 1):
        halves = (any_tokenizer.decode(ids[: at - half]) for half in range(min(4, at + 1)))
        before = next(text for text in halves if not text.endswith("\ufffd"))
        stream = any_tokenizer.stream(ids[:at])
        streamed = "".join(map(stream, ids[at:])) + stream.rest()
        assert before + streamed == any_tokenizer.decode(ids)


def test_what_makes_no_text_is_passed_over(llamas):
    """Special tokens before a text, more than a stream keeps; and half a character before one that has no ids."""
    tokenizer = open_tokenizer(llamas)
    before, after = tokenizer.prompt("the sky"), tokenizer.prompt("the sky is blue")
    stream = tokenizer.stream([*before, *[tokenizer.stops[0]] * 20])
    assert "".join(map(stream, after[len(before) :])) + stream.rest() == " is blue"
    assert tokenizer.stream(tokenizer.prompt("\u672c")[:-1]).rest() == ""


def test_a_stop_string_that_begins_with_the_space_is_found(llamas):
    tokenizer = open_tokenizer(llamas)
    before, after = tokenizer.prompt("the sky"), tokenizer.prompt("the sky is blue and green")
    listener = Listener(tokenizer, before, [" is"], frozenset())
    found = [listener(token) for token in after[len(before) :]]
    assert after[: len(before)] == before and any(found)
    assert "".join(listener.pieces[: found.index(True) + 1]) == ""
    tokenizer.stream([1, -1, 2**70])  # which the engine refuses, before a first id comes


def test_ids_that_make_no_text_make_something_at_random(any_tokenizer):
    """Bytes that are no UTF-8, behind others that were: nothing fails, and what is in order is there."""
    rng, size = np.random.default_rng(0), any_tokenizer.vocab_size
    word = any_tokenizer.encode("green").tolist()
    for _ in range(200):
        ids = rng.integers(0, min(size, 300), 12).tolist()
        stream = any_tokenizer.stream(ids[:4])
        streamed = "".join(map(stream, [*ids[4:], *word, *word]))
        assert "green" in streamed or "gre" in streamed.replace(" ", "")


def test_added_tokens_that_are_text_are_shown(sentences, tmp_path):
    """As transformers shows `<think>`, which a file says is not special."""
    shutil.copytree(sentences, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    told = {"601": {"content": "<think>", "special": False}, "602": {"content": "<end>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "added_tokens_decoder": told}))
    made = open_tokenizer(tmp_path)
    ids = made.encode("one<think>two<end>")
    step = made.stream()
    assert made.decode(ids) == "".join(step(i) for i in ids) == "one<think> two"
    assert (made.spell(601), made.spell(602)) == (("<think>", b"<think>"), ("<end>", None))


def test_a_sentencepiece_model_without_its_package_is_refused(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"the package sentencepiece is missing: pip install -e '.\[hf\]'"):
        open_tokenizer(None, tmp_path)


def test_what_is_no_tokenizer(tmp_path, folder):
    with pytest.raises(DataError, match=r"there is no tokenizer.json and no tokenizer.model"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"cannot read .*tokenizer.json"):
        open_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"vocab_size=257 is too small"):
        train_bpe([b"a"], 257, tmp_path / "small")


def test_a_run_reads_text_through_a_tokenizer(folder, tmp_path):
    words = ["data=pydoc", f"data.tokenizer={folder}", f"data.cache={tmp_path}", "model.vocab_size=600"]
    config, _ = schema.compose(words)
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    sizes = {"steps": 1, "log_every": 1, "batch_size": 2, "seq_len": 16}
    source = batches.open_source(configs.Resolved(**{**fields, **sizes}))
    made = open_tokenizer(folder)
    start = source.train.arrays[0][:200]
    assert start[0] == made.separator
    assert next(corpus.documents(config.data)).decode().startswith(made.decode(start[1:100]))
    assert 1.5 < source.bytes_per_token < 4
    assert not source.batch(0).mask[source.batch(0).targets == made.separator].any()
    small, _ = schema.compose([*words, "model.vocab_size=500"])
    with pytest.raises(DataError, match=r"in the tokenizer in .* is outside the vocabulary"):
        batches.open_source(configs.Resolved(**{**fields, "model": small.model, **sizes}))


def opened(folder, cache, *words):
    """The source of a run that reads through a folder's tokenizer."""
    config, _ = schema.compose([*words, f"data.tokenizer={folder}", f"data.cache={cache}", "model.vocab_size=700"])
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    sizes = {"steps": 1, "log_every": 1, "batch_size": 2, "seq_len": 128}
    return batches.open_source(configs.Resolved(**{**fields, **sizes}))


def test_another_separator_is_no_cache_hit(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    for name in ("<bos>", "a"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": name}))
        source, made = opened(tmp_path, tmp_path / "cache", "data=pydoc"), open_tokenizer(tmp_path)
        assert source.train.boundary == source.train.arrays[0][0] == made.separator == made._id(name)


@pytest.mark.parametrize("data", ["chat", "preference"])
def test_another_start_or_stop_is_no_cache_hit_without_a_template(folder, tmp_path, data):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    words = [f"data={data}", *(["objective=simpo"] if data == "preference" else [])]
    for start, stop in (("<bos>", "<eos>"), ("a", "<eos>"), ("a", "b")):
        settings = {"bos_token": start, "eos_token": stop}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        ids, counted, ends = opened(tmp_path, tmp_path / "cache", *words).train.arrays
        made = open_tokenizer(tmp_path)
        assert ids[0] == made._id(start)
        assert made._id(stop) in ids[: ends[0]][counted[: ends[0]] == 1]


def test_added_tokens_of_a_sentencepiece_model_are_part_of_what_it_is(sentences, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes((sentences / "tokenizer.model").read_bytes())
    found = set()
    for added in ({}, {"<a>": 600}, {"<a>": 601}):
        (tmp_path / "added_tokens.json").write_text(json.dumps(added))
        found.add(open_tokenizer(tmp_path).identity)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"602": {"content": "<b>"}}}))
    assert len({*found, open_tokenizer(tmp_path).identity}) == 4


@pytest.mark.parametrize("kind", ["bytes", "folder", "sentences"])
def test_half_a_character_is_no_text(request, kind):
    made = open_tokenizer(None if kind == "bytes" else request.getfixturevalue(kind))
    said = r"a text holds U\+DCFF, half of a surrogate pair, as its character 3, in 'a \\udcff\\udcfe'"
    calls = [made.prompt, made.encode]
    if kind != "bytes":
        calls.append(lambda text: made.encode_pieces([(text[:1], False), (text[1:], True)]))
    for call in calls:
        with pytest.raises(DataError, match=said):
            call("a \udcff\udcfe")


def test_a_template_that_is_no_text_is_refused(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(DataError, match=r"cannot read .*chat_template.jinja as text: the byte at offset 2 is 0xef"):
        open_tokenizer(tmp_path)


def test_the_command_trains_once(tmp_path, capsys):
    words = ["data=pydoc", "vocab_size=300", f"out={tmp_path / 'made'}"]
    assert command.main(words) == 0
    assert "300 tokens," in capsys.readouterr().out
    assert command.main(words) == 2
    assert "error: there already is a tokenizer at" in capsys.readouterr().err
    assert command.main(["vocab_sise=3"]) == 2
    assert "Did you mean `vocab_size`?" in capsys.readouterr().err
    assert command.main(["--help"]) == 0
    assert "vocab_size" in capsys.readouterr().out


def test_the_command_says_what_it_cannot_read_or_write(tmp_path, capsys):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "some.txt").write_text("some words")
    out = f"out={tmp_path / 'made'}"
    for words, status, message in (
        (["data=synthetic", out], 2, "this needs text: give data=text"),
        (["data=chat", out], 2, "this needs text: give data=text"),
        (["data=text", f"data.path={tmp_path / 'empty.txt'}", out], 2, "every document is empty"),
        (["data=text", f"data.path={tmp_path / 'some.txt'}", f"out={tmp_path / 'some.txt'}"], 1, "File exists"),
    ):
        assert command.main([*words, "vocab_size=300"]) == status
        assert message in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
