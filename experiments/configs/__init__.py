"""What a run can be told: frozen dataclasses, each field with its default and one line of help.

No JAX here: `--help` and every configuration error come from this file alone. A value of None means that
`experiments.runtime.hardware` chooses it for the device and the model's size, and says what it chose.
"""

from experiments.configs.compute import Hardware, Remat, Tiling
from experiments.configs.data import Chat, CustomData, Data, Grain, Preference, Pydoc, Stdlib, Synthetic, Text, Tokens
from experiments.configs.distributed import Distributed
from experiments.configs.fields import (
    DType,
    OnNan,
    Platform,
    Schedule,
    StrEnum,
    check,
    chosen,
    option,
    positive,
    refuse,
)
from experiments.configs.mesh import Mesh
from experiments.configs.objective import (
    Custom,
    Distill,
    Dpo,
    Ipo,
    Objective,
    Orpo,
    Paired,
    Pretrain,
    Referenced,
    Sft,
    Simpo,
)
from experiments.configs.optimizer import (
    Adafactor,
    AdafactorLayerwise,
    AdamW,
    Adapter,
    CustomOptimizer,
    Decayed,
    Lora,
    Muon,
    Optimizer,
    Sgd,
)
from experiments.configs.results import Checkpoint, Evaluation, Profile, Save
from experiments.configs.run import Model, Resolved, Run

__all__ = [
    "Adafactor",
    "AdafactorLayerwise",
    "AdamW",
    "Adapter",
    "Chat",
    "Checkpoint",
    "Custom",
    "CustomData",
    "CustomOptimizer",
    "DType",
    "Data",
    "Decayed",
    "Distill",
    "Distributed",
    "Dpo",
    "Evaluation",
    "Grain",
    "Hardware",
    "Ipo",
    "Lora",
    "Mesh",
    "Model",
    "Muon",
    "Objective",
    "OnNan",
    "Optimizer",
    "Orpo",
    "Paired",
    "Platform",
    "Preference",
    "Pretrain",
    "Profile",
    "Pydoc",
    "Referenced",
    "Remat",
    "Resolved",
    "Run",
    "Save",
    "Schedule",
    "Sft",
    "Sgd",
    "Simpo",
    "Stdlib",
    "StrEnum",
    "Synthetic",
    "Text",
    "Tiling",
    "Tokens",
    "check",
    "chosen",
    "option",
    "positive",
    "refuse",
]  # fmt: skip
