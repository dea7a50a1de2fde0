"""The last step of a model by itself, for losses of one's own: `head(model)(hidden)` are its logits.

`D` embed `V` vocab.
"""

from typing import Any

import equinox as eqx
from jaxtyping import Array, Float

from zoo.models.layers import linear, softcap
from zoo.quantised import AbstractMatrix


class Head(eqx.Module):
    """What makes logits of hidden states; a pytree, differentiable in its matrix, whole for every tile.

    Attributes:
        matrix: a row for each word; of a tied model the embedding table, of which it is no copy; with an
            adapter on it, what it is with its addition.
        softcap: logits become `c * tanh(logit / c)`; None leaves them alone.
        scale: multiplies the logits, before the cap; None leaves them alone.
    """

    matrix: Float[Array, "V D"] | AbstractMatrix
    softcap: float | None = eqx.field(static=True, default=None)
    scale: float | None = eqx.field(static=True, default=None)

    def __call__(self, hidden: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
        """Return the logits in float32; the product's operands are in the dtype of `hidden`."""
        logits = linear("...d,vd->...v", hidden, self.matrix.astype(hidden.dtype), wide=True)
        return softcap(logits if self.scale is None else logits * self.scale, self.softcap)


def head(model: Any) -> Head:
    """Return the head of a model of the zoo: `head(model)(model.hidden(ids))` is `model(ids)`.

    A loss that takes it can be tiled: `tile(loss, axis=(None, 1, 1), n=8)(zoo.head(model), hidden, labels)`. Its
    gradients reach the model's own matrix.
    """
    return model.output()
