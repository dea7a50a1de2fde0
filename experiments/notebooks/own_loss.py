# %% [markdown]
# # A loss of your own on a model of the zoo
#
# A model gives hidden states, a loss makes a number of them. What takes the memory is between the two: logits, one
# number for each word of the vocabulary at each token. Here a loss that no library has is written down as its formula
# says, tiled, compared with itself untiled, and trained with.

# %%
from pydoc_data.topics import topics

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import zoo
from transforms import tile
from transforms.step import State, compile_step, make_train_step

# %% [markdown]
# ## A model and its text
#
# Random weights, so that this runs anywhere; `model = zoo.load(FOLDER)` reads those of a Hugging Face folder. The
# text is Python's own help, each byte its id, in rows of 128 and the token that follows.

# %%
config = zoo.GemmaConfig(
    vocab_size=4096,
    num_layers=1,
    embed_dim=32,
    mlp_dim=64,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    final_softcap=30.0,
)
model = zoo.Gemma.init(config, key=jax.random.key(0))
text = "\n".join(topics[name] for name in sorted(topics)).encode()
ids = jnp.array(list(text[: 8 * 129])).reshape(8, 129)

# %% [markdown]
# ## The loss
#
# Focal loss (https://arxiv.org/abs/1708.02002) with a penalty on large normalisers. `head(hidden)` are the model's
# logits, soft-capped as this model's are. Nothing in it knows of tiles.


# %%
def focal(head, hidden, labels, gamma=2.0):
    logits = head(hidden)  # [B, S, V]
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    logs = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0] - normaliser
    return jnp.mean(-((1 - jnp.exp(logs)) ** gamma) * logs + 1e-4 * normaliser**2)


def loss_with(how):
    """The loss of a model on rows of ids; `how` is `focal`, or what was made of it."""
    return lambda model, ids: (how(zoo.head(model), model.hidden(ids[:, :-1]), ids[:, 1:]), {})


tiled = tile(focal, axis=(None, 1, 1), n=8)  # the head whole; of hidden states and labels dimension 1, the tokens

# %% [markdown]
# ## The same value, the same gradients
#
# Not about the same: exactly what the formula says, up to the order of a sum.

# %%
measure = lambda how: eqx.filter_jit(eqx.filter_value_and_grad(loss_with(how), has_aux=True))(model, ids)
(value, _), gradients = measure(focal)
(value_in_tiles, _), gradients_in_tiles = measure(tiled)
differences = jax.tree.map(lambda a, b: jnp.abs(a - b).max() / jnp.abs(a).max(), gradients, gradients_in_tiles)
difference = max(float(leaf) for leaf in jax.tree.leaves(differences))
print(f"{value:.6f} whole, {value_in_tiles:.6f} in tiles; largest relative difference of a gradient {difference:.1e}")

# %% [markdown]
# ## The memory
#
# The compiler's own count of what a whole training step takes beside its arguments. Of the loss alone,
# `tiled.plan(...)` tells more: see `reading_a_plan.py`.

# %%
optimizer = optax.adamw(3e-3)
state = State.init(jax.tree.map(jnp.copy, model), optimizer)  # a step reuses its state's memory; `model` stays
compiled, memory = {}, {}
for name, how in (("whole", focal), ("tiled", tiled)):
    compiled[name] = compile_step(make_train_step(loss_with(how), optimizer), ids, state)
    memory[name] = compiled[name].compiled.memory_analysis().temp_size_in_bytes / 2**20
    print(f"{name}: {memory[name]:.1f} MiB")

# %% [markdown]
# ## Training with it
#
# The compiled step returns before it has run: Python is not waited for.

# %%
losses = []
for _ in range(20):
    state, metrics = compiled["tiled"](ids, state)
    losses.append(float(metrics["loss"]))
print(f"{losses[0]:.3f} before, {losses[-1]:.3f} after {len(losses)} steps")

# %% [markdown]
# ## The same in a run
#
# Written as a function of `logits`, `labels` and `mask` in a file `losses.py`, it is an option of the trainer, which
# then also resumes, shards, records and draws:
#
#     python experiments/run.py model=tiny objective=losses:focal objective.kwargs.gamma=1.5 tiling.n=8
