"""What a chat's answer is taken apart into: thoughts, text and calls, in the ways in which models write them."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

import zoo
from experiments.data.chat import ChatTemplate, Plain
from experiments.data.tokenizer import Bytes, open_tokenizer
from experiments.serving import protocol, reasoning
from experiments.serving.reasoning import Between, Channels, of_template
from experiments.serving.tool_calls import DIALECTS, calls

THINK = ("<think>", "</think>")
SCHEMA = {"city": {"type": "string"}, "days": {"type": "array"}, "now": {"type": "boolean"}, "any": {"enum": [1, "x"]}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": SCHEMA}}},
    {"type": "function", "function": {"name": "now"}},
]
CHANNELS = (
    "<|channel|>analysis<|message|>Look < up.<|end|><|start|>assistant<|channel|>commentary<|message|>A moment."
    "<|end|><|start|>assistant<|channel|>final<|message|>It is 5 < 6."
)
CALLED = (
    "<|channel|>analysis<|message|>Hm<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}'
)


def seek(text):
    return text.replace("|", "\uff5c").replace("_", "\u2581")


@pytest.mark.parametrize(
    ("make", "text", "thought", "said"),
    {
        "whole": (lambda: Between(THINK, thinking=False), "<think>\nab <\n c\n</think>\n\n x\ny", "ab <\n c", "x\ny"),
        "begun by the prompt": (lambda: Between(THINK, thinking=True), "\nab\n</think>\n\nx", "ab", "x"),
        "empty": (lambda: Between(THINK, thinking=False), "<think>\n\n</think>\n\nx", "", "x"),
        "none": (lambda: Between(THINK, thinking=False), "\n<thin air>", "", "\n<thin air>"),
        "later": (lambda: Between(THINK, thinking=False), "say <think> a </think>", "", "say <think> a </think>"),
        "twice": (lambda: Between(THINK, thinking=False), "<think>a</think>b</think>", "a", "b</think>"),
        "cut": (lambda: Between(THINK, thinking=True), "ab </thi", "ab </thi", ""),
        "cut early": (lambda: Between(THINK, thinking=False), "<thi", "", "<thi"),
        "blanks": (lambda: Between(THINK, thinking=False), " \n", "", " \n"),
        "Gemma": (lambda: Between(reasoning.PAIRS[4], thinking=False), "<|channel>thought\na\n<channel|>x", "a", "x"),
        "channels": (Channels, CHANNELS, "Look < up.", "A moment.It is 5 < 6."),
        "channels cut": (Channels, CHANNELS[:35], "Look ", ""),
        "no channels": (Channels, "plain <|", "", "plain <|"),
        "a call": (
            Channels, CALLED, "Hm",
            '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>',
        ),
        "no thoughts": (reasoning.Unmarked, "<think>a</think>", "", "<think>a</think>"),
    }.values(),
)  # fmt: skip
def test_thoughts_are_told_apart_wherever_pieces_end(make, text, thought, said):
    for size in (1, 2, 3, 5, len(text)):
        parser, pieces = make(), [text[i : i + size] for i in range(0, len(text), size)]
        told = [parser.feed(piece) for piece in pieces[:-1]] + [parser.feed(pieces[-1], last=True)]
        assert tuple(map("".join, zip(*told, strict=True))) == (thought, said), size
        parser = make()
        told = [parser.feed(piece) for piece in pieces] + [parser.feed("", last=True)]
        assert tuple(map("".join, zip(*told, strict=True))) == (thought, said), size


def test_thoughts_and_answers_come_as_they_are_made():
    parser = Between(THINK, thinking=True)
    assert [parser.feed(piece) for piece in ("a b", " \n", "c</th", "ink>", "\n", "d ", "e")] == [
        ("a b", ""), ("", ""), (" \nc", ""), ("", ""), ("", ""), ("", "d "), ("", "e")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "prompt", "text", "thought"),
    [
        ("{{ m.split('</think>')[-1] }}<think>\\n", "<|assistant|><think>\n", "a</think>b", "a"),
        ("{{ m.split('</think>')[-1] }}", "<|assistant|>", "<think>a</think>b", "a"),
        ("<think>\\n\\n</think>", "<think>\n\n</think>\n\n", "b", ""),
        ("[THINK]a[/THINK]", "[/INST]", "[THINK]a[/THINK]b", "a"),
        (
            "<|channel|>final<|message|>",
            "<|start|>assistant",
            CHANNELS[:47] + "<|channel|>final<|message|>b",
            "Look < up.",
        ),
    ],
)
def test_a_template_tells_how_its_model_thinks(source, prompt, text, thought):
    found = of_template(ChatTemplate("{# " + source + " #}", {}, "a test"))
    assert found.parser(prompt).feed(text, last=True) == (thought, "b")


@pytest.mark.parametrize("chat", [None, Plain(), ChatTemplate("{{ messages }}", {}, "a test")])
def test_other_templates_tell_of_no_thoughts(chat):
    assert of_template(chat) is None


BONN, NOW = ("weather", '{"city": "Bonn"}'), ("now", "{}")
WRITTEN = {
    "Llama 3": ('{"name": "weather", "parameters": {"city": "Bonn"}}', [BONN]),
    "a list": ('[{"name": "weather", "arguments": {"city": "Bonn"}}, {"name": "now", "parameters": {}}]', [BONN, NOW]),
    "Hermes, Qwen 2.5 and 3": (
        'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [BONN, NOW],
    ),
    "Qwen3-Coder, Qwen 3.5": (
        "Well.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n[1, 2]\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [("weather", '{"city": "Bonn", "days": [1, 2]}'), NOW],
    ),
    "values without quotes": (
        "<tool_call><function=weather><parameter=city>\n12\n</parameter><parameter=now>True</parameter><parameter=any>x"
        "</parameter><parameter=days>x</parameter><parameter=other>3</parameter></function></tool_call>",
        [("weather", '{"city": "12", "now": true, "any": "x", "days": "x", "other": "3"}')],
    ),
    "GLM 4.5": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>[2]</arg_value>\n</tool_call><tool_call>now</tool_call>",
        [("weather", '{"city": "Bonn", "days": [2]}'), NOW],
    ),
    "Mistral": ('[TOOL_CALLS]weather[ARGS]{"city": "Bonn"}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}', [BONN, NOW]),
    "Mistral's older models": ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bonn"}, "id": "a"}]', [BONN]),
    "DeepSeek V3": (
        seek('<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>weather\n```json\n{"city": "Bonn"}\n```')
        + seek("<|tool_call_end|>\n<|tool_call_begin|>now<|tool_sep|>{}<|tool_call_end|><|tool_calls_end|>"),
        [BONN, NOW],
    ),
    "Gemma 4": (
        '<|tool_call>call:weather{city:<|"|>Bonn, "the" city: {1}<|"|>,days:[1,2],deep:{a:true}}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        [("weather", r'{"city": "Bonn, \"the\" city: {1}", "days": [1, 2], "deep": {"a": true}}'), NOW],
    ),
    "another tool": ('{"name": "other", "arguments": {}}', []),
    "one of them another": ('<tool_call>{"name": "now", "arguments": {}}</tool_call><tool_call>x</tool_call>', []),
    "no object": ('<tool_call>{"name": "now", "arguments": [1]}</tool_call>', []),
    "cut": ('[TOOL_CALLS]weather[ARGS]{"city": "Bo', []),
    "words": ("it is sunny", []),
    "numbers": ("[1]", []),
    "deep": ("[" * 9000, []),
}


@pytest.mark.parametrize("how", WRITTEN)
def test_calls_are_found_in_what_models_write(how):
    text, expected = WRITTEN[how]
    beside, found = calls(text, TOOLS)
    assert found == expected
    assert beside == ("Well." if text.startswith("Well.") else "") if expected else text


def test_every_dialect_is_tried():
    assert {*DIALECTS} <= {*WRITTEN}


def test_arguments_can_be_sent_whatever_is_in_them():
    text = r'{"name": "now", "arguments": {"a": "%s"}}'
    for said, sent in ((r"é", r'{"a": "é"}'), (r"\ud800", r'{"a": "\ud800"}')):
        _, [(_, arguments)] = calls(text % said, TOOLS)
        assert (arguments, arguments.encode()) == (sent, sent.encode())


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_thoughts_text_and_calls(stream):
    text = '<think>hm</think>Well. <tool_call>{"name": "now", "arguments": {}}</tool_call>'
    asked = protocol.chat({"messages": [{"role": "user", "content": "x"}], "tools": TOOLS})
    reply = protocol.Reply(asked, "tiny", Bytes(), lambda: Between(THINK, thinking=False))
    if stream:
        pieces = [reply.piece(0, letter, [], None, first=i == 0) for i, letter in enumerate(text)]
        pieces.append(reply.piece(0, "", [], "stop", first=False))
        choices = [piece["choices"][0] for piece in pieces]
        deltas = [choice["delta"] for choice in choices]
        whole = lambda name: "".join(delta.get(name) or "" for delta in deltas)
        message = {**deltas[-1], "content": whole("content"), "reasoning_content": whole("reasoning_content")}
        end = choices[-1]["finish_reason"]
    else:
        [choice] = reply.whole([text], [[]], ["stop"], 1)["choices"]
        message, end = choice["message"], choice["finish_reason"]
    [call] = message["tool_calls"]
    assert (message["reasoning_content"], message["content"], end) == ("hm", "Well.", "tool_calls")
    assert call["function"] == {"name": "now", "arguments": "{}"}
    assert call.get("index") == (0 if stream else None)


@pytest.mark.parametrize("how", WRITTEN)
def test_a_stream_has_the_text_and_the_calls_of_a_whole_answer(how):
    """Wherever its pieces end, and whatever is said around a call; only what may be one is held back."""
    asked = protocol.chat({"messages": [{"role": "user", "content": "x"}], "tools": TOOLS})
    for before in ("", "A < b.\n ", "[1] {"):
        for after in ("", "\n", " B."):
            text = before + WRITTEN[how][0] + after
            [choice] = protocol.Reply(asked, "tiny", Bytes()).whole([text], [[]], ["stop"], 1)["choices"]
            reply, size = protocol.Reply(asked, "tiny", Bytes()), 1 if len(text) < 999 else 500
            pieces = [reply.piece(0, text[i : i + size], [], None, first=i == 0) for i in range(0, len(text), size)]
            pieces.append(reply.piece(0, "", [], "stop", first=False))
            deltas = [piece["choices"][0]["delta"] for piece in pieces]
            assert "".join(delta["content"] or "" for delta in deltas) == (choice["message"]["content"] or "")
            told = [[call["function"] for call in one.get("tool_calls", [])] for one in (deltas[-1], choice["message"])]
            assert told[0] == told[1]


def test_a_stream_holds_back_what_may_be_a_call_alone():
    asked = protocol.chat({"messages": [{"role": "user", "content": "x"}], "tools": TOOLS})
    reply = protocol.Reply(asked, "tiny", Bytes())
    said = [
        reply.piece(0, piece, [], None, first=False)["choices"][0]["delta"]["content"]
        for piece in ("A", " <", "b <tool")
    ]
    assert said == ["A", "", " <b"]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gemma4"])
@pytest.mark.parametrize("called", [True, False])
def test_answers_are_read_as_transformers_server_reads_them(name, called):
    serving = pytest.importorskip("transformers.cli.serving.utils")
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    template = next(one for types, one in serving._RESPONSE_TEMPLATE_FALLBACKS.items() if name in types)
    pair = reasoning.PAIRS[4 if name == "gemma4" else 0]
    dialect = {"qwen3": "Hermes, Qwen 2.5 and 3", "qwen3_5": "Qwen3-Coder, Qwen 3.5", "gemma4": "Gemma 4"}[name]
    said = WRITTEN[dialect][0].removeprefix("Well.").strip() if called else "It rains."
    text = f"{pair[0].rstrip()}\nLet me see.\n{pair[1]}{said}"
    expected = chat_parsing.parse_response(text, template, prefix="", tools=TOOLS)
    thought, answer = Between(pair, thinking=False).feed(text, last=True)
    beside, found = calls(answer, TOOLS)
    assert (thought, beside) == (expected["reasoning_content"].strip(), expected.get("content", "").strip())
    told = [
        (one["function"]["name"], json.dumps(one["function"]["arguments"])) for one in expected.get("tool_calls", [])
    ]
    assert found == told


class Forced:
    """A guide through given ids alone."""

    def __init__(self, ids):
        self._ids = [*ids]

    def allowed(self):
        words = np.zeros(self._ids[0] // 32 + 1, np.uint32)
        words[-1] = np.uint32(1) << np.uint32(self._ids[0] % 32)
        return words

    def take(self, token):
        assert token == self._ids.pop(0)
        return not self._ids


@pytest.fixture(scope="module")
def harmony(tmp_path_factory):
    """A server whose tokenizer has gpt-oss's special tokens, and a template that has its marks."""
    pytest.importorskip("uvicorn")
    tokenizers = pytest.importorskip("tokenizers")
    from tests.experiments.test_serve import serving

    path = tmp_path_factory.mktemp("harmony")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([*reasoning.HARMONY, "<|constrain|>", "<|return|>", "<|call|>"])
    inner.save(str(path / "tokenizer.json"))
    ends = [inner.token_to_id(end) for end in ("<|return|>", "<|call|>")]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    sizes = dict(embed_dim=32, mlp_dim=48, num_heads=2, num_kv_heads=1, head_dim=16)
    config = zoo.LlamaConfig(vocab_size=inner.get_vocab_size(), num_layers=1, **sizes)
    model = zoo.Llama.init(config, key=jax.random.key(0))
    with serving(model, {"length": 512, "tokens": 1024}, tokenizer=open_tokenizer(path)) as found:
        yield found


def plain(text):
    """Without a parser, special tokens are left out, and all else is the answer."""
    return re.sub(r"<\|\w+\|>", "", text)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("text", [CHANNELS.replace("6", "€") + "<|return|>", CALLED + "<|call|>"])
def test_a_server_sees_special_tokens_that_are_marks(harmony, monkeypatch, text, stream, apart):
    server, client = harmony
    ids = server.told.tokenizer.encode(text).tolist()

    async def guides(*_):
        return [Forced(ids)]

    monkeypatch.setattr(server, "_guides", guides)
    monkeypatch.setattr(server, "told", dataclasses.replace(server.told, reasoning=apart))
    earlier = {"role": "assistant", "content": "y", "reasoning_content": "so"}  # which the template does not write
    body = {"messages": [{"role": "user", "content": "x"}, *[earlier] * apart], "stream": stream, "tools": TOOLS}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    if stream:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line and "[DONE]" not in line]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        whole = lambda name: "".join(delta.get(name) or "" for delta in deltas)
        message = {**deltas[-1], "content": whole("content"), "reasoning_content": whole("reasoning_content")}
    else:
        message = response.json()["choices"][0]["message"]
    called = apart and "to=" in text
    told = ("Hm", "") if called else ("Look < up.", "A moment.It is 5 < €.") if apart else (None, plain(text))
    assert (message.get("reasoning_content") or None, message["content"] or "") == told
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert found == ([BONN] if called else [])
