"""What models share of whose layers some have a state space in place of attention: Mamba 2
(https://arxiv.org/abs/2405.21060). Free of JAX."""

from dataclasses import dataclass
from typing import Any

from zoo.config import not_positive, pattern_of
from zoo.families.hybrid import ATTEND, HybridLike
from zoo.parameters import LAYER, Row

STATES = "M"
_TYPES = {STATES: "mamba", ATTEND: "attention"}
_ALIASES = {"linear_attention": "mamba", "full_attention": "attention"}  # what transformers 5 calls them
_SPACE = LAYER + "mamba."
_INTO = _SPACE + "in_proj.weight"
MAMBA = (
    Row("mamba.z", _INTO, "Z D -> D Z", "D", fused="ZCM", part=0),
    Row("mamba.xbc", _INTO, "C D -> D C", "D", fused="ZCM", part=1),
    Row("mamba.dt", _INTO, "M D -> D M", "D", fused="ZCM", part=2),
    Row("mamba.conv", _SPACE + "conv1d.weight", "C G I -> C G I", start=0.5),
    Row("mamba.decay", _SPACE + "A_log", "M -> M", start=1.0),
    Row("mamba.step", _SPACE + "dt_bias", "M -> M", start=1.0),
    Row("mamba.skip", _SPACE + "D", "M -> M", start=1.0),
    Row("mamba.scale", _SPACE + "norm.weight", "Z -> Z", start=1.0),
    Row("mamba.o", _SPACE + "out_proj.weight", "D (M W) -> M W D", "MW"),
)
_CONV_BIAS = Row("mamba.conv_bias", _SPACE + "conv1d.bias", "C -> C")
KEYS = (
    *("layer_types", "layers_block_type", "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups"),
    *("mamba_d_conv", "mamba_expand", "mamba_conv_bias"),
)


@dataclass(frozen=True, kw_only=True)
class MambaLike(HybridLike):
    """What they share, whatever they grew out of: inherited beside that family's config.

    Attributes:
        layer_pattern: layers of state spaces (M) and of attention (A), repeated over the depth.
        mamba_heads: heads of a state space.
        mamba_head_dim: channels of each.
        mamba_state_dim: of each channel, how many numbers its state has.
        mamba_groups: into how many groups heads are divided, which share directions; they divide the heads.
        conv_bias: whether a bias follows the convolution.
    """

    letter, kind, stack, optional = STATES, "state space", "mamba", True

    layer_pattern: str = ATTEND
    mamba_heads: int = 128
    mamba_head_dim: int = 64
    mamba_state_dim: int = 128
    mamba_groups: int = 1
    conv_bias: bool = True

    def pattern_problems(self) -> list[str]:
        """Say what is wrong with the layers, and with the sizes of state spaces."""
        sizes = ("mamba_heads", "mamba_head_dim", "mamba_state_dim", "mamba_groups", "conv_taps")
        problems = super().pattern_problems() + not_positive(self, sizes)
        if self.mamba_groups > 0 and self.mamba_heads % self.mamba_groups:
            problems.append(f"mamba_heads={self.mamba_heads} must be a multiple of mamba_groups={self.mamba_groups}")
        return problems

    @property
    def recurrent_state(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what each of them hands on: what the convolution sees of the last tokens, and the matrices."""
        if not self.recurrent_layers:
            return {}
        matrices = self.mamba_heads, self.mamba_head_dim, self.mamba_state_dim
        return {"inputs": (self.conv_taps - 1, self.dims["C"]), "matrices": matrices}

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        inner = self.mamba_heads * self.mamba_head_dim
        own = {"Z": inner, "C": inner + 2 * self.mamba_groups * self.mamba_state_dim, "G": 1, "I": self.conv_taps}
        own |= {"M": self.mamba_heads, "W": self.mamba_head_dim}
        return getattr(super(), "dims") | own  # noqa: B009 (of what this is inherited beside)

    def mamba_rows(self) -> tuple[Row, ...]:
        """Return the rows of state spaces."""
        return (*MAMBA, *((_CONV_BIAS,) if self.conv_bias else ()))


def read_states(read: Any, num_layers: int) -> dict[str, Any]:
    """Return which layers have a state space, and their sizes, if there are any."""
    listed = "layer_types" if read.raw.get("layers_block_type") is None else "layers_block_type"
    letters = read.types(_TYPES, STATES * num_layers, listed, _ALIASES)
    fields: dict[str, Any] = {"layer_pattern": pattern_of(letters, ATTEND)}
    sizes = (("mamba_n_heads", 128), ("mamba_expand", 2), ("hidden_size", 0))
    heads, expand, width = (read.size(key, default, {}) for key, default in sizes)
    told = read.raw.get("mamba_d_head", "auto") != "auto"
    each = read.size("mamba_d_head", 0, {}) if told else expand * width // max(1, heads)
    if heads * each != expand * width:
        read.problems.append(
            f"`mamba_n_heads`={heads} times `mamba_d_head`={each} is not `mamba_expand`={expand} times "
            f"`hidden_size`={width}"
        )
    if STATES not in letters:
        return fields
    return fields | {
        "mamba_heads": heads,
        "mamba_head_dim": each,
        "mamba_state_dim": read.size("mamba_d_state", 256, {}),
        "mamba_groups": read.size("mamba_n_groups", 1, {}),
        "conv_taps": read.size("mamba_d_conv", 4, {}),
        "conv_bias": read.flag("mamba_conv_bias", True),
    }


def refuse_states(config: Any) -> str | None:
    """Say why a file cannot say how wide state spaces are."""
    inner = config.mamba_heads * config.mamba_head_dim
    if not config.recurrent_layers or inner % config.embed_dim == 0:
        return None
    return (
        f"it has no word for mamba_heads={config.mamba_heads} times mamba_head_dim={config.mamba_head_dim}, which is "
        f"no multiple of embed_dim={config.embed_dim}"
    )


def write_states(config: Any) -> dict[str, Any]:
    """Return what a file says of state spaces; sizes that suit transformers where there are none."""
    types = [_TYPES[STATES if stack == "mamba" else ATTEND] for stack in config.layer_stacks]
    if not config.recurrent_layers:
        return {"layer_types": types, "mamba_n_heads": 1, "mamba_d_head": "auto", "mamba_expand": 1}
    return {
        "layer_types": types,
        "mamba_n_heads": config.mamba_heads,
        "mamba_d_head": config.mamba_head_dim,
        "mamba_d_state": config.mamba_state_dim,
        "mamba_n_groups": config.mamba_groups,
        "mamba_d_conv": config.conv_taps,
        "mamba_expand": config.mamba_heads * config.mamba_head_dim // config.embed_dim,
        "mamba_conv_bias": config.conv_bias,
    }
