"""OPT (https://arxiv.org/abs/2205.01068): GPT-2 with relu, its learned positions from the third row on. Free of JAX."""

from dataclasses import dataclass, replace
from typing import ClassVar

from zoo.config import Rope
from zoo.dialect import ACTIVATIONS, Dialect
from zoo.families.gpts.gpt import GPTLike, whole_heads
from zoo.parameters import ATTENTION, BIASES, HEAD, LAYER, Row

_LAYER = "model.decoder.layers.{}."
_ROWS = (
    Row("embed", "model.decoder.embed_tokens.weight", "V D -> V D", "D", gain=0.3),
    Row("positions", "model.decoder.embed_positions.weight", "M D -> M D", "D", gain=0.1),
    Row("final_norm", "model.decoder.final_layer_norm.weight", "D -> D"),
    Row("final_norm_bias", "model.decoder.final_layer_norm.bias", "D -> D"),
    Row("layers.attn_norm", _LAYER + "self_attn_layer_norm.weight", "D -> D"),
    Row("layers.attn_norm_bias", _LAYER + "self_attn_layer_norm.bias", "D -> D"),
    Row("layers.mlp_norm", _LAYER + "final_layer_norm.weight", "D -> D"),
    Row("layers.mlp_norm_bias", _LAYER + "final_layer_norm.bias", "D -> D"),
    Row("layers.up", _LAYER + "fc1.weight", "F D -> D F", "D"),
    Row("layers.down", _LAYER + "fc2.weight", "D F -> F D", "F"),
)
_MLP_BIASES = (
    Row("layers.up_bias", _LAYER + "fc1.bias", "F -> F"),
    Row("layers.down_bias", _LAYER + "fc2.bias", "D -> D"),
)


@dataclass(frozen=True, kw_only=True)
class OPTConfig(GPTLike):
    """OPT, but for the 350M, whose norms are behind attention and MLP.

    Attributes:
        biases: biases after the projections of attention and MLP.
    """

    dialects: ClassVar = {
        "opt": Dialect(
            architecture="OPTForCausalLM",
            sizes={
                "vocab_size": ("vocab_size", 50_272),
                "num_hidden_layers": ("num_layers", 12),
                "hidden_size": ("embed_dim", 768),
                "ffn_dim": ("mlp_dim", 3072),
                "num_attention_heads": ("num_heads", 12),
                "max_position_embeddings": ("context_length", 2048),
            },
            derived=whole_heads,
            numbers={},
            flags={"tie_word_embeddings": ("tied", True), "enable_bias": ("biases", True)},
            choices={"activation_function": ("activation", {"relu": "relu", **ACTIVATIONS})},
            rope="absent",
            only={
                "do_layer_norm_before": (True,),
                "layer_norm_elementwise_affine": (True,),
                "_remove_final_layer_norm": (False,),
            },
            # Galactica's, which transformers does not read.
            harmless={"learned_embeddings": (True,), "scale_embeddings": (False,)},
            keys=("word_embed_proj_dim",),
            read=lambda read, _: _not_projected(read),
            write=lambda config: {"word_embed_proj_dim": config.embed_dim},
            ignored=("dropout", "activation_dropout", "layerdrop", "init_std", "output_projection"),
            fixed={"norm_eps": 1e-5},
            written={"pad_token_id": None},  # or transformers takes one, of which gradients are left out
        )
    }

    activation: str = "relu"
    biases: bool = True

    @property
    def position_offset(self) -> int:
        """The row of the learned positions that is the first token's."""
        return 2

    @property
    def layer_ropes(self) -> tuple[Rope | None, ...]:
        """How each layer's positions turn: they do not."""
        return (None,) * self.num_layers

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head turn by its position: none."""
        return 0

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of every parameter that the model has."""
        moved = lambda row: replace(row, tensor=row.tensor.replace(LAYER, _LAYER).replace("o_proj", "out_proj"))
        projections = ATTENTION[1:] + (tuple(BIASES.values()) if self.biases else ())
        own = _MLP_BIASES if self.biases else ()
        return self.started((*_ROWS, *map(moved, projections), *own, *(() if self.tied else (HEAD,))))


def _not_projected(read) -> dict:
    width = read.raw.get("hidden_size", 768)
    if read.raw.get("word_embed_proj_dim") not in (None, width):
        read.problems.append(
            f"`word_embed_proj_dim`={read.raw['word_embed_proj_dim']!r} is not supported, only {width}"
        )
    return {}
