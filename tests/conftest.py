"""Eight CPU devices, and shape and type checks of every annotated function of `zoo` and `transforms`."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from jaxtyping import install_import_hook

install_import_hook(["zoo", "transforms"], "beartype.beartype")
