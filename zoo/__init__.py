"""Models as pytrees. `import zoo` is instant: JAX is imported when the first name that needs it is used."""

import importlib

_HOME = {
    "Gemma": "zoo.gemma",
    "GemmaConfig": "zoo.configs",
    "Ops": "zoo.nn",
    "check_tokens": "zoo.gemma",
    "count_params": "zoo.accounting",
    "load": "zoo.weights",
    "save": "zoo.weights",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module `zoo` has no attribute `{name}`; it has {', '.join(__all__)}.")
    return getattr(importlib.import_module(_HOME[name]), name)
