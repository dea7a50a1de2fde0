"""How long the tiles of a run are, in words too, and why some cannot be had. No JAX here."""

from experiments import configs
from zoo.families.mixture import MixtureLike


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
    if config.paired and config.batch_size % 2:
        return f"cannot make pairs of batch_size={config.batch_size} sequences: give an even number."
    return _experts(config) if isinstance(config.model.config, MixtureLike) else None


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
    """Return (part, how it is cut) for each part that is, in words; more tiles than there are steps are as many."""
    tiling, rows, seq = config.tiling, micro_batch(config), config.seq_len
    parts = []
    asked = lambda n, count: f", not {n}: there is no more to cut" if isinstance(n, int) and n > count else ""
    if tiling.batch is not None:
        count = -(-config.batch_size // rows)
        most = asked(tiling.batch, config.batch_size // 2 if config.paired else config.batch_size)
        parts.append(("batch", f"{count} micro-batches of {rows} x {seq:,} tokens{most}"))
    if tiling.n != "none":
        vocabulary = "; also vocabulary" if tiling.lowmem else ""
        most = asked(tiling.n, head_axis(config)[0])
        parts.append(("head", f"{head_tiles(config)} tiles of {head_tokens(config):,} tokens{vocabulary}{most}"))
    for part, n in (("each MLP", tiling.mlp), ("attention", tiling.attention)):
        if n is not None:
            length = -(-seq // n)
            what = "queries" if part == "attention" else "tokens"
            parts.append((part, f"{-(-seq // length)} tiles of {rows} x {length:,} {what}{asked(n, seq)}"))
    return parts
