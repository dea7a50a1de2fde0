"""The size and SHA-256 of every file of a directory, in a file of that directory: what changed since is found."""

import hashlib
import json
import os
import re
from pathlib import Path

FILE = "manifest.json"


def write(folder: Path, hashes: bool = True) -> None:
    """List every file below a folder in its manifest, and see to it that all of it is on the disk.

    Args:
        folder: the folder.
        hashes: read each file again for its SHA-256; otherwise its size is all that is written down.
    """
    files = {str(path.relative_to(folder)): _entry(path, hashes) for path in _files(folder)}
    text = json.dumps(files, indent=1, sort_keys=True)
    path = folder / FILE
    path.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "files": files}, indent=1))
    for each in (*(folder / name for name in files), path, *(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync(each)


def damage(folder: Path, hashes: bool = True) -> str | None:
    """Return what is wrong with the files below a folder, in words; None if each is as it was written.

    Args:
        folder: the folder.
        hashes: read each file whose hash is known; otherwise only their sizes are looked at.
    """
    try:
        listed = json.loads((folder / FILE).read_text())
        files = listed["files"]
        text = json.dumps(files, indent=1, sort_keys=True)
        if listed["sha256"] != hashlib.sha256(text.encode()).hexdigest():
            return f"{FILE} has been changed"
    except FileNotFoundError:
        return f"{FILE} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{FILE} cannot be read ({reason(error)})"
    for name, wanted in files.items():
        path = folder / name
        try:
            if path.stat().st_size != wanted["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {wanted['bytes']}"
            if hashes and "sha256" in wanted and _entry(path, hashes) != wanted:
                return f"{name} has been changed"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({reason(error)})"
    return None


def intact(folder: Path, name: str) -> bool:
    """Return whether one file of a folder is there as it was written."""
    try:
        wanted = json.loads((folder / FILE).read_text())["files"][name]
        return _entry(folder / name, "sha256" in wanted) == wanted
    except (OSError, ValueError, KeyError, TypeError):
        return False


def sync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def reason(error: BaseException) -> str:
    """Return the first line of what an error says; the system's own words where it is the system's error."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f" ({error.filename})" if error.filename else "")
    if said := re.search(r"([^:\]]+) \[os_error_code", str(error)):  # TensorStore's, which tells each layer's view
        return said[1].strip()
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / FILE)


def _entry(path: Path, hashes: bool) -> dict[str, object]:
    known: dict[str, object] = {"bytes": path.stat().st_size}
    if hashes:
        with path.open("rb") as file:
            known["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
    return known


def user_cache() -> Path:
    """Return this project's folder in the user's cache directory (`XDG_CACHE_HOME` is respected)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiling-zoo"
