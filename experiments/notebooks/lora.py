# %% [markdown]
# # Fine-tuning with LoRA
#
# A base model, a low-rank addition to some of its matrices that alone learns, and what is done with it afterwards:
# saved as PEFT saves it, loaded onto the base again, merged into a plain model. The base is made here, in seconds, so
# that the numbers mean something without a download; with `base = zoo.load(FOLDER)` the rest stays as it is.

# %%
import inspect
import tempfile
import textwrap
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zoo
from transforms import tile
from transforms.step import State, all_parameters, compile_step, make_eval_step, make_train_step
from zoo import adapters
from zoo.adapters import lora

# %% [markdown]
# ## Two kinds of text
#
# The base learns source code, the adapter English: both are in every Python. A byte is its own id.

# %%
code = "".join(inspect.getsource(module) for module in (inspect, textwrap, tempfile))
english = "\n".join(topics[name] for name in sorted(topics))
rows = lambda text: np.frombuffer(text.encode(), np.uint8)[: len(text.encode()) // 129 * 129].reshape(-1, 129)
code, english = rows(code), rows(english)
held_out, english = jnp.array(english[:16], jnp.int32), english[16:]


def cross_entropy(head, hidden, labels):
    return optax.softmax_cross_entropy_with_integer_labels(head(hidden), labels).mean()


def loss(model, ids):  # the head in four tiles of tokens
    return tile(cross_entropy, axis=(None, 1, 1), n=4)(zoo.head(model), model.hidden(ids[:, :-1]), ids[:, 1:]), {}


def fit(model, text, steps, rate, trainable=all_parameters):
    """The model after so many steps on random rows of a text; `trainable` says which of its leaves may move."""
    optimizer = optax.adamw(rate)
    state = State.init(jax.tree.map(jnp.copy, model), optimizer, trainable)  # a step reuses its state's memory
    draw, step = np.random.default_rng(0), None
    for _ in range(steps):
        batch = jnp.array(text[draw.integers(len(text), size=4)], jnp.int32)
        step = step or compile_step(make_train_step(loss, optimizer, trainable), batch, state)
        state, _ = step(batch, state)
    return state.model


measure = make_eval_step(loss)
nats = lambda model: float(measure(held_out, model)["loss"])

# %% [markdown]
# ## The base

# %%
config = zoo.LlamaConfig(
    vocab_size=256, num_layers=2, embed_dim=64, mlp_dim=128, num_heads=4, num_kv_heads=2, head_dim=16
)
base = fit(zoo.Llama.init(config, key=jax.random.key(0)), code, steps=80, rate=5e-3)
before = nats(base)
print(f"the base, which has seen code: {before:.3f} nats per byte of held-out English")

# %% [markdown]
# ## The adapter
#
# Matrices are named as here (`q`, `layers.gate`) or as in a Hugging Face folder (`q_proj`); a name that is none is
# refused with those that there are. At first the model computes what it did, as B is zero.

# %%
adapted = lora.attach(base, ["*_proj"], rank=8, alpha=16.0, key=jax.random.key(1))
count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree) if hasattr(leaf, "size"))
learned = sum(part.a.size + part.b.size for _, part in lora.adapted(adapted))
print(f"{learned:,} of {count(adapted):,} numbers may move")
unchanged = nats(adapted)

# %%
tuned = fit(adapted, english, steps=80, rate=2e-2, trainable=lora.trainable)
after = nats(tuned)
print(f"{before:.3f} before, {unchanged:.3f} with the adapter attached, {after:.3f} after it has learned")

# %% [markdown]
# ## Afterwards
#
# A folder that PEFT reads, and that is loaded onto the base again; or one model, without a trace of the adapter.

# %%
folder = Path(tempfile.mkdtemp()) / "adapter"
adapters.save(tuned, folder)
print(sorted(file.name for file in folder.iterdir()))
again = adapters.load(folder, base)
merged = lora.merge(tuned)
print(f"loaded {nats(again):.3f}, merged {nats(merged):.3f}")

# %% [markdown]
# ## The same in a run
#
#     python experiments/run.py model.weights=FOLDER adapter=lora adapter.targets=q,v data=text data.path=FILE
#     python experiments/convert.py source=FOLDER lora=runs/NAME/adapter out=MERGED
