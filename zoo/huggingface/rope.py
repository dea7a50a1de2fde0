"""Rotary embedding in `config.json`, in the dialects of transformers 4 and 5. Free of JAX."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from zoo.config import RopeScaling, RopeType
from zoo.dialect import Dialect

_KEYS = {"rope_theta", "rope_scaling", "rope_parameters"}
_PARTIAL = "partial_rotary_factor"
_LOCAL = "rope_local_base_freq"
_TYPES = ("full_attention", "sliding_attention")
# rope_type: its keys in the file, and our fields
_ORIGINAL = "original_max_position_embeddings"
_LENGTH = {_ORIGINAL: "original_length"}
_FIELDS: dict[RopeType, dict[str, str]] = {
    RopeType.linear: {"factor": "factor"},
    RopeType.dynamic: {"factor": "factor"},
    RopeType.llama3: {"factor": "factor", "low_freq_factor": "low_freq", "high_freq_factor": "high_freq", **_LENGTH},
    RopeType.yarn: {
        "factor": "factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale_all_dim": "mscale",
        "llama_4_scaling_beta": "query_growth",
        "truncate": "truncate",
        **_LENGTH,
    },
    RopeType.longrope: {
        "short_factor": "short_factors",
        "long_factor": "long_factors",
        "factor": "factor",
        "attention_factor": "attention_factor",
        **_LENGTH,
    },
    RopeType.proportional: {"factor": "factor", _PARTIAL: "share"},
}
_NEEDED = ("factor", "low_freq_factor", "high_freq_factor")
_LISTS = ("short_factor", "long_factor")


def keys(dialect: Dialect) -> set[str]:
    """Return the keys that say how positions turn."""
    if dialect.rope == "absent":
        return set()
    partial = set() if dialect.partial is None else {dialect.partial[0], _PARTIAL}
    return _KEYS | {dialect.theta_key} | partial | ({_LOCAL} if dialect.rope == "global" else set())


def read(raw: dict[str, Any], dialect: Dialect, length: int, problems: list[str]) -> dict[str, Any]:
    """Return the fields of a config that say how positions turn; what cannot be used is added to `problems`.

    Args:
        raw: the file.
        dialect: which layers may be stretched, and the base where the file names none.
        length: the longest text that the file names.
        problems: what is wrong so far.
    """
    if dialect.rope == "absent":
        return {}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(raw.get(key), dict | None):
            problems.append(f"`{key}`={raw[key]!r} is not an object")
            return {}
    if dialect.rope in ("global", "nested"):
        return _read_by_type(raw, dialect, length, problems)
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    rope = raw.get(key) or dict(dialect.rope_default)
    rope = {key: value for key, value in rope.items() if key not in dialect.rope_ignored}
    theta = rope.get("rope_theta", raw.get(dialect.theta_key, dialect.theta))
    fields: dict[str, Any] = {"rope_theta": _number(theta, problems)}
    if dialect.partial is not None and rope.get("rope_type") == RopeType.proportional:
        problems.append(f"`{key}`={rope!r} is not supported beside `{dialect.partial[0]}`, which means another share")
    if dialect.partial is not None:
        name, default = dialect.partial
        share = rope.get(_PARTIAL, raw.get(name, default))
        fields["rotary_fraction"] = _number(share, problems, name)
        rope = {key: value for key, value in rope.items() if key != _PARTIAL}
    lengths = length, raw.get(_ORIGINAL, dialect.original)
    return fields | {"rope_scaling": _scaling(rope, key, lengths, problems, renamed=dialect.rope_names)}


def _read_by_type(raw: dict[str, Any], dialect: Dialect, length: int, problems: list[str]) -> dict[str, Any]:
    """Read the frequencies of global layers, and those of local ones."""
    nested = raw.get("rope_parameters") or {}
    for name, value in nested.items():
        if name not in _TYPES or not isinstance(value, dict | None):
            problems.append(
                f"`rope_parameters`={nested!r} is not supported, only {' and '.join(_TYPES)}, each an object"
            )
            return {}
    stretch = raw.get("rope_scaling") or {}
    if not nested and "rope_type" not in stretch and stretch.get("type", "default") != "default":
        problems.append(
            f"`rope_scaling`={stretch!r} says `type`, which versions of transformers read differently: say `rope_type`"
        )
        return {}
    usual = {} if nested else dict(dialect.rope_default)
    whole = (nested.get(_TYPES[0]) or usual) | stretch
    local = nested.get(_TYPES[1]) or {}
    _scaling(local, "rope_parameters.sliding_attention", (length, None), problems, plain=True)
    return {
        "rope_theta": _number(whole.get("rope_theta", raw.get("rope_theta", dialect.theta)), problems),
        "local_rope_theta": _number(local.get("rope_theta", raw.get(_LOCAL, dialect.local_theta)), problems),
        "rope_scaling": _scaling(whole, "rope_scaling", (length, None), problems),
    }


# `attn_factor` (DeepSeek R1's Qwen 3) transformers does not read: other programs multiply attention's scale by it.
# Nor `finetuned` (Nous Research's YaRN models), which says how its own code came to the frequencies.
_BESIDE_YARN = {"mscale", "mscale_all_dim", "max_position_embeddings", "attn_factor", "finetuned"}


def _scaling(
    rope: dict[str, Any],
    name: str,
    lengths: tuple[int, Any],
    problems: list[str],
    plain: bool = False,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> RopeScaling | None:
    """Read a stretch; `plain` allows none, and `lengths` are of the longest text and of those trained on."""
    rope = {key: value for key, value in rope.items() if value is not None or key == "truncate"}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    rope_type = renamed.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
    known = ("default",) if plain else ("default", *RopeType)
    if rope_type not in known:
        problems.append(
            f"`{name}`={rope!r} is not supported, only rope_type {' or '.join(repr(str(k)) for k in known)}"
        )
        return None
    keys = {} if rope_type == "default" else _FIELDS[RopeType(rope_type)]
    scales = _BESIDE_YARN if rope_type == "yarn" else set()
    # transformers writes the length whatever the type
    extra = set(rope) - set(keys) - {"rope_theta", "rope_type", "type", _PARTIAL, *_LENGTH} - scales
    partial = _PARTIAL not in keys and rope.get(_PARTIAL, 1.0) != 1.0
    if extra or partial or (plain and set(rope) & set(_LENGTH)):
        problems.append(
            f"`{name}`={rope!r} is not supported, only rope_type {rope_type!r} with {', '.join(keys) or 'no more'}"
        )
        return None
    if rope_type == "default":
        return None
    return _stretch(RopeType(rope_type), rope, name, lengths, problems)


def _stretch(
    rope_type: RopeType, rope: dict[str, Any], name: str, lengths: tuple[int, Any], problems: list[str]
) -> RopeScaling | None:
    before, longest = len(problems), lengths[0]
    length = longest
    if rope_type is RopeType.proportional:
        rope = {"factor": 1.0} | rope
    if rope_type is RopeType.longrope:
        if lengths[1] is not None:  # what is told beside counts first
            rope = rope | {_ORIGINAL: lengths[1]}
        original = rope.get(_ORIGINAL, length)
        rope = {"factor": longest / original if type(original) is int and original > 0 else 1.0} | rope
    fields: dict[str, Any] = {"rope_type": rope_type}
    fields |= {} if rope_type in (RopeType.linear, RopeType.proportional) else {"original_length": length}
    for key, field in _FIELDS[rope_type].items():
        value = rope.get(key)
        if key == "truncate":
            fields[field] = rope.get(key, True)
            if not isinstance(fields[field], bool):
                problems.append(f"`{name}.{key}`={value!r} is neither true nor false")
        elif key in _LISTS:
            fields[field] = _numbers(value, problems, f"{name}.{key}")
        elif value is None and key in _NEEDED:
            problems.append(f"`{name}` has no `{key}`, which rope_type {str(rope_type)!r} needs")
        elif field == "original_length":
            fields[field] = value if type(value) is int else length
            if value is not None and type(value) is not int:
                problems.append(f"`{name}.{key}`={value!r} is not an integer")
        elif value is not None and not (
            key.startswith(("beta", "mscale", "llama_4")) and value == 0
        ):  # there, zero means the default
            fields[field] = _number(value, problems, f"{name}.{key}")
    scale, scale_all = (_number(rope.get(key, 0.0), problems, f"{name}.{key}") for key in ("mscale", "mscale_all_dim"))
    if len(problems) > before:
        return None
    if scale and scale_all and "attention_factor" not in fields:
        magnitude = lambda scale: 0.1 * scale * math.log(max(fields["factor"], 1.0)) + 1.0
        fields["attention_factor"] = magnitude(scale) / (magnitude(scale_all) or math.nan)
    return _made(lambda: RopeScaling(**fields), problems)


def _numbers(values: Any, problems: list[str], name: str) -> tuple[float, ...]:
    if isinstance(values, list | tuple) and values:
        return tuple(_number(value, problems, name) for value in values)
    problems.append(f"`{name}`={values!r} is not a list of numbers")
    return ()


def _made(make: Callable[[], RopeScaling], problems: list[str]) -> RopeScaling | None:
    try:
        return make()
    except ValueError as error:
        problems.append(str(error).rstrip("."))
        return None


def _number(value: Any, problems: list[str], name: str = "rope_theta") -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    problems.append(f"`{name}`={value!r} is not a number")
    return 0.0


def write(config: Any, dialect: Dialect) -> dict[str, Any]:
    """Return the keys that say how positions turn, in the dialect of transformers 4, which 5 reads too."""
    if dialect.rope == "absent":
        return {}
    raw: dict[str, Any] = {}
    if dialect.rope in ("global", "nested"):  # transformers 5 reads some families' from here alone
        whole = {"rope_theta": config.rope_theta} | (_written(config.rope_scaling) or {"rope_type": "default"})
        local = {"rope_theta": config.local_rope_theta, "rope_type": "default"}
        raw["rope_parameters"] = dict(zip(_TYPES, (whole, local), strict=True))
    if dialect.rope == "nested":
        return raw
    raw |= {dialect.theta_key: config.rope_theta}
    if dialect.partial is not None:
        raw[dialect.partial[0]] = config.rotary_fraction
    if dialect.rope == "global":
        raw[_LOCAL] = config.local_rope_theta
    plain = {"rope_type": "default"} if dialect.rope_default else None
    rope = raw["rope_scaling"] = _written(config.rope_scaling) or plain
    if rope is not None and _PARTIAL in dialect.rope_ignored:  # transformers needs it, and the widths of heads say it
        rope[_PARTIAL] = config.rotary_dim / config.head_dim
    if rope is not None and rope.get("rope_type") == RopeType.longrope:
        _shortened(rope, config, dialect)
    if config.rope_scaling is not None and config.rope_scaling.rope_type is RopeType.dynamic:
        raw["max_position_embeddings"] = config.rope_scaling.original_length
    return raw


def _written(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    values = {key: getattr(scaling, field) for key, field in _FIELDS[scaling.rope_type].items()}
    values = {key: list(value) if key in _LISTS else value for key, value in values.items() if value is not None}
    return {"rope_type": str(scaling.rope_type), **values}


def _shortened(rope: dict[str, Any], config: Any, dialect: Dialect) -> None:
    """Leave out what the file says elsewhere: Phi 3's first readers allow no more than the type and two lists."""
    if rope["factor"] == config.context_length / rope["original_max_position_embeddings"]:
        del rope["factor"]
    if dialect.original is not None:
        rope["type"] = rope.pop("rope_type")
        del rope[_ORIGINAL]
