"""Finds where a test has an idea of "now": what may be red because a machine is busy.

Kinds:

- `sleep`: waits for a time, not for a state. `sleep(0)` only lets others go on. `clock.sleep` follows the test's clock.
- `limit`: a wait that fails after less than `SHORTEST_S`, whether the number stands there, in a constant of the file or
  in the default of a parameter. A wait whose end is what the test expects, under `pytest.raises` or beside `is None`,
  is none; neither is one of 0 s, which does not wait.
- `clock`: reads a clock, to compare times.
- `count`: counts tasks, threads, processes or descriptors, which others of the process add to and end when they will.
- `turns`: lets others go on for a fixed number of turns.
- `fall`: waits for a number to fall, which others may have kept up, or have passed unseen.

Programs in texts, for processes of a test, are searched as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from textwrap import dedent

SHORTEST_S = 30.0
CLOCKS = {f"time.{one}{unit}" for one in ("time", "monotonic", "perf_counter", "process_time") for unit in ("", "_ns")}
CLOCKS |= {"datetime.now", "datetime.utcnow", "datetime.datetime.now"}
COUNTS = {"asyncio.all_tasks", "threading.active_count", "threading.enumerate", "multiprocessing.active_children"}
SLEEPS = {"time.sleep", "asyncio.sleep"}
WAITS = {"wait": 0, "join": 0, "result": 0, "poll": 0, "settimeout": 0, "timeout": 0, "wait_for": 1, "select": 3}
"""By last name of the call: the place of the limit among its arguments."""
LIMITS = ("timeout", "timeout_s", "within_s", "patience_s")
POLLS = {"until", "until_on_loop"}


@dataclass(frozen=True)
class Use:
    line: int
    kind: str
    where: str
    """Classes and functions around it."""
    code: str


def uses(text: str) -> list[Use]:
    """What a file holds, by line."""
    finder = _Finder(ast.parse(text))
    return sorted(finder.found, key=lambda one: (one.line, one.kind))


class _Finder(ast.NodeVisitor):
    def __init__(self, tree: ast.Module) -> None:
        self.found: list[Use] = []
        self._around: list[str] = []
        self._expected = 0
        self._line: int | None = None
        self._full_names = dict(_imported(tree))
        self._numbers = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self.visit(tree)

    def _add(self, kind: str, node: ast.AST) -> None:
        line = self._line or node.lineno  # type: ignore[attr-defined]
        self.found.append(Use(line, kind, ".".join(self._around), ast.unparse(node)))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._around.append(node.name)
        self.generic_visit(node)
        self._around.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = node.args
        places = [*arguments.posonlyargs, *arguments.args]
        with_default = [*places[len(places) - len(arguments.defaults) :], *arguments.kwonlyargs]
        values = [*arguments.defaults, *arguments.kw_defaults]
        self._around.append(node.name)
        for argument, value in zip(with_default, values, strict=True):
            if argument.arg in LIMITS and value is not None and self._is_short(value):
                self._add("limit", argument)
        self.generic_visit(node)
        self._around.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_With(self, node: ast.With) -> None:
        """The end of the time is expected also where it is the other one of two things that `raises` stands beside."""
        is_expected = any(ast.unparse(item).startswith("pytest.raises(") for item in node.items)
        self._expected += is_expected
        self.generic_visit(node)
        self._expected -= is_expected

    def visit_Compare(self, node: ast.Compare) -> None:
        is_expected = isinstance(node.ops[0], ast.Is) and ast.unparse(node.comparators[0]) == "None"
        self._expected += is_expected
        self.generic_visit(node)
        self._expected -= is_expected

    def visit_For(self, node: ast.For) -> None:
        leaves = any(isinstance(one, ast.Break | ast.Return | ast.Assert) for one in ast.walk(node))
        body = [one.value for one in node.body if isinstance(one, ast.Expr)]
        if not leaves and any(ast.unparse(one) == "await asyncio.sleep(0)" for one in body) and len(node.body) == 1:
            self._add("turns", node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if self._line is None and isinstance(node.value, str) and "import" in node.value:
            with suppress(SyntaxError):
                program = ast.parse(dedent(node.value))
                self._line = node.lineno
                self.visit(program)
                self._line = None

    def visit_Call(self, node: ast.Call) -> None:
        name = self._name(node.func)
        last = name.rpartition(".")[2]
        if last == "wait_for_timeout" or (name in SLEEPS and [ast.unparse(one) for one in node.args] != ["0"]):
            self._add("sleep", node)
        if name in CLOCKS:
            self._add("clock", node)
        listed = ast.unparse(node.args[0]) if last == "listdir" and node.args else ""
        if name in COUNTS or name.startswith("psutil.") or listed.startswith(("'/proc/self/fd", "'/proc/self/task")):
            self._add("count", node)
        if last in POLLS and any(_falls(one) for one in node.args):
            self._add("fall", node)
        if not self._expected and any(map(self._is_short, _limits(last, node))):
            self._add("limit", node)
        self.generic_visit(node)

    def _name(self, node: ast.expr) -> str:
        """With the module that it was imported from."""
        first, dot, others = ast.unparse(node).partition(".")
        return self._full_names.get(first, first) + dot + others

    def _is_short(self, node: ast.expr) -> bool:
        value: object = self._numbers.get(node.id) if isinstance(node, ast.Name) else None
        if isinstance(node, ast.Constant):
            value = node.value
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < SHORTEST_S


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                yield one.asname or one.name, f"{node.module}.{one.name}"
        elif isinstance(node, ast.Import):
            for one in node.names:
                if one.asname is not None:
                    yield one.asname, one.name


def _limits(last: str, node: ast.Call) -> Iterator[ast.expr]:
    if last in WAITS and len(node.args) > WAITS[last]:
        yield node.args[WAITS[last]]
    yield from (one.value for one in node.keywords if one.arg in LIMITS)


def _falls(node: ast.expr) -> bool:
    """Whether a condition wants a number to be below another one."""
    compared = [one for one in ast.walk(node) if isinstance(one, ast.Compare)]
    return any(isinstance(op, ast.Lt | ast.LtE) for one in compared for op in one.ops)
