"""The compiler as a house: folders import one way, no module comes back to itself, and one file changes graphs."""

import ast
from pathlib import Path

import pytest

import transforms.tiling

HOME = Path(transforms.tiling.__file__).parent
# Each stands on those before it; those of a line do not know each other.
ORDER = """
primitives
ir
frontend inputs
rules
mesh
analysis
regions
schedule
lower passes
autodiff
report
api verify
""".strip().splitlines()
FLOOR = {folder: floor for floor, line in enumerate(ORDER) for folder in line.split()}
FIELDS = {"inputs", "outputs", "nodes", "producer", "index", "aval", "primitive", "params", "state"}
CHANGES = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}
SOURCES = {path: ast.parse(path.read_text()) for path in sorted(HOME.rglob("*.py"))}


def name_of(path: Path) -> str:
    return ".".join(("transforms.tiling", *path.relative_to(HOME).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {name_of(path): path for path in SOURCES}


def imports(path: Path) -> set[str]:
    """The modules of the compiler that one names, in functions too."""
    found = set()
    for node in ast.walk(SOURCES[path]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & MODULES.keys()) or {node.module}
    return (found & MODULES.keys()) - {name_of(path)}


def folder_of(module: str) -> str:
    return module.split(".")[2]


def test_every_folder_has_a_floor():
    assert {folder_of(name) for name in MODULES if name.count(".") > 1} == FLOOR.keys()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_down(path):
    name = name_of(path)
    if name.count(".") < 2:
        assert imports(path) == set()
        return
    above = [other for other in imports(path) if folder_of(other) != folder_of(name)]
    assert [other for other in above if FLOOR[folder_of(other)] >= FLOOR[folder_of(name)]] == []


def test_no_module_comes_back_to_itself():
    graph = {name: imports(path) for name, path in MODULES.items()}
    while ends := [name for name, below in graph.items() if not below & graph.keys()]:
        for name in ends:
            del graph[name]
    assert graph == {}


def written(tree: ast.AST) -> list[str]:
    """The places where fields of values, nodes and graphs are assigned to, or lists in them changed."""
    found = []
    for node in ast.walk(tree):
        targets = list(node.targets) if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            targets += [node.func.value]
        for target in (part for each in targets for part in getattr(each, "elts", [each])):
            while isinstance(target, ast.Subscript):
                target = target.value
            own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
            if isinstance(target, ast.Attribute) and target.attr in FIELDS and not own:
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_graphs_are_changed_in_one_file_alone():
    assert {name: lines for name, path in MODULES.items() if (lines := written(SOURCES[path]))}.keys() == {
        "transforms.tiling.ir.graph"
    }


@pytest.mark.parametrize("change", ["v.aval = 1", "g.nodes[:] = []", "n.inputs[0], x = 1, 2", "g.outputs.append(v)"])
def test_a_change_is_seen(change):
    assert written(ast.parse(change))
