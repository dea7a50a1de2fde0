"""What a run can be told: frozen dataclasses, each field with its default and one line of help.

No JAX here: `--help` and every configuration error come from this file alone. A value of None means that
`experiments.planning.resolve` chooses it for the device and the model's size, and says what it chose.
"""

# ruff: noqa: F401 (the package hands these names on)
from experiments.configs.compute import Distributed, Hardware, Mesh, Remat, Tiling
from experiments.configs.data import (
    Chat,
    CustomData,
    Data,
    Documents,
    Grain,
    Preference,
    Pydoc,
    Stdlib,
    Synthetic,
    Text,
    Tokens,
)
from experiments.configs.fields import (
    DType,
    OnNan,
    Platform,
    Quantise,
    Schedule,
    StrEnum,
    check,
    chosen,
    option,
    part,
    refuse,
)
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
from experiments.configs.run import Choice, Described, HeadTiling, Model, Origin, Reference, Resolved, Run
