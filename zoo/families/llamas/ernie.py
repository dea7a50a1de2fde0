"""ERNIE 4.5 (https://github.com/PaddlePaddle/ERNIE) and Helium (https://kyutai.org/blog/2025-04-30-helium): Llamas, of
whose heads neighbouring dimensions turn together; and ERNIE's mixtures of experts. Free of JAX."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zoo.dialect import ACTIVATION, TIED, Dialect, eps, sizes
from zoo.families.llamas.llama import Activated
from zoo.families.mixture import BALANCE, CHOICE, GroupedLike
from zoo.parameters import LAYER, MLP, MLP_BIASES, Row

_CHOICE = replace(CHOICE, tensor=LAYER + "mlp.moe_statics.e_score_correction_bias", pattern="G E -> E")


def _read(read: Any, num_layers: int) -> dict[str, Any]:
    """Say what is wrong where layers behind the first ones are dense too."""
    last = read.raw.get("moe_layer_end_index", -1)
    if last not in (-1, None, num_layers - 1):
        read.problems.append(
            f"`moe_layer_end_index`={last!r} is not supported, only the last of {num_layers} layers: -1"
        )
    return {}


@dataclass(frozen=True, kw_only=True)
class Paired(Activated):
    """Llamas, of whose heads neighbouring dimensions turn together."""

    @property
    def rotary_pairs(self) -> bool:
        """Whether neighbouring dimensions of a head turn together, in place of those of its halves."""
        return True


@dataclass(frozen=True, kw_only=True)
class HeliumConfig(Paired):
    """Helium 1."""

    dialects: ClassVar = {
        "helium": Dialect(
            architecture="HeliumForCausalLM",
            sizes=sizes(4096, 20, 128),
            numbers=eps(1e-8),
            flags=TIED,
            theta=100_000.0,
            choices=ACTIVATION,
            only={"attention_bias": (False, None), "mlp_bias": (False, None)},
            written={"pad_token_id": None},
        )
    }

    norm_eps: float = 1e-8
    rope_theta: float = 100_000.0


@dataclass(frozen=True, kw_only=True)
class ErnieConfig(Paired):
    """ERNIE 4.5 without experts.

    Attributes:
        attention_bias: biases after all projections, of attention and of the MLP.
    """

    dialects: ClassVar = {
        "ernie4_5": Dialect(
            architecture="Ernie4_5ForCausalLM",
            sizes=sizes(131_072, 2, 128),
            numbers=eps(1e-5),
            flags={"tie_word_embeddings": ("tied", True), "use_bias": ("attention_bias", False)},
            theta=500_000.0,
            choices=ACTIVATION,
            written={"pad_token_id": None},  # or transformers takes one, which small vocabularies do not have
        )
    }

    rope_theta: float = 500_000.0
    tied: bool = True
    attention_bias: bool = False

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends(self.attention_rows() + MLP + (MLP_BIASES if self.attention_bias else ()))


@dataclass(frozen=True, kw_only=True)
class ErnieMoeConfig(GroupedLike, ErnieConfig):
    """ERNIE 4.5's mixtures of experts: a bias takes part in choosing among probabilities that sum to one.

    Attributes:
        mlp_dim: hidden width of one expert.
    """

    dialects: ClassVar = {
        "ernie4_5_moe": Dialect(
            architecture="Ernie4_5_MoeForCausalLM",
            sizes=sizes(
                131_072,
                4,
                intermediate_size=("dense_mlp_dim", 12_288),
                moe_intermediate_size=("mlp_dim", 1536),
                moe_num_experts=("num_experts", 64),
                moe_k=("experts_per_token", 6),
                moe_num_shared_experts=("shared_experts", 2),
                moe_layer_start_index=("first_dense", 1),
            ),
            numbers=eps(1e-5) | BALANCE,
            flags={"tie_word_embeddings": ("tied", True)},
            theta=500_000.0,
            choices=ACTIVATION,
            only={"use_bias": (False,), "moe_layer_interval": (1,)},
            harmless={"moe_norm_min": (1e-12, None), "moe_use_aux_free": (True, None), "moe_gate": ("topk", None)},
            ignored=("moe_capacity", "num_nextn_predict_layers"),  # of training, and of guessing several tokens at once
            keys=("moe_layer_end_index",),
            read=_read,
            fixed={"attention_bias": False},
            written={"pad_token_id": None},
        )
    }
    model: ClassVar[str] = "zoo.models.mixture.Mixture"

    dense_mlp_dim: int = 12_288
    first_dense: int = 1
    shared_experts: int = 2
    balance_weight: float = 0.001

    def problems(self) -> list[str]:
        """Say what is wrong with the family's own fields."""
        biases = ["attention_bias=True is of ERNIE 4.5 without experts"] if self.attention_bias else []
        return super().problems() + self.router_problems() + biases

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension letter that a parameter can have."""
        return super().dims | {"G": 1}

    @property
    def sigmoid_router(self) -> bool:
        """Whether each expert's probability is its own."""
        return False

    @property
    def chosen_by_bias(self) -> bool:
        """Whether a bias takes part in choosing experts, and not in weighing them."""
        return True

    @property
    def beside(self) -> tuple[str, ...]:
        """The beginnings of the names of a model that guesses several tokens at once."""
        return ("model.mtp_",)

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        return self.with_ends(self.grouped_rows(self.attention_rows(), choice=_CHOICE))
