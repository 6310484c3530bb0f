"""Small mistakes, made on purpose: one changed expression or one missing statement per mutant of a module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_UNTOUCHED = (ast.Assert, ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr)


@dataclass(frozen=True, slots=True)
class Mutant:
    """`text` is the whole module with the mistake; `before` and `after` the line of it."""

    line: int
    before: str
    after: str
    text: str = field(repr=False)


def mutants_of(text: str) -> Iterator[Mutant]:
    """Every mutant of a module, in order. Texts, annotations, decorators, assertions and errors are left alone."""
    count = sum(1 for _ in _places(ast.parse(text)))
    lines = text.splitlines()
    for index in range(count):
        tree = ast.parse(text)
        place = next(place for number, place in enumerate(_places(tree)) if number == index)
        line = place.line
        after = place.apply()
        yield Mutant(line, lines[line - 1].strip(), after, ast.unparse(tree))


class _Place:
    """Something that can be got wrong: replaces one child of a node by another."""

    def __init__(self, parent: ast.AST, name: str, index: int | None, new: ast.AST, line: int) -> None:
        self._parent, self._name, self._index, self._new, self.line = parent, name, index, new, line

    def apply(self) -> str:
        ast.copy_location(self._new, self._old())
        ast.fix_missing_locations(self._new)
        if self._index is None:
            setattr(self._parent, self._name, self._new)
        else:
            getattr(self._parent, self._name)[self._index] = self._new
        return ast.unparse(self._new).partition("\n")[0]

    def _old(self) -> ast.AST:
        child = getattr(self._parent, self._name)
        old: ast.AST = child if self._index is None else child[self._index]
        return old


def _places(node: ast.AST) -> Iterator[_Place]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "bases") or _is_docstring(node, name):
            continue
        children = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for index, child in children:
            if not isinstance(child, ast.AST) or isinstance(child, _UNTOUCHED):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            for new in _mistakes(child):
                yield _Place(node, name, index, new, getattr(child, "lineno", 1))
            yield from _places(child)


def _is_docstring(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.arguments) and name == "args"


def _mistakes(node: ast.AST) -> Iterator[ast.AST]:
    """What could stand in the place of a node by mistake."""
    match node:
        case ast.Compare(ops=[only]) if type(only) in _COMPARISONS:
            wrong = deepcopy(node)
            wrong.ops = [_COMPARISONS[type(only)]()]
            yield wrong
        case ast.BoolOp(op=op):
            wrong_bool = deepcopy(node)
            wrong_bool.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield wrong_bool
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield deepcopy(operand)
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS:
            wrong_operator = deepcopy(node)
            wrong_operator.op = _OPERATORS[type(operator)]()
            yield wrong_operator
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
            wrong_call = deepcopy(node)
            wrong_call.func = ast.Name(id=_FUNCTIONS[name], ctx=ast.Load())
            yield wrong_call
        case ast.Constant(value=bool() as value):
            yield ast.Constant(value=not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value=value + 1)
        case ast.IfExp():
            swapped = deepcopy(node)
            swapped.body, swapped.orelse = swapped.orelse, swapped.body
            yield swapped
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete() | ast.Continue() | ast.Break():
            yield ast.Pass()
