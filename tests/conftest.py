"""Eight CPU devices, and shape and type checks of every annotated function of `zoo` and `transforms`."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from jaxtyping import install_import_hook

install_import_hook(["zoo", "transforms"], "beartype.beartype")


def pytest_addoption(parser):
    help = "run only every N-th case of each parametrised test, the first among them"
    parser.addoption("--every", type=int, default=1, metavar="N", help=help)


def pytest_collection_modifyitems(config, items):
    every = config.getoption("--every")
    seen, kept, dropped = {}, [], []
    for item in items:
        test = (item.path, getattr(item, "originalname", item.name))
        seen[test] = seen.get(test, -1) + 1
        (dropped if seen[test] % every else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
