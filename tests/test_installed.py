"""The project as others have it: installed from a wheel, in a folder of theirs, read by their type checkers."""

import ast
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.experiments.runs import MICRO

ROOT = Path(__file__).parent.parent
TOOLS = Path(sys.executable).parent
needs = lambda name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def python(built, tmp_path_factory):
    """The interpreter of an environment in which the wheel is installed; what it needs is this one's."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    place = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    zipfile.ZipFile(next(built.glob("*.whl"))).extractall(place)
    (place / "needed.pth").write_text("\n".join({sysconfig.get_paths()[name] for name in ("purelib", "platlib")}))
    return python


def files(folder):
    return {
        path.relative_to(ROOT / folder).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@needs("hatchling")
def test_wheel_and_sdist_hold_all_that_is_needed(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as file:
        wheel = set(file.namelist())
    with tarfile.open(next(built.glob("*.tar.gz"))) as file:
        source = {name.partition("/")[2] for name in file.getnames()}
    assert {f"experiments/conf/{name}" for name in files("conf")} <= wheel
    assert {f"{package}/{name}" for package in ("zoo", "transforms", "experiments") for name in files(package)} <= wheel
    assert {"zoo/py.typed", "transforms/py.typed", "experiments/data/examples/chat.jsonl"} <= wheel
    assert not [name for name in wheel if name.startswith(("tests/", "conf/"))]
    folders = ("conf", "tests", "zoo", "transforms", "experiments")
    wanted = {f"{folder}/{name}" for folder in folders for name in files(folder)}
    assert wanted | {"pyproject.toml", "README.md", "LICENSE"} <= source


@needs("hatchling")
def test_what_is_installed_trains_and_generates_in_any_folder(python, tmp_path):
    place = tmp_path / "größe (1), it's"
    place.mkdir()
    (place / "transforms.py").write_text("raise SystemExit('this is the user\\'s own')")
    (place / "losses.py").write_text("def mine(logits, labels):\n    return -logits[..., 0]\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "90"}

    def call(*words):
        code = "import sys; from experiments.command import main; sys.exit(main())"
        command = [python, "-P", "-c", code, *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=place, env=environment, check=False)

    words = [*MICRO, "objective=losses:mine", "run=a=b, c", "save.final=true", "hardware=cpu", "tiling.n=4"]
    done = call("train", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert (place / "runs" / "a=b, c" / "summary.json").exists()
    told = call("generate", "model.weights=runs/a=b, c/weights", "prompt=hi", "max_tokens=3")
    assert told.returncode == 0 and told.stdout.startswith("hi")
    assert call("train", "--help").stdout.splitlines()[2].startswith("  tiling-zoo train ")
    assert "tiling-zoo score GROUP=OPTION --help" in call("score", "-h").stdout
    assert "there is no command `trian`: choose train, " in call("trian").stderr
    commands = call().stdout
    assert all(f"tiling-zoo {word}" in commands for word in ("train", "generate", "score", "convert", "plan"))


TYPED = """
import jax
import zoo
from transforms import TilePlan, tile

Array = jax.Array


def loss(head: zoo.Head, hidden: Array, labels: Array, *, scale: float = 1.0) -> Array:
    return scale * jax.nn.logsumexp(head(hidden), -1).mean()


config = zoo.GemmaConfig(vocab_size=9, num_layers=1, embed_dim=8, mlp_dim=8, num_heads=1, num_kv_heads=1, head_dim=8)
model = zoo.Gemma.init(config, key=jax.random.key(0))
ids = jax.numpy.arange(9)[None]
tiled = tile(loss, axis=(None, 1, 1), n=8)
value: Array = tiled(zoo.head(model), model.hidden(ids), ids, scale=2.0)
plan: TilePlan = tiled.plan(zoo.head(model), model.hidden(ids), ids)
tiled(zoo.head(model), ids)  # wrong: labels are missing
tiled(zoo.head(model), ids, ids, scale="big")  # wrong: a str
text: str = tiled(zoo.head(model), ids, ids)  # wrong: an array
tile(loss, 0, "autoo")  # wrong: neither a number nor "auto"
zoo.GemmaConfig(vocab_size="many")  # wrong: a str
zoo.lode("folder")  # wrong: there is no such name
"""
WRONG = {i for i, line in enumerate(TYPED.splitlines(), 1) if "# wrong" in line}
CHECKERS = {
    "mypy": ["-m", "mypy", "--follow-imports=silent", "--no-incremental", "--python-executable"],
    "basedpyright": ["-m", "basedpyright", "--level", "error", "--pythonpath"],
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_read_what_is_installed(checker, request, tmp_path):
    if importlib.util.find_spec(checker) is None or importlib.util.find_spec("hatchling") is None:
        pytest.skip(f"{checker} or hatchling is not installed")
    python = request.getfixturevalue("python")
    (tmp_path / "typed.py").write_text(TYPED)
    command = [sys.executable, *CHECKERS[checker], str(python), "typed.py"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    found = [line for line in done.stdout.splitlines() if "error:" in line.replace(" - error", ": error:")]
    assert {int(line.split("typed.py:")[1].split(":")[0]) for line in found} == WRONG, done.stdout + done.stderr


def test_type_checkers_and_python_know_the_same_names():
    import zoo

    tree = ast.parse((ROOT / "zoo" / "__init__.py").read_text())
    (known,) = [node for node in tree.body if isinstance(node, ast.If)]
    pairs = {(one.module, alias.asname) for one in known.body if isinstance(one, ast.ImportFrom) for alias in one.names}
    assert pairs == {(home, name) for name, home in zoo._HOME.items()}
