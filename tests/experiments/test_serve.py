"""The server, over real sockets: what it says, to whom it says no, and that nothing leaks."""

# ruff: noqa: E402 (the extra may be missing)
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from experiments import serve
from experiments.runtime import hardware
from tests.quick import QUICK

for package in ("starlette", "uvicorn", "httpx"):
    pytest.importorskip(package)

import httpx
import uvicorn

from experiments.commandline import schema
from experiments.commandline.console import CommandError
from experiments.data.chat import ChatTemplate
from experiments.data.tokenizer import Bytes
from experiments.serving import address, app, connection, protocol
from experiments.serving.app import Server, Serving
from experiments.serving.connection import Connection
from experiments.serving.worker import Worker
from zoo.engine.engine import Engine, Settings, Token
from zoo.inference.generate import generate

ROOT = Path(__file__).resolve().parents[2]
KEY, LETTERS = "correct horse", "schlüssel"
protocol_completion = protocol.completion


@pytest.fixture(scope="module")
def model():
    config = zoo.LlamaConfig(
        vocab_size=257, num_layers=2, embed_dim=32, mlp_dim=48, num_heads=2, num_kv_heads=1, head_dim=16
    )
    return jax.tree.map(lambda leaf: 6 * leaf, zoo.Llama.init(config, key=jax.random.key(0)))


@contextlib.contextmanager
def serving(model, sizes=None, **told):
    """Serve at a free port; yield the server and a client. Afterwards every page is free."""
    settings = {"length": 96, "rows": 4, "page": 8, "tokens": 256, **(sizes or {})}
    engine = Engine(model, Settings(**settings), **QUICK)
    server = Server(Worker(engine), Serving(**{"name": "tiny", "tokenizer": Bytes(), **told}))
    listening = uvicorn.Server(uvicorn.Config(server.app(), port=0, log_level="error", lifespan="on", http=Connection))
    thread = threading.Thread(target=listening.run, daemon=True)
    thread.start()
    while not listening.started:
        time.sleep(0.01)
    port = listening.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        client.get("/health")
        try:
            yield server, client
        finally:
            listening.should_exit = True
            thread.join()
    for kind, pool in enumerate(engine.scheduler.pools):
        while engine.scheduler.prefixes.evict(kind):
            pass
        assert len(pool.free) == len(pool.holders)


@pytest.fixture(scope="module")
def served(model):
    with serving(model, most_bytes=10_000) as found:
        yield found


@pytest.fixture
def client(served):
    return served[1]


def text_of(model, prompt, new):
    return Bytes().decode(generate(model, [Bytes().prompt(prompt)], new, **QUICK)[0])


def complete(client, **body):
    response = client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 8, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(response):
    lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_greedy_text_is_that_of_generate_in_any_company(client, model):
    prompts = ["hello", "hello", "hello there, you", "x", "hello there, me", "y" * 30]
    expected = [text_of(model, prompt, 8) for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: complete(client, prompt=prompt), prompts))
    assert [one["choices"][0]["text"] for one in found] == expected
    assert found[0]["usage"] == {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}
    together = complete(client, prompt=prompts)
    assert [one["text"] for one in together["choices"]] == expected


def test_a_stream_says_the_same_in_pieces(client):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "n": 2, "seed": 5, "logprobs": True}
    whole = client.post("/v1/chat/completions", json=body).json()
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response)
    for index, choice in enumerate(whole["choices"]):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(one["delta"]["content"] for one in mine) == choice["message"]["content"]
        told = [token["logprob"] for one in mine for token in one["logprobs"]["content"]]
        assert told == [token["logprob"] for token in choice["logprobs"]["content"]]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert whole["choices"][0]["message"] != whole["choices"][1]["message"]


def test_stop_strings_end_an_answer_wherever_tokens_end(client, model):
    text = text_of(model, "hello", 20)
    stop = text[5:8]
    found = complete(client, max_tokens=20, stop=[stop])["choices"][0]
    assert found == {**found, "text": text[: text.index(stop)], "finish_reason": "stop"}


def test_a_drafted_answer_ends_where_an_undrafted_one_does(client, model):
    """A stop string may end among ids that were all guessed right; what was guessed behind it is forgotten."""
    text = text_of(model, "hello", 60)
    stops = [text[i : i + 3] for i in (20, 33, 46)]
    with serving(model, {"rows": 8}, drafts=5) as (server, drafted):
        for stop in stops:
            plain, found = (complete(one, max_tokens=60, stop=[stop], logprobs=0) for one in (client, drafted))
            assert (found["choices"], found["usage"]) == (plain["choices"], plain["usage"])
        assert server.worker.engine.steps < server.worker.picked


def test_scores_are_the_models_own(client, model):
    found = client.post("/score", json={"text": ["abc", "de"], "prompt": "say ", "top_logprobs": 2}).json()["data"]
    for one, text in zip(found, ("abc", "de"), strict=True):
        ids = jnp.array([*Bytes().prompt("say "), *Bytes().encode(text)])
        logs = np.asarray(jax.nn.log_softmax(model(ids[None])[0]))
        expected = logs[np.arange(4, len(ids) - 1), ids[5:]]
        np.testing.assert_allclose(one["logprobs"], expected, atol=2e-5)
        assert one["logprob"] == pytest.approx(sum(one["logprobs"]))
        ranks = [int((logs[4 + i] > logs[4 + i, token]).sum()) for i, token in enumerate(ids[5:])]
        assert (one["tokens"], one["rank"]) == (ids[5:].tolist(), ranks)
        assert [next(iter(top)) for top in one["top_logprobs"]] == [
            str(logs[4 + i].argmax()) for i in range(len(ranks))
        ]


def test_an_echo_is_the_prompt_with_its_scores_as_evaluations_read_them(client, model):
    """lm-eval's loglikelihood is a completion of one token, whose log-probabilities begin with the prompt's."""
    prompts = [[*Bytes().prompt("hello")], [7], Bytes().encode("abc").tolist()]
    body = {"prompt": prompts, "max_tokens": 3, "n": 2, "temperature": 0, "logprobs": 2}
    plain, echoed = complete(client, **body), complete(client, **body, echo=True)
    assert echoed["usage"] == plain["usage"]
    for i, (one, other) in enumerate(zip(echoed["choices"], plain["choices"], strict=True)):
        ids, told, after = prompts[i // 2], one["logprobs"], other["logprobs"]
        assert (one["index"], one["text"]) == (i, Bytes().decode(ids) + other["text"])
        logs = np.asarray(jax.nn.log_softmax(model(jnp.array([ids]))[0]))
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        expected = logs[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(told["token_logprobs"][1 : len(ids)], expected, atol=2e-5)
        for position, top in enumerate(told["top_logprobs"][1 : len(ids)]):
            assert next(iter(top)) == Bytes().spell(int(logs[position].argmax()))[0] and len(top) == 2
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            assert told[name][len(ids) :] == after[name] and len(told[name]) == len(ids) + 3
        assert told["text_offset"][len(ids) :] == [len(Bytes().decode(ids)) + at for at in after["text_offset"]]


def test_an_echo_may_have_no_answer_and_no_scores(client):
    body = {"prompt": "hello", "echo": True, "max_tokens": 0}
    told = complete(client, **body, logprobs=0)
    assert (told["choices"][0]["text"], told["choices"][0]["finish_reason"]) == ("hello", "length")
    assert told["usage"] == {"prompt_tokens": 6, "completion_tokens": 0, "total_tokens": 6}
    assert len(told["choices"][0]["logprobs"]["tokens"]) == 6
    assert complete(client, **body)["choices"][0]["logprobs"] is None
    assert complete(client, **{**body, "max_tokens": 2})["choices"][0]["text"].startswith("hello")


def test_ids_end_an_answer_and_are_not_shown(client, model):
    ids = generate(model, [Bytes().prompt("hello")], 20, **QUICK)[0]
    end = next(i for i in range(3, 20) if ids[i] not in ids[:i])
    found = complete(client, max_tokens=20, stop_token_ids=[ids[end]])
    assert found["usage"]["completion_tokens"] == end + 1
    assert found["choices"][0] == {
        **found["choices"][0], "text": Bytes().decode(ids[:end]), "finish_reason": "stop",
    }  # fmt: skip


def test_the_models_own_end_can_be_ignored(model):
    """As measurements of speed ask for: an answer is then as long as it may be."""
    [text] = generate(model, [Bytes().prompt("hello")], 20, **QUICK)
    end = next(i for i in range(3, 20) if text[i] not in text[:i])

    class Ends(Bytes):
        stops = (int(text[end]),)

    with serving(model, tokenizer=Ends()) as (_, client):
        ended, ignored = (complete(client, max_tokens=20, ignore_eos=ignore) for ignore in (False, True))
        assert (ended["usage"]["completion_tokens"], ended["choices"][0]["finish_reason"]) == (end + 1, "stop")
        assert (ignored["usage"]["completion_tokens"], ignored["choices"][0]["finish_reason"]) == (20, "length")
        assert ignored["choices"][0]["text"] == Bytes().decode([one for one in text if one != text[end]])
        asked = complete(client, max_tokens=20, ignore_eos=True, stop_token_ids=[int(text[end])])
        assert asked["choices"][0] == ended["choices"][0]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_of_the_models_hidden_states(client, model, pooling):
    texts = ["abc", "d" * 40, "abc, and more of it"]
    with ThreadPoolExecutor(3) as pool:
        ask = lambda body: client.post("/v1/embeddings", json={"pooling": pooling, **body}).json()
        found = list(pool.map(ask, [{"input": texts}, {"input": texts[::-1]}, {"input": texts[0]}]))
    vectors = [one["embedding"] for one in found[0]["data"]]
    assert vectors == [one["embedding"] for one in found[1]["data"]][::-1]
    assert found[2]["data"][0]["embedding"] == vectors[0]
    for text, vector in zip(texts, vectors, strict=True):
        hidden = np.asarray(model.hidden(jnp.array([Bytes().prompt(text)])))[0]
        expected = hidden.mean(0) if pooling == "mean" else hidden[-1]
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=2e-5)
    assert client.post("/v1/embeddings", json={"input": "x", "pooling": "max"}).status_code == 400


USER = {"role": "user", "content": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def calling(arguments):
    return {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}


BAD = {
    "no json": (b"{", 400, "the body is no JSON"),
    "no utf-8": (b'{"prompt": "\xff"}', 400, "the body is no JSON"),
    "deep": (b"[" * 9000, 400, "the body"),
    "no object": (b"[]", 400, "must be a JSON object"),
    "typo": (b'{"promt": "x"}', 400, "`promt` is not known here; do you mean `prompt`?"),
    "no prompt": (b"{}", 400, "`prompt` must be a text"),
    "ids": (b'{"prompt": [1, 999]}', 400, "token id 999"),
    "temperature": (b'{"prompt": "x", "temperature": -1}', 400, "temperature=-1: it must be 0, or from"),
    "type": (b'{"prompt": "x", "n": true}', 400, "`n` must be a whole number between 1 and 64, not True"),
    "penalty": (
        b'{"prompt": "x", "presence_penalty": 5}',
        400,
        "`presence_penalty` must be a number between -2 and 2, not 5",
    ),
    "huge id": (b'{"prompt": [1, 99999999999999999999999]}', 400, "token id 99999999999999999999999"),
    "bias": (b'{"prompt": "x", "logit_bias": {"1000": 1}}', 400, "token id 1000"),
    "bias of nothing": (b'{"prompt": "x", "logit_bias": {"5": 1e99}}', 400, "cannot sample with logit_bias"),
    "too long": (b'{"prompt": "x", "max_tokens": 95}', 400, "do not fit: a text has 1 to 96 tokens here"),
    "too large": (b" " * 10_001, 413, "a body may have 10000 bytes here"),
    "echo of a stream": (b'{"prompt": "x", "echo": true, "stream": true}', 400, "`echo` and `stream` exclude"),
    "echo as a number": (b'{"prompt": "x", "echo": 0}', 400, "`echo` must be true or false, not 0"),
    "nothing at all": (b'{"prompt": "x", "max_tokens": 0}', 400, "`max_tokens` must be a whole number between 1"),
    "a long echo": (b'{"prompt": "%s", "echo": true, "max_tokens": 0}' % (b"x" * 96), 400, "do not fit"),
    "an echo of no id": (b'{"prompt": [1, 999], "echo": true, "max_tokens": 0}', 400, "token id 999"),
    "stop words as ids": (b'{"prompt": "x", "stop_token_ids": ["a"]}', 400, "`stop_token_ids` must be a list of ids"),
    "stop beyond": (
        b'{"prompt": "x", "stop_token_ids": [5, 257]}',
        400,
        "`stop_token_ids` has 257, and ids are from 0",
    ),
    "huge bias": (b'{"prompt": "x", "logit_bias": {"5": 1%s}}' % (b"0" * 400), 400, "`logit_bias` must be of ids"),
    "empty": (b'{"prompt": [[1], []]}', 400, "`prompt` must be"),
    "half a character": (rb'{"prompt": "\ud800"}', 400, "`prompt` holds U+D800, half of a surrogate pair, as"),
    "half in bytes": (b'{"prompt": "\xed\xa0\x80"}', 400, "`prompt` holds U+D800, half"),
    "half a name": (rb'{"prompt": "x", "\udfff": 1}', 400, r"`\udfff` holds U+DFFF"),
    "half in a form": (rb'{"prompt": "x", "response_format": {"regex": "\ud800"}}', 400, "`response_format` holds"),
}


def test_a_body_that_is_nested_deeply_is_answered(client):
    """How deep is too deep differs between Pythons."""
    deep = b'{"a":' * 970 + b"1" + b"}" * 970
    response = client.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1, "metadata": %s}' % deep)
    assert response.status_code in (200, 400)
    assert response.status_code == 200 or "the body" in response.json()["error"]["message"]


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_in_openais_words(client, case):
    body, status, message = BAD[case]
    response = client.post("/v1/completions", content=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert message in error["message"]
    assert case != "temperature" or error["param"] == case
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user"}]}, r"`messages\[0\]` must have"),
        ({"messages": ["x"]}, r"`messages\[0\]` must be a JSON object"),
        ({"messages": [{**USER, "nam": "x"}]}, r"`messages\[0\].nam` is not known here; do you mean `name`\?"),
        ({"messages": [{**USER, "name": 5}]}, r"`messages\[0\].name` must be a string, not 5"),
        ({"messages": [{**USER, "audio": {"id": "x"}}]}, r"`messages\[0\].audio` is not served here"),
        ({"messages": [{**USER, "content": [IMAGE]}]}, r"`messages\[0\]`: `content\[0\]` must be of type text"),
        ({"messages": [{**USER, "content": [{"type": "text", "text": "x", "txt": 1}]}]}, "`.*.txt` is not known"),
        ({"messages": [{**USER, "content": [{"type": "text", "text": 5}]}]}, r"content\[0\]` must be of type text"),
        ({"messages": [USER, {"role": "x", "tool_calls": [1]}]}, r"`messages\[1\]`: `tool_calls\[0\]` must be of"),
        ({"messages": [{**USER, "tool_calls": 5}]}, r"`messages\[0\]`: `tool_calls` must be a list"),
        (
            {"messages": [calling("[" * 20_000)]},
            r"`messages\[0\]`: `tool_calls\[0\].function.arguments` is no JSON",
        ),
        ({"messages": [calling('{"a": "\\ud800"}')]}, r"`messages\[0\].tool_calls` holds U.D800"),
        ({"messages": [USER], "tools": [{}]}, "`tools` must be a list of functions"),
        ({"messages": [USER], "tools": [{"function": {"name": "f", "parameters": 5}}]}, "`tools.*` must be an object"),
        ({"messages": [USER], "tool_choice": "required"}, "`tool_choice` must be"),
        ({"messages": [USER], "parallel_tool_calls": "no"}, "`parallel_tool_calls` must be true or false, not 'no'"),
        ({"messages": [USER], "top_logprobs": 2}, "needs `logprobs`"),
        (
            {"messages": [USER], "max_tokens": 2, "max_completion_tokens": 3},
            "`max_tokens` is 2 and `max_completion_tok",
        ),
        ({"messages": [USER], "reasoning_effort": 5}, "`reasoning_effort` must be a string, not 5"),
        ({"messages": [USER], "chat_template_kwargs": []}, "`chat_template_kwargs` must be an object"),
        ({"messages": [USER], "chat_template_kwargs": {"tools": []}}, "`chat_template_kwargs.tools` is a field of its"),
        ({"messages": [USER], "model": 5}, "`model` must be a string, not 5"),
        ({"messages": [USER], "metadata": "x"}, "`metadata` must be an object, not 'x'"),
        ({"messages": [USER], "stream_options": {"include_usag": True}}, "`stream_options.include_usag` is not known"),
        ({"messages": [USER], "stream_options": {"include_usage": 1}}, "`stream_options.include_usage` must be true"),
        ({"messages": [USER], "response_format": {"type": "xml"}}, "`response_format` must be of type text"),
        (
            {"messages": [USER], "response_format": {"type": "json_object", "schema": {}}},
            "`response_format.schema` is not",
        ),
        (
            {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "nam": "x"}}},
            "`response_format.json_schema.nam` is not known here",
        ),
    ],
)
def test_chats_that_cannot_be_are_refused(body, message):
    with pytest.raises(protocol.BadRequest, match=message) as refused:
        protocol.chat(body)
    assert refused.value.param in body


def test_what_clients_send_out_of_habit_is_taken():
    said = {
        "role": "assistant",
        "content": "y",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    }
    part = {"type": "text", "text": "z", "cache_control": {"type": "ephemeral"}}
    body = {
        "messages": [USER, said, {"role": "user", "content": [part]}], "model": "any", "user": "me", "store": False,
        "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "y",
        "parallel_tool_calls": True, "modalities": ["text"], "reasoning_effort": None, "max_tokens": 5,
        "max_completion_tokens": 5, "stream_options": {"include_usage": True, "include_obfuscation": False},
        "response_format": {"type": "text"}, "logit_bias": {}, "top_p": 1,
    }  # fmt: skip
    asked = protocol.chat(body)
    assert (asked.max_tokens, asked.usage, asked.form, asked.parallel) == (5, True, None, True)
    assert [message["content"] for message in asked.messages] == ["x", "y", "z"]


def test_a_call_that_must_be_made_has_no_other_form():
    body = {"messages": [USER], "tools": [TOOL], "response_format": {"type": "json_object"}}
    assert protocol.chat(body).form is not None
    with pytest.raises(protocol.BadRequest, match="`response_format` and `tool_choice` exclude each other"):
        protocol.chat({**body, "tool_choice": "required"})


@pytest.mark.parametrize(("parallel", "count"), [(True, 2), (False, 1)])
def test_calls_are_made_one_at_a_time_where_that_is_asked_for(parallel, count):
    text = json.dumps([{"name": "weather", "arguments": {"days": i}} for i in (1, 2)])
    asked = protocol.chat({"messages": [USER], "tools": [TOOL], "parallel_tool_calls": parallel})
    [choice] = protocol.Reply(asked, "tiny", Bytes()).whole([text], [[]], ["stop"], 1)["choices"]
    assert len(choice["message"]["tool_calls"]) == count


def test_prompts_of_a_request_have_seeds_of_their_own_unless_one_is_asked_for(client):
    alike = complete(client, prompt=["hello"] * 3, temperature=1.5, seed=1)["choices"]
    apart = complete(client, prompt=["hello"] * 3, temperature=1.5, top_k=2**31)["choices"]
    assert [len({one["text"] for one in found}) for found in (alike, apart)] == [1, 3]


def test_a_request_is_answered_as_the_folder_says_where_it_does_not_say_how(model):
    ask = lambda client, **body: client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 8, **body})
    with serving(model, sampling={"temperature": 1.5, "top_k": 1}) as (_, client):
        text = lambda **body: ask(client, seed=1, **body).json()["choices"][0]["text"]
        greedy, random = text(), text(top_k=300)
        assert greedy == text_of(model, "hello", 8) != random
        assert text(top_k=0) == text(top_k=-1) == random
        assert text(top_k=None) == greedy
        messages = {"messages": [USER], "max_tokens": 8}
        chat = lambda **body: client.post("/v1/chat/completions", json={**messages, **body}).json()["choices"][0]
        assert chat(seed=1) == chat(temperature=0) != chat(seed=1, top_k=300)


def test_tokens_of_a_stream_are_where_those_of_a_whole_reply_are(client):
    body = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "logprobs": 2}
    whole = complete(client, logprobs=2)["choices"][0]["logprobs"]
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        pieces = [one["choices"][0]["logprobs"] for one in events(response)]
    assert len(pieces) > 1
    assert [at for piece in pieces for at in piece["text_offset"]] == whole["text_offset"]
    assert whole["text_offset"][0] == 0


def test_ids_of_one_letter_stand_where_it_does():
    asked, ids = protocol.completion({"prompt": "x", "logprobs": 1, "n": 2}), "né€!".encode()
    tokens = [Token(i, -1.0, -1.0) for i in ids]
    pieces, other = protocol.Reply(asked, "tiny", Bytes()), protocol.Reply(asked, "tiny", Bytes())
    at = [pieces.piece(0, "", [token], None, first=False)["choices"][0]["logprobs"]["text_offset"] for token in tokens]
    assert [offset for [offset] in at] == [0, 1, 1, 2, 2, 2, 3]
    whole = other.whole(["né€!"] * 2, [tokens] * 2, ["stop"] * 2, 1)
    assert [choice["logprobs"]["text_offset"] for choice in whole["choices"]] == [[0, 1, 1, 2, 2, 2, 3]] * 2


def test_parts_of_a_letter_are_told_apart_and_by_their_bytes():
    e, o = "éö".encode(), (("\\xc3", 0xC3), ("\\xa9", 0xA9), ("\\xb6", 0xB6))
    top = tuple((byte, -1.0) for _, byte in o)
    tokens = [Token(e[0], -1.0, -1.0, top), Token(e[1], -1.0, -1.0, top)]
    asked = protocol.completion({"prompt": "x", "logprobs": 3})
    told = protocol.Reply(asked, "tiny", Bytes()).whole(["é"], [tokens], ["stop"], 1)["choices"][0]["logprobs"]
    assert (told["tokens"], [*told["top_logprobs"][0]]) == (["\\xc3", "\\xa9"], [name for name, _ in o])
    asked = protocol.chat({"messages": [USER], "logprobs": True, "top_logprobs": 3})
    ends = [*tokens, Token(256, -1.0, -1.0)]
    told = protocol.Reply(asked, "tiny", Bytes()).whole(["é"], [ends], ["stop"], 1)["choices"][0]["logprobs"]["content"]
    assert bytes(byte for one in told for byte in one["bytes"] or ()).decode() == "é"
    assert (told[2]["token"], told[2]["bytes"]) == ("<bos>", None)
    assert [(one["token"], one["bytes"]) for one in told[0]["top_logprobs"]] == [(name, [byte]) for name, byte in o]


def test_what_was_read_is_counted_once_for_each_prompt(served):
    server, client = served
    before = server.worker.read
    complete(client, prompt=["abc", "defg"], n=2, max_tokens=1)
    assert server.worker.read - before == 4 + 5


def test_a_request_whose_time_is_over_at_once_is_answered(model):
    with serving(model, seconds=0.0) as (_, client):
        assert complete(client)["choices"][0]["finish_reason"] == "length"


def test_who_is_gone_before_a_stream_begins_frees_his_pages(served):
    import asyncio

    server, _ = served
    scheduler, body = server.worker.engine.scheduler, json.dumps({"prompt": "a", "max_tokens": 90, "stream": True})
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    messages = [{"type": "http.request", "body": body.encode()}]

    async def receive():
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message):
        await asyncio.sleep(0)

    before = server.worker.picked
    asyncio.run(server.app()(scope, receive, send))
    until = time.monotonic() + 30
    while (scheduler.running or scheduler.waiting) and time.monotonic() < until:
        time.sleep(0.01)
    assert server.worker.picked - before < 80


def test_who_goes_away_frees_his_pages(served):
    server, client = served
    scheduler = server.worker.engine.scheduler
    body = {"prompt": "a", "max_tokens": 90, "stream": True, "n": 60, "temperature": 1.0}
    with client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
        assert scheduler.running
    raw = socket.create_connection(("127.0.0.1", client.base_url.port))
    sent = json.dumps({"prompt": "a", "max_tokens": 90, "n": 6}).encode()
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(sent), sent))
    raw.close()
    until = time.monotonic() + 30
    told = lambda: "zoo_texts_running 0" in client.get("/metrics").text  # after the step in which they went
    while (scheduler.running or scheduler.waiting or not told()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not scheduler.running and not scheduler.waiting and told()


def asked_by_half(port, body, version="1.1"):
    """A connection over which a whole request has come, and nothing more will."""
    raw, sent = socket.create_connection(("127.0.0.1", port), timeout=60), json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\ncontent-length: {len(sent)}\r\n\r\n"
    raw.sendall(head.encode() + sent)
    raw.shutdown(socket.SHUT_WR)
    return raw


@pytest.mark.parametrize("stream", [False, True])
def test_who_has_said_all_is_answered(client, stream):
    body = {"prompt": "a", "max_tokens": 40, "temperature": 0, "stream": stream}
    with asked_by_half(client.base_url.port, body) as raw:
        response = http.client.HTTPResponse(raw)
        response.begin()  # passes over `100 Continue`
        found = response.read()
        assert (response.status, raw.recv(1)) == (200, b"")  # and the server has hung up
    assert found.endswith(b"data: [DONE]\n\n") if stream else json.loads(found)["usage"]["completion_tokens"] == 40


def test_who_has_hung_up_is_told_from_who_has_said_all(served, monkeypatch):
    """Both look the same until something is sent: probes find out, whatever stands in the queue."""
    monkeypatch.setattr(connection, "EVERY", 0.05)
    server, client = served
    scheduler = server.worker.engine.scheduler
    for body in (
        {"prompt": "a", "max_tokens": 90, "n": 60},
        {"prompt": "b", "max_tokens": 90, "n": 60, "stream": True},
    ):
        asked_by_half(client.base_url.port, body).close()
    asked_by_half(client.base_url.port, {"prompt": "a", "max_tokens": 90}, "1.0").close()
    before = server.worker.picked
    until = time.monotonic() + 30
    while (scheduler.running or scheduler.waiting or not server.statuses[499]) and time.monotonic() < until:
        time.sleep(0.01)
    assert not scheduler.running and not scheduler.waiting
    assert server.worker.picked - before < 121 * 90  # nobody was answered to the end


def test_a_full_queue_and_a_server_that_closes_say_when_to_come_again(model):
    with serving(model, {"queue": 2, "rows": 1}) as (server, client):
        with ThreadPoolExecutor(2) as pool:  # one runs, and one waits and is sent away
            long = lambda: client.post("/v1/completions", json={"prompt": "x", "max_tokens": 90, "temperature": 0})
            first = pool.submit(long)
            while not server.worker.engine.scheduler.running:
                time.sleep(0.001)
            second = pool.submit(long)
            while not (server.worker.engine.scheduler.waiting or first.done()):
                time.sleep(0.001)
            response = client.post("/v1/completions", json={"prompt": "x", "n": 2, "max_tokens": 4})
            if not first.done():
                assert (response.status_code, response.headers["retry-after"]) == (429, "1")
                assert "1 texts wait already, and at most 2 may" in response.json()["error"]["message"]
            server.worker.drain()
            assert sorted(each.result().status_code for each in (first, second)) in ([200, 503], [200, 200])
        response = client.get("/health")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x", "n": 3}, "n"),
        ("/v1/completions", {"prompt": ["x"] * 3}, "prompt"),
        ("/v1/chat/completions", {"messages": [USER], "n": 3}, "n"),
        ("/score", {"text": ["xy"] * 3}, "text"),
        ("/v1/embeddings", {"input": ["x"] * 3}, "input"),
    ],
)
def test_what_no_queue_can_hold_is_not_to_come_again(model, short, path, body, param):
    response = short.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "3 texts at once, and at most queue=2 may wait here" in error["message"]


@pytest.fixture(scope="module")
def short(model):
    """A server with a short queue."""
    with serving(model, {"queue": 2}, tokenizer=Told(), aliases=frozenset({"folder"}), key=LETTERS) as (_, client):
        client.headers.update({b"authorization": b"Bearer " + LETTERS.encode()})
        yield client


def test_a_key_is_any_text_in_either_encoding(short):
    for key, status in ((LETTERS.encode(), 200), (LETTERS.encode("latin-1"), 200), (b"schl\xfcsse", 401), (b"x", 401)):
        response = short.get("/v1/models", headers={b"authorization": b"Bearer " + key})
        assert response.status_code == status, key


def test_the_model_is_called_by_its_name_or_its_folders(short):
    body = {"prompt": "x", "max_tokens": 1}
    for name, status in (("tiny", 200), ("folder", 200), (None, 200), ("gpt-4", 404)):
        response = short.post("/v1/completions", json={**body, "model": name})
        assert response.status_code == status
    asked = [
        response,
        short.post("/v1/embeddings", json={"input": "x", "model": "gpt-4"}),
        short.get("/v1/models/gpt-4"),
    ]
    for response in asked:
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"] == "there is no model 'gpt-4' here, but `tiny`"


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/completions", {"prompt": []}, "prompt", "must be a text"),
        ("/v1/completions", {"prompt": "x" * 96}, "prompt", "do not fit"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 96}, "max_tokens", "96 tokens here (`length`)"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "must be of ids and numbers"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"1_0": 1}}, "logit_bias", "of ids and numbers: {'1_0': 1}"),
        (
            "/v1/completions",
            {"prompt": "x", "logit_bias": {"5": True}},
            "logit_bias",
            "of ids and numbers: {'5': True}",
        ),
        ("/v1/chat/completions", {"messages": [USER], "max_completion_tokens": 96}, "max_completion_tokens", "=96 do"),
        ("/v1/embeddings", {"input": [[1, 999]]}, "input", "token id 999"),
        ("/v1/embeddings", {"input": "x", "pooling": "max"}, "pooling", "must be mean or last"),
        ("/score", {"text": "x" * 100}, "text", "`length`"),
    ],
)
def test_errors_name_the_field(short, path, body, param, message):
    response = short.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_a_prompt_without_a_token_is_named(model):
    class Bare(Bytes):
        def prompt(self, text):
            return self.encode(text).tolist()

    with serving(model, tokenizer=Bare()) as (_, client):
        error = client.post("/v1/completions", json={"prompt": "", "max_tokens": 2}).json()["error"]
        assert (error["param"], error["message"][:25]) == ("prompt", "`prompt` has no token to ")


def test_whatever_fails_is_answered_and_counted(model, monkeypatch, capsys):
    def broken(*_, **__):
        raise LookupError("never foreseen")

    body = {"prompt": "x", "max_tokens": 2}
    with serving(model) as (_, client), monkeypatch.context() as patch:
        host = f"{client.base_url.host}:{client.base_url.port}"
        with contextlib.closing(http.client.HTTPConnection(host, timeout=60)) as connection:
            for fails in (True, False):
                patch.setattr(app.protocol, "completion", broken if fails else protocol_completion)
                connection.request("POST", "/v1/completions", json.dumps(body))
                first = connection.sock
                with connection.getresponse() as response:
                    found = json.loads(response.read())
                    assert (response.status, connection.sock) == (500 if fails else 200, first)
                if fails:
                    assert found["error"]["type"] == "server_error"
                    assert "the server has failed at this request (LookupError)" in found["error"]["message"]
        assert "never foreseen" in capsys.readouterr().err
        patch.setattr(protocol.Reply, "piece", broken)
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            assert "the server has failed at this request" in "".join(response.iter_lines())
        assert 'zoo_replies_total{status="500"} 1' in client.get("/metrics").text


def test_a_key_is_asked_for(model):
    with serving(model, key=KEY) as (_, client):
        assert client.get("/v1/models").status_code == 401
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).json()["data"][0]["id"] == "tiny"


def test_a_device_that_fails_fails_every_request(model, monkeypatch):
    with serving(model) as (server, client), monkeypatch.context() as patch:

        def broken(*_, **__):
            raise RuntimeError("out of memory")

        patch.setattr(server.worker.engine, "program", broken)
        response = client.post("/v1/completions", json={"prompt": "x"})
        assert (response.status_code, response.json()["error"]["message"]) == (
            503,
            "the device has failed: out of memory",
        )
        assert client.get("/health").status_code == 503


def test_openais_own_client_works(client):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{client.base_url}/v1".replace("//v1", "/v1"), api_key="none") as own:
        messages = [{"role": "user", "content": "hi"}]
        how = {"model": "tiny", "messages": messages, "seed": 3, "max_tokens": 6}
        whole = own.chat.completions.create(n=2, logprobs=True, top_logprobs=2, **how)
        assert len(whole.choices) == 2
        assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
        pieces = own.chat.completions.create(stream=True, stream_options={"include_usage": True}, **how)
        *chunks, last = list(pieces)
        assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole.choices[0].message.content
        assert last.usage.completion_tokens == 6
        vector = own.embeddings.create(model="tiny", input="hi").data[0].embedding
        assert len(vector) == 32
        shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
        formed = own.chat.completions.create(**{**how, "max_tokens": 20}, response_format=shape)
        assert json.loads(formed.choices[0].message.content) in ("yes", "no")
        with pytest.raises(openai.BadRequestError, match="do not fit"):
            own.completions.create(model="tiny", prompt="x", max_tokens=1000)


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"enum": [1, 2]}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}


class Told(Bytes):
    """Bytes with a chat template that knows of tools."""

    chat = ChatTemplate(
        "{% if tools %}{{ tools[0].function.name }}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments.days }}{% endfor %} {% endfor %}",
        {},
        "a test",
    )


def test_answers_keep_to_the_form_that_was_asked_for(client):
    """A model of noise follows schemas, expressions and grammars, one by one and together, and others do not notice."""
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 22]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    whitespace = {"x-guidance": {"whitespace_flexible": False}}
    forms = [
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema | whitespace}}, r'\{"a": ?(1|22)\}'),
        ({"type": "regex", "regex": "[ab]{3}c"}, "[ab]{3}c"),
        ({"type": "grammar", "grammar": 'start: "yes" | "no"'}, "yes|no"),
    ]
    free = complete(client)
    ask = lambda form: complete(client, max_tokens=40, n=3, temperature=1.5, seed=1, response_format=form)
    with ThreadPoolExecutor(4) as pool:
        found, company = [pool.submit(ask, form) for form, _ in forms], pool.submit(complete, client)
        for one, (_, pattern) in zip(found, forms, strict=True):
            for choice in one.result()["choices"]:
                assert re.fullmatch(pattern, choice["text"]), choice
                assert choice["finish_reason"] == "stop"
    assert company.result()["choices"] == free["choices"]
    for form, message in (
        ({"type": "regex", "regex": "("}, "parse error: ( error: unclosed group"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": 5}}}, "the json cannot be followed"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "["}}},
            "error: [ error: unclo",
        ),
    ):
        response = client.post("/v1/completions", json={"prompt": "x", "response_format": form})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")
        assert message in response.json()["error"]["message"]


def test_tools_are_called_as_openais_clients_expect(model):
    pytest.importorskip("llguidance")
    messages = [{"role": "user", "content": "x"}]
    with serving(model, {"length": 160}, tokenizer=Told()) as (_, client):
        body = {"messages": messages, "tools": [TOOL], "tool_choice": "required", "max_tokens": 70, "temperature": 0}
        ask = lambda **more: client.post("/v1/chat/completions", json={**body, **more})
        whole = ask().json()
        [choice] = whole["choices"]
        [call] = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) in ({"days": 1}, {"days": 2})
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            last = events(response)[-1]["choices"][0]
        assert last["delta"]["tool_calls"][0]["function"] == call["function"]
        assert last["finish_reason"] == "tool_calls"
        answered = [*messages, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "sun"}]
        days = json.loads(call["function"]["arguments"])["days"]
        text = f"weatheruser: x assistant: weather{days} tool: sun "
        read = ask(messages=answered).json()["usage"]["prompt_tokens"]
        assert read == len(text)
        other = {"type": "function", "function": {"name": "f", "parameters": {"type": "string", "pattern": "("}}}
        error = ask(tools=[other]).json()["error"]
        assert (error["param"], "unclosed group" in error["message"]) == ("tools", True)
        free = ask(tool_choice="auto", max_tokens=3).json()["choices"][0]
        assert (free["finish_reason"], "tool_calls" in free["message"]) == ("length", False)
    with serving(model) as (_, client):
        response = client.post("/v1/chat/completions", json=body)
        assert (
            "chat template does not read `tools`; beside messages it reads nothing"
            in response.json()["error"]["message"]
        )


class Thinking(Bytes):
    """Bytes with a chat template that is told how much to think."""

    chat = ChatTemplate(
        "{% if enable_thinking %}think{% endif %}{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% if m.thinking %}({{ m.thinking }}){% endif %}{% endfor %}",
        {},
        "a test",
    )


def test_a_last_message_is_gone_on_with(model, monkeypatch):
    begun = []  # what each answer's text goes on from
    monkeypatch.setattr(Told, "stream", lambda own, before=(): begun.append(len(before)) or Bytes().stream(before))
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": " The sky "}]
    with serving(model, tokenizer=Told()) as (_, client):
        ask = lambda **more: client.post("/v1/chat/completions", json={"messages": said, "max_tokens": 4, **more})
        reply = ask(continue_final_message=True, temperature=0).json()
        assert reply["usage"]["prompt_tokens"] == len("user: x assistant:  The sky ")
        text = reply["choices"][0]["message"]["content"]
        assert text == text_of(model, "user: x assistant:  The sky ", 4)
        assert ask().status_code == 200  # a message of its own
        assert begun == [len("user: x assistant:  The sky "), 0]
        for more, why in (
            ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
            ({"continue_final_message": 1}, "must be true or false"),
            ({"continue_final_message": True, "messages": [*said[:1], {**said[1], "content": ""}]}, "of text"),
        ):
            error = ask(**more).json()["error"]
            assert error["param"] == "continue_final_message" and why in error["message"]


def test_a_chat_template_is_told_what_it_reads(model):
    with serving(model, tokenizer=Thinking()) as (_, client):

        def ask(message=USER, **more):
            body = {"messages": [message], "max_tokens": 1, **more}
            return client.post("/v1/chat/completions", json=body).json()

        read = lambda **more: ask(**more)["usage"]["prompt_tokens"]
        assert read() == read(chat_template_kwargs={"x": None}) == len("x")
        assert read(reasoning_effort="high") == len("highx")
        assert read(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}) == len("thinknonex")
        assert read(message={**USER, "reasoning": "so"}) == len("x(so)")
        for more, param, message in (
            ({"chat_template_kwargs": {"enable_thinkng": 1}}, "chat_template_kwargs", "not read `enable_thinkng`"),
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "not read `messages`"),
            ({"chat_template_kwargs": {"reasoning_effort": {}}}, "chat_template_kwargs", "is a field of its own"),
            (
                {"tools": [TOOL]},
                "tools",
                "not read `tools`; beside messages it reads `enable_thinking`, `reasoning_eff",
            ),
            ({"message": calling("{}")}, "messages", "does not write `messages[0].tool_calls`"),
        ):
            error = ask(**more)["error"]
            assert (error["param"], message in error["message"]) == (param, True), error
    with serving(model) as (_, client):
        error = ask(reasoning_effort="low")["error"]
        assert (error["param"], "not read `reasoning_effort`" in error["message"]) == ("reasoning_effort", True)


def test_whatever_a_chat_template_raises_is_a_bad_request(model):
    class Broken(Bytes):
        chat = ChatTemplate("{{ 1 // (messages[0].content | length - 1) }}", {}, "a test")

    with serving(model, tokenizer=Broken()) as (_, client):
        response = client.post("/v1/chat/completions", json={"messages": [USER]})
        assert response.status_code == 400
        assert "the chat template in a test fails: integer division" in response.json()["error"]["message"]


def test_a_form_that_cannot_be_followed_is_an_error():
    llguidance = pytest.importorskip("llguidance")
    del llguidance
    from experiments.serving.grammar import FormError, Grammars

    [guide] = Grammars(Bytes()).guides("regex", "ab", 1)
    assert not guide.take(ord("a"))
    with pytest.raises(FormError, match=r"the form cannot be followed: .*doesn't satisfy"):
        guide.take(ord("a"))


@pytest.mark.heavy
def test_a_thousand_clients_are_all_answered(model):
    import asyncio

    with serving(model, {"queue": 400}) as (server, client):

        async def ask(other, i):
            answer = await other.post("/v1/completions", json={"prompt": "x" * (i % 9), "max_tokens": 3})
            return answer.status_code

        async def all_of_them():
            limits = httpx.Limits(max_connections=1000)
            async with httpx.AsyncClient(base_url=client.base_url, timeout=300, limits=limits) as other:
                return await asyncio.gather(*(ask(other, i) for i in range(1000)))

        found = asyncio.run(all_of_them())
        assert set(found) <= {200, 429}
        assert found.count(200) >= 400
        assert not server.worker._feeds


def test_a_connection_goes_on_behind_a_body_that_is_too_large(model):
    with serving(model) as (_, client):
        host = f"{client.base_url.host}:{client.base_url.port}"
        large = b" " * 100_000_000
        with contextlib.closing(http.client.HTTPConnection(host, timeout=60)) as connection:
            for body, status in ((large, 413), (b'{"prompt": "x", "max_tokens": 2}', 200)):
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                socket_then = connection.sock
                with connection.getresponse() as response:
                    response.read()
                    assert (response.status, connection.sock) == (status, socket_then)
        with contextlib.closing(http.client.HTTPConnection(host, timeout=10)) as connection:
            connection.request(
                "POST", "/v1/completions", headers={"Content-Length": "9" * 12, "Expect": "100-continue"}
            )
            assert connection.getresponse().status == 413  # before any of it is sent


@pytest.mark.heavy
def test_sigterm_answers_who_is_being_answered(tmp_path):
    words = ["model=tiny", "port=0", "length=512", "rows=2", "grace=60"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "experiments/serve.py", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # as soon as it says so, it serves
        port = re.fullmatch(r"serving random at http://127.0.0.1:(\d+)/v1\n", line)[1]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            assert client.get("/health").status_code == 200
            body = {"prompt": "x", "max_tokens": 300, "stream": True, "temperature": 0}
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_folder_of_a_smaller_model_drafts(model, tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "prepare", lambda platform: hardware.Device("cpu", "a test", 2**32))
    zoo.save(model, tmp_path)
    words = [f"model.weights={tmp_path}", "length=64", "rows=8", f"drafter={tmp_path}"]
    config, _ = schema.compose(words, "serve")
    server = serve.build(config, words)
    engine = server.worker.engine
    assert (server.told.drafts, engine.drafter.settings.page) == (4, 4)
    [answer] = engine.submit(Bytes().prompt("hello"), max_tokens=21, drafts=4)
    before = engine.steps
    engine.run()
    assert Bytes().decode([token.id for token in answer.tokens]) == text_of(model, "hello", 21)
    assert engine.steps - before < 10


@pytest.mark.parametrize("heeded", [True, False])
def test_what_a_folder_says_of_sampling_is_heeded_unless_told_otherwise(model, tmp_path, monkeypatch, capsys, heeded):
    monkeypatch.setattr(hardware, "prepare", lambda platform: hardware.Device("cpu", "a test", 2**32))
    zoo.save(model, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "max_length": 9}')
    words = [f"model.weights={tmp_path}", "length=64", *([] if heeded else ["sampling=false"])]
    server = serve.build(schema.compose(words, "serve")[0], words)
    assert server.told.sampling == ({"temperature": 0.6, "top_p": 0.9} if heeded else {})
    said = "note: where requests do not, generation_config.json says temperature=0.6, top_p=0.9\n"
    assert (said in capsys.readouterr().err) == heeded


def test_an_address_is_held_before_anything_is_read(monkeypatch, capsys):
    monkeypatch.setattr(serve, "build", lambda *_: pytest.fail("was read"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for words, message in (
            ([f"port={port}"], f"host=127.0.0.1 port={port}: Address already in use. Give another port=, or end what"),
            (["host=no.such.host.invalid", "port=1"], "host=no.such.host.invalid port=1: "),
            ([f"host={'x' * 80}", "port=1"], "Give another host=, such as 127.0.0.1."),
            (["host=192.0.2.1", "port=0"], "Give another host=, such as 127.0.0.1."),
        ):
            assert serve.main(words) == 1
            out, err = capsys.readouterr()
            assert (out, len(err.splitlines())) == ("", 1)
            assert message in err


def test_an_address_is_listened_at_once_it_is_said():
    with address.held("127.0.0.1", 0) as sockets:
        [held] = sockets
        place = held.getsockname()
        assert address.url(sockets, "127.0.0.1") == f"http://127.0.0.1:{place[1]}/v1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place)
        with address.held(*place) as others:  # as one that starts meanwhile
            address.listen(sockets, *place)
            socket.create_connection(place).close()
            with pytest.raises(CommandError, match=f"cannot serve at host=127.0.0.1 port={place[1]}: Address already"):
                address.listen(others, *place)


def test_a_length_beyond_learned_positions_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "prepare", lambda platform: hardware.Device("cpu", "a test", 2**32))
    sizes = dict(vocab_size=257, num_layers=1, embed_dim=16, mlp_dim=16, num_heads=2, num_kv_heads=2, head_dim=8)
    zoo.save(zoo.GPT.init(zoo.GPT2Config(**sizes, context_length=64), key=jax.random.key(0)), tmp_path)
    words = [f"model.weights={tmp_path}", "length=100"]
    with pytest.raises(CommandError, match=r"length=100: the model has learned 64 positions. Give length=64 or less"):
        serve.build(schema.compose(words, "serve")[0], words)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["random"]),
        (["model.weights=a/llama"], ["llama", "a/llama"]),
        (["model.weights=a/llama", "name=mine"], ["mine", "llama", "a/llama"]),
        (["model.weights=hf://org/llama@main"], ["org/llama", "llama@main", "hf://org/llama@main"]),
    ],
)
def test_a_model_is_called_by_its_name_its_folders_and_the_hubs(words, names):
    config, _ = schema.compose(words, "serve")
    assert serve.names(config, words) == names
