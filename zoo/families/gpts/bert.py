"""ModernBERT (https://arxiv.org/abs/2412.13663): an encoder, whose tokens see each other both ways. Free of JAX."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zoo.config import GLOBAL, LOCAL, Rope, not_positive, pattern_of, window_problems, windows
from zoo.dialect import ACTIVATIONS, BIAS, REQUIRED, Dialect
from zoo.families.gpts.gpt import HEADS_FUSED, GPTLike, whole_heads
from zoo.parameters import Row

_LAYER = "model.layers.{}."


def _biased(row: Row, pattern: str) -> tuple[Row, Row]:
    """Return a row, and that of the bias beside it."""
    name = f"{row.tensor.removesuffix('weight')}bias"
    return row, replace(row, leaf=f"{row.leaf}_bias", tensor=name, pattern=pattern, fan_in="")


def _norm(leaf: str, name: str) -> tuple[Row, Row]:
    return _biased(Row(leaf, f"{name}.weight", "D -> D"), "D -> D")


def _layer(
    leaf: str, name: str, matrix: str, bias: str, fan_in: str, fused: str = "", part: int = 0
) -> tuple[Row, Row]:
    row = Row(f"layers.{leaf}", f"{_LAYER}{name}.weight", matrix, fan_in, fused=fused, part=part)
    return _biased(row, bias)


_ENDS = (
    Row("embed", "model.embeddings.tok_embeddings.weight", "V D -> V D", "D"),
    *_norm("embed_norm", "model.embeddings.norm"),
    *_norm("final_norm", "model.final_norm"),
)
_ROWS = (
    *_norm("layers.attn_norm", _LAYER + "attn_norm"),
    *_layer("q", "attn.Wqkv", "(N H) D -> D N H", "(N H) -> N H", "D", HEADS_FUSED, 0),
    *_layer("k", "attn.Wqkv", "(K H) D -> D K H", "(K H) -> K H", "D", HEADS_FUSED, 1),
    *_layer("v", "attn.Wqkv", "(K H) D -> D K H", "(K H) -> K H", "D", HEADS_FUSED, 2),
    *_layer("o", "attn.Wo", "D (N H) -> N H D", "D -> D", "NH"),
    *_norm("layers.mlp_norm", _LAYER + "mlp_norm"),
    *_layer("gate", "mlp.Wi", "F D -> D F", "F -> F", "D", "FF", 0),
    *_layer("up", "mlp.Wi", "F D -> D F", "F -> F", "D", "FF", 1),
    *_layer("down", "mlp.Wo", "D F -> F D", "D -> D", "F"),
)
_TYPES = {LOCAL: "sliding_attention", GLOBAL: "full_attention"}
USUAL = "GLL"


def _read(read: Any, num_layers: int) -> dict[str, Any]:
    """Return which layers see how far, and how their positions turn."""
    every = read.count("global_attn_every_n_layers", 3)
    letters = read.types(_TYPES, "".join(LOCAL if layer % every else GLOBAL for layer in range(num_layers)))
    half = read.raw.get("sliding_window")  # which counts first, where transformers 5 has written it
    fields = {
        "window": read.size("local_attention", 128, {}) if half is None else 2 * read.size("sliding_window", 0, {})
    }
    fields |= {"attention_pattern": pattern_of(letters, USUAL)}
    ropes = read.raw.get("rope_parameters") or {}
    for name, field, key, default in (
        (_TYPES[GLOBAL], "rope_theta", "global_rope_theta", 160_000.0),
        (_TYPES[LOCAL], "local_rope_theta", "local_rope_theta", 10_000.0),
    ):
        own = ropes.get(name) or {}
        if own.get("rope_type", "default") != "default" or set(own) - {"rope_type", "rope_theta"}:
            read.problems.append(f"`rope_parameters.{name}`={own!r} is not supported, only rope_type 'default'")
        theta = own.get("rope_theta")
        fields[field] = read.number(key, default) if theta is None else float(theta)
    return fields


def _write(config: Any) -> dict[str, Any]:
    pattern = config.attention_pattern
    types = [_TYPES[pattern[layer % len(pattern)]] for layer in range(config.num_layers)]
    raw = {"layer_types": types, "local_attention": config.window, "pad_token_id": None}
    raw |= {"global_rope_theta": config.rope_theta, "local_rope_theta": config.local_rope_theta}
    regular = pattern[0] == GLOBAL and set(pattern[1:]) <= {LOCAL}
    return raw | ({"global_attn_every_n_layers": len(pattern)} if regular else {})


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(GPTLike):
    """ModernBERT, without the head that guesses masked words.

    Attributes:
        rope_theta: base of the rotary frequencies of global layers.
        local_rope_theta: that of local layers.
        window: tokens that a query of a local layer sees, half of them on each side.
        attention_pattern: local (L) and global (G) layers, repeated over the depth.
        norm_bias: norms have biases.
        attention_bias: the projections of attention do.
        mlp_bias: those of the MLP do.
    """

    model: ClassVar[str] = "zoo.models.bert.ModernBert"
    dialects: ClassVar = {
        "modernbert": Dialect(
            architecture="ModernBertModel",
            sizes={
                "vocab_size": ("vocab_size", REQUIRED),
                "num_hidden_layers": ("num_layers", 22),
                "hidden_size": ("embed_dim", 768),
                "intermediate_size": ("mlp_dim", 1152),
                "num_attention_heads": ("num_heads", 12),
                "max_position_embeddings": ("context_length", 8192),
            },
            derived=whole_heads,
            numbers={"norm_eps": ("norm_eps", 1e-5)},
            flags=BIAS | {"mlp_bias": ("mlp_bias", False), "norm_bias": ("norm_bias", False)},
            choices={"hidden_activation": ("activation", {"gelu": "gelu", **ACTIVATIONS})},
            rope="absent",
            only={"rope_scaling": (None,), "position_embedding_type": ("absolute", None)},
            keys=(
                *("layer_types", "global_attn_every_n_layers", "local_attention", "sliding_window"),
                *("rope_parameters", "global_rope_theta", "local_rope_theta"),
            ),
            ignored=(
                *("classifier_activation", "classifier_bias", "classifier_dropout", "classifier_pooling"),
                *("cls_token_id", "decoder_bias", "deterministic_flash_attn", "embedding_dropout", "mlp_dropout"),
                *("initializer_cutoff_factor", "layer_norm_eps", "reference_compile", "repad_logits_with_grad"),
                *("sparse_pred_ignore_index", "sparse_prediction", "tie_word_embeddings"),
            ),
            read=_read,
            write=_write,
        )
    }

    rope_theta: float = 160_000.0
    local_rope_theta: float = 10_000.0
    window: int = 128
    attention_pattern: str = USUAL
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        own = not_positive(self, ("local_rope_theta",)) + window_problems(self.window, self.attention_pattern)
        return super().problems() + own

    @property
    def beside(self) -> tuple[str, ...]:
        """The beginnings of the names of heads, which guess words or tell texts apart."""
        return ("head.", "decoder.", "classifier.")

    @property
    def bidirectional(self) -> bool:
        """Whether every token sees those behind it too."""
        return True

    @property
    def layer_stacks(self) -> tuple[str, ...]:
        """Which of the model's stacks of blocks each layer is in: the first has no norm before attention."""
        return ("first", *("layers",) * (self.num_layers - 1))

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """How many keys each layer's queries see, themselves included; of those behind, as many as before."""
        return windows(self.num_layers, self.window // 2 + 1, self.attention_pattern)

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """The base of each layer's rotary frequencies."""
        return tuple((self.rope_theta if one is None else self.local_rope_theta, None) for one in self.layer_windows)

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        ends, layers = ([row for row in table if self._has(row)] for table in (_ENDS, _ROWS))
        first = [replace(row, layers=(0,)) for row in layers if "attn_norm" not in row.leaf]
        first = [replace(row, leaf=row.leaf.replace("layers.", "first.")) for row in first]
        rest = [replace(row, layers=tuple(range(1, self.num_layers))) for row in layers] * (self.num_layers > 1)
        return self.started((*ends, *first, *rest))

    def _has(self, row: Row) -> bool:
        """Return whether a checkpoint has a row: biases are a choice, of three kinds."""
        if not row.leaf.endswith("_bias"):
            return True
        if "norm" in row.leaf:
            return self.norm_bias
        return self.attention_bias if ".attn." in row.tensor else self.mlp_bias
