"""Gemma 4 (https://ai.google.dev/gemma/docs/core), the text part.

Dimensions: `B` batch `S` sequence `D` embed `V` vocab `F` mlp hidden, of a mixture of an expert `P` of the MLP beside
experts `N` query heads `K` kv heads `H` head size `L` layers `E` experts `G` one `W` a layer's own input `Y` those of
all layers `U` rows of their table. `K`, `H`, `F` and `P` differ between stacks: of layers that see all keys they are
`k` and `h`, and `f` where an MLP is twice as wide.
"""

from dataclasses import replace
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from transforms.sharding import constrain
from zoo.families.gemmas.gemma4 import LAYERS, SHARING, SHARING_WHOLE, WHOLE, Gemma4Config, Gemma4MoeConfig
from zoo.models.attention.groups import Seen
from zoo.models.decoder import Decoder
from zoo.models.forward import Aux, LayerPass
from zoo.models.gemmas.gemma3n import layer_inputs
from zoo.models.layers import accumulator, gelu, linear, rms_norm
from zoo.models.mixture import balance_loss
from zoo.models.mixtures.experts import experts, weighed
from zoo.quantised import AbstractMatrix

AnyGemma4 = Gemma4Config | Gemma4MoeConfig
Pair = tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]


class Handed(eqx.Module):
    """The last keys and values of local layers and of global ones, which those that have none attend to."""

    local: Pair
    whole: tuple[Float[Array, "B S k h"], Float[Array, "B S k h"]]

    def after(self, of_all: bool, kv: Pair) -> "Handed":
        """Return what is handed on behind a layer with these keys and values."""
        return Handed(self.local, kv) if of_all else Handed(kv, self.whole)

    def of(self, of_all: bool) -> Pair:
        """Return the keys and values for a layer."""
        return self.whole if of_all else self.local


class Block(eqx.Module):
    """The weights of all layers of a stack, over a leading `L`; inside the scan, one layer's.

    What shares keys and values has no `k`; where keys are values there is no `v`. The MLP is `gate`, `up` and `down`;
    of a mixture these are the experts', and the MLP's are `shared_gate` and so on.
    """

    of_all: ClassVar[bool] = False
    attn_norm: Float[Array, "*L D"]
    q: Float[Array, "*L D N H"] | AbstractMatrix
    o: Float[Array, "*L N H D"] | AbstractMatrix
    q_norm: Float[Array, "*L H"]
    post_attn_norm: Float[Array, "*L D"]
    mlp_norm: Float[Array, "*L D"]
    gate: Float[Array, "*L D F"] | Float[Array, "*L E D F"] | AbstractMatrix
    up: Float[Array, "*L D F"] | Float[Array, "*L E D F"] | AbstractMatrix
    down: Float[Array, "*L F D"] | Float[Array, "*L E F D"] | AbstractMatrix
    post_mlp_norm: Float[Array, "*L D"]
    scale: Float[Array, "*L G"]
    k: Float[Array, "*L D K H"] | AbstractMatrix | None = None
    v: Float[Array, "*L D K H"] | AbstractMatrix | None = None
    k_norm: Float[Array, "*L H"] | None = None
    input_gate: Float[Array, "*L D W"] | AbstractMatrix | None = None
    input_up: Float[Array, "*L W D"] | AbstractMatrix | None = None
    input_norm: Float[Array, "*L D"] | None = None
    shared_gate: Float[Array, "*L D P"] | AbstractMatrix | None = None
    shared_up: Float[Array, "*L D P"] | AbstractMatrix | None = None
    shared_down: Float[Array, "*L P D"] | AbstractMatrix | None = None
    post_shared_norm: Float[Array, "*L D"] | None = None
    router: Float[Array, "*L D E"] | AbstractMatrix | None = None
    router_scale: Float[Array, "*L D"] | None = None
    expert_scale: Float[Array, "*L E"] | None = None
    expert_norm: Float[Array, "*L D"] | None = None
    post_expert_norm: Float[Array, "*L D"] | None = None

    def __call__(
        self, x: Float[Array, "B S D"], config: AnyGemma4, told: LayerPass
    ) -> tuple[Float[Array, "B S D"], Aux]:
        """Return what one layer makes of `x`, in the dtype of `x`; weights are cast here, and only here."""
        seen, aux = self.attended(x, config, told)
        if self.router is not None:
            x, routed = self.mixed(x, seen, config, told)
            return x, replace(aux, routed=routed)

        def rest(x, seen, *inputs):
            x = self.with_attention(x, seen, config)
            return self.ended(x, self.fed(x, (self.gate, self.up, self.down), config, told), inputs, config)

        return told.behind(rest, x, seen, *() if told.own is None else (told.own,)), aux

    def attended(
        self, x: Float[Array, "B S D"], config: AnyGemma4, told: LayerPass
    ) -> tuple[Float[Array, "B S N H"] | Seen, Aux]:
        """Return what heads see, of the layer's own keys and values or of those that it is handed."""
        weights = {name: getattr(self, name) for name in ("q", "k", "v") if getattr(self, name) is not None}

        def project(x, weights):
            h = _norm(x, self.attn_norm, config)
            made = {name: linear("bsd,dnh->bsnh", h, weight.astype(x.dtype)) for name, weight in weights.items()}
            q = told.rotate(_norm(made["q"], self.q_norm, config))
            if "k" not in made:
                return (q,)
            k, v = made["k"], made.get("v", made["k"])
            return q, told.rotate(_norm(k, self.k_norm, config)), _norm(v, None, config)

        if not config.sharing_layers:
            return told.attend(project, x, weights, scale=config.query_scale)
        q, *own = told.ops.tokens(project, (1, None))(x, weights)
        own = tuple(constrain(part, "B S K H") for part in own)
        handed = told.handed.after(self.of_all, own) if own else told.handed
        seen, pool = told.attention(q, *handed.of(self.of_all), scale=config.query_scale)
        return seen, Aux(pool, handed=handed)

    def mixed(
        self, x: Float[Array, "B S D"], seen: Float[Array, "B S N H"] | Seen, config: Any, told: LayerPass
    ) -> tuple[Float[Array, "B S D"], Float[Array, "2 E"]]:
        """Return what a layer with experts beside its MLP makes of what its attention has seen, and how it routed."""

        def between(x, seen):
            x = self.with_attention(x, seen, config)
            assert self.router_scale is not None
            read = _norm(x, self.router_scale.astype(accumulator(x.dtype)) * config.embed_dim**-0.5, config)
            return x, _norm(x, self.expert_norm, config), read

        def rest(x, out, *inputs):
            h = self.fed(x, (self.shared_gate, self.shared_up, self.shared_down), config, told)
            h = _norm(h, self.post_shared_norm, config) + _norm(out, self.post_expert_norm, config)
            return self.ended(x, h, inputs, config)

        x, h, read = told.behind(between, x, seen)
        run = experts if told.ops.experts is None else told.ops.experts
        cast: Any = lambda weight: weight.astype(x.dtype)
        weights = map(cast, (self.router, self.gate, self.up, self.down))
        how: dict[str, Any] = {"normalise": True, "select": weighed, "combine": lambda gate, up: gelu(gate) * up}
        how |= {"biases": (self.expert_scale, None, None, None), "routed_by": read}
        out, routed = run(h, *weights, config.experts_per_token, **how)
        inputs = () if told.own is None else (told.own,)
        return told.ops.tokens(rest, (1, 1, *(1,) * len(inputs)))(x, out, *inputs), routed

    def with_attention(
        self, x: Float[Array, "B S D"], seen: Float[Array, "B S N H"], config: AnyGemma4
    ) -> Float[Array, "B S D"]:
        """Return the residual stream behind attention."""
        h = linear("bsnw,nwd->bsd", seen, self.o.astype(x.dtype))
        return x + checkpoint_name(_norm(h, self.post_attn_norm, config), "attn_out")

    def fed(
        self, x: Float[Array, "B S D"], weights: tuple[Any, ...], config: AnyGemma4, told: LayerPass
    ) -> Float[Array, "B S D"]:
        """Return what an MLP makes of the residual stream."""
        cast = (weight.astype(x.dtype) for weight in weights)
        return told.ops.mlp(_norm(x, self.mlp_norm, config), *cast, activation=gelu)

    def ended(
        self, x: Float[Array, "B S D"], h: Float[Array, "B S D"], inputs: tuple[Array, ...], config: AnyGemma4
    ) -> Float[Array, "B S D"]:
        """Return the residual stream behind the layer, given what its MLP made, and the layer's own input if any."""
        cast: Any = lambda weight: weight.astype(x.dtype)
        x = x + checkpoint_name(_norm(h, self.post_mlp_norm, config), "mlp_out")
        for own in inputs:
            h = gelu(linear("bsd,dw->bsw", x, cast(self.input_gate))) * own
            x = x + _norm(linear("bsw,wd->bsd", h, cast(self.input_up)), self.input_norm, config)
        return x * jax.lax.stop_gradient(self.scale).astype(x.dtype)  # no parameter in transformers: it does not learn


class Whole(Block):
    """The layers that see all keys."""

    of_all: ClassVar[bool] = True


def _norm(x: Float[Array, "*b D"], weight: Float[Array, " D"] | None, config: AnyGemma4) -> Float[Array, "*b D"]:
    """Return `x` over its root mean square, times a weight if there is one."""
    weight = jnp.ones(x.shape[-1], x.dtype) if weight is None else weight
    return rms_norm(x, weight, config.norm_eps, offset=0.0)


class Gemma4(Decoder):
    """A Gemma 4, whose table is also the head."""

    blocks: ClassVar = {LAYERS: Block, WHOLE: Whole, SHARING: Block, SHARING_WHOLE: Whole}
    embed: Float[Array, "V D"]
    inputs: Float[Array, "U Y"] | None
    inputs_down: Float[Array, "Y D"] | AbstractMatrix | None
    inputs_norm: Float[Array, " W"] | None
    layers: Block
    whole: Whole | None
    sharing: Block | None
    sharing_whole: Whole | None
    final_norm: Float[Array, " D"]
    config: AnyGemma4 = eqx.field(static=True)

    def beside(
        self, tokens: Integer[Array, "B S"], x: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "L B S W"] | None, Handed | None]:
        """Return what each layer has of its own, and the keys and values that are handed on, none yet."""
        config, own, handed = self.config, None, None
        if self.inputs is not None and self.inputs_down is not None and self.inputs_norm is not None:
            own = layer_inputs(config, tokens, x, self.inputs, self.inputs_down, self.inputs_norm)
        if config.sharing_layers:
            shapes = {local: shape[:2] for local, shape in zip(config.local, config.layer_heads, strict=True)}

            def none(local: bool) -> Pair:
                zeros = constrain(jnp.zeros((*tokens.shape, *shapes.get(local, (1, 1))), x.dtype), "B S K H")
                return zeros, zeros

            handed = Handed(none(True), none(False))
        return own, handed

    def balance(self, routed: list[Float[Array, "2 E"]]) -> Float[Array, ""] | None:
        """Return the balance loss of a mixture, given how each run's blocks routed tokens."""
        return balance_loss(routed, getattr(self.config, "experts_per_token", 0)) if routed else None
