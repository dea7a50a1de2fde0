"""What a Hugging Face folder holds, read from headers alone, and every way in which that can be wrong. Free of JAX."""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from zoo.config import Config, rows
from zoo.huggingface.tensors import DTYPES, Slice, Tensor, Turned

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DIGESTS = "sha256"  # in a file's metadata: the digest of each of its tensors, as JSON
_SAMPLE = 64  # bytes of a tensor that tell it from another
_HEADS = ("lm_head.weight", "embed_out.weight")  # some tools write a tied head a second time
# A multimodal folder holds its text part under one of these, and the rest under the others.
_TEXT = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
_OTHER = (
    *("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    *("visual.", "model.visual.", "mm_projector.", "vision_model."),
)
_TOGETHER = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # of all experts of a layer
_WIDTHS = {"gate_up_proj": 2, "down_proj": 1}  # which of their dimensions is the model's width
_Held = TypeVar("_Held")


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


def said(raw: Mapping[str, Any], *keys: str) -> Any:
    """Return the first of some keys that a `config.json` holds: of the whole model, or else in its text part."""
    inner = raw.get("text_config")
    parts = (raw, inner if isinstance(inner, dict) else {})
    return next((part[key] for part in parts for key in keys if part.get(key) is not None), None)


def read_headers(folder: Path) -> dict[str, Tensor]:
    """Read what the model's safetensors files hold, without reading the tensors.

    These are `model.safetensors`, else those of the index, else all there are.

    Raises:
        ValueError: there are none, they are damaged, or they are not what the index says: all of it in one message.
    """
    files, placed = sorted(folder.glob("*.safetensors")), None
    if (folder / INDEX).is_file():
        placed = _read_index(folder)
        files = [folder / name for name in sorted(set(placed.values()))]
    if (whole := folder / WHOLE).is_file() and (placed is None or WHOLE not in placed.values()):
        files, placed = [whole], None  # which transformers reads, whatever lies beside it
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


def fingerprint(folder: Path) -> str:
    """Return a hash of what tells a folder's weights from others: what tensors there are, and the digests that files
    keep of them, or else some bytes from the middle of each.

    Raises:
        ValueError: as `read_headers` does.
        OSError: a file cannot be read.
    """
    found = hashlib.sha256()
    for name, tensor in sorted(read_headers(folder).items()):
        found.update(f"{name} {tensor.shape} {tensor.dtype} {tensor.digest}".encode())
        if tensor.digest is None and tensor.nbytes:
            with tensor.file.open("rb") as file:
                file.seek(tensor.start + max(0, tensor.nbytes - _SAMPLE) // 2)
                found.update(file.read(min(_SAMPLE, tensor.nbytes)))
    return found.hexdigest()


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
        views = {name: opened.get_slice(name) for name in names}
    with file.open("rb") as read:  # what the package has checked, for where tensors begin, which it does not tell
        length = int.from_bytes(read.read(8), "little")
        header = json.loads(read.read(length))
    start_of = lambda name: 8 + length + header[name]["data_offsets"][0]
    digest_of = lambda name: None if digests is None else digests[name]
    return [
        Tensor(file, name, tuple(view.get_shape()), view.get_dtype(), digest_of(name), start_of(name))
        for name, view in views.items()
    ]


def text_part(config: Config, tensors: dict[str, _Held]) -> dict[str, _Held]:
    """Return what a folder holds of its text, under the names that this has where there is nothing else."""
    if not any(dialect.outer for dialect in config.dialects.values()):
        return tensors
    renamed: dict[str, _Held] = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in _TEXT if name.startswith(prefix)), "")
        new = _TEXT.get(prefix, "") + name.removeprefix(prefix)
        if not name.startswith(_OTHER):
            renamed[name if new in renamed else new] = tensor
    return renamed


def experts_apart(tensors: dict[str, Tensor], width: int) -> dict[str, Tensor]:
    """Return tensors of which those that hold all experts' matrices of a layer are one for each expert and matrix.

    Those of Qwen 3 VL lie as inputs by outputs, which the model's width tells: of one of a layer's two at least.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, matrix = name.rpartition(".mlp.experts.")
        stem, parts = f"{layer}.mlp.experts", _TOGETHER.get(matrix, ())
        turned = bool(parts) and _turned(stem, tensors, width)
        if not parts or len(tensor.shape) != 3 or tensor.shape[1 + turned] % len(parts):
            found[name] = tensor
            continue
        count, rows, columns = tensor.shape
        outputs = tensor.shape[1 + turned] // len(parts)
        for expert, (i, part) in itertools.product(range(count), enumerate(parts)):
            if turned:
                whole = Slice.of(tensor, expert * rows * columns, (rows, columns))
                own: Tensor = Turned.of(whole, slice(i * outputs, (i + 1) * outputs))
            else:
                own = Slice.of(tensor, (expert * rows + i * outputs) * columns, (outputs, columns))
            found[f"{stem}.{expert}.{part}.weight"] = own
    return found


def _turned(stem: str, tensors: dict[str, Tensor], width: int) -> bool:
    """Return whether a layer's experts lie as inputs by outputs: where the width is not, it would be otherwise."""
    shapes = {at: tensors[f"{stem}.{name}"].shape for name, at in _WIDTHS.items() if f"{stem}.{name}" in tensors}
    return any(len(shape) == 3 and shape[at] != width for at, shape in shapes.items())


def as_stored(config: Config, tensors: dict[str, Tensor]) -> tuple[Config, dict[str, Tensor]]:
    """Return a config and the tensors of a folder by their usual names, as transformers reads the folder.

    A multimodal folder is read for its text, and experts that are together one by one; names of a bare model, without
    a head, get the `model.` that a whole one has. Where the config ties the head to the embedding, one of the two is
    enough, and two that differ untie it.
    """
    tensors = text_part(config, tensors)
    if any(".mlp.experts.{}." in row.tensor for row in rows(config)):
        tensors = experts_apart(tensors, config.embed_dim)
    prefix, embed = config.prefix, _embed(config)
    bare = embed.removeprefix(prefix)
    if bare in tensors and not any(name.startswith(prefix) for name in tensors):
        tensors = {name if name in _HEADS else f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    head = next((name for name in _HEADS if name in tensors), None)
    own = next((row.tensor for row in rows(config) if row.leaf == "head"), None)
    if head is not None and own is not None:
        tensors = {own if name == head else name: tensor for name, tensor in tensors.items()}
    elif head is not None:
        if embed not in tensors:
            tensors = {embed if name == head else name: tensor for name, tensor in tensors.items()}
        elif hasattr(config, "tied") and not _same(tensors[head], tensors[embed]):
            config = dataclasses.replace(config, tied=False)
    return config, tensors


def _embed(config: Config) -> str:
    """Return the name of the embedding's tensor."""
    return next(row.tensor for row in rows(config) if row.leaf == "embed")


def expected(folder: Path, config: Config, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that the config needs, by name, having compared them with what is on disk.

    Raises:
        ValueError: listing every tensor that is missing, unexpected, misshapen or of an unsupported type.
    """
    table, dims, embed = rows(config), config.dims, _embed(config)
    needed = sum(math.prod(row.shape(dims)[: len(row.stack)]) for row in table)
    if needed > len(tensors) + 10_000:  # listing them could take more memory than the files
        raise refusal(folder, f"its config.json describes {needed} tensors, and its files hold {len(tensors)}.")
    shapes = {name: row.disk_shape(dims) for row in table for name, _ in row.tensors(dims)}
    problems = [f"missing: {name} {list(shape)}" for name, shape in shapes.items() if name not in tensors]
    for name, tensor in tensors.items():
        if name in shapes or name.endswith(config.unread) or name.startswith(config.beside):
            continue
        if name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" in shapes and _zeros(tensor):
            continue  # which some tools write for matrices that have none
        if name in _HEADS and embed in tensors:
            if not _same(tensor, tensors[embed]):
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


def _zeros(tensor: Tensor) -> bool:
    return tensor.dtype in DTYPES and not tensor.array().any()


def _same(head: Tensor, embed: Tensor) -> bool:
    if head.shape != embed.shape or head.dtype != embed.dtype or len(head.shape) != 2 or not math.prod(head.shape):
        return False
    if head.dtype not in DTYPES:
        return False
    pairs = zip(head.pieces(), embed.pieces(), strict=True)
    return all(np.array_equal(one, other) for (_, one), (_, other) in pairs)
