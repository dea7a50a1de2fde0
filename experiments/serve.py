"""Serve a model: `python experiments/serve.py model.weights=FOLDER`, then any client of OpenAI's protocol.

Answers do not depend on who else is asking: see `zoo.engine`. Install the extra `serve`.
"""

import dataclasses
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a script Python puts its own folder first

from experiments.command import carry_out, ended
from experiments.commandline import console
from experiments.commandline.console import CommandError
from experiments.configs.commands import Serve


def main(argv: list[str]) -> int:
    """Serve until told to stop; return the exit status."""
    return carry_out("serve", _serve, argv)


def _serve(config: Serve, argv: list[str]) -> None:
    try:
        import uvicorn

        from experiments.serving.connection import Connection
    except ImportError:
        raise CommandError(f"serving is an extra, and uvicorn is missing: {console.install('serve')}") from None
    server = build(config, argv)
    key = "" if config.api_key is None else ", with its key"
    if config.host not in ("127.0.0.1", "localhost", "::1") and config.api_key is None:
        console.note(f"anyone who reaches {config.host} may use this: api_key=TEXT asks for a key")

    class Uvicorn(uvicorn.Server):
        """Sends away who waits as soon as it is told to stop; who is being answered has `grace` seconds."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            server.worker.drain()
            super().handle_exit(sig, frame)

    settings = uvicorn.Config(
        server.app(), host=config.host, port=config.port, log_level="warning", lifespan="on",
        timeout_graceful_shutdown=config.grace, backlog=4096, http=Connection,
    )  # fmt: skip
    print(f"serving {server.told.name} at http://{config.host}:{config.port}/v1{key}", flush=True)
    for stop in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises it once more when all is done
        signal.signal(stop, lambda *_: None)
    Uvicorn(settings).run()
    if server.worker.failure is not None:
        raise CommandError(f"the device has failed: {server.worker.failure}")


def build(config: Serve, argv: list[str]) -> Any:
    """Return the server that a command asks for, its step compiled.

    Raises:
        CommandError: the engine cannot be made, or the extra is missing.
    """
    from experiments.step.weights import open_drafter, open_model
    from zoo.engine.engine import Engine, Settings

    try:
        from experiments.serving.app import Server, Serving
        from experiments.serving.worker import Worker
    except ImportError as error:
        raise CommandError(f"serving is an extra ({error}): {console.install('serve')}") from None
    opened = open_model(config, argv, config.tokenizer)
    length = config.length or min(opened.model.config.context_length, 4096)
    try:
        settings = Settings(
            length=length, rows=config.rows, width=config.width, budget=config.budget, page=config.page,
            tokens=config.tokens, queue=config.queue, kv_dtype=config.kv_dtype, exact=config.exact,
        )  # fmt: skip
        how: dict[str, Any] = {"dtype": opened.dtype, "widen": opened.widen, "compiler_options": opened.options}
        drafter = None
        if config.drafter is not None:
            small = dataclasses.replace(settings, page=min(4, settings.page))  # what it reads again is less than a page
            drafter = Engine(open_drafter(config.drafter), small, **how)
        engine = Engine(opened.model, settings, **how, drafter=drafter)
    except ValueError as error:
        raise CommandError(str(error)) from None
    console.note("the step is being compiled")
    engine.submit([0], max_tokens=1)
    engine.run()
    name = config.name or (Path(config.model.weights).name if config.model.weights else "random")
    told = Serving(
        name=name, tokenizer=opened.tokenizer, key=config.api_key, most_bytes=int(config.max_mib * 2**20),
        seconds=config.seconds, drafts=config.drafts or (4 if drafter else 0),
    )  # fmt: skip
    return Server(Worker(engine), told)


if __name__ == "__main__":
    sys.exit(ended(main, sys.argv[1:]))
