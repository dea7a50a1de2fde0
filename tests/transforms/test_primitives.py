"""Every primitive that there is has a decision: a rule, a body in its place, or a refusal with its reason."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

from tests.helpers import equations
from transforms import TileError, tile
from transforms.tiling import primitives
from transforms.tiling.ir.graph import Node, Value
from transforms.tiling.ir.obstacles import Complete, Refusal
from transforms.tiling.ir.placement import Partial, Tiled
from transforms.tiling.primitives import CALLS, CUSTOM_CALLS, REMAT, SOLVE
from transforms.tiling.rules import RULES, push_completed, push_refused

# Modules that define primitives which no function of `jax.lax` uses, and the harvest, in a fresh process: primitives
# that tests and installed libraries define are theirs.
HARVEST = """
import gc, importlib, json
import jax, jax.extend.core.primitives as extend
from jax.extend.core import Primitive
for name in '''checkify custom_partitioning export hijax io_callback jet layout mesh_utils ode pallas random
        scheduling_groups shard_map sparse xla_metadata'''.split():
    for module in ("jax.experimental." + name, "jax." + name):
        try:
            importlib.import_module(module)
        except ImportError:
            pass
import jax.experimental.pallas.ops.gpu
public = [v.name for m in (extend, jax.lax, jax.lax.linalg) for v in vars(m).values() if isinstance(v, Primitive)]
alive = [p.name for p in gc.get_objects() if isinstance(p, Primitive)]
print(json.dumps([sorted(set(public)), sorted(set(alive))]))
"""
LISTED = """
checkpoint closed_call composite cond core_call custom_jvp_call custom_linear_solve custom_vjp_call custom_vmap_call
debug_callback io_callback jit linear_call one_minus_square optimization_barrier pallas_call pjit pure_callback
ragged_dot_general remat remat2 reshard scan sharding_constraint shard_map while
""".split()


WORDS = set(re.findall(r"^    (\w+) {2,}\S", primitives.__doc__, re.MULTILINE))
OF_OTHER_VERSIONS = {"expand_dims", "relayout"}


def decided() -> set[str]:
    return {*RULES, *CALLS, *CUSTOM_CALLS, *REMAT, SOLVE}


def test_the_table_has_each_primitive_once_and_its_words_are_explained(harvest):
    names = [name for line in primitives.TABLE.splitlines() for name in line.partition("|")[0].split()]
    assert sorted(names) == sorted(set(names)) == sorted(primitives.PROPERTIES)
    assert {word for words in primitives.PROPERTIES.values() for word in words} == WORDS
    own = {"agreed", "chosen", "cumulative", "scan_part", "shifted", "stored"}  # the graph's, of no primitive of JAX
    unknown = set(names) - own - {*harvest[0], *harvest[1]} - decided()
    assert unknown <= OF_OTHER_VERSIONS


HOMONYMS = set("and complex copy gather max min name or slice stored tile tiled transpose agreed running".split())
TABLES = {"primitives.py", "rules", "regions", "passes", "canonical.py"}


def test_no_primitive_is_named_outside_of_rules_canonical_forms_and_passes():
    folder, named = Path(primitives.__file__).parent, {}
    known = {*primitives.PROPERTIES, *decided()}
    for path in folder.rglob("*.py"):
        if TABLES.intersection(path.relative_to(folder).parts):
            continue
        texts = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
        lists = [set(text.split()) for text in texts if isinstance(text, str)]
        named[path.name] = {word for words in lists if words <= known for word in words} - HOMONYMS
    assert len(named) > 25
    assert {k: v for k, v in named.items() if v} == {"errors.py": {"dot_general"}}  # a part of JAX's own message


@pytest.fixture(scope="module")
def harvest() -> tuple[list[str], list[str]]:
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", HARVEST], capture_output=True, text=True, check=True)
    public, alive = json.loads(run.stdout)
    return public, alive


def test_every_public_primitive_has_a_decision(harvest):
    public, _ = harvest
    assert len(public) > 150
    assert set(public) - decided() == set()


def test_every_defined_primitive_has_a_decision(harvest):
    _, alive = harvest
    assert len(alive) > 250
    assert set(alive) - decided() == set()


def test_listed_primitives_have_a_decision():
    assert set(LISTED) - decided() == set()


def transformer(w, x, y, key):
    """A little of everything that training a model traces."""

    def block(x, w):
        q, k, v = jnp.split(jnp.tanh(x @ w), 3, axis=-1)
        x = x + jax.nn.dot_product_attention(*(a[:, None, None] for a in (q, k, v)))[:, 0, 0]
        keep = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.where(keep, jax.nn.gelu(x), 0.0) * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6), x.sum()

    x, sums = jax.lax.scan(jax.checkpoint(block), x, w)
    loss = -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1).mean()
    order = jnp.argsort(x[:, 0])
    return loss + sums.mean() + jnp.linalg.norm(x[order][:2]) + jnp.cumsum(x)[-1] + jax.nn.logsumexp(x)


def test_every_primitive_of_a_traced_model_has_a_decision():
    args = (jnp.ones((2, 4, 12)), jnp.ones((5, 4)), jnp.zeros(5, int), jax.random.key(0))
    traced = [jax.make_jaxpr(f)(*args) for f in (transformer, jax.grad(transformer), jax.hessian(transformer))]
    found = {eqn.primitive.name for jaxpr in traced for eqn in equations(jaxpr)}
    assert len(found) > 40
    assert found - decided() == set()


def node(name: str) -> Node:
    """An application of a primitive to one matrix."""
    value = Value(jax.typeof(jnp.ones((4, 3))))
    source = jax.make_jaxpr(jnp.sin)(1.0).eqns[0].source_info
    return Node(Primitive(name), {}, [value], [value], source, None, None)


@pytest.mark.parametrize("name", sorted(name for name, rule in RULES.items() if rule.push is push_refused))
def test_refusal_says_why(name):
    refusal = RULES[name].push(node(name), (Tiled(0),))
    assert isinstance(refusal, Refusal)
    assert f"cannot tile `{name}`" in refusal.message
    assert f"it {RULES[name].reason}.\n  operands: float32[4,3] Tiled(dim=0)." in refusal.message
    assert isinstance(RULES[name].push(node(name), (Partial("sum"),)), Complete)


@pytest.mark.parametrize("name", sorted(name for name, rule in RULES.items() if rule.push is push_completed))
def test_primitive_that_runs_on_whole_operands_says_why(name):
    asked = RULES[name].push(node(name), (Tiled(0),))
    assert isinstance(asked, Complete)
    assert (asked.operands, asked.reason) == ([0], RULES[name].reason)


def test_unknown_primitive_is_refused():
    unknown = Primitive("unknown")
    unknown.def_abstract_eval(lambda x: x)
    with pytest.raises(TileError, match=r"cannot tile `unknown` at .*: there is no rule for this primitive yet"):
        tile(unknown.bind, 0, 2).plan(jnp.ones(4))


@pytest.mark.parametrize("whole", [True, False])
def test_mutable_array_is_refused(whole):
    def fn(x, w):
        total = jax.new_ref(w if whole else x)
        total[...] += 1.0
        return x * total[...]

    with pytest.raises(TileError, match=r"cannot tile `new_ref` at .*test_primitives\.py.*mutable array"):
        tile(fn, (0, None), 2)(jnp.ones(4), jnp.ones(()))


def test_callback_of_a_small_array_runs_on_the_whole():
    seen = []

    def rank(x):
        seen.append(x.shape)
        return x.argsort().argsort().astype("float32")

    def fn(x):
        score = jnp.tanh(x).sum(1)
        return jax.pure_callback(rank, jax.ShapeDtypeStruct((6,), jnp.float32), score) * score

    x = jnp.cos(jnp.arange(18.0)).reshape(6, 3)
    assert jnp.allclose(tile(fn, 0, 3)(x), fn(x))
    assert set(seen) == {(6,)}
    with pytest.raises(TileError, match="it is a function of whole arrays that JAX cannot look into, so its operand"):
        tile(fn, 0, 3, gather="none")(x)
