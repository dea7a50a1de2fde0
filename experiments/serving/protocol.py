"""OpenAI's protocol as values: what a body asks for, and what is sent back. No HTTP, no device.

What is not known is refused by its name, and so is what would have to be passed over in silence.
"""

import difflib
import json
import math
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from experiments.data import DataError
from experiments.data.chat import Variables, read_message
from experiments.data.corpus import utf8
from experiments.serving.reasoning import Parser, Unmarked
from experiments.serving.tool_calls import calls, sayable
from zoo.engine.engine import Token
from zoo.engine.sampling import Sampling, SamplingError

MOST_ANSWERS, MOST_LIKELIEST, MOST_STOPS = 64, 20, 16


class BadRequest(ValueError):
    """A body that asks for what cannot be; `param` names the field."""

    status: int = 400
    code: str | None = None

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class NoSuchModel(BadRequest):
    """A model is asked that is not served here."""

    status, code = 404, "model_not_found"

    def __init__(self, name: str, served: str):
        super().__init__(f"there is no model {_short(name)} here, but `{served}`", "model")


@dataclass(frozen=True)
class Asked:
    """A request for text.

    Attributes:
        prompts: each as a text, or as ids.
        messages: of a chat, in place of prompts.
        variables: what its template is told beside messages and `tools`.
        sampling: how ids are picked.
        seeded: whether the seed was asked for: then each prompt has it, and elsewhere one of its own.
        max_tokens: most tokens of an answer; None is what there is room for.
        limited: the field that says so.
        n: answers of each prompt.
        stop: strings that end an answer.
        stop_ids: ids that end it, and are not shown.
        ignore_eos: whether the model's own do not, as measurements of speed ask for.
        echo: whether an answer begins with its prompt, and log-probabilities with those of the prompt.
        stream: whether pieces are sent as they come.
        usage: whether a stream ends with counts.
        top: how many of the likeliest ids are told with each; None tells no log-probabilities.
        priority: smaller is served first.
        form: what answers keep to, its name and its source (`experiments.serving.grammar`).
        tools: functions that may be called, as they came.
        calls: whether a tool has to be called.
        parallel: whether several may be called at once.
        answers: whether the template begins the model's own turn.
        continues: whether the last message is gone on with.
    """

    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    variables: Variables = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    seeded: bool = False
    max_tokens: int | None = None
    limited: str = "max_tokens"
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    echo: bool = False
    stream: bool = False
    usage: bool = False
    top: int | None = None
    priority: int = 0
    form: tuple[str, str] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    calls: bool = False
    parallel: bool = True
    answers: bool = True
    continues: bool = False


_NOTHING = object()
# Fields that say nothing of the answer, and what they must be. Whether `model` is the one that is served is seen where
# its name is known.
_HEEDLESS = {
    "model": "a string", "user": "a string", "metadata": "an object", "store": "true or false",
    "service_tier": "a string", "safety_identifier": "a string", "prompt_cache_key": "a string",
}  # fmt: skip
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "logit_bias",
)  # fmt: skip
_COMMON = {
    "n", "stop", "stop_token_ids", "ignore_eos", "stream", "stream_options", "priority", "response_format", *_SAMPLING,
}  # fmt: skip
_COMPLETION = _COMMON | {"prompt", "max_tokens", "logprobs", "echo", "best_of", "suffix"}
_CHAT = _COMMON | {
    "messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice",
    "parallel_tool_calls", "modalities", "reasoning_effort", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message",
}  # fmt: skip
_MESSAGE = {
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "refusal",
    "annotations", "audio", "function_call",
}  # fmt: skip
_TYPES = {"a whole number": int, "a number": (int, float), "true or false": bool, "a string": str, "an object": dict}


class _Body:
    """Reads the fields of a JSON object; those that are null are not there.

    Args:
        body: the object.
        known: names that it may have.
        inside: where in the body it is, where it is not the body itself.
    """

    def __init__(self, body: Any, known: set[str], inside: str = ""):
        self._inside = inside
        if not isinstance(body, dict):
            what = f"`{inside}`" if inside else "the body"
            raise BadRequest(f"{what} must be a JSON object", _root(inside) or None)
        for name, value in body.items():
            if value is not None and name not in known:
                close = difflib.get_close_matches(name, sorted(known), 1)
                hint = f"; do you mean `{close[0]}`?" if close else ""
                raise self._bad(name, f"is not known here{hint}")
        self.values = {name: value for name, value in body.items() if value is not None}

    def _bad(self, name: str, why: str) -> BadRequest:
        where = f"{self._inside}.{name}" if self._inside else name
        return BadRequest(f"`{where}` {why}", _root(self._inside) or name)

    def get(self, name: str, wanted: str, default: Any = None, low: float = -math.inf, high: float = math.inf) -> Any:
        value = self.values.get(name, _NOTHING)
        if value is _NOTHING:
            return default
        right = isinstance(value, _TYPES[wanted]) and (wanted == "true or false" or not isinstance(value, bool))
        if not right or (wanted.endswith("number") and not low <= value <= high):
            between = f" between {low:g} and {high:g}" if wanted.endswith("number") and math.isfinite(low) else ""
            raise self._bad(name, f"must be {wanted}{between}, not {_short(value)}")
        return value

    def refuse(self, name: str, plain: Sequence[Any], why: str) -> None:
        """Refuse a field that is there and not one of some plain values."""
        value = self.values.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in plain):
            raise self._bad(name, f"is not served here: {why}")


def _root(where: str) -> str:
    """Return the field of the body that a place is in."""
    return re.split(r"[.\[]", where, maxsplit=1)[0]


def _read(body: Any, known: set[str]) -> _Body:
    """Return the fields of a whole body."""
    read = _Body(body, known | set(_HEEDLESS))
    for name, wanted in _HEEDLESS.items():
        read.get(name, wanted)
    return read


def parse(body: bytes) -> Any:
    """Return the JSON of a body.

    Raises:
        BadRequest: it is none, or holds half a surrogate pair.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    for name, one in value.items() if isinstance(value, dict) else ():
        _check_text(name, _escaped(name))
        _check_text(one, _escaped(name))
    return value


def _check_text(value: Any, where: str) -> None:
    """Raise BadRequest if a text in a JSON value holds half a surrogate pair."""
    try:
        utf8(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), f"`{where}`")
    except DataError as error:
        raise BadRequest(str(error), _root(where)) from None


def _escaped(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def completion(body: Any, sampling: Mapping[str, Any] = MappingProxyType({})) -> Asked:
    """Return what a body of `/v1/completions` asks for, `sampling` where it says nothing.

    Raises:
        BadRequest: it asks for what cannot be.
    """
    read = _read(body, _COMPLETION)
    read.refuse("suffix", ("",), "text is only continued")
    read.refuse("best_of", (1, read.values.get("n")), "ask for n answers and choose")
    prompts = tuple(one if isinstance(one, str) else tuple(one) for one in _texts(read, "prompt"))
    top = read.get("logprobs", "a whole number", None, 0, MOST_LIKELIEST)
    common, echo = _common(read, sampling), read.get("echo", "true or false", False)
    if echo and common["stream"]:
        raise BadRequest(
            "`echo` and `stream` exclude each other: a prompt is told at once. Leave one of them out", "echo"
        )
    return Asked(
        prompts,
        (),
        max_tokens=read.get("max_tokens", "a whole number", 16, 0 if echo else 1, 2**31),
        top=top,
        echo=echo,
        **common,
    )


def chat(body: Any, sampling: Mapping[str, Any] = MappingProxyType({})) -> Asked:
    """Return what a body of `/v1/chat/completions` asks for, `sampling` where it says nothing.

    Raises:
        BadRequest: it asks for what cannot be.
    """
    read = _read(body, _CHAT)
    read.refuse("modalities", (["text"],), "answers are text")
    messages = read.values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("`messages` must be a list of at least one message", "messages")
    asks = read.get("logprobs", "true or false", False)
    top = read.get("top_logprobs", "a whole number", None, 0, MOST_LIKELIEST)
    if top is not None and not asks:
        raise BadRequest("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    common, tools = _common(read, sampling), _tools(read)
    if tools.get("calls") and common["form"] is not None:
        raise BadRequest(
            "`response_format` and `tool_choice` exclude each other: an answer that has to be a call has the form of "
            "one. Leave one of them out",
            "response_format",
        )
    return Asked(
        messages=tuple(_message(one, f"messages[{i}]") for i, one in enumerate(messages)),
        variables=_variables(read),
        top=(top or 0) if asks else None,
        parallel=read.get("parallel_tool_calls", "true or false", True),
        **_turn(read, messages[-1]),
        **_limit(read),
        **common,
        **tools,
    )


def _variables(read: _Body) -> dict[str, Any]:
    """Return what a chat's template is told: as vLLM takes it, and what OpenAI has a field for."""
    told = read.get("chat_template_kwargs", "an object", {})
    if twice := [name for name in ("tools", "reasoning_effort") if name in told]:
        raise BadRequest(
            f"`chat_template_kwargs.{twice[0]}` is a field of its own: say `{twice[0]}`", "chat_template_kwargs"
        )
    effort = read.get("reasoning_effort", "a string")
    own = {name: one for name, one in told.items() if one is not None}
    return own if effort is None else {**own, "reasoning_effort": effort}


def _turn(read: _Body, last: Any) -> dict[str, Any]:
    """Return whose turn it is: the model's own, or that of the last message, which is not over, as vLLM has it."""
    continues = read.get("continue_final_message", "true or false", False)
    answers = read.get("add_generation_prompt", "true or false", not continues)
    if continues and answers:
        raise BadRequest(
            "`continue_final_message` and `add_generation_prompt` exclude each other: leave one of them out",
            "continue_final_message",
        )
    if continues and not (isinstance(last, dict) and last.get("content") and not last.get("tool_calls")):
        raise BadRequest("`continue_final_message` needs a last message of text", "continue_final_message")
    return {"answers": answers, "continues": continues}


def _limit(read: _Body) -> dict[str, Any]:
    """Return how long a chat's answer may be, which has an older and a newer name."""
    names = ("max_tokens", "max_completion_tokens")
    found = {name: read.get(name, "a whole number", None, 1, 2**31) for name in names if name in read.values}
    if len(set(found.values())) > 1:
        said = " and ".join(f"`{name}` is {value}" for name, value in found.items())
        raise BadRequest(f"{said}: they are one thing, so leave one of them out", "max_tokens")
    return {"max_tokens": next(iter(found.values()), None), "limited": next(iter(found), "max_tokens")}


def score(body: Any) -> tuple[tuple[str, ...], str, int]:
    """Return the texts that a body of `/score` asks about, what stands before each of them, and how many of the
    likeliest ids are to be told.

    Raises:
        BadRequest: it asks for what cannot be.
    """
    read = _read(body, {"text", "prompt", "top_logprobs"})
    texts = read.values.get("text")
    many: list[Any] = texts if isinstance(texts, list) else [texts]
    if not many or not all(isinstance(one, str) and one for one in many):
        raise BadRequest("`text` must be a text, or a list of texts, none empty", "text")
    top = read.get("top_logprobs", "a whole number", 0, 0, MOST_LIKELIEST)
    return tuple(many), read.get("prompt", "a string", ""), top


def embeddings(body: Any) -> tuple[list[str | list[int]], str, bool]:
    """Return the texts that a body of `/v1/embeddings` asks about, the pooling, and whether floats come as base64.

    Raises:
        BadRequest: it asks for what cannot be.
    """
    read = _read(body, {"input", "encoding_format", "dimensions", "pooling"})
    read.refuse("dimensions", (), "vectors have the model's own length")
    form, pooling = read.get("encoding_format", "a string", "float"), read.get("pooling", "a string", "mean")
    if form not in ("float", "base64"):
        raise BadRequest("`encoding_format` must be float or base64", "encoding_format")
    if pooling not in ("mean", "last"):
        raise BadRequest("`pooling` must be mean or last", "pooling")
    return _texts(read, "input"), pooling, form == "base64"


def _texts(read: _Body, name: str) -> list[str | list[int]]:
    given = read.values.get(name)
    ids = lambda value: isinstance(value, list) and value and all(type(i) is int for i in value)
    many: list[Any] = given if isinstance(given, list) and not ids(given) else [given]
    if not many or not all(isinstance(one, str) or ids(one) for one in many):
        raise BadRequest(f"`{name}` must be a text, a list of ids, or a list of either", name)
    return many


def _message(message: Any, where: str) -> dict[str, Any]:
    read = _Body(message, _MESSAGE, where)
    for name in ("refusal", "annotations", "audio", "function_call"):  # null or empty in what clients send back
        read.refuse(name, ([],), "templates read text and `tool_calls`")
    try:
        made = read_message(read.values)
    except ValueError as error:
        raise BadRequest(f"`{where}`: {error}", "messages") from None
    parts = read.values.get("content")
    for i, part in enumerate(parts if isinstance(parts, list) else ()):
        _Body(part, {"type", "text", "cache_control"}, f"{where}.content[{i}]")
    for name in ("role", "name", "tool_call_id", "reasoning_content", "reasoning"):
        read.get(name, "a string")
    if not isinstance(made.get("content"), str) or "role" not in made:
        raise BadRequest(f"`{where}` must have a `role` and a `content` of text", "messages")
    _check_text(made.get("tool_calls"), f"{where}.tool_calls")  # whose arguments were text until here
    return made


def _common(read: _Body, sampling: Mapping[str, Any]) -> dict[str, Any]:
    stop = read.values.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > MOST_STOPS or not all(isinstance(one, str) and one for one in stop):
        raise BadRequest(f"`stop` must be a string or at most {MOST_STOPS} strings, none empty", "stop")
    ids = read.values.get("stop_token_ids", [])
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise BadRequest("`stop_token_ids` must be a list of ids", "stop_token_ids")
    options = _Body(
        read.get("stream_options", "an object", {}), {"include_usage", "include_obfuscation"}, "stream_options"
    )
    options.refuse("include_obfuscation", (False,), "pieces are as long as their text")
    return {
        "sampling": _sampling(read, sampling),
        "seeded": "seed" in read.values,
        "n": read.get("n", "a whole number", 1, 1, MOST_ANSWERS),
        "stop": tuple(stop),
        "stop_ids": tuple(ids),
        "ignore_eos": read.get("ignore_eos", "true or false", False),
        "stream": read.get("stream", "true or false", False),
        "usage": options.get("include_usage", "true or false", False),
        "priority": read.get("priority", "a whole number", 0, -1000, 1000),
        "form": _form(read.get("response_format", "an object", {"type": "text"})),
    }


def _form(asked: Mapping[str, Any]) -> tuple[str, str] | None:
    form = asked.get("type")
    if form in ("text", "json_object"):
        _Body(asked, {"type"}, "response_format")
        return None if form == "text" else ("json", '{"type": "object"}')
    if form in ("regex", "grammar") and isinstance(asked.get(form), str):
        return form, _Body(asked, {"type", form}, "response_format").values[form]
    inner = asked.get("json_schema")
    if form == "json_schema" and isinstance(inner, dict) and isinstance(inner.get("schema"), dict):
        _Body(asked, {"type", form}, "response_format")
        _Body(inner, {"name", "description", "schema", "strict"}, "response_format.json_schema")
        return "json", json.dumps(inner["schema"])
    raise BadRequest(
        "`response_format` must be of type text, json_object, json_schema with a json_schema.schema, or regex or "
        "grammar with a string of that name",
        "response_format",
    )


def _tools(read: _Body) -> dict[str, Any]:
    tools, choice = read.values.get("tools", []), read.values.get("tool_choice", "auto")
    named = choice.get("function") if isinstance(choice, dict) else None
    names = [_tool_name(tool, i) for i, tool in enumerate(tools)] if isinstance(tools, list) else [None]
    if None in names:
        raise BadRequest("`tools` must be a list of functions with names", "tools")
    if choice == "none" or (choice == "auto" and not tools):
        return {}
    if isinstance(named, dict) and named.get("name") in names:
        return {"tools": (tools[names.index(named["name"])],), "calls": True}
    if choice in ("auto", "required") and tools:
        return {"tools": tuple(tools), "calls": choice == "required"}
    raise BadRequest("`tool_choice` must be none, auto, required or one of the `tools`", "tool_choice")


def _tool_name(tool: Any, i: int) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    if not isinstance(function, dict):
        return None
    name, parameters = function.get("name"), function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        where = f"tools[{i}].function.parameters"
        raise BadRequest(f"`{where}` must be an object, a JSON schema, not {_short(parameters)}", "tools")
    return name if isinstance(name, str) else None


def _sampling(read: _Body, said: Mapping[str, Any]) -> Sampling:
    bounds = dict.fromkeys(("presence_penalty", "frequency_penalty"), (-2, 2))
    numbers = {
        name: read.get(name, "a number", None, *bounds.get(name, ())) for name in _SAMPLING[:-2] if name != "top_k"
    }
    found: dict[str, Any] = {**said, **{name: value for name, value in numbers.items() if value is not None}}
    seed = read.get("seed", "a whole number", None, -(2**63), 2**63)
    found["seed"] = uuid.uuid4().int & 0xFFFFFFFF if seed is None else seed
    if (top_k := read.get("top_k", "a whole number", None, -1, 2**31)) is not None:
        found["top_k"] = top_k if top_k > 0 else None
    bias = _bias(read.get("logit_bias", "an object", {}))
    try:
        return Sampling(**found, logit_bias=bias)
    except SamplingError as error:
        raise BadRequest(str(error), error.name) from None
    except (TypeError, ValueError) as error:
        raise BadRequest(str(error)) from None


def _bias(given: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    def number(token: str, value: Any) -> tuple[int, float]:
        if not re.fullmatch(r"0|[1-9]\d*", token) or type(value) not in (int, float):
            raise ValueError(_short({token: value}))
        return int(token), float(value)

    try:
        return tuple(number(token, value) for token, value in given.items())
    except (ValueError, OverflowError) as error:
        raise BadRequest(f"`logit_bias` must be of ids and numbers: {error}", "logit_bias") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}..."


def error(message: str, type: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def _call(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


class _Offsets:
    """Where in an answer's text its ids stand; those of one letter where it does.

    Args:
        step: takes one id after another, and returns the text that is now complete.
    """

    def __init__(self, step: Callable[[int], str]):
        self._step, self._length = step, 0

    def of(self, token: int) -> int:
        """Return the offset of the next id, in characters."""
        begin = self._length
        self._length += len(self._step(token))
        return begin


class Reply:
    """Builds what is sent back for one request.

    Args:
        asked: the request.
        model: the name of the model.
        tokenizer: makes text of ids.
        parser: makes what tells a chat's thoughts from its answers, one for each answer.
        begins: the ids that each prompt's answers go on from, if they do.
    """

    def __init__(
        self,
        asked: Asked,
        model: str,
        tokenizer: Any,
        parser: Callable[[], Parser] = Unmarked,
        begins: Sequence[Sequence[int]] = (),
    ):
        self.asked, self._tokenizer, self._begins = asked, tokenizer, begins
        self.chat = bool(asked.messages)
        self._object = "chat.completion" if self.chat else "text_completion"
        self._id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._common = {"created": int(time.time()), "model": model}
        self._offsets: dict[int, _Offsets] = {}
        self._parsers: defaultdict[int, Parser] = defaultdict(parser)
        self._held: defaultdict[int, str] = defaultdict(str)  # where tools may be called, what may be a call
        self._begun: set[int] = set()  # answers that have said something else before

    def whole(
        self,
        texts: Sequence[str],
        tokens: Sequence[Sequence[Token]],
        ends: Sequence[str],
        read: int,
        before: Sequence[Sequence[Token]] = (),
    ) -> dict:
        """Return the body of a whole reply; `before` are the tokens of each prompt that is to be echoed with scores."""
        choices = []
        for i, (text, ids, end) in enumerate(zip(texts, tokens, ends, strict=True)):
            content, end = self._said(i, text, end) if self.chat else ({}, end)
            for call in content.get("tool_calls", ()):
                del call["index"]  # which is of streams
            content = {"message": {"role": "assistant", "content": "", **content}} if self.chat else {"text": text}
            echoed = before[i // self.asked.n] if before else ()
            choices.append(self._choice(i, content, [*echoed, *ids], end))
        usage = self.usage(read, sum(map(len, tokens)))
        return {"id": self._id, "object": self._object, **self._common, "choices": choices, "usage": usage}

    def piece(self, index: int, text: str, tokens: Sequence[Token], end: str | None, *, first: bool) -> dict:
        """Return a chunk of a stream."""
        content, end = self._said(index, text, end) if self.chat else ({}, end)
        delta = {"delta": {**({"role": "assistant"} if first else {}), **content}}
        choice = self._choice(index, delta if self.chat else {"text": text}, tokens, end)
        return self._chunk([choice])

    def last(self, read: int, picked: int) -> dict:
        """Return the chunk of a stream that holds counts."""
        return {**self._chunk([]), "usage": self.usage(read, picked)}

    def _chunk(self, choices: list[dict]) -> dict:
        made = "chat.completion.chunk" if self.chat else self._object
        return {"id": self._id, "object": made, **self._common, "choices": choices}

    @staticmethod
    def usage(read: int, picked: int) -> dict[str, int]:
        """Return the counts of tokens."""
        return {"prompt_tokens": read, "completion_tokens": picked, "total_tokens": read + picked}

    def _said(self, index: int, piece: str, end: str | None) -> tuple[dict[str, Any], str | None]:
        """Return what is new of a message, and why it has ended; calls of tools are told once all is said."""
        thought, said = self._parsers[index].feed(piece, last=end is not None)
        made: dict[str, Any] = {"reasoning_content": thought} if thought else {}
        if self.asked.tools:
            said, begun = self._held[index] + said, index in self._begun
            if end is None:
                ready = sayable(said, begun=begun)
                said, self._held[index] = said[:ready], said[ready:]
                self._begun |= {index} if said else set()
            elif end == "stop":
                said, found = calls(said, self.asked.tools, begun=begun)
                told = [_call(i, *one) for i, one in enumerate(found if self.asked.parallel else found[:1])]
                if told:
                    return {**made, "content": said or None, "tool_calls": told}, "tool_calls"
        return made | ({"content": said} if said or not thought else {}), end

    def _choice(self, index: int, content: dict, tokens: Sequence[Token], end: str | None) -> dict:
        told = None if self.asked.top is None else (self._told(tokens) if self.chat else self._listed(index, tokens))
        return {"index": index, **content, "logprobs": told, "finish_reason": end}

    def _told(self, tokens: Sequence[Token]) -> dict:
        def one(i: int, logprob: float) -> dict:
            name, made = self._tokenizer.spell(i)
            return {"token": name, "logprob": logprob, "bytes": None if made is None else list(made)}

        top = lambda token: [one(i, logprob) for i, logprob in token.top]
        return {"content": [{**one(token.id, token.logprob), "top_logprobs": top(token)} for token in tokens]}

    def _listed(self, index: int, tokens: Sequence[Token]) -> dict:
        name, known = lambda i: self._tokenizer.spell(i)[0], lambda token: not math.isnan(token.logprob)
        return {
            "tokens": [name(token.id) for token in tokens],
            "token_logprobs": [token.logprob if known(token) else None for token in tokens],
            "top_logprobs": [{name(i): p for i, p in token.top} if known(token) else None for token in tokens],
            "text_offset": [self._offset(index, token.id) for token in tokens],
        }

    def _offset(self, index: int, token: int) -> int:
        """Return where in an answer's text, or behind its echoed prompt, its next id stands."""
        if index not in self._offsets:
            before = self._begins[index // self.asked.n] if self._begins and not self.asked.echo else ()
            self._offsets[index] = _Offsets(self._tokenizer.stream(before))
        return self._offsets[index].of(token)
