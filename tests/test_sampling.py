"""A run of the whole suite leaves no row out, says what it left out, and runs whatever is named."""

import pytest

pytest_plugins = ["pytester"]

TABLE = """
    import pytest

    @pytest.mark.redundant("n")
    @pytest.mark.parametrize("n", [2, 4, 7])
    @pytest.mark.parametrize("name", "abcdefgh")
    def test_table(name, n):
        pass

    @pytest.mark.redundant("mode")
    @pytest.mark.parametrize(("row", "mode"), [("a", "jvp"), ("a", "vmap"), ("b", "jvp")])
    def test_pairs(row, mode):
        pass

    @pytest.mark.parametrize("n", [2, 4, 7])
    def test_where_nothing_is_redundant(n):
        pass

    @pytest.mark.heavy
    @pytest.mark.redundant("n")
    @pytest.mark.parametrize("n", [2, 4, 7])
    def test_heavy(n):
        pass
"""
CROSSED = """
    import pytest

    @pytest.mark.crossed("layout", "family")
    @pytest.mark.redundant("n")
    @pytest.mark.parametrize("n", [2, 4])
    @pytest.mark.parametrize("dtype", ["half", "whole"])
    @pytest.mark.parametrize("layout", "pqrs")
    @pytest.mark.parametrize("family", "uvwxyz")
    def test_crossed(family, layout, dtype, n):
        pass
"""
CASES, ROWS = 24 + 3 + 3, 8 + 2 + 3


@pytest.fixture
def run(pytester, monkeypatch):
    """Run the table with these words; return the names of the cases that passed, and the last lines."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    folder = pytester.mkdir("tests")
    (folder / "test_it.py").write_text("\n".join(line[4:] for line in TABLE.splitlines()))
    pytester.makeini('[pytest]\ntestpaths = tests\naddopts = -m "not heavy"\nmarkers = heavy')

    def with_words(*words):
        result = pytester.runpytest_inprocess("-p", "tests.sampling", "-p", "no:cacheprovider", "-v", *words)
        assert result.ret == 0
        return [line.split()[0].partition("::")[2] for line in result.outlines if " PASSED" in line], result.stdout

    return with_words


def test_every_row_is_there_with_one_of_its_redundant_values(run):
    names, out = run()
    assert len(names) == ROWS
    assert {name.split("[")[1][0] for name in names if "table" in name} == set("abcdefgh")
    assert len({name[-2] for name in names if "table" in name}) > 1  # not the same value in every row
    assert sum("where_nothing" in name for name in names) == 3
    out.fnmatch_lines([f"{ROWS} of {CASES} cases were run:*one case of each row (seed 0); rows left out: none"])


def test_another_seed_takes_other_values_of_the_same_rows(run):
    zero, again, one = run()[0], run()[0], run("--seed", "1")[0]
    assert zero == again != one
    assert len(one) == ROWS


def test_every_entry_of_tables_that_are_crossed_is_there(run, pytester):
    (pytester.path / "tests" / "test_it.py").write_text("\n".join(line[4:] for line in CROSSED.splitlines()))
    (names, out), rest, whole = run(), run("--rest")[0], run("--all")[0]
    for dtype in ("half", "whole"):  # which is not crossed: with either, every family and every layout
        letters = [set(name.split("[")[1].rstrip("]").split("-")) for name in names if dtype in name]
        assert set().union(*letters) >= set("pqrs") | set("uvwxyz")
        assert 6 <= len(letters) < 12
    out.fnmatch_lines(["*rows left out: none"])
    assert len(whole) == 96 and sorted([*names, *rest]) == sorted(whole)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["--all"], CASES),
        (["-k", "table"], 24),
        (["-k", "table and 4"], 8),
        (["tests/test_it.py"], CASES),
        (["tests/test_it.py::test_pairs"], 3),
        (["tests/test_it.py::test_table[a-4]"], 1),
        (["tests"], ROWS),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_named_runs(run, words, count):
    assert len(run(*words)[0]) == count


def test_the_rest_is_what_a_sample_leaves_out(run):
    for words in ([], ["--seed", "1"]):
        sampled, (rest, out) = run(*words)[0], run("--rest", *words)
        assert sorted([*sampled, *rest]) == sorted(run("--all")[0])
        out.fnmatch_lines([f"{CASES - ROWS} of {CASES} cases were run: what a sample leaves out (seed *"])


def test_heavy_cases_all_run(run):
    assert len(run("-m", "heavy")[0]) == 3


def test_heavy_cases_that_are_named_are_told(run):
    names, out = run("-k", "heavy or pairs")
    assert len(names) == 3
    out.fnmatch_lines(["3 of the cases that are named are heavy: -m heavy runs them"])
    run("-k", "(heavy or pairs) and not 2")[1].fnmatch_lines(
        ["2 of the cases that are named are heavy: -m heavy runs them"]
    )
    assert "are heavy" not in run("-k", "pairs")[1].str()
    assert "are heavy" not in run()[1].str()


def test_a_share_is_chosen_by_the_case_and_what_it_leaves_out_is_told(run):
    names, out = run("--all", "--share", "0.5")
    more, _ = run("--all", "--share", "0.8")
    assert 0 < len(names) < len(more) < CASES
    assert set(names) < set(more)
    out.fnmatch_lines(["*of the cases (seed 0); rows left out: [1-9]*"])


def test_what_no_time_is_left_for_is_told(run):
    names, out = run("--minutes", "-1")
    assert not names
    out.fnmatch_lines([f"0 of {CASES} cases were run:*rows left out: {ROWS} cases for want of time*"])
