"""Checkpoints: every byte back, onto any number of devices; each kind of damage found; nothing lost when one fails."""

import contextlib
import json
import os
import shutil
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.commandline import schema
from experiments.runtime import manifest
from experiments.training import checkpoints
from experiments.training.checkpoints import CheckpointError, Checkpoints


class Part(eqx.Module):
    w: jax.Array
    name: str = eqx.field(static=True)


def state(value=1.0):
    w = jnp.arange(64.0).reshape(8, 8) * value
    key = jax.random.key(int(value))
    return {"part": Part(w, "x"), "moments": [jnp.full(3, value, jnp.bfloat16), None], "key": key, "n": jnp.int32(7)}


def same(a, b):
    numbers = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    equal = lambda x, y: x.dtype == y.dtype and np.array_equal(numbers(x), numbers(y))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert jax.tree.all(jax.tree.map(equal, a, b))


@pytest.fixture
def opened(tmp_path):
    with contextlib.ExitStack() as made:

        def make(**how):
            warnings = []
            store = Checkpoints(tmp_path / "checkpoints", {"overrides": []}, warn=warnings.append, **how)
            return made.enter_context(store), warnings

        yield make


@pytest.mark.parametrize("background", [True, False])
def test_what_is_saved_comes_back_to_the_byte(opened, background):
    store, warnings = opened(background=background)
    assert store.restore(state()) is None
    store.save(3, state(2.0))
    store.wait()
    step, found = store.restore(jax.eval_shape(state))
    assert (step, warnings) == (3, [])
    same(found, state(2.0))


def test_arrays_may_be_overwritten_at_once(opened):
    """Training goes on, and donates what is being written."""
    store, _ = opened()
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)
    tree = step({"a": jnp.ones((512, 512))})
    want = jax.tree.map(np.array, tree)
    store.save(1, tree)
    for _ in range(5):
        tree = step(tree)
    jax.block_until_ready(tree)
    store.wait()
    same(jax.tree.map(np.array, store.restore(tree)[1]), want)


@pytest.mark.parametrize("devices", [8, 4, 1])
def test_another_number_of_devices_reads_it(opened, devices):
    spread = lambda n: NamedSharding(jax.make_mesh((n,), ("data",), devices=jax.devices()[:n]), PartitionSpec("data"))
    store, _ = opened()
    store.save(1, {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), spread(8))})
    store.wait()
    wanted = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=spread(devices))
    found = store.restore({"w": wanted})[1]["w"]
    assert found.sharding == wanted.sharding
    assert np.array_equal(found, np.arange(64.0).reshape(8, 8))


def test_the_newest_and_those_of_every_so_many_steps_stay(opened):
    store, _ = opened(keep=2, keep_every=20)
    for step in range(10, 70, 10):
        store.save(step, {"w": jnp.ones(2)})
    store.wait()
    assert store.steps() == [20, 40, 50, 60]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {"flipped": flip, "truncated": lambda path: os.truncate(path, path.stat().st_size - 1), "missing": os.remove}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_is_found(opened, tmp_path, damage):
    store, _ = opened()
    store.save(1, state())
    store.wait()
    whole = tmp_path / "checkpoints" / "1"
    assert manifest.damage(whole) is None
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) > 8
    for file in files:
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        DAMAGE[damage](copy / file)
        assert file.name in manifest.damage(copy), file
        shutil.rmtree(copy)


def test_without_hashes_sizes_tell(opened, tmp_path):
    store, warnings = opened(verify=False, keep=3)
    for step in (1, 2):
        store.save(step, state(float(step)))
    store.wait()
    assert "sha256" not in next(
        iter(json.loads((tmp_path / "checkpoints/2/manifest.json").read_text())["files"].values())
    )
    file = tmp_path / "checkpoints" / "2" / "state" / "part.w" / "0.0"
    flip(file)
    assert (store.restore(state())[0], warnings) == (2, [])  # nobody looked
    checking, _ = opened()
    assert checking.restore(state())[0] == 2  # there is no hash to compare it with
    os.truncate(file, file.stat().st_size - 1)
    assert store.restore(state())[0] == 1
    assert "the checkpoint of step 2 is damaged: state/part.w/0.0 has 255 bytes instead of 256" in warnings[0]


def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(opened, tmp_path):
    store, warnings = opened(keep=3)
    for step in (1, 2, 3):
        store.save(step, state(float(step)))
    store.wait()
    folder = tmp_path / "checkpoints"
    flip(folder / "3" / "state" / "part.w" / "0.0")
    (folder / "2" / "manifest.json").unlink()
    step, found = store.restore(state())
    assert step == 1
    same(found, state(1.0))
    assert "the checkpoint of step 3 is damaged: state/part.w/0.0 has been changed" in warnings[0]
    assert "step 2 is damaged: manifest.json is missing" in warnings[1]
    assert store.steps() == [1]
    flip(folder / "1" / "run.json")
    for _ in range(2):  # as a queue that starts a job again does
        with pytest.raises(
            CheckpointError, match=r"every checkpoint in .* is damaged: .*that of step 1 \(run.json has"
        ):
            store.restore(state())
    shutil.rmtree(folder)
    assert store.restore(state()) is None


def test_what_was_cut_short_is_not_there(opened, tmp_path):
    store, warnings = opened()
    store.save(1, state())
    store.wait()
    shutil.copytree(tmp_path / "checkpoints" / "1", tmp_path / "checkpoints" / ".saving-2")
    assert store.restore(state())[0] == 1
    assert warnings == []
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1"]


def test_other_arrays_are_all_named(opened):
    store, _ = opened()
    store.save(1, state())
    store.wait()
    wanted = {**state(), "moments": [jnp.ones(4)], "more": jnp.ones(2)}
    message = r"more is not there; moments.0 is bfloat16\[3\] there, float32\[4\] here"
    with pytest.raises(CheckpointError, match=message):
        store.restore(wanted)


FULL = """
import resource, sys, jax.numpy as jnp
from pathlib import Path
from experiments.training import checkpoints
from experiments.training.checkpoints import CheckpointError, Checkpoints
store = Checkpoints(Path(sys.argv[1]), {})
store.save(1, {"w": jnp.ones(1000)})
store.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    store.save(2, {"w": jnp.ones(100_000)})
    store.wait()
except CheckpointError as error:
    print(error)
print(store.restore({"w": jnp.ones(1000)})[0])
"""


def test_a_disk_that_takes_no_more_loses_nothing(tmp_path):
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=schema.CONF.parent, check=False)
    assert done.returncode == 0, done.stderr
    message, step = done.stdout.splitlines()
    assert message.startswith(f"cannot save the checkpoint of step 2 in {tmp_path}: ")
    assert "File too large" in message
    assert "The one of step 1 is whole" in message
    assert step == "1"
    assert os.listdir(tmp_path) == ["1"]


def test_what_a_run_goes_on_from_is_told_by_records_that_are_whole(tmp_path):
    """A damaged record is `restore`'s to find: it says nothing of a run's arrays or steps."""
    template = {"w": np.zeros(3, np.float32)}
    for step in (10, 20):
        folder = tmp_path / checkpoints.FOLDER / str(step)
        folder.mkdir(parents=True)
        (folder / checkpoints.RUN).write_text(json.dumps({"arrays": checkpoints.describe(template)}))
        manifest.write(folder)
    checkpoints.check_begun(None, template, 5)
    checkpoints.check_begun(tmp_path, template, 20)
    with pytest.raises(checkpoints.CheckpointError, match="has done 20 steps, and steps=15 asks for fewer"):
        checkpoints.check_begun(tmp_path, template, 15)
    for damaged in ("5", '{"arrays": null}', '{"arrays": {"w": "float32[4]"}}', ""):
        (tmp_path / checkpoints.FOLDER / "20" / checkpoints.RUN).write_text(damaged)
        checkpoints.check_begun(tmp_path, template, 15)
    with pytest.raises(checkpoints.CheckpointError, match="/10 has other arrays than this run: w is"):
        checkpoints.check_begun(tmp_path, {"w": np.zeros(4, np.float32)}, 15)
