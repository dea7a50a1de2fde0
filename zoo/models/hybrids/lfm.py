"""LFM 2 (https://arxiv.org/abs/2511.23404): short convolutions between two gates, and attention; each before an MLP, or
a mixture of experts.

Dimensions: `B` batch `S` sequence `D` embed `V` vocab `N` query heads `K` kv heads `H` head size `c` channels of the
convolution `I` its taps `G` one.
"""

from typing import Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Float

from transforms.sharding import uncut
from zoo.families.llamas.lfm import ConvLike, LfmConfig, LfmMoeConfig
from zoo.models import llama, mixture
from zoo.models.decoder import Decoder
from zoo.models.forward import Aux, LayerPass
from zoo.models.hybrids.shared import Attention, Layer, convolved, convolved_one
from zoo.models.layers import linear
from zoo.quantised import AbstractMatrix


class Convolution(Layer):
    """Layers of convolutions."""

    before: Float[Array, "*L D c"] | AbstractMatrix
    behind: Float[Array, "*L D c"] | AbstractMatrix
    value: Float[Array, "*L D c"] | AbstractMatrix
    taps: Float[Array, "*L c G I"]
    o: Float[Array, "*L G c D"] | AbstractMatrix
    o_bias: None = None

    def __call__(
        self, x: Float[Array, "B S D"], config: ConvLike, told: LayerPass
    ) -> tuple[Float[Array, "B S D"], Aux]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""

        def project(x):
            h = llama.normalised(x, self.attn_norm, config)
            weights = (weight.astype(x.dtype) for weight in (self.before, self.value, self.behind))
            before, value, behind = (linear("bsd,dc->bsc", h, weight) for weight in weights)
            return before * value, behind

        channels, behind = told.ops.tokens(project, (1,))(x)
        channels, taps = uncut(channels, 1), self.taps[:, 0].astype(x.dtype)  # a convolution goes through all tokens
        if told.past is None:
            seen, pool = convolved(channels, taps, told.positions), None
        else:
            whole = uncut(taps, 0)
            seen, pool = told.recurrence(lambda state, own: _token(state, own, whole), channels)
        return self.feed_forward(x, (behind * seen)[:, :, None], config, told, Aux(pool))


def _token(state: dict[str, Array], channels: Float[Array, " c"], taps: Float[Array, "c I"]) -> Any:
    """Return the state behind one token, and what it sees."""
    inputs, seen = convolved_one(state["inputs"], channels, taps)
    return {"inputs": inputs}, seen


class Lfm(Decoder):
    """An LFM 2."""

    blocks: ClassVar = {"layers": Attention, "conv": Convolution}
    embed: Float[Array, "V D"]
    layers: Attention
    conv: Convolution
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | AbstractMatrix | None
    config: LfmConfig = eqx.field(static=True)


class LfmMoe(mixture.AbstractMixture):
    """An LFM 2 that is a mixture of experts; the first layers have one MLP. Routing drops no token."""

    blocks: ClassVar = {"layers": Attention, "conv": Convolution, "dense": Attention, "dense_conv": Convolution}
    embed: Float[Array, "V D"]
    layers: Attention | None
    conv: Convolution | None
    dense: Attention | None
    dense_conv: Convolution | None
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | AbstractMatrix | None
    config: LfmMoeConfig = eqx.field(static=True)
