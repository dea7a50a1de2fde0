"""Which model a config makes."""

from typing import Any

from zoo.base import Config
from zoo.configs import GemmaLike, MixtralConfig, Qwen3MoeConfig


def model_class(config: Config) -> Any:
    """Return the class of a config's models, with `init(config, key=)` and `build(config, leaves)`."""
    if isinstance(config, GemmaLike):
        from zoo.gemma import Gemma

        return Gemma
    if isinstance(config, MixtralConfig | Qwen3MoeConfig):
        from zoo.mixture import Mixture

        return Mixture
    from zoo.llama import Llama

    return Llama
