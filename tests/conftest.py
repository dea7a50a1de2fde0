"""Eight CPU devices, and shape and type checks of every annotated function of `zoo` and `transforms`."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import install_import_hook

install_import_hook(["zoo", "transforms"], "beartype.beartype")


def pytest_addoption(parser):
    help = "run part K of N of the cases of each parametrised test; 1/1 runs all of them, each part the first"
    parser.addoption("--part", default="1/1", metavar="K/N", help=help)


def pytest_collection_modifyitems(config, items):
    part, parts = map(int, config.getoption("--part").split("/"))
    seen, kept, dropped = {}, [], []
    for item in items:
        test = (item.path, getattr(item, "originalname", item.name))
        seen[test] = seen.get(test, -1) + 1
        (kept if seen[test] == 0 or seen[test] % parts == part - 1 else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def compile_once(cache):
    """Most runs of a module compile the same programs."""
    jax.config.update("jax_compilation_cache_dir", str(cache / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.fixture
def start(tmp_path, cache, compile_once, monkeypatch):
    """Carry out a micro run in this process, without touching its JAX configuration; return the exit status."""
    from experiments import hardware, schema, session  # once the import hook above is there
    from tests.runs import MICRO

    device = hardware.Device("cpu", "a test", 2**32)
    monkeypatch.setattr(hardware, "prepare", lambda platform: device)

    def begin(*overrides):
        words = [*MICRO, f"out={tmp_path}", f"data.cache={cache}", *overrides]
        return session.start(*schema.compose(words), words)

    return begin
