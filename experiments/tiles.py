"""How long the tiles of a run are, in words too, and why some cannot be had. No JAX here."""

from experiments import configs
from zoo.configs import MixtralConfig, Qwen3MoeConfig


def micro_batch(config: configs.Resolved) -> int:
    """Return how many sequences are computed at a time: a micro-batch, or the whole batch."""
    each = 2 if config.paired else 1
    return -(-config.batch_size // each // (config.tiling.batch or 1)) * each


def flat(config: configs.Resolved) -> bool:
    """Return whether the head sees all tokens of a step as one axis, rather than sequences or pairs of them.

    On a mesh it does not: devices hold parts of the batch and of its sequences.
    """
    return config.tiling.batch is None and not config.paired and config.mesh.devices == 1


def head_axis(config: configs.Resolved) -> tuple[int, int]:
    """Return the length of the axis that the head is cut along, and how many tokens stand in each step along it.

    The tokens of a step are one axis, those of a micro-batch, of pairs or on a mesh more, of which the sequence is cut.
    """
    return (config.tokens_per_step, 1) if flat(config) else (config.seq_len, micro_batch(config))


def head_size(config: configs.Resolved) -> int:
    """Return how many steps along that axis a tile of the head is long: all of them where it is not cut."""
    length, tokens = head_axis(config)
    if config.tiling.size is not None:
        return min(length, max(1, config.tiling.size // tokens))
    return -(-length // (config.tiling.n if isinstance(config.tiling.n, int) else 1))


def head_tiles(config: configs.Resolved) -> int:
    """Return how many tiles the head is cut into."""
    return -(-head_axis(config)[0] // head_size(config))


def head_tokens(config: configs.Resolved) -> int:
    """Return how many tokens' logits exist at a time."""
    return head_size(config) * head_axis(config)[1]


def problem(config: configs.Resolved) -> str | None:
    """Return why a run cannot be cut as it is asked to be, before anything is compiled; None where it can."""
    tiling, tokens, seq = config.tiling, config.tokens_per_step, config.seq_len
    step = f"a step has {tokens} tokens ({config.batch_size} x {seq})"
    if config.paired and config.batch_size % 2:
        return f"cannot make pairs of batch_size={config.batch_size} sequences: give an even number."
    if isinstance(tiling.n, int) and not flat(config) and tiling.n > seq:
        why = "of pairs" if config.paired else "on a mesh" if tiling.batch is None else "under tiling.batch"
        return (
            f"cannot cut into tiling.n={tiling.n} tiles: {why} they cut each sequence, of "
            f"seq_len={seq} tokens. Use fewer tiles."
        )
    if isinstance(tiling.n, int) and tiling.n > tokens:
        return f"cannot cut into tiling.n={tiling.n} tiles: {step}. Use fewer tiles."
    if tiling.size is not None and tiling.size > tokens:
        return f"cannot cut into tiles of tiling.size={tiling.size} tokens: {step}. Use shorter tiles."
    most = config.batch_size // 2 if config.paired else config.batch_size
    if tiling.batch is not None and tiling.batch > most:
        pairs = f", {most} pairs" if config.paired else ""
        return (
            f"cannot cut into tiling.batch={tiling.batch} micro-batches: a step has batch_size={config.batch_size} "
            f"sequences{pairs}. Use tiling.batch={most} or less, or a larger batch_size."
        )
    for part in ("mlp", "attention"):
        if (getattr(tiling, part) or 1) > seq:
            return (
                f"cannot cut into tiling.{part}={getattr(tiling, part)} tiles: a sequence has seq_len={seq} tokens. "
                f"Use tiling.{part}={seq} or less, or a larger seq_len."
            )
    return _experts(config) if isinstance(config.model.config, MixtralConfig | Qwen3MoeConfig) else None


def _experts(config: configs.Resolved) -> str | None:
    """Return why a mixture cannot be cut so."""
    tiling, dense = config.tiling, config.model.config.dense_layers
    if tiling.mlp is not None and not dense:
        return (
            f"cannot cut MLPs into tiling.mlp={tiling.mlp} tiles: all {config.model.config.num_layers} layers of this "
            "mixture have experts in their place. Leave tiling.mlp out; tiling.attention and tiling.n can be set."
        )
    return None


def describe(config: configs.Resolved) -> list[tuple[str, str]]:
    """Return (part, how it is cut) for each part that is, in words."""
    tiling, rows, seq = config.tiling, micro_batch(config), config.seq_len
    parts = []
    if tiling.batch is not None:
        parts.append(("batch", f"{-(-config.batch_size // rows)} micro-batches of {rows} x {seq:,} tokens"))
    if tiling.n != "none":
        vocabulary = "; also vocabulary" if tiling.lowmem else ""
        parts.append(("head", f"{head_tiles(config)} tiles of {head_tokens(config):,} tokens{vocabulary}"))
    for part, n in (("each MLP", tiling.mlp), ("attention", tiling.attention)):
        if n is not None:
            length = -(-seq // n)
            what = "queries" if part == "attention" else "tokens"
            parts.append((part, f"{-(-seq // length)} tiles of {rows} x {length:,} {what}"))
    return parts
