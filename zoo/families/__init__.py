"""The families, one file each (or one for what grew out of it): its config, the rows of its parameters, what its
`config.json` may hold, and which model it makes. Free of JAX. They stand by lineage, in `gemmas`, `gpts` and `llamas`,
and in `mixtures` what is a mixture of experts alone; what all mixtures share is in `mixture`, and what those with
Mamba's layers share in `mamba`.

In: a family's name, or a config. Out: the class of its config, or of its models.
"""

import importlib
from typing import Any

from zoo.config import Config
from zoo.families.gemmas.gemma import Gemma3Config, GemmaConfig
from zoo.families.gemmas.gemma3n import Gemma3nConfig
from zoo.families.gemmas.gemma4 import Gemma4Config, Gemma4MoeConfig
from zoo.families.gpts.bert import ModernBertConfig
from zoo.families.gpts.cohere import Cohere2Config, CohereConfig
from zoo.families.gpts.gpt import GPT2Config
from zoo.families.gpts.nemotron import NemotronConfig
from zoo.families.gpts.neox import NeoXConfig
from zoo.families.gpts.opt import OPTConfig
from zoo.families.gpts.stablelm import StableLMConfig
from zoo.families.gpts.starcoder import StarCoder2Config
from zoo.families.llamas.ernie import ErnieConfig, ErnieMoeConfig, HeliumConfig
from zoo.families.llamas.exaone import ExaoneConfig
from zoo.families.llamas.glm import DotsConfig, GLMConfig, GLMMoeConfig
from zoo.families.llamas.granite import Granite4Config, Granite4MoeConfig, GraniteConfig, GraniteMoeConfig
from zoo.families.llamas.hunyuan import HunyuanConfig
from zoo.families.llamas.lfm import LfmConfig, LfmMoeConfig
from zoo.families.llamas.llama import ArceeConfig, LlamaConfig
from zoo.families.llamas.mistral import CWMConfig, Ministral3Config, MinistralConfig, MistralConfig, MixtralConfig
from zoo.families.llamas.olmo import Olmo2Config, Olmo3Config, OlmoeConfig
from zoo.families.llamas.phi import Phi3Config
from zoo.families.llamas.qwen import Qwen2Config, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig
from zoo.families.llamas.qwen_next import Qwen3NextConfig, Qwen35Config, Qwen35MoeConfig
from zoo.families.llamas.seed import SeedConfig
from zoo.families.llamas.smollm import SmolLM3Config
from zoo.families.mixtures.deepseek import DeepSeekV2Config, DeepSeekV3Config, GLMFlashConfig, Mistral4Config
from zoo.families.mixtures.gptoss import GptOssConfig
from zoo.families.mixtures.llama4 import Llama4Config, MobileLLMR1Config
from zoo.families.mixtures.minimax import MiniMaxConfig

FAMILIES: dict[str, type[Config]] = {
    "gemma": GemmaConfig,
    "gemma3": Gemma3Config,
    "gemma3n": Gemma3nConfig,
    "gemma4": Gemma4Config,
    "gemma4_moe": Gemma4MoeConfig,
    "llama": LlamaConfig,
    "arcee": ArceeConfig,
    "mistral": MistralConfig,
    "ministral": MinistralConfig,
    "cwm": CWMConfig,
    "ministral3": Ministral3Config,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mixtral": MixtralConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "smollm3": SmolLM3Config,
    "olmo2": Olmo2Config,
    "olmo3": Olmo3Config,
    "olmoe": OlmoeConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "phi3": Phi3Config,
    "granite": GraniteConfig,
    "granite_moe": GraniteMoeConfig,
    "granite4": Granite4Config,
    "granite4_moe": Granite4MoeConfig,
    "gpt2": GPT2Config,
    "gpt_neox": NeoXConfig,
    "opt": OPTConfig,
    "starcoder2": StarCoder2Config,
    "stablelm": StableLMConfig,
    "nemotron": NemotronConfig,
    "gpt_oss": GptOssConfig,
    "seed_oss": SeedConfig,
    "helium": HeliumConfig,
    "ernie4_5": ErnieConfig,
    "ernie4_5_moe": ErnieMoeConfig,
    "exaone4": ExaoneConfig,
    "hunyuan": HunyuanConfig,
    "glm4": GLMConfig,
    "glm4_moe": GLMMoeConfig,
    "dots1": DotsConfig,
    "minimax_m2": MiniMaxConfig,
    "mobilellm_r1": MobileLLMR1Config,  # before Llama 4, as whose files without experts its own are
    "llama4": Llama4Config,
    "cohere": CohereConfig,
    "cohere2": Cohere2Config,
    "modernbert": ModernBertConfig,
    "lfm2": LfmConfig,
    "lfm2_moe": LfmMoeConfig,
    "qwen3_next": Qwen3NextConfig,
    "qwen3_5": Qwen35Config,
    "qwen3_5_moe": Qwen35MoeConfig,
    "deepseek_v2": DeepSeekV2Config,
    "deepseek_v3": DeepSeekV3Config,
    "glm4_flash": GLMFlashConfig,
    "mistral4": Mistral4Config,
}


def model_class(config: Config) -> Any:
    """Return the class of a config's models, with `init(config, key=)` and `build(config, leaves)`."""
    home, _, name = config.model.rpartition(".")
    return getattr(importlib.import_module(home), name)
