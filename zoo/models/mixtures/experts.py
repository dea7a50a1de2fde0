"""The experts of a mixture: which of them each token goes to, and what they make of it. No token is dropped.

Dimensions: `B` batch `S` sequence `T` tokens `D` embed `F` mlp hidden `E` experts `C` chosen experts of a token.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from transforms import tile
from transforms.sharding import axes_of, explicit, partitions, uncut, vary_alike
from zoo.adapters.lora import LowRank
from zoo.models.layers import Widened, linear
from zoo.models.mixtures.grouped import Product, divided, of_groups_alone, ragged
from zoo.quantised import AbstractMatrix, Quantised, whole

Matrix = Float[Array, "..."] | AbstractMatrix
Biases = tuple[
    Float[Array, " E"] | None, Float[Array, "E F"] | None, Float[Array, "E F"] | None, Float[Array, "E D"] | None
]
Select = Callable[..., tuple[Float[Array, "T C"], Int[Array, "T C"], Float[Array, "T E"]]]


def experts(
    x: Float[Array, "B S D"],
    router: Matrix,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    chosen: int,
    *,
    normalise: bool,
    biases: Biases | None = None,
    combine: Callable | None = None,
    select: Select | None = None,
    by_sequence: bool = False,
    at_once: int | None = None,
    product: Product = ragged,
    typed: bool = True,
    live: Bool[Array, "B S"] | None = None,
    counted: Bool[Array, "B S"] | None = None,
    routed_by: Float[Array, "B S D"] | None = None,
    before: bool = False,
) -> tuple[Float[Array, "B S D"], Float[Array, "2 E"]]:
    """Return what each token's experts make of it; and each expert's number of tokens and sum of probabilities.

    Where a bias says which experts are chosen (https://arxiv.org/abs/2408.15664), those are counted that would be
    without it, as the balance loss takes them (https://arxiv.org/abs/2412.19437, equation 18).

    On an explicit mesh each device sorts its own tokens. Where devices hold different experts, the tokens of those
    devices are gathered, each applies the experts that it has, and the sums go back to where their tokens are.

    Args:
        x: tokens.
        router: one column per expert `[D, E]`.
        gate: every expert's `[E, D, F]`; likewise `up`, and `down` `[E, F, D]`.
        up: multiplies the activated gate.
        down: leads back.
        chosen: how many experts `C` a token goes to.
        normalise: whether a token's weights sum to one.
        biases: of the router `[E]`, and every expert's of gate and up `[E, F]` and of down `[E, D]`; None where there
            is none.
        combine: returns the hidden values of gates and what they multiply; None is `silu(gate) * up`.
        select: returns what `route` does, given all scores and the router's bias; None takes the most probable.
        by_sequence: each sequence's tokens are sorted on their own, so that `tile` can cut the batch; on an explicit
            mesh, those of the part of each sequence that a device has.
        at_once: how many of a device's tokens are sorted and computed at a time, in parts of sequences of one length;
            None is all. Gradients of weights are summed over devices once.
        product: of rows and the matrices of their groups (`zoo.models.mixtures.grouped`).
        typed: whether the product's results say over which devices they differ: those of Pallas kernels do not
            (https://github.com/jax-ml/jax/issues/36008), and gradients are summed more carefully then.
        live: which tokens there are: the others go to no expert, and come back as zeros; None is all of them.
        counted: which tokens are counted, and their probabilities summed; None is all of them.
        routed_by: what the router reads of each token; None is what the experts do.
        before: whether tokens are multiplied by their weights before experts read them, in place of what those make.
    """
    how = {"chosen": chosen, "normalise": normalise, "combine": combine, "select": select, "product": product}
    how["before"] = before
    rows = functools.partial(_local_rows, **how)
    local = rows if by_sequence else functools.partial(_local, **how)
    local = local if at_once is None else functools.partial(_local_parts, at_once, rows)
    return _experts(local, x, (live, counted, routed_by), router, gate, up, down, biases, typed)


def clamped(gate: Float[Array, "T F"], up: Float[Array, "T F"], *, slope: float, limit: float) -> Float[Array, "T F"]:
    """Return `(up + 1) * gate * sigmoid(slope * gate)`, both limited, as gpt-oss has it."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(slope * gate)


def _experts(local, x, asked, router, gate, up, down, biases, typed):
    """Compute `experts` by `local`, a function like `_local` of what each device has."""
    if not explicit():
        return local(x, asked, router, gate, up, down, biases)
    packed = lambda part: isinstance(part, Quantised)
    one = lambda part, dims: part.uncut(*dims) if packed(part) else uncut(part, *dims)
    whole = lambda weight, *dims: jax.tree.map(lambda part: one(part, dims), weight, is_leaf=packed)
    weights = whole(router, 0, 1), whole(gate, 1), whole(up, 1), whole(down, 2)
    if biases is not None:  # jax.tree.map leaves None as it is
        biases = whole(biases[0], 0), biases[1], biases[2], whole(biases[3], 1)
    weights = (*weights, biases)
    base = gate.base if isinstance(gate, LowRank) else gate
    cut_E, _, cut_F = base.partitions if isinstance(base, Quantised) else partitions(base)
    tokens = PartitionSpec(*partitions(uncut(x, 2)))
    local = functools.partial(local, tokens=axes_of(tokens), over_E=axes_of([cut_E]), over_F=axes_of([cut_F]))
    specs = jax.tree.map(lambda part: PartitionSpec(*partitions(part)), weights)
    in_specs = tokens, (*[PartitionSpec(*tokens[:2])] * 2, tokens), *specs
    out_specs = tokens, PartitionSpec()
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=typed)(x, asked, *weights)


def _local(
    x,
    asked,
    router,
    gate,
    up,
    down,
    biases,
    *,
    chosen,
    normalise,
    combine,
    select,
    product,
    before,
    tokens=(),
    over_E=(),
    over_F=(),
):
    """Compute `experts` of one device's tokens, given the mesh axes that cut tokens, experts and their hidden width."""
    flat, (live, counted, routed_by) = x.reshape(-1, x.shape[-1]), asked
    reads = flat if routed_by is None else routed_by.reshape(flat.shape)
    how = ({} if biases is None else {"bias": biases[0]}) | ({} if select is None else {"select": select})
    weights_TC, experts_TC, probs_TE = route(reads, router, chosen, normalise=normalise, **how)
    routed = _routed(None if how.keys() == {"bias", "select"} else experts_TC, probs_TE, counted, chosen)
    first = None
    if live is not None:
        first, experts_TC = 0, jnp.where(live.reshape(-1, 1), experts_TC, probs_TE.shape[1])
    shared = tuple(axis for axis in over_E if axis in tokens)
    routing = flat, weights_TC, experts_TC
    for axis in shared:
        routing = tuple(jax.lax.all_gather(value, axis, tiled=True) for value in routing)
    first = jax.lax.axis_index(over_E) * gate.shape[0] if over_E else first
    own = None
    if (
        biases is not None and biases[3] is not None
    ):  # what is summed over the parts of the hidden width has the last bias once
        of_down = biases[3] * (jax.lax.axis_index(over_F) == 0).astype(x.dtype) if over_F else biases[3]
        own = biases[1], biases[2], of_down
    product = divided(product, probs_TE.shape[1] // gate.shape[0])
    how = {"first": first, "biases": own, "combine": combine, "product": product, "before": before}
    out = expert_mlp(*routing, gate, up, down, **how)
    for axis in reversed(shared):
        out = jax.lax.psum_scatter(out, axis, tiled=True)
    rest = tuple(axis for axis in (*over_E, *over_F) if axis not in shared)
    out = jax.lax.psum(out, rest) if rest else out
    return out.reshape(x.shape), jax.lax.psum(routed, tokens) if tokens else routed


def _routed(experts_TC, probs_TE, counted, chosen):
    """Return each expert's number of tokens and sum of probabilities; None counts the most probable experts."""
    if experts_TC is None:
        _, experts_TC = jax.lax.top_k(probs_TE, chosen)
    ones_TE = jnp.ones_like(probs_TE)
    if counted is not None:
        probs_TE, ones_TE = (jnp.where(counted.reshape(-1, 1), part, 0) for part in (probs_TE, ones_TE))
    counts_E = jnp.zeros_like(probs_TE[0]).at[experts_TC].add(ones_TE[:, :1])
    return jnp.stack([counts_E, probs_TE.sum(0)])


def _local_rows(x, asked, *weights, **options):
    """Compute `_local` of each sequence of one device."""
    one = lambda row: jax.tree.map(lambda part: part[None], row)
    out, routed = jax.lax.map(lambda row: _local(*one(row), *weights, **options), (x, asked))
    return out[:, 0], routed.sum(0)


def _local_parts(at_once, local, x, asked, *weights, tokens=(), **where):
    """Compute `local` of some of one device's tokens at a time."""
    rows, length = x.shape[:2]
    fewest = -(-length // max(1, at_once // rows))
    parts = next((n for n in range(fewest, 2 * fewest) if length % n == 0), 1)
    weights = jax.tree.map(lambda weight: _varying(weight, tokens), weights)
    in_parts = lambda x: x.reshape(rows * parts, length // parts, *x.shape[2:])
    run = lambda x, weights, asked: local(x, asked, *weights, tokens=tokens, **where)
    out, routed = tile(run, axis=(0, None, 0), size=1)(in_parts(x), weights, jax.tree.map(in_parts, asked))
    return out.reshape(x.shape), routed


def _varying(x, axes):
    """Return an array as if it differed along these mesh axes: gradients are summed over them where it is made so."""
    known = getattr(jax.typeof(x), "manual_axis_type", None)
    axes = tuple(axis for axis in axes if known is not None and axis not in known.varying)
    return jax.lax.pcast(x, axes, to="varying") if axes else x


def ragged_linear(
    x: Float[Array, "T I"],
    weight: Float[Array, "E I O"] | AbstractMatrix,
    counts: Int[Array, " E"],
    product: Product = ragged,
) -> Float[Array, "T O"]:
    """Return `product(x, weight, counts)`; adapted weights add their low-rank parts."""
    if isinstance(weight, LowRank):
        a, b = weight.columns(1)
        added = product(product(x, a, counts), b, counts)
        return ragged_linear(x, weight.base, counts, product) + added * weight.scale
    return product(x, weight, counts)


def formed(weight: Any, inputs: int) -> Float[Array, "..."]:
    """Return a matrix of whatever kind, whose first dimension are so many inputs, as an array."""
    if isinstance(weight, LowRank):
        made = "xyz"[: weight.ndim - 1]
        return linear(f"ic,c{made}->i{made}", jnp.eye(inputs, dtype=weight.dtype), weight)
    return weight.array if isinstance(weight, Widened) else whole(weight)


def route(
    x: Float[Array, "T D"],
    router: Matrix,
    chosen: int,
    *,
    normalise: bool,
    bias: Float[Array, " E"] | None = None,
    select: Select | None = None,
) -> tuple[Float[Array, "T C"], Int[Array, "T C"], Float[Array, "T E"]]:
    """Return the weights of each token's experts, which they are, and the probabilities of all; float32 or wider.

    Args:
        x: tokens.
        router: one column per expert.
        chosen: how many experts `C` a token goes to: the most probable ones.
        normalise: whether a token's weights sum to one.
        bias: of each expert's score.
        select: returns all three, given all scores and the bias, in place of the most probable experts.
    """
    scores_TE = linear("td,de->te", x, router, wide=True)
    if select is not None:
        return select(scores_TE, bias, chosen=chosen, normalise=normalise)
    probs_TE = jax.nn.softmax(scores_TE if bias is None else scores_TE + bias.astype(scores_TE.dtype), axis=-1)
    weights_TC, experts_TC = jax.lax.top_k(probs_TE, chosen)
    return weights_TC / (weights_TC.sum(-1, keepdims=True) if normalise else 1.0), experts_TC, probs_TE


def weighed(
    scores: Float[Array, "T E"], weights: Float[Array, " E"] | None, *, chosen: int, normalise: bool
) -> tuple[Float[Array, "T C"], Int[Array, "T C"], Float[Array, "T E"]]:
    """Return what `route` does, each expert's weight multiplied by one of its own, as Gemma 4 has it.

    Args:
        scores: of every expert.
        weights: of every expert: what stands where other families have the router's bias.
        chosen: how many experts `C` a token goes to: the most probable ones.
        normalise: whether a token's weights sum to one before they are multiplied.
    """
    probs_TE = jax.nn.softmax(scores, axis=-1)
    weights_TC, experts_TC = jax.lax.top_k(probs_TE, chosen)
    weights_TC = weights_TC / (weights_TC.sum(-1, keepdims=True) if normalise else 1.0)
    return weights_TC * (1.0 if weights is None else weights.astype(probs_TE.dtype)[experts_TC]), experts_TC, probs_TE


def group_limited(
    scores: Float[Array, "T E"],
    bias: Float[Array, " E"] | None,
    *,
    chosen: int,
    normalise: bool,
    groups: int,
    kept: int,
    best: int,
    probability: Callable,
    scale: float,
    floor: float = 1e-20,
) -> tuple[Float[Array, "T C"], Int[Array, "T C"], Float[Array, "T E"]]:
    """Return what `route` does, of experts in the best groups alone (https://arxiv.org/abs/2405.04434, section 2.2).

    The probabilities that are told of all experts sum to one, as the balance loss takes them, whatever `probability`
    makes (https://arxiv.org/abs/2412.19437, equation 18).

    Args:
        scores: of every expert.
        bias: added to the probabilities where experts are chosen, and not where they are weighed
            (https://arxiv.org/abs/2408.15664).
        chosen: how many experts `C` a token goes to.
        normalise: whether a token's weights sum to one, before they are scaled.
        groups: into how many groups of neighbours experts are divided.
        kept: from how many of them a token's experts may be.
        best: how many of a group's experts, the best ones, are summed to compare groups.
        probability: makes probabilities of scores.
        scale: multiplies the weights.
        floor: added to the sum of a token's weights before they are divided by it.
    """
    probs_TE = probability(scores)
    rivals_TE = probs_TE if bias is None else probs_TE + bias
    if kept < groups:
        grouped = rivals_TE.reshape(len(scores), groups, -1)
        _, stay = jax.lax.top_k(jax.lax.top_k(grouped, best)[0].sum(-1), kept)
        inside = jax.nn.one_hot(stay, groups, dtype=bool).any(1)
        rivals_TE = jnp.where(inside[..., None], grouped, 0 if bias is None else -jnp.inf).reshape(scores.shape)
    _, experts_TC = jax.lax.top_k(rivals_TE, chosen)
    held_TE = probs_TE if bias is not None else rivals_TE
    weights_TC = jnp.take_along_axis(held_TE, experts_TC, axis=1)
    if normalise:
        weights_TC = weights_TC / (weights_TC.sum(-1, keepdims=True) + floor)
    return weights_TC * scale, experts_TC, probs_TE / probs_TE.sum(-1, keepdims=True)


def expert_mlp(
    x: Float[Array, "T D"],
    weights: Float[Array, "T C"],
    experts: Int[Array, "T C"],
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    *,
    first: Int[Array, ""] | int | None = None,
    biases: tuple[Float[Array, "E F"], Float[Array, "E F"], Float[Array, "E D"]] | None = None,
    combine: Callable | None = None,
    product: Product = ragged,
    before: bool = False,
) -> Float[Array, "T D"]:
    """Return each token's weighted sum of what its experts' gated MLPs make of it. No token is dropped.

    The `T * C` rows are sorted by expert, and each expert's run is one group of a ragged product: 6 T C D F FLOPs
    where the product is one of each row with one matrix. There is no forward-mode derivative.

    Args:
        x: tokens.
        weights: of each token's experts.
        experts: which they are.
        gate: every expert's; likewise `up` and `down`.
        up: multiplies the activated gate.
        down: leads back.
        first: the number of the first of these experts, where tokens name others too: rows of the others are zero.
        biases: every expert's of gate, up and down.
        combine: returns the hidden values of gates and what they multiply; None is `silu(gate) * up`.
        product: as `experts` takes it.
        before: likewise.
    """
    chosen, number = experts.shape[1], experts.reshape(-1)
    if first is not None:
        number = jnp.where((number >= first) & (number < first + gate.shape[0]), number - first, gate.shape[0])
    order = jnp.argsort(number, stable=True)
    counts_E = jnp.zeros(gate.shape[0], jnp.int32).at[number].add(1, mode="drop")
    x, order, inverse = vary_alike(x, order, jnp.argsort(order))
    rows, scale = _sent(x, order, inverse, chosen), weights.reshape(-1)[order][:, None]
    rows = (rows * scale).astype(x.dtype) if before else rows
    rows = rows if first is None else of_groups_alone(rows, counts_E)  # and their gradients
    of_gate, of_up, of_down = (None, None, None) if biases is None else biases
    biased = lambda out, bias: out if bias is None else out + bias.at[number[order]].get(mode="clip")
    gates = biased(ragged_linear(rows, gate, counts_E, product), of_gate)
    ups = biased(ragged_linear(rows, up, counts_E, product), of_up)
    hidden = jax.nn.silu(gates) * ups if combine is None else combine(gates, ups)
    hidden = hidden if first is None else of_groups_alone(hidden, counts_E)
    out = biased(ragged_linear(hidden, down, counts_E, product), of_down).astype(weights.dtype)
    out = out if before else out * scale
    out = out if first is None else of_groups_alone(out, counts_E)
    return _returned(out, order, inverse, chosen).astype(x.dtype)


# Each is the other's transpose. Left to themselves, gradients of rows that are read several times would be added where
# they were read, which devices that add in no fixed order do not do to the same bits twice.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sent(x, order, inverse, chosen):
    """Return the row of each token for each of its experts, in the order of these."""
    return x[order // chosen]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _returned(rows, order, inverse, chosen):
    """Return the sum of the rows of each token, always in the order in which it chose its experts."""
    return rows[inverse].reshape(-1, chosen, *rows.shape[1:]).sum(1)


_sent.defvjp(
    lambda x, order, inverse, chosen: (_sent(x, order, inverse, chosen), (order, inverse)),
    lambda chosen, kept, slope: (_returned(slope, *kept, chosen), None, None),
)
_returned.defvjp(
    lambda rows, order, inverse, chosen: (_returned(rows, order, inverse, chosen), (order, inverse)),
    lambda chosen, kept, slope: (_sent(slope, *kept, chosen), None, None),
)
