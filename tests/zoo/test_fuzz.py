"""Mutated folders load as what they now say, or are one ValueError. More: `python -m tests.zoo.test_fuzz 20000`."""

import copy
import json
import random
import shutil
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.zoo import hf_tiny
from zoo import load, save
from zoo.huggingface.config import from_hf

CASES = ["gemma2_gqa", "gemma3_stretched", "llama32", "llama_yarn_more", "mistral", "qwen2_windows", "qwen3_moe_mixed"]
JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**400, 1e400, -1e400, float("nan"), 0.5, 1e-300),
    *("", "x", "full_attention", "llama3", "yarn", "\0", "é" * 50, [], [1], [[]], ["sliding_attention"], {}, {"a": 1}),
    *({"rope_type": "yarn"}, {"rope_type": []}, {"type": "linear", "factor": "2"}, list(range(200))),
]


def mutate_header(blob: bytes, chance: random.Random) -> bytes:
    """Return a safetensors file with a few bytes of its header changed, cut, doubled or given another length."""
    length = struct.unpack("<Q", blob[:8])[0]
    data = bytearray(blob)
    match chance.randrange(6):
        case 0:
            for _ in range(chance.randint(1, 4)):
                data[chance.randrange(8 + length)] = chance.randrange(256)
        case 1:
            data[:8] = struct.pack("<Q", chance.choice([0, 1, length - 1, length + 1, 10**9, 2**63, 2**64 - 1]))
        case 2:
            data = data[: chance.randrange(len(data))]
        case 3:
            start = chance.randrange(8, 8 + length)
            data[start : start + chance.randint(1, 30)] = b""
        case 4:
            header = json.loads(blob[8 : 8 + length])
            entry = header[chance.choice(sorted(header))]
            entry[chance.choice(sorted(entry))] = chance.choice([*JUNK[:16], "F16", "F64", [0, 8], [2**62, 2**62]])
            data = _with_header(header, blob[8 + length :])
        case _:
            header = json.loads(blob[8 : 8 + length])
            names = [name for name in header if name != "__metadata__"]
            one, other = chance.sample(names, 2)
            header[one], header[other] = header[other], header[one]
            data = _with_header(header, blob[8 + length :])
    return bytes(data)


def _with_header(header: dict, payload: bytes) -> bytearray:
    text = json.dumps(header).encode()
    return bytearray(struct.pack("<Q", len(text)) + text + payload)


def mutate_config(raw: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return a config.json with one to three keys changed, dropped, added or renamed, nested ones too."""
    raw = copy.deepcopy(raw)
    for _ in range(chance.randint(1, 3)):
        inner = [value for value in raw.values() if isinstance(value, dict) and value]
        where = chance.choice(inner) if inner and chance.random() < 0.3 else raw
        key = chance.choice(sorted(where)) if where else "x"
        match chance.randrange(4):
            case 0:
                where.pop(key, None)
            case 1:
                where[key[:-1] + chance.choice("sx_")] = where.pop(key, 1)
            case 2:
                where[chance.choice(["rope_parameters", "layer_types", "head_dim", "x", key])] = chance.choice(JUNK)
            case _:
                where[key] = chance.choice(JUNK)
    return raw


def attempt(folder: Path):
    """Return the model that a folder loads as, or None where it is refused in words."""
    try:
        return load(folder)
    except ValueError as error:
        assert str(error)
        return None


def check_header(folder: Path, whole: bytes, chance: random.Random) -> bool:
    """Mutate a file's header; return whether it loaded, in which case each tensor is what the file says."""
    file = folder / "model.safetensors"
    file.write_bytes(mutate_header(whole, chance))
    model = attempt(folder)
    if model is not None:
        held = load_file(file)
        np.testing.assert_array_equal(model.embed, held["model.embed_tokens.weight"])
        np.testing.assert_array_equal(model.layers.attn_norm[0], held["model.layers.0.input_layernorm.weight"])
    return model is not None


def check_config(folder: Path, raw: dict[str, Any], chance: random.Random) -> bool:
    """Mutate config.json; return whether the folder loaded, in which case the model is what the file says."""
    changed = mutate_config(raw, chance)
    (folder / "config.json").write_text(json.dumps(changed))
    model = attempt(folder)
    if model is not None:
        assert model.config == from_hf(json.loads(json.dumps(changed)))
        assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {np.dtype("float32")}
    return model is not None


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("saved", [False, True])
def test_mutated_headers_are_refused_or_load_as_they_are(case, saved, tmp_path):
    fuzz_headers(case, tmp_path, saved, 12)


@pytest.mark.parametrize("case", CASES)
def test_mutated_configs_are_refused_or_load_as_they_are(case, tmp_path):
    fuzz_configs(case, tmp_path, 40)


def fuzz_headers(case: str, folder: Path, saved: bool, count: int, seed: int = 0) -> int:
    """Check some mutations of a case's file, or of what `save` makes of it; return how many loaded."""
    hf_tiny.write(case, folder)
    if saved:
        save(load(folder), folder)
    whole = (folder / "model.safetensors").read_bytes()
    return sum(check_header(folder, whole, random.Random(f"{case} {seed} {i}")) for i in range(count))


def fuzz_configs(case: str, folder: Path, count: int, seed: int = 0) -> int:
    """Check some mutations of a case's config.json; return how many loaded."""
    raw = json.loads((hf_tiny.write(case, folder) / "config.json").read_text())
    return sum(check_config(folder, raw, random.Random(f"{case} {seed} {i}")) for i in range(count))


if __name__ == "__main__":
    import resource

    total = int(sys.argv[1])
    for number, name in enumerate(CASES):
        with tempfile.TemporaryDirectory() as scratch:
            each = total // len(CASES)
            loaded = [fuzz_headers(name, Path(scratch), saved, each // 2, number) for saved in (False, True)]
            shutil.rmtree(scratch)
            loaded.append(fuzz_configs(name, Path(scratch), max(20, each // 20), number))
            Path(scratch).mkdir(exist_ok=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(f"{name}: loaded {loaded} of {[each // 2, each // 2, max(20, each // 20)]}, peak {peak} MiB", flush=True)
