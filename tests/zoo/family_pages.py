"""A page for each family: its checkpoints, and how far tiny models of it are from transformers' own.

The numbers are committed, in `measured.json`; `python -m tests.zoo.family_pages CASE ...` measures cases of
`tests.zoo.hf_cases` anew (it needs `.[parity]`), and without a case the pages alone are made of what is there.
"""

import ast
import functools
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np

from experiments.commandline import listing
from tests.zoo.hf_cases import CASES, ENCODERS
from zoo.families import FAMILIES
from zoo.huggingface.config import from_hf

MEASURED = Path(__file__).with_name("measured.json")
PAGES = Path(__file__).parents[2] / "zoo" / "families"
_HEAD = "<!-- made by `python -m tests.zoo.family_pages` -->"


def measure(case: str) -> dict[str, float]:
    """Return how far a case's logits (of an encoder, hidden states) and gradients are from transformers'.

    Gradients of a tensor are over the largest of that tensor, or a hundredth of the largest of all where that is more
    (those of biases of keys are zero, but for roundings): the worst of all.
    """
    from tests.zoo import hf_tiny
    from zoo.config import rows

    expected, model = hf_tiny.run(hf_tiny.reference(case)), hf_tiny.loaded(case)
    _, values, gradients = eqx.filter_jit(inspect.unwrap(hf_tiny.evaluate))(model)  # compiled as XLA does by default
    worst, dims = 0.0, model.config.dims
    least = max(float(np.abs(theirs).max()) for theirs in expected["grads"].values()) / 100
    for row in rows(model.config):
        leaf: Any = gradients
        for name in row.leaf.split("."):
            leaf = getattr(leaf, name)
        for name, place in row.tensors(dims):
            theirs = row.turned(expected["grads"][name], dims)
            most = max(float(np.abs(theirs).max()), least)
            worst = max(worst, float(np.abs(np.asarray(leaf)[place] - theirs).max()) / most)
    off = float(np.abs(np.asarray(values) - expected["logits"]).max())
    size = float(np.sqrt((expected["logits"] ** 2).mean()))
    return {"logits": off, "rms": size, "gradients": worst}


@functools.cache
def family_of(case: str) -> str:
    """Return the name of a case's family."""
    config = from_hf((CASES | ENCODERS)[case])
    return next(name for name, one in FAMILIES.items() if type(config) is one)


@functools.cache
def _models() -> list[listing.Listed]:
    return listing.models()


def page(family: str, measured: dict[str, Any]) -> str:
    """Return a family's page."""
    config = FAMILIES[family]
    source = Path(str(sys.modules[config.__module__].__file__))
    about = (ast.get_docstring(ast.parse(source.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    about = about.removesuffix(" Free of JAX.")
    lines = [f"# {family}", "", _HEAD, "", about, "", f"`config.json`: {_named(config.dialects)}. "]
    lines[-1] += f"Source: [{source.name}]({source.relative_to(PAGES).as_posix()})."
    lines += ["", "| `model=` | checkpoint | parameters | a token meets |", "|---|---|---|---|"]
    for one in _models():
        if one.family == family:
            counts = listing.count_params(one.config), listing.count_active(one.config)
            lines.append(f"| `{one.name}` | {one.about} | {counts[0]:,} | {counts[1]:,} |")
    own = [case for case in measured["cases"] if family_of(case) == family]
    with_what = f"transformers {measured['transformers']} (eager) on torch {measured['torch']}"
    lines += ["", f"Tiny models of random weights, in float32, beside {with_what}: the largest difference of any"]
    lines += ["logit (hidden state, of an encoder), and of any gradient, over the largest of its tensor.", ""]
    lines += ["| case | logits | their root mean square | gradients |", "|---|---|---|---|"]
    for case in own:
        found = measured["cases"][case]
        lines.append(f"| `{case}` | {found['logits']:.1e} | {found['rms']:.2f} | {found['gradients']:.1e} |")
    return "\n".join(lines) + "\n"


def _named(dialects: Any) -> str:
    return ", ".join(f"`{name}`" for name in dialects)


def index(measured: dict[str, Any]) -> str:
    """Return the page that leads to the others."""
    lines = ["# families", "", _HEAD, "", "A page for each: what it opens, and how far it is from transformers.", ""]
    lines += [
        "| family | `config.json` | cases | largest difference of a logit | of a gradient |",
        "|---|---|---|---|---|",
    ]
    for family, config in FAMILIES.items():
        own = [found for case, found in measured["cases"].items() if family_of(case) == family]
        worst = [max((found[key] for found in own), default=float("nan")) for key in ("logits", "gradients")]
        told = " | ".join(f"{one:.1e}" for one in worst)
        lines.append(f"| [{family}]({family}.md) | {_named(config.dialects)} | {len(own)} | {told} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Return every page, by its file."""
    measured = json.loads(MEASURED.read_text())
    return {"README.md": index(measured)} | {f"{family}.md": page(family, measured) for family in FAMILIES}


def main(cases: list[str]) -> None:
    """Measure cases, and write the pages."""
    if cases:
        import torch
        import transformers

        held = json.loads(MEASURED.read_text()) if MEASURED.exists() else {"cases": {}}
        found = held["cases"]
        for case in cases:
            found[case] = {key: float(f"{value:.3g}") for key, value in measure(case).items()}
            order = [case for case in CASES | ENCODERS if case in found]
            told = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
            text = json.dumps(told | {"cases": {case: found[case] for case in order}}, indent=1)
            MEASURED.write_text(text + "\n")
    for name, text in pages().items():
        (PAGES / name).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
