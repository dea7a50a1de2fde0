"""Sweep with Hydra's own launchers and sweepers, for clusters: each combination is a job, in a process of its own.

    pip install hydra-submitit-launcher
    python experiments/sweep.py -m hydra/launcher=submitit_slurm hydra.launcher.timeout_min=60 tiling.n=1,8 seed=0,1

Options of launchers are `hydra.launcher.*`. Without a cluster, `run.py -m` does the same one after another.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if sys.path[0] != str(ROOT):  # as a script, Python puts this file's own folder first
    sys.path.insert(0, str(ROOT))

from experiments.command import ended  # noqa: E402
from experiments.commandline import console, options, overrides, schema, spelling  # noqa: E402


def job(_: Any) -> int:
    """Carry out one combination; raises if it fails, so that launchers see it."""
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    words = overrides.numbered(
        [spelling.typed(word, options.by_key()) for word in hydra.overrides.task], int(hydra.job.num)
    )
    subprocess.run([sys.executable, str(ROOT / "experiments" / "run.py"), *words], check=True)
    return 0


def main(argv: list[str]) -> int:
    """Hand over to Hydra; return the exit status."""
    if any(word.startswith("hydra/launcher=submitit") for word in argv) and not _has_submitit():
        print(f"error: hydra/launcher=submitit needs the extra: {console.install('slurm')}", file=sys.stderr)
        return 2
    import hydra

    schema.register()
    known = options.by_key()
    sys.argv[1:] = [spelling.swept_by_hydra(word, known) for word in spelling.named(argv)]
    hydra.main(version_base="1.3", config_path=str(schema.CONF), config_name="config")(job)()
    return 0


def _has_submitit() -> bool:
    try:
        return importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(ended(main, sys.argv[1:]))
