"""The HTTP side: routes, limits, streams and counts. The engine is behind a `Worker`, the protocol in `protocol`."""

import asyncio
import base64
import contextlib
import dataclasses
import functools
import hmac
import json
import math
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from experiments.commandline import console
from experiments.data import DataError
from experiments.data.chat import REASONING, ChatTemplate, Messages, Plain, Variables, unwritten
from experiments.serving import protocol, reasoning, tool_calls
from experiments.serving.grammar import FormError, Grammars, calls_schema
from experiments.serving.protocol import Asked, BadRequest, NoSuchModel, Reply
from experiments.serving.reasoning import Parser, Unmarked
from experiments.serving.worker import NO_MARKS, Feed, Listener, Unavailable, Worker
from zoo.engine.engine import Answer, Engine, Token
from zoo.engine.scheduler import Overload
from zoo.models.layers import check_tokens

T = TypeVar("T")
AGAIN = "1"  # seconds after which one may come again
SLOWEST = 30.0  # seconds in which a body must have come
NANS = "the model's logits are NaN"
FAILED = "the server has failed at this request"
_ENDS = {"time": "length", "cancelled": "length"}  # what OpenAI has no word for


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What the HTTP side is told.

    Attributes:
        name: of the model.
        aliases: other names that clients may send.
        tokenizer: the model's.
        key: that clients must show, if there is one.
        most_bytes: of a body.
        seconds: after which an answer is over.
        drafts: ids that are guessed at a time.
        sampling: how ids are picked where a request does not say.
        reasoning: whether what a model thinks is told apart from what it answers.
    """

    name: str
    aliases: frozenset[str] = frozenset()
    tokenizer: Any
    key: str | None = None
    most_bytes: int = 8 * 2**20
    seconds: float = math.inf
    drafts: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    reasoning: bool = True


class Events(StreamingResponse):
    """Server-sent events; whoever stops reading them, or was gone before they began, frees the pages.

    Args:
        events: as they are sent.
        free: called once nobody reads any more.
    """

    def __init__(self, events: AsyncIterator[str], free: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._free = free

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what comes; see starlette."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._free()


class Gone(Exception):
    """The client does not read any more."""


class Server:
    """The application's routes.

    Args:
        worker: that owns the engine.
        told: names and limits.
    """

    def __init__(self, worker: Worker, told: Serving):
        self.worker, self.told = worker, told
        self.statuses: Counter[int] = Counter()
        self._keys = [] if told.key is None else _spellings(told.key)
        self._ends = frozenset(told.tokenizer.stops)
        self._grammars = Grammars(told.tokenizer)

    def app(self) -> Starlette:
        """Return the ASGI application; its lifespan starts and stops the worker."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncGenerator[None]:
            self.worker.start()
            try:
                yield
            finally:
                await asyncio.to_thread(self.worker.stop)

        routes = [
            Route("/", self._page, methods=["GET"]),
            Route("/health", self._guarded(self._health, free=True), methods=["GET"]),
            Route("/metrics", self._guarded(self._metrics), methods=["GET"]),
            Route("/v1/models", self._guarded(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self._model), methods=["GET"]),
            Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/embeddings", self._guarded(self._embeddings), methods=["POST"]),
            Route("/score", self._guarded(self._score), methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {HTTPException: self._unrouted}
        return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)

    def _guarded(self, handle: Callable[[Request], Awaitable[Response]], free: bool = False) -> Any:
        """Return a route's function that asks for the key, and turns what fails into OpenAI's errors."""

        @functools.wraps(handle)
        async def guarded(request: Request) -> Response:
            try:
                response = await self._answered(handle, request, free)
            except Exception as error:  # which no connection may end with
                traceback.print_exception(error)
                response = _error(500, f"{FAILED} ({type(error).__name__}): its log says where", "server_error")
            self.statuses[response.status_code] += 1
            return response

        return guarded

    async def _answered(self, handle, request: Request, free: bool) -> Response:
        try:
            if self._keys and not free:
                shown = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
                if not any([hmac.compare_digest(shown, key) for key in self._keys]):
                    return _error(
                        401, "the API key is not the server's", "authentication_error", code="invalid_api_key"
                    )
            return await handle(request)
        except BadRequest as error:
            return _error(error.status, str(error), "invalid_request_error", error.param, error.code)
        except (ValueError, DataError) as error:
            return _error(400, str(error), "invalid_request_error")
        except RecursionError:
            return _error(400, "the body is nested too deeply", "invalid_request_error")
        except Overload as error:
            return _error(429, f"{error} Come again later.", "rate_limit_error", again=True)
        except Unavailable as error:
            return _error(503, str(error), "service_unavailable", again=True)
        except HTTPException as error:
            return await self._http_error(request, error)
        except (Gone, ClientDisconnect):
            return Response(status_code=499)

    async def _unrouted(self, request: Request, error: Exception) -> Response:
        response = await self._http_error(request, error)
        self.statuses[response.status_code] += 1
        return response

    @staticmethod
    async def _http_error(_: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return _error(status, str(getattr(error, "detail", error)), "invalid_request_error")

    async def _body(self, request: Request) -> Any:
        """Return a request's JSON.

        Raises:
            BadRequest: it is none.
            HTTPException: it is too large, or does not come.
        """
        most, parts, size = self.told.most_bytes, [], 0
        large = HTTPException(413, f"a body may have {most} bytes here")
        length = request.headers.get("content-length", "0")
        told = int(length) if length.isdigit() else 0
        if "expect" in request.headers and told > most:
            raise large
        try:
            async with asyncio.timeout(SLOWEST):
                async for part in request.stream():
                    size += len(part)
                    if size <= most:
                        parts.append(part)
        except TimeoutError:
            if max(size, told) <= most:
                raise HTTPException(408, f"the body did not come within {SLOWEST:g} seconds") from None
        if max(size, told) > most:  # said behind the body, for few clients read while they send
            raise large
        return protocol.parse(b"".join(parts))

    async def _asked(self, request: Request, read: Callable[[Any], T]) -> T:
        """Return what a request's body asks for.

        Raises:
            BadRequest: it asks for what cannot be.
        """
        body = await self._body(request)
        asked = read(body)
        if body.get("model"):
            self._check_model(body["model"])
        return asked

    def _check_model(self, name: str) -> None:
        if name != self.told.name and name not in self.told.aliases:
            raise NoSuchModel(name, self.told.name)

    def _check_count(self, count: int, what: str, param: str) -> None:
        """Refuse so many texts as can never wait at once."""
        most = self.worker.engine.settings.queue
        if count > most:
            raise BadRequest(
                f"{what} are {count} texts at once, and at most queue={most} may wait here: ask for fewer, or serve "
                "with a larger `queue`",
                param,
            )

    async def _completions(self, request: Request) -> Response:
        asked = await self._asked(request, functools.partial(protocol.completion, sampling=self.told.sampling))
        tokenizer = self.told.tokenizer
        ids = [tokenizer.prompt(one) if isinstance(one, str) else list(one) for one in asked.prompts]
        return await self._reply(request, asked, ids)

    async def _chat(self, request: Request) -> Response:
        asked = await self._asked(request, functools.partial(protocol.chat, sampling=self.told.sampling))
        tokenizer = self.told.tokenizer
        if tokenizer.chat is None:
            raise BadRequest("the model has no chat template: ask /v1/completions", "messages")
        variables = {**asked.variables, **({"tools": list(asked.tools)} if asked.tools else {})}
        chat = tokenizer.chat.for_tools if asked.tools else tokenizer.chat
        thoughts = reasoning.of_template(chat) if self.told.reasoning else None
        _check_read(asked.messages, variables, chat, thoughts is not None)
        text, plain = chat.render(asked.messages, variables, answer=asked.answers), isinstance(chat, Plain)
        text = _up_to(text, asked.messages[-1]["content"]) if asked.continues else text
        ids = tokenizer.prompt(text) if plain else tokenizer.encode(text).tolist()
        formed = asked.calls or asked.form is not None  # from its first letter, so that there are no thoughts
        parser = reasoning.Unmarked if formed or thoughts is None else functools.partial(thoughts.parser, text)
        marks = (*(thoughts.marks if thoughts else ()), *(tool_calls.MARKS if asked.tools else ()))
        return await self._reply(request, asked, [ids], parser, tokenizer.marks(marks))

    async def _reply(
        self,
        request: Request,
        asked: Asked,
        prompts: list[list[int]],
        parser: Callable[[], Parser] = Unmarked,
        marks: Mapping[int, str] = NO_MARKS,
    ) -> Response:
        rooms = self._rooms(asked, prompts)
        guides = await self._guides(asked, len(prompts) * asked.n)
        ends, stop = self._stops(asked)
        own = bool(asked.messages) and not asked.continues  # answers are messages of their own
        tokenizer, begins = self.told.tokenizer, [() if own else ids for ids in prompts]
        listeners = [Listener(tokenizer, one, asked.stop, ends, marks) for one in begins for _ in range(asked.n)]

        def answers(engine: Engine) -> Iterator[Answer]:
            for i, (ids, room) in enumerate(zip(prompts, rooms, strict=True)):
                own, seed = slice(i * asked.n, (i + 1) * asked.n), asked.sampling.seed + (0 if asked.seeded else i)
                yield from engine.submit(
                    ids, max_tokens=asked.max_tokens or room, sampling=dataclasses.replace(asked.sampling, seed=seed),
                    n=asked.n, stop=stop, watch=listeners[own], top=asked.top or 0, drafts=self.told.drafts,
                    guides=guides[own], priority=asked.priority, seconds=self.told.seconds,
                )  # fmt: skip

        reply, read = Reply(asked, self.told.name, tokenizer, parser, begins), sum(map(len, prompts))
        texts = [text for text in self._begun(asked, prompts) for _ in range(asked.n)]
        before = await self._echoed(request, asked, prompts) if asked.echo and asked.top is not None else []
        if asked.max_tokens == 0:
            return JSONResponse(reply.whole(texts, [()] * len(texts), ["length"] * len(texts), read, before))
        feed = await self.worker.submit(answers, listeners)
        if asked.stream:
            events = self._events(feed, reply, read)
            return Events(events, lambda: self.worker.cancel(feed))
        why = [""] * len(texts)
        async for event in self._while_there(request, feed):
            texts[event.index] += event.text
            why[event.index] = _end(feed.answers[event.index]) if event.finish else why[event.index]
        return JSONResponse(reply.whole(texts, [answer.tokens for answer in feed.answers], why, read, before))

    def _stops(self, asked: Asked) -> tuple[frozenset[int], frozenset[int]]:
        """Return the ids that are no part of a text, and those after which an answer is over.

        Raises:
            BadRequest: there is no such id.
        """
        size = self.worker.engine.model.config.vocab_size
        if beyond := [one for one in asked.stop_ids if not 0 <= one < size]:
            raise BadRequest(
                f"`stop_token_ids` has {beyond[0]}, and ids are from 0 to {size - 1} here", "stop_token_ids"
            )
        ends = self._ends.union(asked.stop_ids)
        return ends, frozenset(asked.stop_ids) if asked.ignore_eos else ends

    def _begun(self, asked: Asked, prompts: list[list[int]]) -> list[str]:
        """Return what the answers of each prompt begin with: its text, or nothing.

        Raises:
            ValueError: there is no such id.
        """
        decode, config = self.told.tokenizer.decode, self.worker.engine.model.config
        if not asked.echo:
            return [""] * len(prompts)
        for ids in prompts:
            check_tokens(ids, config.vocab_size)
        return [one if isinstance(one, str) else decode(ids) for one, ids in zip(asked.prompts, prompts, strict=True)]

    async def _echoed(self, request: Request, asked: Asked, prompts: list[list[int]]) -> list[list[Token]]:
        """Return the tokens of each prompt with their log-probabilities; that of the first is not known."""
        top, many = asked.top or 0, [ids for ids in prompts if len(ids) > 1]
        feed = await self._read(
            request, "prompt", many, lambda engine, one: engine.score(one, top=top, seconds=self.told.seconds)
        )
        scored = iter(feed.answers)
        found = [[Token(ids[0], math.nan, math.nan, ())] for ids in prompts]
        for tokens, ids in zip(found, prompts, strict=True):
            tokens += next(scored).scored if len(ids) > 1 else []
        if any(math.isnan(token.logprob) for tokens in found for token in tokens[1:]):
            raise Unavailable(NANS)
        return found

    def _rooms(self, asked: Asked, prompts: list[list[int]]) -> list[int]:
        """Return how many tokens there is room for behind each prompt.

        Raises:
            BadRequest: not for what is asked.
        """
        length, field = self.worker.engine.settings.length, "messages" if asked.messages else "prompt"
        what = f"n={asked.n} answers of {console.counted(len(prompts), 'prompt')}"
        self._check_count(len(prompts) * asked.n, what, field if asked.n == 1 else "n")
        if not all(prompts):
            raise BadRequest(f"`{field}` has no token to go on from: give at least a letter", field)
        rooms, least = [length - len(ids) for ids in prompts], 1 if asked.max_tokens is None else asked.max_tokens
        if min(rooms) < least:
            raise BadRequest(
                f"prompts of {', '.join(str(len(ids)) for ids in prompts)} tokens with {asked.limited}="
                f"{least} do not fit: a text has 1 to {length} tokens here (`length`), with its answer",
                field if min(rooms) < 1 else asked.limited,
            )
        return rooms

    async def _guides(self, asked: Asked, count: int) -> list[Any]:
        """Return what keeps each answer to the form that was asked for."""
        form, field = asked.form, "response_format"
        if asked.calls:
            form, field = ("json", calls_schema([tool["function"] for tool in asked.tools])), "tools"
        if form is None:
            return []
        try:
            return await asyncio.to_thread(self._grammars.guides, *form, count)
        except FormError as error:
            raise BadRequest(str(error), field) from None

    async def _events(self, feed: Feed, reply: Reply, read: int) -> AsyncIterator[str]:
        """Yield a stream's server-sent events."""
        begun: set[int] = set()
        try:
            async for event in feed.events():
                end = _end(feed.answers[event.index]) if event.finish else None
                first = event.index not in begun
                begun.add(event.index)
                yield _sent(reply.piece(event.index, event.text, event.tokens, end, first=first))
            if reply.asked.usage:
                yield _sent(reply.last(read, sum(len(answer.tokens) for answer in feed.answers)))
            yield "data: [DONE]\n\n"
        except (Unavailable, HTTPException) as error:
            yield _sent(protocol.error(str(getattr(error, "detail", error)), "service_unavailable"))
        except Exception as error:
            traceback.print_exception(error)
            yield _sent(protocol.error(f"{FAILED} ({type(error).__name__}): its log says where", "server_error"))

    async def _while_there(self, request: Request, feed: Feed) -> AsyncIterator[Any]:
        """Yield a feed's events.

        Raises:
            Gone: the client has hung up; its pages are free.
        """
        leaves = asyncio.ensure_future(_gone(request))
        events = feed.events()
        try:
            while True:
                following = asyncio.ensure_future(anext(events))
                await asyncio.wait({leaves, following}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    following.cancel()
                    raise Gone
                try:
                    yield following.result()
                except StopAsyncIteration:
                    return
        finally:
            leaves.cancel()
            self.worker.cancel(feed)

    async def _score(self, request: Request) -> Response:
        texts, prompt, top = await self._asked(request, protocol.score)
        tokenizer = self.told.tokenizer
        before = tokenizer.prompt(prompt)
        ids = [[*before, *tokenizer.encode(text).tolist()] for text in texts]
        first = max(1, len(before))
        if not all(first < len(one) for one in ids):
            raise BadRequest("a text must have a token beyond the first of all to be scored", "text")
        feed = await self._read(
            request, "text", ids, lambda engine, one: engine.score(one, first=first, top=top, seconds=self.told.seconds)
        )
        found: list[dict[str, Any]] = []
        for answer in feed.answers:
            assert answer.scores is not None
            logprobs, entropy, rank = (
                each[first - 1 :].tolist()
                for each in (answer.scores.logprobs, answer.scores.entropy, answer.scores.rank)
            )
            new = answer.text.ids[first:]
            told = {
                "tokens": new,
                "logprobs": logprobs,
                "entropy": entropy,
                "rank": rank,
                "logprob": math.fsum(logprobs),
            }
            if top:
                pairs = zip(answer.scores.top[first - 1 :], answer.scores.top_logprobs[first - 1 :], strict=True)
                told["top_logprobs"] = [dict(zip(map(str, i), map(float, p), strict=True)) for i, p in pairs]
            found.append({"index": len(found), **told})
        if any(math.isnan(one["logprob"]) for one in found):
            raise Unavailable(NANS)
        return JSONResponse({"object": "list", "model": self.told.name, "data": found})

    async def _read(self, request: Request, field: str, texts: list[Any], ask: Callable[[Engine, Any], Answer]) -> Feed:
        """Have texts of a field read that are not written on, and wait for all of them."""
        self._check_count(len(texts), f"the texts of `{field}`", field)
        try:
            feed = await self.worker.submit(lambda engine: (ask(engine, one) for one in texts), [])
        except ValueError as error:
            raise BadRequest(str(error), field) from None
        async for event in self._while_there(request, feed):
            if event.finish == "time":
                raise Unavailable("the time was over")
        return feed

    async def _embeddings(self, request: Request) -> Response:
        texts, pooling, packed = await self._asked(request, protocol.embeddings)
        ids = [self.told.tokenizer.prompt(one) if isinstance(one, str) else one for one in texts]
        feed = await self._read(
            request, "input", ids, lambda engine, one: engine.embed(one, pooling=pooling, seconds=self.told.seconds)
        )
        found = []
        for i, answer in enumerate(feed.answers):
            vector = answer.embedding
            length = float(np.linalg.norm(vector))
            if not math.isfinite(length):
                raise Unavailable("the model's hidden states are no numbers")
            unit = (vector / max(length, 1e-30)).astype("<f4")
            told = base64.b64encode(unit.tobytes()).decode() if packed else unit.tolist()
            found.append({"object": "embedding", "index": i, "embedding": told})
        read = sum(map(len, ids))
        usage = {"prompt_tokens": read, "total_tokens": read}
        return JSONResponse({"object": "list", "model": self.told.name, "data": found, "usage": usage})

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        length = self.worker.engine.settings.length
        return {"id": self.told.name, "object": "model", "created": 0, "owned_by": "local", "max_model_len": length}

    async def _health(self, _: Request) -> Response:
        if self.worker.failure is not None or self.worker.closing:
            raise Unavailable("the server is going down" if self.worker.failure is None else "the device has failed")
        return JSONResponse({"status": "ok"})

    async def _metrics(self, _: Request) -> Response:
        worker, engine = self.worker, self.worker.engine
        scheduler = engine.scheduler
        values: dict[str, tuple[str, Any]] = {
            "tokens_read_total": ("counter", worker.read),
            "tokens_picked_total": ("counter", worker.picked),
            "tokens_reused_total": ("counter", scheduler.reused),
            "answers_total": ("counter", worker.answered),
            "steps_total": ("counter", engine.steps),
            "preemptions_total": ("counter", scheduler.preemptions),
            "first_token_seconds_sum": ("counter", worker.first_seconds),
            "first_token_seconds_count": ("counter", worker.first_tokens),
            "texts_running": ("gauge", len(scheduler.running)),
            "texts_waiting": ("gauge", len(scheduler.waiting)),
            "pages_cached": ("gauge", len(scheduler.prefixes)),
        }
        lines = [f"# TYPE zoo_{name} {type}\nzoo_{name} {value}" for name, (type, value) in values.items()]
        lines += ["# TYPE zoo_pages gauge", "# TYPE zoo_pages_free gauge"]
        for pool in scheduler.pools:
            seen = "all" if pool.window is None else pool.window
            lines += [
                f'zoo_pages{{window="{seen}"}} {len(pool.holders)}',
                f'zoo_pages_free{{window="{seen}"}} {len(pool.free)}',
            ]
        lines += ["# TYPE zoo_replies_total counter"]
        lines += [f'zoo_replies_total{{status="{status}"}} {count}' for status, count in sorted(self.statuses.items())]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def _page(self, _: Request) -> Response:
        return FileResponse(Path(__file__).with_name("chat.html"), media_type="text/html")


def _check_read(messages: Messages, variables: Variables, chat: ChatTemplate | Plain, thinks: bool) -> None:
    """Refuse what a chat template would not read, but for former thoughts of a model that it is not to see again."""
    known = ", ".join(f"`{one}`" for one in sorted(chat.variables)) or "nothing"
    for name in variables:
        if name not in chat.variables:
            field = name if name in ("tools", "reasoning_effort") else "chat_template_kwargs"
            raise BadRequest(
                f"the model's chat template does not read `{name}`; beside messages it reads {known}", field
            )
    for i, message in enumerate(messages):
        if (lost := unwritten(message, chat)) and not (thinks and lost in REASONING):
            raise BadRequest(
                f"the model's chat template does not write `messages[{i}].{lost}`: leave it out", "messages"
            )


def _up_to(text: str, said: str) -> str:
    """Return the text of a conversation up to where its last message ends, as transformers cuts it.

    Raises:
        BadRequest: the template does not write that as it is.
    """
    at = text.rfind(said.strip())
    if at < 0:
        raise BadRequest("the model's chat template changes the last message", "continue_final_message")
    whole = at + len(said.lstrip())
    return text[: whole if text[at:whole] == said.lstrip() else at + len(said.strip())]


def _spellings(key: str) -> list[bytes]:
    """Return a key as clients send it: in UTF-8, and in Latin-1 where it has such letters alone."""
    latin = [key.encode("latin-1")] if all(letter <= "\xff" for letter in key) else []
    return [key.encode(errors="surrogateescape"), *latin]


def _error(
    status: int, message: str, type: str, param: str | None = None, code: str | None = None, again: bool = False
):
    headers = {"retry-after": AGAIN} if again else {}
    return JSONResponse(protocol.error(message, type, param, code), status_code=status, headers=headers)


def _sent(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _end(answer: Answer) -> str:
    finish = str(answer.finish)
    if finish == "error":
        raise HTTPException(500, str(answer.error))
    return _ENDS.get(finish, finish)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
