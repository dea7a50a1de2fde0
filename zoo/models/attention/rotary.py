"""The frequencies of rotary embedding (https://arxiv.org/abs/2104.09864), plain and stretched to longer texts.

`H` head size. The ways to stretch are those of transformers; their numbers are float32, as there.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from zoo.config import RopeScaling, RopeType


def frequencies(
    size: int, theta: float, scaling: RopeScaling | None = None, length: Int[Array, "*b"] | int = 0
) -> Float[Array, "*b half"] | Float[np.ndarray, " half"]:
    """Return the radians per position of each pair of a head's dimensions: `theta ** (-2i / H)`, then stretched.

    Args:
        size: the head's size H.
        theta: base of the frequencies.
        scaling: how they are stretched; None leaves them alone.
        length: one more than the last position. Only the dynamic and the long kind read it; it may be traced, or one
            for each token.
    """
    plain = _plain(size, theta)
    if scaling is None:
        return plain
    match scaling.rope_type:
        case RopeType.linear:
            return plain / np.float32(scaling.factor)
        case RopeType.dynamic:
            return _dynamic(size, theta, scaling, length)
        case RopeType.llama3:
            return _llama3(plain, scaling)
        case RopeType.yarn:
            return _yarn(plain, theta, scaling)
        case RopeType.longrope:
            return _longrope(plain, scaling, length)
        case RopeType.proportional:
            turning = np.arange(len(plain)) < int(scaling.share * size // 2)
            return np.where(turning, plain / np.float32(scaling.factor), np.float32(0))


def _plain(size, theta):
    half = size // 2
    return (1 / theta ** (np.arange(half, dtype=np.float32) / np.float32(half))).astype(np.float32)


def _dynamic(size, theta, scaling, length):
    """A base that grows with the text, once it is longer than those trained on
    (https://www.reddit.com/r/LocalLLaMA/comments/14lz7j5)."""
    original = scaling.original_length
    if isinstance(length, int):
        ratio = max(length, original) / original
        return _plain(size, theta * (scaling.factor * ratio - (scaling.factor - 1)) ** (size / (size - 2)))
    ratio = jnp.maximum(length, original) / original
    grown = theta * (scaling.factor * ratio - (scaling.factor - 1)) ** (size / (size - 2))
    return 1 / grown[..., None] ** (jnp.arange(size // 2, dtype=jnp.float32) / (size // 2))


def _llama3(plain, scaling):
    """Long waves stretched, short ones kept, a ramp between (Llama 3.1, https://arxiv.org/abs/2407.21783)."""
    turns = scaling.original_length * plain / (2 * np.float32(math.pi))  # in the text trained on
    ramp = scaling.high_freq - scaling.low_freq  # none in Llama 4 Scout
    kept = np.clip((turns - scaling.low_freq) / ramp, 0, 1) if ramp else (turns > scaling.low_freq).astype(np.float32)
    return ((1 - kept) * plain / scaling.factor + kept * plain).astype(np.float32)


def _longrope(plain, scaling, length):
    """Two lists of factors that a search has found, for short texts and for long ones
    (https://arxiv.org/abs/2402.13753); their temperature is in `query_scale`."""
    short, long = (plain / np.array(each, np.float32) for each in (scaling.short_factors, scaling.long_factors))
    if isinstance(length, int):
        return long if length > scaling.original_length else short
    return jnp.where((length > scaling.original_length)[..., None], long, short)


def _yarn(plain, theta, scaling):
    """YaRN's ramp between dimensions (https://arxiv.org/abs/2309.00071); its temperature is in `query_scale`."""
    half = len(plain)

    def dimension(turns):
        return half * math.log(scaling.original_length / (turns * 2 * math.pi)) / math.log(theta)

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    high = low + 0.001 if low == high else high
    stretched = np.clip((np.arange(half, dtype=np.float32) - low) / (high - low), 0, 1)
    return (plain / scaling.factor * stretched + plain * (1 - stretched)).astype(np.float32)
