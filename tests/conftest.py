"""Eight CPU devices, and shape and type checks of every annotated function of `zoo` and `transforms`."""

import contextlib
import gc
import os
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("NPROC", "32")  # XLA's threads, on which eight devices can wait for each other
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # torch: some virtual machines show AMX and have none

import jax
import pytest
from beartype import BeartypeConf
from beartype.claw import beartype_package
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import install_import_hook

from tests import quick

gc.set_threshold(1_000_000, 5, 5)  # plans leave many small objects in circles: most are dead when they are looked for
MOST_MAPS = 20_000
pytest_plugins = ["tests.sampling"]


def pytest_addoption(parser):
    group = parser.getgroup("tiling-zoo", "how tests run")
    group.addoption("--types", action="store_true", help="check every call inside `transforms` too: half as long again")
    help = "keep compiled programs in .pytest_cache, for those who run the tests again"
    group.addoption("--keep-compiled", action="store_true", help=help)


def pytest_configure(config):
    config.addinivalue_line("markers", "optimised: what is judged as XLA makes it fast, or for other devices")
    config.addinivalue_line(
        "markers", "measured: bytes and compiled texts, as XLA has them before it makes machine code"
    )
    config.addinivalue_line("markers", "symbolic: what is equal in symbols, whichever way XLA computes it")
    # Inside the compiler, `transforms.tiling`, checks would take longer than what they check; types are read there too.
    transforms = (
        ["transforms"] if config.option.types else ["transforms.tiling.api", "transforms.sharding", "transforms.step"]
    )
    install_import_hook([*shaped(config.rootpath, "zoo"), *transforms], "beartype.beartype")
    beartype_package("zoo", conf=BeartypeConf(claw_is_pep526=False, violation_type=TypeError))
    if config.option.keep_compiled:  # processes that write one folder would read each other's half-written files
        worker = getattr(config, "workerinput", {}).get("workerid", "main")
        reuse(config.rootpath / ".pytest_cache" / "compiled" / worker)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What modules draw while they are read is compiled quickly, and by no test taken for what it compiles itself."""
    with quick.by_default():
        found = yield
    jax.clear_caches()
    gc.collect()
    gc.freeze()  # what was read and collected stays until the end
    return found


def shaped(root: Path, package: str) -> list[str]:
    """Return the modules that name shapes, which are checked with every call: that takes ten times as long as types."""
    modules = [path for path in (root / package).rglob("*.py") if "jaxtyping" in path.read_text()]
    return [".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in modules]


def reuse(folder: Path | str | None) -> str | None:
    """Read programs compiled before from `folder`, and write those that are not there; return the former folder."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(folder) if folder else None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    compilation_cache.reset_cache()
    return before


@pytest.fixture(autouse=True, scope="session")
def children():
    """Processes that tests start compile quickly, all of them; here the next fixtures decide."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} {quick.FLAGS}")  # this process has read its own
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # for those whose JAX may know other flags
        yield


@pytest.fixture(autouse=True, scope="module")
def forget():
    """Traced and compiled programs of one module are of no use to the next, and fill the memory."""
    with quick.one_context():
        yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def unmap(request):
    """Each compiled program maps memory, of which Linux gives a process 65,530 pieces: XLA dies for want of one."""
    yield
    maps = Path("/proc/self/maps")
    if request.node.get_closest_marker("heavy") and maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def quickly(request):
    """Compile in a fifth of the time; in `transforms`, where the last bits are judged, modules that are marked."""
    node = request.node
    chosen = request.path.parent.name in ("experiments", "zoo") or node.get_closest_marker("symbolic")
    with quick.by_default() if chosen and not node.get_closest_marker("optimised") else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def optimised(request):
    """A test may be marked in a module that is not."""
    how = {"optimised": {}, "measured": quick.UNOPTIMISED, "symbolic": quick.QUICK["compiler_options"]}
    for mark, options in how.items():
        if request.node.get_closest_marker(mark):
            with quick.by_default(options):
                yield
            return
    yield


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def compile_once(cache):
    """Most runs of a module compile the same programs."""
    before = reuse(cache / "xla")
    yield
    reuse(before)


@pytest.fixture
def start(tmp_path, cache, compile_once, monkeypatch):
    """Carry out a micro run in this process, without touching its JAX configuration; return the exit status."""
    from experiments import run  # once the import hook above is there
    from experiments.runtime import hardware  # once the import hook above is there
    from experiments.runtime.signals import Stop  # once the import hook above is there
    from tests.experiments.runs import MICRO

    device = hardware.Device("cpu", "a test", 2**32)
    monkeypatch.setattr(hardware, "prepare", lambda platform: device)
    # Pictures are made, and not rendered: that takes as long as such a run trains. `test_metrics.py` looks at them.
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: Path(path).touch())

    def begin(*overrides):
        with Stop() as stop:
            return run.carry_out([*MICRO, f"out={tmp_path}", f"data.cache={cache}", *overrides], stop)

    return begin
