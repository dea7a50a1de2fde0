"""The table of user functions that `tile` must leave unchanged: `CASES[name]`.

Every function is written as a user would write it, with no thought of tiling. One module per kind of function; each
adds its rows with the decorator in `table.py`. Dimension key: `N` tokens, `B` batch, `S` sequence, `D` embed,
`V` vocabulary, `K` a small extra dim.
"""

from tests.transforms.cases import (
    classification,
    composition,
    cut_vocabulary,
    metrics,
    modules,
    policy,
    refusals,
    regression,
    shapes,
    statistics,
    vocabulary,
)
from tests.transforms.cases.table import CASES, Case, Draw

__all__ = [
    "CASES",
    "Case",
    "Draw",
    "classification",
    "composition",
    "cut_vocabulary",
    "metrics",
    "modules",
    "policy",
    "refusals",
    "regression",
    "shapes",
    "statistics",
    "vocabulary",
]
