"""What a Hugging Face folder holds, read from headers alone, and every way in which that can be wrong. Free of JAX."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from zoo.config import Config, rows
from zoo.families.gemma import Gemma3Config
from zoo.families.llama import LlamaLike

INDEX = "model.safetensors.index.json"
DIGESTS = "sha256"  # in a file's metadata: the digest of each of its tensors, as JSON
DTYPES = ("F32", "BF16", "F16", "F64")
_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"  # some tools write a tied head a second time
_CHUNK = 2**26  # elements of one tensor on the host at a time
# A multimodal Gemma 3 holds its text part under one of these, and the rest under the others.
_TEXT = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
_OTHER = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class DamagedError(ValueError):
    """A file is not what it was when it was saved."""


@dataclass(frozen=True)
class Tensor:
    """A tensor on disk, of which only the header has been read.

    Attributes:
        file: where it is.
        name: what it is called there.
        shape: its dimensions.
        dtype: its type, as safetensors calls it.
        digest: SHA-256 of its bytes, where the file tells.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str | None

    def pieces(self, whole: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        """Yield `(first row, rows)` in order. The file is reopened for each, so that pages already read are let go.

        Raises:
            DamagedError: the bytes are not those that the file's own digest was made of.
        """
        count, digest = self.shape[0], hashlib.sha256()
        step = count if whole else max(1, _CHUNK // math.prod(self.shape[1:]))
        for start in range(0, count, step):
            with safe_open(self.file, "np") as opened:
                piece = opened.get_slice(self.name)[start : min(start + step, count)]
            if self.digest is not None:
                digest.update(as_bytes(piece))
            yield start, piece
        if self.digest is not None and digest.hexdigest() != self.digest:
            raise DamagedError(f"{self.file.name}: `{self.name}` is not what was saved: its SHA-256 differs")

    def part(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return some of the tensor, and read no more than that; it cannot be checked."""
        with safe_open(self.file, "np") as opened:
            return opened.get_slice(self.name)[index]


def as_bytes(array: np.ndarray) -> memoryview:
    """Return an array's bytes in order, without a copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def refusal(folder: Path, why: str) -> ValueError:
    """Return the error for a folder that cannot be loaded."""
    return ValueError(f"cannot load weights from `{folder}`: {why}")


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from the folder, or say what is wrong with the folder."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise refusal(folder, f"it {what}. Pass a folder that holds config.json.")
    if not (folder / name).is_file():
        held = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
        raise refusal(folder, f"it has no {name}. It holds: {held}.")
    try:
        raw = json.loads((folder / name).read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise refusal(folder, f"{name} is not valid JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise refusal(folder, f"{name} must hold a JSON object.")
    return raw


def read_headers(folder: Path) -> dict[str, Tensor]:
    """Read what every safetensors file of the folder holds, without reading the tensors.

    Raises:
        ValueError: there are none, they are damaged, or they are not what the index says: all of it in one message.
    """
    files, placed = sorted(folder.glob("*.safetensors")), None
    if (folder / INDEX).is_file():
        placed = _read_index(folder)
        files = [folder / name for name in sorted(set(placed.values()))]
    if not files:
        pickled = [file.name for suffix in ("*.bin", "*.pt", "*.pth") for file in sorted(folder.glob(suffix))]
        why = f"; {', '.join(pickled)} may be pickles, which are never opened. Convert them" if pickled else ""
        raise refusal(folder, f"it has no .safetensors files{why}.")
    tensors, problems = {}, []
    for file in files:
        try:
            for tensor in _read_header(file):
                if tensor.name in tensors:
                    problems.append(f"{file.name}: `{tensor.name}` is also in {tensors[tensor.name].file.name}")
                tensors[tensor.name] = tensor
        except (SafetensorError, OSError, ValueError, OverflowError) as error:
            problems.append(f"{file.name}: {error}")
    if placed is not None and not problems:
        for name in sorted(placed.keys() | tensors.keys()):
            held = tensors[name].file.name if name in tensors else "no file"
            if held != placed.get(name, "no file"):
                problems.append(f"{INDEX}: `{name}` is in {held}, and the index says {placed.get(name, 'nothing')}")
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise refusal(folder, f"files are damaged; copy them again.\n{lines}")
    return tensors


def _read_index(folder: Path) -> dict[str, str]:
    """Return which file each tensor is in; only files of the folder itself are read."""
    placed = read_json(folder, INDEX).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise refusal(folder, f"{INDEX} has no weight_map.")
    for file in placed.values():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors") or "\0" in file:
            raise refusal(folder, f"{INDEX} names {file!r}, which is no .safetensors file of the folder.")
    return placed


def _read_header(file: Path) -> list[Tensor]:
    with safe_open(file, "np") as opened:
        digests = json.loads((opened.metadata() or {}).get(DIGESTS, "null"))
        names = list(opened.keys())
        if digests is not None and (not isinstance(digests, dict) or sorted(digests) != sorted(names)):
            raise ValueError(f"its {DIGESTS} are not those of its tensors")
        views = [opened.get_slice(name) for name in names]
        return [
            Tensor(file, name, tuple(view.get_shape()), view.get_dtype(), None if digests is None else digests[name])
            for name, view in zip(names, views, strict=True)
        ]


def text_part(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a multimodal Gemma 3's text part, under the names that they have without the rest."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in _TEXT if name.startswith(prefix)), "")
        new = _TEXT.get(prefix, "") + name.removeprefix(prefix)
        if not name.startswith(_OTHER):
            renamed[name if new in renamed else new] = tensor
    return renamed


def as_stored(config: Config, tensors: dict[str, Tensor]) -> tuple[Config, dict[str, Tensor]]:
    """Return a config and the tensors of a folder by their usual names, as transformers reads the folder.

    A multimodal folder is read for its text; names of a bare model, without a head, get the `model.` that a whole one
    has. Where the config ties the head to the embedding, one of the two is enough, and two that differ untie it.
    """
    tensors = text_part(tensors) if isinstance(config, Gemma3Config) else tensors
    bare = _EMBED.removeprefix("model.")
    if bare in tensors and not any(name.startswith("model.") for name in tensors):
        tensors = {name if name == _HEAD else f"model.{name}": tensor for name, tensor in tensors.items()}
    if _HEAD in tensors and not any(row.tensor == _HEAD for row in rows(config)):
        if _EMBED not in tensors:
            tensors = {_EMBED if name == _HEAD else name: tensor for name, tensor in tensors.items()}
        elif isinstance(config, LlamaLike) and not _same(tensors[_HEAD], tensors[_EMBED]):
            config = dataclasses.replace(config, tied=False)
    return config, tensors


def expected(folder: Path, config: Config, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that the config needs, by name, having compared them with what is on disk.

    Raises:
        ValueError: listing every tensor that is missing, unexpected, misshapen or of an unsupported type.
    """
    table, dims = rows(config), config.dims
    needed = sum(math.prod(row.shape(dims)[: len(row.stack)]) for row in table)
    if needed > len(tensors) + 10_000:  # listing them could take more memory than the files
        raise refusal(folder, f"its config.json describes {needed} tensors, and its files hold {len(tensors)}.")
    shapes = {name: row.disk_shape(dims) for row in table for name, _ in row.places(dims)}
    problems = [f"missing: {name} {list(shape)}" for name, shape in shapes.items() if name not in tensors]
    for name, tensor in tensors.items():
        if name in shapes or name.endswith("rotary_emb.inv_freq"):
            continue
        if name == _HEAD and _EMBED in tensors:
            if not _same(tensor, tensors[_EMBED]):
                problems.append(f"unexpected: {name} {list(tensor.shape)} is not the embedding, to which it is tied")
        else:
            problems.append(f"unexpected: {name} {list(tensor.shape)}")
    for name in sorted(shapes.keys() & tensors.keys()):
        if tensors[name].shape != shapes[name]:
            problems.append(f"wrong shape: {name} is {list(tensors[name].shape)}, must be {list(shapes[name])}")
        if tensors[name].dtype not in DTYPES:
            problems.append(f"wrong type: {name} is {tensors[name].dtype}, must be {' or '.join(DTYPES)}")
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"the tensors in `{folder}` are not those that its config.json needs:\n{lines}")
    return {name: tensors[name] for name in shapes}


def _same(head: Tensor, embed: Tensor) -> bool:
    if head.shape != embed.shape or head.dtype != embed.dtype or len(head.shape) != 2 or not math.prod(head.shape):
        return False
    if head.dtype not in DTYPES:
        return False
    pairs = zip(head.pieces(), embed.pieces(), strict=True)
    return all(np.array_equal(one, other) for (_, one), (_, other) in pairs)
