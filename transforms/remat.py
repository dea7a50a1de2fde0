"""Named `jax.checkpoint` policies: what the backward pass keeps of each layer's forward pass.

One table, used as `model.hidden(tokens, remat=remat("full"))`: the wrapper goes around the body of the scan over layers
(around the whole scan it would save nothing).
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transforms.offload import fetching, in_host
from transforms.sharding import partitions, shares
from transforms.tiling.ir.jaxprs import equations

_policies = jax.checkpoint_policies
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]

POLICIES: dict[str, Any] = {
    "full": _policies.nothing_saveable,
    "block": _policies.nothing_saveable,
    "dots": _policies.dots_saveable,
    "dots_no_batch": _policies.dots_with_no_batch_dims_saveable,
    "offload_dots": _policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}
BY_NAME: dict[str, Callable[[Sequence[str]], Any]] = {
    "names": lambda names: _policies.save_only_these_names(*names),
    "offload_names": lambda names: _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
OFFLOAD, SQRT = "offload", "sqrt"
MOVED = 2**31  # bytes that are moved to and from the host at once: of 2**32 libtpu's compiler dies (0.0.42.1)
CHOICES = ("none", *POLICIES, *BY_NAME, OFFLOAD, SQRT)


@dataclass(frozen=True)
class Policy:
    """A wrapper of a layer's body by a policy; `scan_layers` takes it as any wrapper.

    Attributes:
        wrap: `jax.checkpoint` by the policy, given `prevent_cse`.
        alone: whether the body is all that a loop does in a turn. Then nothing can merge the recomputation with the
            original, and the guard against it only costs code; where it is not, the guard also keeps the recomputation
            of one layer until the backward pass comes to it.
    """

    wrap: Callable[..., Any]
    alone: bool = True

    def __call__(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Return the body, which keeps what the policy says."""
        return self.wrap(body, prevent_cse=not self.alone)


@dataclass(frozen=True)
class Cycle:
    """One wrapper for each of some layers, over and over; `scan_layers` takes it where it takes a wrapper."""

    names: tuple[str, ...]
    wrappers: tuple[Wrapper | None, ...]

    def runs(self, first: int, count: int) -> Iterator[tuple[Wrapper | None, int, int]]:
        """Yield (wrapper, start, stop) of the runs of layers with one policy, among `count` from layer `first` on."""
        kinds = [(first + layer) % len(self.names) for layer in range(count)]
        start = 0
        for _, run in itertools.groupby(kinds, key=lambda kind: self.names[kind]):
            same = list(run)
            yield self.wrappers[same[0]], start, start + len(same)
            start += len(same)


@dataclass(frozen=True)
class Nested:
    """A wrapper for groups of layers and, inside each, one for every layer; `scan_layers` takes it as it takes a cycle.

    What is kept of all layers is kept of the groups alone; a group's layers keep theirs while the backward pass is
    there. That costs one more forward pass (https://arxiv.org/abs/1604.06174).

    Attributes:
        group: wraps the function of a group of layers.
        layer: wraps the body.
        every: how many layers make a group; None is the square root of their number, rounded up.
    """

    group: Wrapper
    layer: Wrapper
    every: int | None = None


Remat = Wrapper | Cycle | Nested


def remat(name: str, names: Sequence[str] = ()) -> Remat | None:
    """Return the wrapper for a layer's body, or None where everything is kept.

    Gradients are the same under every policy. From most memory and least arithmetic to the reverse: `none` keeps every
    intermediate, `dots` the results of matrix products, `dots_no_batch` those without batch dims (not attention's),
    `names` what `checkpoint_name` gave one of `names`, `full` (or `block`) the input of a layer, for a second forward
    pass. `offload` is `full` with those inputs in host memory: they are moved there, and no copy stays; likewise
    `offload_dots` is `dots_no_batch` and `offload_names` is `names` there.

    Several policies with commas between them take turns over the layers, `*` repeats one: `full*3,none`. With `/` a
    policy is for every so many layers, and inside such a group for each: `full/4` and `offload/2` keep a quarter and
    half of `full`, for one more forward pass; `sqrt` is `full` for every square root of the number of layers.

    Raises:
        ValueError: there is no policy of that name, or it needs names; and when a layer runs that lacks a name.
    """
    policy, nested, every = name.strip().partition("/")
    if policy == SQRT or nested:
        if policy not in ("full", "block", OFFLOAD, SQRT) or (policy == SQRT) == bool(nested):
            raise ValueError(f"cannot remat by {name!r}: give sqrt, or full or offload for every so many: full/4.")
        if nested and not (every.isdigit() and int(every)):
            raise ValueError(f"cannot remat by {name!r}: give a whole number of layers behind the slash: full/4.")
        kept = "full" if policy == SQRT else policy
        group, layer = (_wrapper(kept, held=f"input of {what}") for what in ("layers", "layer"))
        return Nested(group, layer, int(every or 0) or None)
    cycle: list[str] = []
    for part in map(str.strip, name.split(",")):
        policy, star, times = part.partition("*")
        count = int(times) if times.isdigit() else int(not star)
        if policy not in CHOICES or policy == SQRT or count < 1:
            raise ValueError(f"cannot remat by {part!r}: it is not a policy. Choose one of {', '.join(CHOICES)}.")
        cycle += [policy] * count
    wrappers = {policy: _wrapper(policy, tuple(names), len(set(cycle)) == 1) for policy in cycle}
    if len(wrappers) == 1:
        return wrappers[cycle[0]]
    return Cycle(tuple(cycle), tuple(wrappers[policy] for policy in cycle))


def apart_in_turns(
    remat: Remat | None, layer: Callable[..., Any], count: int
) -> tuple[Callable[..., Any], Remat | None]:
    """Return a layer as it is called in turns of several, and what `scan_layers` is told of these turns.

    So every layer keeps what it would alone. Of a cycle of policies each is for a whole turn.

    Args:
        remat: what is asked for.
        layer: the body of one layer.
        count: how many layers a turn has.
    """
    inside = lambda one: replace(one, alone=False) if isinstance(one, Policy) else one
    if remat is None or isinstance(remat, Cycle):
        return layer, remat
    if isinstance(remat, Nested):
        every = None if remat.every is None else max(1, remat.every // count)
        return inside(remat.layer)(layer), Nested(remat.group, lambda turn: turn, every)
    return inside(remat)(layer), None


def scan_layers(
    body: Callable[..., Any], carry: Any, stacked: Any, remat: Remat | None, first: int = 0, *, unroll: bool = False
) -> tuple[Any, Any]:
    """Return `jax.lax.scan(body, carry, stacked)`, where each layer keeps for the backward pass what `remat` says.

    Args:
        body: of one layer.
        carry: what goes from layer to layer.
        stacked: the layers' weights and whatever else differs between them; each layer's of what is in the memory of
            the host is fetched where it runs.
        remat: a wrapper of the body, a cycle of them, one for groups of layers, or None.
        first: the number of the first of these layers, where they are not all.
        unroll: whether the program has each layer apart, where nothing is kept for a backward pass.
    """
    if any(map(in_host, jax.tree.leaves(stacked))):
        body = fetching(body)
    if remat is None:
        return jax.lax.scan(body, carry, stacked, unroll=unroll)
    if not isinstance(remat, Cycle | Nested):
        return jax.lax.scan(remat(body), carry, stacked)
    count = jax.tree.leaves(stacked)[0].shape[0]
    if isinstance(remat, Nested):
        every = min(count, remat.every or math.isqrt(count - 1) + 1)
        layers = lambda carry, group: jax.lax.scan(remat.layer(body), carry, group)
        rest = lambda carry, stacked: jax.lax.scan(remat.group(body), carry, stacked)
        return _scan_groups(remat.group(layers), rest, carry, stacked, every, count - count % every)
    period = len(remat.names)
    whole = count // period * period if count >= 2 * period else 0

    def run(carry, stacked, start=0):
        made = []
        for wrapper, begin, end in remat.runs(first + start, jax.tree.leaves(stacked)[0].shape[0]):
            part = jax.tree.map(lambda leaf, begin=begin, end=end: leaf[begin:end], stacked)
            carry, out = jax.lax.scan(body if wrapper is None else wrapper(body), carry, part)
            made.append(out)
        return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *made)

    return _scan_groups(run, functools.partial(run, start=whole), carry, stacked, period, whole)


def _scan_groups(group, rest, carry, stacked, every: int, whole: int) -> tuple[Any, Any]:
    """Scan `group` over the `whole` first layers, in groups of so many, then `rest` over those that are left."""
    made = []
    if whole:
        groups = jax.tree.map(lambda leaf: leaf[:whole].reshape(-1, every, *leaf.shape[1:]), stacked)
        carry, out = jax.lax.scan(group, carry, groups)
        made.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), out))
    if whole < jax.tree.leaves(stacked)[0].shape[0]:
        carry, out = rest(carry, jax.tree.map(lambda leaf: leaf[whole:], stacked))
        made.append(out)
    return carry, made[0] if len(made) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *made)


def _offloaded(body, name: str, **how):
    """Return the body of a scan, wrapped to keep what it is given in host memory, by that name."""
    # The name is inside: of what is named outside, a copy would be kept.
    named = lambda carry, given: body(jax.tree.map(lambda leaf: _in_parts(leaf, name), carry), given)
    return jax.checkpoint(named, policy=BY_NAME["offload_names"]([name]), **how)


def _in_parts(leaf, name: str):
    """Return an array that is named, for a TPU in several parts where it is too large to be moved at once."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if (jax.default_backend() if device is None else device.platform) != "tpu" or not leaf.ndim:
        return checkpoint_name(leaf, name)
    own = leaf.size * leaf.dtype.itemsize // math.prod(shares(jax.typeof(leaf), dim) for dim in range(leaf.ndim))
    dim = max(range(leaf.ndim), key=lambda dim: (partitions(leaf)[dim] is None, leaf.shape[dim]))
    fewest = max(1, -(-own // MOVED))
    parts = next((n for n in range(fewest, leaf.shape[dim] + 1) if leaf.shape[dim] % n == 0), 1)
    if parts == 1:
        return checkpoint_name(leaf, name)
    return jnp.concatenate([checkpoint_name(part, name) for part in jnp.split(leaf, parts, axis=dim)], axis=dim)


def _wrapper(policy: str, names: tuple[str, ...] = (), alone: bool = True, held: str = "input of layer") -> Any:
    if policy == "none":
        return None
    if policy == OFFLOAD:
        return Policy(functools.partial(_offloaded, name=held))
    if policy in POLICIES:
        return Policy(functools.partial(jax.checkpoint, policy=POLICIES[policy]), alone)
    if not names:
        raise ValueError(f"cannot remat by {policy!r} without names: give those of the values to keep.")

    def named(body, **how):
        return _with_names(jax.checkpoint(body, policy=BY_NAME[policy](names), **how), body, policy, names)

    return Policy(named, alone)


def _with_names(wrapped, body, policy: str, names: tuple[str, ...]):
    """Return a wrapped body that first looks for the names: a policy passes over those that are not there."""

    @functools.wraps(body)
    def checked(*args):
        every = equations(jax.make_jaxpr(body)(*args).jaxpr)
        found = sorted({eqn.params["name"] for eqn in every if eqn.primitive.name == "name"})
        if missing := [name for name in names if name not in found]:
            raise ValueError(
                f"cannot remat by {policy!r}: no value is named {', '.join(map(repr, missing))}. "
                f"The layer has {', '.join(found) or 'no names'}."
            )
        return wrapped(*args)

    return checked
