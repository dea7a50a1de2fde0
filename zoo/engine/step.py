"""One step of the engine: a fixed number of token slots through the model, whatever they belong to.

The slots stand in rows, and a row holds consecutive tokens of one text: a chunk of a prompt, a token that is written
and its drafts, a text that is scored. They are one batch `[rows, width]` to the model. There is one program, compiled
once, and in a program of fixed shape the bits of a row of a product depend on that row alone; attention walks a text's
pages in order of position (`zoo.engine.attention`). So a token's bits depend on its text and nothing else: not on
company, row, chunks, pages, nor on who computed the beginning.

Dimensions: `R` rows `W` slots of a row `D` embed `V` vocab `C` most pages of a text.
"""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from transforms.sharding import uncut
from zoo.engine.attention import Kinds, Paged, Pool
from zoo.engine.sampling import Either, Picked, Rules, pick
from zoo.models.decoder import together
from zoo.models.forward import ForwardPass
from zoo.models.layers import PLAIN
from zoo.models.mixtures.experts import experts
from zoo.models.mixtures.grouped import Product


class Work(eqx.Module):
    """What a step computes, as the scheduler says.

    Attributes:
        tokens: ids, -1 for the one that the text's slot picked last. What is padding has position -1.
        positions: of every token in its text.
        targets: ids whose probabilities after each token are asked for, or 0.
        drafted: which of them are drafts.
        slots: of each row.
        tables: the pages of each row's text, of each window kind; those that it has no more are the last page.
        lengths: how many tokens each row's text has at least: rotary frequencies that grow with a text are of these.
        keeps: whether a row's last token picks what its slot goes on with.
        asked: the slots that pick or are scored, `row * W + slot`, so many at a time; `R * W` stands for none.
        rules: how ids are picked.
    """

    tokens: Int[Either, "R W"]
    positions: Int[Either, "R W"]
    targets: Int[Either, "R W"]
    drafted: Bool[Either, "R W"]
    slots: Int[Either, " R"]
    tables: tuple[Int[Either, "R C"], ...]
    lengths: Int[Either, " R"]
    keeps: Bool[Either, " R"]
    asked: Int[Either, "blocks block"]
    rules: Rules


class State(eqx.Module):
    """What stays on the device from step to step: pages and states, and the id that each slot picked last."""

    pool: Pool
    last: Int[Array, " slots"]


@dataclasses.dataclass(frozen=True)
class Fixed:
    """What is fixed when a step is compiled.

    Attributes:
        kinds: which pages each layer's keys are on.
        dtype: what to compute in.
        most: how many of the likeliest ids are told, where any are asked for.
        unroll: whether each layer is apart in the program.
        product: of a mixture's rows and the matrices of their experts; idle slots go to none.
    """

    kinds: Kinds
    dtype: Any
    most: int
    unroll: bool
    product: Product


def advance(model: Any, state: State, work: Work, *, fixed: Fixed) -> tuple[State, Picked, Array]:
    """Run a step; return the state after it, what each slot that is asked picked, and all hidden states `[R W, D]`.

    Args:
        model: any of the zoo, its layers `apart` or not.
        state: donate it.
        work: what to compute.
        fixed: how.
    """
    kinds, dtype = fixed.kinds, fixed.dtype
    tokens = jnp.where(work.tokens < 0, state.last[work.slots][:, None], work.tokens)
    past = Paged(state.pool, work.positions, work.tables, work.lengths, work.slots, work.drafted, kinds, dtype)
    model = together(model)
    live = jnp.asarray(work.positions) >= 0
    ops = dataclasses.replace(PLAIN, experts=functools.partial(experts, product=fixed.product, live=live))
    out = model.forward(tokens, ForwardPass(dtype=dtype, ops=ops, past=past, unroll=fixed.unroll))
    rows, width = tokens.shape
    newest = jnp.arange(rows) * width + jnp.argmax(work.positions, axis=1)
    found = _pick(model, out.hidden, tokens, work, fixed.most)
    slots = jnp.where(work.keeps, work.slots, state.last.shape[0])
    return (
        State(out.pool, state.last.at[slots].set(found.ids[newest], mode="drop")),
        found,
        out.hidden.reshape(rows * width, -1),
    )


def _pick(model: Any, hidden: Array, tokens: Int[Array, "R W"], work: Work, most: int) -> Picked:
    """Return what each slot that is asked picks.

    Logits exist for one block of these slots at a time, and for none where nothing is asked.
    """
    rows, width = tokens.shape
    positions, targets, asked = map(jnp.asarray, (work.positions, work.targets, work.asked))

    def picked(slots: Int[Array, " block"]) -> Picked:
        row, at = jnp.minimum(slots // width, rows - 1), slots % width
        rules, target = work.rules.of(row), targets[row, at]
        logits = uncut(model.logits(hidden[row, at]), 1)
        return pick(logits, rules, positions[row], tokens[row], at, target, most)

    def block(i, found: Picked) -> Picked:
        return jax.tree.map(lambda all, new: all.at[asked[i]].set(new, mode="drop"), found, picked(asked[i]))

    told = jax.eval_shape(picked, asked[0])
    empty = jax.tree.map(lambda leaf: jnp.zeros((rows * width, *leaf.shape[1:]), leaf.dtype), told)
    with jax.named_scope("blocks"):
        return jax.lax.fori_loop(0, (asked[:, 0] < rows * width).sum(), block, empty)


@functools.cache
def program(fixed: Fixed, options: tuple[tuple[str, Any], ...]) -> Any:
    """Return `advance`, to be compiled with XLA's options and for donated states; engines alike share it."""
    # Of a product of two matrices beside each other, GPUs would first copy both.
    found = {"xla_gpu_dot_merger_threshold_mb": 0} if fixed.unroll else {}
    run, told = functools.partial(advance, fixed=fixed), {**found, **dict(options)}
    return jax.jit(run, donate_argnums=1, compiler_options=told or None)
