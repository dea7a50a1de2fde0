"""What `adapter_config.json` of PEFT says: which modules are adapted, at what rank and scale. Free of JAX.

Supported is what a formula describes: plain LoRA, rsLoRA (https://arxiv.org/abs/2312.03732), DoRA
(https://arxiv.org/abs/2402.09353), ranks and alphas by pattern, some layers only, and adapters that begin as a part of
their matrix, PiSSA (https://arxiv.org/abs/2404.02948) and OLoRA (https://arxiv.org/abs/2406.01775), which PEFT takes
out of the base again wherever it loads them. Everything else is refused by name: it would load, and compute
something else.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = "adapter_config.json"
# Settings that change what an adapter computes, and the values under which they do not.
_ONLY: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "modules_to_save": ([], None),
    "trainable_token_indices": ([], {}, None),
}
_READ = {"r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "init_lora_weights"}
_READ |= {"target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"}
_IGNORED = frozenset(
    """
    task_type auto_mapping fan_in_fan_out peft_version base_model_name_or_path revision inference_mode lora_dropout
    megatron_core eva_config qalora_group_size runtime_config ensure_weight_tying
    """.split()
)
# Ways to begin after which PEFT finds the base as it is; others begin as a part of the base, which is taken out of it.
_BESIDE = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_PARTS = ("pissa", "olora")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """An adapter's settings.

    Attributes:
        rank: of matrices that no pattern names.
        alpha: likewise; the addition is scaled by `alpha / rank`, or by `alpha / sqrt(rank)` if `rooted`.
        rooted: rsLoRA.
        dora: each output's weights have a length of their own.
        begin: `pissa` or `olora`, where the adapter began as that part of the base; None beside it.
        ranks: ranks by pattern; the first that matches counts.
        alphas: alphas by pattern.
        targets: patterns of adapted modules: a regular expression, ends of names, or None where the file does not say.
        parameters: ends of the names of parameters that are adapted by themselves: those of experts.
        excluded: likewise of modules that are not.
        layers: the only layers that are adapted; None is all.
        layers_pattern: what comes before a layer's number.
    """

    rank: int
    alpha: float
    rooted: bool
    dora: bool
    begin: str | None
    ranks: dict[str, int]
    alphas: dict[str, float]
    targets: str | list[str] | None
    parameters: list[str]
    excluded: str | list[str] | None
    layers: list[int] | None
    layers_pattern: list[str]

    def rank_of(self, module: str) -> int:
        """Return a module's rank."""
        return _by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return what a module's addition is multiplied by."""
        rank = self.rank_of(module)
        return _by_pattern(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rooted else rank)

    def adapts(self, module: str) -> bool:
        """Return whether the settings say that a module, or a parameter, is adapted."""
        if self.by_itself(module) or self.by_itself(f"{module}.weight"):
            return True
        if self.targets is None or self.targets == "all-linear":
            return True
        if self.excluded and _named(self.excluded, module):
            return False
        if not _named(self.targets, module):
            return False
        if self.layers is None or isinstance(self.targets, str):
            return True
        patterns = [rf"(?:^|.*?\.){one}\.(\d+)\." for one in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        found = next((match for one in patterns if (match := re.match(one, module))), None)
        return found is not None and int(found.group(1)) in self.layers

    def by_itself(self, parameter: str) -> bool:
        """Return whether the settings name a parameter."""
        return _named(self.parameters, parameter)


def _named(patterns: str | list[str], module: str) -> bool:
    if isinstance(patterns, str):
        return re.fullmatch(patterns, module) is not None
    return any(module == one or module.endswith(f".{one}") for one in patterns)


def _by_pattern(values: dict[str, Any], module: str, otherwise: Any) -> Any:
    return next((value for key, value in values.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def read(folder: Path) -> Settings:
    """Return a folder's settings.

    Raises:
        ValueError: they are damaged, or say what no formula here does: all of it in one message.
    """
    try:
        raw: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        problems = _problems(raw)
        alpha, rank = raw["lora_alpha"], raw.get("r", 8)
        ranks, alphas = raw.get("rank_pattern") or {}, raw.get("alpha_pattern") or {}
        for name, value in (("lora_alpha", alpha), *((f"alpha_pattern.{key}", one) for key, one in alphas.items())):
            if isinstance(value, bool) or not isinstance(value, int | float):
                problems.append(f"`{name}`={value!r} is not a number")
        for name, value in (("r", rank), *((f"rank_pattern.{key}", one) for key, one in ranks.items())):
            if type(value) is not int or value < 1:
                problems.append(f"`{name}`={value!r} is not a positive integer")
        if problems:
            raise ValueError("; ".join(problems))
        layers, begin = raw.get("layers_to_transform"), raw.get("init_lora_weights", True)
        pattern = raw.get("layers_pattern") or []
        return Settings(
            rank=rank,
            alpha=float(alpha),
            rooted=bool(raw.get("use_rslora")),
            dora=bool(raw.get("use_dora")),
            begin=begin if begin in _PARTS else None,
            ranks=ranks,
            alphas={key: float(value) for key, value in alphas.items()},
            targets=raw.get("target_modules"),
            parameters=list(raw.get("target_parameters") or []),
            excluded=raw.get("exclude_modules"),
            layers=[layers] if isinstance(layers, int) else layers or None,
            layers_pattern=[pattern] if isinstance(pattern, str) else pattern,
        )
    except ValueError as error:
        what = f"{CONFIG}: {type(error).__name__} " if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"cannot load an adapter from `{folder}`: {what}{error}.") from None
    except FileNotFoundError:
        what = f"it has no {CONFIG}" if folder.is_dir() else "there is no such folder"
        raise ValueError(f"cannot load an adapter from `{folder}`: {what}, as PEFT writes it.") from None
    except (OSError, KeyError, AttributeError, TypeError, re.error) as error:
        raise ValueError(f"cannot load an adapter from `{folder}`: {CONFIG}: {type(error).__name__} {error}.") from None


def _problems(raw: dict[str, Any]) -> list[str]:
    problems = [
        f"`{key}`={raw[key]!r} is not supported, only {values[0]!r}"
        for key, values in _ONLY.items()
        if raw.get(key, values[0]) not in values
    ]
    begin = raw.get("init_lora_weights", True)
    if not any(begin is one or begin == one for one in (*_BESIDE, *_PARTS)):
        problems.append(
            f"`init_lora_weights`={begin!r} is not supported: it changes the base by data or chance that the folder "
            f"does not hold. Save it as plain LoRA (PEFT's path_initial_model_for_weight_conversion)"
        )
    if begin in _PARTS and raw.get("use_dora"):
        problems.append(f"`use_dora` with `init_lora_weights`={begin!r} is not supported")
    known = {*_ONLY, *_READ, *_IGNORED}
    problems += [f"`{key}`={value!r} is not supported" for key, value in raw.items() if key not in known and value]
    return problems
