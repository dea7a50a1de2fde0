"""Runs, data and weights that are elsewhere: in a store without renames, and on a hub that answers by HTTP."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import jax
import pytest

import zoo
from experiments import configs
from experiments.commandline import overrides, schema
from experiments.commandline.console import CommandError
from experiments.results import directory
from experiments.runtime import hardware, remote
from tests.experiments.runs import FILES
from tests.experiments.runs import rows as rows_of

MEASURED = ("step", "loss", "grad_norm", "learning_rate")


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """An empty store in memory, and an empty cache of what is brought here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    yield memory
    memory.store.clear()


@pytest.fixture
def there(start):
    """Carry out a run whose results go to the store; return the exit status."""

    how = "checkpoint.every=2", "optimizer.schedule=constant", "out=memory://bucket/runs"
    return lambda *words, run="r": start(f"run={run}", *how, *words)


def forget(tmp_path):
    """Be another machine: nothing that was brought or written here is here."""
    cache = tmp_path / "cache"
    return cache.rename(tmp_path / f"cache-{len(os.listdir(tmp_path))}")


def test_a_run_goes_on_from_the_store_to_the_same_bytes(there, start, store, tmp_path, capsys):
    assert start("run=whole", "steps=6", "checkpoint.every=2", "optimizer.schedule=constant") == 0
    assert there("steps=4") == 0
    assert "copied to memory://bucket/runs/r" in capsys.readouterr().out
    names = {name.removeprefix("/bucket/runs/r/") for name in store.find("/bucket/runs/r")}
    assert {name for name in names if "/" not in name} == set(FILES)
    assert {name.split("/")[1] for name in names if "/" in name} == {"2", "4"}
    forget(tmp_path)
    assert there("steps=6") == 0
    assert "goes on after step 4 of 6" in capsys.readouterr().out
    assert sorted(name.rsplit("/", 1)[1] for name in store.ls("/bucket/runs/r/checkpoints", detail=False)) == ["4", "6"]
    there_rows = [json.loads(line) for line in store.cat_file("/bucket/runs/r/metrics.jsonl").decode().splitlines()]
    here_rows = rows_of(tmp_path / "whole")
    pick = lambda rows: [{key: row[key] for key in MEASURED} for row in rows]
    assert pick(there_rows) == pick(here_rows)
    state = tmp_path / "whole" / "checkpoints" / "6" / "state"
    arrays = [file for file in state.rglob("*") if file.is_file() and file.name[0].isdigit()]
    assert len(arrays) > 8
    for file in arrays:
        assert store.cat_file(f"/bucket/runs/r/checkpoints/6/state/{file.relative_to(state)}") == file.read_bytes()


def test_a_checkpoint_that_was_cut_short_on_its_way_is_not_there(there, store, tmp_path, capsys):
    assert there("steps=4") == 0
    store.rm_file("/bucket/runs/r/checkpoints/4/manifest.json")  # which goes last
    forget(tmp_path)
    assert there("steps=4") == 0
    assert "goes on after step 2 of 4" in capsys.readouterr().out
    assert store.exists("/bucket/runs/r/checkpoints/4/manifest.json")


def test_a_checkpoint_goes_with_its_manifest_last(tmp_path, store, monkeypatch):
    mirror = remote.Mirror("memory://bucket", "r")
    folder = mirror.folder / "checkpoints" / "3"
    (folder / "state").mkdir(parents=True)
    for name in ("manifest.json", "run.json", "state/zz"):
        (folder / name).write_text(name)
    (mirror.folder / ".hidden").write_text("")
    sent = []
    real = type(store).put_file
    monkeypatch.setattr(
        type(store), "put_file", lambda self, here, there: (sent.append(there), real(self, here, there))
    )
    mirror.push()
    assert [path.removeprefix("/bucket/r/checkpoints/3/") for path in sent][-1] == "manifest.json" and len(sent) == 3
    mirror.push()
    assert len(sent) == 3  # what is there is not sent again
    (folder / "manifest.json").write_text("of another try")
    mirror.push()
    assert len(sent) == 6 and store.cat_file("/bucket/r/checkpoints/3/manifest.json") == b"of another try"


def test_a_store_that_takes_nothing_does_not_end_the_training_but_the_run(there, store, monkeypatch, capsys):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "bucket")

    monkeypatch.setattr(type(store), "put_file", refuse)
    assert there("steps=4") == 1
    captured = capsys.readouterr()
    message = "cannot write the run to memory://bucket/runs/r: Permission denied (bucket). It is whole in "
    assert f"warning: {message}" in captured.err and f"\nerror: {message}" in captured.err
    assert "held-out text before: " in captured.out


def test_data_is_read_again_only_where_it_changed(store, tmp_path):
    store.pipe_file("/bucket/text/a.txt", b"one")
    store.pipe_file("/bucket/text/more/b.txt", b"two")
    read = lambda path: remote.fetched(schema.compose(["data=text", f"data.path={path}"])[0])[0].data.path
    folder = read("memory://bucket/text")
    assert Path(folder, "more", "b.txt").read_text() == "two" and read("memory://bucket/text") == folder
    assert Path(read("memory://bucket/text/a.txt")).read_text() == "one"
    assert os.path.basename(read("memory://bucket/text/*.txt")) == "*.txt"
    store.pipe_file("/bucket/text/a.txt", b"three")
    assert read("memory://bucket/text") != folder
    assert Path(read("memory://bucket/text/a.txt")).read_text() == "three"


def test_weights_are_read_from_the_store(start, store, tmp_path, capsys):
    assert start("run=made", "save.final=true", "steps=1") == 0
    weights = tmp_path / "made" / "weights"
    store.put(str(weights), "/bucket/weights", recursive=True)
    assert start("run=on", "model.weights=memory://bucket/weights", "steps=1") == 0
    assert "weights read from" in capsys.readouterr().out


WRONG = {
    "data.path=memory://bucket/nothing": "cannot read data.path=memory://bucket/nothing: there is nothing",
    "data.path=nowhere://bucket/x": "cannot use data.path=nowhere://bucket/x: Protocol not known: nowhere",
    "data.cache=memory://bucket": "cannot write to data.cache=memory://bucket: give a folder on this machine",
}


@pytest.mark.parametrize("word", WRONG)
def test_what_cannot_be_read_or_written_is_said(start, word, capsys):
    assert start("data=text", "data.path=x", word) == 2
    assert WRONG[word] in capsys.readouterr().err


def test_a_run_elsewhere_has_a_name_and_one_process(start, store, monkeypatch, capsys):
    assert start("out=memory://bucket/runs") == 2
    assert "cannot number a run in out=memory://bucket/runs" in capsys.readouterr().err
    monkeypatch.setattr(hardware, "several_processes", lambda: True)
    assert start("out=memory://bucket/runs", "run=r") == 2
    assert "each of several processes would have a part of it: give out= a folder that all" in capsys.readouterr().err


def test_what_is_not_installed_is_named(monkeypatch):
    for module, word, extra in (
        ("fsspec.core", "data.path=gs://b/x", "remote"),
        ("huggingface_hub", "model.weights=hf://a/b", "hf"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(CommandError, match=rf"needs .*: pip install .*\[{extra}\]"):
            remote.fetched(schema.compose(["data=text", "data.path=x", word])[0])


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """What the Hugging Face hub answers about one model, `lab/tiny`, whose files are those of a folder."""

    folder = None
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self):
        self.do_HEAD(True)

    def do_HEAD(self, body=False):
        type(self).asked.append(self.path)
        head, content = {"X-Repo-Commit": COMMIT}, b"{}"
        name = self.path.partition("/resolve/")[2].partition("/")[2]
        there = [file for file in sorted(Path(self.folder).rglob("*")) if file.is_file()]
        sizes = {file.relative_to(self.folder).as_posix(): file.stat().st_size for file in there}
        if self.path.startswith("/api/models/lab/tiny"):
            files = [{"rfilename": file} for file in sizes]
            content = json.dumps({"id": "lab/tiny", "sha": COMMIT, "siblings": files, "tags": []}).encode()
            if "/tree/" in self.path:
                oid = hashlib.sha1(b"").hexdigest()
                listed = [{"type": "file", "path": file, "size": n, "oid": oid} for file, n in sizes.items()]
                content = json.dumps(listed).encode()
            status = 200
        elif self.path.startswith("/lab/tiny/resolve/") and name in sizes:
            content = Path(self.folder, name).read_bytes()
            head["ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
            status = 200
        else:
            head["X-Error-Code"], status = "RepoNotFound", 404
        self.send_response(status)
        for key, value in {**head, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


FETCH = """
import sys
from experiments.commandline import schema
from experiments.commandline.console import CommandError
from experiments.runtime import remote
try:
    config, exact = remote.fetched(schema.compose(sys.argv[1:])[0])
    print(config.model.weights, exact["model.weights"].value)
except CommandError as error:
    print(error)
"""


def test_weights_by_their_name_on_the_hub(tmp_path):
    config = zoo.GemmaConfig(
        vocab_size=64, num_layers=1, embed_dim=16, mlp_dim=16, num_heads=1, num_kv_heads=1, head_dim=16
    )
    model = zoo.Gemma.init(config, key=jax.random.key(0))
    zoo.save(model, tmp_path / "there")
    for name in ("additional_chat_templates/tool_use.jinja", "original/params.json"):
        (tmp_path / "there" / name).parent.mkdir()
        (tmp_path / "there" / name).write_text("{}")
    Hub.folder = tmp_path / "there"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def fetch(word, endpoint=f"http://127.0.0.1:{server.server_port}"):
        names = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1"}
        environment = {**os.environ, **names, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        command = [sys.executable, "-c", FETCH, word]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=schema.CONF.parent, check=True
        )

    try:
        path, exact = fetch("model.weights=hf://lab/tiny").stdout.split()
        assert exact == f"hf://lab/tiny@{COMMIT}"
        found = zoo.load(path)
        assert (found.embed == model.embed).all()
        inner = [file.relative_to(path).as_posix() for file in Path(path).rglob("*/*") if file.is_file()]
        assert inner == ["additional_chat_templates/tool_use.jinja"]
        assert (
            "cannot fetch model.weights=hf://lab/other from the hub: " in fetch("model.weights=hf://lab/other").stdout
        )
    finally:
        server.shutdown()
        server.server_close()
    gone = fetch("model.weights=hf://lab/unseen").stdout  # nobody answers
    assert "`hf download lab/unseen --local-dir FOLDER`" in gone and "give model.weights=FOLDER" in gone
    assert fetch(f"model.weights=hf://lab/tiny@{COMMIT}").stdout.split() == [path, exact]  # it is here already


def test_the_revision_goes_into_the_run_s_record():
    words = directory.pinned(
        ["model.weights=hf://lab/tiny"], {"model.weights": configs.Choice("hf://lab/tiny@0123", "")}
    )
    config, _ = schema.compose(words)
    assert config.model.weights == "hf://lab/tiny@0123"
    assert overrides.with_overrides(words, ["model.weights=hf://lab/tiny"]) == ["model.weights=hf://lab/tiny"]
