"""What every model of the zoo does around its blocks: tokens in, through the layers, hidden states and logits out.

Dimensions: `B` batch `S` sequence `D` embed `V` vocab `L` layers.
"""

import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from transforms.remat import Remat, apart_in_turns, scan_layers
from zoo import quantised
from zoo.config import Config, rows
from zoo.formats import Format
from zoo.models.forward import ForwardPass, Output, PerLayer, layer_passes, positions_of
from zoo.models.head import Head
from zoo.models.init import draw
from zoo.models.layers import PLAIN, Ops, Widened, check_tokens, lookup, rms_norm

_Model = TypeVar("_Model", bound="Decoder")


class Decoder(eqx.Module):
    """A model in two halves: `hidden(tokens)`, then `logits(hidden)`.

    Parameters keep the dtype that they were made with; a pass computes in the `dtype` asked for and casts one layer at
    a time, so that float32 mathematics over bfloat16 parameters never holds a float32 copy of the stack. A tied head
    is the table itself, stored once, and `head` is None.

    A family's class has these fields, one for each stack of `blocks`, and a `head` where it can be untied.
    """

    blocks: ClassVar[dict[str, type]]  # what each stack of layers is made of
    embed: eqx.AbstractVar[Float[Array, "V D"]]
    final_norm: eqx.AbstractVar[Float[Array, " D"]]
    config: eqx.AbstractVar[Any]

    @classmethod
    def init(
        cls: type[_Model],
        config: Config,
        *,
        key: PRNGKeyArray,
        dtype: DTypeLike = jnp.float32,
        quantise: Format | None = None,
        **how: Any,
    ) -> _Model:
        """Return a model with random weights, normal with the standard deviations of `zoo.parameters`.

        Args:
            config: the model's.
            key: of all weights.
            dtype: of parameters.
            quantise: the fewer bits in which its matrices are kept, if they are.
            how: `zoo.models.init.draw`'s: where parameters lie, and the options of the programs that draw them.
        """
        drawn = cls.build(config, draw(config, key=key, dtype=dtype, **how))
        return drawn if quantise is None else quantised.quantise(drawn, quantise)

    @classmethod
    def build(cls: type[_Model], config: Config, leaves: dict) -> _Model:
        """Return the model whose parameters are `leaves`, keyed by the dotted paths of `zoo.parameters`."""
        fields: dict[str, Any] = {"config": config, "head": leaves.get("head")}
        for stack, block in cls.blocks.items():
            own = {path: leaf for path, leaf in leaves.items() if path.startswith(f"{stack}.")}
            fields[stack] = block(**{path.partition(".")[2]: own[path] for path in own}) if own else None
        return cls(**{field.name: fields.get(field.name, leaves.get(field.name)) for field in dataclasses.fields(cls)})

    @property
    def stacks(self) -> dict[str, Any]:
        """The stacks of layers that there are, by name."""
        return {name: stack for name in self.blocks if (stack := getattr(self, name)) is not None}

    def runs(
        self, per_layer: PerLayer, single: bool = False
    ) -> list[tuple[tuple[str, ...], tuple[dict[str, Any], PerLayer]]]:
        """Return the layers in order, as runs to scan over: which stacks a turn's layers are in, and their parts.

        A run is of neighbours in one stack, or of turns of several, or of a `single` layer. What all of a stack are in
        copies no weight.
        """
        taken, runs, start, stacks = collections.Counter(), [], 0, self.config.layer_stacks
        for turn, times in [((stack,), 1) for stack in stacks] if single else _turns(stacks):

            def part(tree, first, each, turn=turn, times=times):
                def own(leaf):
                    leaf = leaf if leaf.shape[0] == times * each else leaf[first : first + times * each]
                    return leaf if len(turn) == 1 else leaf.reshape(times, each, *leaf.shape[1:])

                return jax.tree.map(own, tree)

            counts = collections.Counter(turn)
            parts = {stack: part(getattr(self, stack), taken[stack], each) for stack, each in counts.items()}
            runs.append((turn, (parts, part(per_layer, start, len(turn)))))
            taken.update({stack: times * each for stack, each in counts.items()})
            start += times * len(turn)
        return runs

    def balance(self, routed: list[Float[Array, "2 E"]]) -> Float[Array, ""] | None:
        """Return the balance loss of a mixture, given how each run's blocks routed tokens."""
        return None

    def forward(self, tokens: Integer[Array, "B S"], asked: ForwardPass) -> Output:
        """Return what the head reads, and whatever else the pass made (`Output`).

        Token ids are checked when they are concrete; under `jit` they cannot be without a device-to-host round trip in
        every step, so there an id outside the vocabulary makes its whole sequence NaN from that position on.

        Args:
            tokens: ids in `[0, vocab_size)`.
            asked: how the pass runs.

        Raises:
            ValueError: a concrete token id is outside the vocabulary.
        """
        config = self.config
        check_tokens(tokens, config.vocab_size)
        dtype = self.embed.dtype if asked.dtype is None else jnp.dtype(asked.dtype)
        x = self.embedded(tokens, dtype, positions_of(asked))
        per_layer, told = layer_passes(config, asked, tokens.shape[1])
        own, handed = self.beside(tokens, x)
        per_layer = dataclasses.replace(per_layer, own=own)
        pool = None if asked.past is None else asked.past.pool  # carried from layer to layer, and never copied

        def layer(carry, given):
            (x, pool, handed), (block, own) = carry, given
            x, aux = block(x, config, told(own, pool, handed))
            return (x, aux.pool, aux.handed), aux.routed

        routed, first = [], 0
        for stacks, run in self.runs(per_layer, single=asked.unroll and len(set(config.layer_stacks)) > 1):
            alone = len(stacks) == 1
            one, kept = (layer, asked.remat) if alone else apart_in_turns(asked.remat, layer, len(stacks))
            step = functools.partial(_turn, stacks, one)
            (x, pool, handed), of_layers = scan_layers(step, (x, pool, handed), run, kept, first, unroll=asked.unroll)
            first += jax.tree.leaves(run)[0].shape[0] * len(stacks)
            routed += [] if of_layers is None else [of_layers.sum(0)]
        normalised = (asked.ops or PLAIN).tokens(self.normalised, (1,))
        return Output(normalised(x), self.balance(routed), pool)

    def check_length(self, length: int) -> None:
        """Raise ValueError if the model cannot read texts of so many tokens; most read any."""
        del length

    def embedded(
        self, tokens: Integer[Array, "B S"], dtype: DTypeLike, positions: Integer[Array, "#B S"] | None = None
    ) -> Float[Array, "B S D"]:
        """Return what the first layer reads.

        Args:
            tokens: ids.
            dtype: of what comes back.
            positions: where each token stands in its text, for families that learn them; None counts from 0.
        """
        x = lookup(self.embed, tokens, dtype)
        if self.config.embed_scale is None:
            return x
        return x * jnp.asarray(self.config.embed_scale, dtype)  # rounded: sqrt(3072) is 55.5 in bfloat16

    def beside(self, tokens: Integer[Array, "B S"], x: Float[Array, "B S ..."]) -> tuple[Any, Any]:
        """Return what each layer has of its own, stacked over them, and what the first is handed beside its input.

        Most families' layers have and hand on nothing: None.
        """
        del tokens, x
        return None, None

    def normalised(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        """Return what the head reads of what the last layer made."""
        return rms_norm(x, self.final_norm, self.config.norm_eps, offset=self.config.norm_offset)

    def hidden(
        self,
        tokens: Integer[Array, "B S"],
        *,
        dtype: DTypeLike | None = None,
        remat: Remat | None = None,
        ops: Ops | None = None,
        segments: Integer[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Return what the head reads: `forward(tokens, ForwardPass(...)).hidden`, with its arguments."""
        return self.forward(tokens, ForwardPass(dtype=dtype, remat=remat, ops=ops, segments=segments)).hidden

    def logits(self, hidden: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
        """Return the logits in float32, soft-capped if the family does; the product's operands are as `hidden`."""
        return self.output()(hidden)

    def output(self) -> Head:
        """Return what makes logits: a matrix of its own, or the table again."""
        own = getattr(self, "head", None)  # families that are always tied have no such field
        return Head(self.embed if own is None else own, self.config.final_softcap, self.config.logit_scale)

    def __call__(self, tokens: Integer[Array, "B S"], *, dtype: DTypeLike | None = None) -> Float[Array, "B S V"]:
        """Return the logits of every position. Memory is O(B S V): to train, tile `logits` instead."""
        return self.logits(self.hidden(tokens, dtype=dtype))


def _turn(stacks, one, carry, scanned):
    """Run the layers of one turn; return what goes on, and how they routed tokens, if they did."""
    parts, own = scanned
    if len(stacks) == 1:
        return one(carry, (parts[stacks[0]], own))
    taken, routed, number = collections.Counter(), [], 0
    for stack, count in _neighbours(stacks):
        given = _part(parts[stack], taken[stack], count), _part(own, number, count)
        if count == 1:
            carry, of_layers = one(carry, given)
        else:  # of layers one by one the gradients would be summed, each as large as those of all
            carry, of_layers = jax.lax.scan(one, carry, given)
            of_layers = None if of_layers is None else of_layers.sum(0)
        taken[stack] += count
        number += count
        routed += [] if of_layers is None else [of_layers]
    return carry, sum(routed[1:], routed[0]) if routed else None


def _part(tree: Any, first: int, count: int) -> Any:
    """Return so many layers of stacked arrays; of one layer, its own arrays."""
    return jax.tree.map(lambda leaf: leaf[first] if count == 1 else leaf[first : first + count], tree)


def _neighbours(stacks: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return the runs of layers in one stack, and how many each has."""
    return [(stack, len(list(run))) for stack, run in itertools.groupby(stacks)]


def _turns(stacks: tuple[str, ...]) -> list[tuple[tuple[str, ...], int]]:
    """Return the stacks of all layers in order as turns of some of them, each so many times: as few turns as possible.

    Each takes the most layers that follow one pattern, of patterns that do the shortest: of those that end otherwise
    than they begin, so that neighbours in one stack are all that a turn has of it, if they can be.
    """
    turns, start = [], 0
    while start < len(stacks):
        rest, found = stacks[start:], (stacks[start : start + 1], 1)
        for size in range(1, len(rest) // 2 + 1):
            whole = range(size, len(rest) - size + 1, size)
            same = itertools.takewhile(lambda at, size=size, rest=rest: rest[at : at + size] == rest[:size], whole)
            times = 1 + len(list(same))
            ends_alike = size > 1 and rest[0] == rest[size - 1]
            if times > 1 and size * times > len(found[0]) * found[1] and not ends_alike:
                found = rest[:size], times
        turns.append(found)
        start += len(found[0]) * found[1]
    return turns


def widened(model: Decoder) -> Decoder:
    """Return a model whose 16-bit matrices are `Widened` where its device multiplies nothing narrower than float32.

    Otherwise every product converts its weights, and a program that decodes converts them all at every token. It costs
    twice the memory of the weights, beside them. Adapted matrices stay as they are.
    """
    narrow = [row for row in rows(model.config) if row.fan_in and _converts(operator.attrgetter(row.leaf)(model))]
    if not narrow:
        return model
    where = lambda model: [operator.attrgetter(row.leaf)(model) for row in narrow]
    return eqx.tree_at(where, model, [Widened(leaf.astype(jnp.float32), leaf.dtype) for leaf in where(model)])


class Apart(eqx.Module):
    """A stack of layers' arrays, each an array of its own, or its shape."""

    layers: tuple[Any, ...]


def apart(model: Decoder) -> Decoder:
    """Return a model each of whose stacked arrays is `Apart`, in the same memory; `together` is its inverse.

    Out of a stack XLA's CPU compiler copies a layer's weights before it multiplies by them. Given apart, and stacked
    inside a program that has each layer apart too, they are read where they are.

    Who donates the model's arrays drops this first: what is shared is not reused.

    Args:
        model: on one CPU, or of shapes.
    """

    def divided(stack: Any) -> Apart:
        (device,) = stack.sharding.device_set
        if isinstance(stack, jax.ShapeDtypeStruct):
            where = SingleDeviceSharding(device)
            return Apart((stack.update(shape=stack.shape[1:], sharding=where),) * stack.shape[0])
        return Apart(tuple(jax.device_put(layer, device, may_alias=True) for layer in np.asarray(stack)))

    return _of_stacks(model, divided)


def together(model: Decoder) -> Decoder:
    """Return a model whose stacks are arrays, whether they are apart or not."""
    whole = lambda part: jnp.stack(part.layers) if isinstance(part, Apart) else part
    return _of_stacks(model, whole, is_leaf=lambda part: isinstance(part, Apart))


def _of_stacks(model: Decoder, change: Callable[[Any], Any], **how: Any) -> Decoder:
    where = lambda model: [*model.stacks.values()]
    return eqx.tree_at(where, model, [jax.tree.map(change, stack, **how) for stack in where(model)])


def _converts(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer) or leaf.dtype.itemsize > 2:
        return False
    return next(iter(leaf.devices())).platform == "cpu"
