"""The verifier finds what is broken on purpose, one thing at a time, and nothing in what is planned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from transforms import tile
from transforms.tiling.analysis import rounding
from transforms.tiling.ir.facts import Fact
from transforms.tiling.ir.graph import Value
from transforms.tiling.ir.placement import WHOLE, Partial, Stacked, Tiled
from transforms.tiling.passes import driver
from transforms.tiling.verify import faults, verify

Array = jax.ShapeDtypeStruct
H, W, Y, M = Array((26, 7), "float32"), Array((7, 13), "float32"), Array((26,), "int32"), Array((26,), "float32")


def head(h, w, y, m):
    return (optax.softmax_cross_entropy_with_integer_labels(h @ w, y) * m).sum() / m.sum()


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def shifted(h, w):
    z = jnp.tanh(h @ w)
    return (z * jnp.pad(z, ((1, 0), (0, 0)))[:-1]).sum()


def recurrence(h):
    return lax.scan(lambda s, row: (jnp.tanh(s + row), s), jnp.zeros(7), h)[1]


def two_loops(h, w):
    z = h @ w
    return ((z - z.mean(0)) ** 2).sum()


def patches(h):
    return jnp.tanh(h.reshape(13, 2, 7).sum(1)) @ jnp.ones((7, 3))


def both_ways(h):
    step = lambda s, row: ((s := 0.9 * s + row), jnp.sin(s))
    forward = lax.scan(lambda s, row: ((s := jnp.tanh(s + jnp.outer(row, row))), s.sum()), jnp.ones((7, 7)), h)[1]
    return forward + lax.scan(step, jnp.zeros(7), h, reverse=True)[1].sum(1)


def sorted_rows(h):
    return jnp.sort(h[:, 0]) + jnp.tanh(h).sum(1)


def checkpointed(h, w):
    return jax.checkpoint(lambda h: jnp.tanh(h @ w))(h).sum(1)


def gram(h):
    return h.T @ jnp.tanh(h)


def plan(fn, axis, *args, n=4):
    return tile(fn, axis, n)._tracer.trace(args, {}).program.plan


PLANS = {
    "head": lambda: plan(head, (0, None, 0, 0), H, W, Y, M),
    "attention": lambda: plan(attention, (None, 0, 0), H, H, H),
    "shifted": lambda: plan(shifted, (0, None), H, W),
    "recurrence": lambda: plan(recurrence, 0, H),
    "two loops": lambda: plan(two_loops, (0, None), H, W),
    "patches": lambda: plan(patches, 0, H),
    "both ways": lambda: plan(both_ways, 0, H),
    "sorted": lambda: plan(sorted_rows, 0, H),
    "gram": lambda: plan(gram, 0, H, n=26),
    "checkpointed": lambda: plan(checkpointed, (0, None), H, W),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_is_planned_holds(name):
    verify(PLANS[name]())


# ----------------------------------------------------------------------------------------------- broken on purpose


def find(made, name):
    return next(n for n in made.analysis.graph.nodes if n.name == name)


def renamed(made, name, **changes):
    """The move of the first equation of a primitive, changed."""
    node = find(made, name)
    made.analysis.moves[node] = dataclasses.replace(made.analysis.moves[node], **changes)


def place(made, name, placement):
    value = find(made, name).outputs[0]
    made.analysis.facts[value] = Fact(placement)
    renamed(made, name, outs=(placement,))


def reorder(made):
    made.analysis.graph.nodes.append(made.analysis.graph.nodes.pop(0))


def drop(made):
    made.analysis.graph.nodes.remove(find(made, "dot_general"))


def repeat(made):
    made.analysis.graph.nodes.append(find(made, "dot_general"))


def misnumber(made):
    find(made, "dot_general").outputs[0].index = 3


def dangle(made):
    find(made, "exp").inputs[0] = Value(find(made, "exp").inputs[0].aval)


def lose_output(made):
    made.analysis.graph.outputs[0] = Value(made.analysis.graph.outputs[0].aval)


def lose_state(made):
    find(made, "carried").state.yielded = Value(find(made, "carried").outputs[0].aval)


def reshape_result(made):
    value = find(made, "exp").outputs[0]
    value.aval = value.aval.update(shape=(26, 12))


def retype_result(made):
    value = find(made, "exp").outputs[0]
    value.aval = value.aval.update(dtype=np.dtype("float16"))


def swap_operands(made):
    find(made, "dot_general").inputs.reverse()


def forget_move(made):
    del made.analysis.moves[find(made, "exp")]


def shorten_move(made):
    renamed(made, "dot_general", ins=(WHOLE,))


def contradict(made):
    made.analysis.facts[find(made, "exp").outputs[0]] = Fact(WHOLE)


def body_without_move(made):
    (body,) = next(m.bodies for m in made.analysis.moves.values() if getattr(m, "bodies", ()))
    body.moves.pop(body.graph.nodes[0])


def stack_otherwise(made):
    made.analysis.facts[find(made, "carried").state.checkpoints] = Fact(Stacked(3))


def ungroup(made):
    limits = made.analysis.limits
    made.analysis.limits = dataclasses.replace(limits, options=dataclasses.replace(limits.options, size=7))


def reverse_steps(made):
    made.loops[0].steps.reverse()


def read_too_early(made):
    made.loops.reverse()


def leave_nothing(made):
    made.loops[-1].updates.clear()


def leave_no_state(made):
    made.loops[0].updates = [u for u in made.loops[0].updates if made.analysis.fact(u.value).placement != LAST]


def leave_no_anchor(made):
    anchors = {a.value for u in made.loops[0].updates for a in u.online.anchors}
    assert anchors
    made.loops[0].updates = [u for u in made.loops[0].updates if u.value not in anchors]


def forget_reads(made):
    loop = made.loops[0]
    (value,) = (v for v in loop.reads if v.const is None and v.producer is not None)
    del loop.reads[value]


def write_twice(made):
    made.loops[1].updates += made.loops[0].updates


def narrow_tiles(made):
    loop = made.loops[0]
    wide = next(i for i, step in enumerate(loop.steps) if step.halo != (0, 0))
    loop.steps[wide] = dataclasses.replace(loop.steps[wide], halo=(0, 0))


def allow_less(made):
    limits = made.analysis.limits
    made.analysis.limits = dataclasses.replace(limits, largest=8, together=0, summed=0)


LAST = Partial("last")
# What is broken, of which plan, and what the verifier says of it.
BROKEN = {
    "a value is used before it is made": ("head", reorder, "comes only later"),
    "a node is gone whose result is used": ("head", drop, "`dot_general` at .*is not in the graph any more"),
    "a node stands twice": ("head", repeat, "stands in it twice"),
    "a result has another number": ("head", misnumber, "names another producer"),
    "an operand has no producer": ("head", dangle, "operand 0 of `exp` at .*neither an input nor a constant"),
    "an output has no producer": ("head", lose_output, "output 0, .*neither an input nor a constant"),
    "a state comes from nowhere": ("recurrence", lose_state, "what `carried` at .*is left with"),
    "a result has another shape": ("head", reshape_result, r"`exp` at .*makes float32\[26,13\], said to be"),
    "a result has another dtype": ("head", retype_result, r"`exp` at .*said to be float16\[26,13\]"),
    "operands do not fit": ("head", swap_operands, "types: `dot_general` at .*does not take"),
    "a node has no move": ("head", forget_move, "`exp` at .*has no move"),
    "a move is of fewer operands": ("head", shorten_move, "`dot_general` at .*moves 1 operands"),
    "a value stands elsewhere": ("head", contradict, "moves to Tiled.*stands at Whole"),
    "a cut operand is read whole": (
        "head",
        lambda made: renamed(made, "exp", ins=(WHOLE,)),
        "`exp` at .*reads operand 0 as Whole, which stands at Tiled",
    ),
    "rows beside what is not cut": (
        "head",
        lambda made: renamed(made, "dot_general", reach={1: (1, 0)}),
        r"`dot_general` at .*rows beside operand 1, which is not cut",
    ),
    "a dimension is not there": ("head", lambda made: place(made, "exp", Tiled(2)), "which it does not have"),
    "a dimension does not hold the axis": (
        "head",
        lambda made: place(made, "exp", Tiled(1)),
        "makes dimension 1 26 long",
    ),
    "states of other tiles": ("both ways", stack_otherwise, "has an entry for each tile of 3; 4 tiles have 7"),
    "tiles cut a group": ("patches", ungroup, "keeps 2 rows together, and tiles have 7"),
    "a body knows too little": ("checkpointed", body_without_move, "in `.*has no move"),
    "steps in another order": ("head", reverse_steps, "which no step before computes"),
    "loops in another order": ("two loops", read_too_early, "no loop before leaves it"),
    "an output is not left": ("head", leave_nothing, "after the loops: output 0, .*no loop before leaves it"),
    "a state is not left": ("recurrence", leave_no_state, "reads the state .* which the loop does not leave"),
    "an anchor is not kept": ("attention", leave_no_anchor, "is relative to .*, which the loop does not keep"),
    "a whole operand is not asked for": ("recurrence", forget_reads, "which is not there before the loop"),
    "a result is written twice": ("two loops", write_twice, "which is there already"),
    "fewer rows beside a tile": ("shifted", narrow_tiles, "rows beside .*, which is computed with"),
    "an array that is too large is written": ("sorted", allow_less, r"writes float32\[26\] Tiled.* 8 may be whole"),
    "a sum that is too large is formed": ("gram", allow_less, r"writes float32\[7,7\] Partial.* 8 may be whole"),
    "an array that is too large is completed": ("sorted", allow_less, "completed .* 8 may be whole"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(name):
    of, change, message = BROKEN[name]
    made = PLANS[of]()
    change(made)
    with pytest.raises(AssertionError, match=f"(?s)a plan does not hold:.*{message}"):
        verify(made)


def test_comparison_of_what_is_computed_again_is_found(monkeypatch):
    """As planned before comparisons were looked at."""

    def equal(x, y):
        h = x * y - 1.1 * y
        return (h == h.max(0)).sum(0) * 1.0

    with monkeypatch.context() as patch:
        patch.setattr(driver.rounding, "meeting", lambda found: None)
        patch.setattr(driver.rounding, "check", lambda plan: None)
        made = plan(equal, 0, H, H)
    assert rounding.check is driver.rounding.check
    (fault,) = faults(made)
    assert fault.startswith("rounding: cannot tile `eq` at ")
