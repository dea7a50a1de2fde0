"""Count what a compiled program does from its HLO text: loop bodies times their trip counts."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zoo.accounting import visible_pairs

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_SHAPE = r"\w+\[([\d,]*)\](?:\{[^}]*\})?"
_RESULT = re.compile(rf"^\s*(?:ROOT )?%?([\w.\-]+) = \(?{_SHAPE}(?:, .*?\))? (\w[\w\-]*)\((.*)")  # of several the first
_CALLED = re.compile(
    r"(?:to_apply|body|calls|called_computations|(?:branch|true|false)_computations?)=\{?((?:%?[\w.\-]+(?:, )?)+)\}?"
)
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_EXCHANGE = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (.+?) ({_COLLECTIVES})(?:-start)?\(")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8}
BYTES |= {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "token": 0}
_COUNTER = re.compile(r"= [su]32\[\]\S* get-tuple-element\(.*index=(\d+)")
_FMHA = re.compile(r'custom_call_target="__cudnn\$fmha\w*?Softmax(Backward)?"')
_SCORES = re.compile(r'"intermediate_tensor_shape": ?\{[^}]*?"dimensions": ?\[([^\]]*)\]')
_HEAD = re.compile(r"operand_layout_constraints=\{\w+\[[\d,]*?(\d+)\]")
_CUBLAS = re.compile(r'custom_call_target="__cublas\$[\w$]*(?:gemm|[mM]atmul)')
_SOLVE = re.compile(r'custom_call_target="__cublas\$triangularSolve".*"left_side": ?(true|false)')
_WINDOW = re.compile(r'"sliding_window_length": ?"?([1-9]\d*)')
_BLOCKS = r"s\d+\[1,\d+,\d+\]\{[\d,]*\}, "
_SPLASH = re.compile(
    rf' = \((.*)\) custom-call\(.*"tpu_custom_call", operand_layout_constraints=\{{({_BLOCKS}{_BLOCKS}.*?\}})\}}'
)
_RAGGED = re.compile(r"\[(\d+),(\d+)\]\{[\d,]*\}, \w+\[\d+,\d+,(\d+)\]\{[\d,]*\}\}, .*ragged_dot_tiling=")
_TURNS = re.compile(r"(?:\w+\()*turns_(\d+)\)*")  # as autodiff writes the name of a scope
_TRIPS = re.compile(r'known_trip_count"?:\s*\{\s*"?n"?:\s*"?(\d+)"?')


def dot_flops(text: str, trips: Mapping[str, int] | None = None) -> int:
    """Return the multiplications and additions of all matrix products that a run of the program executes.

    Solving with a triangle counts as a product with half a matrix. Those within kernels are not seen, but of attention:
    of cuDNN's two products forward and five backward, of what is visible; of splash attention's, those of the blocks
    that it computes; and of XLA's ragged products, those of each row with one matrix. Of a choice, as among the windows
    that layers have, the branch with the most counts. Experts that devices divide have the rows of an even routing.

    Args:
        text: `compiled.as_text()`.
        trips: how often loops run that end when the program finds, by the `jax.named_scope` that they are in.

    Raises:
        ValueError: a loop that holds products has no trip count that the compiler knows.
    """
    bodies, entry = _computations(text)

    @functools.cache
    def count(name: str) -> int:
        lines = bodies[name]
        own = sum(_dots(lines)) + sum(sum(map(of, lines)) for of in (_attention, _splash, _ragged))
        for line in lines:
            inside = [times * count(inner) for inner, times in _calls([line], bodies, told=trips)]
            own += max(inside, default=0) if " conditional(" in line else sum(inside)
        return own

    return count(entry)


def _attention(line: str) -> int:
    """Return the FLOPs of cuDNN's attention, of any other line none."""
    kernel = _FMHA.search(line)
    if kernel is None:
        return 0
    scores, head = _SCORES.search(line), _HEAD.search(line)
    assert scores is not None and head is not None, line
    batch, heads, queries, keys = (int(size) for size in re.findall(r"\d+", scores.group(1)))
    window, causal = _WINDOW.search(line), '"mask_type": "CAUSAL"' in line
    pairs = visible_pairs(queries, int(window.group(1)) if window else None) if causal else queries * keys
    return 2 * (5 if kernel.group(1) else 2) * batch * heads * pairs * int(head.group(1))


def _splash(line: str) -> int:
    """Return the FLOPs of splash attention, of any other line none.

    A kernel reads two arrays about its blocks `[1, rows, columns]`; then queries `[*q S H]`, keys and values
    `[*k S H]`, and where it has a mask positions, in integers as documents are, of which queries and keys have some.
    Without a mask it computes all of its blocks; with one those on and below the diagonal, or where no row has as many,
    those that a row has at most. Forward it has two products, and backward three for the queries, or four for keys and
    values, and one more where these make the queries' too.
    """
    kernel = _SPLASH.search(line)
    if kernel is None:
        return 0
    made, (_, _, (_, q), (_, k), _, *others) = (
        [(dtype, [int(size) for size in dims.split(",") if size not in ("", "1")]) for dtype, dims in found]
        for found in map(_ARRAY.findall, kernel.groups())
    )
    rows, columns = (int(size) for size in kernel.group(2).partition("]")[0].split(",")[1:])
    backward = any(dims == q for _, dims in others)
    of_keys = backward and sum(dims == k for _, dims in made) >= 2
    block = k[-2] // columns if of_keys else q[-2] // rows
    masked = sum(dtype == "s32" for dtype, _ in others) % 2
    blocks = rows * (rows + 1) // 2 if masked and rows == columns else rows * columns
    fused = any(len(dims) == len(q) + 1 and dims[-2:] == q[-2:] for _, dims in made)
    products = 4 + fused if of_keys else 3 if backward else 2
    return 2 * products * math.prod(q[:-2]) * blocks * block**2 * q[-1]


def _ragged(line: str) -> int:
    """Return the FLOPs of XLA's kernel for ragged products of rows `[M I]` and matrices `[G I O]`, else none."""
    kernel = _RAGGED.search(line)
    return 2 * math.prod(map(int, kernel.groups())) if kernel else 0


def bytes_read(text: str, trips: Mapping[str, int] | None = None, least: int = 0) -> int:
    """Return the bytes that a run of the program reads of a device's main memory.

    Of what is sliced or gathered, the slices; nothing of what a fusion only writes into, and of a choice its first
    branch. What a compiler has put into other memories (`S(1)`) is read when it is brought there.

    Args:
        text: `compiled.as_text()`.
        trips: as in `dot_flops`.
        least: bytes of the values, whole, that count: of more than all temporaries, those of arguments.
    """
    bodies, entry = _computations(text)
    return _Reads(bodies, trips, least).of_run(entry)


class _Reads:
    """What the computations of a program read of main memory."""

    def __init__(self, bodies: dict[str, list[str]], trips: Mapping[str, int] | None, least: int):
        self._lines, self._trips, self._least = bodies, trips, least
        self._bodies = {name: _Body(lines) for name, lines in bodies.items()}

    def of_run(self, name: str) -> int:
        """Return the bytes that a run of a computation reads."""
        total, body = 0, self._bodies[name]
        counts = lambda value: body.far(value) and body.size(value) >= self._least
        for value, op, operands, line in body.rows:
            if op == "while":
                inner = re.search(r"body=%?([\w.\-]+)", line)
                total += _trips(line, self._lines, self._trips) * self.of_run(inner.group(1)) if inner else 0
            elif op in ("call", "conditional"):
                total += self.of_run(_first_branch(line))
            elif op == "fusion":
                total += sum(self._of_operand(line, i) for i, one in enumerate(operands) if counts(one))
            elif op in ("dynamic-slice", "gather", "slice", "dynamic-slice-start", "slice-start"):
                total += body.size(value) if counts(operands[0]) else 0
            elif op not in _FREE:
                total += sum(body.size(one) for one in operands if counts(one))
        return total

    def _of_operand(self, line: str, operand: int) -> int:
        """Return the bytes of its operand that a fusion reads."""
        called = _fused(line)
        return self._of_value(called, self._bodies[called].parameters[operand])

    def _of_value(self, name: str, value: str) -> int:
        body, total = self._bodies[name], 0
        if not (users := body.users(value)):
            return body.size(value)  # handed on as it is
        for user, op, operands, line in users:
            if op in ("bitcast", "reshape") or "output_to_operand_aliasing" in line:  # the same bytes
                total += self._of_value(name, user)
            elif op in ("dynamic-slice", "gather", "slice"):
                total += body.size(user) if operands[0] == value else 0
            elif op in ("dynamic-update-slice", "scatter") and operands[0] == value:
                continue
            elif op == "fusion":
                total += sum(self._of_operand(line, i) for i, operand in enumerate(operands) if operand == value)
            else:
                return body.size(value)
        return min(total, body.size(value))


_FREE = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "iota", "partition-id"}
_FREE |= {f"{op}-done" for op in ("copy", "slice", "dynamic-slice", "all-reduce", "all-gather", "async")}
_ROW = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")


class _Body:
    """The instructions of a computation: their names, operations, operands and lines; and their results' types."""

    def __init__(self, lines: list[str]):
        self.rows: list[tuple[str, str, list[str], str]] = []
        self.types: dict[str, str] = {}
        self.parameters: dict[int, str] = {}
        for line in lines:
            if found := _ROW.match(line):
                name, shape, op, rest = found.groups()
                self.types[name] = shape
                self.rows.append((name, op, re.findall(r"%([\w.\-]+)", rest.partition(")")[0]), line))
                if op == "parameter":
                    self.parameters[int(rest.partition(")")[0])] = name

    def users(self, value: str) -> list[tuple[str, str, list[str], str]]:
        """The instructions that read a value."""
        return [row for row in self.rows if value in row[2]]

    def far(self, value: str) -> bool:
        """Whether a value is in main memory."""
        return "S(" not in self.types.get(value, "S(")

    def size(self, value: str) -> int:
        """Bytes of a value; of several, those of the last one: what an asynchronous operation brings."""
        *_, (dtype, dims) = _ARRAY.findall(self.types[value]) or [("token", "")]
        return BYTES.get(dtype, 1) * math.prod(int(each) for each in dims.split(",") if each)


def _fused(line: str) -> str:
    found = re.search(r"calls=%?([\w.\-]+)", line)
    assert found is not None, line
    return found.group(1)


def _first_branch(line: str) -> str:
    found = re.search(r"(?:to_apply|false_computation|branch_computations)=\{?%?([\w.\-]+)", line)
    assert found is not None, line
    return found.group(1)


@dataclass(frozen=True)
class Collective:
    """What devices exchange at one point of a program.

    Attributes:
        op: all-gather, all-reduce, reduce-scatter, all-to-all or collective-permute.
        bytes: what each device sends, once, around a ring.
        times: how often a run of the program does it.
        looped: whether it stands in a loop.
    """

    op: str
    bytes: float
    times: int
    looped: bool


def collectives(text: str, devices: int, trips: Mapping[str, int] | None = None) -> list[Collective]:
    """Return every collective of a program, those in loops once each with how often they run.

    Args:
        text: `compiled.as_text()`.
        devices: how many there are.
        trips: as in `dot_flops`.

    Raises:
        ValueError: a loop that holds some has no trip count that the compiler knows.
    """
    bodies, entry = _computations(text)

    @functools.cache
    def any_in(name: str) -> bool:
        lines = bodies[name]
        return any(map(_EXCHANGE.match, lines)) or any(any_in(inner) for inner, _ in _calls(lines, bodies, 1))

    found: dict[str, Collective] = {}

    def walk(name: str, times: int, looped: bool) -> None:
        for line in bodies[name]:
            if match := _EXCHANGE.match(line):
                # TPUs write a reduce-scatter as a fusion around an all-reduce.
                op = "reduce-scatter" if "all-reduce-scatter" in name else match.group(2)
                one = Collective(op, _sent(op, match.group(1), line, devices, name), times, looped)
                # The start, the steps and the end of an asynchronous one all name it, steps also in loops beside it.
                channel = re.search(r"channel_id=(\d+)", line)
                key = channel.group(1) if channel else f"{name} {line}"
                found[key] = min(found.get(key, one), one, key=lambda one: one.times)
            within = [inner for inner, _ in _calls([line], bodies, 1) if any_in(inner)]
            turns = _trips(line, bodies, trips) if within else 1
            for inner in within:
                walk(inner, times * turns, looped or " while(" in line)

    walk(entry, 1, False)
    return list(found.values())


def _sent(op: str, shapes: str, line: str, devices: int, computation: str) -> float:
    """Return the bytes that each device sends, from what the collective returns."""
    sizes = [BYTES[dtype] * math.prod(int(d) for d in dims.split(",") if d) for dtype, dims in _ARRAY.findall(shapes)]
    if "-start(" in line and (op != "all-reduce" or shapes.startswith("((")) and len(sizes) > 1:  # operands come first
        sizes = sizes[:1] if op == "collective-permute" else sizes[len(sizes) // 2 :]
    group, total = _group(line, devices), sum(sizes)
    if op == "all-reduce":
        return 2 * (group - 1) / group * total
    if op == "reduce-scatter" and "all-reduce-scatter" not in computation:
        return (group - 1) * total
    return total if op == "collective-permute" else (group - 1) / group * total


def _group(line: str, devices: int) -> int:
    """Return how many devices a collective is among."""
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found.group(1))
    # Axes of a mesh, whose devices may be told in another order, or parts of axes: `'a':(1)2` is 2 of them.
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^{]*)?\s*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found.group(1)))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found.group(2))
        return math.prod(int(part or sizes.get(axis, 1)) for axis, part in axes)
    found = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(found.group(1).split(",")) if found else devices


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of every computation by its name, and the name of the one that runs."""
    found: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = header.group(1)
            found[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name:
            found[name].append(line)
    return found, entry


def _calls(
    lines: list[str],
    bodies: dict[str, list[str]],
    trips: int | None = None,
    told: Mapping[str, int] | None = None,
) -> Iterator[tuple[str, int]]:
    """The computations that these lines run, and how often."""
    for line in lines:
        called = [name for group in _CALLED.findall(line) for name in group.split(", ")]
        names = [name.lstrip("%") for name in called]
        times = _trips(line, bodies, told) if trips is None else trips
        yield from ((name, times) for name in names if name in bodies)


def _trips(line: str, bodies: dict[str, list[str]], told: Mapping[str, int] | None = None) -> int:
    """Return how often an instruction runs what it calls: as told, as the compiler knows, or where a counter stops.

    A loop that ends when the program finds says by its scope's name how many turns are expected, where nobody is told.
    """
    if " while(" not in line:
        return 1
    scopes = re.search(r'op_name="([^"]*)"', line)
    scope = next((one for one in reversed(scopes.group(1).split("/")) if one != "while"), "") if scopes else ""
    if told and scope in told:
        return told[scope]
    if found := _TRIPS.search(line) or _TURNS.fullmatch(scope):
        return int(found.group(1))
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    lines = bodies.get(condition.group(1), []) if condition else []
    stops = [int(n) for one in lines for n in re.findall(r" = [su]32\[\]\S* constant\((\d+)\)", one)]
    if len(stops) != 1 or not any("direction=LT" in one for one in lines):
        raise ValueError(f"a loop without a known trip count: {line.strip()[:200]}")
    return -(-stops[0] // _stride(line, lines, bodies))


def _stride(line: str, condition: list[str], bodies: dict[str, list[str]]) -> int:
    """Return by how much a loop's counter grows in a turn: by two where the compiler joined pairs of turns."""
    operand = next((found.group(1) for one in condition if (found := _COUNTER.search(one))), None)
    body = re.search(r"body=%?([\w.\-]+)", line)
    lines = bodies.get(body.group(1), []) if body else []
    root = next((one for one in lines if one.lstrip().startswith("ROOT")), "")
    values = re.findall(r"%([\w.\-]+)", root.partition(" tuple(")[2].partition(")")[0])
    if operand is None or len(values) <= int(operand):
        return 1
    known = {found.group(1): one for one in lines if (found := re.match(r"\s*%([\w.\-]+) =", one))}
    total, name = 0, values[int(operand)]
    while found := re.search(r" add\(%([\w.\-]+), %([\w.\-]+)\)", known.get(name, "")):
        name, step = found.groups()
        constant = re.search(r" constant\((\d+)\)", known.get(step, ""))
        if constant is None:
            return 1
        total += int(constant.group(1))
    return total or 1


def _dots(lines: list[str]) -> Iterator[int]:
    """2 * the result's size * the contracted size, for each dot of a computation; with a triangle half of that."""
    shapes: dict[str, list[int]] = {}
    for line in lines:
        found = _RESULT.match(line)
        if found is None:
            continue
        name, dims, op, operands = found.groups()
        shapes[name] = [int(d) for d in dims.split(",") if d]
        read = [shapes.get(operand, []) for operand in re.findall(r"%([\w.\-]+)", operands)]
        if op == "dot":
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operands)
            assert contracted is not None, line
            yield 2 * math.prod(shapes[name]) * math.prod(read[0][int(d)] for d in contracted.group(1).split(",") if d)
        elif op == "custom-call" and (solve := _SOLVE.search(operands)):
            yield math.prod(shapes[name]) * shapes[name][-2 if solve.group(1) == "true" else -1]
        elif op == "custom-call" and _CUBLAS.search(operands):
            contracted = re.search(r'"lhs_contracting_dimensions": ?\[([^\]]*)\]', operands)
            assert contracted is not None, line
            summed = [read[0][int(d)] for d in re.findall(r"\d+", contracted.group(1))]
            yield 2 * math.prod(shapes[name]) * math.prod(summed)
        elif op == "convolution":  # what a TPU makes of a dot: its kernel's input features are contracted
            labels = re.search(r"dim_labels=\w+_(\w+)->", operands)
            assert labels is not None, line
            yield 2 * math.prod(shapes[name]) * read[1][labels.group(1).index("i")] * _window(operands)


def _window(attributes: str) -> int:
    """Return how many positions of a convolution's window are summed for each result.

    Batch and free dimensions in disguise are dilated, or padded so far that each result meets one position.
    """
    window = re.search(r"window=\{size=([\dx]+)([^}]*)\}", attributes)
    if window is None or "dilate" in window.group(2):
        return 1
    sizes = window.group(1).split("x")
    padding = re.search(r"pad=([\dx_\-]+)", window.group(2))
    pads = padding.group(1).split("x") if padding else ["0_0"] * len(sizes)
    return math.prod(int(size) for size, pad in zip(sizes, pads, strict=True) if pad == "0_0")
