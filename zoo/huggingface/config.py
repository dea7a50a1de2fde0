"""Hugging Face's `config.json` both ways, in the dialects that transformers 4 and 5 write. Free of JAX.

What each architecture's file holds is in `zoo.huggingface.dialect`; rotary embedding is in `zoo.huggingface.rope`.
"""

import difflib
from typing import Any

from zoo.config import GLOBAL, LOCAL, Config
from zoo.families import Gemma3Config, GemmaConfig, GemmaLike, MixtralConfig, Qwen3MoeConfig
from zoo.huggingface import rope as hf_rope
from zoo.huggingface.dialect import HEADS, IGNORED, KINDS, ONLY_ALL, REQUIRED, SHARE, Kind

_TYPES = {LOCAL: "sliding_attention", GLOBAL: "full_attention"}
_WINDOW_KEYS = {
    "none": (),
    "all": ("sliding_window",),
    "types": ("sliding_window", "layer_types", "sliding_window_pattern"),
    "switch": ("sliding_window", "layer_types", "use_sliding_window", "max_window_layers"),
    "experts": ("sliding_window", "use_sliding_window", "max_window_layers"),
}
_EXPERT_KEYS = ("num_local_experts", "mlp_only_layers", "decoder_sparse_step")
# A file that holds a vision model too, whose text part is read; `zoo.huggingface.folder` knows the prefixes.
_OUTER = frozenset(
    """
    text_config vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index boi_token_id
    eoi_token_id image_token_id tie_word_embeddings quantization_config
    """.split()
)


def from_hf(raw: dict[str, Any]) -> Config:
    """Return the config that a `config.json` describes; dropped are only keys that change no logit.

    Of a multimodal Gemma 3, the text part.

    Raises:
        ValueError: listing every unknown key (with the closest known one), missing key and unsupported value at once.
    """
    name, problems = raw.get("model_type"), []
    if name == "gemma3":
        raw, name = _text_part(raw, problems), "gemma3_text"
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"config.json says model_type={name!r}, and this zoo loads {', '.join(map(repr, KINDS))}.")
    kind = KINDS[name]
    only = {**ONLY_ALL, **kind.only}
    _check_keys(raw, kind, only, problems)
    read = _Reader(raw, problems)
    fields: dict[str, Any] = dict(kind.fixed)
    for key, (field, default) in kind.sizes.items():
        fields[field] = read.size(key, default, fields)
    fields |= {field: read.number(key, default) for key, (field, default) in kind.numbers.items()}
    fields |= {field: read.flag(key, default) for key, (field, default) in kind.flags.items()}
    if fields.get("query_scalar") == fields["head_dim"]:
        fields["query_scalar"] = None
    fields |= hf_rope.read(raw, kind.config, kind.theta, fields["context_length"], problems)
    if not problems:
        fields |= _windows(read, kind, fields["num_layers"])
        fields |= _dense_layers(read, fields["num_layers"]) if kind.config is Qwen3MoeConfig else {}
    if problems:
        raise ValueError("config.json cannot be used:\n" + "\n".join(f"  {problem}." for problem in problems))
    return kind.config(**fields)


def _text_part(raw: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    problems += [_unknown(key, _OUTER | IGNORED) for key in raw if key not in _OUTER | IGNORED]
    for key, value in (("tie_word_embeddings", True), ("quantization_config", None)):
        if raw.get(key, value) != value:
            problems.append(f"`{key}`={raw[key]!r} is not supported, only {value!r}")
    text = raw.get("text_config")
    if isinstance(text, dict) and text.get("model_type", "gemma3_text") == "gemma3_text":
        return text
    problems.append("`text_config` is not the object that describes a Gemma 3")
    return {}


def _check_keys(raw: dict[str, Any], kind: Kind, only: dict[str, tuple], problems: list[str]) -> None:
    """Find the keys that are unknown and the values that are not supported."""
    known = {*kind.sizes, *kind.numbers, *kind.flags, *_WINDOW_KEYS[kind.windows], *only, *IGNORED, *hf_rope.KEYS}
    known |= set(_EXPERT_KEYS) if kind.config is Qwen3MoeConfig else set()
    # Gemma 3 has the key, and transformers never reads it.
    known |= {"rope_local_base_freq", "attn_logit_softcapping"} if kind.config is Gemma3Config else set()
    problems += [_unknown(key, known) for key in raw if key not in known]
    problems += [
        f"`{key}`={raw[key]!r} is not supported, only {' or '.join(repr(value) for value in values)}"
        for key, values in only.items()
        if key in raw and raw[key] not in values
    ]


def _unknown(key: str, known: set[str] | frozenset[str]) -> str:
    close = difflib.get_close_matches(key[:100], sorted(known), n=1)
    return f"`{key}` is not known" + (f"; did you mean `{close[0]}`?" if close else "")


class _Reader:
    """Reads values of the right type, and notes those that are not."""

    def __init__(self, raw: dict[str, Any], problems: list[str]):
        self.raw, self.problems = raw, problems

    def size(self, key: str, default: Any, fields: dict[str, Any]) -> int:
        """Return an integer; what stands for a default is worked out from the fields read before."""
        value = self.raw.get(key, None if default in (HEADS, SHARE) else default)
        if key == "num_experts" and key not in self.raw:
            value = self.raw.get("num_local_experts", value)
        if value is REQUIRED:
            self.problems.append(f"`{key}` is missing")
            return 0
        if value is None and key == "num_key_value_heads":
            return fields["num_heads"]
        if value is None and key == "head_dim":
            width, heads = fields["embed_dim"], fields["num_heads"]
            if heads < 1 or width % heads:
                self.problems.append(
                    f"`head_dim` is missing, and `hidden_size`={width} is no multiple of {heads} heads"
                )
                return 0
            return width // heads
        if type(value) is not int:
            self.problems.append(f"`{key}`={value!r} is not an integer")
            return 0
        return value

    def number(self, key: str, default: float | None) -> float | None:
        """Return a real number; None only where that switches something off."""
        value = self.raw.get(key, default)
        if value is None and (default is None or key.endswith("softcapping")):
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
            self.problems.append(f"`{key}`={value!r} is not a number")
            return None
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            self.problems.append(f"`{key}`={value!r} is neither true nor false")
        return bool(value)

    def layers(self, key: str, count: int) -> set[int]:
        """Return a list of layers' numbers."""
        value = self.raw.get(key) or []
        if not isinstance(value, list) or not all(type(layer) is int and 0 <= layer < count for layer in value):
            self.problems.append(f"`{key}`={value!r} is not a list of layers, from 0 to {count - 1}")
            return set()
        return set(value)


def _windows(read: _Reader, kind: Kind, num_layers: int) -> dict[str, Any]:
    """Return the fields that say which layers see how far."""
    if kind.windows == "none":
        return {}
    width = None if kind.config is MixtralConfig else 4096
    window = read.raw.get("sliding_window", width)
    if kind.windows in ("switch", "experts") and not read.flag("use_sliding_window", False):
        window = None
    if window is not None and type(window) is not int:
        read.problems.append(f"`sliding_window`={window!r} is not an integer")
        return {}
    if kind.windows in ("all", "experts"):
        return {"window": window}
    types = _layer_types(read, kind, window, num_layers)
    if kind.config is not Gemma3Config and (window is None or LOCAL not in types):
        return {"window": None}  # on Gemma 3's local layers, frequencies differ too
    return {"window": window, "attention_pattern": _pattern(types, kind.config)}


def _layer_types(read: _Reader, kind: Kind, window: int | None, num_layers: int) -> str:
    """Return one letter per layer, from the list of transformers 5 or the number that came before it."""
    listed = read.raw.get("layer_types")
    letters = {name: letter for letter, name in _TYPES.items()}
    if listed is not None:
        if (
            not isinstance(listed, list)
            or len(listed) != num_layers
            or not all(isinstance(name, str) and name in letters for name in listed)
        ):
            read.problems.append(
                f"`layer_types`={listed!r} is not supported, only {num_layers} of {' and '.join(letters)}"
            )
            return GLOBAL * num_layers
        if window is None and _TYPES[LOCAL] in listed:
            read.problems.append(f"`layer_types` names {_TYPES[LOCAL]}, and there is no window")
        return "".join(letters[name] for name in listed)
    if issubclass(kind.config, GemmaLike):
        every = 2 if kind.config is GemmaConfig else read.raw.get("sliding_window_pattern", 6)
        if type(every) is not int or every < 1:
            read.problems.append(f"`sliding_window_pattern`={every!r} is not a number of layers")
            return GLOBAL * num_layers
        return "".join(LOCAL if (layer + 1) % every else GLOBAL for layer in range(num_layers))
    first = read.raw.get("max_window_layers", 28)
    if type(first) is not int:
        read.problems.append(f"`max_window_layers`={first!r} is not an integer")
        return GLOBAL * num_layers
    return "".join(LOCAL if window is not None and layer >= first else GLOBAL for layer in range(num_layers))


def _pattern(types: str, config: type[Config]) -> str:
    """Return the family's own pattern if that is what the layers follow, else the shortest that they do."""
    count = len(types)
    default = str(config.__dataclass_fields__["attention_pattern"].default)
    shortest = (types[:period] for period in range(1, count + 1))
    return next(one for one in (default, *shortest) if (one * count)[:count] == types)


def _dense_layers(read: _Reader, num_layers: int) -> dict[str, Any]:
    step = read.raw.get("decoder_sparse_step", 1)
    if type(step) is not int or step < 1:
        read.problems.append(f"`decoder_sparse_step`={step!r} is not a number of layers")
        return {}
    dense = read.layers("mlp_only_layers", num_layers) | {i for i in range(num_layers) if (i + 1) % step}
    return {"dense_layers": tuple(sorted(dense))}


def to_hf(config: Config, dtype: str) -> dict[str, Any]:
    """Return a `config.json` that transformers 4 and 5 read, for weights stored in `dtype`.

    Raises:
        ValueError: the config mixes Gemma 1 and 2 in a way that no Hugging Face architecture has.
    """
    name = next(name for name, kind in KINDS.items() if _describes(kind, config))
    kind = KINDS[name]
    if name == "gemma":
        _check_gemma_1(config)
    raw: dict[str, Any] = {key: values[0] for key, values in {**ONLY_ALL, **kind.only}.items() if _plain(values[0])}
    raw |= kind.written
    raw |= {"architectures": [kind.architecture], "model_type": name, "torch_dtype": dtype}
    for key, (field, _) in (*kind.sizes.items(), *kind.numbers.items(), *kind.flags.items()):
        raw[key] = getattr(config, field)
    if "query_pre_attn_scalar" in kind.numbers:
        scalar = config.query_scale**-2 if raw["query_pre_attn_scalar"] is None else raw["query_pre_attn_scalar"]
        raw["query_pre_attn_scalar"] = round(scalar) if abs(scalar - round(scalar)) < 1e-9 else scalar
    return raw | _written_windows(config, kind) | hf_rope.write(config)


def _describes(kind: Kind, config: Config) -> bool:
    return type(config) is kind.config and all(getattr(config, field) == value for field, value in kind.fixed.items())


def _plain(value: Any) -> bool:
    return value is not None and value != {}


def _written_windows(config: Any, kind: Kind) -> dict[str, Any]:
    """Return the keys that say which layers see how far, for transformers 5 and what came before."""
    if kind.windows == "none":
        return {}
    raw: dict[str, Any] = {"sliding_window": config.window}
    if kind.windows == "experts":
        raw |= {"use_sliding_window": config.window is not None, "decoder_sparse_step": 1}
        raw |= {"mlp_only_layers": list(config.dense_layers)}
    if kind.windows in ("types", "switch"):
        pattern = config.attention_pattern if config.window is not None or kind.config is Gemma3Config else GLOBAL
        types = [_TYPES[pattern[layer % len(pattern)]] for layer in range(config.num_layers)]
        raw["layer_types"] = types
    if kind.windows == "switch":
        globals_first = next((i for i, name in enumerate(types) if name == _TYPES[LOCAL]), config.num_layers)
        raw |= {"use_sliding_window": config.window is not None, "max_window_layers": globals_first}
    if kind.config is Gemma3Config and set(pattern[:-1]) <= {LOCAL} and pattern[-1] == GLOBAL:
        raw["sliding_window_pattern"] = len(pattern)
    return raw


def _check_gemma_1(config: Any) -> None:
    """Refuse what no Gemma 1 has."""
    extras = {
        "query_scalar": config.query_scalar not in (None, config.head_dim),
        "attn_softcap": config.attn_softcap is not None,
        "final_softcap": config.final_softcap is not None,
        "window": config.window is not None,
    }
    if any(extras.values()):
        raise ValueError(
            f"cannot describe this config to Hugging Face: {', '.join(name for name in extras if extras[name])} "
            "needs Gemma 2, which has post_norms=true. Set it, or leave the others at their defaults."
        )
