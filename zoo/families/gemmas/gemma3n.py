"""Gemma 3n (https://ai.google.dev/gemma/docs/gemma-3n), the text part: several residual streams, of which each layer
computes one (AltUp, https://arxiv.org/abs/2301.13310), inputs of each layer's own, and last layers that attend to the
keys and values of those before. Free of JAX."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zoo.config import (
    Config,
    Rope,
    RopeScaling,
    not_positive,
    ropes_by_type,
    scaling_problems,
    window_problems,
    windows,
)
from zoo.dialect import Dialect, eps
from zoo.families.gemmas.gemma import POST_NORMS, TANH
from zoo.parameters import ATTENTION, ENDS, LAYER, MLP, QK_NORMS, Row

INPUT = (  # of a layer: what it makes of its own input
    Row("layers.input_gate", LAYER + "per_layer_input_gate.weight", "W D -> D W", "D"),
    Row("layers.input_up", LAYER + "per_layer_projection.weight", "D W -> W D", "W"),
    Row("layers.input_norm", LAYER + "post_per_layer_input_norm.weight", "D -> D"),
)
INPUTS = (  # of all layers: what makes their inputs
    Row("inputs", "model.embed_tokens_per_layer.weight", "U Y -> U Y", "Y", gain=1.0),
    Row("inputs_down", "model.per_layer_model_projection.weight", "Y D -> Y D", "D"),
    Row("inputs_norm", "model.per_layer_projection_norm.weight", "W -> W"),
)
_ALTUP, _LAUREL = LAYER + "altup.", LAYER + "laurel."
_BLOCK = (
    *ATTENTION,
    *MLP,
    *POST_NORMS,
    *QK_NORMS,
    Row("layers.router_norm", _ALTUP + "router_norm.weight", "D -> D"),
    Row("layers.router", _ALTUP + "modality_router.weight", "M D -> D M", "D", times=2),
    Row("layers.predict_router", _ALTUP + "prediction_coefs.weight", "(O I) M -> M O I", "M", gain=0.1),
    Row("layers.correct_router", _ALTUP + "correction_coefs.weight", "O M -> M O", "M", gain=0.1),
    Row("layers.correct_scale", _ALTUP + "correct_output_scale", "D -> D", start=1.0),
    Row("layers.laurel_down", _LAUREL + "linear_left.weight", "A D -> D A", "D"),
    Row("layers.laurel_up", _LAUREL + "linear_right.weight", "D A -> A D", "A"),
    Row("layers.laurel_norm", _LAUREL + "post_laurel_norm.weight", "D -> D"),
    *INPUT,
)
KEYS_AND_VALUES = ("layers.k", "layers.v", "layers.k_norm")
INPUT_SIZES = {
    "vocab_size_per_layer_input": ("inputs_vocab_size", 262_144),
    "hidden_size_per_layer_input": ("inputs_dim", 256),
}
_OWN_SIZES = {
    "altup_num_inputs": ("num_streams", 4),
    "altup_active_idx": ("active_stream", 0),
    "num_kv_shared_layers": ("sharing_layers", 15),
    "laurel_rank": ("laurel_rank", 64),
}
_SIZES = {
    "vocab_size": ("vocab_size", 262_400),
    "num_hidden_layers": ("num_layers", 35),
    "hidden_size": ("embed_dim", 2048),
    "num_attention_heads": ("num_heads", 8),
    "num_key_value_heads": ("num_kv_heads", 2),
    "head_dim": ("head_dim", 256),
    "max_position_embeddings": ("context_length", 32_768),
}


def _read(read: Any, num_layers: int) -> dict[str, Any]:
    """Return the width of MLPs, of which all layers must have one, and which share of each is left at zero."""
    widths, shares = read.raw.get("intermediate_size", 16_384), read.raw.get("activation_sparsity_pattern")
    listed = widths if isinstance(widths, list) else [widths]
    if not listed or any(type(width) is not int or width != listed[0] for width in listed):
        read.problems.append(f"`intermediate_size`={widths!r} is not supported, only one integer for all layers")
        return {}
    if shares is None:  # as transformers fills it in
        sparse = 10 if num_layers > 10 else 0
        shares = [0.95] * sparse + [0.0] * (num_layers - sparse)
    if not isinstance(shares, list) or any(type(share) not in (int, float) for share in shares):
        read.problems.append(f"`activation_sparsity_pattern`={shares!r} is not a list of numbers, one for each layer")
        return {}
    return {"mlp_dim": listed[0], "sparsity": tuple(map(float, shares)) if any(shares) else ()}


def _write(config: Any) -> dict[str, Any]:
    shares = config.sparsity or (0.0,) * config.num_layers
    return {"intermediate_size": config.mlp_dim, "activation_sparsity_pattern": list(shares)}


@dataclass(frozen=True, kw_only=True)
class SharingLike(Config):
    """What Gemma 3n and 4 share: layers' own inputs, and last layers without keys and values of their own.

    Attributes:
        rope_theta: base of the rotary frequencies of global layers.
        local_rope_theta: that of local layers.
        rope_scaling: how the frequencies of global layers are stretched.
        window: on local layers a query sees this many keys, itself included.
        attention_pattern: local (L) and global (G) layers, repeated over the depth.
        final_softcap: logits become `c * tanh(logit / c)`; None leaves them alone.
        inputs_vocab_size: rows of the table of layers' own inputs.
        inputs_dim: width of a layer's own input.
        sharing_layers: how many of the last layers have no keys and values: they attend to those of the last layer
            before that is local, or global, as they are.
    """

    rope_theta: float = 1_000_000.0
    local_rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    window: int | None = 512
    attention_pattern: str = "LLLLG"
    final_softcap: float | None = 30.0
    inputs_vocab_size: int = 262_144
    inputs_dim: int = 256
    sharing_layers: int = 0

    def problems(self) -> list[str]:
        """Say what is wrong with the fields that are shared."""
        names = ("local_rope_theta", "final_softcap", "inputs_vocab_size")
        problems = not_positive(self, names) + window_problems(self.window, self.attention_pattern, needed=True)
        if not problems and not 0 <= self.sharing_layers < self.num_layers:
            problems.append(f"sharing_layers={self.sharing_layers} must be from 0 to {self.num_layers - 1}")
        elif not problems and (alone := set(self.local) - set(self.local[: self.first_sharing])):
            kind = "local" if True in alone else "global"
            problems.append(
                f"sharing_layers={self.sharing_layers} leaves no {kind} layer whose keys the others could share"
            )
        return problems + scaling_problems(self, self.rope_scaling)

    @property
    def first_sharing(self) -> int:
        """The first layer that shares keys and values."""
        return self.num_layers - self.sharing_layers

    @property
    def beside(self) -> tuple[str, ...]:
        """Beginnings of names: of what sees and hears, and of keys and values that nothing reads."""
        parts = ("k_proj", "v_proj", "k_norm", "v_norm")
        sharing = range(self.first_sharing, self.num_layers)
        unread = (f"{LAYER.format(i)}self_attn.{part}." for i in sharing for part in parts)
        return ("model.audio_tower.", "model.vision_tower.", "model.embed_audio.", "model.embed_vision.", *unread)

    @property
    def layer_sources(self) -> tuple[int, ...]:
        """Whose keys and values each layer attends to: the last ones, those of the last of their kind before."""
        last = {kind: layer for layer, kind in enumerate(self.local[: self.first_sharing])}
        return tuple(layer if layer < self.first_sharing else last[kind] for layer, kind in enumerate(self.local))

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """The base of each layer's rotary frequencies, and how they are stretched."""
        return ropes_by_type(self)

    @property
    def local(self) -> tuple[bool, ...]:
        """Which layers are local."""
        return tuple(window is not None for window in windows(self.num_layers, 1, self.attention_pattern))

    @property
    def query_scale(self) -> float:
        """What attention scores are multiplied by: queries and keys are normalised."""
        return (self.rope_temperature or 1.0) ** 2

    @property
    def embed_scale(self) -> float:
        """What the rows of the table are multiplied by where they are looked up."""
        return math.sqrt(self.embed_dim)

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        own = {"W": self.inputs_dim, "U": self.inputs_vocab_size, "Y": self.num_layers * self.inputs_dim}
        return super().dims | own


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(SharingLike):
    """Gemma 3n, the text part.

    Attributes:
        inputs_vocab_size: rows of the table of layers' own inputs; later ids have the first.
        num_streams: residual streams.
        active_stream: which of them layers compute.
        scaled_correction: the stream that layers compute is scaled before it meets their own inputs.
        laurel_rank: of the two matrices that go around attention.
        sparsity: the share of each layer's gates that is cut off, of one normal distribution; `()` cuts off none.
    """

    model: ClassVar[str] = "zoo.models.gemmas.gemma3n.Gemma3n"
    dialects: ClassVar = {
        "gemma3n_text": Dialect(
            architecture="Gemma3nForCausalLM",
            outer="gemma3n",
            outer_keys=(
                *("audio_config", "audio_soft_tokens_per_image", "audio_token_id", "boa_token_id", "eoa_token_id"),
                *("boa_token_index", "eoa_token_index", "audio_token_index", "vision_soft_tokens_per_image"),
            ),
            sizes=_SIZES | INPUT_SIZES | _OWN_SIZES,
            numbers={**eps(1e-6), "final_logit_softcapping": ("final_softcap", 30.0)},
            flags={"altup_correct_scale": ("scaled_correction", True)},
            windows="types",
            window=512,
            every=(None, 5),
            rope="global",
            theta=1_000_000.0,
            only={"hidden_activation": TANH, "attention_bias": (False, None), "tie_word_embeddings": (True,)},
            written={"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
            ignored=("altup_coef_clip",),  # which transformers does in training alone
            keys=("intermediate_size", "activation_sparsity_pattern"),
            read=_read,
            write=_write,
        )
    }

    num_streams: int = 4
    active_stream: int = 0
    scaled_correction: bool = True
    sharing_layers: int = 15
    laurel_rank: int = 64
    sparsity: tuple[float, ...] = ()

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        problems = super().problems() + not_positive(self, ("inputs_dim", "laurel_rank"))
        if self.num_streams < 2 or not 0 <= self.active_stream < self.num_streams:
            problems.append(
                f"active_stream={self.active_stream} must be from 0 to {self.num_streams - 1}, "
                f"and num_streams={self.num_streams} at least 2"
            )
        if self.sparsity and (len(self.sparsity) != self.num_layers or not all(0 <= one < 1 for one in self.sparsity)):
            problems.append(f"sparsity={self.sparsity} must be {self.num_layers} numbers, from 0 to less than 1")
        return problems

    @property
    def layer_stacks(self) -> tuple[str, ...]:
        """Which of the model's stacks of blocks each layer is in."""
        return ("layers",) * self.first_sharing + ("sharing",) * self.sharing_layers

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        own = dict.fromkeys("MOI", self.num_streams) | {"A": self.laurel_rank, "X": self.embed_dim}
        return super().dims | own

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        first, others = tuple(range(self.first_sharing)), tuple(range(self.num_streams - 1))
        span = self.first_sharing, self.num_layers
        streams = [
            Row(f"streams.{leaf}", f"model.altup_{name}.{{}}.weight", "X D -> D X", "D", layers=others)
            for leaf, name in (("into", "projections"), ("out", "unembed_projections"))
        ]
        own = [replace(row, layers=first) for row in _BLOCK]
        sharing = [
            replace(row, leaf=row.leaf.replace("layers.", "sharing."), layers=tuple(range(*span)))
            for row in _BLOCK
            if self.sharing_layers and row.leaf not in KEYS_AND_VALUES
        ]
        return tuple(
            replace(row, start=1.0) if row.leaf.endswith("norm") else row
            for row in (*ENDS, *INPUTS, *streams, *own, *sharing)
        )
