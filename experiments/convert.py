"""Write a model's folder anew: `python experiments/convert.py source=FOLDER out=FOLDER dtype=bfloat16 lora=FOLDER`.

It reads what `zoo.load` reads (a Hugging Face folder, or the `weights` that a run saved), changes the number format,
merges a LoRA adapter, keeps matrices in fewer bits (`quantise=int4`), and writes a folder that transformers and this
zoo open. The tokenizer's files come along.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a script Python puts its own folder first

from experiments.command import carry_out, ended
from experiments.commandline import console
from experiments.commandline.console import CommandError
from experiments.commandline.schema import ConfigError
from experiments.configs import DType
from experiments.configs.commands import Convert
from experiments.configs.fields import Quantise, refuse
from experiments.runtime.manifest import reason

GIB = 2**30


def main(argv: list[str]) -> int:
    """Convert a model; return the exit status."""
    return carry_out("convert", convert, argv)


def convert(config: Convert, argv: list[str]) -> None:
    """Read, change and write a model.

    Raises:
        ConfigError: a group is given, and nothing is quantised.
        CommandError: the source holds no model, the adapter is another model's, or the place is taken or out of reach.
    """
    if config.group is not None and config.quantise is None:
        raise ConfigError(refuse("group", config.group, "nothing is quantised; say quantise=int8, int4 or nf4 too"))
    source, out = Path(config.source).expanduser(), Path(config.out).expanduser()
    if (out / "config.json").exists():
        raise CommandError(f"there already is a model at {out}: choose another out=FOLDER, or remove it first")
    import jax

    jax.config.update("jax_platforms", "cpu")
    import zoo
    from zoo import adapters
    from zoo.adapters import lora
    from zoo.quantised import quantise

    # JAX has no float64 otherwise: what is asked for, or stored so, would be float32 without a word.
    with jax.enable_x64(config.dtype in (None, DType.float64)):
        try:
            kept = config.quantise if config.quantise is Quantise.as_stored else None
            model = zoo.load(source, dtype=None if config.dtype is None else config.dtype.value, quantise=kept)
            if config.lora is not None:
                model = lora.merge(adapters.load(config.lora, model))
            if config.quantise is not None and kept is None:
                model = quantise(model, config.quantise, group=config.group, to_be_saved=True)
        except ValueError as error:
            raise CommandError(f"cannot convert source={config.source}: {error}") from None
        try:
            zoo.save(model, out, source=source if source.is_dir() else None, shard_bytes=int(config.shard_gib * GIB))
        except ValueError as error:
            raise CommandError(str(error)) from None
        except OSError as error:
            raise CommandError(f"cannot write out={config.out}: {reason(error)}. Choose another out=FOLDER.") from None
    files = sorted(file.name for file in out.iterdir() if file.suffix == ".safetensors")
    print(f"{zoo.count_params(model.config):,} parameters in {console.counted(len(files), 'file')}, in {out}/")


if __name__ == "__main__":
    sys.exit(ended(main, sys.argv[1:]))
