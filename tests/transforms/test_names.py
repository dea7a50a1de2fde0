"""`axis="tokens"`: each array is cut where its annotation has that name, wherever the annotation stands."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, NewType, Optional, TypedDict, Union

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, Int, PyTree, Shaped, jaxtyped

from tests.transforms import stringly
from transforms import tile
from transforms.tiling.inputs.axes import place
from transforms.tiling.ir.placement import WHOLE, Tiled

pytestmark = pytest.mark.symbolic

H, W, Y = jnp.ones((24, 5)), jnp.ones((5, 7)), jnp.zeros(24, int)
Hidden = Float[Array, "tokens embed"]
Labels = Int[Array, "tokens"]
Weights = Float[Array, "embed vocab"]


def loss(h: Hidden, w: Weights, y: Labels) -> Float[Array, ""]:
    return (jax.nn.logsumexp(h @ w, -1) + y).mean()


@jax.tree_util.register_dataclass
@dataclass
class Batch:
    labels: Labels
    hidden: Hidden
    scale: float = 1.0


class Head(eqx.Module):
    weight: Weights
    bias: Float[Array, "vocab"] | None = None

    def __call__(self, h: Hidden) -> Any:
        return h @ self.weight

    @eqx.filter_jit
    def jitted(self, h: Hidden) -> Any:
        return h @ self.weight


class Deep(Head):
    rows: Shaped[Array, "tokens"] = eqx.field(default_factory=lambda: Y)


Targets = NewType("Targets", Labels)


class Pair(NamedTuple):
    labels: Labels
    weight: Weights


class Record(TypedDict):
    y: Labels
    w: Weights


def batched(batch: Batch): ...
def anything(x): ...
def moved(h: Float[Array, "embed tokens"]): ...
def variadic(h: Float[Array, "*batch tokens embed"]): ...
def tail(h: Float[Array, "tokens ... embed"]): ...
def broadcast(h: Hidden, m: Float[Array, "#tokens"]): ...
def fixed(h: Float[Array, "tokens 5"], w: Float[Array, "_ 7"]): ...
def labelled(h: Float[Array, "tokens=24 _embed"]): ...
def many(*xs: Hidden, **ys: Labels): ...
def key(h: Hidden, *, y: Labels, w: Weights): ...
def union(h: Float[Array, "embed"] | Hidden | None): ...
def old_union(h: Optional[Union[Hidden, Float[Array, "embed"]]]): ...  # noqa: UP007, UP045
def annotated(h: Annotated[Hidden, "a note"], y: Targets): ...
def pair(p: Pair): ...
def record(r: Record): ...
def containers(a: list[Hidden], b: tuple[Weights, Labels], c: dict[str, Hidden], d: Sequence[Labels]): ...
def tree(t: PyTree[Hidden]): ...


partial = functools.partial(loss, w=W)
C = Tiled(0)
READS = {
    "function": (loss, (H, W, Y), {}, [C, WHOLE, C]),
    "keywords, in alphabetical order": (loss, (H,), {"y": Y, "w": W}, [C, WHOLE, C]),
    "keyword-only": (key, (H,), {"y": Y, "w": W}, [C, WHOLE, C]),
    "another dimension": (moved, (H.T,), {}, [Tiled(1)]),
    "jit": (jax.jit(loss), (H, W, Y), {}, [C, WHOLE, C]),
    "equinox' jit": (eqx.filter_jit(loss), (H, W, Y), {}, [C, WHOLE, C]),
    "jaxtyped": (jaxtyped(typechecker=None)(loss), (H, W, Y), {}, [C, WHOLE, C]),
    "partial": (partial, (H,), {"y": Y}, [C, C]),
    "jit of a partial": (jax.jit(functools.partial(loss, H)), (W, Y), {}, [WHOLE, C]),
    "bound method": (Head(W).__call__, (H,), {}, [C]),
    "module": (Head(W), (H,), {}, [C]),
    "jitted method": (Head(W).jitted, (H,), {}, [C]),
    "strings": (stringly.loss, (H, W, Y), {}, [C, WHOLE, C]),
    "fields as strings": (anything, (stringly.Batch(H, Y),), {}, [C, C]),
    "dataclass": (batched, (Batch(Y, H),), {}, [C, C]),
    "module among the arguments": (anything, (Head(W),), {}, None),
    "inherited fields": (anything, (Deep(W, None, Y),), {}, [WHOLE, C]),
    "module in an unannotated list": (anything, ([{"x": Deep(W)}, H],), {}, [WHOLE, C, WHOLE]),
    "named tuple": (pair, (Pair(Y, W),), {}, [C, WHOLE]),
    "typed dict": (record, ({"y": Y, "w": W},), {}, [WHOLE, C]),
    "containers": (containers, ([H, H], (W, Y), {"x": H}, [Y]), {}, [C, C, WHOLE, C, C, C]),
    "tree": (tree, ({"a": H, "b": [H]},), {}, [C, C]),
    "starred": (many, (H, H), {"y": Y}, [C, C, C]),
    "union": (union, (H,), {}, [C]),
    "typing's union": (old_union, (H,), {}, [C]),
    "annotated and new types": (annotated, (H, Y), {}, [C, C]),
    "after variadic": (variadic, (jnp.ones((2, 3, 24, 5)),), {}, [Tiled(2)]),
    "before variadic": (tail, (jnp.ones((24, 3, 5)),), {}, [C]),
    "broadcast": (broadcast, (H, jnp.ones(1)), {}, [C, WHOLE]),
    "broadcast and full": (broadcast, (H, jnp.ones(24)), {}, [C, C]),
    "sizes and blanks": (fixed, (H, W), {}, [C, WHOLE]),
    "a size with its name": (labelled, (H,), {}, [C]),
    "static arguments": (loss, (H, "w", Y), {}, [C, C]),
}


@pytest.mark.parametrize("name", READS)
def test_cuts_where_the_annotation_has_the_name(name):
    fn, args, kwargs, expected = READS[name]
    if expected is None:
        with pytest.raises(ValueError, match=r"'tokens' is none of the names in .*: embed, vocab"):
            place(fn, "tokens", args, kwargs)
        return
    assert place(fn, "tokens", args, kwargs) == (expected, 24)


def test_default_values_stand_where_they_meet_what_is_cut():
    def fn(h: Hidden, y: Labels = Y + 2) -> Any:
        return (h.sum(-1) * y).sum()

    assert tile(fn, "tokens", 4)(H) == fn(H)
    assert tile(fn, "tokens", 4).plan(H).tiles == 4


def test_a_whole_call_by_name():
    tiled = jax.value_and_grad(tile(loss, "tokens", 5), (0, 1))
    want = jax.value_and_grad(loss, (0, 1))(H, W, Y)
    assert all(
        jnp.allclose(a, b, atol=1e-6) for a, b in zip(*map(jax.tree.leaves, (tiled(H, W, Y), want)), strict=True)
    )


def expression(h: Float[Array, "tokens*2 embed"]): ...
def offset(h: Hidden, ends: Int[Array, "tokens+1"]): ...
def several(h: Float[Array, "*tokens embed"]): ...
def twice(scores: Float[Array, "tokens tokens"]): ...
def open_union(h: Hidden | Float[Array, "embed tokens"]): ...
def unreadable(h: "Missing[tokens]"): ...
def optional(h: Float[Array, "rows embed"], y: Labels | None = None): ...


WRONG = {
    "typo": (
        loss,
        "token",
        (H, W, Y),
        r"'token' is none of the names in .*`loss`: embed, tokens, vocab. Did .*'tokens'\?",
    ),
    "no annotations": (anything, "tokens", (H,), r"they name no dimension. Annotate .* \"tokens embed\""),
    "not in this call": (optional, "tokens", (H,), r"'tokens' occurs in .*`optional`, but in no array of this call"),
    "product": (expression, "tokens", (H,), r"`h` is annotated 'tokens\*2 embed', where `tokens\*2` is an expression"),
    "sum": (
        offset,
        "tokens",
        (H, jnp.zeros(25, int)),
        r"`ends` is annotated 'tokens\+1', where `tokens\+1` is an expr",
    ),
    "variadic": (several, "tokens", (H,), r"where `\*tokens` stands for several dimensions"),
    "twice": (
        twice,
        "tokens",
        (jnp.ones((4, 4)),),
        r"`scores` is annotated 'tokens tokens', which has 'tokens' 2 times",
    ),
    "open": (open_union, "tokens", (H,), r"leaves open which dimension is 'tokens': .* both fit float32\[24,5\]"),
    "rank": (loss, "tokens", (H[0], W, Y), r"`h` is float32\[5\], but its annotation says 'tokens embed'"),
    "lengths": (
        loss,
        "tokens",
        (H, W, Y[1:]),
        r"y: dimension 0 of int\w+\[23\] has 23\n  One name stands for one length",
    ),
    "unreadable": (unreadable, "tokens", (H,), r"annotation of `h` could not be read: NameError: name 'Missing'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses_a_name_that_is_not_one_dimension(name):
    fn, axis, args, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        tile(fn, axis, 2)(*args)
