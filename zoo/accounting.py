"""What a model costs, from its config alone: parameters and FLOPs. Nothing is allocated and JAX is not imported.

FLOPs are those of the mathematics, as in model-FLOP utilisation: two per multiply-add of every matrix product, the head
once (tied or not), the embedding lookup not at all, attention only over keys that a query sees, of experts only those
that a token goes to, no recomputation; of layers that hand on a state their matrices alone.
"""

import math

from zoo.config import Chunk, Config, rows
from zoo.families.mixture import MixtureLike
from zoo.parameters import Row


def count_params(config: Config) -> int:
    """Return the exact number of parameters, a tied table counted once."""
    return sum(math.prod(row.shape(config.dims)) for row in rows(config))


def count_active(config: Config) -> int:
    """Return the number of parameters that one token meets: of a mixture, only the experts that it goes to."""
    return sum(_active(row, config) for row in rows(config))


def head_flops(config: Config, batch: int, seq: int) -> int:
    """Return the FLOPs of the logits of `batch` sequences of `seq` tokens, forward only."""
    return 2 * batch * seq * config.embed_dim * config.vocab_size


def forward_flops(config: Config, batch: int, seq: int) -> int:
    """Return the FLOPs of one forward pass, hidden states and logits."""
    multiply = [row for row in rows(config) if row.fan_in and not row.looked_up and row.leaf != "head"]
    matrices = sum(row.times * _active(row, config) for row in multiply)
    queries, values = _attention_flops(config, seq)
    return 2 * batch * seq * matrices + batch * (queries + values) + head_flops(config, batch, seq)


def recomputed_flops(config: Config, batch: int, seq: int) -> int:
    """Return the FLOPs of two forward passes and a backward pass: of attention the latter has five products for two."""
    return 4 * forward_flops(config, batch, seq) + batch * _attention_flops(config, seq)[0]


def train_flops(config: Config, batch: int, seq: int) -> int:
    """Return the FLOPs of one forward and backward pass: three times the forward."""
    return 3 * forward_flops(config, batch, seq)


def _active(row: Row, config: Config) -> int:
    """Count the elements of a leaf that one token meets."""
    count = math.prod(row.shape(config.dims))
    if "E" in row.lead and isinstance(config, MixtureLike):
        return count // config.num_experts * config.experts_per_token
    return count


def _attention_flops(config: Config, seq: int) -> tuple[int, int]:
    """Return the FLOPs of the two products of all layers that attend: with keys, and with values."""
    layers = enumerate(zip(config.layer_windows, config.layer_heads, strict=True))
    attending = [
        (visible_pairs(seq, window), widths) for i, (window, widths) in layers if i not in config.recurrent_layers
    ]
    of = lambda which: 2 * config.num_heads * sum(pairs * widths[which] for pairs, widths in attending)
    return of(1), of(2)


def visible_pairs(seq: int, window: int | None) -> int:
    """Return the number of (query, key) pairs that causal attention over `window` keys keeps."""
    if isinstance(window, Chunk):
        whole, rest = divmod(seq, window)
        return whole * visible_pairs(window, None) + visible_pairs(rest, None)
    width = seq if window is None else min(seq, window)
    return width * (width + 1) // 2 + (seq - width) * width
