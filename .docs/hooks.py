"""Gathers the site: every README as it is, the notebooks, and what these link to, so that each link leads somewhere.

A link to a Python file or to another text leads to a page that shows it; one to a folder without a README, to a page
that lists its modules with the first lines of their docstrings.
"""

import ast
import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")
FOUND: dict[str, str] = {}  # the site's page or file of each path of the tree


def on_files(files, config):
    """Add the READMEs, the notebooks, and what they link to."""
    texts = sorted(path for path in ROOT.glob("[a-z]*/**/README.md") if "build" not in path.parts)
    texts = [
        ROOT / "README.md",
        *texts,
        *(ROOT / ".github").glob("*.md"),
        *(ROOT / "experiments/notebooks").glob("*.py"),
    ]
    waiting = [path.relative_to(ROOT).as_posix() for path in texts]
    while waiting:
        path = waiting.pop()
        if path in FOUND:
            continue
        FOUND[path], content = _page(path)
        files.append(File.generated(config, FOUND[path], content=content))
        if isinstance(content, str):
            folder = path if (ROOT / path).is_dir() else posixpath.dirname(path)
            waiting += [target for link in LINK.findall(content) if (target := _target(folder, link))]
    return files


def on_page_markdown(markdown, page, config, files):
    """Let links lead to the pages of what they name."""
    origin = {site: path for path, site in FOUND.items()}.get(page.file.src_uri)
    if origin is None:
        return markdown
    folder = origin if (ROOT / origin).is_dir() else posixpath.dirname(origin)
    here = posixpath.dirname(page.file.src_uri)

    def lead(match):
        target = _target(folder, match[1])
        return f"]({posixpath.relpath(FOUND[target], here or '.')}" if target else match[0]

    return LINK.sub(lead, markdown)


def _target(folder: str, link: str) -> str | None:
    """Return the path in the tree that a link names: a folder's README where it has one."""
    path = posixpath.normpath(posixpath.join(folder, link))
    if (ROOT / path / "README.md").is_file():
        return f"{path}/README.md"
    return path if (ROOT / path).exists() else None


def _page(path: str) -> tuple[str, str | bytes]:
    """Return where on the site a path of the tree is shown, and as what."""
    there, site = ROOT / path, re.sub(r"^\.github/", "project/", path)
    if there.is_dir():
        return f"{site}/index.md", _listing(path)
    if there.suffix == ".md":
        return site, there.read_text()
    if there.parent.name == "notebooks":
        return f"{os.path.splitext(site)[0]}.md", _notebook(there.read_text())
    if there.suffix in (".py", ".yaml", ".cff"):
        kind = {".py": "python", ".yaml": "yaml", ".cff": "yaml"}[there.suffix]
        return f"{site}.md", f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n~~~~{kind}\n{there.read_text()}\n~~~~\n"
    return site, there.read_bytes()


def _listing(path: str) -> str:
    folder = ROOT / path
    rows = [f"| `{file.name}` | {_first(file)} |" for file in sorted(folder.glob("*.py")) if file.name != "__init__.py"]
    rows += [f"| `{file.parent.name}/` | {_first(file)} |" for file in sorted(folder.glob("*/__init__.py"))]
    head = _first(folder / "__init__.py") if (folder / "__init__.py").exists() else ""
    return "\n".join([f"# {path}", "", head, "", "| module | |", "|---|---|", *rows]) + "\n"


def _first(file: Path) -> str:
    said = ast.get_docstring(ast.parse(file.read_text())) or ""
    if not said and (cell := re.match(r"# %% \[markdown\]\n# # (.*)", file.read_text())):
        said = f"[{cell[1]}]({file.name})"
    return said.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _notebook(text: str) -> str:
    """Return a script of cells as Markdown: text is text, code is code."""
    shown = []
    for cell in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = cell.partition("\n")
        if "[markdown]" in head:
            shown.append("\n".join(line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()))
        else:
            shown.append(f"~~~~python\n{body.strip()}\n~~~~")
    return "\n\n".join(shown) + "\n"
