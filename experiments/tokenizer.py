"""Train a byte-level BPE on local text: `python experiments/tokenizer.py data=stdlib vocab_size=8192 out=runs/bpe`.

It writes a folder that `data.tokenizer=runs/bpe` and transformers read.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a script Python puts its own folder first

from experiments.command import carry_out, ended
from experiments.commandline import schema
from experiments.commandline.console import CommandError
from experiments.configs.commands import Tokenizer
from experiments.data.corpus import texts_of
from experiments.data.tokenizer import FILE, train_bpe
from experiments.runtime.manifest import reason


def main(argv: list[str]) -> int:
    """Train a tokenizer; return the exit status."""
    return carry_out("tokenizer", _train, argv)


def _train(config: Tokenizer, argv: list[str]) -> None:
    out = Path(config.out).expanduser()
    if (out / FILE).exists():
        raise schema.ConfigError(
            f"there already is a tokenizer at {out}: choose another out=FOLDER, or remove it first"
        )
    texts = texts_of(config.data)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot write out={out}: {reason(error)}. Give another FOLDER") from None
    made = train_bpe(texts, config.vocab_size, out)
    sample = texts[:: max(1, len(texts) // 100)]
    ratio = sum(map(len, sample)) / max(1, sum(map(len, made.encode_batch(sample))))
    print(f"{made.vocab_size} tokens, {ratio:.2f} bytes per token on this text, in {out}/")


if __name__ == "__main__":
    sys.exit(ended(main, sys.argv[1:]))
