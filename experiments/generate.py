"""Continue text: `python experiments/generate.py model.weights=FOLDER prompt="Once upon a time"`.

Words appear as they are made. Give `prompt=` several times for a batch; `chat=true` applies the folder's chat template.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a script Python puts its own folder first

from experiments.command import carry_out, ended
from experiments.commandline import console
from experiments.commandline.console import CommandError
from experiments.commandline.schema import ConfigError
from experiments.configs.commands import Generate
from experiments.configs.fields import refuse
from experiments.data.chat import Plain


def main(argv: list[str]) -> int:
    """Generate text; return the exit status."""
    return carry_out("generate", _generate, argv)


def _generate(config: Generate, argv: list[str]) -> None:
    import jax

    from experiments.step.weights import PICKS, open_drafter, open_model, read_sampling, show_sampling
    from zoo.inference.generate import Sampling, stream

    if not config.prompt:
        raise CommandError('there is nothing to continue: give prompt="some text"')
    if config.system and not config.chat:
        raise ConfigError(refuse("system", config.system[0], "it is of a chat; say chat=true too"))
    if config.top_k is not None and config.top_k < -1:
        raise ConfigError(refuse("top_k", config.top_k, "it must be at least 1, or 0 for all"))
    try:
        asked = {name: one for name in PICKS if (one := getattr(config, name)) is not None}
        asked |= {"top_k": None} if asked.get("top_k") in (0, -1) else {}
        Sampling(**asked)
    except ValueError as error:
        raise CommandError(str(error)) from None
    said = {name: one for name, one in read_sampling(config.model.weights).items() if name not in asked}
    opened = open_model(config, argv, config.tokenizer)
    if said:
        console.note(show_sampling(said))
    prompts = encode(config, opened.tokenizer)
    console.warn_of_length(max(map(len, prompts)) + config.max_tokens, opened.model.config, "a text")
    stop = opened.tokenizer.stops if config.stop is None else _stop(config.stop, opened.model.config.vocab_size)
    steps = stream(
        opened.model,
        prompts,
        config.max_tokens,
        sampling=Sampling(**said, **asked),
        stop=stop,
        key=jax.random.key(config.seed),
        dtype=opened.dtype,
        kv_dtype=config.kv_dtype,
        drafts=config.drafts or (4 if config.drafter else 0),
        drafter=open_drafter(config.drafter),
        widen=opened.widen,
        compiler_options=opened.options,
    )
    try:
        before = [[] if config.chat else ids for ids in prompts]
        count, seconds = show(steps, config.prompt, before, opened.tokenizer, set(stop), chat=config.chat)
    except ValueError as error:
        print()  # after the prompt
        raise CommandError(str(error)) from None
    rate = f", {(count - len(config.prompt)) / seconds:.1f} tokens/s after the first" if seconds else ""
    print(f"({count} tokens{rate})", file=sys.stderr)


def _stop(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a text, which the model must be able to pick."""
    if wrong := [each for each in ids if not 0 <= each < vocab_size]:
        raise ConfigError(refuse("stop", wrong, f"this model picks ids from 0 to {vocab_size - 1}; give one of these"))
    return tuple(ids)


def encode(config: Generate, tokenizer: Any) -> list[list[int]]:
    """Return the ids of every prompt: as it is, or as a user's message in the tokenizer's chat template.

    Raises:
        CommandError: the tokenizer has no chat template.
    """
    if not config.chat:
        return [tokenizer.prompt(text) for text in config.prompt]
    if tokenizer.chat is None:
        raise CommandError(f"chat=true needs a chat template, and {tokenizer.name} has none")
    system = [{"role": "system", "content": text} for text in config.system or ()]
    texts = [tokenizer.chat.render([*system, {"role": "user", "content": text}]) for text in config.prompt]
    if isinstance(tokenizer.chat, Plain):
        console.note("there is no chat template: each message stands after its role, such as `user: `")
        return [tokenizer.prompt(text) for text in texts]
    return [tokenizer.encode(text).tolist() for text in texts]


def show(
    steps: Any, prompts: list[str], before: list[list[int]], tokenizer: Any, stop: set[int], *, chat: bool
) -> tuple[int, float]:
    """Print texts; return how many tokens there were, and the seconds after the first step.

    Each goes on from the ids `before` it, if there are any. One text is printed as it comes, but for characters that
    are not yet complete; several when all are over.
    """
    alone, count, began, last = len(prompts) == 1, 0, 0.0, 0.0
    streams = [tokenizer.stream(ids) for ids in before]
    texts = ["" if chat else prompt for prompt in prompts]
    if alone:
        print(texts[0], end="", flush=True)
    for tokens in steps:
        last = time.perf_counter()
        began = began or last
        count += int((tokens >= 0).sum())
        for row, token in enumerate(tokens.tolist()):
            if token < 0 or token in stop:
                continue
            piece = streams[row](token)
            texts[row] += piece
            if alone:
                print(piece, end="", flush=True)
    rest = [stream.rest() for stream in streams]
    print(rest[0] if alone else "\n\n".join(map("".join, zip(texts, rest, strict=True))), flush=True)
    return count, last - began


if __name__ == "__main__":
    sys.exit(ended(main, sys.argv[1:]))
