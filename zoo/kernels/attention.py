"""Which attention a model runs with: what each can do, as data, and an adapter for each kernel.

Every adapter is called as `zoo.models.layers.attention` is. What a kernel cannot do it refuses in a sentence, before
anything is traced (`Kernel.refusal`) and where it is called.

Dimensions: `B` batch `S` sequence `N` query heads `K` kv heads `G` query heads per kv head `H` head size.
"""

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Integer

from transforms import tile
from transforms.cotangents import linear_rules
from transforms.sharding import explicit, partitions
from zoo.config import Chunk, Config
from zoo.models.attention import piecewise
from zoo.models.attention.blockwise import blockwise_attention
from zoo.models.layers import accumulator, attention, beside

LANES = 128  # of a TPU's vector registers: blocks and head sizes are multiples of them
BLOCKS = (512, 256, LANES)  # tokens of a block of splash attention: the longest that divides a sequence
WHOLE = 2**15  # tokens: splash attention of longer sequences goes by pieces
PIECE = 2**13  # tokens of a piece at most
Kept = tuple[Float[Array, "B N S"], Float[Array, "B N S"]]  # the logarithms of sums, and `own` (`Ops.keeps`)
Attention = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What attention is asked for.

    Attributes:
        platform: cpu, gpu or tpu.
        dtype: of queries, keys and values.
        length: of a sequence, in tokens.
        head_dim: the size of a head, the largest where layers differ.
        softcap: whether scores are capped.
        windows: how many keys each layer's queries see; None is all.
        packed: whether rows hold several documents.
        chunks: whether queries see no further than their chunk, which is told as a document is.
        sinks: whether heads have sinks.
        spread: over how many devices each sequence is.
    """

    platform: str
    dtype: str
    length: int
    head_dim: int
    softcap: bool = False
    windows: tuple[int | None, ...] = (None,)
    packed: bool = False
    chunks: bool = False
    sinks: bool = False
    spread: int = 1

    @classmethod
    def of(
        cls, config: Config, *, platform: str, dtype: str, length: int, packed: bool = False, spread: int = 1
    ) -> "Asked":
        """Return what a model asks for, of sequences of so many tokens."""
        return cls(
            platform=platform,
            dtype=dtype,
            length=length,
            head_dim=max(width for _, width, _ in config.layer_heads),
            softcap=getattr(config, "attn_softcap", None) is not None,
            windows=tuple(window if window is None or window < length else None for window in config.layer_windows),
            packed=packed,
            chunks=any(isinstance(one, Chunk) and one < length for one in config.layer_windows),
            sinks=any(row.leaf.endswith(".sinks") for row in config.rows()),
            spread=spread,
        )


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A way to compute attention.

    Attributes:
        name: as `attention=` has it.
        make: returns the adapter, given into how many tiles it is to be cut.
        platforms: where it runs.
        dtypes: of queries, keys and values.
        softcap: whether it caps scores; and likewise
        window: whether it has sliding windows,
        packing: rows of several documents, and chunks,
        sinks: and sinks.
        spreads: whether a sequence may be over several devices.
        step: sequences are multiples of it.
        static: whether windows must be numbers (`Ops.static_windows`).
        keeps: whether it is told in the backward pass what its forward pass has found (`Ops.keeps`).
        library: says why it does not run after all; None if nothing is in the way.
    """

    name: str
    make: Callable[[int | None], Attention]
    platforms: tuple[str, ...] = ("cpu", "gpu", "tpu")
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")
    softcap: bool = True
    window: bool = True
    packing: bool = True
    sinks: bool = True
    spreads: bool = True
    step: int = 1
    static: bool = False
    keeps: bool = False
    library: Callable[[Asked], str | None] = lambda asked: None

    def refusal(self, asked: Asked) -> str | None:
        """Return why this cannot be had, in words that follow the kernel's name; None where it can."""
        for wanted, has, what in (
            (asked.softcap, self.softcap, "caps no scores, and this model's are capped"),
            (any(window is not None for window in asked.windows), self.window, "has no windows, and this model does"),
            (asked.packed, self.packing, "does not keep documents of one row apart, and data.packed=true packs them"),
            (asked.chunks, self.packing, "does not keep chunks of a text apart, and layers of this model do"),
            (asked.sinks, self.sinks, "has no sinks, and this model does"),
        ):
            if wanted and not has:
                return what
        if asked.platform not in self.platforms:
            return f"runs on {' and '.join(self.platforms)}, and this is a {asked.platform}"
        if asked.dtype not in self.dtypes:
            return f"computes in {' or '.join(self.dtypes)}, and this run in {asked.dtype}: set hardware.compute_dtype"
        if asked.spread > 1 and not self.spreads:
            return f"needs whole sequences, and mesh.context={asked.spread} devices share each"
        if asked.length % self.step:
            return f"takes sequences of a multiple of {self.step} tokens, and these have {asked.length}: change seq_len"
        return self.library(asked)

    def ops(self, tiles: int | None = None) -> dict[str, Any]:
        """Return the fields of `Ops` that make layers run so."""
        return {"attention": self.make(tiles), "static_windows": self.static, "keeps": self.keeps}


def choose(asked: Asked) -> tuple[str, str]:
    """Return the kernel that suits, and why: that of the platform, or plain attention where it cannot be had."""
    own = [kernel for kernel in KERNELS.values() if kernel.platforms == (asked.platform,)]
    if not own:
        return "plain", f"there is no kernel for a {asked.platform}"
    for kernel in own:
        if (why := kernel.refusal(asked)) is None:
            return kernel.name, f"the kernel of a {asked.platform}"
    return "plain", f"{own[0].name} {why}"


# ------------------------------------------------------------------------------------------------- the adapters


def tiled(n: int) -> Attention:
    """Return `attention` in `n` tiles of queries and as many of keys, without those that no query sees.

    Memory beside the results is O(B N S T / n^2). Where devices share the sequences, queries alone are cut and keys are
    whole; memory is O(B N S T / n).
    """

    def run(q, k, v, *, window=None, q_segments=None, k_segments=None, sinks=None, keep=False, kept=None, **how):
        if partitions(q)[1] is None:
            number, traced = (window, None) if isinstance(window, int) else (None, window)

            def whole(q, k, v, segments, sinks, traced, kept):
                reach = number if traced is None else traced
                more = {"segments": segments, "sinks": sinks, "keep": keep, "kept": kept}
                return blockwise_attention(q, k, v, n=n, window=reach, **more, **how)

            return _on_each_device(whole, q, beside(q, k), beside(q, v), q_segments, sinks, traced, kept, keep=keep)

        def rows(q, q_segments, k, v, window, k_segments, sinks):
            segments = {"q_segments": q_segments, "k_segments": k_segments}
            return attention(q, k, v, window=window, sinks=sinks, **segments, **how)

        return tile(rows, axis=(1, 1, *(None,) * 5), n=n)(q, q_segments, k, v, window, k_segments, sinks)

    return run


def cudnn_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    scale: float,
    cap: float | None = None,
    window: Integer[Array, ""] | int | None = None,
    q_positions: Integer[Array, "#B S"] | None = None,
    k_positions: Integer[Array, "#B S"] | None = None,
    q_segments: Integer[Array, "B S"] | None = None,
    k_segments: Integer[Array, "B S"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    causal: bool = True,
    keep: bool = False,
    kept: Kept | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B S N H"] | tuple[Float[Array, "B S N H"], Float[Array, "B N S"]]:
    """Return `attention` by cuDNN's flash attention, on the share of batch and heads that each device has.

    Memory beside the result is O(B S N H); the arguments are those of `attention`, the window a number, and those of
    `Ops.keeps`.

    Args:
        implementation: xla computes the same without a GPU, in plain attention's memory.

    Raises:
        ValueError: the kernel does not do what is asked.
    """
    window = _checked("cudnn", q, window, q_positions, k_positions, cap=cap, q_segments=q_segments, sinks=sinks)
    reach = None if window is None else _reach(window, causal)

    def run(q, k, v):
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=causal, local_window_size=reach, implementation=implementation
        )

    if kept is not None:
        of_heads = lambda q, k, v, logs, own: _with_gradients_of(run)(q, k, v, logs, jnp.swapaxes(own, 1, 2))
        return _on_each_device(of_heads, q, beside(q, k), beside(q, v), *kept)
    return _on_each_device(_keeping(run) if keep else linear_rules(run), q, beside(q, k), beside(q, v), keep=keep)


def splash_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    scale: float,
    cap: float | None = None,
    window: Integer[Array, ""] | int | None = None,
    q_positions: Integer[Array, "#B S"] | None = None,
    k_positions: Integer[Array, "#B S"] | None = None,
    q_segments: Integer[Array, "B S"] | None = None,
    k_segments: Integer[Array, "B S"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    causal: bool = True,
    keep: bool = False,
    kept: Kept | None = None,
    piece: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B S N H"] | tuple[Float[Array, "B S N H"], Float[Array, "B N S"]]:
    """Return `attention` by the splash attention kernel of TPUs, on the share of batch and heads that each device has.

    Memory beside the result is O(B S N H); the arguments are those of `attention`, the window a number, and those of
    `Ops.keeps`. The kernel has no scale, so queries are multiplied by it and rounded to their dtype; heads are filled
    up with zeros to a multiple of 128. Each kv head (where there is one, each query head) is an index of the grid that
    the kernel does not know of, so that `tile` may cut heads and batch.

    Args:
        piece: how many tokens are given to the kernel at a time, at most; None is all of sequences up to `WHOLE`.
        interpret: whether the kernel is computed without a TPU, slowly.

    Raises:
        ValueError: the kernel does not do what is asked.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # slow to import

    window = _checked("splash", q, window, q_positions, k_positions)
    length = q.shape[1]
    if length % LANES:
        raise ValueError(f"splash attention takes sequences of a multiple of {LANES} tokens, and these have {length}.")

    kernel = functools.partial(_splash_kernel, splash, window=window, causal=causal, cap=cap, interpret=interpret)
    reach = (math.inf, 0 if causal else math.inf) if window is None else _reach(window, causal)
    pieces = functools.partial(_of_pieces, reach, piece or PIECE) if piece is not None or length > WHOLE else None
    run = functools.partial(_splash, splash, kernel, pieces, scale, keep)
    return _on_each_device(run, q, beside(q, k), beside(q, v), q_segments, sinks, kept, keep=keep)


def _splash(splash, kernel, pieces, scale, keep, q, k, v, segments, sinks, kept):
    """Return what a device's queries see.

    Args:
        kernel: `(heads, length)`: that of query heads that share keys and values.
        pieces: `(see_of, length)`: `Piecewise`, made of attention that is made for a length; None is in one piece.
    """
    batch, length, heads, size = q.shape
    kv_heads = k.shape[2]
    calls = kv_heads if kv_heads > 1 else heads  # in the grid; those that share the one kv head are apart, too
    own = 0 if kv_heads > 1 else None
    wide = lambda x: jnp.pad(x, ((0, 0),) * 3 + ((0, -size % LANES),))
    q = (q.astype(accumulator(q.dtype)) * scale).astype(q.dtype)
    q_BKGSH = wide(q).reshape(batch, length, calls, heads // calls, -1).transpose(0, 2, 3, 1, 4)
    k_BKSH, v_BKSH = wide(k).transpose(0, 2, 1, 3), wide(v).transpose(0, 2, 1, 3)
    if kv_heads == 1:
        k_BKSH, v_BKSH = k_BKSH[:, 0], v_BKSH[:, 0]
    sinks_KG = None if sinks is None else sinks.reshape(calls, -1)

    def see_of(length, **how):
        made = kernel(heads // calls, length, **how)
        of_head = lambda q, k, v, ids, sinks: made(
            q, k, v, segment_ids=None if ids is None else splash.SegmentIds(*ids), sinks=sinks
        )
        return jax.vmap(jax.vmap(of_head, (0, own, own, None, 0)), (0, 0, 0, 0, None))

    told = None if kept is None else tuple(x.reshape(q_BKGSH.shape[:-1]) for x in kept)
    if pieces is not None:
        out_BKGSH, *logs = pieces(see_of, length)(q_BKGSH, k_BKSH, v_BKSH, segments, sinks_KG, keep=keep, kept=told)
    else:
        see, ids = see_of(length), None if segments is None else (segments, segments)
        args = q_BKGSH, k_BKSH, v_BKSH, ids, sinks_KG
        out_BKGSH, *logs = _keeping(see)(*args) if keep else (linear_rules(see)(*args),)
        if told is not None:
            out_BKGSH = _with_gradients_of(see)(*args, *told)
    seen = out_BKGSH.transpose(0, 3, 1, 2, 4).reshape(*q.shape[:3], -1)[..., :size]
    return (seen, logs[0].reshape(batch, heads, length)) if keep else seen


def _splash_kernel(splash, heads, length, *, window, causal, cap, interpret, offset: int | None = 0, fused=False):
    """Return the kernel of some query heads that share keys and values.

    The first query stands `offset` tokens behind the first key; None is where every query sees every key. A fused
    backward pass has five products in place of seven, and a gradient of the queries for each block of keys.
    """
    shape = (length, length)
    if offset is None or (window is None and not causal):
        mask = splash.FullMask(shape)
    elif window is None:
        mask = splash.CausalMask(shape, offset)
    else:
        mask = splash.LocalMask(shape, _reach(window, causal), offset)
    block = next(block for block in BLOCKS if length % block == 0)
    sizes = dict.fromkeys(("q", "kv", "q_dkv", "kv_dkv", "kv_dkv_compute"), block)
    sizes |= {} if fused else {"q_dq": block, "kv_dq": block}
    make = functools.partial(
        splash.make_splash_mqa,
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.splash_attention_kernel.BlockSizes(
            **{f"block_{name}": size for name, size in sizes.items()}, use_fused_bwd_kernel=fused
        ),
        attn_logits_soft_cap=cap,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    # Which tiles there are is known, and is computed now: in a thread of its own, where nothing is traced and no mesh
    # is set, whose devices may be described and compute nothing.
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(make).result()


def _of_pieces(reach, piece, see_of, length):
    """Return splash attention of a sequence in pieces."""

    def made(size, offset):
        see = see_of(size, offset=offset, fused=True)

        def backward(q, k, v, ids, logs, own, given):
            again = lambda q, k, v: _with_gradients_of(see)(q, k, v, ids, None, logs, own)
            return jax.vjp(again, q, k, v)[1](given)

        return piecewise.Kernel(lambda *args: _keeping(see)(*args), backward)

    return piecewise.Piecewise(made, length, piece, min(piece, BLOCKS[0]), *reach)


# ------------------------------------------------------- what a forward pass has found, told to the backward pass


def _keeping(see):
    """Return `see`, a fused kernel, that also returns the logarithms of its sums."""

    def run(*args):
        seen, pull = jax.vjp(see, *args)
        return seen, jax.tree.leaves(pull)[_residuals(see, *args)[1]]

    return run


def _with_gradients_of(see):
    """Return the queries with the gradients of `see`, which is not computed: given logarithms and `own` of `Ops.keeps`.

    Kernels ask for what was seen, and use no more of it than its product with the gradient, a number of each query: a
    multiple of the gradient that has the same product with it, and is no longer than what was seen, does as well.
    """

    @jax.custom_vjp
    def run(q, *rest):
        return q

    def backward(args, given):
        *args, logs, own = args
        leaves, form = jax.tree.flatten(jax.vjp(see, *args)[1])
        of_seen, of_logs = _residuals(see, *args)
        leaves[of_seen], leaves[of_logs] = _pointing(own, given), logs
        return *jax.tree.unflatten(form, leaves)(given), None, None

    run.defvjp(lambda *args: (run(*args), args), backward)
    return run


def _pointing(own, given):
    """Return the multiple of `given`, whose product with it is `own`; zeros where that is zeros."""
    wide = given.astype(own.dtype)
    most = jnp.abs(wide).max(-1, keepdims=True)
    unit = wide / jnp.where(most > 0, most, 1)
    length = jnp.square(unit).sum(-1, keepdims=True) * most
    return (unit * own[..., None] / jnp.where(most > 0, length, 1)).astype(given.dtype)


def _residuals(see, *args):
    """Return where among the leaves of the backward pass of `see` is what is seen, and where the logarithms are.

    Kernels do not name what they keep: logarithms are the one array of float32 that has a number for each query.

    Raises:
        RuntimeError: there are no such two, as another JAX may keep other things.
    """

    def traced(*args):
        seen, pull = jax.vjp(see, *args)
        return seen, jax.tree.leaves(pull)

    jaxpr = jax.make_jaxpr(traced)(*args).jaxpr
    seen, *leaves = jaxpr.outvars
    made = [at for at, leaf in enumerate(leaves) if leaf not in jaxpr.invars and leaf.aval.size]
    queries = seen.aval.size // seen.aval.shape[-1]
    of_seen = [at for at in made if leaves[at] is seen]
    others = [at for at in made if leaves[at] is not seen]
    of_logs = [at for at in others if leaves[at].aval.dtype == jnp.float32 and leaves[at].aval.size == queries]
    if not of_seen or len(of_logs) != 1:
        kept = ", ".join(leaves[at].aval.str_short() for at in made)
        raise RuntimeError(
            f"cannot tell what the backward pass of attention needs: JAX {jax.__version__} keeps {kept} for it, and "
            f"one float32 array of {queries} logarithms, beside what was seen, was expected. Use attention=tiled."
        )
    return of_seen[0], of_logs[0]


def _checked(name, q, window, q_positions, k_positions, **missing) -> int | None:
    """Return the window where it is shorter than the sequences; raise where a kernel does not do what is asked."""
    if q_positions is not None or k_positions is not None:
        raise ValueError(f"{name} attention reads sequences from their beginning; use plain attention beside a cache.")
    if not isinstance(window, int | None):
        raise ValueError(f"{name} attention takes windows as numbers: pass Ops(attention=..., static_windows=True).")
    if partitions(q)[1] is not None:
        raise ValueError(
            f"{name} attention needs whole sequences, and {partitions(q)[1]} cuts them: use plain attention."
        )
    if given := [word for word, value in missing.items() if value is not None]:
        raise ValueError(f"{name} attention has no {', '.join(given)}, and the model asks for it: use plain attention.")
    return None if window is None or window >= q.shape[1] else window


def _reach(window: int, causal: bool) -> tuple[int, int]:
    """Return how many keys before and behind its own a query sees."""
    return window - 1, 0 if causal else window - 1


def _on_each_device(run, q, *rest, keep=False):
    """Return `run` of each device's share of the batch and of the heads, with what it keeps; nothing travels."""
    if not explicit():
        return run(q, *rest)
    batch, _, heads, _ = partitions(q)
    by_rank = {
        4: PartitionSpec(batch, None, heads, None),
        3: PartitionSpec(batch, heads, None),
        2: PartitionSpec(batch, None),
        1: PartitionSpec(heads),
        0: PartitionSpec(),
    }
    specs = jax.tree.map(lambda x: by_rank[x.ndim], (q, *rest))
    outs = (by_rank[4], by_rank[3]) if keep else by_rank[4]
    # Kernels do not say over which axes their results vary (https://github.com/jax-ml/jax/issues/36008).
    return jax.shard_map(run, in_specs=specs, out_specs=outs, check_vma=False)(q, *rest)


def _cudnn_says(asked: Asked) -> str | None:
    """Return what the library has against these sizes on this machine, where it knows."""
    one = jax.ShapeDtypeStruct((1, asked.length, 1, asked.head_dim), asked.dtype)
    try:
        jax.eval_shape(functools.partial(cudnn_attention, scale=1.0), one, one, one)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"says: {str(error).strip().splitlines()[0].rstrip('.')}"
    return None


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(name="plain", make=lambda tiles: attention),
        Kernel(name="tiled", make=lambda tiles: tiled(tiles or 16), static=True, keeps=True),
        Kernel(
            name="cudnn",
            make=lambda tiles: cudnn_attention,
            platforms=("gpu",),
            dtypes=("bfloat16",),
            softcap=False,
            packing=False,
            sinks=False,
            spreads=False,
            static=True,
            keeps=True,
            library=_cudnn_says,
        ),
        Kernel(
            name="splash",
            make=lambda tiles: splash_attention,
            platforms=("tpu",),
            dtypes=("float32", "bfloat16"),
            spreads=False,
            step=LANES,
            static=True,
            keeps=True,
        ),
    )
}
