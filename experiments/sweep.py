"""Sweep with Hydra's own launchers and sweepers, for clusters: each combination is a job, in a process of its own.

    pip install hydra-submitit-launcher
    python experiments/sweep.py -m hydra/launcher=submitit_slurm hydra.launcher.timeout_min=60 tiling.n=1,8 seed=0,1

Options of launchers are `hydra.launcher.*`. Without a cluster, `run.py -m` does the same one after another.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if sys.path[0] != str(ROOT):  # as a script, Python puts this file's own folder first
    sys.path.insert(0, str(ROOT))

from experiments import options, overrides, schema, spelling  # noqa: E402


def job(_: Any) -> int:
    """Carry out one combination; raises if it fails, so that launchers see it."""
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    words = overrides.numbered(
        [spelling.typed(word, options.by_key()) for word in hydra.overrides.task], int(hydra.job.num)
    )
    subprocess.run([sys.executable, str(ROOT / "experiments" / "run.py"), *words], check=True)
    return 0


def main() -> None:
    """Hand over to Hydra."""
    import hydra

    schema.register()
    sys.argv[1:] = [spelling.swept_by_hydra(word, options.by_key()) for word in sys.argv[1:]]
    hydra.main(version_base="1.3", config_path=str(schema.CONF), config_name="config")(job)()


if __name__ == "__main__":
    main()
