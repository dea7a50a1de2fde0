"""The families' configs: frozen, keyword-only, validated when made, and free of JAX so that reading one is instant.

What a family always has is a property of its class; what its checkpoints choose is a field.
"""

from dataclasses import dataclass

from zoo.config import (
    LOCAL,
    Config,
    RopeKind,
    RopeScaling,
    expert_problems,
    not_positive,
    scaling_problems,
    window_problems,
    windows,
)


@dataclass(frozen=True, kw_only=True)
class GemmaLike(Config):
    """What all Gemmas share.

    Attributes:
        query_scalar: scores are divided by its square root; None means `head_dim`.
        final_softcap: logits become `c * tanh(logit / c)`; None leaves them alone.
        window: on local layers a query sees this many keys, itself included; None lets every layer see all.
        attention_pattern: local (L) and global (G) layers, repeated over the depth.
    """

    query_scalar: float | None = None
    final_softcap: float | None = None
    window: int | None = None
    attention_pattern: str = "LG"

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        positive = not_positive(self, ("query_scalar", "final_softcap"))
        return positive + window_problems(self.window, self.attention_pattern)

    @property
    def query_scale(self) -> float:
        """What attention scores are multiplied by."""
        return (self.head_dim if self.query_scalar is None else self.query_scalar) ** -0.5


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(GemmaLike):
    """Gemma 1 and 2. The defaults are Gemma 1's.

    Attributes:
        attn_softcap: scores become `c * tanh(score / c)`; None leaves them alone.
        post_norms: normalise what attention and MLP put out before adding it (Gemma 2's sandwich).
    """

    attn_softcap: float | None = None
    post_norms: bool = False

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + not_positive(self, ("attn_softcap",))


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaLike):
    """Gemma 3, the text part: normalised queries and keys, and five layers of six local, with frequencies of their own.

    Attributes:
        rope_theta: base of the rotary frequencies of global layers.
        local_rope_theta: that of local layers.
        rope_scaling: how the frequencies of global layers are stretched.
    """

    rope_theta: float = 1_000_000.0
    window: int | None = 4096
    attention_pattern: str = "LLLLLG"
    local_rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        problems = super().problems() + not_positive(self, ("local_rope_theta",))
        if self.window is None and LOCAL in self.attention_pattern:
            problems.append("window=None leaves local layers without one")
        if self.rope_scaling is not None and self.rope_scaling.kind is RopeKind.yarn:
            problems.append("rope_scaling.kind=yarn would scale the scores of some layers only")
        return problems + scaling_problems(self, self.rope_scaling)

    @property
    def attn_softcap(self) -> float | None:
        """The soft cap of attention scores, which the norms of queries and keys replace."""
        return None

    @property
    def layer_ropes(self) -> tuple[tuple[float, RopeScaling | None], ...]:
        """The base of each layer's rotary frequencies, and how they are stretched."""
        local, whole = (self.local_rope_theta, None), (self.rope_theta, self.rope_scaling)
        kinds = windows(self.num_layers, 1, self.attention_pattern)
        return tuple(whole if window is None else local for window in kinds)


@dataclass(frozen=True, kw_only=True)
class LlamaLike(Config):
    """What Llama and the families made after it share.

    Attributes:
        tied: the embedding table is also the head.
        rope_scaling: how the rotary frequencies are stretched to longer texts.
    """

    norm_eps: float = 1e-5
    tied: bool = False
    rope_scaling: RopeScaling | None = None

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return scaling_problems(self, self.rope_scaling)

    @property
    def biases(self) -> str:
        """Which projections of attention have a bias, of `qkvo`."""
        return ""

    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys are normalised."""
        return False

    @property
    def query_scale(self) -> float:
        """What attention scores are multiplied by."""
        temperature = 1.0 if self.rope_scaling is None else self.rope_scaling.temperature
        return self.head_dim**-0.5 * temperature**2


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(LlamaLike):
    """Llama 2, 3, 3.1 and 3.2.

    Attributes:
        attention_bias: biases after the four projections of attention.
    """

    attention_bias: bool = False

    @property
    def biases(self) -> str:
        """Which projections of attention have a bias, of `qkvo`."""
        return "qkvo" if self.attention_bias else ""


@dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaLike):
    """Mistral 7B and its like.

    Attributes:
        window: how many keys a query sees, itself included; None is all.
    """

    window: int | None = None

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + window_problems(self.window, self.attention_pattern)


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(LlamaLike):
    """Qwen 2 and 2.5: biases after the projections of queries, keys and values.

    Attributes:
        window: on local layers a query sees this many keys, itself included; None lets every layer see all.
        attention_pattern: local (L) and global (G) layers, repeated over the depth.
    """

    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    window: int | None = None
    attention_pattern: str = "L"

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + window_problems(self.window, self.attention_pattern)

    @property
    def biases(self) -> str:
        """Which projections of attention have a bias, of `qkvo`."""
        return "qkv"


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """Qwen 3: normalised queries and keys in place of biases.

    Attributes:
        attention_bias: biases after the four projections of attention.
    """

    attention_bias: bool = False

    @property
    def biases(self) -> str:
        """Which projections of attention have a bias, of `qkvo`."""
        return "qkvo" if self.attention_bias else ""

    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys are normalised."""
        return True


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(MistralConfig):
    """Mixtral: a router sends each token to a few of many MLPs.

    Attributes:
        mlp_dim: hidden width of one expert.
        rope_theta: base of the rotary frequencies.
        num_experts: MLPs in every layer.
        experts_per_token: how many of them each token goes to.
        balance_weight: what the balance loss is multiplied by in training.
    """

    rope_theta: float = 1_000_000.0
    num_experts: int = 8
    experts_per_token: int = 2
    balance_weight: float = 0.001

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        return super().problems() + expert_problems(self)

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return super().dims | {"E": self.num_experts}

    @property
    def normalise_weights(self) -> bool:
        """Whether the weights of the chosen experts sum to one."""
        return True

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers that have one MLP and no router."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(Qwen3Config):
    """Qwen 3's mixtures of experts.

    Attributes:
        mlp_dim: hidden width of one expert.
        num_experts: MLPs in every sparse layer.
        experts_per_token: how many of them each token goes to.
        normalise_weights: the weights of the chosen experts sum to one.
        balance_weight: what the balance loss is multiplied by in training.
        dense_layers: layers that have one MLP and no router.
        dense_mlp_dim: hidden width of those.
    """

    num_experts: int = 128
    experts_per_token: int = 8
    normalise_weights: bool = True
    balance_weight: float = 0.001
    dense_layers: tuple[int, ...] = ()
    dense_mlp_dim: int = 6144

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        problems = super().problems() + expert_problems(self) + not_positive(self, ("dense_mlp_dim",))
        within = sorted(set(self.dense_layers) & set(range(self.num_layers)))
        if list(self.dense_layers) != within or len(within) == self.num_layers:
            most = self.num_layers - 1
            problems.append(f"dense_layers={self.dense_layers} must be in order, from 0 to {most}, and leave one out")
        return problems

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return super().dims | {"E": self.num_experts, "P": self.dense_mlp_dim}


FAMILIES: dict[str, type[Config]] = {
    "gemma": GemmaConfig,
    "gemma3": Gemma3Config,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mixtral": MixtralConfig,
    "qwen3_moe": Qwen3MoeConfig,
}
