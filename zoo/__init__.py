"""Models as pytrees. `import zoo` is instant: JAX is imported when the first name that needs it is used."""

import importlib
from typing import TYPE_CHECKING

_HOME = {
    "AbstractMixture": "zoo.models.mixture",
    "Cohere2Config": "zoo.families.gpts.cohere",
    "CohereConfig": "zoo.families.gpts.cohere",
    "DeepSeekV2Config": "zoo.families.mixtures.deepseek",
    "DeepSeekV3Config": "zoo.families.mixtures.deepseek",
    "ExaoneConfig": "zoo.families.llamas.exaone",
    "Embedder": "zoo.inference.embed",
    "ForwardPass": "zoo.models.forward",
    "GLMConfig": "zoo.families.llamas.glm",
    "GLMFlashConfig": "zoo.families.mixtures.deepseek",
    "GLMMoeConfig": "zoo.families.llamas.glm",
    "DotsConfig": "zoo.families.llamas.glm",
    "GPT": "zoo.models.gpt",
    "GPT2Config": "zoo.families.gpts.gpt",
    "Gemma": "zoo.models.gemmas.gemma",
    "ErnieConfig": "zoo.families.llamas.ernie",
    "HeliumConfig": "zoo.families.llamas.ernie",
    "ErnieMoeConfig": "zoo.families.llamas.ernie",
    "Gemma3Config": "zoo.families.gemmas.gemma",
    "Gemma3nConfig": "zoo.families.gemmas.gemma3n",
    "Gemma4Config": "zoo.families.gemmas.gemma4",
    "Gemma4MoeConfig": "zoo.families.gemmas.gemma4",
    "GemmaConfig": "zoo.families.gemmas.gemma",
    "GptOssConfig": "zoo.families.mixtures.gptoss",
    "Granite4Config": "zoo.families.llamas.granite",
    "Granite4MoeConfig": "zoo.families.llamas.granite",
    "GraniteConfig": "zoo.families.llamas.granite",
    "GraniteMoeConfig": "zoo.families.llamas.granite",
    "Head": "zoo.models.head",
    "HunyuanConfig": "zoo.families.llamas.hunyuan",
    "LfmConfig": "zoo.families.llamas.lfm",
    "LfmMoeConfig": "zoo.families.llamas.lfm",
    "Llama": "zoo.models.llama",
    "Llama4Config": "zoo.families.mixtures.llama4",
    "MobileLLMR1Config": "zoo.families.mixtures.llama4",
    "LlamaConfig": "zoo.families.llamas.llama",
    "ArceeConfig": "zoo.families.llamas.llama",
    "MiniMaxConfig": "zoo.families.mixtures.minimax",
    "Ministral3Config": "zoo.families.llamas.mistral",
    "Mistral4Config": "zoo.families.mixtures.deepseek",
    "MistralConfig": "zoo.families.llamas.mistral",
    "CWMConfig": "zoo.families.llamas.mistral",
    "MinistralConfig": "zoo.families.llamas.mistral",
    "MixtralConfig": "zoo.families.llamas.mistral",
    "Mixture": "zoo.models.mixture",
    "ModernBertConfig": "zoo.families.gpts.bert",
    "NemotronConfig": "zoo.families.gpts.nemotron",
    "NeoXConfig": "zoo.families.gpts.neox",
    "OPTConfig": "zoo.families.gpts.opt",
    "Olmo2Config": "zoo.families.llamas.olmo",
    "Olmo3Config": "zoo.families.llamas.olmo",
    "OlmoeConfig": "zoo.families.llamas.olmo",
    "Ops": "zoo.models.layers",
    "Phi3Config": "zoo.families.llamas.phi",
    "Qwen2Config": "zoo.families.llamas.qwen",
    "Qwen2MoeConfig": "zoo.families.llamas.qwen",
    "Qwen3Config": "zoo.families.llamas.qwen",
    "Qwen3MoeConfig": "zoo.families.llamas.qwen",
    "Qwen3NextConfig": "zoo.families.llamas.qwen_next",
    "Qwen35Config": "zoo.families.llamas.qwen_next",
    "Qwen35MoeConfig": "zoo.families.llamas.qwen_next",
    "RopeScaling": "zoo.config",
    "RopeType": "zoo.config",
    "SeedConfig": "zoo.families.llamas.seed",
    "SmolLM3Config": "zoo.families.llamas.smollm",
    "StableLMConfig": "zoo.families.gpts.stablelm",
    "StarCoder2Config": "zoo.families.gpts.starcoder",
    "check_tokens": "zoo.models.layers",
    "count_params": "zoo.accounting",
    "head": "zoo.models.head",
    "load": "zoo.huggingface.weights",
    "model_class": "zoo.families",
    "save": "zoo.huggingface.weights",
}
__all__ = sorted(_HOME)

if TYPE_CHECKING:  # the same for type checkers, which a test compares
    from zoo.accounting import count_params as count_params
    from zoo.config import RopeScaling as RopeScaling
    from zoo.config import RopeType as RopeType
    from zoo.families import model_class as model_class
    from zoo.families.gemmas.gemma import Gemma3Config as Gemma3Config
    from zoo.families.gemmas.gemma import GemmaConfig as GemmaConfig
    from zoo.families.gemmas.gemma3n import Gemma3nConfig as Gemma3nConfig
    from zoo.families.gemmas.gemma4 import Gemma4Config as Gemma4Config
    from zoo.families.gemmas.gemma4 import Gemma4MoeConfig as Gemma4MoeConfig
    from zoo.families.gpts.bert import ModernBertConfig as ModernBertConfig
    from zoo.families.gpts.cohere import Cohere2Config as Cohere2Config
    from zoo.families.gpts.cohere import CohereConfig as CohereConfig
    from zoo.families.gpts.gpt import GPT2Config as GPT2Config
    from zoo.families.gpts.nemotron import NemotronConfig as NemotronConfig
    from zoo.families.gpts.neox import NeoXConfig as NeoXConfig
    from zoo.families.gpts.opt import OPTConfig as OPTConfig
    from zoo.families.gpts.stablelm import StableLMConfig as StableLMConfig
    from zoo.families.gpts.starcoder import StarCoder2Config as StarCoder2Config
    from zoo.families.llamas.ernie import ErnieConfig as ErnieConfig
    from zoo.families.llamas.ernie import ErnieMoeConfig as ErnieMoeConfig
    from zoo.families.llamas.ernie import HeliumConfig as HeliumConfig
    from zoo.families.llamas.exaone import ExaoneConfig as ExaoneConfig
    from zoo.families.llamas.glm import DotsConfig as DotsConfig
    from zoo.families.llamas.glm import GLMConfig as GLMConfig
    from zoo.families.llamas.glm import GLMMoeConfig as GLMMoeConfig
    from zoo.families.llamas.granite import Granite4Config as Granite4Config
    from zoo.families.llamas.granite import Granite4MoeConfig as Granite4MoeConfig
    from zoo.families.llamas.granite import GraniteConfig as GraniteConfig
    from zoo.families.llamas.granite import GraniteMoeConfig as GraniteMoeConfig
    from zoo.families.llamas.hunyuan import HunyuanConfig as HunyuanConfig
    from zoo.families.llamas.lfm import LfmConfig as LfmConfig
    from zoo.families.llamas.lfm import LfmMoeConfig as LfmMoeConfig
    from zoo.families.llamas.llama import ArceeConfig as ArceeConfig
    from zoo.families.llamas.llama import LlamaConfig as LlamaConfig
    from zoo.families.llamas.mistral import CWMConfig as CWMConfig
    from zoo.families.llamas.mistral import Ministral3Config as Ministral3Config
    from zoo.families.llamas.mistral import MinistralConfig as MinistralConfig
    from zoo.families.llamas.mistral import MistralConfig as MistralConfig
    from zoo.families.llamas.mistral import MixtralConfig as MixtralConfig
    from zoo.families.llamas.olmo import Olmo2Config as Olmo2Config
    from zoo.families.llamas.olmo import Olmo3Config as Olmo3Config
    from zoo.families.llamas.olmo import OlmoeConfig as OlmoeConfig
    from zoo.families.llamas.phi import Phi3Config as Phi3Config
    from zoo.families.llamas.qwen import Qwen2Config as Qwen2Config
    from zoo.families.llamas.qwen import Qwen2MoeConfig as Qwen2MoeConfig
    from zoo.families.llamas.qwen import Qwen3Config as Qwen3Config
    from zoo.families.llamas.qwen import Qwen3MoeConfig as Qwen3MoeConfig
    from zoo.families.llamas.qwen_next import Qwen3NextConfig as Qwen3NextConfig
    from zoo.families.llamas.qwen_next import Qwen35Config as Qwen35Config
    from zoo.families.llamas.qwen_next import Qwen35MoeConfig as Qwen35MoeConfig
    from zoo.families.llamas.seed import SeedConfig as SeedConfig
    from zoo.families.llamas.smollm import SmolLM3Config as SmolLM3Config
    from zoo.families.mixtures.deepseek import DeepSeekV2Config as DeepSeekV2Config
    from zoo.families.mixtures.deepseek import DeepSeekV3Config as DeepSeekV3Config
    from zoo.families.mixtures.deepseek import GLMFlashConfig as GLMFlashConfig
    from zoo.families.mixtures.deepseek import Mistral4Config as Mistral4Config
    from zoo.families.mixtures.gptoss import GptOssConfig as GptOssConfig
    from zoo.families.mixtures.llama4 import Llama4Config as Llama4Config
    from zoo.families.mixtures.llama4 import MobileLLMR1Config as MobileLLMR1Config
    from zoo.families.mixtures.minimax import MiniMaxConfig as MiniMaxConfig
    from zoo.huggingface.weights import load as load
    from zoo.huggingface.weights import save as save
    from zoo.inference.embed import Embedder as Embedder
    from zoo.models.forward import ForwardPass as ForwardPass
    from zoo.models.gemmas.gemma import Gemma as Gemma
    from zoo.models.gpt import GPT as GPT
    from zoo.models.head import Head as Head
    from zoo.models.head import head as head
    from zoo.models.layers import Ops as Ops
    from zoo.models.layers import check_tokens as check_tokens
    from zoo.models.llama import Llama as Llama
    from zoo.models.mixture import AbstractMixture as AbstractMixture
    from zoo.models.mixture import Mixture as Mixture
else:

    def __getattr__(name: str):
        if name not in _HOME:
            raise AttributeError(f"module `zoo` has no attribute `{name}`; it has {', '.join(__all__)}.")
        return getattr(importlib.import_module(_HOME[name]), name)
