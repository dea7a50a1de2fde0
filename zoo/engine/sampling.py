"""How the next id is picked of logits: penalties and biases, temperature, what is left out, and a random number.

The random numbers of an id belong to (seed, position) alone, never to a row of a batch. A draft is right if it is the
id that would have been picked: so drafted text is the same text, at random too.

Dimensions: `T` slots `V` vocab `M` biases of a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

Either = Array | np.ndarray
_NONE = 2**30  # an id, or a number of ids, beyond every vocabulary
BIASES = 32  # ids that a request may have a bias for
_MOST = 1e30  # of numbers that logits are changed by, far within what 32 bits hold


class SamplingError(ValueError):
    """A field, `name`, is out of bounds."""

    def __init__(self, name: str, message: str):
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is picked. What is set applies in this order.

    Attributes:
        logit_bias: what is added to the logits of some ids, as (id, bias) pairs.
        repetition_penalty: of tokens that were there already, positive logits are divided by it, negative multiplied.
        presence_penalty: taken from the logits of tokens that were generated already.
        frequency_penalty: taken from them as often as they were.
        temperature: divides the logits; 0 picks the most likely token, whatever follows.
        top_k: only the so many most likely tokens.
        top_p: only the most likely tokens that together have at least this probability.
        min_p: only tokens with at least this share of the largest probability.
        seed: of the random numbers.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float | int = 1.0
    presence_penalty: float | int = 0.0
    frequency_penalty: float | int = 0.0
    temperature: float | int = 1.0
    top_k: int | None = None
    top_p: float | int | None = None
    min_p: float | int | None = None
    seed: int = 0

    def __post_init__(self):
        small = lambda *numbers: all(abs(number) <= _MOST for number in numbers)
        finite = f"from -{_MOST:g} to {_MOST:g}"
        positive = f"from {1 / _MOST:g} to {_MOST:g}"  # beyond these nothing is but 0
        biases = small(*(bias for _, bias in self.logit_bias))
        rules = {
            "logit_bias": (len(self.logit_bias) <= BIASES and biases, f"of at most {BIASES} ids, each {finite}"),
            "repetition_penalty": (1 / _MOST <= self.repetition_penalty <= _MOST, positive),
            "presence_penalty": (small(self.presence_penalty), finite),
            "frequency_penalty": (small(self.frequency_penalty), finite),
            "temperature": (self.temperature == 0 or 1 / _MOST <= self.temperature <= _MOST, f"0, or {positive}"),
            "top_k": (self.top_k is None or self.top_k >= 1, "at least 1"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "from 0 to 1"),
        }
        for name, (right, bounds) in rules.items():
            if not right:
                value = f"{len(self.logit_bias)} ids" if name == "logit_bias" else getattr(self, name)
                raise SamplingError(name, f"cannot sample with {name}={value}: it must be {bounds}.")

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before the temperature."""
        plain = self.repetition_penalty == 1 and not self.presence_penalty and not self.frequency_penalty
        return bool(self.logit_bias) or not plain


GREEDY = Sampling(temperature=0.0)


@runtime_checkable
class Guide(Protocol):
    """What says which ids a text may go on with: a grammar, for one."""

    def allowed(self) -> np.ndarray:
        """Return 32-bit words with a bit for every id, the lowest of a word first; beyond them none is allowed."""
        ...

    def take(self, token: int) -> bool:
        """Take the id that was picked; return whether the text is over."""
        ...


class Rules(eqx.Module):
    """How each slot of a step picks: the numbers of `Sampling`, neutral where nothing is asked for.

    Attributes:
        temperature: and the others as there.
        seed: of each row.
        biases: ids and what is added to their logits; V and beyond stand for none.
        history: ids of each row's text, for penalties; those that are not known, or not asked for, are -1.
        given: how many of them were not generated.
        adjusts: whether a row has biases or penalties.
        bound: whether a row may pick allowed ids alone.
        allowed: of each row, a bit for every id, the lowest of a word first.
        scores: whether entropy and rank are asked for.
        lists: whether the likeliest ids are asked for.
    """

    temperature: Float[Either, " R"]
    top_k: Int[Either, " R"]
    top_p: Float[Either, " R"]
    min_p: Float[Either, " R"]
    repetition: Float[Either, " R"]
    presence: Float[Either, " R"]
    frequency: Float[Either, " R"]
    seed: UInt[Either, " R"]
    given: Int[Either, " R"]
    adjusts: Bool[Either, " R"]
    bound: Bool[Either, " R"]
    allowed: UInt[Either, "R words"]
    bias_ids: Int[Either, "R M"]
    bias: Float[Either, "R M"]
    history: Int[Either, "R length"]
    scores: Bool[Either, ""]
    lists: Bool[Either, ""]

    @classmethod
    def neutral(cls, rows: int, length: int, words: int) -> "Rules":
        """Return the rules of rows that ask for nothing, as numpy arrays, with room for histories and allowed ids."""
        plain = {name: np.full(rows, number) for name, number in _numbers(GREEDY, 0).items()}
        return cls(
            **plain, bias_ids=np.full((rows, BIASES), _NONE, np.int32), bias=np.zeros((rows, BIASES), np.float32),
            bound=np.zeros(rows, bool), allowed=np.zeros((rows, words), np.uint32),
            history=np.full((rows, length), -1, np.int32), scores=np.zeros((), bool), lists=np.zeros((), bool),
        )  # fmt: skip

    def of(self, rows: Int[Array, " T"]) -> "Rules":
        """Return the rules of slots in these rows."""
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[rows] if leaf.ndim else leaf, self)

    def put(self, row: int, sampling: Sampling, ids: Sequence[int], given: int) -> None:
        """Write a text's rules into a row; the arrays are numpy's."""
        for name, number in _numbers(sampling, given).items():
            getattr(self, name)[row] = number
        for i, (token, bias) in enumerate(sampling.logit_bias):
            self.bias_ids[row, i], self.bias[row, i] = token, bias
        if sampling.adjusts:
            self.history[row, : len(ids)] = ids


def _numbers(sampling: Sampling, given: int) -> dict[str, np.generic]:
    """Return what a row is told of how it picks, but for its lists."""
    return {
        "temperature": np.float32(sampling.temperature),
        "top_k": np.int32(min(sampling.top_k or _NONE, _NONE)),
        "top_p": np.float32(1 if sampling.top_p is None else max(sampling.top_p, 1 / _MOST)),
        "min_p": np.float32(sampling.min_p or 0),
        "repetition": np.float32(sampling.repetition_penalty),
        "presence": np.float32(sampling.presence_penalty),
        "frequency": np.float32(sampling.frequency_penalty),
        "seed": np.uint32(sampling.seed & 0xFFFFFFFF),
        "given": np.int32(given),
        "adjusts": np.bool_(sampling.adjusts),
    }


class Picked(eqx.Module):
    """What each slot of a step says.

    Attributes:
        ids: what follows; -1 where logits are NaN.
        full: its log-probability under the model's own distribution.
        drawn: its log-probability under the one that it was drawn from, after penalties, temperature and what they
            left out; 0 where the most likely id is taken.
        target: the log-probability of the slot's target, under the model's own distribution.
        entropy: of that distribution, in nats, where scores are asked for.
        rank: how many ids are likelier than the target, where scores are asked for.
        top: the likeliest ids and their log-probabilities, where lists are asked for.
    """

    ids: Int[Array, "*T"]
    full: Float[Array, "*T"]
    drawn: Float[Array, "*T"]
    target: Float[Array, "*T"]
    entropy: Float[Array, "*T"]
    rank: Int[Array, "*T"]
    top: tuple[Int[Array, "*T top"], Float[Array, "*T top"]]


def pick(
    logits: Float[Array, "R V"],
    rules: Rules,
    positions: Int[Either, "R W"],
    tokens: Int[Either, "R W"],
    at: Int[Array, " R"],
    targets: Int[Either, " R"],
    most: int,
) -> Picked:
    """Return what a slot of each row picks. What costs passes over the vocabulary runs only where some row asks.

    A row's bits do not depend on whether others ask: what they add leaves it out, or is exact.

    Args:
        logits: after the token of each row's slot.
        rules: of each row.
        positions: of each token of the rows in its text.
        tokens: the ids of the rows.
        at: which slot of each row.
        targets: whose probabilities are told.
        most: how many of the likeliest ids are told.
    """
    reached = jnp.take_along_axis(jnp.asarray(positions), at[:, None], axis=1)[:, 0]
    norm = jax.nn.logsumexp(logits, axis=-1)
    special = (rules.temperature > 0) | rules.adjusts | rules.bound
    last = jnp.argsort(special)  # those that need more than the likeliest id come last

    def one(i, found):
        row = last[len(last) - 1 - i]
        new = _asked(logits[row], rules.of(row[None]), positions[row], tokens[row], reached[row])
        return jax.tree.map(lambda all, mine: all.at[row].set(mine.astype(all.dtype)), found, new)

    likeliest = _largest(logits), jnp.zeros(len(logits))
    with jax.named_scope("rows"):  # one at a time: so little memory is enough
        ids, drawn = jax.lax.fori_loop(0, special.sum(), one, likeliest)
    target = _of(logits, targets)
    entropy, rank = _scored(logits, norm, target, rules.scores)
    values, top = _likeliest(logits, min(most, logits.shape[1]), rules.lists)
    return Picked(
        ids=jnp.where(jnp.isnan(norm), -1, ids).astype(jnp.int32), full=_of(logits, ids) - norm, drawn=drawn,
        target=target - norm, entropy=entropy, rank=rank, top=(top, values - norm[:, None]),
    )  # fmt: skip


def _largest(logits):
    """Return the first id of each row's largest logit."""
    plain = lambda logits: jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.lax.platform_dependent(logits, cpu=_first_of_largest, default=plain)


def _first_of_largest(logits):
    """Return `_largest` in two passes, of which XLA makes vector instructions on CPUs."""
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.where(logits == logits.max(-1, keepdims=True), ids, _NONE).min(-1)


def _scored(logits, norm, target, asked):
    """Return the entropy of each row, and how many ids are likelier than its target, if that is asked for."""

    def found():
        logs = logits - norm[:, None]
        entropy = -jnp.where(logs > -jnp.inf, jnp.exp(logs) * logs, 0).sum(-1)
        return entropy, (logits > target[:, None]).sum(-1, dtype=jnp.int32)

    return jax.lax.cond(asked, found, lambda: (jnp.zeros(len(logits)), jnp.zeros(len(logits), jnp.int32)))


def _likeliest(logits, most, asked):
    """Return the largest logits of each row and their ids, if they are asked for."""
    nothing = jnp.zeros((len(logits), most)), jnp.zeros((len(logits), most), jnp.int32)
    found = lambda: tuple(jax.lax.map(lambda row: jax.lax.top_k(row, most), logits))
    return jax.lax.cond(asked, found, lambda: nothing)


def _of(values, index):
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]


def _asked(logits_V, own, positions_W, tokens_W, position):
    """Return the id that a row picks by its own rules, and its log-probability among what they leave."""
    hot = own.temperature[0] > 0
    cut = hot & ((own.top_k[0] < len(logits_V)) | (own.top_p[0] < 1) | (own.min_p[0] > 0))
    adjusted = jax.lax.cond(
        own.adjusts[0], lambda: _adjusted(logits_V, own, positions_W, tokens_W, position), lambda: logits_V
    )
    adjusted = jax.lax.cond(own.bound[0], lambda: _bound(adjusted, own.allowed[0]), lambda: adjusted)
    scaled = lambda: (adjusted - adjusted.max()) / own.temperature  # the largest is 0, however cold
    least = jax.lax.cond(
        cut,
        lambda: threshold(scaled()[None], own.top_k, own.top_p, own.min_p)[0],
        lambda: jnp.float32(-jnp.inf),
    )
    return jax.lax.cond(
        hot,
        lambda: _drawn(scaled(), least, own.seed[0], position),
        lambda: (_largest(adjusted[None])[0], jnp.float32(0)),
    )


def _drawn(logits_V, least, seed, position):
    """Return the id that a row picks at random, and its log-probability among those that are not below `least`."""
    kept = jnp.where(logits_V < least, -jnp.inf, logits_V)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed), position)
    token = jax.random.categorical(key, kept)
    return token.astype(jnp.int32), kept[token] - jax.nn.logsumexp(kept)


def _adjusted(logits_V, rules, positions_W, tokens_W, position):
    """Return logits with the biases and penalties of their row, of which `rules` are."""
    (length,), (vocab,) = rules.history[0].shape, logits_V.shape
    at, where = jnp.maximum(positions_W, 0), jnp.arange(length)
    # The row's own tokens stand in the history where the host could not know them yet.
    ids = rules.history[0].at[jnp.where(positions_W >= 0, at, length)].set(tokens_W, mode="drop")
    there = (ids >= 0) & (where <= position)
    slot = lambda chosen: jnp.where(chosen, ids, vocab)
    seen = jnp.zeros(vocab, bool).at[slot(there)].set(True, mode="drop")
    count = jnp.zeros(vocab).at[slot(there & (where >= rules.given[0]))].add(1.0, mode="drop")
    biased = logits_V.at[rules.bias_ids[0]].add(rules.bias[0], mode="drop")
    found = penalise(biased, seen, rules.repetition[0])
    return found - rules.presence[0] * (count > 0) - rules.frequency[0] * count


def _bound(logits_V, allowed):
    bits = (allowed[:, None] >> jnp.arange(32, dtype=allowed.dtype)) & 1
    return jnp.where(bits.reshape(-1)[: len(logits_V)] == 1, logits_V, -jnp.inf)


def penalise(
    logits: Float[Array, "*b V"], seen: Bool[Array, "*b V"], penalty: Float[Array, ""] | float
) -> Float[Array, "*b V"]:
    """Make tokens that were seen less likely (https://arxiv.org/abs/1909.05858)."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def threshold(
    logits: Float[Array, "T V"], top_k: Int[Either, " T"], top_p: Float[Either, " T"], min_p: Float[Either, " T"]
) -> Float[Array, " T"]:
    """Return the least logit that top_k, then top_p, then min_p leave; the most likely token always stays."""
    falling = jnp.sort(logits, axis=-1, descending=True)
    kth = jnp.minimum(top_k, logits.shape[1]) - 1
    least = jnp.take_along_axis(falling, kth[:, None], axis=1)
    falling = jnp.where(falling < least, -jnp.inf, falling)
    probs = jax.nn.softmax(falling, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs  # of the tokens more likely than each
    stays = (before < top_p[:, None]) | (top_p >= 1)[:, None]
    least = jnp.maximum(least[:, 0], jnp.where(stays, falling, jnp.inf).min(-1))
    return jnp.maximum(least, falling[:, 0] + jnp.log(min_p))
