"""Carry out a command beside `run.py`: compose, do, and every expected error in one line."""

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

from experiments.commandline import schema, usage
from experiments.commandline.console import CommandError
from experiments.data.corpus import DataError

TEXTS = ("prompt", "system")  # values that are the user's own words, which Hydra must not read


def carry_out(name: str, action: Callable[[Any, list[str]], None], argv: list[str]) -> int:
    """Compose a command's configuration, carry it out, and return the exit status: 0, 1 failed, 2 misconfigured."""
    if {"-h", "--help"}.intersection(argv):
        return usage.tell(name, argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's own log: errors only
    texts = {key: [word[len(key) + 1 :] for word in argv if word.startswith(f"{key}=")] for key in TEXTS}
    words = [word for word in argv if word.partition("=")[0] not in TEXTS or name != "generate"]
    try:
        config, _ = schema.compose(words, name)
        if name == "generate":
            config = dataclasses.replace(config, **{key: found or None for key, found in texts.items()})
        action(config, argv)
    except (schema.ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
