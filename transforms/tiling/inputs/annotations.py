"""The dimension of each argument that has a name: `axis="tokens"` read off jaxtyping annotations.

Annotations are those of the function's parameters, whatever it is wrapped in, and of the fields of the dataclasses,
`eqx.Module`s and named tuples among the arguments.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from transforms.tiling.ir.graph import describe

Path = tuple[Any, ...]
Leaf = tuple[str, Any, int | None]  # an array's name for messages, the array, its dimension of that name


def find(fn: Callable[..., Any], axis: str, args: Sequence[Any], kwargs: Mapping[str, Any], whole: int) -> list[Leaf]:
    """Return every leaf of `(args, kwargs)` with its dimension that is called `axis`; the first `whole` have none.

    Raises:
        ValueError: no annotation has that name, or one has it where it names no single dimension.
    """
    reader = _Reader(axis)
    leaves: list[Leaf] = []
    for i, (name, annotation, value) in enumerate(_parameters(fn, args, kwargs, reader)):
        found = {} if i < whole else dict(reader.walk(name, annotation, value, ()))
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            leaves.append((name + jax.tree_util.keystr(path), leaf, found.get(path)))
    if all(dim is None for _, _, dim in leaves):
        raise ValueError(_unknown(fn, reader))
    return leaves


def _unknown(fn: Callable[..., Any], reader: _Reader) -> str:
    where = f"the annotations of `{getattr(fn, '__name__', fn)}`"
    unread = "".join(f"\n  The annotation of `{k}` could not be read: {e}." for k, e in reader.unread.items())
    if reader.axis in reader.names:
        return f"tile: axis={reader.axis!r} occurs in {where}, but in no array of this call.{unread}"
    if not reader.names:
        return (
            f"tile: axis={reader.axis!r} is to be found in {where}, but they name no dimension. Annotate its arguments "
            f'with jaxtyping, as in `x: Float[Array, "{reader.axis} embed"]`, or pass an int.{unread}'
        )
    close = difflib.get_close_matches(reader.axis, reader.names, 1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    return (
        f"tile: axis={reader.axis!r} is none of the names in {where}: {', '.join(sorted(reader.names))}.{meant}{unread}"
    )


# -------------------------------------------------------------------------------------------------- a call's parameters


def _parameters(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], reader: _Reader
) -> Iterator[tuple[str, Any, Any]]:
    """Each argument's name, annotation and value: positional ones, then keywords in alphabetical order."""
    scope, parameters = getattr(_innermost(fn), "__globals__", {}), parameters_of(fn)
    hints = {p.name: reader.evaluate(p.name, p.annotation, scope) for p in parameters}
    for hint in hints.values():
        reader.collect(hint)
    ordered = positional(parameters)
    rest = {p.kind: p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    for i, value in enumerate(args):
        name = ordered[i] if i < len(ordered) else rest.get(inspect.Parameter.VAR_POSITIONAL, "args")
        yield name if i < len(ordered) else f"{name}[{i - len(ordered)}]", hints.get(name), value
    for name in sorted(kwargs):
        yield name, hints.get(name, hints.get(rest.get(inspect.Parameter.VAR_KEYWORD, ""))), kwargs[name]


def parameters_of(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """A function's parameters, as far as its signature tells them."""
    try:
        return list(inspect.signature(_plain(fn)).parameters.values())
    except (TypeError, ValueError):
        return []


def positional(parameters: Sequence[inspect.Parameter]) -> list[str]:
    """The names of those that may be given by position."""
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _plain(fn: Any) -> Any:
    """`functools.partial` in place of Equinox's, whose signature Python cannot see."""
    if not isinstance(fn, functools.partial) and all(hasattr(fn, k) for k in ("func", "args", "keywords")):
        return functools.partial(_plain(fn.func), *fn.args, **fn.keywords)
    return fn


def _innermost(fn: Any) -> Any:
    """The function with a body: what is wrapped, bound, partially applied, or an object's `__call__`."""
    while True:
        inner = next((getattr(fn, k) for k in ("__wrapped__", "__func__", "func") if hasattr(fn, k)), None)
        if inner is None and not hasattr(fn, "__globals__"):
            inner = type(fn).__call__
        if inner is None or inner is fn or isinstance(inner, types.WrapperDescriptorType):
            return fn
        fn = inner


# ------------------------------------------------------------------------------------------------ annotations of values


class _Reader:
    """Follows values along their annotations, and remembers all names of dimensions that it meets."""

    def __init__(self, axis: str):
        self.axis = axis
        self.names: set[str] = set()
        self.unread: dict[str, str] = {}

    def evaluate(self, name: str, annotation: Any, scope: dict[str, Any]) -> Any:
        """The annotation itself, of one that may be, or hold, strings; None for one that cannot be read."""
        if annotation is inspect.Parameter.empty:
            return None
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            return typing.get_type_hints(holder, scope, {}, include_extras=True)[name]
        except Exception as error:
            self.unread[name] = f"{type(error).__name__}: {error}"
            return None

    def collect(self, annotation: Any) -> None:
        """Remember the names in an annotation, whether or not a value goes with it."""
        for member in _alternatives(annotation):
            if hasattr(member, "dim_str"):
                self.names |= {name for dim in _dims(member.dim_str) if dim.plain for name in dim.mentions}
            elif hasattr(member, "leaftype"):
                self.collect(member.leaftype)
            else:
                for inner in typing.get_args(member):
                    self.collect(inner)

    def walk(self, name: str, annotation: Any, value: Any, path: Path) -> Iterator[tuple[Path, int]]:
        """The paths of the arrays in `value` that have the dimension, and which one it is."""
        members = _alternatives(annotation)
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            dim = self.dim(name + jax.tree_util.keystr(path), [m for m in members if hasattr(m, "dim_str")], value)
            if dim is not None:
                yield path, dim
            return
        if trees := [m for m in members if hasattr(m, "leaftype")]:
            for inner, leaf in jax.tree_util.tree_leaves_with_path(value):
                yield from self.walk(name, trees[0].leaftype, leaf, (*path, *inner))
            return
        for key, inner, child in self.children(members, value):
            yield from self.walk(name, inner, child, (*path, key))

    def children(self, members: list[Any], value: Any) -> Iterator[tuple[Any, Any, Any]]:
        """What a container holds: key, annotation, value."""
        if isinstance(value, Mapping):
            typed = next((m for m in members if typing.is_typeddict(m)), None)
            inner = next((typing.get_args(m)[1] for m in members if len(typing.get_args(m)) == 2), None)
            hints = {} if typed is None else self.fields(typed)
            for key, child in value.items():
                yield jax.tree_util.DictKey(key), hints.get(key, inner), child
        elif dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
            hints = self.fields(type(value))
            names = value._fields if hasattr(value, "_fields") else [f.name for f in dataclasses.fields(value)]
            for field in names:
                if hasattr(value, field):
                    yield jax.tree_util.GetAttrKey(field), hints.get(field), getattr(value, field)
        elif isinstance(value, (tuple, list)):
            hints = next((h for m in members if (h := _items(m, len(value))) is not None), [None] * len(value))
            for i, (hint, child) in enumerate(zip(hints, value, strict=True)):
                yield jax.tree_util.SequenceKey(i), hint, child

    def fields(self, owner: type) -> dict[str, Any]:
        """The annotations of a class, its own and those that it inherits."""
        found = {}
        for cls in reversed(owner.__mro__):
            scope = vars(sys.modules.get(cls.__module__, types))
            for name, annotation in inspect.get_annotations(cls).items():
                found[name] = self.evaluate(f"{owner.__name__}.{name}", annotation, scope | vars(cls))
        for hint in found.values():
            self.collect(hint)
        return found

    def dim(self, name: str, members: list[Any], array: Any) -> int | None:
        """The dimension of an array that has the name, by the alternatives that its annotation leaves."""
        fitting = [m for m in members if _fits(_dims(m.dim_str), array.ndim)]
        if members and not fitting:
            shapes = " or ".join(repr(m.dim_str) for m in members)
            raise ValueError(f"tile: `{name}` is {describe(array)}, but its annotation says {shapes}.")
        found = {self.position(name, m.dim_str, array) for m in fitting}
        if len(found) > 1:
            shapes = " and ".join(repr(m.dim_str) for m in fitting)
            raise ValueError(
                f"tile: the annotation of `{name}` leaves open which dimension is {self.axis!r}: {shapes} both fit "
                f"{describe(array)}. Pass `axis` as a tuple or dict of ints."
            )
        return found.pop() if found else None

    def position(self, name: str, text: str, array: Any) -> int | None:
        found, dims = [], _dims(text)
        variadic = next((i for i, d in enumerate(dims) if d.variadic), len(dims))
        for i, dim in enumerate(dims):
            if self.axis not in dim.mentions:
                continue
            if not dim.plain:
                kind = "stands for several dimensions" if dim.variadic else "is an expression"
                raise ValueError(
                    f"tile: `{name}` is annotated {text!r}, where `{dim.text}` {kind}; what is cut must be one "
                    f"dimension that is {self.axis!r} itself. Pass `axis` as a tuple or dict of ints."
                )
            at = i if i < variadic else array.ndim - len(dims) + i
            if not (dim.broadcasts and array.shape[at] == 1):
                found.append(at)
        if len(found) > 1:
            raise ValueError(
                f"tile: `{name}` is annotated {text!r}, which has {self.axis!r} {len(found)} times. "
                "Name the two differently, or pass `axis` as a tuple or dict of ints."
            )
        return found[0] if found else None


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union, without what is only wrapped around them."""
    if annotation is None:
        return []
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [m for inner in typing.get_args(annotation) for m in _alternatives(inner)]
    if typing.get_origin(annotation) is typing.Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    for wrapped in ("__supertype__", "__value__"):  # NewType, and the `type` statement
        if hasattr(annotation, wrapped):
            return _alternatives(getattr(annotation, wrapped))
    return [annotation]


def _items(member: Any, count: int) -> list[Any] | None:
    """The annotations of a sequence's items, if `member` is one of a sequence of that length."""
    inner = list(typing.get_args(member))
    if typing.get_origin(member) is tuple and not (len(inner) == 2 and inner[1] is Ellipsis):
        return inner if len(inner) == count else None
    return [inner[0]] * count if inner and typing.get_origin(member) is not None else None


@dataclasses.dataclass(frozen=True)
class _Dim:
    """One dimension of an annotation; `plain` if it is a name, and nothing else, of one dimension."""

    text: str
    mentions: frozenset[str]
    plain: bool
    variadic: bool
    broadcasts: bool


@functools.lru_cache(1024)
def _dims(text: str) -> tuple[_Dim, ...]:
    dims = []
    for word in text.split():
        rest = word.lstrip("#*?_")
        marks = word[: len(word) - len(rest)]
        label = rest.split("=")[0]  # "rows=4": a size with its name
        variadic = "*" in marks or rest == "..."
        mentions = frozenset() if "_" in marks else frozenset(re.findall(r"(?<![\w.{])[A-Za-z_]\w*", label))
        plain = label.isidentifier() and bool(mentions) and not variadic
        dims.append(_Dim(word, mentions, plain, variadic, "#" in marks))
    return tuple(dims)


def _fits(dims: Sequence[_Dim], rank: int) -> bool:
    count = sum(not d.variadic for d in dims)
    return count <= rank if any(d.variadic for d in dims) else count == rank
