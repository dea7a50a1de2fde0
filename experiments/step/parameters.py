"""Parameters by name: the dotted path of each leaf, such as `layers.q` or `final_norm`, and patterns of these."""

import difflib
import fnmatch
from collections.abc import Sequence
from typing import Any

import jax

PLAIN = ("*norm", "*bias")  # what is no matrix: scales and offsets


def names(tree: Any) -> list[str]:
    """Return the dotted path of every leaf."""
    return [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def matching(tree: Any, patterns: Sequence[str] | None) -> Any:
    """Return a tree of bools: which leaves a pattern names, by their path or a part of it; None is norms and biases."""
    wanted = PLAIN if patterns is None else patterns
    return jax.tree_util.tree_map_with_path(lambda path, _: any(_hit(_name(path), one) for one in wanted), tree)


def check(tree: Any, patterns: Sequence[str], key: str) -> None:
    """Raise unless every pattern names a leaf.

    Raises:
        ValueError: naming the pattern, the closest leaf, and all there are.
    """
    known = names(tree)
    for pattern in patterns:
        if not any(_hit(name, pattern) for name in known):
            parts = sorted({part for name in known for part in (name, *name.split("."))})
            close = difflib.get_close_matches(pattern, parts, n=1)
            hint = f" Did you mean `{close[0]}`?" if close else ""
            raise ValueError(f"bad value {key}: `{pattern}` matches no parameter.{hint} There are: {', '.join(known)}")


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _hit(name: str, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(part, pattern) for part in (name, *name.split(".")))
