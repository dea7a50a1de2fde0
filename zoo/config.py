"""What every decoder's config has: sizes, rotary embedding, windows. The families are in `zoo.families`. Free of JAX.

Field names are the same in every model of the zoo. The letters of `dims` are the alphabet used everywhere else: `V`
vocab `D` embed `F` mlp hidden `N` query heads `K` kv heads `H` head size `L` layers `E` experts (and `B` batch
`S` sequence `T` tokens).
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from zoo.dialect import Dialect
from zoo.parameters import Row

LOCAL, GLOBAL = "LG"
_MOST = 2**31 - 1  # no dimension is larger: a config with a digit too many is refused before anything is made of it
_MOST_LAYERS = 4096


class Chunk(int):
    """A window that begins anew every so many tokens: a query sees the keys before it from its chunk's first on.

    It is no other window of that length: what is compiled is found again by what it was compiled for.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chunk) and int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((Chunk, int(self)))


class RopeType(StrEnum):
    """How rotary frequencies are stretched to longer texts."""

    linear = "linear"
    dynamic = "dynamic"
    llama3 = "llama3"
    yarn = "yarn"
    longrope = "longrope"
    proportional = "proportional"


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """A stretch of the rotary frequencies.

    Attributes:
        rope_type: which of these (`zoo.models.attention.rotary`).
        factor: how many times longer texts become.
        original_length: tokens of the texts trained on; linear does not read it.
        low_freq: llama3: waves with fewer turns in the original length are stretched in full.
        high_freq: llama3: waves with more turns are left alone.
        beta_fast: yarn: the same as `high_freq`, for the dimension that has this many turns.
        beta_slow: yarn: the same as `low_freq`.
        truncate: yarn: the two dimensions are rounded outwards.
        attention_factor: yarn, longrope: multiplies queries and keys; None is `1 + ln(factor) / 10`, of longrope
            `sqrt(1 + ln(factor) / ln(original_length))`.
        mscale: yarn, of DeepSeek: how much of `0.1 ln(factor)` queries and keys have in whole heads, turned or not.
        query_growth: yarn, of Ministral 3 and Mistral Small 4: queries grow by this share of the logarithm of how many
            original lengths they are behind.
        short_factors: longrope: what each pair's frequency is divided by, in texts up to the original length.
        long_factors: longrope: likewise in longer ones.
        share: proportional: of each head's pairs this share turns, the first, as if all did; the others do not.
    """

    rope_type: RopeType
    factor: float
    original_length: int = 8192
    low_freq: float = 1.0
    high_freq: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    query_growth: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    share: float = 1.0

    @property
    def growth(self) -> tuple[float, int] | None:
        """How much queries grow, and with how many tokens (`Config.query_growth`); None is not."""
        return None if self.query_growth is None else (self.query_growth, self.original_length)

    def __post_init__(self):
        for name in ("short_factors", "long_factors"):  # files have lists, which no key of a table can be
            object.__setattr__(self, name, tuple(getattr(self, name)))
        names = (
            "factor",
            "original_length",
            "low_freq",
            "high_freq",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
        )
        problems = not_positive(self, names)
        if not 0 < self.share <= 1:
            problems.append(f"share={self.share} must be more than 0 and at most 1")
        if self.rope_type is RopeType.llama3 and not self.high_freq >= self.low_freq:
            problems.append(f"high_freq={self.high_freq} must be at least low_freq={self.low_freq}")
        if self.rope_type is RopeType.longrope:
            problems += [
                f"{name}={getattr(self, name)} must be positive numbers"
                for name in ("short_factors", "long_factors")
                if not getattr(self, name) or not all(0 < factor < math.inf for factor in getattr(self, name))
            ]
        refuse(self, problems)

    @property
    def temperature(self) -> float:
        """What queries and keys are both multiplied by."""
        if self.rope_type not in (RopeType.yarn, RopeType.longrope):
            return 1.0
        if self.factor <= 1:
            automatic = 1.0
        elif self.rope_type is RopeType.yarn:
            automatic = 0.1 * math.log(self.factor) + 1.0
        else:
            automatic = math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        return automatic if self.attention_factor is None else self.attention_factor


Rope = tuple[float, RopeScaling | None]


def temperature_of(rope: Rope | None) -> float:
    """Return what a layer's queries and keys are both multiplied by where they turn."""
    return 1.0 if rope is None or rope[1] is None else rope[1].temperature


@dataclass(frozen=True, kw_only=True)
class Config:
    """What every decoder has. A family's class also says what its models and its files are.

    That is `model`, the class by its full name (it needs JAX), `rows`, the parameters, and `dialects`, by `model_type`.

    Attributes:
        vocab_size: rows of the embedding table.
        num_layers: transformer blocks.
        embed_dim: width of the residual stream.
        mlp_dim: hidden width of the gated MLP.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads` (1 is multi-query attention).
        head_dim: width of a head, even.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in every norm.
        context_length: tokens of the longest text that the checkpoint is meant for. Nothing is computed from it.
    """

    model: ClassVar[str]
    dialects: ClassVar[Mapping[str, Dialect]] = {}
    prefix: ClassVar[str] = "model."  # of tensors' names, which files of a model without its head may lack
    unread: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)  # ends of tensors' names that hold no parameter

    vocab_size: int
    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    context_length: int = 8192

    def __post_init__(self):
        sizes = ("vocab_size", "num_layers", "embed_dim", "mlp_dim", "num_heads", "num_kv_heads", "head_dim")
        problems = [f"{name}={getattr(self, name)} must be at least 1" for name in sizes if getattr(self, name) < 1]
        problems += [f"{name}={getattr(self, name)} is too large" for name in sizes if getattr(self, name) > _MOST]
        if self.num_layers > _MOST_LAYERS:
            problems.append(f"num_layers={self.num_layers} must be at most {_MOST_LAYERS}")
        problems += not_positive(self, ("rope_theta", "norm_eps", "context_length"))
        if self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads:
            problems.append(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2 and self.rotary_dim % 2:
            problems.append(f"head_dim={self.head_dim} must be even, because rotary embedding turns pairs")
        refuse(self, problems + self.problems())

    def problems(self) -> list[str]:
        """What is wrong with the fields that a family adds."""
        return []

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has; see the function `rows`, which keeps them."""
        raise NotImplementedError(f"{type(self).__name__} does not say which parameters it has: give it `rows`")

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return {
            "V": self.vocab_size,
            "D": self.embed_dim,
            "F": self.mlp_dim,
            "N": self.num_heads,
            "K": self.num_kv_heads,
            "H": self.head_dim,
            "L": self.num_layers,
        }

    @property
    def beside(self) -> tuple[str, ...]:
        """Beginnings of the names of tensors that are another model's, which a folder may hold too."""
        return ()

    @property
    def layer_stacks(self) -> tuple[str, ...]:
        """Which of the model's stacks of blocks each layer is in: blocks alike are stacked together, in order."""
        return ("layers",) * self.num_layers

    @property
    def layer_sources(self) -> tuple[int, ...]:
        """Whose keys and values each layer attends to: its own, by its number, or another layer's before it."""
        return tuple(range(self.num_layers))

    @property
    def value_dim(self) -> int:
        """The width of a head's values: most families' is that of its queries and keys."""
        return self.head_dim

    @property
    def layer_heads(self) -> tuple[tuple[int, int, int], ...]:
        """Of each layer, how many kv heads there are, and how wide queries and keys, and values, of a head are."""
        return ((self.num_kv_heads, self.head_dim, self.value_dim),) * self.num_layers

    @property
    def layer_cached(self) -> tuple[tuple[int, int, int], ...]:
        """What each layer keeps of a token that was read: heads, of each a key and a value, and their width."""
        return tuple((heads, 2, max(widths)) for heads, *widths in self.layer_heads)

    @property
    def query_scale(self) -> float:
        """What attention scores are multiplied by, the temperature of rotary embedding included where all have one."""
        return self.head_dim**-0.5 * (self.rope_temperature or 1.0) ** 2

    @property
    def query_growth(self) -> tuple[float, int] | None:
        """How much queries grow with the logarithm of how many times so many tokens they are behind; None is not."""
        return None

    @property
    def embed_scale(self) -> float | None:
        """What the rows of the table are multiplied by where they are looked up."""
        return None

    @property
    def norm_offset(self) -> float:
        """What is added to the weights of norms: 1 where they are stored less one."""
        return 0.0

    @property
    def centred_norms(self) -> bool:
        """Whether norms take the mean away, those of queries and keys each head's own."""
        return False

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head turn by its position: the first."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def rotary_fraction(self) -> float:  # a field of the families that have it
        """The share of each head that turns by its position."""
        return 1.0

    @property
    def layer_rotary_dims(self) -> tuple[int, ...]:
        """How many dimensions of a head turn in each layer."""
        return (self.rotary_dim,) * self.num_layers

    @property
    def rotary_pairs(self) -> bool:
        """Whether neighbouring dimensions of a head turn together, in place of those of its halves."""
        return False

    @property
    def turned_first(self) -> bool:
        """Whether queries and keys are normalised after they turn, where they are, in place of before."""
        return False

    @property
    def bidirectional(self) -> bool:
        """Whether every token sees those behind it too: such a model reads, and does not write."""
        return False

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers that hand on a state from token to token, and keep no keys and values."""
        return ()

    @property
    def recurrent_state(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what each of them hands on, by name."""
        return {}

    @property
    def residual_scale(self) -> float:
        """What attention and MLP put out is multiplied by before it is added."""
        return 1.0

    @property
    def clip(self) -> float | None:
        """How large elements of queries, keys and values may be."""
        return None

    @property
    def logit_scale(self) -> float | None:
        """What logits are multiplied by."""
        return None

    # These four are fields of the families that have them.
    @property
    def final_softcap(self) -> float | None:
        """At which logits level off."""
        return None

    @property
    def window(self) -> int | None:
        """How many keys a query of a local layer sees."""
        return None

    @property
    def attention_pattern(self) -> str:
        """Which layers are local."""
        return LOCAL

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """How rotary frequencies are stretched."""
        return None

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """How many keys each layer's queries see, themselves included; None is all of them."""
        return windows(self.num_layers, self.window, self.attention_pattern)

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """The base of each layer's rotary frequencies, and how they are stretched; None where nothing turns."""
        return ((self.rope_theta, self.rope_scaling),) * self.num_layers

    @property
    def rope_temperature(self) -> float | None:
        """What queries and keys of all layers are multiplied by.

        None where layers differ, or a part of each head alone is multiplied: there rotation does it.
        """
        temperatures = {temperature_of(rope) for rope in self.layer_ropes}
        whole = self.rotary_dim == self.head_dim or temperatures == {1.0}
        return temperatures.pop() if len(temperatures) == 1 and whole else None


@functools.lru_cache(maxsize=64)
def rows(config: Config) -> tuple[Row, ...]:
    """Return the rows of every parameter that a model of this config has."""
    return config.rows()


def learned_positions(config: Config) -> int | None:
    """Return how many positions a model of this config has learned; None where texts may be of any length."""
    return config.context_length if any(row.leaf == "positions" for row in rows(config)) else None


def not_positive(config: Any, names: tuple[str, ...]) -> list[str]:
    """Say which of the named fields are neither None nor positive and finite."""
    values = {name: getattr(config, name) for name in names}
    return [
        f"{name}={value} must be positive"
        for name, value in values.items()
        if value is not None and not 0 < value < math.inf
    ]


def not_yarn(config: Any) -> list[str]:
    """Say that a config is not stretched by yarn."""
    found = None if config.rope_scaling is None else config.rope_scaling.rope_type
    return [] if found is RopeType.yarn else [f"rope_scaling.rope_type={found} must be yarn"]


def refuse(config: Any, problems: list[str]) -> None:
    if problems:
        raise ValueError(f"{type(config).__name__} cannot be made: " + "; ".join(problems) + ".")


def window_problems(window: int | None, pattern: str, needed: bool = False) -> list[str]:
    """Say what is wrong with windows; they are `needed` where local layers turn otherwise than global ones."""
    problems = [] if window is None or window > 0 else [f"window={window} must be positive"]
    problems += pattern_problems("attention_pattern", pattern, {LOCAL: "local", GLOBAL: "global"})
    if needed and window is None and LOCAL in pattern:
        problems.append("window=None leaves local layers without one")
    return problems


def pattern_problems(name: str, pattern: str, letters: dict[str, str]) -> list[str]:
    """Say what is wrong with a pattern over the depth, given what each letter means."""
    if pattern and not set(pattern) - set(letters):
        return []
    return [f"{name}={pattern!r} must be made of {' and '.join(f'{one} ({what})' for one, what in letters.items())}"]


def pattern_of(layers: str, usual: str) -> str:
    """Return the usual pattern if that is what layers follow, else the shortest that they do."""
    shortest = (layers[:period] for period in range(1, len(layers) + 1))
    return next(one for one in (usual, *shortest) if (one * len(layers))[: len(layers)] == layers)


def windows(num_layers: int, window: int | None, pattern: str) -> tuple[int | None, ...]:
    """Repeat a pattern of local and global layers; only local ones have the window."""
    return tuple(window if pattern[layer % len(pattern)] == LOCAL else None for layer in range(num_layers))


def ropes_by_type(config: Any) -> tuple[Rope | None, ...]:
    """Return how each layer's positions turn where local layers have a base of their own, and are not stretched."""
    kinds = windows(config.num_layers, 1, config.attention_pattern)
    local, whole = (config.local_rope_theta, None), (config.rope_theta, config.rope_scaling)
    return tuple(whole if window is None else local for window in kinds)


def rotary_problems(config: Any) -> list[str]:
    """Say why a share of each head cannot turn."""
    if not 0 < config.rotary_fraction <= 1 or config.rotary_dim < 2 or config.rotary_dim % 2:
        return [
            f"rotary_fraction={config.rotary_fraction} of head_dim={config.head_dim} is {config.rotary_dim} dimensions "
            "and must be a positive, even number of them, at most all"
        ]
    return []


def scaling_problems(config: Any, scaling: RopeScaling | None) -> list[str]:
    """Say why a model cannot have its rotary frequencies stretched so."""
    if scaling is None:
        return []
    if scaling.rope_type is RopeType.dynamic and config.head_dim <= 2:
        return [f"head_dim={config.head_dim} must be larger than 2 for rope_scaling.rope_type=dynamic"]
    if scaling.rope_type is RopeType.yarn and not config.rope_theta > 1:
        return [f"rope_theta={config.rope_theta} must be larger than 1 for rope_scaling.rope_type=yarn"]
    if scaling.rope_type is RopeType.longrope:
        half = config.rotary_dim // 2
        return [
            f"rope_scaling.{name} has {len(getattr(scaling, name))} numbers, and must have {half}: one for each pair"
            for name in ("short_factors", "long_factors")
            if len(getattr(scaling, name)) != half
        ]
    return []
