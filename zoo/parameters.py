"""One row per parameter: its leaf in the model, its dimensions, and the Hugging Face tensor that holds it.

Everything that must agree about parameters reads these rows: initialisation, loading, saving, counting and sharding.
Here are those that several families have; a family's file puts its own together. Free of JAX.

Dimensions: `V` vocab `D` embed `F` mlp hidden `N` query heads `K` kv heads `H` head size `L` layers `E` experts `P` mlp
hidden of the layers without experts `U` hidden of a shared expert `G` its gate `M` learned positions; further
letters are a family's own. A small letter is the same dimension of layers where it has another size.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Row:
    """Where one parameter lives on both sides.

    Attributes:
        leaf: dotted path in the model; leaves of layers are stacked over a leading `L`, those of experts over `L E`.
        tensor: the tensor's name on disk, with `{}` for the layer, and a second one for the expert, or for the head.
        pattern: its dimensions, `on disk -> in the model (one layer)`; `(N H)` is one dimension on disk, and a letter
            that the model has not is one long.
        fan_in: letters whose product is the number of inputs that each output sums; empty for norms and biases.
        gain: standard deviation at the start, times the square root of the fan-in.
        start: what every element starts at where there is no fan-in.
        layers: the layers that have it; None is all of them.
        fused: where one tensor holds several parameters side by side, the letters of that dimension, one for each of
            them: of `NKK` the first part is the first `N` of them and the others `K` each.
        part: which of those this is.
        alternate: the parts take turns, one by one.
        wide: it stays in float32, whatever the others are in.
        times: how often a token is multiplied by it.
        each: the letter of what a second `{}` stands for.
    """

    leaf: str
    tensor: str
    pattern: str
    fan_in: str = ""
    gain: float = 1.0
    start: float = 0.0
    layers: tuple[int, ...] | None = None
    fused: str = ""
    part: int = 0
    alternate: bool = False
    wide: bool = False
    times: int = 1
    each: str = "E"

    @property
    def stack(self) -> tuple[str, ...]:
        """The leading dimensions in the model, each tensor on disk being at one index of them: `()`, `L` or `L E`."""
        return ("L", self.each)[: self.tensor.count("{}")]

    @property
    def looked_up(self) -> bool:
        """Whether it is a table, of which tokens take rows; other matrices multiply."""
        return self.leaf in ("embed", "positions", "inputs")

    @property
    def disk(self) -> tuple[str, ...]:
        """The dimensions on disk, each a string of letters: `("NH", "D")`."""
        groups, inside = [], False
        for token in self.pattern.split(" -> ")[0].replace("(", " ( ").replace(")", " ) ").split():
            if token in "()":
                inside = token == "("
                groups += [""] if inside else []
            elif inside:
                groups[-1] += token
            else:
                groups.append(token)
        return tuple(groups)

    @property
    def kept(self) -> str:
        """The letters on disk that the model has too; others are one long."""
        return "".join(letter for group in self.disk for letter in group if letter in self.inner)

    @property
    def letters(self) -> tuple[str, ...]:
        """The leaf's dimensions in the model, the stacked ones included: `("L", "D", "N", "H")`."""
        return self.stack + tuple(self.pattern.split(" -> ")[1].split())

    def shape(self, dims: dict[str, int]) -> tuple[int, ...]:
        """The leaf's shape in the model."""
        dims = dims if self.layers is None else dims | {"L": len(self.layers)}
        return tuple(dims[letter] for letter in self.letters)

    def disk_shape(self, dims: dict[str, int]) -> tuple[int, ...]:
        """The shape of one tensor on disk, with all that it holds."""
        whole = self.disk_dims(dims)
        return tuple(math.prod(whole[letter] for letter in group) for group in self.disk)

    @property
    def inner(self) -> tuple[str, ...]:
        """The leaf's dimensions in the model, of one tensor."""
        return self.letters[len(self.stack) :]

    @property
    def lead(self) -> tuple[str, ...]:
        """The leading dimensions in the model that tell matrices apart: the stack, and experts that one tensor has."""
        return self.stack + ("E",) * (self.inner[0] == "E" and len(self.inner) > 1)

    def disk_dims(self, dims: dict[str, int]) -> dict[str, int]:
        """The size of each dimension letter on disk, where one holds several parameters."""
        if not self.fused:
            return dims
        return dims | {self.fused[self.part]: sum(dims[letter] for letter in self.fused)}

    def slice_on_disk(self, letter: str, start: int, stop: int, dims: dict[str, int]) -> slice:
        """Where a slice of a dimension lies on disk, where one holds several parameters."""
        if not self.fused or letter != self.fused[self.part]:
            return slice(start, stop)
        if self.alternate:
            step = len(self.fused)
            return slice(start * step + self.part, stop * step, step)
        before = sum(dims[letter] for letter in self.fused[: self.part])
        return slice(before + start, before + stop)

    def split(self, tensor: Any, dims: dict[str, int]) -> Any:
        """Return a tensor from disk, of NumPy's or JAX's, with a dimension per letter; of several parameters this."""
        letters, whole = "".join(self.disk), self.disk_dims(dims)
        own = tuple(
            self.slice_on_disk(letter, 0, dims[letter], dims) if letter in self.inner else 0 for letter in letters
        )
        return tensor.reshape([whole[letter] for letter in letters])[own if self.fused or letters != self.kept else ()]

    def turned(self, tensor: Any, dims: dict[str, int]) -> Any:
        """Return a tensor from disk, of NumPy's or JAX's, as it is in the model; of several parameters this one."""
        return self.split(tensor, dims).transpose([self.kept.index(letter) for letter in self.inner])

    def write(self, piece: Any, tensor: Any, dims: dict[str, int]) -> None:
        """Write one layer's part of the leaf into a tensor as it is on disk, of NumPy's and contiguous."""
        self.split(tensor, dims)[...] = piece.transpose([self.inner.index(letter) for letter in self.kept])

    def std(self, dims: dict[str, int]) -> float:
        """The standard deviation that the leaf starts with."""
        return self.gain / math.sqrt(math.prod(dims[letter] for letter in self.fan_in)) if self.fan_in else 0.0

    def tensors(self, dims: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield every tensor that the leaf is made of, in order, and where in the leaf's stack it stands."""
        layers = range(dims["L"]) if self.layers is None else self.layers
        spots = [enumerate(layers), enumerate(range(dims.get(self.each, 1)))][: len(self.stack)]
        for spot in itertools.product(*spots):
            yield self.tensor.format(*(number for _, number in spot)), tuple(index for index, _ in spot)


LAYER = "model.layers.{}."
ATTENTION = (
    Row("layers.attn_norm", LAYER + "input_layernorm.weight", "D -> D"),
    Row("layers.q", LAYER + "self_attn.q_proj.weight", "(N H) D -> D N H", "D"),
    Row("layers.k", LAYER + "self_attn.k_proj.weight", "(K H) D -> D K H", "D"),
    Row("layers.v", LAYER + "self_attn.v_proj.weight", "(K H) D -> D K H", "D"),
    Row("layers.o", LAYER + "self_attn.o_proj.weight", "D (N H) -> N H D", "NH"),
)
MLP = (
    Row("layers.gate", LAYER + "mlp.gate_proj.weight", "F D -> D F", "D"),
    Row("layers.up", LAYER + "mlp.up_proj.weight", "F D -> D F", "D"),
    Row("layers.down", LAYER + "mlp.down_proj.weight", "D F -> F D", "F"),
)
QK_NORMS = (
    Row("layers.q_norm", LAYER + "self_attn.q_norm.weight", "H -> H"),
    Row("layers.k_norm", LAYER + "self_attn.k_norm.weight", "H -> H"),
)
MLP_BIASES = (
    Row("layers.gate_bias", LAYER + "mlp.gate_proj.bias", "F -> F"),
    Row("layers.up_bias", LAYER + "mlp.up_proj.bias", "F -> F"),
    Row("layers.down_bias", LAYER + "mlp.down_proj.bias", "D -> D"),
)
BIASES = {
    "q": Row("layers.q_bias", LAYER + "self_attn.q_proj.bias", "(N H) -> N H"),
    "k": Row("layers.k_bias", LAYER + "self_attn.k_proj.bias", "(K H) -> K H"),
    "v": Row("layers.v_bias", LAYER + "self_attn.v_proj.bias", "(K H) -> K H"),
    "o": Row("layers.o_bias", LAYER + "self_attn.o_proj.bias", "D -> D"),
}
ENDS = (
    # Where the table is also the head, a small gain makes every first logit small, so that the first loss is ln V.
    Row("embed", "model.embed_tokens.weight", "V D -> V D", "D", gain=0.1),
    Row("final_norm", "model.norm.weight", "D -> D"),
)
HEAD = Row("head", "lm_head.weight", "V D -> V D", "D", gain=0.1)
# Hugging Face's `post_attention_layernorm` is the norm after attention in Gemma 2 and 3, elsewhere that before the MLP.
MLP_NORM = Row("layers.mlp_norm", LAYER + "post_attention_layernorm.weight", "D -> D")


def stacked(tables: Mapping[str, tuple[Row, ...]], stacks: Sequence[str]) -> tuple[Row, ...]:
    """Return the rows of layers of several kinds, each kind's in a stack of its own.

    Args:
        tables: each stack's rows, whatever stack they name.
        stacks: of each layer, which stack it is in.
    """
    return tuple(
        replace(
            row,
            leaf=f"{stack}.{row.leaf.partition('.')[2]}",
            layers=tuple(i for i, one in enumerate(stacks) if one == stack),
        )
        for stack, table in tables.items()
        if stack in stacks
        for row in table
    )
