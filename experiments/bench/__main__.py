"""Every measurement as a command: `python -m experiments.bench NAME [--help]`.

rivals      a linear head's cross-entropy and gradients, by this project and by what one would otherwise use
losses      which of 53 ordinary losses each system slices, and gets right
steps       a small model's training step, start-up and decoding, by run.py, by hand, and by other frameworks
figures     pictures of these: memory against tokens, errors against slices, losses that are right
check       measures again what is committed and can be counted exactly, and says what changed
memory      temporary memory against tokens: the README's first picture
head        a head with softcap and z-loss: memory, products, time
layouts     what devices send each other, on seven layouts of eight
floor       Gemma-2 2B's head, compiled for a TPU or run on a GPU
slice       training steps of Gemma-2 2B compiled for a slice of a pod
decode      a step of the engine, compiled for devices that are not here: memory, products, bytes read and sent
loop        tokens a second of the engine beside those of a loop written by hand, for one text
serve       tokens a second of the engine beside transformers, one by one, and over HTTP
context     the longest sequence that Llama-3.1-8B can be trained on, compiled for GPUs that are not here
"""

import runpy
import sys

MODULES = {
    "rivals": "rivals.compare",
    "losses": "rivals.coverage",
    "steps": "rivals.steps",
    "figures": "rivals.figures",
}
NAMES = (
    "rivals",
    "losses",
    "steps",
    "figures",
    "check",
    "memory",
    "head",
    "layouts",
    "floor",
    "slice",
    "context",
    "decode",
    "loop",
    "serve",
)

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in NAMES:
        known = name in ("", "-h", "--help")
        print(__doc__ if known else f"error: no measurement is called {name!r}; there are: {', '.join(NAMES)}")
        sys.exit(0 if known else 2)
    sys.argv = [f"python -m experiments.bench {name}", *sys.argv[2:]]
    runpy.run_module(f"experiments.bench.{MODULES.get(name, name)}", run_name="__main__")
