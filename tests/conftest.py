"""Eight CPU devices, and shape and type checks of every annotated function of `zoo` and `transforms`."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

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
