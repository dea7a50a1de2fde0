"""The families: each one's config, and which model it makes. Free of JAX.

In: a family's name or a config. Out: the class of its config, or of its models.
"""

from typing import Any

from zoo.config import Config
from zoo.families.llama import FAMILIES as FAMILIES
from zoo.families.llama import Gemma3Config as Gemma3Config
from zoo.families.llama import GemmaConfig as GemmaConfig
from zoo.families.llama import GemmaLike as GemmaLike
from zoo.families.llama import LlamaConfig as LlamaConfig
from zoo.families.llama import LlamaLike as LlamaLike
from zoo.families.llama import MistralConfig as MistralConfig
from zoo.families.llama import MixtralConfig as MixtralConfig
from zoo.families.llama import Qwen2Config as Qwen2Config
from zoo.families.llama import Qwen3Config as Qwen3Config
from zoo.families.llama import Qwen3MoeConfig as Qwen3MoeConfig


def model_class(config: Config) -> Any:
    """Return the class of a config's models, with `init(config, key=)` and `build(config, leaves)`."""
    if isinstance(config, GemmaLike):
        from zoo.models.gemma import Gemma

        return Gemma
    if isinstance(config, MixtralConfig | Qwen3MoeConfig):
        from zoo.models.mixture import Mixture

        return Mixture
    from zoo.models.llama import Llama

    return Llama
