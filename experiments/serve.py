"""Serve a model: `python experiments/serve.py model.weights=FOLDER`, then any client of OpenAI's protocol.

Answers do not depend on who else is asking: see `zoo.engine`. Install the extra `serve`.
"""

import dataclasses
import signal
import socket
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a script Python puts its own folder first

from experiments.command import carry_out, ended
from experiments.commandline import console
from experiments.commandline.console import CommandError
from experiments.configs.commands import Serve
from experiments.runtime.remote import HUB
from experiments.serving import address


def main(argv: list[str]) -> int:
    """Serve until told to stop; return the exit status."""
    return carry_out("serve", _serve, argv)


def _serve(config: Serve, argv: list[str]) -> None:
    try:
        import uvicorn

        from experiments.serving.connection import Connection
    except ImportError:
        raise CommandError(f"serving is an extra, and uvicorn is missing: {console.install('serve')}") from None
    with address.held(config.host, config.port) as sockets:
        server = build(config, argv)
        if config.host not in ("127.0.0.1", "localhost", "::1") and config.api_key is None:
            console.note(f"anyone who reaches {config.host} may use this: api_key=TEXT asks for a key")
        key = "" if config.api_key is None else ", with its key"
        serving = f"serving {server.told.name} at {address.url(sockets, config.host)}{key}"

        class Uvicorn(uvicorn.Server):
            """Sends away who waits as soon as it is told to stop; who is being answered has `grace` seconds."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                print(serving, flush=True)

            def handle_exit(self, sig: int, frame: Any) -> None:
                server.worker.drain()
                super().handle_exit(sig, frame)

        settings = uvicorn.Config(
            server.app(), log_level="warning", lifespan="on", timeout_graceful_shutdown=config.grace,
            backlog=address.BACKLOG, http=Connection,
        )  # fmt: skip
        address.listen(sockets, config.host, config.port)
        for stop in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises it once more when all is done
            signal.signal(stop, lambda *_: None)
        Uvicorn(settings).run(sockets)
    if server.worker.failure is not None:
        raise CommandError(f"the device has failed: {server.worker.failure}")


def build(config: Serve, argv: list[str]) -> Any:
    """Return the server that a command asks for, its step compiled.

    Raises:
        CommandError: the engine cannot be made, or the extra is missing.
    """
    from experiments.step.weights import open_drafter, open_model, read_sampling, show_sampling
    from zoo.engine.engine import Engine, Settings

    try:
        from experiments.serving.app import Server, Serving
        from experiments.serving.worker import Worker
    except ImportError as error:
        raise CommandError(f"serving is an extra ({error}): {console.install('serve')}") from None
    said = read_sampling(config.model.weights) if config.sampling else {}
    opened = open_model(config, argv, config.tokenizer)
    length = config.length or min(opened.model.config.context_length, 4096)
    _check_length(opened.model, length, "the model")
    try:
        settings = Settings(
            length=length, rows=config.rows, width=config.width, budget=config.budget, page=config.page,
            tokens=config.tokens, queue=config.queue, kv_dtype=config.kv_dtype, exact=config.exact,
        )  # fmt: skip
        how: dict[str, Any] = {"dtype": opened.dtype, "widen": opened.widen, "compiler_options": opened.options}
        drafter = None
        if config.drafter is not None:
            small = dataclasses.replace(settings, page=min(4, settings.page))  # what it reads again is less than a page
            guesser = open_drafter(config.drafter)
            _check_length(guesser, length, f"drafter={config.drafter}")
            drafter = Engine(guesser, small, **how)
        engine = Engine(opened.model, settings, **how, drafter=drafter)
    except ValueError as error:
        raise CommandError(str(error)) from None
    if said:
        console.note(f"where requests do not, {show_sampling(said)}")
    console.note("the step is being compiled")
    engine.submit([0], max_tokens=1)
    engine.run()
    name, *aliases = names(config, argv)
    told = Serving(
        name=name, aliases=frozenset(aliases), tokenizer=opened.tokenizer, key=config.api_key,
        most_bytes=int(config.max_mib * 2**20), seconds=config.seconds, drafts=config.drafts or (4 if drafter else 0),
        sampling=said, reasoning=config.reasoning,
    )  # fmt: skip
    return Server(Worker(engine), told)


def _check_length(model: Any, length: int, what: str) -> None:
    """Raise CommandError if a model cannot read texts as long as those that are to be served."""
    from zoo.config import learned_positions

    most = learned_positions(model.config)
    if most is not None and length - 1 > most:  # the last token is not read
        raise CommandError(
            f"cannot serve texts of length={length}: {what} has learned {most} positions. Give length={most} or less."
        )


def names(config: Serve, argv: list[str]) -> list[str]:
    """Return what clients may call the model: first what it is called here, then its folder's and the hub's name."""
    if config.model.weights is None:
        return [config.name or "random"]
    given = [word.partition("=")[2] for word in argv if word.startswith("model.weights=")] or [config.model.weights]
    hub = [given[-1].removeprefix(HUB).partition("@")[0]] if given[-1].startswith(HUB) else []
    own = [config.name] if config.name else []
    folder = Path(config.model.weights)
    return list(dict.fromkeys([*own, *hub, folder.name or folder.resolve().name, given[-1]]))


if __name__ == "__main__":
    sys.exit(ended(main, sys.argv[1:]))
