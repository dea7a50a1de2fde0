"""Adapters of experts as PEFT has them (its `target_parameters`): transformers keeps all experts of a layer in two
parameters, gates with what they multiply, and what leads back. Free of JAX.

On disk each parameter has one A `[E R, in]`, expert by expert, and one B `[out, R E]`, in which experts are neighbours.
Where both are adapted, what is added to the first is named `base_layer`. Here they are taken apart into an A `[R, in]`
and a B `[out, R]` for each expert, as if experts were modules: `experts.down_proj.3.lora_A.weight`.

Of what lies as inputs by outputs and does not say so (Llama 4's), PEFT takes the one for the other: what it calls A has
the outputs, and B the inputs.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from zoo.adapters.settings import Settings
from zoo.parameters import LAYER, Row

_PARAMETERS = ("gate_up_proj", "down_proj")  # in the order in which PEFT wraps them
_HELD = re.compile(r"(?:base_model\.model\.)?(.*\.experts)(\.base_layer)?(\.lora_[AB]\.weight)")
_LINEAR = re.compile(r"(in|out)put_linear\.weight$")  # what Granite's files call them
_IN_MLP = re.compile(r"\.(gate|up|down)_proj\.weight$")
_APART = re.compile(r"(.*\.experts)\.(\w+)\.(\d+)(\.lora_[AB]\.weight)")
_OTHER = {".lora_A.weight": ".lora_B.weight", ".lora_B.weight": ".lora_A.weight"}


def as_parameter(row: Row) -> Row:
    """Return the row of a matrix as transformers keeps it; of experts, that of one expert's share of a parameter."""
    if "E" not in row.lead:
        if ".router.layer." in row.tensor:  # Granite's
            return replace(row, tensor=row.tensor.replace(".layer.weight", ".weight"))
        return replace(row, tensor=row.tensor.replace(".block_sparse_moe.", ".mlp."))
    of_all = "E" not in row.stack  # on disk too
    module = (_LINEAR.sub("", row.tensor.partition("experts.")[0]) if of_all else LAYER + "mlp.") + "experts."
    if row.fan_in == "F":
        return replace(row, tensor=module + "down_proj.{}", pattern="D F -> F D")
    part = int(row.leaf.endswith("up"))
    return replace(row, tensor=module + "gate_up_proj.{}", pattern="F D -> D F", fused="FF", part=part)


def parameter(row: Row, mixture: bool) -> str | None:
    """Return what settings call the parameter of such a row, where it is no module's: of experts, and of routers.

    In a mixture, of any MLP: PEFT takes modules of these names for experts, wherever they are.
    """
    alone = "E" in row.lead or row.leaf.endswith(".router") or (mixture and _IN_MLP.search(row.tensor) is not None)
    return row.tensor.partition("{}.")[2].removesuffix(".{}") if alone else None


def target(module: str) -> str:
    """Return what settings call a module: an expert's share of a parameter, as the parameter."""
    return re.sub(r"(\.experts\.\w+)\.\d+$", r"\1", module)


def _turned(module: str, end: str, part: np.ndarray) -> tuple[str, np.ndarray]:
    """Return one expert's A or B as PEFT names it, of as we do, or the other way round."""
    return (_OTHER[end], part.T) if module.endswith(".feed_forward.experts") else (end, part)


def apart(tensors: Mapping[str, np.ndarray], settings: Settings, count: int) -> dict[str, np.ndarray]:
    """Return an adapter's tensors with those of experts taken apart; what does not divide by experts stays as it is.

    Args:
        tensors: by the names that PEFT gives them.
        settings: which say what parameters are adapted.
        count: experts of a layer.
    """
    found = {}
    for name, tensor in tensors.items():
        match = _HELD.fullmatch(name)
        names = [one for one in _PARAMETERS if match and settings.by_itself(f"{match[1]}.{one}")]
        of_A = name.endswith("lora_A.weight")
        if not match or not names or tensor.shape[0 if of_A else 1] % count:
            found[name] = tensor
            continue
        own = names[0] if match[2] else names[-1]
        split = tensor.reshape((count, -1, tensor.shape[1]) if of_A else (tensor.shape[0], -1, count))
        for expert in range(count):
            end, part = _turned(match[1], match[3], split[expert] if of_A else split[..., expert])
            found[f"{name[: match.end(1)]}.{own}.{expert}{end}"] = part
    return found


def together(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors as PEFT has them, given those of experts apart and in order: the way back from `apart`."""
    found, shares = {}, {}
    for name, tensor in tensors.items():
        if match := _APART.fullmatch(name):
            end, part = _turned(match[1], match[4], tensor)
            shares.setdefault((match[1], match[2], end), []).append(part)
        else:
            found[name] = tensor
    for (module, own, end), parts in shares.items():
        inner = ".base_layer" * (own == _PARAMETERS[0] and (module, _PARAMETERS[1], end) in shares)
        joined = np.concatenate(parts) if "lora_A" in end else np.stack(parts, -1).reshape(len(parts[0]), -1)
        found[f"{module}{inner}{end}"] = np.ascontiguousarray(joined)
    return found
