"""Which layers see how far, in `config.json`: a list of types, or the numbers that came before. Free of JAX."""

from typing import Any

from zoo.config import GLOBAL, LOCAL, Config, pattern_of
from zoo.dialect import Dialect
from zoo.huggingface.reader import Reader

_TYPES = {LOCAL: "sliding_attention", GLOBAL: "full_attention"}
_TURNS = ("global", "nested", "local")  # where local layers turn otherwise than global ones, whatever they see
_KEYS = {
    "none": (),
    "all": ("sliding_window",),
    "types": ("sliding_window", "layer_types"),
    "switch": ("sliding_window", "layer_types", "use_sliding_window", "max_window_layers"),
    "flag": ("sliding_window", "use_sliding_window", "max_window_layers"),
}


def window_keys(dialect: Dialect) -> set[str]:
    """Return the keys that say which layers see how far."""
    own = dialect.every[0]
    return {*_KEYS[dialect.windows]} | (set() if own is None else {own})


def all_local(raw: dict[str, Any], dialect: Dialect) -> bool:
    """Return whether a file gives every layer a window, where all layers are alike."""
    on = {"all": True, "flag": raw.get("use_sliding_window", False)}.get(dialect.windows, False)
    return bool(on) and raw.get("sliding_window", dialect.window) is not None


def read_windows(read: Reader, config: type[Config], dialect: Dialect, num_layers: int) -> dict[str, Any]:
    """Return the fields that say which layers see how far."""
    if dialect.windows == "none":
        return {}
    window = read.raw.get("sliding_window", dialect.window)
    if dialect.windows in ("switch", "flag") and not read.flag("use_sliding_window", False):
        window = None
    if window is not None and type(window) is not int:
        read.problems.append(f"`sliding_window`={window!r} is not an integer")
        return {}
    if dialect.windows in ("all", "flag"):
        return {"window": window}
    types = _layer_types(read, dialect, window, num_layers)
    types = types[:-1] + GLOBAL if dialect.last_global else types
    if dialect.rope not in _TURNS and (window is None or LOCAL not in types):
        return {"window": None}
    usual = config.__dataclass_fields__["attention_pattern"].default
    return {"window": window, "attention_pattern": pattern_of(types, str(usual))}


def _layer_types(read: Reader, dialect: Dialect, window: int | None, num_layers: int) -> str:
    """Return one letter per layer, from the list of transformers 5 or the number that came before it."""
    if read.raw.get("layer_types") is not None:
        listed = read.types(_TYPES, GLOBAL * num_layers)
        if window is None and LOCAL in listed:
            read.problems.append(f"`layer_types` names {_TYPES[LOCAL]}, and there is no window")
        return listed
    if dialect.windows == "types":
        key, every = dialect.every
        every = every if key is None else read.count(key, every)
        return "".join(LOCAL if (layer + 1) % every else GLOBAL for layer in range(num_layers))
    first = read.raw.get("max_window_layers", 28)
    if type(first) is not int:
        read.problems.append(f"`max_window_layers`={first!r} is not an integer")
        return GLOBAL * num_layers
    return "".join(LOCAL if window is not None and layer >= first else GLOBAL for layer in range(num_layers))


def written_windows(config: Any, dialect: Dialect) -> dict[str, Any]:
    """Return the keys that say which layers see how far, for transformers 5 and what came before."""
    if dialect.windows == "none":
        return {}
    # Where layers are listed it says nothing of one that sees all, and transformers may need a number.
    unused = config.context_length if dialect.windows == "types" else None
    raw: dict[str, Any] = {"sliding_window": unused if config.window is None else config.window}
    if dialect.windows == "flag":
        raw |= {"use_sliding_window": config.window is not None}
    if dialect.windows in ("types", "switch"):
        pattern = config.attention_pattern if config.window is not None or dialect.rope in _TURNS else GLOBAL
        types = [_TYPES[pattern[layer % len(pattern)]] for layer in range(config.num_layers)]
        raw["layer_types"] = types
    if dialect.windows == "switch":
        globals_first = next((i for i, name in enumerate(types) if name == _TYPES[LOCAL]), config.num_layers)
        raw |= {"use_sliding_window": config.window is not None, "max_window_layers": globals_first}
    key = dialect.every[0]
    if key is not None and set(pattern[:-1]) <= {LOCAL} and pattern[-1] == GLOBAL:
        raw[key] = len(pattern)
    return raw
