"""Gemma 4 (https://ai.google.dev/gemma/docs/core), the text part: global layers with wider heads, of which keys may be
values too; of small models layers' own inputs and last layers without keys and values, as Gemma 3n has them; of one
experts beside the MLP. Free of JAX."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zoo.config import RopeScaling, RopeType, not_positive
from zoo.dialect import Dialect, eps
from zoo.families.gemmas.gemma import POST_NORMS, TANH
from zoo.families.gemmas.gemma3n import INPUT, INPUT_SIZES, INPUTS, KEYS_AND_VALUES, SharingLike
from zoo.families.mixture import MixtureLike
from zoo.parameters import ATTENTION, ENDS, LAYER, MLP, QK_NORMS, Row

LAYERS, WHOLE, SHARING, SHARING_WHOLE = "layers", "whole", "sharing", "sharing_whole"
_SCALE = Row("layers.scale", LAYER + "layer_scalar", "G -> G", start=1.0)
_MIXTURE = (
    Row("layers.shared_gate", LAYER + "mlp.gate_proj.weight", "P D -> D P", "D"),
    Row("layers.shared_up", LAYER + "mlp.up_proj.weight", "P D -> D P", "D"),
    Row("layers.shared_down", LAYER + "mlp.down_proj.weight", "D P -> P D", "P"),
    Row("layers.post_shared_norm", LAYER + "post_feedforward_layernorm_1.weight", "D -> D"),
    Row("layers.router", LAYER + "router.proj.weight", "E D -> D E", "D"),
    Row("layers.router_scale", LAYER + "router.scale", "D -> D", start=1.0),
    Row("layers.expert_scale", LAYER + "router.per_expert_scale", "E -> E", start=1.0),
    Row("layers.expert_norm", LAYER + "pre_feedforward_layernorm_2.weight", "D -> D"),
    Row("layers.gate", LAYER + "experts.gate_up_proj", "E F D -> E D F", "D", fused="FF", part=0),
    Row("layers.up", LAYER + "experts.gate_up_proj", "E F D -> E D F", "D", fused="FF", part=1),
    Row("layers.down", LAYER + "experts.down_proj", "E D F -> E F D", "F"),
    Row("layers.post_expert_norm", LAYER + "post_feedforward_layernorm_2.weight", "D -> D"),
)
_SIZES = {
    "vocab_size": ("vocab_size", 262_144),
    "num_hidden_layers": ("num_layers", 30),
    "hidden_size": ("embed_dim", 2304),
    "num_attention_heads": ("num_heads", 8),
    "num_key_value_heads": ("num_kv_heads", 4),
    "head_dim": ("head_dim", 256),
    "max_position_embeddings": ("context_length", 131_072),
}
_DENSE = _SIZES | {"intermediate_size": ("mlp_dim", 9216), "num_kv_shared_layers": ("sharing_layers", 0)}
_EXPERTS = _SIZES | {
    "intermediate_size": ("dense_mlp_dim", 9216),
    "moe_intermediate_size": ("mlp_dim", 704),
    "num_experts": ("num_experts", 128),
    "top_k_experts": ("experts_per_token", 8),
    "num_kv_shared_layers": ("sharing_layers", 0),
}
_QUARTER = RopeScaling(rope_type=RopeType.proportional, factor=1.0, share=0.25)
_HEADS = {"head_dim": "global_head_dim", "num_key_value_heads": "global_kv_heads"}


def _read(read: Any, num_layers: int) -> dict[str, Any]:
    """Return the heads of global layers: told of all of them, or of each."""
    each, heads = read.raw.get("per_layer_config"), read.raw.get("num_global_key_value_heads")
    if each is None:
        told = {"global_head_dim": read.raw.get("global_head_dim", 512), "global_kv_heads": None}
        told |= {"global_kv_heads": heads} if read.raw.get("attention_k_eq_v") else {}
    else:
        told = _of_each(each, read, num_layers)
        if told is None:
            names = " and ".join(_HEADS)
            read.problems.append(
                f"`per_layer_config`={each!r} is not supported, only {names}, the same for every global layer"
            )
            return {}
    read.problems += [
        f"`{key}` of global layers is {told[field]!r}, no integer"
        for key, field in _HEADS.items()
        if told[field] is not None and type(told[field]) is not int
    ]
    usual = told["global_kv_heads"] == read.raw.get("num_key_value_heads", 4)
    return told | ({"global_kv_heads": None} if usual else {})


def _of_each(each: Any, read: Any, num_layers: int) -> dict[str, Any] | None:
    """Return the heads of global layers where each layer has what differs from the file's own; None if they differ."""
    types = read.raw.get("layer_types") or ["full_attention" if (i + 1) % 6 == 0 else "" for i in range(num_layers)]
    last = num_layers - 1
    if not isinstance(each, Mapping) or not all(isinstance(layer, Mapping) for layer in each.values()):
        return None
    numbers = {f"{i:0{width}}": i for i in range(num_layers) for width in range(1, len(str(last)) + 1)}  # 5, or 05
    own = {numbers[str(key)]: layer for key, layer in each.items() if str(key) in numbers}
    if len(own) < len(each) or any(set(layer) - set(_HEADS) for layer in own.values()):
        return None
    usual = {"head_dim": read.raw.get("head_dim", 256), "num_key_value_heads": read.raw.get("num_key_value_heads", 4)}
    layers = [usual | own.get(i, {}) for i in range(num_layers)]
    whole = [layer for layer, name in zip(layers, types, strict=False) if name == "full_attention"] + layers[last:]
    local = [layer for layer, name in zip(layers[:last], types, strict=False) if name != "full_attention"]
    if any(layer != layers[last] for layer in whole) or any(layer != usual for layer in local):
        return None
    return {field: layers[last][key] for key, field in _HEADS.items()}


def _write(config: Any) -> dict[str, Any]:
    heads, width, _ = config.layer_heads[-1]
    own = {"head_dim": width, "num_key_value_heads": heads}
    whole = {str(i): own for i, local in enumerate(config.local) if not local}
    return {"global_head_dim": width, "num_global_key_value_heads": heads, "per_layer_config": whole}


def _dialect(architecture: str, outer: str, **own: Any) -> Dialect:
    """Return what a file holds, of text alone or of a model that sees and hears."""
    how: dict[str, Any] = {
        "sizes": _DENSE | INPUT_SIZES,
        "numbers": {**eps(1e-6), "final_logit_softcapping": ("final_softcap", None)},
        "flags": {
            "attention_k_eq_v": ("keys_are_values", False),
            "use_double_wide_mlp": ("wide_sharing", False),
        },
        "where": {"enable_moe_block": (False, None)},
        "window": 512,
        "only": {
            "hidden_activation": TANH,
            "attention_bias": (False, None),
            "tie_word_embeddings": (True,),
            "use_bidirectional_attention": (None, "vision", False),  # of images, which text has none of
        },
    }
    return Dialect(
        architecture=architecture,
        outer=outer,
        outer_keys=(
            *("audio_config", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index", "video_token_id"),
            *("vision_soft_tokens_per_image", "boa_token_index", "audio_token_index"),
        ),
        windows="types",
        every=(None, 6),
        last_global=True,
        rope="nested",
        theta=1_000_000.0,
        rope_default={"rope_type": "proportional", "partial_rotary_factor": 0.25},
        written={"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
        keys=("global_head_dim", "num_global_key_value_heads", "per_layer_config"),
        read=_read,
        write=_write,
        **how | own,
    )


_UNREAD = ("num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size")  # where there are none


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(SharingLike):
    """Gemma 4 without experts, the text part.

    Attributes:
        head_dim: width of a head of local layers, even.
        num_kv_heads: key and value heads of local layers; divides `num_heads`.
        global_head_dim: width of a head of global layers, even.
        global_kv_heads: key and value heads of global layers; None are as many as local layers have.
        keys_are_values: on global layers values are made by the matrix of keys.
        inputs_dim: width of a layer's own input; 0 is none.
        wide_sharing: the MLPs of layers that share keys and values are twice as wide.
    """

    model: ClassVar[str] = "zoo.models.gemmas.gemma4.Gemma4"
    dialects: ClassVar = {
        "gemma4_text": _dialect("Gemma4ForCausalLM", "gemma4", ignored=_UNREAD),
        "gemma4_unified_text": _dialect(
            "Gemma4UnifiedForConditionalGeneration",
            "gemma4_unified",
            sizes=_DENSE,
            where={},
            window=1024,
            fixed={"inputs_dim": 0},
            ignored=("enable_moe_block", *INPUT_SIZES, *_UNREAD),
        ),
    }

    attention_pattern: str = "LLLLLG"
    rope_scaling: RopeScaling | None = _QUARTER
    inputs_dim: int = 0
    global_head_dim: int = 512
    global_kv_heads: int | None = None
    keys_are_values: bool = False
    wide_sharing: bool = False

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        problems = super().problems() + not_positive(self, ("global_head_dim", "global_kv_heads"))
        if self.inputs_dim < 0:
            problems.append(f"inputs_dim={self.inputs_dim} must be zero or more")
        if self.global_kv_heads and self.num_heads % self.global_kv_heads:
            problems.append(f"num_heads={self.num_heads} must be a multiple of global_kv_heads={self.global_kv_heads}")
        if self.global_head_dim % 2:
            problems.append(f"global_head_dim={self.global_head_dim} must be even")
        if not problems and LAYERS not in self.layer_stacks:
            problems.append(f"attention_pattern={self.attention_pattern!r} leaves no local layer")
        return problems

    @property
    def layer_stacks(self) -> tuple[str, ...]:
        """Which of the model's stacks of blocks each layer is in."""
        return _stacks(self)

    @property
    def beside(self) -> tuple[str, ...]:
        """Beginnings of names that are of no text: 12B sees by one matrix in place of a tower."""
        return (*super().beside, "model.vision_embedder.")

    @property
    def layer_heads(self) -> tuple[tuple[int, int, int], ...]:
        """Of each layer, how many kv heads there are, and how wide queries and keys, and values, of a head are."""
        local = self.num_kv_heads, self.head_dim, self.head_dim
        whole = self.global_kv_heads or self.num_kv_heads, self.global_head_dim, self.global_head_dim
        return tuple(local if is_local else whole for is_local in self.local)

    @property
    def layer_rotary_dims(self) -> tuple[int, ...]:
        """How many dimensions of a head turn in each layer."""
        return tuple(width for _, width, _ in self.layer_heads)

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        heads = self.global_kv_heads or self.num_kv_heads
        return super().dims | {"k": heads, "h": self.global_head_dim, "f": 2 * self.mlp_dim, "G": 1}

    def mlp_rows(self) -> tuple[Row, ...]:
        """Return the rows of a layer's MLP, and of what stands beside it."""
        return MLP

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        inputs = self.inputs_dim > 0
        mlp = self.mlp_rows()
        block = (*ATTENTION, *mlp, *POST_NORMS, *QK_NORMS, *INPUT * inputs, _SCALE)
        rows = [*ENDS, *INPUTS * inputs]
        for stack in dict.fromkeys(self.layer_stacks):
            whole, sharing = stack in (WHOLE, SHARING_WHOLE), stack in (SHARING, SHARING_WHOLE)
            left = {*KEYS_AND_VALUES} if sharing else {"layers.v"} if whole and self.keys_are_values else set()
            letters = {"K": "k", "H": "h"} if whole else {}
            wide = {mlp[0].inner[1]: "f"} if sharing and self.wide_sharing else {}
            where = tuple(i for i, one in enumerate(self.layer_stacks) if one == stack)
            rows += [_of_stack(row, stack, where, letters | wide) for row in block if row.leaf not in left]
        return tuple(replace(row, start=1.0) if row.leaf.endswith("norm") else row for row in rows)


def _stacks(config: Gemma4Config) -> tuple[str, ...]:
    own, sharing = (WHOLE, LAYERS), (SHARING_WHOLE, SHARING)
    return tuple((own if i < config.first_sharing else sharing)[local] for i, local in enumerate(config.local))


def _of_stack(row: Row, stack: str, layers: tuple[int, ...], letters: dict[str, str]) -> Row:
    """Return a row of the layers of a stack, some of whose dimensions have sizes of their own."""
    change = str.maketrans(letters)
    leaf = row.leaf.replace("layers.", f"{stack}.")
    return replace(
        row, leaf=leaf, pattern=row.pattern.translate(change), fan_in=row.fan_in.translate(change), layers=layers
    )


@dataclass(frozen=True, kw_only=True)
class Gemma4MoeConfig(MixtureLike, Gemma4Config):
    """Gemma 4 with experts beside each layer's MLP, the text part.

    Attributes:
        mlp_dim: hidden width of one expert.
        dense_mlp_dim: that of the MLP.
    """

    dialects: ClassVar = {
        "gemma4_text": _dialect(
            "Gemma4ForCausalLM", "gemma4", sizes=_EXPERTS | INPUT_SIZES, where={"enable_moe_block": (True,)}
        ),
    }
    model: ClassVar[str] = "zoo.models.gemmas.gemma4.Gemma4"

    balance_weight: float = 0.0
    dense_mlp_dim: int = 2112

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + self.router_problems() + not_positive(self, ("dense_mlp_dim",))

    @property
    def layer_stacks(self) -> tuple[str, ...]:
        """Which of the model's stacks of blocks each layer is in."""
        return _stacks(self)

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return super().dims | {"P": self.dense_mlp_dim, "f": 2 * self.dense_mlp_dim}

    def mlp_rows(self) -> tuple[Row, ...]:
        """Return the rows of a layer's MLP, and of the experts beside it."""
        return _MIXTURE
