"""Hugging Face's `config.json` both ways, in the dialects that transformers 4 and 5 write. Free of JAX.

What each architecture's file holds, its family says (`zoo.dialect`); rotary embedding is in `zoo.huggingface.rope`,
windows in `zoo.huggingface.windows`.
"""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zoo.config import Config
from zoo.dialect import HARMLESS, IGNORED, ONLY_ALL, Dialect
from zoo.families import FAMILIES
from zoo.huggingface import quantised, rope
from zoo.huggingface.reader import Reader
from zoo.huggingface.windows import all_local, read_windows, window_keys, written_windows

_Architecture = tuple[type[Config], Dialect]
ARCHITECTURES: dict[str, list[_Architecture]] = {}  # by `model_type`, which few families share
for _family in FAMILIES.values():
    for _name, _one in _family.dialects.items():
        ARCHITECTURES.setdefault(_name, []).append((_family, _one))
_LISTED = {"mistral": "ministral"}  # what transformers takes those for that list their layers' types
# Files that hold a vision model too, whose text part is read; `zoo.huggingface.folder` knows the prefixes.
_OUTERS = {one.outer for found in ARCHITECTURES.values() for _, one in found} - {None}
_OUTER = frozenset(
    """
    text_config vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index boi_token_id
    eoi_token_id image_token_id tie_word_embeddings quantization_config
    multimodal_projector_bias projector_hidden_act spatial_merge_size vision_feature_layer
    """.split()
)


def from_hf(raw: dict[str, Any]) -> Config:
    """Return the config that a `config.json` describes; dropped are only keys that change no logit.

    Of a multimodal model (Gemma 3, 3n and 4, Llama 4, Mistral 3, Qwen 2 to 3.5, Kimi K2.5), the text part.

    Raises:
        ValueError: listing every unknown key (with the closest known one), missing key and unsupported value at once.
    """
    name, problems = raw.get("model_type"), []
    if isinstance(name, str) and name in _OUTERS:
        name, raw = _text_part(raw, name, problems)
    name = _LISTED.get(str(name), name) if "layer_types" in raw else name
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(map(repr, ARCHITECTURES))
        raise ValueError(f"config.json says model_type={name!r}, and this zoo loads {known}.")
    config, dialect = _of_file(ARCHITECTURES[name], raw)
    _check_keys(raw, dialect, problems)
    if why := quantised.problem(raw.get("quantization_config")):
        problems.append(why)
    read = Reader(raw, problems)
    fields: dict[str, Any] = dict(dialect.fixed)
    for key, (field, default) in dialect.sizes.items():
        fields[field] = read.size(key, default, fields, dialect.aliases.get(key))
    fields |= {} if dialect.derived is None else dialect.derived(fields)
    fields |= {field: read.number(key, default) for key, (field, default) in dialect.numbers.items()}
    fields |= {field: read.flag(key, default) for key, (field, default) in dialect.flags.items()}
    for key, (field, words) in dialect.choices.items():
        fields[field] = read.word(key, words, next(iter(words)))
    if fields.get("query_scalar") == fields["head_dim"]:
        fields["query_scalar"] = None
    fields |= rope.read(raw, dialect, fields["context_length"], problems)
    if not problems:
        fields |= read_windows(read, config, dialect, fields["num_layers"])
        fields |= {} if dialect.read is None else dialect.read(read, fields["num_layers"])
    if problems:
        raise ValueError("config.json cannot be used:\n" + "\n".join(f"  {problem}." for problem in problems))
    return config(**fields)


def _of_file(found: list[_Architecture], raw: dict[str, Any]) -> _Architecture:
    """Return the first of some architectures of one name that a file can be of, or the first."""
    fits = (one for one in found if all(raw.get(key) in values for key, values in one[1].where.items()))
    return next(fits, found[0])


def _text_part(raw: dict[str, Any], outer: str, problems: list[str]) -> tuple[str, dict[str, Any]]:
    """Return what a file of several parts says of its text part: which architecture it is of, and its keys."""
    inner = [name for name, found in ARCHITECTURES.items() if any(one.outer == outer for _, one in found)]
    beside = _OUTER | {*ARCHITECTURES[inner[0]][0][1].outer_keys}
    text = raw.get("text_config")
    if "text_config" not in raw and "hidden_size" in raw:  # Qwen 2's keep the text's keys beside the other parts'
        text = {key: value for key, value in raw.items() if key not in beside | {"model_type"}}
        raw = {key: raw[key] for key in raw.keys() & beside}
    found = text.get("model_type", inner[0]) if isinstance(text, dict) else text
    name = found if found in inner else inner[0]
    known = _OUTER | IGNORED | {*ARCHITECTURES[name][0][1].outer_keys}
    problems += [_unknown(key, known) for key in raw if key not in known and not _twice(key, raw, text)]
    if not isinstance(text, dict) or found != name:
        known = " or ".join(map(repr, inner))
        problems.append(f"`text_config` must be an object of model_type={known}, and is {found!r}")
        return name, {}
    told = {key: raw[key] for key in ("tie_word_embeddings", "quantization_config") if key in raw}
    own = {key: value for key, value in text.items() if not (key in known and key.endswith("_token_id"))}
    return name, own | {"tie_word_embeddings": True} | told  # tied unless the folder has a head (`folder.as_stored`)


def _twice(key: str, raw: dict[str, Any], text: Any) -> bool:
    """Return whether a file says of its text part what that says itself, as transformers 4.52 wrote Qwen 2's."""
    return isinstance(text, dict) and key in text and text[key] == raw[key]


def _check_keys(raw: dict[str, Any], dialect: Dialect, problems: list[str]) -> None:
    """Find the keys that are unknown and the values that are not supported."""
    read = {*dialect.sizes, *dialect.aliases.values(), *dialect.numbers, *dialect.flags, *dialect.keys}
    read |= {*dialect.choices}
    read |= {*IGNORED, *dialect.ignored, *rope.keys(dialect), *window_keys(dialect)}
    only = {key: values for key, values in HARMLESS.items() if key not in read}
    only |= {**dialect.harmless, **_only_all(dialect), **dialect.only, **dialect.where}
    if "layer_types" not in read:  # all layers are alike, which a list may say too
        listed = raw.get("layer_types")
        layer = "sliding_attention" if all_local(raw, dialect) else "full_attention"
        only["layer_types"] = ([layer] * (len(listed) if isinstance(listed, list) else 1), None)
    known = read | set(only)
    problems += [_unknown(key, known) for key in raw if key not in known]
    problems += [
        f"`{key}`={raw[key]!r} is not supported, only {' or '.join(repr(value) for value in values)}"
        for key, values in only.items()
        if key in raw and raw[key] not in values
    ]


def _only_all(dialect: Dialect) -> dict[str, tuple]:
    """Return what keys may hold in every architecture, but for those that this one reads."""
    return {key: values for key, values in ONLY_ALL.items() if key not in rope.keys(dialect)}


def _unknown(key: str, known: set[str] | frozenset[str]) -> str:
    close = difflib.get_close_matches(key[:100], sorted(known), n=1)
    return f"`{key}` is not known" + (f"; did you mean `{close[0]}`?" if close else "")


def to_hf(config: Config, dtype: str, told: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return a `config.json` that transformers 4 and 5 read, for weights stored in `dtype`.

    Of several words for one thing it has that of the file `told`, if there is one, or the usual one.

    Raises:
        ValueError: the config mixes Gemma 1 and 2 in a way that no Hugging Face architecture has.
    """
    name, dialect = next((name, one) for name, one in type(config).dialects.items() if _describes(one, config))
    if dialect.refuse is not None and (why := dialect.refuse(config)):
        raise ValueError(f"cannot describe this config to Hugging Face: {why}.")
    raw: dict[str, Any] = {
        key: values[0]
        for key, values in {**_only_all(dialect), **dialect.only, **dialect.where}.items()
        if _plain(values[0])
    }
    raw |= dialect.written
    raw |= {"architectures": [dialect.architecture], "model_type": name, "torch_dtype": dtype}
    for key, (field, _) in (*dialect.sizes.items(), *dialect.numbers.items(), *dialect.flags.items()):
        raw[key] = getattr(config, field)
    for key, (field, words) in dialect.choices.items():
        known = [word for word, meaning in words.items() if meaning == getattr(config, field)]
        raw[key] = told[key] if told.get(key) in known else known[0]
    if "query_pre_attn_scalar" in dialect.numbers:
        scalar = config.head_dim if raw["query_pre_attn_scalar"] is None else raw["query_pre_attn_scalar"]
        raw["query_pre_attn_scalar"] = round(scalar) if abs(scalar - round(scalar)) < 1e-9 else scalar
    raw |= {} if dialect.write is None else dialect.write(config)
    return raw | written_windows(config, dialect) | rope.write(config, dialect)


def _describes(dialect: Dialect, config: Config) -> bool:
    return all(getattr(config, field) == value for field, value in dialect.fixed.items())


def _plain(value: Any) -> bool:
    return value is not None and value != {}
