"""Conversations and preferences: what counts, what shares a row, what is refused; and batches that slice."""

import json

import numpy as np
import pytest

from experiments import configs
from experiments.commandline import schema
from experiments.data import batches, chat, rows
from experiments.data.tokenizer import Bytes, open_tokenizer, train_bpe

TURN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}"
ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>"
    "{% endgeneration %}{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}" + ASK
)
FORGETS = (
    "{% for m in messages %}{{ m.role }}:{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %};{% endfor %}"
)
MESSAGES = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two é"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


@pytest.fixture
def make(tmp_path):
    """Open the source that overrides describe, with its cache in the test's own folder."""

    def open_source(*overrides, batch_size=4, seq_len=64):
        needed = ["objective=simpo"] if "data=preference" in overrides else []
        config, _ = schema.compose([*overrides, *needed, f"data.cache={tmp_path / 'cache'}"])
        fields = {f: getattr(config, f) for f in config.__dataclass_fields__}
        sizes = {"steps": 1, "log_every": 1, "batch_size": batch_size, "seq_len": seq_len}
        return batches.open_source(configs.Resolved(**{**fields, **sizes}))

    return open_source


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"data.path={path}"


def counted(batch, row):
    """What counts of a row, and all of it, as text with `|` for the id that starts and stops."""
    text = lambda ids: "".join(chr(i) if i < 256 else "|" for i in ids)
    return text(batch.targets[row][batch.mask[row] > 0]), text([batch.tokens[row][0], *batch.targets[row]])


def flat(pairs):
    """The rows of pairs, one after another."""
    return rows.Batch(*(array.reshape(-1, array.shape[-1]) for array in pairs.arrays))


def test_only_what_the_assistant_says_counts_and_it_learns_to_stop(make, tmp_path):
    lines = [{"messages": [{"role": "system", "content": str(i)}, *MESSAGES[2:]]} for i in range(9)]
    source = make("data=chat", "data.packed=false", write(tmp_path / "a.jsonl", *lines))
    said, whole = counted(source.batch(0), 0)
    assert said == "four|"
    assert whole.rstrip("\0")[:9] in {f"|system: {i}"[:9] for i in range(9)}
    assert whole.rstrip("\0").endswith("\nuser: three\nassistant: four|\n")
    assert source.batch(0).segments is None


def test_packed_rows_hold_whole_conversations_apart(make, tmp_path):
    lines = [{"messages": [{"role": "user", "content": "x" * i}, MESSAGES[3]]} for i in range(2, 30)]
    source = make("data=chat", write(tmp_path / "a.jsonl", *lines), batch_size=2, seq_len=100)
    assert len(source.train) < len(lines) * 0.6
    seen = []
    for index in range(len(source.train)):
        batch = source.train.batch(np.array([index]))
        segments = batch.segments[0]
        for number in range(1, segments.max() + 1):
            tokens, mask = batch.tokens[0][segments == number], batch.mask[0][segments == number]
            assert tokens[0] == 256  # each starts anew
            assert mask.sum() == 5  # `four` and the stop, none of which is another's
            seen.append((tokens == ord("x")).sum())
        assert (batch.mask[0][segments == 0] == 0).all()
    assert len(set(seen)) == len(seen) >= 20


THINKING = (  # as of DeepSeek R1: the model's turn begins with a thought, and one that is over is left out
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)


def test_templates_that_begin_a_thought_tell_what_the_assistant_says():
    template = chat.ChatTemplate(THINKING, {}, "there")
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    found = template.pieces(said)
    assert "".join(text for text, _ in found) == "<user>a<end><assistant>b<end>" * 2
    assert [text for text, counts in found if counts] == ["b<end>"] * 2


def test_what_a_template_leaves_out_of_an_answer_is_not_lost_in_silence():
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>x</think>b"}]
    for source in (THINKING, THINKING.replace("<think>{%", "{%")):
        with pytest.raises(chat.DataError, match=r"leaves out a part of message 2 \('<think>x</think>b'"):
            chat.ChatTemplate(source, {}, "there").pieces(said)


def test_templates_tell_what_the_assistant_says_by_marks_and_by_prefix(tmp_path):
    pytest.importorskip("tokenizers")
    train_bpe([b"one two three four <|user|> <|assistant|>"] * 3, 300, tmp_path)
    found = []
    for source in (TURN + ASK, MARKED):
        (tmp_path / chat.FILE).write_text(source)
        tokenizer = open_tokenizer(tmp_path)
        pieces = tokenizer.chat.pieces(MESSAGES)
        assert "".join(text for text, _ in pieces) == tokenizer.chat.render(MESSAGES, answer=False)
        assert [text for text, counts in pieces if counts] == ["two é<eos>", "four<eos>"]
        assert [text for text, counts in tokenizer.chat.pieces(MESSAGES, 2) if counts] == ["four<eos>"]
        ids, counts = tokenizer.encode_pieces(pieces)
        np.testing.assert_array_equal(ids, tokenizer.encode(tokenizer.chat.render(MESSAGES, answer=False)))
        assert tokenizer.decode(ids[counts]) == "two éfour"
        assert (ids[counts] == tokenizer.stops[0]).sum() == 2
        found.append(counts)
    np.testing.assert_array_equal(*found)
    (tmp_path / chat.FILE).write_text(FORGETS)
    with pytest.raises(chat.DataError, match=r"changes the text before message 2.*Mark it by \{% generation %\}"):
        open_tokenizer(tmp_path).chat.pieces(MESSAGES)


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "user: three\nassistant: ", "chosen": "four", "rejected": "five"},
        {"prompt": MESSAGES[2:3], "chosen": MESSAGES[3:], "rejected": [{"role": "assistant", "content": "five"}]},
        {"chosen": MESSAGES[2:], "rejected": [MESSAGES[2], {"role": "assistant", "content": "five"}]},
        {
            "prompt": MESSAGES[2]["content"],
            "chosen": MESSAGES[2:],
            "rejected": [MESSAGES[2], {"role": "assistant", "content": "five"}],
        },
    ],
    ids=["text", "messages", "prompt in both", "prompt in both and beside"],
)
def test_pairs_share_their_prompt_and_only_answers_count(make, tmp_path, line):
    source = make("data=preference", write(tmp_path / "a.jsonl", line, {**line, "more": 1}), batch_size=2)
    pair = source.batch(0)
    assert pair.tokens.shape == (1, 2, 64)
    chosen, rejected = (counted(flat(pair), row) for row in (0, 1))
    assert (chosen[0], rejected[0]) == ("four|", "five|")
    assert chosen[1].rstrip("\0").removesuffix("\n") == "|user: three\nassistant: four|"


def test_a_prompt_that_the_assistant_spoke_in_does_not_count(make, tmp_path):
    line = {"prompt": MESSAGES[:3], "chosen": MESSAGES[3:], "rejected": [{"role": "assistant", "content": "five"}]}
    source = make("data=preference", write(tmp_path / "a.jsonl", line, line | {"prompt": MESSAGES[2:3]}), batch_size=2)
    for part in (source.train, source.held_out):
        assert counted(flat(part.batch(np.array([0]))), 0)[0] == "four|"


def test_what_comes_along_can_be_read(make):
    for name in ("chat", "preference"):
        source = make(f"data={name}", seq_len=128)
        assert len(source.held_out) >= 1
        assert (source.batch(3).mask.sum(-1) > 0).all()


def test_an_answer_of_weight_0_does_not_count(make, tmp_path):
    muted = [MESSAGES[0], MESSAGES[1] | {"weight": 0}, MESSAGES[2] | {"weight": 0}, MESSAGES[3] | {"weight": 1}]
    lines = [{"messages": muted, "id": i, "source": "a book", "weight": 3, "tools": None} for i in range(4)]
    batch = make("data=chat", "data.packed=false", write(tmp_path / "a.jsonl", *lines)).batch(0)
    said, whole = counted(batch, 0)
    assert said == "four|"
    assert "assistant: two " in whole
    pair = {"prompt": MESSAGES[:1], "chosen": muted[1:], "rejected": MESSAGES[1:2]}
    pairs = make("data=preference", write(tmp_path / "b.jsonl", pair, {**pair, "more": 1}), batch_size=2).batch(0)
    assert [counted(flat(pairs), row)[0].count("|") for row in (0, 1)] == [1, 1]


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, "é"]}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLING = [
    MESSAGES[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": None},
    {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"},
    {"role": "assistant", "content": "three"},
]
OF_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}" + ASK
)


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("data", ["chat", "preference"])
def test_a_template_writes_the_tools_and_their_calls(make, tmp_path, marked, data):
    pytest.importorskip("tokenizers")
    tokenizer = train_bpe([b"one two three four <|user|> <|assistant|>"] * 3, 300, tmp_path)
    source = OF_TOOLS if marked else OF_TOOLS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (tmp_path / chat.FILE).write_text(source)
    line = {"tools": TOOLS, "messages": CALLING, "chosen": CALLING, "rejected": MESSAGES[:2]}
    words = [f"data={data}", write(tmp_path / "a.jsonl", line, {**line, "more": 1}), f"data.tokenizer={tmp_path}"]
    ids, learned, ends = make(*words, seq_len=512).train.arrays
    ids, learned = ids[: ends[0]], learned[: ends[0]] == 1
    call = '{"name": "add", "arguments": {"a": [1, "é"]}}'
    assert tokenizer.decode(ids) == f"{json.dumps(TOOLS)}<|user|>one<|assistant|>{call}<|tool|>3<|assistant|>three"
    assert tokenizer.decode(ids[learned]) == f"{call}three"


def test_lines_in_the_shapes_of_the_hub_are_read(make, tmp_path):
    """Parts of a content, tools in text, reasoning by another name, what a template is told; and nulls beside."""
    pytest.importorskip("tokenizers")
    tokenizer = train_bpe([b"one two three four <|user|> <|assistant|>"] * 3, 300, tmp_path)
    source = OF_TOOLS.replace("{{ m.content }}", "{{ m.thinking }}{{ m.content }}") + "{{ level }}"
    (tmp_path / chat.FILE).write_text(source)
    parts = lambda *texts: [{"type": "text", "text": text, "image_url": None} for text in texts]
    turns = [
        {"role": "user", "content": parts("one ", "two")},
        {"role": "assistant", "content": parts("three"), "reasoning": "so "},
    ]
    line = {"messages": turns, "tools": json.dumps(TOOLS), "chat_template_kwargs": {"level": "!", "x": None}}
    path = write(tmp_path / "a.jsonl", line, {**line, "more": 1})
    ids, learned, ends = make("data=chat", path, f"data.tokenizer={tmp_path}", seq_len=512).train.arrays
    ids, learned = ids[: ends[0]], learned[: ends[0]] == 1
    assert tokenizer.decode(ids) == f"{json.dumps(TOOLS)}<|user|>one two<|assistant|>so three!"
    assert tokenizer.decode(ids[learned]) == "so three"


def test_lines_with_tools_have_the_folders_template_for_these(make, tmp_path):
    pytest.importorskip("tokenizers")
    tokenizer = train_bpe([b"one two three four <|user|> <|assistant|>"] * 3, 300, tmp_path)
    templates = [{"name": "default", "template": TURN}, {"name": "tool_use", "template": OF_TOOLS}]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    lines = [{"tools": TOOLS, "messages": CALLING, "id": i} for i in range(2)]
    words = ["data=chat", write(tmp_path / "a.jsonl", *lines), f"data.tokenizer={tmp_path}"]
    ids, _, ends = make(*words, seq_len=512).train.arrays
    assert tokenizer.decode(ids[: ends[0]]).startswith(f"{json.dumps(TOOLS)}<|user|>one")


def test_a_template_that_takes_no_tools_is_named(make, tmp_path):
    pytest.importorskip("tokenizers")
    train_bpe([b"one two three four"] * 3, 300, tmp_path)
    (tmp_path / chat.FILE).write_text(TURN + ASK)
    for more, message in (
        (
            {"tools": TOOLS},
            r"a.jsonl:1: `tools` is told, and the chat template in .*jinja does not read it: use one that",
        ),
        (
            {"messages": CALLING},
            r"message 2 in 'messages' has `tool_calls`, which the chat template in .* does not write",
        ),
    ):
        lines = [{"messages": MESSAGES, **more, "id": i} for i in range(2)]
        with pytest.raises(batches.DataError, match=message):
            make("data=chat", write(tmp_path / "a.jsonl", *lines), f"data.tokenizer={tmp_path}")


@pytest.mark.parametrize("name", ["stdlib", "chat", "preference", "synthetic"])
def test_a_batch_can_be_read_in_slices(make, name):
    source = make(f"data={name}", batch_size=8)
    for step in (0, 30):
        whole = source.batch(step)
        count = len(whole.tokens)
        parts = [source.batch(step, slice(start, start + count // 4)) for start in range(0, count, count // 4)]
        for a, b in zip(whole.arrays, rows.Batch.concatenate(parts).arrays, strict=True):
            np.testing.assert_array_equal(a, b)


def test_packed_windows_tell_documents_apart(make):
    source = make("data=pydoc", "data.packed=true", seq_len=2048, batch_size=16)
    batch = source.batch(0)
    begins = batch.tokens == Bytes.separator
    assert begins[:, 1:].any()
    np.testing.assert_array_equal(np.diff(batch.segments, axis=1) == 1, begins[:, 1:])
    assert (batch.mask[batch.targets == Bytes.separator] == 0).all()


def test_tokens_made_elsewhere_are_packed_by_their_separator(make, tmp_path):
    (np.arange(4000) % 50).astype(np.uint16).tofile(tmp_path / "a.bin")
    words = ["data=tokens", f"data.path={tmp_path}", "data.packed=true"]
    batch = make(*words, "data.separator=7").batch(0)
    assert batch.segments.max() >= 1 and (batch.mask == 0).sum() == (batch.targets == 7).sum() > 0
    with pytest.raises(schema.ConfigError, match=r"data.packed=true: data=tokens needs data.separator=ID"):
        make(*words)


def test_best_fit_wastes_little_and_never_overfills():
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    bins = rows.best_fit(lengths, 128)
    assert sorted(item for one in bins for item in one) == list(range(500))
    totals = [lengths[one].sum() for one in bins]
    assert max(totals) <= 128
    assert len(bins) <= 1.02 * np.ceil(lengths.sum() / 128)


def test_long_answers_lose_their_end_and_those_that_begin_too_late_are_left_out(make, tmp_path):
    long = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "y" * 500}]} for i in (1, 2)
    ]
    late = {"messages": [{"role": "user", "content": "z" * 500}, MESSAGES[3]]}
    source = make("data=chat", "data.packed=false", "data.val_fraction=0.01", write(tmp_path / "a.jsonl", *long, late))
    left_out = "; left out: 1 of 3 conversations, whose answers begin beyond seq_len=64"
    assert source.text.endswith(f"{left_out}; cut at seq_len=64: the answers of 2 of 3 conversations")
    both = [part.batch(np.arange(len(part))) for part in (source.train, source.held_out) if len(part)]
    assert sum(len(batch.tokens) for batch in both) == 2
    assert all((batch.targets[:, -1] == ord("y")).all() for batch in both)


def said(**beside):
    """A line whose assistant's message has something beside its content."""
    return json.dumps({"messages": [MESSAGES[0], {**MESSAGES[1], **beside}]})


def test_pairs_beyond_a_row_are_counted(make, tmp_path):
    pair = lambda prompt, chosen, rejected: {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    lines = [pair("z" * 500, "b", "c"), pair("a", "b", "c" * 500), *(pair(f"{i}", "b", "c") for i in range(9))]
    text = make("data=preference", write(tmp_path / "a.jsonl", *lines)).text
    assert "; left out: 1 of 11 pairs, whose" in text and text.endswith("the answers of 1 of 11 pairs")
    assert "pairs" not in make("data=preference", seq_len=512).text


BAD = {
    "half a character": (
        "chat",
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b \\ud800"}]}',
        r"cannot read data.path=.*a.jsonl:2: a text holds U\+D800, half of a surrogate pair",
    ),
    "no JSON": ("chat", "{", r"cannot read .*a.jsonl:2: the line is not valid JSON: "),
    "too deep": ("chat", "[" * 100_000, r"cannot read .*a.jsonl:2: the line is not valid JSON: "),
    "no object": ("chat", "[1]", r"a.jsonl:2: the line is no JSON object"),
    "no messages": ("chat", '{"text": "a"}', r"a.jsonl:2: no list of messages in 'messages'. It has: text. data.field"),
    "misspelt": ("chat", '{"mesages": []}', r"a.jsonl:2: no list of messages in 'messages'. Did you mean `mesages`\?"),
    "empty": ("chat", '{"messages": []}', r"a.jsonl:2: no list of messages in 'messages'"),
    "no role": ("chat", '{"messages": [{"content": "a"}]}', r"a.jsonl:2: message 1 in 'messages' has no `role`"),
    "silent": ("chat", '{"messages": [{"role": "user", "content": "a"}]}', r"a.jsonl:2: the assistant says nothing"),
    "no answer": (
        "preference",
        '{"prompt": "a", "chosen": "b"}',
        r"a.jsonl:2: there is no 'rejected'. It has: prompt, ",
    ),
    "reject": (
        "preference",
        '{"prompt": "a", "chosen": "b", "reject": "c"}',
        r"a.jsonl:2: there is no 'rejected'. Did you mean `reject`\?",
    ),
    "promt": (
        "preference",
        json.dumps({"promt": MESSAGES[2:3], "chosen": MESSAGES[3:], "rejected": MESSAGES[1:2]}),
        r"a.jsonl:2: there is no 'prompt'. Did you mean `promt`\?",
    ),
    "no prompt": (
        "preference",
        '{"prompt": null, "chosen": "b", "rejected": "c"}',
        r"a.jsonl:2: there is no 'prompt', and its answers are text",
    ),
    "kinds": (
        "preference",
        json.dumps({"prompt": "a", "chosen": MESSAGES[3:], "rejected": 5}),
        r"a.jsonl:2: 'prompt' is text, 'chosen' is a list, 'rejected' is 5: give text in all of them, or lists",
    ),
    "tools": ("chat", json.dumps({"messages": MESSAGES, "tools": [{}, {}]}), r"`tools` is told, and the format of"),
    "no tools": ("chat", json.dumps({"messages": MESSAGES, "tools": 5}), r"`tools` is 5, and no list of functions"),
    "tools of no JSON": ("chat", json.dumps({"messages": MESSAGES, "tools": "f"}), r"`tools` is no JSON: Expecting"),
    "unread": ("chat", json.dumps({"messages": MESSAGES, "chat_template_kwargs": {"x": 1}}), r"`x` is told, and the f"),
    "no object to tell": ("chat", json.dumps({"messages": MESSAGES, "chat_template_kwargs": [1]}), r"is \[1\], and no"),
    "picture": ("chat", said(content=[{"type": "image"}]), r"message 2 .*: `content\[0\]` must be of type text"),
    "tools of text": (
        "preference",
        '{"prompt": "a", "chosen": "b", "rejected": "c", "tools": [{}]}',
        r"`tools` are for messages, and its answers are text",
    ),
    "functions": (
        "chat",
        json.dumps({"messages": MESSAGES, "functions": [{}]}),
        r"`functions` would not be read: give",
    ),
    "calls": (
        "chat",
        said(tool_calls=[CALL]),
        r"message 2 in 'messages' has `tool_calls`, which the format of tokeniz",
    ),
    "no calls": (
        "chat",
        said(tool_calls=[{"function": {"arguments": "{"}}]),
        r"message 2 .*: `tool_calls\[0\]` must be of",
    ),
    "calls of no JSON": (
        "chat",
        said(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
        r"message 2 .*: `tool_calls\[0\].function.arguments` is no JSON",
    ),
    "reasoning": ("chat", said(reasoning_content="so"), r"message 2 .* has `reasoning_content`, which the format of"),
    "weight": ("chat", said(weight=0.5), r"message 2 in 'messages' is of role 'assistant' and has `weight` 0.5: it mu"),
    "weight of no number": ("chat", said(weight="1"), r"message 2 .* `weight` '1': it must be 0 or 1"),
    "weight of a question": (
        "chat",
        json.dumps({"messages": [MESSAGES[0] | {"weight": 1}, MESSAGES[1]]}),
        r"message 1 .* of role 'user' and has `weight` 1: .* 1 is for what the assistant says",
    ),
    "weight of all": ("chat", said(weight=0), r"a.jsonl:2: all that the assistant says in it has `weight` 0"),
    "same": ("preference", json.dumps({"chosen": MESSAGES, "rejected": MESSAGES}), r"nothing in 'chosen' after"),
}


@pytest.mark.parametrize(("kind", "line", "message"), BAD.values(), ids=BAD)
def test_bad_lines_are_named(make, tmp_path, kind, line, message):
    good = {"messages": MESSAGES, "prompt": "a", "chosen": "b", "rejected": "c"}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(good)}\n{line}\n{json.dumps(good | {'more': 1})}\n")
    with pytest.raises(batches.DataError, match=message):
        make(f"data={kind}", f"data.path={tmp_path / 'a.jsonl'}")


@pytest.mark.parametrize("kind", ["chat", "preference"])
def test_a_line_counts_as_often_as_it_is_there(make, tmp_path, kind):
    """And its copies are all learned from, or all held out."""
    lines = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "a"}]} for i in range(9)
    ]
    if kind == "preference":
        lines = [{"prompt": f"{i}", "chosen": "a", "rejected": "b"} for i in range(9)]
    apart = ["data.packed=false"] * (kind == "chat")
    source = make(f"data={kind}", write(tmp_path / "lines.jsonl", *lines, *[lines[0]] * 20), *apart)
    sizes = sorted((len(source.train), len(source.held_out)))
    assert sum(sizes) == 29 and (sizes[0] < 9)


def test_one_conversation_is_too_few(make, tmp_path):
    with pytest.raises(batches.DataError, match="too few conversations"):
        make("data=chat", write(tmp_path / "a.jsonl", {"messages": MESSAGES}))
    with pytest.raises(batches.DataError, match=r"too few pairs at data.path=.*: 1, and it takes at least two"):
        make("data=preference", write(tmp_path / "a.jsonl", {"prompt": "a"}))
    too_short = r"too short a seq_len=8: no answer of the training part begins within it"
    with pytest.raises(batches.DataError, match=too_short):
        make("data=chat", seq_len=8)


def test_a_second_opening_reads_the_cache(make, tmp_path, monkeypatch):
    first = make("data=chat").batch(1)
    monkeypatch.setattr("experiments.data.conversations._encode", lambda *_: pytest.fail("encoded again"))
    np.testing.assert_array_equal(make("data=chat").batch(1).tokens, first.tokens)
