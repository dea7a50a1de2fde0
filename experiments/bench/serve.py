"""Tokens a second of the engine for many at once: beside transformers, beside one by one, and over HTTP.

    python -m experiments.bench serve                # 3 rounds; prints the table and writes serve.json beside this file
    python -m experiments.bench serve --rounds 1 --tokens 16 --small     # a look; writes nothing

A Llama of 120 million parameters with random weights, float32, answers 16 requests of 32 to 96 ids with 64 more each,
greedily, on a CPU. In one process, in turn: the engine, all at once and one by one; `generate_batch` (continuous
batching) and `generate` of transformers; 16 clients of the server over HTTP and one client; llama.cpp, in a process and
an environment of its own, where that can be made. What goes one by one has every fourth of these requests. Told is each
round's ratio of tokens per second, of those that came, and the median. Last, with 15 texts being written, how many
steps a 16th waits for its first token, by the length of its prompt. Needs `.[serve,parity,test]`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

import zoo
from experiments.bench import llama
from experiments.bench.made import made_with
from experiments.bench.rivals.environments import Missing
from experiments.data.tokenizer import Bytes
from zoo.engine.engine import Engine, Settings

FIGURES = Path(__file__).with_suffix(".json")
SIZES: dict[str, Any] = {
    "num_layers": 12,
    "embed_dim": 768,
    "mlp_dim": 2048,
    "num_heads": 12,
    "num_kv_heads": 4,
    "head_dim": 64,
}
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "embed_dim": 128,
    "mlp_dim": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
}
REQUESTS = 16
TOGETHER = ("engine", "continuous batching", "16 clients", "llama.cpp")  # what has all requests at once
WAITING = (1, 64, 192)  # ids of a prompt that comes while others are written
RATIOS = {  # what is told -> whose tokens a second over whose
    "over transformers' continuous batching": ("engine", "continuous batching"),
    "over transformers one by one": ("engine", "transformers one by one"),
    "over the engine one by one": ("engine", "engine one by one"),
    "16 clients over HTTP over one": ("16 clients", "1 client"),
    "over llama.cpp": ("engine", "llama.cpp"),
    "one by one, over llama.cpp one by one": ("engine one by one", "llama.cpp one by one"),
}


def requests(vocab: int) -> list[list[int]]:
    """Prompts of 32 to 96 ids."""
    draw = np.random.default_rng(0)
    return [draw.integers(3, vocab, 32 + 64 * i // (REQUESTS - 1)).tolist() for i in range(REQUESTS)]


def with_engine(engine: Engine, prompts: list[list[int]], tokens: int, *, alone: bool) -> list[list[int]]:
    """What an engine answers, to all at once or to one after the other."""
    answers = []
    for prompt in prompts:
        answers += engine.submit(prompt, max_tokens=tokens)
        if alone:
            engine.run()
    engine.run()
    return [[token.id for token in answer.tokens] for answer in answers]


def with_transformers(folder: Path, tokens: int) -> dict[str, Callable[[list[list[int]]], list[list[int]]]]:
    """What transformers answers, batching continuously and one by one."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    how: Any = GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=-1, pad_token_id=0)
    room: Any = ContinuousBatchingConfig(page_size=64, num_blocks=REQUESTS * 4 + 1, max_batch_tokens=512)
    model.generation_config.eos_token_id = None

    def alone(prompts: list[list[int]]) -> list[list[int]]:
        one = {"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 0}
        with torch.no_grad():
            return [model.generate(torch.tensor([ids]), **one)[0, len(ids) :].tolist() for ids in prompts]

    def together(prompts: list[list[int]]) -> list[list[int]]:
        found = model.generate_batch(prompts, generation_config=how, continuous_batching_config=room)
        order = sorted(found, key=lambda name: int(name.rpartition("_")[2]))
        return [found[name].generated_tokens for name in order]

    return {"continuous batching": together, "transformers one by one": alone}


@contextlib.contextmanager
def served(engine: Engine) -> Generator[Callable[[int, list[list[int]], int], list[int]]]:
    """Serve an engine at a free port; yield what has so many clients ask, and says how many tokens each answer has."""
    import httpx
    import uvicorn

    from experiments.serving.app import Server, Serving
    from experiments.serving.connection import Connection
    from experiments.serving.worker import Worker

    server = Server(Worker(engine), Serving(name="bench", tokenizer=Bytes()))
    config = uvicorn.Config(server.app(), port=0, log_level="error", lifespan="on", http=Connection)
    listening = uvicorn.Server(config)
    thread = threading.Thread(target=listening.run, daemon=True)
    thread.start()
    while not listening.started:
        time.sleep(0.01)
    port = listening.servers[0].sockets[0].getsockname()[1]

    def ask(clients: int, prompts: list[list[int]], tokens: int) -> list[int]:
        def one(prompt: list[int]) -> int:
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
            reply = client.post("/v1/completions", json=body)
            return reply.raise_for_status().json()["usage"]["completion_tokens"]

        where = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=where, timeout=600) as client, ThreadPoolExecutor(clients) as pool:
            return list(pool.map(one, prompts))

    try:
        yield ask
    finally:
        listening.should_exit = True
        thread.join()


def first_token(engine: Engine, prompts: list[list[int]], tokens: int, last: list[int]) -> int:
    """How many steps a text waits for its first token while others are being written."""
    for prompt in prompts:
        engine.submit(prompt, max_tokens=tokens)
    while engine.scheduler.waiting or any(text.todo > 1 for text in engine.scheduler.running):
        engine.step()
    [answer], before = engine.submit(last, max_tokens=2), engine.steps
    while not answer.tokens:
        engine.step()
    waited = engine.steps - before
    engine.run()
    return waited


def rate(action: Callable[[list[list[int]]], Any], prompts: list[list[int]]) -> float:
    """How many tokens come in a second."""
    began = time.perf_counter()
    found = action(prompts)
    return sum(each if isinstance(each, int) else len(each) for each in found) / (time.perf_counter() - began)


def measure(rounds: int, tokens: int, sizes: dict[str, Any]) -> dict[str, Any]:
    """All figures."""
    config = zoo.LlamaConfig(vocab_size=32768 if sizes is SIZES else 512, **sizes)
    model = zoo.Llama.init(config, key=jax.random.key(0))
    settings = Settings(length=256, rows=REQUESTS, tokens=REQUESTS * 256, share=False)
    prompts, few = requests(257), requests(257)[::4]
    engine, over_http = Engine(model, settings), Engine(model, settings)
    missing: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        folder, ask = stack.enter_context(tempfile.TemporaryDirectory()), stack.enter_context(served(over_http))
        zoo.save(model, folder)
        actions: dict[str, Callable[[list[list[int]]], Any]] = {
            "engine": lambda asked: with_engine(engine, asked, tokens, alone=False),
            "engine one by one": lambda asked: with_engine(engine, asked, tokens, alone=True),
            "16 clients": lambda asked: ask(REQUESTS, asked, tokens),
            "1 client": lambda asked: ask(1, asked, tokens),
            **with_transformers(Path(folder), tokens),
        }
        try:
            actions |= stack.enter_context(llama.running(model, REQUESTS, settings.length, tokens))
        except Missing as why:
            missing["llama.cpp"] = str(why)
        of = {name: prompts if name in TOGETHER else few for name in actions}
        texts = {name: act(of[name]) for name, act in actions.items()}  # and everything is compiled
        taken = [{name: rate(act, of[name]) for name, act in actions.items()} for _ in range(rounds)]
    ratios = {
        told: [round(one[fast] / one[slow], 2) for one in taken]
        for told, (fast, slow) in RATIOS.items()
        if slow in actions
    }
    expected = {len(prompts): texts["engine"], len(few): texts["engine"][::4]}
    same = {name: text == expected[len(text)] for name, text in texts.items() if isinstance(text[0], list)}
    return {
        "parameters": zoo.count_params(config),
        "tokens": tokens,
        "ratios": {told: {"median": statistics.median(each), "rounds": each} for told, each in ratios.items()},
        "tokens per second": {name: round(statistics.median(each[name] for each in taken), 1) for name in actions},
        "same text": same,
        "missing": missing,
        "steps to the first token": {size: first_token(engine, prompts[1:], tokens, [7] * size) for size in WAITING},
    }


def table(found: dict[str, Any]) -> str:
    """The ratios, in Markdown."""
    lines = ["| tokens per second, 16 requests at once | median | rounds |", "|---|---|---|"]
    for told, each in found["ratios"].items():
        lines.append(f"| {told} | {each['median']} | {', '.join(map(str, each['rounds']))} |")
    lines += [f"\nNot measured: {name}: {why}" for name, why in found["missing"].items()]
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    import transformers

    found = measure(args.rounds, args.tokens, SMALL if args.small else SIZES)
    print(f"{found['parameters']:,} parameters, {args.tokens} tokens each\n")
    print(table(found))
    print(f"\ntokens per second: {found['tokens per second']}")
    print(f"same text: {found['same text']}; steps to the first token: {found['steps to the first token']}")
    if not args.small and (args.rounds, args.tokens) == (3, 64):
        made = {**made_with(), "transformers": transformers.__version__}
        figures = {"command": "python -m experiments.bench serve", "made": made, **found}
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
