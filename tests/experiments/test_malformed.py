"""Random malformed command lines: one ConfigError of one line that names the key, and nothing else ever."""

import os
import random
import string
from dataclasses import fields
from enum import StrEnum

import pytest

from experiments.commandline import options, schema
from experiments.configs.fields import CHOICES, classes

GROUPS = {  # what brings the keys of a part that the default options do not have
    "data.": ["data=text", "data.path=x"],
    "adapter.": ["adapter=lora"],
}
UNREADABLE = ("[1,2", "{a:", '"open', "'open", "a'b", "${nothing}", "${", "a=b=[", "(", "1,2,3")
BELOW_ONE = ("steps", "batch_size", "seq_len", "log_every", "keep", "rank", "minutes", "learning_rate", "peak_tflops")


def some():
    """Yield (key, types, words that the key needs) of options that most runs have."""
    kinds = {"data": "text", "objective": "pretrain", "optimizer": "auto", "adapter": "lora"}
    for one in options.of():
        if one.group.partition(".")[0] != "model" and kinds.get(one.group, one.choice) == one.choice:
            yield one.key, one.arms, GROUPS.get(f"{one.group}.", [])


OPTIONS = list(some())
KEYS = {key for key, _, _ in OPTIONS}


def word(draw, letters=string.ascii_lowercase):
    return "".join(draw.choice(letters) for _ in range(draw.randint(3, 9)))


def misspelt(draw):
    """A key that is not there."""
    key, _, words = draw.choice(OPTIONS)
    while True:
        at = draw.randrange(len(key))
        longer = key[:at] + draw.choice("qxz_") + key[at:]
        wrong = draw.choice([key[:at] + key[at + 1 :], longer, f"{key}.{word(draw)}"])
        if wrong not in KEYS and not wrong.startswith(schema.FREE):
            return [*words, f"{wrong}=1"], wrong


def mistyped(draw):
    """A word where a number, a switch or one of a few names belongs."""
    wrong = [(k, arms, w) for k, arms, w in OPTIONS if not {str, dict}.intersection(arms) and "dict" not in str(arms)]
    key, arms, words = draw.choice(wrong)
    value = draw.choice([word(draw), f"{word(draw)}.{word(draw)}", "[1,2]", "{a:1}", "1:2:x", "0x"])
    if any(isinstance(arm, type) and issubdtype_name(arm, value) for arm in arms):
        value = "qqq"
    return [*words, f"{key}={value}"], key


def issubdtype_name(arm, value):
    return issubclass(arm, StrEnum) and value in arm.__members__


def too_small(draw):
    """A number that is out of its range."""
    key, _, words = draw.choice([one for one in OPTIONS if one[0].split(".")[-1] in BELOW_ONE])
    return [*words, f"{key}={draw.choice([0, -1, -draw.randint(2, 10**9)])}"], key


def unreadable(draw):
    """Something that is no override."""
    key, _, words = draw.choice([one for one in OPTIONS if str not in one[1]])  # text may be anything
    return [*words, f"{key}={draw.choice(UNREADABLE)}"], key


def no_such_option(draw):
    """An option that a group does not have."""
    group = draw.choice([*schema.GROUPS])
    return [f"{group}={word(draw)}"], group


def added(draw):
    key, _, _ = draw.choice([one for one in OPTIONS if f"{one[0]}." not in schema.FREE])
    return [f"{draw.choice(['+', '++', '~'])}{key}{draw.choice(['.more', ''])}={word(draw)}"], key


def every_option():
    """Yield (key, field, words that the key needs) of every option of every choice of every group."""
    needed = {"text": "path=x", "tokens": "path=x", "grain": "dataset=x:y", "distill": "teacher=x"}
    for group in CHOICES:
        for name, cls in classes(group).items():
            words = [f"{group}={name}"] if name in schema.options(group) else []
            words += [f"{group}.{needed[name]}"] if name in needed else []
            words += [f"{group}.fn=x:y"] if name == "custom" else []
            words += PAIRED if name == "preference" else []
            words += ["data=preference"] if name in ("dpo", "ipo", "simpo", "orpo") else []
            words += ["data=chat"] if name == "sft" else []
            for field in fields(cls):
                yield f"{group}.{field.name}", field, words
    for one in options.of():
        if one.group not in CHOICES and not one.key.startswith("model."):
            yield one.key, one.field, []


PAIRED = ["objective=dpo"]
EVERY = list(every_option())
FLOATS = [one for one in EVERY if "float" in str(one[1].type)]
COUNTS = [one for one in EVERY if str(one[1].type).startswith(("int |", "<class 'int'>"))]
TEXTS = [one for one in EVERY if str(one[1].type).startswith(("str", "<class 'str'>"))]
TEXTS = [one for one in TEXTS if not one[1].metadata.get("empty")]
SHARES = ("optimizer.b1", "optimizer.b2", "optimizer.beta", "optimizer.momentum", "optimizer.warmup", "optimizer.final")
SHARES += ("optimizer.ema", "optimizer.cooldown", "objective.label_smoothing", "objective.weight", "data.val_fraction")


def not_finite(draw):
    """No number, or none that can be meant."""
    key, _, words = draw.choice(FLOATS)
    return [*words, f"{key}={draw.choice(['nan', 'inf', '-inf', '1e999'])}"], key


def too_large(draw):
    """A whole number with digits too many."""
    key, _, words = draw.choice(COUNTS)
    return [*words, f"{key}={draw.choice(['', '-'])}{draw.randint(2**31, 10**30)}"], key


def no_share(draw):
    key, _, words = draw.choice([one for one in EVERY if one[0] in SHARES])
    return [*words, f"{key}={draw.choice([-1, -0.001, 1.5, 7])}"], key


def empty(draw):
    key, _, words = draw.choice(TEXTS)
    return [*words, f"{key}="], key


def whole_part(draw):
    """One value in place of a part, which has several."""
    key = draw.choice([*schema.GROUPS, "eval", "save", "profile", "distributed"])
    return [f"{key}={draw.choice([8, -1.5, 'null', 'true', '[1]', '10:13', word(draw)])}"], key


def of_hydra(draw):
    """Parts of Hydra that do not run here."""
    key = draw.choice(["hydra.run.dir", "hydra.sweep.dir", "hydra/launcher", "hydra.job.name", "hydra.verbose"])
    return [f"{key}={word(draw)}"], key


KINDS = (misspelt, mistyped, too_small, unreadable, no_such_option, added)
KINDS += (not_finite, too_large, no_share, empty, whole_part, of_hydra)


def check(kind, seed):
    overrides, key = kind(random.Random(seed))
    try:
        made, _ = schema.compose(overrides)
    except schema.ConfigError as error:
        assert "\n" not in str(error), (overrides, str(error))
        assert key in str(error) or key.split(".")[-1] in str(error), (overrides, str(error))
        return
    raise AssertionError(f"{overrides} is accepted: {made}")


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_command_lines_get_one_line_that_names_the_key(kind):
    for seed in range(4):
        check(kind, seed)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_malformed_command_lines(kind):
    """`MALFORMED=100 pytest -m heavy tests/experiments/test_malformed.py` for fewer."""
    for seed in range(int(os.environ.get("MALFORMED", "1000")) // len(KINDS) + 1):
        check(kind, seed)
