"""Tiny models as Hugging Face folders, with every convention visible: random norms, odd sizes, small caps and windows.

Weights come from numpy and the tensor's name, so that `golden.json` (what transformers computes) can be checked without
transformers. `python -m tests.zoo.hf_tiny` writes it anew, `... CASE CASE` these cases.
"""

import functools
import json
import math
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import save_file

from tests.quick import QUICK
from tests.zoo.hf_cases import CASES, ENCODERS
from zoo import load
from zoo.config import rows
from zoo.huggingface.config import from_hf, to_hf

GOLDEN = Path(__file__).with_name("golden.json")


def tokens() -> np.ndarray:
    """Ids `[2, 11]`: longer than the window, with repeats, and never 0 (torch gives the padding id no gradient)."""
    ids = np.random.default_rng(2).integers(3, 97, (2, 11))
    ids[:, 7] = ids[:, 1]
    return ids


def weights() -> np.ndarray:
    """What hidden states of an encoder are weighed by, for one number to take gradients of."""
    return np.random.default_rng(0).normal(size=(2, 11, 48)).astype(np.float32)


def tensor(name: str, shape: tuple[int, ...], norm: float = 0.0) -> np.ndarray:
    """The weights of a tensor: norms far from `norm`, matrices that keep activations near one."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    centred = norm * (name.endswith("weight") and any(part in name for part in ("norm", ".ln_")))
    centred += name.endswith(("layer_scalar", "router.scale", "expert_scale"))
    return (noise * (0.3 if len(shape) == 1 else shape[-1] ** -0.5) + centred).astype(np.float32)


def write(case: str, folder: Path, dtype=np.float32) -> Path:
    """Write a case as a folder, in the dialect of transformers 4."""
    raw = (CASES | ENCODERS)[case]
    config = from_hf(raw)
    shapes = {name: row.disk_shape(config.dims) for row in rows(config) for name, _ in row.tensors(config.dims)}
    folder.mkdir(parents=True, exist_ok=True)
    norm = 0.0 if config.norm_offset else 1.0  # Gemma stores norms less one
    arrays = {name: tensor(name, shape, norm) for name, shape in shapes.items()}
    if raw["model_type"] == "gemma4_text":  # nothing else divides scores, and large ones magnify roundings
        arrays |= {name: array / len(array) ** 0.5 for name, array in arrays.items() if name.endswith("q_norm.weight")}
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


# Compiling takes nearly all of these tests' time, and half of it goes into making machine code fast.
FAST = QUICK
jit: Any = functools.partial(eqx.filter_jit, **FAST)


def loss_fn(model, ids=None, **how):
    """Return (loss, logits) of next-token prediction; `how` is passed to `hidden`.

    Of an encoder, hidden states, and their sum weighed by `weights()`.
    """
    ids = jnp.asarray(tokens(), jnp.int32) if ids is None else ids
    if model.config.bidirectional:
        hidden = model.hidden(ids, **how)
        return (hidden * weights()).sum(), hidden
    logits = model.logits(model.hidden(ids, **how))
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean(), logits


@jit
def evaluate(model, **how):
    """Return what our model makes of `tokens()`: loss, logits and gradients."""
    (loss, logits), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, **how)
    return loss, logits, grads


@functools.cache
def loaded(case: str):
    """Return our model of a case."""
    with tempfile.TemporaryDirectory() as folder:
        return load(write(case, Path(folder)))


@functools.cache
def evaluated(case: str):
    """Return `evaluate` of a case."""
    return evaluate(loaded(case))


def reference(case: str, dtype: str = "float32"):
    """Return the model of transformers with the same weights."""
    import transformers

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        write(case, Path(folder))
        architecture = to_hf(from_hf((CASES | ENCODERS)[case]), dtype)["architectures"][0]
        made = transformers.AutoModel if case in ENCODERS else getattr(transformers, architecture)
        model: Any = made.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",  # the only one that soft-caps on the CPU
            **({} if case in ENCODERS else {"experts_implementation": "eager"}),
        )
        return model.eval()


def logits(model) -> np.ndarray:
    """Return the logits of `tokens()`, without what gradients need."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.from_numpy(tokens()), use_cache=False).logits.float().numpy()


def run(model) -> dict:
    """Return what the model makes of `tokens()`: logits, loss, gradient norm, hidden states and gradients."""
    import torch

    ids = torch.from_numpy(tokens())
    if model.config.model_type in {raw["model_type"] for raw in ENCODERS.values()}:
        hidden = model(input_ids=ids).last_hidden_state
        (hidden * torch.from_numpy(weights())).sum().backward()
        grads = {f"model.{name}": parameter.grad.numpy() for name, parameter in model.named_parameters()}
        return {"logits": hidden.detach().numpy(), "grads": grads}
    out = model(input_ids=ids, labels=ids, output_hidden_states=True, use_cache=False)
    out.loss.backward()
    grads = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad  # of biases that choose
        grads |= _on_disk(name, grad.float().numpy(), model.config.model_type)
    for name, buffer in model.named_buffers():  # which is no parameter there, and has no gradient here
        if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
            grads |= _on_disk(name, np.zeros(buffer.shape, np.float32), model.config.model_type)
    return {
        "logits": out.logits.detach().float().numpy(),
        "loss": float(out.loss.detach()),
        "grad_norm": math.sqrt(sum(float((grad.astype(np.float64) ** 2).sum()) for grad in grads.values())),
        "hidden": [hidden.detach().float().numpy() for hidden in out.hidden_states],
        "grads": grads,
    }


def _on_disk(name: str, array: np.ndarray, kind: str) -> dict[str, np.ndarray]:
    """Return a parameter as the tensors on disk: experts are apart there, and some families have names of their own."""
    name = "embed_out.weight" if kind == "gpt_neox" and name == "lm_head.weight" else name
    name = name.replace("mlp.gate.moe_statics.", "mlp.moe_statics.")
    parts = {name: array}
    if kind in ("gpt_oss", "gemma4_text", "llama4_text", "mistral4"):  # there they are together
        return parts
    if kind.startswith("granitemoe"):
        own = {"router.weight": "router.layer.weight", "experts.gate_up_proj": "input_linear.weight"}
        own |= {"experts.down_proj": "output_linear.weight"}
        return {functools.reduce(lambda text, pair: text.replace(*pair), own.items(), name): array}
    if name.endswith("experts.gate_up_proj"):
        halves = zip(("gate_proj", "up_proj"), np.split(array, 2, axis=1), strict=True)
        parts = {name.replace("gate_up_proj", half): part for half, part in halves}
    if ".experts." in name:
        parts = {
            part.replace("experts.", f"experts.{i}.") + ".weight": one
            for part, stack in parts.items()
            for i, one in enumerate(stack)
        }
    if kind not in ("mixtral", "minimax_m2", "lfm2_moe"):
        return parts
    own = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return {functools.reduce(lambda text, pair: text.replace(*pair), own.items(), part): parts[part] for part in parts}


def summary(result: dict) -> dict:
    """Return the few numbers of a result that `golden.json` keeps."""
    return {
        "loss": result["loss"],
        "grad_norm": result["grad_norm"],
        "logits": [[round(float(x), 7) for x in row] for row in result["logits"][:, -1, :8]],
    }


if __name__ == "__main__":  # with names of cases, those alone
    known, asked = json.loads(GOLDEN.read_text()), set(sys.argv[1:]) or set(CASES)
    golden = {case: summary(run(reference(case))) if case in asked else known[case] for case in CASES}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
