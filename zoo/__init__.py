"""Models as pytrees. `import zoo` is instant: JAX is imported when the first name that needs it is used."""

import importlib

_HOME = {
    "Gemma": "zoo.gemma",
    "Gemma3Config": "zoo.configs",
    "GemmaConfig": "zoo.configs",
    "Head": "zoo.output",
    "Llama": "zoo.llama",
    "LlamaConfig": "zoo.configs",
    "MistralConfig": "zoo.configs",
    "MixtralConfig": "zoo.configs",
    "Mixture": "zoo.mixture",
    "Ops": "zoo.nn",
    "Qwen2Config": "zoo.configs",
    "Qwen3Config": "zoo.configs",
    "Qwen3MoeConfig": "zoo.configs",
    "RopeKind": "zoo.base",
    "RopeScaling": "zoo.base",
    "check_tokens": "zoo.nn",
    "count_params": "zoo.accounting",
    "head": "zoo.output",
    "load": "zoo.weights",
    "model_class": "zoo.families",
    "save": "zoo.weights",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module `zoo` has no attribute `{name}`; it has {', '.join(__all__)}.")
    return getattr(importlib.import_module(_HOME[name]), name)
