"""Write the golden plans anew: `python -m tests.transforms.rewrite_plans [TABLE ...]`. Prints what has changed."""

import sys

import tests.conftest  # noqa: F401  eight devices, before JAX starts
from tests.transforms.golden_plans import rewrite

if __name__ == "__main__":
    for line in rewrite(sys.argv[1:]):
        print(line)
