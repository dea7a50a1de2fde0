"""What is planned is what is committed: a change of a plan is a change of a text in `golden/`, with its reason."""

import jax
import pytest

from tests.transforms import golden_plans
from tests.transforms.golden_plans import COMPILED, ESTIMATED, TOLERANCE, compare, describe, measured, named, of_row
from tests.transforms.plan_table import rows
from transforms.tiling.autodiff import program
from transforms.tiling.ir.obstacles import Refusal
from transforms.tiling.verify import verify

REWRITE = "python -m tests.transforms.rewrite_plans"
if jax.__version__ != golden_plans.OLDEST:  # others make another table too, where they warn of wider dtypes
    pytest.skip(f"the texts are of JAX {golden_plans.OLDEST}", allow_module_level=True)
PLANS = [pytest.param(row, count, id=f"{name}-{count}") for name, row in rows().items() for count in row.counts]


@pytest.fixture(scope="module")
def texts():
    return {text: golden_plans.read(text) for text in (*golden_plans.tables(), ESTIMATED, COMPILED)}


@pytest.fixture
def verified(monkeypatch):
    """All that is planned is checked by the verifier."""
    plan = program.planned

    def planned(*args, **kwargs):
        made = plan(*args, **kwargs)
        if not isinstance(made, Refusal):
            verify(made[0])
        return made

    monkeypatch.setattr(program, "planned", planned)


def assert_unchanged(was, now, table):
    changed = compare(was, now)
    assert not changed, "\n".join([*changed, f"If that is as it should be: {REWRITE} {table!r}, and say why."])


@pytest.mark.redundant("count")
@pytest.mark.usefixtures("verified")
@pytest.mark.filterwarnings("ignore:The function convex_kl_divergence is deprecated")
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype complex128")
@pytest.mark.parametrize(("row", "count"), PLANS)
def test_plan_is_the_one_that_is_committed(row, count, texts):
    lines, estimated = describe(row, count)
    assert_unchanged(of_row(texts[row.table], row, count), lines, row.table)
    name = f"{row.table}: {named(row, count)}"
    known = {k: v for k, v in texts[ESTIMATED].items() if k == name}
    assert_unchanged(known, {f"{row.table}: {k}": v for k, v in estimated.items()}, row.table)


def test_no_line_is_of_a_row_that_is_gone(texts):
    for table in golden_plans.tables():
        own = [(row, count) for row in rows().values() if row.table == table for count in row.counts]
        there = {k for row, count in own for k in of_row(texts[table], row, count)}
        assert not set(texts[table]) - there, f"{REWRITE} {table!r}"


@pytest.mark.heavy
@pytest.mark.parametrize("row", measured(), ids=lambda row: f"{row.table}: {row.name}")
def test_compiled_memory_is_the_one_that_is_committed(row, texts):
    name = f"{row.table}: {named(row, row.memory)}"
    was, now = (int(fields["bytes"]) for fields in (texts[COMPILED][name], golden_plans.measure(row)))
    assert now == pytest.approx(was, rel=TOLERANCE, abs=64), f"{REWRITE} {COMPILED!r}"


def test_a_difference_names_the_row_and_both_plans():
    was = {"a, n=4, value": {"products": "1", "loop 1": "x"}, "b, n=4, value": {"products": "1"}}
    now = {"a, n=4, value": {"products": "2", "loop 1": "x"}, "c, n=4, value": {"products": "1"}}
    assert compare(was, now) == [
        "a, n=4, value: products\n    was 1\n    is  2",
        "b, n=4, value: is not there any more",
        "c, n=4, value: was not there",
    ]
    assert compare(was, was) == []


def test_texts_are_read_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setattr(golden_plans, "FOLDER", tmp_path)
    lines = {"a: b, n=4, value": {"refused": "cannot tile `sort`: it runs along the axis", "loop 1": "4 tiles; sum"}}
    golden_plans.write("some", lines)
    assert golden_plans.read("some") == lines


def test_refusals_have_no_source_line():
    error = ValueError("cannot tile `sort` at /a/b.py:37:5 (rank_loss): it runs along the cut axis.\n  operand: x")
    assert golden_plans.sentence(error) == "cannot tile `sort`: it runs along the cut axis"
