"""Which cases a run of the whole suite takes: every row of every table, and of what is redundant in a row one case.

A test names its redundant parameters by `@pytest.mark.redundant("n")`: rows are the cases of a test without them. A
hash of the seed and a case's id chooses among the cases of a row, so that no case's luck depends on what else there is.
Where tables are crossed and no pair has an expectation of its own, `@pytest.mark.crossed("name", "layout")` says so:
each entry of either is a row, and a sample takes pairs, in the order of the hash, until every row stands in one.
Whoever names tests (files, ids, `-k`, `-m`) or says `--all` gets every case that he names. A run ends by saying what it
left out.
"""

import hashlib
import time
from pathlib import Path

import pytest

LIGHT = "not heavy"  # as in pyproject.toml


def pytest_addoption(parser):
    group = parser.getgroup("sample", "which cases run")
    group.addoption("--all", action="store_true", help="every case that is not heavy, redundant ones too")
    group.addoption("--rest", action="store_true", help="the light cases that a run without options leaves out")
    group.addoption("--seed", default="0", help="of the hash that chooses among the cases of a row")
    group.addoption("--share", type=float, default=1.0, metavar="F", help="of the cases, chosen by the same hash")
    help = "start no case after so many minutes; what was left out is printed"
    group.addoption("--minutes", type=float, metavar="M", help=help)


def pytest_configure(config):
    config.addinivalue_line("markers", "redundant(*names): parameters of which a sample takes one value in each row")
    config.addinivalue_line(
        "markers", "crossed(*names): parameters each value of which is a row, whatever the others are"
    )
    option = config.option
    option.sampled = named_nothing(config) and not option.all
    option.deadline = None if option.minutes is None else time.time() + 60 * option.minutes
    if hasattr(config, "workerinput"):
        option.deadline = config.workerinput["deadline"]  # of all processes alike
    config.left_out = None
    config.late = config.heavy = 0


def named_nothing(config) -> bool:
    """Whether the command line asks for the whole suite."""
    folders = all(Path(arg).is_dir() for arg in config.args)
    return folders and not config.option.keyword and config.option.markexpr in ("", LIGHT)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """The whole suite runs on all cores; a few tests that are named are done before other processes have started."""
    return None if named_nothing(config) else 0


def rows_of(item) -> set[tuple]:
    """Return what a case has in common with those that a sample takes it for: a row, or one for each crossed table."""
    named = lambda marker: {name for mark in item.iter_markers(marker) for name in mark.args}
    params = item.callspec.params if hasattr(item, "callspec") else {}
    values = {name: (name, id(value)) for name, value in params.items() if name not in named("redundant")}
    crossed = named("crossed")
    test = item.nodeid.partition("[")[0], *sorted(value for name, value in values.items() if name not in crossed)
    return {(*test, values[name]) for name in crossed} or {test}


def position(item, seed: str) -> float:
    """Return a number in [0, 1) that depends on the seed and the case alone, whichever folder it is in."""
    case = item.nodeid[item.nodeid.partition("::")[0].rfind("/") + 1 :]
    digest = hashlib.blake2b(f"{seed} {case}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def choose(items: list, sampled: bool, share: float, seed: str, rest: bool = False) -> list:
    """Return the cases that run, in their order; or, of a sample, those that do not."""
    kept = [item for item in items if position(item, seed) < share]
    if sampled:
        first, there = set(), set()
        for item in sorted(kept, key=lambda item: position(item, seed)):
            if not rows_of(item) <= there:
                first.add(item.nodeid)
                there |= rows_of(item)
        kept = [item for item in kept if (item.nodeid in first) != rest]
    return kept


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`
def pytest_collection_modifyitems(config, items):
    option = config.option
    kept = choose(items, option.sampled, option.share, option.seed, option.rest)
    rows, kept_rows = (set().union(*map(rows_of, cases)) for cases in (items, kept))
    missing = 0 if option.rest else len(rows - kept_rows)
    config.left_out = {"cases": len(items), "run": len(kept), "rows": missing}
    if len(kept) < len(items):
        chosen = {item.nodeid for item in kept}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = kept


def pytest_deselected(items):
    """Count the heavy cases that somebody names, and `-m "not heavy"` leaves out: pytest says it of no others at once.

    What `-k` leaves out, which comes first, is not what somebody names.
    """
    config = items[0].config if items else None
    if config is not None and config.option.markexpr == LIGHT and not named_nothing(config):
        heavy = all(item.get_closest_marker("heavy") is not None for item in items)
        config.heavy = len(items) if heavy else 0


def pytest_runtest_setup(item):
    deadline = item.config.option.deadline
    if deadline is not None and time.time() > deadline:
        item.config.late += 1
        pytest.skip("no time is left")


def pytest_sessionfinish(session):
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["sample"] = {**(config.left_out or {}), "late": config.late}


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["deadline"] = node.config.option.deadline


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    found = getattr(node, "workeroutput", {}).get("sample")
    if found and "cases" in found:
        node.config.late += found.pop("late")
        node.config.left_out = found


def pytest_terminal_summary(terminalreporter, config):
    if config.left_out and not config.option.collectonly:
        terminalreporter.write_line(summary(**config.left_out, late=config.late, option=config.option))
    if config.heavy:
        terminalreporter.write_line(f"{config.heavy} of the cases that are named are heavy: -m heavy runs them")


def summary(cases: int, run: int, rows: int, late: int, option) -> str:
    """Return what ran and what did not, in one line."""
    redundant = " and, but for `--all`, one case of each row" if option.sampled and not option.rest else ""
    share = (
        f"{option.share:.0%} of the cases"
        if option.share < 1
        else "what a sample leaves out"
        if option.rest
        else "every row"
    )
    lacking = f"{late} cases for want of time ({option.minutes:g} minutes)" if late else ""
    missing = str(rows) if rows else ""
    out = " and ".join(filter(None, (missing, lacking))) or "none"
    return f"{run - late} of {cases} cases were run: {share}{redundant} (seed {option.seed}); rows left out: {out}"
