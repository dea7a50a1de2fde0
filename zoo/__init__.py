"""Models as pytrees. `import zoo` is instant: JAX is imported when the first name that needs it is used."""

import importlib
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:  # the same for type checkers, which a test compares
    from zoo.accounting import count_params as count_params
    from zoo.base import RopeKind as RopeKind
    from zoo.base import RopeScaling as RopeScaling
    from zoo.configs import Gemma3Config as Gemma3Config
    from zoo.configs import GemmaConfig as GemmaConfig
    from zoo.configs import LlamaConfig as LlamaConfig
    from zoo.configs import MistralConfig as MistralConfig
    from zoo.configs import MixtralConfig as MixtralConfig
    from zoo.configs import Qwen2Config as Qwen2Config
    from zoo.configs import Qwen3Config as Qwen3Config
    from zoo.configs import Qwen3MoeConfig as Qwen3MoeConfig
    from zoo.families import model_class as model_class
    from zoo.gemma import Gemma as Gemma
    from zoo.llama import Llama as Llama
    from zoo.mixture import Mixture as Mixture
    from zoo.nn import Ops as Ops
    from zoo.nn import check_tokens as check_tokens
    from zoo.output import Head as Head
    from zoo.output import head as head
    from zoo.weights import load as load
    from zoo.weights import save as save
else:

    def __getattr__(name: str):
        if name not in _HOME:
            raise AttributeError(f"module `zoo` has no attribute `{name}`; it has {', '.join(__all__)}.")
        return getattr(importlib.import_module(_HOME[name]), name)
