"""A loss, an optimizer and data that this project has never seen, by name: tiled, resumed and recorded like its own."""

import re
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from experiments import configs
from experiments.commandline import schema
from experiments.commandline.console import CommandError
from experiments.data import batches
from experiments.planning.resolve import resolve
from experiments.runtime import hardware, meshes, own
from experiments.step import objectives
from experiments.step.build import Programs
from tests.experiments.runs import MICRO, rows
from transforms.step import State, compile_step, make_train_step
from zoo.models.head import head

SIZES = dict(vocab_size=32, num_layers=1, embed_dim=8, mlp_dim=8, num_heads=2, num_kv_heads=1, head_dim=4)
WRITTEN = """
import jax, jax.numpy as jnp, optax

def focal(logits, labels, mask, gamma=2.0):
    logs = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(logs, labels[..., None], -1)[..., 0]
    losses = -((1 - jnp.exp(picked)) ** gamma) * picked
    return (losses * mask).sum() / mask.sum(), {"cross_entropy": -picked, "sure": jnp.exp(picked)}

def of_sequences(logits, labels, mask):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels) * mask
    return (losses.sum(-1) / jnp.maximum(mask.sum(-1), 1)).mean()

def each(hidden, head, labels):
    return optax.softmax_cross_entropy_with_integer_labels(head(hidden), labels)

def preferred(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta=0.1):
    margin = beta * (chosen_logps - ref_chosen_logps) - beta * (rejected_logps - ref_rejected_logps)
    return -jax.nn.log_sigmoid(margin), {"margin": margin, "accuracy": jnp.sign(margin) / 2 + 0.5}

def shorter(logits, mask, chosen_logps, rejected_logps, chosen_tokens, rejected_tokens):
    mean = chosen_logps / chosen_tokens - rejected_logps / rejected_tokens
    return -jax.nn.log_sigmoid(mean).mean(), {"likely": jax.nn.log_softmax(logits).max(-1)}

def frozen(ref_chosen_logps, ref_rejected_logps):
    return ref_chosen_logps - ref_rejected_logps

def wrong_shape(logits):
    return logits

def no_number(logits):
    return "low"

def greedy(logits, teacher):
    return logits.sum()

def apart(logits):
    return jnp.float32(3.0)

def signs(learning_rate, b1=0.9):
    signs = optax.stateless(lambda grads, _: jax.tree.map(jnp.sign, grads))
    return optax.chain(optax.trace(b1), signs, optax.scale_by_learning_rate(learning_rate))

def nothing(learning_rate):
    return None

def texts(count):
    for i in range(count):
        yield f"the document number {i} " * 9

def ids(vocab_size):
    return [[(i * j) % vocab_size for j in range(40)] for i in range(60)]

def made(seq_len):
    return [{"tokens": [i % 9] * (seq_len + 1)} for i in range(40)]
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A module in the current folder, under a name that no other test has."""
    name = f"written_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(WRITTEN)
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


def test_a_plan_trains_nothing(start, tmp_path, capsys):
    assert start("plan=true", "run=planned", "tiling.n=4") == 0
    out = capsys.readouterr().out
    assert "compiled step" in out and "step 1" not in out
    assert not (tmp_path / "planned").exists()


def losses(folder):
    return [row["loss"] for row in rows(folder)[1:]]


def test_a_loss_of_each_sequence_is_the_same_however_a_step_is_cut(start, written, tmp_path):
    words = [f"objective={written}:of_sequences", "data=chat", "seq_len=64"]
    cuts = ("tiling.n=none", "tiling.n=4", "tiling.batch=2 tiling.n=3")
    for number, cut in enumerate(cuts):
        assert start(*words, f"run=cut{number}", *cut.split()) == 0
    whole, *others = (losses(tmp_path / f"cut{number}") for number in range(len(cuts)))
    for found in others:
        np.testing.assert_allclose(found, whole, rtol=2e-6)


CHANGED = "changed  objective.fn: the file that the function is in is not what it was"


def test_a_loss_by_name_is_trained_tiled_recorded_and_gone_on_with(start, written, tmp_path, capsys):
    words = [f"objective={written}:focal", "objective.kwargs.gamma=1.5", "optimizer.schedule=constant"]
    assert start(*words, "run=whole", "tiling.n=none") == 0
    assert start(*words, "run=tiled", "tiling.n=4") == 0
    np.testing.assert_allclose(losses(tmp_path / "tiled"), losses(tmp_path / "whole"), rtol=2e-6)
    assert start(*words, "run=short", "tiling.n=4", "steps=2", "checkpoint.last=true") == 0
    assert start(*words, "run=short", "tiling.n=4", "steps=4") == 0
    assert losses(tmp_path / "short") == losses(tmp_path / "tiled")
    out = capsys.readouterr().out
    assert CHANGED not in out and "note: the gradient" not in out
    row = rows(tmp_path / "tiled")[-1]
    assert 0 < row["loss"] < row["cross_entropy"] and 0 < row["extra"]["sure"] < 1
    assert row["bits_per_byte"] == pytest.approx(row["cross_entropy"] / np.log(2))
    first, last = rows(tmp_path / "tiled")[0], rows(tmp_path / "tiled")[-1]
    assert first["held_out_loss"] > 5  # nats, as every run's
    # The loss itself of the same text: of a model that knows nothing yet, (1 - p) ** gamma is nearly 1.
    assert 0.9 * first["held_out_loss"] < first["held_out_objective"] < first["held_out_loss"]
    assert last["held_out_objective"] < first["held_out_objective"]


def test_a_loss_of_what_nothing_moves_is_told_once(start, written, capsys):
    assert start(f"objective={written}:apart", "run=still", "tiling.n=4") == 0
    said = "note: the gradient of step 1 is zero: if it stays so, the loss does not depend on what is trained"
    out = capsys.readouterr().out
    assert said in out and out.count("note: the gradient") == 1


def test_a_function_that_has_changed_since_is_said(start, written, tmp_path, capsys):
    words = [f"objective={written}:focal", "run=own", "optimizer.schedule=constant", "checkpoint.last=true"]
    assert start(*words, "steps=2") == 0
    file = tmp_path / f"{written}.py"
    file.write_text(file.read_text() + "\nMORE = 1\n")
    assert start(*words, "steps=3") == 0
    assert CHANGED in capsys.readouterr().out


def test_losses_of_each_token_and_a_file_by_its_path(start, written, tmp_path):
    (tmp_path / "größe (1)").mkdir()
    (tmp_path / f"{written}.py").rename(tmp_path / "größe (1)" / "my losses.py")
    assert start(f"objective={tmp_path}/größe (1)/my losses.py:each", "run=each", "tiling.n=4", "steps=3") == 0
    assert start("run=usual", "tiling.n=4", "steps=3") == 0
    np.testing.assert_allclose(losses(tmp_path / "each"), losses(tmp_path / "usual"), rtol=1e-6)
    assert rows(tmp_path / "each")[1]["bits_per_byte"] is None  # it does not say what its loss is


CUTS = [("focal", "tiling.n=4"), ("each", "tiling.n=2 tiling.lowmem=true"), ("focal", "tiling.batch=2 tiling.n=3")]


@pytest.mark.parametrize(("name", "cut"), CUTS)
def test_gradients_equal_those_of_the_uncut_loss(written, name, cut):
    from tests.experiments.test_objectives import arrays, resolved

    found = []
    for words in (["tiling.n=none"], cut.split()):
        config = resolved(f"objective={written}:{name}", *words)
        model = Programs(config).init()
        loss = Programs(config).loss
        found.append(jax.jit(jax.value_and_grad(loss, has_aux=True))(model, arrays(config)))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6)


OF_PAIRS = ["data=preference", "objective.beta=0.3"]
PAIRED = {
    "another reference": ["objective.reference={}"],
    "tiles of an adapter": ["tiling.n=3", "adapter=lora", "adapter.rank=2"],
    "tiles of micro-batches": ["tiling.n=2", "tiling.batch=3"],
}


def by_name(words, name):
    """What is said to our DPO as what is said to a loss by name, whose options are under `kwargs`."""
    return [f"objective={name}", *(word.replace("objective.beta", "objective.kwargs.beta") for word in words)]


@pytest.mark.parametrize("words", PAIRED.values(), ids=PAIRED)
def test_dpo_by_hand_is_ours(written, words, tmp_path):
    from tests.experiments.test_objectives import arrays, gradients, resolved

    if any("{}" in word for word in words):
        zoo.save(Programs(resolved("model.embed_dim=24", "seed=5")).init(), tmp_path / "other")
    words = [*OF_PAIRS, *(word.format(tmp_path / "other") for word in words)]
    ours, by_hand = resolved("objective=dpo", *words), resolved(*by_name(words, f"{written}:preferred"))
    assert by_hand.reference == ours.reference
    batch, whole = arrays(ours), [word for word in words if not word.startswith("tiling")]
    expected, actual = gradients(resolved("objective=dpo", *whole), batch), gradients(by_hand, batch)
    assert actual[0][0] != pytest.approx(np.log(2), rel=1e-6)
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6 * max(1.0, float(abs(other).max())))


def test_a_loss_of_pairs_is_measured_and_gone_on_with_as_ours(start, written, tmp_path, capsys):
    fast = ["seq_len=96", "steps=2", "tiling.n=2", "optimizer.schedule=constant", *OF_PAIRS]
    assert start("objective=dpo", "run=ours", *fast) == 0
    fast = by_name(fast, f"{written}:preferred")
    assert start(*fast, "run=mine", "steps=1", "checkpoint.last=true") == 0
    assert start(*fast, "run=mine") == 0
    keys = (
        "loss",
        "accuracy",
        "margin",
        "grad_norm",
        "extra",
        "held_out_loss",
        "held_out_accuracy",
        "held_out_objective",
    )
    ours, mine = rows(tmp_path / "ours"), rows(tmp_path / "mine")
    assert [[row[key] for key in keys] for row in (mine[0], mine[-1])] == [
        [row[key] for key in keys] for row in (ours[0], ours[-1])
    ]
    capsys.readouterr()
    assert start(f"objective={written}:shorter", "data=preference", *fast[1:4], "run=other") == 0
    out = capsys.readouterr().out
    assert re.search(r"held-out pairs before training: loss \d\.\d+$", out, re.MULTILINE)  # it tells no accuracy
    assert rows(tmp_path / "other")[-1]["extra"]["likely"] < 0


@pytest.mark.parametrize("adapter", [[], pytest.param(["adapter=lora"], marks=pytest.mark.heavy)])
def test_a_loss_of_pairs_is_the_same_on_a_mesh(written, adapter):
    from tests.experiments.test_meshes import LLAMA, PAIRS, losses

    words = [f"objective={written}:preferred", *LLAMA, *PAIRS, *adapter, "optimizer=sgd", "steps=2"]
    np.testing.assert_allclose(losses("mesh=fsdp_cp", "tiling.n=2", *words), losses("mesh=one", *words), atol=1e-5)


def test_a_reference_is_there_where_a_loss_asks_for_it(written):
    from tests.experiments.test_objectives import resolved

    asks = lambda name, *words: resolved(f"objective={written}:{name}", "data=preference", *words).reference
    assert asks("shorter") is None and asks("focal") is None
    assert asks("preferred").origin is configs.Origin.start
    for words, why in {
        ("shorter", "objective.reference=x"): "asks for neither `ref_chosen_logps` nor `ref_rejected_logps`",
        ("preferred", "objective.reference=x"): "cannot read objective.reference=x: No such file",
        ("frozen",): "asks for neither `logits` nor `hidden` nor `chosen_logps` nor `rejected_logps`",
        ("greedy",): "asks for `teacher`, and is given logits, .*, ref_chosen_logps, .*, rejected_tokens",
    }.items():
        with pytest.raises(CommandError, match=why):
            asks(*words)


FAILS = """
import optax


def whole(logits):
    return (logits.sum() > 0).astype(int)


def raises(logits=None, learning_rate=None):
    return 1 / 0


def branches(logits):
    return logits.mean() if logits.mean() > 0 else -logits.mean()


def exits(logits):
    raise SystemExit(3)


def asserts(logits):
    assert logits.ndim == 7


def numbers(logits):
    return logits.mean(), {5: 1.0}


def takes(logits):
    return logits.mean(), {"grad_norm": 1.0}


def in_update(learning_rate):
    return optax.GradientTransformation(lambda params: (), lambda *_: 1 / 0)


def stops():
    yield "a document"
    raise OSError("no disk")
"""
WRONG = {
    "nowhere:focal": "there is no module `nowhere`, it is neither installed nor in",
    "nowhere.py:focal": "there is no file .*nowhere.py",
    "{}:focus": "has no function `focus`. Did you mean `focal`?",
    "{}:jax": "it is no function, but module",
    "{}:greedy": "greedy: it asks for `teacher`, and is given logits, hidden, head, labels, mask. An option of its own",
    "{}:signs": "cannot call signs: it asks for `learning_rate`",
    "{}:texts objective.kwargs.count=1": "it asks for neither `logits` nor `hidden`",
    "{}:preferred": "it asks for `chosen_logps`, which is of pairs of answers: use data=preference",
    "{}:focal objective.kwargs.gama=1": "no such argument. Did you mean objective.kwargs.gamma?",
    "{}:focal objective.kwargs.mask=1": "focal is given `mask` by the run",
}


@pytest.mark.parametrize("said", WRONG)
def test_what_cannot_be_found_or_called_is_said(written, said, start, capsys):
    assert start(*f"objective={said.format(written)}".split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(WRONG[said].replace("?", "\\?"), error), error


@pytest.mark.parametrize(("name", "why"), [("wrong_shape", r"has shape \(\d"), ("no_number", "no number, but str")])
def test_what_a_loss_returns_is_checked(written, name, why):
    loss = objectives.build(configs.Custom(fn=f"{written}:{name}"))
    model = zoo.Gemma.init(zoo.GemmaConfig(**SIZES), key=jax.random.key(0))
    with pytest.raises(own.OwnError, match=why):
        loss((model,), (jnp.ones((6, 8)),), jnp.zeros(6, int), jnp.ones(6))


@pytest.mark.parametrize("line", ["1 / 0", "json.loads('{')"])
def test_files_beside_the_installation_are_the_users(line):
    file = f"{sys.base_prefix}/home/losses.py"  # as where Python is installed in /usr
    exec(compile(f"import json\ndef loss():\n    return {line}", file, "exec"), names := {})
    with pytest.raises(own.OwnError, match=rf"failed at {file}:3: \w+"), own._in_words("failed"):
        names["loss"]()


RAISE = {
    "objective={}:whole": "cannot learn from objective.fn=.*whole: its loss is of type int32, which has no gradient",
    "objective={}:raises": r"objective.fn=.*raises failed at .*own.py:\d+: ZeroDivisionError: division by zero",
    "objective={}:branches": r"objective.fn=.*failed at .*own.py:\d+: TracerBool.* write jnp.where or jax.lax.cond for",
    "objective={}:exits": r"objective.fn=.*exits failed at .*own.py:\d+: SystemExit: 3",
    "objective={}:asserts": r"objective.fn=.*asserts failed at .*own.py:\d+: AssertionError: assert logits.ndim == 7",
    "objective={}:numbers": "it calls a number 5; give each a name in text",
    "objective={}:takes": "it calls a number 'grad_norm'; .* none of loss, grad_norm, which are the run's",
    "optimizer={}:in_update": r"optimizer.fn=.*in_update failed at .*own.py:\d+: ZeroDivisionError",
    "optimizer=optax:sgd optimizer.kwargs.momentum=abc": "optimizer.fn=optax:sgd failed: TypeError: ",
    "optimizer=optax:lbfgs": "optimizer.fn=optax:lbfgs failed: TypeError: .*: take one without a line search",
    "optimizer={}:raises optimizer.learning_rate=1": r"optimizer.fn=.*raises failed at .*own.py:\d+: ZeroDivision",
    "data={}:raises": r"data.fn=.*raises failed at .*own.py:\d+: ZeroDivisionError",
    "data={}:stops": r"data.fn=.*stops failed at .*own.py:\d+: OSError: no disk",
    "objective={}broken.py:focal": r"cannot import objective.fn=.*: SyntaxError: .*broken.py, line 1",
}


@pytest.mark.parametrize("said", RAISE)
def test_what_ones_own_code_raises_is_said_with_its_line(tmp_path, said, start, capsys):
    file = tmp_path / "own.py"
    file.write_text(FAILS)
    (tmp_path / "broken.py").write_text("def focal(:")
    where = f"{tmp_path}/" if "broken" in said else file
    assert start(*(word.format(where) for word in said.split())) in (1, 2)
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and "\n" not in error
    assert re.search(RAISE[said], error), error


SORTED = """
import jax.numpy as jnp

def by_rank(logits, mask):
    return (jnp.sort(logits, axis=1).max(-1) * mask).sum() / mask.sum()
"""


def test_a_loss_that_reads_all_tokens_names_the_option_that_lets_it(tmp_path, start, capsys):
    (tmp_path / "own.py").write_text(SORTED)
    words = f"objective={tmp_path}/own.py:by_rank", "tiling.n=2"
    assert start(*words) == 1
    error = capsys.readouterr().err
    assert "cannot tile `sort`" in error and "In a run: tiling.gather=any, or tiling.n=none" in error
    assert start(*words, "tiling.gather=none") == 1
    assert "In a run: tiling.gather=small, or tiling.n=none" in capsys.readouterr().err
    assert start(*words, "tiling.gather=any") == 0
    assert start(*words, "tiling.n=none") == 0


README = Path(__file__).parents[2] / "experiments" / "README.md"
ON_MESH = [*(word for word in MICRO if "vocab" not in word), "model.vocab_size=320", "model.num_heads=4"]


def traced(*words):
    """The step of a run on a mesh, as types alone."""
    config = resolve(schema.compose([*ON_MESH, *words])[0], hardware.Device("cpu", "a test", 2**33, 4))
    with meshes.spread(config.mesh, jax.devices()):
        programs = Programs(config)
        return eqx.filter_eval_shape(programs.step, programs.batch, programs.state)


@pytest.mark.parametrize("mesh", ["tp", "fsdp_tp", "fsdp_v"])
@pytest.mark.parametrize("n", ["none", 2])
def test_the_loss_that_the_readme_shows_runs_on_every_mesh(tmp_path, mesh, n):
    (code,) = re.findall(r"```python\n(import jax, .*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "losses.py").write_text(code)
    traced(f"objective={tmp_path}/losses.py:focal", f"mesh={mesh}", f"tiling.n={n}")


@pytest.mark.parametrize("name", ["focal", "each"])
def test_a_label_that_cannot_be_taken_on_a_mesh_is_said_how_to_pick(written, name):
    said = (
        r"failed at .*: ShardingTypeError: .*\. Logits are spread over the vocabulary .*: pick it by comparison, jnp.wh"
    )
    with pytest.raises(own.OwnError, match=said):
        traced(f"objective={written}:{name}", "mesh=tp", "tiling.n=2")
    traced(f"objective={written}:{name}", "mesh=tp", "model.vocab_size=321")  # which four devices do not cut


def test_other_shardings_that_do_not_suit_are_not_laid_to_the_vocabulary(tmp_path):
    (tmp_path / "folded.py").write_text("def loss(logits):\n    return logits.reshape(-1, 2, 160).sum()\n")
    with pytest.raises(own.OwnError, match=r"ShardingTypeError: .*reshape") as caught:
        traced(f"objective={tmp_path}/folded.py:loss", "mesh=fsdp")
    assert "spread" not in str(caught.value)


def test_an_objective_needs_no_word_custom(written):
    one, _ = schema.compose([f"objective.fn={written}:focal", "objective.kwargs.name=a b", "data=pydoc"])
    assert one.objective == configs.Custom(fn=f"{written}:focal", kwargs={"name": "a b"})
    with pytest.raises(schema.ConfigError, match=r"there is no `objective.kwargs.gamma`"):
        schema.compose(["objective.kwargs.gamma=1"])
    with pytest.raises(schema.ConfigError, match=r"objective.reference=x: .* of pairs of answers: use data=preference"):
        schema.compose(["objective=x:y", "objective.reference=x"])


def test_any_optax_optimizer_and_ones_own(start, written, tmp_path):
    assert start("optimizer=optax:lion", "optimizer.kwargs.b1=0.8", "optimizer.learning_rate=1e-3", "run=lion") == 0
    config, _ = schema.compose([f"optimizer={written}:signs", "optimizer.learning_rate=1", "optimizer.warmup=0"])
    from experiments.step import optimizer

    made = optimizer.build(config.optimizer, 3)
    params = {"w": jnp.zeros(3)}
    updates, _ = made.update({"w": jnp.array([2.0, -3.0, 0.5])}, made.init(params), params)
    np.testing.assert_array_equal(updates["w"], [-1.0, 1.0, -1.0])
    for name, why in (("nothing", "must return an optax.GradientTransformation, not NoneType"), ("focal", "asks for")):
        with pytest.raises(own.OwnError, match=why):
            optimizer.build(configs.CustomOptimizer(fn=f"{written}:{name}", learning_rate=1.0), 3)


COUNTING = """import jax, jax.numpy as jnp, numpy as np, optax
def counts(learning_rate, begins, of="", to=""):
    def update(grads, state, params=None):
        count = state["count"] + 1
        count = count.astype(to) if to == "int8" else count[None] if to == "longer" else count
        moved = jax.tree.map(lambda g: -g / count, grads)
        return moved, {"count": count, "of": of} if to != "other" else {"counts": count, "of": of}
    return optax.GradientTransformation(lambda params: {"count": eval(begins), "of": of}, update)
"""


@pytest.fixture
def counting(tmp_path):
    (tmp_path / "counting.py").write_text(COUNTING)
    return lambda **kwargs: own.optimizer(
        configs.CustomOptimizer(fn=f"{tmp_path}/counting.py:counts", kwargs=kwargs), 0.1
    )


@pytest.mark.parametrize("begins", ["0", "0.0", "np.zeros((), int)", "jnp.zeros((), int)"])
def test_numbers_in_the_state_of_ones_own_optimizer_move(counting, begins):
    """They are arrays, as `jax.jit` makes them: what is none is compiled in."""
    optimizer, model = counting(begins=begins, of="text"), {"w": jnp.ones(3)}
    step = make_train_step(lambda model, batch: (model["w"].sum() * batch, {}), optimizer)
    state = State.init(model, optimizer)
    compiled = compile_step(step, jnp.float32(1), state)
    for _ in range(3):
        state, _ = compiled(jnp.float32(1), state)
    np.testing.assert_allclose(state.model["w"], 1 - (1 + 1 / 2 + 1 / 3) * np.ones(3), rtol=1e-6)


def test_a_state_in_which_nothing_would_move_is_said(tmp_path):
    made = "optax.GradientTransformation(lambda params: {'of': type('Count', (), {'count': 0})()}, None)"
    (tmp_path / "held.py").write_text(f"import optax\ndef held(learning_rate):\n    return {made}\n")
    optimizer = own.optimizer(configs.CustomOptimizer(fn=f"{tmp_path}/held.py:held"), 0.1)
    with pytest.raises(own.OwnError, match=r"its state\['of'\] is of type Count, in which nothing would move"):
        optimizer.init({"w": jnp.ones(3)})


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("int8", r"its state\['count'\] is int32\[\], and `update` makes it int8\[\]: use .astype, .reshape"),
        ("longer", r"its state\['count'\] is int32\[\], and `update` makes it int32\[1\]"),
        ("other", "`update` returns a state of another structure than `init`"),
    ],
)
def test_a_state_of_another_type_is_said(counting, to, why):
    optimizer, params = counting(begins="0", to=to), {"w": jnp.ones(3)}
    with pytest.raises(own.OwnError, match=why):
        optimizer.update(params, optimizer.init(params), params)


@pytest.mark.parametrize("weight", [1.0, 0.01, 0.0])
def test_tokens_that_count_little_together_have_the_mean_of_those_that_count(written, weight):
    """A loss of each token, ours and a user's: their mean, however little they weigh; 0 where none does."""
    model = zoo.Gemma.init(zoo.GemmaConfig(**SIZES), key=jax.random.key(0))
    mask = weight * jnp.array([1.0, 0.5, 0, 1, 0, 0])
    found = [
        objectives.build(config)((model,), (jnp.ones((6, 8)),), jnp.arange(6), mask)[0]
        for config in (configs.Pretrain(), configs.Custom(fn=f"{written}:each"))
    ]
    losses = objectives.label_losses(model.logits(jnp.ones((6, 8))), jnp.arange(6))
    expected = (losses[0] + losses[1] / 2 + losses[3]) / 2.5 if weight else 0.0
    np.testing.assert_allclose(found, [expected] * 2, rtol=1e-6)


def opened(*words):
    from experiments.runtime import hardware

    config, _ = schema.compose([*MICRO[1:], "data.val_fraction=0.1", *words])
    return batches.open_source(resolve(config, hardware.Device("cpu", "a test", 2**32)))


def test_data_by_name_is_text_or_ids_or_rows(written, tmp_path):
    text = opened(f"data={written}:texts", "data.kwargs.count=30", f"data.cache={tmp_path}")
    assert text.bytes_per_token == pytest.approx(1.0)
    assert re.search("document number [0-9]", bytes(i for i in text.batch(0).tokens[0] if i < 256).decode())
    ids = opened(f"data={written}:ids")
    assert ids.batch(0).tokens.shape == (4, 32) and len(ids.train) and len(ids.held_out)
    made = opened(f"data={written}:made")
    assert (len(made.train), len(made.held_out)) == (36, 4)
    with pytest.raises(batches.DataError, match=r"asks for `count`, and is given tokenizer, vocab_size, seq_len, seed"):
        opened(f"data={written}:texts")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ("['abc' * 50, [1, 2, 3] * 50]", "its first document is text, and another list"),
        ("['abc' * 50, 99]", "its first document is text, and another int"),
        ("['abc' * 50, None]", "its first document is text, and another NoneType"),
        ("[[1, 2, 3] * 50, 'abc' * 50]", "a document is text, a list of ids or a row"),
        ("[[1, 2, 3] * 50] * 20", "at least two different documents"),
    ],
)
def test_documents_of_several_kinds_are_refused(made, why, written):
    with open(f"{written}.py", "a") as file:
        file.write(f"\ndef several():\n    return {made}\n")
    with pytest.raises(batches.DataError, match=rf"data.fn={written}:several.*{why}|{why}.*data.fn={written}:several"):
        opened(f"data={written}:several")


def test_the_head_of_a_model_makes_its_logits():
    ids = jnp.arange(6)[None]
    for cls, config in (
        (zoo.Gemma, zoo.GemmaConfig(**SIZES, final_softcap=3.0)),
        (zoo.Llama, zoo.LlamaConfig(**SIZES)),
        (zoo.Llama, zoo.Qwen2Config(**SIZES, tied=True)),
        (zoo.Mixture, zoo.MixtralConfig(**SIZES, num_experts=2)),
    ):
        model = cls.init(config, key=jax.random.key(0))
        made = head(model)
        np.testing.assert_array_equal(made(model.hidden(ids)), model(ids))
        assert made.matrix.shape == (32, 8) and made.softcap == getattr(config, "final_softcap", None)
        assert zoo.head(model).matrix is made.matrix
