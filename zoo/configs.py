"""Architecture configs: frozen, keyword-only, validated when made, and free of JAX so that reading one is instant.

Field names are the same in every model of the zoo. The letters of `dims` are the alphabet used everywhere else: `V`
vocab `D` embed `F` mlp hidden `N` query heads `K` kv heads `H` head size `L` layers (and `B` batch
`S` sequence `T` tokens).
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GemmaConfig:
    """Gemma 1 and 2. The defaults after `head_dim` are Gemma 1's.

    Attributes:
        vocab_size: rows of the tied embedding table.
        num_layers: transformer blocks.
        embed_dim: width of the residual stream.
        mlp_dim: hidden width of the gated MLP.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads` (1 is multi-query attention).
        head_dim: width of a head, even.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in every norm.
        query_scalar: scores are divided by its square root; None means `head_dim`.
        attn_softcap: scores become `c * tanh(score / c)`; None leaves them alone.
        final_softcap: the same for the logits.
        window: on even layers (0, 2, ...) a query sees this many keys, itself included; None lets every layer see all.
        post_norms: normalise what attention and MLP put out before adding it (Gemma 2's sandwich).
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    query_scalar: float | None = None
    attn_softcap: float | None = None
    final_softcap: float | None = None
    window: int | None = None
    post_norms: bool = False

    def __post_init__(self):
        sizes = ("vocab_size", "num_layers", "embed_dim", "mlp_dim", "num_heads", "num_kv_heads", "head_dim")
        problems = [f"{name}={getattr(self, name)} must be at least 1" for name in sizes if getattr(self, name) < 1]
        positive = ("rope_theta", "norm_eps", "query_scalar", "attn_softcap", "final_softcap", "window")
        for name in positive:
            value = getattr(self, name)
            if value is not None and not value > 0:
                problems.append(f"{name}={value} must be positive")
        if self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads:
            problems.append(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            problems.append(f"head_dim={self.head_dim} must be even, because rotary embedding turns pairs")
        if problems:
            raise ValueError("GemmaConfig cannot be made: " + "; ".join(problems) + ".")

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return {
            "V": self.vocab_size,
            "D": self.embed_dim,
            "F": self.mlp_dim,
            "N": self.num_heads,
            "K": self.num_kv_heads,
            "H": self.head_dim,
            "L": self.num_layers,
        }

    @property
    def query_scale(self) -> float:
        """What attention scores are multiplied by."""
        return (self.head_dim if self.query_scalar is None else self.query_scalar) ** -0.5

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """How many keys each layer's queries see, themselves included; None is all of them."""
        return tuple(self.window if layer % 2 == 0 else None for layer in range(self.num_layers))
