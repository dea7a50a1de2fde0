"""A tiled program: a jaxpr, where its inputs stand, and the loops that run it. Its derivatives are tiled programs."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.stages import Wrapped

from transforms.layout import dual, like, shares, varying
from transforms.tiling.analysis.limits import Limits, gathered, looked_up
from transforms.tiling.analysis.propagate import analyse
from transforms.tiling.autodiff.chain_split import separate
from transforms.tiling.autodiff.custom_rules import differentiated, has_custom_vjp, narrow, replaced, ruled, scales
from transforms.tiling.autodiff.policy import Keeping, keeping
from transforms.tiling.autodiff.residuals import Residuals, residuals_of
from transforms.tiling.autodiff.steps import computed_again
from transforms.tiling.frontend.flatten import evaluate, flatten
from transforms.tiling.ir.dependence import Dependence
from transforms.tiling.ir.dump import dump
from transforms.tiling.ir.effects import silence, silence_recomputed
from transforms.tiling.ir.errors import TileError, explained, rules_explained
from transforms.tiling.ir.facts import Analysis
from transforms.tiling.ir.graph import Graph, Node, describe, elements, nbytes
from transforms.tiling.ir.jaxprs import axis_names, trimmed
from transforms.tiling.ir.loops import Schedule
from transforms.tiling.ir.obstacles import Obstacle, Refusal
from transforms.tiling.ir.placement import WHOLE, Placement, Span, Tiled, Whole, wide
from transforms.tiling.ir.walks import ancestors, depends, mixes
from transforms.tiling.lower import scan
from transforms.tiling.passes.driver import planned
from transforms.tiling.primitives import has, having
from transforms.tiling.regions import shard_map
from transforms.tiling.schedule import Policy

SMALLEST = 512  # of the second cut's tiles: smaller matrix products run slower
PIECE = 1 << 20  # bytes of a gradient's piece, at least
T = TypeVar("T")
Combine = Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]  # outputs and gradients, of a program's results
MOVES = having("respreads", "devices")
NO_REVERSE = "Reverse-mode differentiation does not work"  # what JAX says of a loop of unknown length


@contextlib.contextmanager
def collections_paused() -> Generator[None]:
    """Have Python look for no garbage meanwhile.

    A trace and a plan are made of many small objects that live as long as they do. Each search goes through all of them
    again, half of the time that it takes to plan a deep model.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


@dataclasses.dataclass(frozen=True)
class Options:
    """How the cut axis is walked: its length, that of a tile, and what `tile` was told."""

    total: int
    size: int
    gather: str
    accumulate: Any
    policy: Policy | None = None  # what is kept from one loop to another, rather than computed again
    lowmem: bool = False  # cut the gradients' programs along another axis too
    outline: bool = False  # scans run on whole operands, their bodies in tiles, even where they could run within a tile
    sync: str = "once"  # gradients of weights are summed over the devices once, or with every tile
    reduce_dtype: Any = None  # in which that is done, if not in the gradient's own
    shares: int = 1  # over how many devices the cut axis is spread: each walks its own share
    floor: int = 0  # bytes of an array that may be completed whatever the sizes of inputs and outputs
    named: tuple[tuple[Any, int], ...] = ()  # axes of `jax.vmap` around that the function names, and their lengths

    @property
    def span(self) -> Span:
        """The first tile."""
        return Span(0, self.size, self.total, self.accumulate)


_LOOKED_INTO = contextvars.ContextVar("looked_into", default=False)


@contextlib.contextmanager
def looked_into() -> Generator[None]:
    """Within, what is traced will be planned: a loop there must show which arrays it reads, and which it writes."""
    before = _LOOKED_INTO.set(True)
    try:
        yield
    finally:
        _LOOKED_INTO.reset(before)


def within(named: Sequence[tuple[Any, int]], fn: Callable[[], T]) -> T:
    """What `fn` returns where axes of `jax.vmap` have their names: JAX differentiates and transposes outside of it."""
    if not named:
        return fn()
    found: list[T] = []
    jax.make_jaxpr(lambda: found.append(fn()), axis_env=named)()
    return found[0]


def remembered(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a program that computes what it returns once for the same arguments."""

    @functools.wraps(method)
    def known(self: Program, *args: Any) -> Any:
        key = (method, *(tuple(a) if isinstance(a, list) else a for a in args))
        if key not in self._derived:
            self._derived[key] = within(self.options.named, lambda: method(self, *args))
        return self._derived[key]

    return known


@dataclasses.dataclass(eq=False)
class Program:
    """`closed` with its inputs at `placements`; the outputs numbered in `wide` are left in the dtype of sums."""

    closed: ClosedJaxpr
    placements: tuple[Placement, ...]
    options: Options
    wide: frozenset[int] = frozenset()
    reuse: scan.Reuse = dataclasses.field(default_factory=dict)  # outputs that may take inputs' buffers,
    unseen: bool = False  # where no program around looks into this one's loops
    also: Residuals | None = None  # what its loops end in, returned after the outputs
    given: tuple[Residuals, int] | None = None  # those of another program, and the first input that holds them
    values: Program | None = None  # another program, whose results are this one's first ones
    cut: Program | None = None  # what runs in its place: the loops of this one, cut along another axis too
    _derived: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @functools.cached_property
    def graph(self) -> Graph:
        """The program, flat."""
        return flatten(self.closed, together=self.options.sync == "tile")

    @functools.cached_property
    def folded(self) -> Graph:
        """The same, but that calls with a derivative rule stay closed: their bodies may go through integers."""
        return flatten(self.closed, custom=False)

    @property
    def is_one_tile(self) -> bool:
        """Whether there is nothing to cut: the program runs as it is."""
        return self.options.size >= self.options.total and not self.options.lowmem

    @property
    def count(self) -> int:
        """How many results `run` has."""
        return len(self.closed.out_avals) + (len(self.also.values) if self.also is not None else 0)

    @property
    def plan(self) -> Schedule:
        return self._planned[0]

    @property
    def residuals(self) -> Residuals:
        """What the loops end in, apart from the outputs, that derivatives need too."""
        return self._planned[1]

    @property
    def refusal(self) -> Refusal | None:
        """Why there is no plan, if there is none."""
        return self._attempt if isinstance(self._attempt, Refusal) else None

    @property
    def _planned(self) -> tuple[Schedule, Residuals]:
        if isinstance(self._attempt, Refusal):
            raise TileError(self._attempt.message)
        return self._attempt

    @functools.cached_property
    def _attempt(self) -> tuple[Schedule, Residuals] | Refusal:
        if self.cut is not None:  # of whose loops nothing is kept
            found = self.cut._attempt
            return found if isinstance(found, Refusal) else (found[0], Residuals(self.graph, ()))
        return within(self.options.named, self._attempted)

    @collections_paused()
    def _attempted(self) -> tuple[Schedule, Residuals] | Refusal:
        graph, twins = self.graph.copied()  # planning changes it
        if self.also is not None:
            graph.reset(graph.nodes, [*graph.outputs, *self.also.among(graph)])
        if self.given is not None:
            self.given[0].use(graph, self.given[1])
        made = planned(graph, self.placements, self.limits, self.count - len(self.closed.out_avals))
        if isinstance(made, Refusal):
            return made
        plan, found = made
        dump(plan)
        return plan, residuals_of(self.graph, [twins[v] for v in found if v in twins], self.limits.largest)

    @functools.cached_property
    def limits(self) -> Limits:
        """What may be completed: arrays no larger than the largest input or output, labels counting as their rows.

        A weight that devices share counts as whole for sums that they exchange once: its gradient is so until then.
        """
        avals = [*self.closed.in_avals, *self.closed.out_avals]
        inexact = lambda aval: jnp.issubdtype(aval.dtype, jnp.inexact)
        inputs = [(a, p) for a, p in zip(self.closed.in_avals, self.placements, strict=True) if inexact(a)]
        cut, whole = ([a for a, p in inputs if isinstance(p, Tiled) == tiled] for tiled in (True, False))
        wider = lambda a: wide(a.dtype, self.options.accumulate).itemsize
        largest = max([self.options.floor, *map(nbytes, avals), *looked_up(self.graph, self.placements)])
        sums = [nbytes(a) // a.dtype.itemsize * wider(a) for a in avals if inexact(a)]
        sums += [elements(a.shape) * wider(a) for a in whole if self.options.sync == "once"]
        together = sum(elements(a.shape) * wider(a) for a in cut)
        together = max([together, *gathered(self.graph, self.placements, max(largest, together))])
        summed, longest = max(sums, default=0), 2 * self.options.size
        return Limits(self.options.gather, largest, self.options, Program, together, summed, longest=longest)

    @property
    def run(self) -> Wrapped:
        """The program's outputs. Differentiating through this differentiates the loops; use `derive.call`."""
        return self._runs[self.unseen and _LOOKED_INTO.get()]

    @functools.cached_property
    def together(self) -> Program:
        """The same, of whose sums over devices none is left for later: not cut again, which leaves some."""
        values = None if self.values is None else self.values.together
        options = dataclasses.replace(self.options, sync="tile")
        return dataclasses.replace(self, options=options, values=values, cut=None)

    def mapped(self, given: Sequence[bool], name: Any, differing: bool = True) -> list[bool]:
        """Which results differ along a `jax.vmap` of this name whose arguments `given` do; or depend on these."""
        first = [] if self.values is None else self.values.mapped(given, name, differing)
        own = [*Dependence(name, differing).of(self.closed, given), *[True] * (self.count - len(self.closed.out_avals))]
        return [*first, *own[len(first) :]]

    def traced(self, *args: Any) -> ClosedJaxpr:
        """What `run` computes of arguments of these types."""
        return within(self.options.named, lambda: self.run.trace(*args).jaxpr)

    @functools.cached_property
    def _runs(self) -> tuple[Wrapped, Wrapped]:
        @collections_paused()
        def run(*args: Any, reuse: scan.Reuse) -> list[Any]:
            return scan.run(self.plan, args, self.wide, reuse=reuse)

        in_place, apart = (functools.partial(run, reuse=reuse) for reuse in (self.reuse, {}))
        return jax.jit(in_place), jax.jit(apart)

    @property
    def output_placements(self) -> tuple[Placement, ...]:
        """How a cotangent of each output is cut."""
        facts = [self.plan.analysis.fact(v).placement for v in self.plan.analysis.graph.outputs]
        return tuple(p if isinstance(p, Tiled) else WHOLE for p in facts)

    @collections_paused()
    def derive(
        self, fn: Any, extra: Sequence[tuple[Any, Placement]], wide: Iterable[int] = (), given: int = 0
    ) -> Program:
        """The tiled program of `fn(*inputs, *extra)`, a function derived from this one.

        The last `given` of its inputs are tangents or cotangents: it has those side effects that depend on them.
        """
        avals = [*self.closed.in_avals, *(aval for aval, _ in extra)]
        with explained(), rules_explained(), looked_into():
            closed = jax.make_jaxpr(fn)(*(like(a) for a in avals))
        closed = silence(closed, given) if given else silence_recomputed(closed)
        placements = (*self.placements, *(p for _, p in extra))
        return Program(closed, placements, self.options, frozenset(wide), values=None if extra else self)

    # --------------------------------------------------------------------------------------------------- derivatives

    def differentiable(self, active: Sequence[int]) -> tuple[list[int], list[int]]:
        """The outputs that depend differentiably on the inputs `active`, and those of `active` that matter to them."""
        graph = self.folded
        reached = depends(graph, {graph.inputs[i] for i in active}, differentiably=True)
        outs = [i for i, v in enumerate(graph.outputs) if v in reached and jnp.issubdtype(v.dtype, jnp.inexact)]
        used = ancestors([graph.outputs[i] for i in outs])
        return outs, [i for i in active if graph.inputs[i] in used]

    @remembered
    def in_one_pass(self, outs: Sequence[int], active: Sequence[int]) -> bool:
        """Whether the outputs `outs` are one scalar whose gradients the forward loops can form, to be scaled later.

        Not where an array of them has a narrower exponent than float32: it would overflow, or vanish, before the
        caller's loss scale reaches it. Nor where each device of a `jax.shard_map`, or each element of a `jax.vmap`, has
        its own scalar of what it shares or exchanges with others, whose cotangents may differ.
        """
        if self.also is not None or not self.is_scalar(outs, active):
            return False
        own, active = varying(self.closed.out_avals[outs[0]]), tuple(active)
        if any(own - varying(self.closed.in_avals[i]) for i in active):
            return False
        joint = self._joint(self.closed, active, outs[0])
        if joint is None or not scales(self.closed.jaxpr, active) or narrow(joint.closed.jaxpr):
            return False
        return not (axis_names({"jaxpr": joint.closed}) and self._exchanges(outs[0], active, own))

    def _exchanges(self, out: int, active: Sequence[int], own: frozenset[str]) -> bool:
        """Whether the cotangent of a scalar, which varies along the axes `own`, meets those that others have."""

        def pulled(*both: Any) -> tuple[Any, ...]:
            _, vjp, _ = jax.vjp(*self.chosen(both[:-1], active, [out]), has_aux=True)
            return vjp([both[-1]])

        graph = self.derive(pulled, [(self.closed.out_avals[out], WHOLE)]).graph
        reached = depends(graph, {graph.inputs[-1]})
        return any(mixes(node, own) and not reached.isdisjoint(node.inputs) for node in graph.nodes)

    @functools.cached_property
    def scales(self) -> bool:
        """Whether cotangents of its results enter its gradients linearly."""
        return within(self.options.named, lambda: scales(self.closed.jaxpr, range(len(self.closed.in_avals))))

    def is_scalar(self, outs: Sequence[int], active: Sequence[int]) -> bool:
        """Whether the outputs `outs` are one real scalar."""
        avals = [self.closed.out_avals[i] for i in outs]
        real = all(jnp.issubdtype(a.dtype, jnp.floating) for a in (*avals, *(self.closed.in_avals[i] for i in active)))
        return len(avals) == 1 and avals[0].shape == () and real

    @remembered
    def _joint(self, closed: ClosedJaxpr, active: tuple[int, ...], out: int) -> Program | None:
        """The outputs and the gradients of one; None where JAX has no reverse mode (a loop of unknown length)."""
        count = len(self.closed.out_avals)
        wide = [*self.wide, *range(count, count + len(active))]
        try:
            return self.derive(functools.partial(self._values_and_gradients, closed, active, out), (), wide)
        except ValueError as error:
            if NO_REVERSE not in str(error):
                raise
            return None

    def _values_and_gradients(
        self, closed: ClosedJaxpr, active: tuple[int, ...], out: int, *args: Any
    ) -> tuple[Any, ...]:
        (value,), vjp, outs = jax.vjp(*self.chosen(args, active, [out], closed=closed), has_aux=True)
        return (*outs, *vjp([jnp.ones_like(value)]))

    def _in_reverse(self, derived: Callable[[ClosedJaxpr], Program]) -> Program:
        """What `derived` makes of the program; where that is refused, of the one of whose scans less is kept."""
        made = derived(self.closed)
        if self._steps_again is None or made.refusal is None:
            return made
        again = derived(self._steps_again)
        return made if again.refusal else again

    @functools.cached_property
    def _steps_again(self) -> ClosedJaxpr | None:
        """The same program with `jax.checkpoint` around the bodies of its scans, unless a policy says what is kept."""
        cut = [isinstance(p, Tiled) for p in self.placements]
        return computed_again(self.closed, cut, self.limits.largest) if self.keeping is None else None

    def chosen(
        self,
        args: Sequence[Any],
        active: Sequence[int],
        outs: Sequence[int],
        kept: Sequence[Any] | None = None,
        closed: ClosedJaxpr | None = None,
    ) -> tuple[Any, ...]:
        """A function of the inputs `active`, and those: it returns the outputs `outs`, and beside them all outputs.

        `kept`: what was kept of an evaluation, which is not computed again. `closed`: what is run, if not the program.
        """
        fn = jaxpr_as_fun(closed or self.closed)

        def primal(*chosen: Any) -> tuple[list[Any], list[Any]]:
            full = replaced(args, active, chosen)
            results = fn(*full) if self.keeping is None else self.keeping.outputs(full, kept)
            return [results[i] for i in outs], results

        return (primal, *(args[i] for i in active))

    @remembered
    def gradient(self, active: tuple[int, ...], out: int) -> tuple[Program, Combine]:
        """All outputs, and the gradients of the scalar output `out`, in one pass if there is a way.

        A program, and what makes them of its results; gradients are in the dtype of sums.
        """
        made, count = lambda closed: self._joint(closed, active, out), len(self.closed.out_avals)
        joint = self._in_reverse(made)  # after `in_one_pass` there is one
        straight = cut_again(joint, active), lambda results: (list(results[:count]), list(results[count:]))
        split = separate(self.closed, self.placements, self.limits, active, out)
        if split is None:
            return straight
        parted = self.derive(lambda *args: split.joint(args, active), (), [*self.wide, *split.wide(active)])
        # More than one inner sum may mean more products than running the forward twice.
        if parted.plan.flops > joint.plan.flops:
            return straight
        return cut_again(parted, active), functools.partial(split.combine, active=active)

    @remembered
    def tangent(self, active: tuple[int, ...], outs: tuple[int, ...]) -> Program:
        """The tangents of outputs `outs`, from the inputs and the tangents of those in `active`."""
        if has_custom_vjp(self.closed.jaxpr, active):
            raise TypeError(
                "tile: cannot apply forward-mode autodiff (jvp) to a function that calls one with a `jax.custom_vjp` "
                "rule: only its reverse mode is known. Give that function a `jax.custom_jvp` rule."
            )

        def forward(*both: Any) -> list[Any]:
            primal, *primals = self.chosen(both[: -len(active)], active, outs)
            return jax.jvp(primal, tuple(primals), both[-len(active) :], has_aux=True)[1]

        extra = [(self.closed.in_avals[i], self.placements[i]) for i in active]
        made = dataclasses.replace(self.derive(forward, extra, given=len(active)), unseen=True)
        return made if self.cut is None else cut_again(made, active, needed=False)

    @functools.cached_property
    def keeping(self) -> Keeping | None:
        """What the policy keeps for the backward pass."""
        return keeping(self.closed, self.options.policy)

    @remembered
    def forward(self, active: tuple[int, ...]) -> Program:
        """The outputs, then what is kept for the backward pass, where the inputs `active` are differentiated.

        There a function with a rule is what the rule computes of it: derivatives of these outputs, which are second
        ones of the function, are the rule's own.
        """
        made = self if self.keeping is None else self.derive(self.keeping.forward, (), self.wide)
        if ruled(made.closed.jaxpr, active):
            values = lambda *args: differentiated(jaxpr_as_fun(made.closed), active, args)
            with explained(), looked_into():  # and without what loops within would keep for a derivative
                closed = trimmed(jax.make_jaxpr(values)(*(like(a) for a in self.closed.in_avals)))
            made = self.derive(functools.partial(self._and_also, jaxpr_as_fun(closed)), (), self.wide)
        if self.keeping is None and made.also is None and made.residuals.values:
            return dataclasses.replace(made, also=made.residuals)
        return made

    def _and_also(self, fn: Callable[..., list[Any]], *args: Any) -> list[Any]:
        """What a function returns, and what the program's loops end in, if that is asked for."""
        env, values = dict(zip(self.graph.inputs, args, strict=True)), () if self.also is None else self.also.values
        return [*fn(*args), *evaluate(env, values)]

    def kept(self, active: tuple[int, ...]) -> list[tuple[Any, Placement]]:
        """The types and places of what `forward` returns beyond the outputs."""
        made = self.forward(active)
        avals = [v.aval for v in made.plan.analysis.graph.outputs]
        both = zip(avals, made.output_placements, strict=True)
        return list(both)[len(self.closed.out_avals) :]

    @remembered
    def cotangent(self, active: tuple[int, ...], outs: tuple[int, ...]) -> Program:
        """The cotangents of inputs `active`, from the inputs, what was kept, and the cotangents of outputs `outs`."""
        count = len(self.closed.in_avals)

        def backward(closed: ClosedJaxpr, *both: Any) -> tuple[Any, ...]:
            args, kept, cotangents = both[:count], both[count : -len(outs)], both[-len(outs) :]
            _, vjp, _ = jax.vjp(*self.chosen(args, active, outs, kept, closed), has_aux=True)
            return vjp(list(cotangents))

        slopes = [(dual(self.closed.out_avals[i]), self.output_placements[i]) for i in outs]
        extra = [*self.kept(active), *slopes]
        also = self.forward(active).also
        given = (also, count) if also is not None else None
        # A gradient takes the place of a cotangent that was read, or of the input whose gradient it is.
        last = range(count + len(extra) - len(outs), count + len(extra))
        reuse = {i: [*last, number] for i, number in enumerate(active)}

        def made(closed: ClosedJaxpr) -> Program:
            derived = self.derive(functools.partial(backward, closed), extra, given=len(outs))
            return dataclasses.replace(derived, given=given, reuse=reuse, unseen=True)

        return cut_again(self._in_reverse(made), active)


# ------------------------------------------------------------------------------------------ a cut axis that is spread


def by_shares(
    closed: ClosedJaxpr, placements: Sequence[Placement], options: Options
) -> tuple[tuple[Placement, ...], Options]:
    """How a program is cut whose axis, as long as `options` say, may be spread: each device walks its own share."""
    count = _spread_over(closed, placements, options)
    return _split(placements, count), dataclasses.replace(options, total=options.total // count, shares=count)


def _split(placements: Sequence[Placement], count: int) -> tuple[Placement, ...]:
    return tuple(dataclasses.replace(p, major=count) if isinstance(p, Tiled) else p for p in placements)


def _spread_over(closed: ClosedJaxpr, placements: Sequence[Placement], options: Options) -> int:
    """Over how many devices the cut axis is spread, in the arguments or where the function spreads it."""
    cuts = [shares(v, p.dim) for v, p in zip(closed.in_avals, placements, strict=True) if isinstance(p, Tiled)]
    known, before = math.lcm(*cuts), 0
    while known != before and options.total % known == 0:
        before = known
        anyhow = dataclasses.replace(options, total=options.total // known, gather="any")
        program = Program(closed, _split(placements, known), anyhow)
        if not any(node.name in MOVES for node in program.graph.nodes):
            break
        found = analyse(program.graph, program.placements, program.limits)
        if isinstance(found, Obstacle):
            break  # to be told when it is planned
        cut = [(v, f.placement) for v, f in found.facts.items() if isinstance(f.placement, Tiled)]
        known = math.lcm(known, *(n for v, p in cut if p.major % (n := shares(v.aval, p.dim))))
        known = math.lcm(known, *(n for node in program.graph.nodes for n in _shared(node, found)))
    return before or known


def _shared(node: Node, found: Analysis) -> list[int]:
    """Over how many devices a `shard_map` spreads the cut dimensions of its operands that are not known to be."""
    if not has(node.name, "devices"):
        return []
    places = [(i, found.fact(v).placement) for i, v in enumerate(node.inputs)]
    counts = [(p, shard_map.share(node, node.params["in_specs"][i], p.dim)) for i, p in places if isinstance(p, Tiled)]
    return [n for p, n in counts if p.major % n]


# ------------------------------------------------------------------------------------------------ a second cut


def cut_again(program: Program, active: Sequence[int], needed: bool = True) -> Program:
    """A gradient program; with `lowmem=True`, its largest whole argument is cut too, along its largest dimension.

    Cut along the tokens, the gradient of a head `[D, V]` is a sum over the tiles: an accumulator of its size, in
    float32, beside the gradient itself. Cut along the vocabulary too, outermost, each piece of it is summed over all
    tokens, rounded and written where it belongs. The price is one more product: the statistics of the softmax first.

    Args:
        program: returns gradients, among others.
        active: numbers of the inputs that are differentiated.
        needed: whether one that cannot be cut so is refused.

    Raises:
        TileError: the function cannot be tiled along that dimension.
    """
    avals = program.closed.in_avals
    whole = [i for i in active if isinstance(program.placements[i], Whole) and avals[i].ndim]
    if not program.options.lowmem or not whole:
        return program  # or no gradient is a sum over the tiles
    largest = max(whole, key=lambda i: nbytes(avals[i]))
    shape = avals[largest].shape
    dim = max(range(len(shape)), key=lambda d: shape[d])
    outer = _outer(program, largest, dim)
    if outer.refusal is not None:
        if not needed:
            return program
        raise TileError(
            f"cannot tile with lowmem=True, which cuts dimension {dim} of the argument {describe(avals[largest])} too: "
            f"{outer.refusal.message}\n  Or pass lowmem=False."
        )
    facts = [outer.plan.analysis.fact(v).placement for v in outer.plan.analysis.graph.outputs]
    # A piece is complete when it is written: it needs no more than its own dtype.
    outer = dataclasses.replace(outer, wide=frozenset(i for i in program.wide if not isinstance(facts[i], Tiled)))

    def both(*args: Any) -> list[Any]:
        return scan.run(outer.plan, args, outer.wide, chunks=False)

    closed = jax.make_jaxpr(both)(*(like(a) for a in avals))
    options = dataclasses.replace(program.options, outline=True)
    # Derivatives are the program's own: its loops have lost what rules say of them.
    return dataclasses.replace(program, wide=outer.wide, cut=Program(closed, program.placements, options, outer.wide))


def _outer(program: Program, argument: int, dim: int) -> Program:
    """The same program cut along a dimension of one argument, in tiles whose gradients are small beside the others."""
    avals = program.closed.in_avals
    total = avals[argument].shape[dim]
    row = 4 * avals[argument].size // total
    others = max((4 * avals[i].size for i, p in enumerate(program.placements) if isinstance(p, Tiled)), default=0)
    placements = tuple(Tiled(dim) if i == argument else WHOLE for i in range(len(avals)))
    told = program.options
    options = Options(total, total, told.gather, told.accumulate, named=told.named, sync=told.sync)
    places, each = by_shares(program.closed, placements, options)
    size = min(each.total, max(SMALLEST, max(PIECE, others // 4) // (row * each.shares)))
    return Program(program.closed, places, dataclasses.replace(each, size=size), program.wide)
