# %% [markdown]
# # Reading a plan
#
# `tile(fn, axis, n)` is planned before it runs. The plan says which loops there will be, what each carries, what is
# computed twice, what had to be whole and why, and what all this takes. Nothing here is computed: shapes are enough.

# %%
import jax
import jax.numpy as jnp
import optax

from transforms import TileError, tile

T, D, V = 4096, 128, 8192  # tokens, embed, vocabulary
weights = jax.ShapeDtypeStruct((D, V), jnp.float32)
hidden = jax.ShapeDtypeStruct((T, D), jnp.float32)
labels = jax.ShapeDtypeStruct((T,), jnp.int32)


def loss(weights, hidden, labels):
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ weights, labels).mean()


# %% [markdown]
# ## Loops
#
# One loop, and one for the value and gradient together: the gradient of each tile is made where its logits are, which
# are made once. *Carries* are what a loop hands from tile to tile: the gradient of the weights is a sum over the
# tiles, that of the hidden states has a slice from each.

# %%
plan = tile(loss, axis=(None, 0, 0), n=16).plan(weights, hidden, labels)
print(plan)

# %% [markdown]
# What is printed can be read by a program too, in bytes and FLOPs.

# %%
gradient = plan.gradient
assert gradient is not None  # a function of integers has none
(loop,) = gradient.loops
for carry in loop.carries:
    print(f"{carry.array} takes {carry.nbytes:,} bytes")

# %% [markdown]
# ## The plan and the compiler
#
# The plan's memory is an estimate: the compiler has the last word.

# %%
compiled = {}
for name, fn in (("tiled", tile(loss, axis=(None, 0, 0), n=16)), ("untiled", loss)):
    lowered = jax.jit(jax.value_and_grad(fn, argnums=(0, 1))).lower(weights, hidden, labels)
    memory = lowered.compile().memory_analysis()
    assert memory is not None  # some platforms do not tell
    compiled[name] = memory.temp_size_in_bytes
    print(f"{name}: {compiled[name] / 2**20:.1f} MiB by the compiler")

# %% [markdown]
# ## How many tiles
#
# Say what may be used, and the fewest tiles that keep within it are taken. Keep 128 tokens or more in a tile.

# %%
fitted = tile(loss, axis=(None, 0, 0), n="auto", budget="16MiB").plan(weights, hidden, labels)
print(f"{fitted.tiles} tiles of {fitted.size} tokens")

# %% [markdown]
# ## Two loops: what is needed before the rest can begin
#
# Attention over keys has one loop: its softmax runs online. A mean that every token is compared with needs all tokens
# before the first comparison. The plan then has a loop for the mean and one for the rest, and says what the second
# computes again.


# %%
def spread(weights, hidden):
    scores = jax.nn.relu(hidden @ weights)
    return ((scores - scores.mean(0)) ** 4).mean()


two = tile(spread, axis=(None, 0), n=16).plan(weights, hidden)
print(two)

# %% [markdown]
# ## Refused, and why
#
# What cannot be tiled without an array larger than inputs and outputs is refused before anything runs: the line, the
# shapes, the bytes, and what to do.


# %%
def median(weights, hidden):
    return jnp.sort(hidden @ weights, axis=0)[T // 2].sum()


try:
    tile(median, axis=(None, 0), n=16).plan(weights, hidden)
except TileError as error:
    refusal = str(error)
    print(refusal)

# %% [markdown]
# ## In a run
#
# `python experiments/run.py model=gemma2b tiling.n=8 plan=true` prints what the whole compiled step takes, and stops;
# `compile_for=v5e-8` does so for hardware that is not here.
