"""Finds what runs on CUDA alone, or is decided by whether a device is one of CUDA, and breaks it.

Kinds, and what stands in their place where they are broken:

- `branch`: a comparison with "cuda" or "nccl", of a `.type` or `.device` with "cpu", or `is_cuda`: it goes as on a CPU.
- `call`: what `torch.cuda` has, the version of CUDA, NCCL's back end of torch: a statement is left out, a value raises.
- `method`: one of a class that is called Cuda, Nccl or Nvml, if none of the others is in it: it raises.
- `name`: "cuda" or "nccl" elsewhere, as of a device, or in a table; `pin_memory`: another name; memory is not pinned.

Comments and docstrings are not searched.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

_NAMES = ("cuda", "nccl")
_CLASSES = ("Cuda", "Nccl", "Nvml")
_OF_TORCH = ("torch.cuda.", "torch.version.cuda")
_EQUAL = (ast.Eq, ast.In)
_RAISES = ast.parse("1 // 0", mode="eval").body
"""No code of a device's takes this error for one of the device."""


@dataclass(frozen=True)
class Use:
    line: int
    kind: str
    where: str
    """Classes and functions around it; at the top of a module the name that it is assigned to."""
    code: str
    broken: str = field(repr=False, compare=False)
    """The whole module, in which it is broken."""


def uses(text: str) -> list[Use]:
    """What a module holds, in its order."""
    found = []
    for number, _ in enumerate(_places(ast.parse(text))):
        tree = ast.parse(text)
        place = list(_places(tree))[number]
        code, line = ast.unparse(place.node).partition("\n")[0], place.node.lineno
        place.break_it()
        found.append(Use(line, place.kind, place.where, code, ast.unparse(ast.fix_missing_locations(tree))))
    return sorted(found, key=lambda one: one.line)


@dataclass(frozen=True, slots=True)
class _Place:
    """A node, or the statement that it is, as a field of its parent, or in a list that is one."""

    kind: str
    where: str
    node: ast.expr | ast.FunctionDef
    parent: ast.AST
    name: str
    index: int | None
    new: ast.AST

    def break_it(self) -> None:
        if self.index is None:
            setattr(self.parent, self.name, self.new)
        else:
            getattr(self.parent, self.name)[self.index] = self.new


def _places(node: ast.AST, where: tuple[str, ...] = ()) -> Iterator[_Place]:
    for name, value in ast.iter_fields(node):
        children = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for index, child in children:
            if not isinstance(child, ast.AST) or _is_text(child):
                continue
            if (found := _as_broken(child)) is not None:
                kind, use, new = found
                yield _Place(kind, ".".join(where), use, node, name, index, new)
                continue
            inside = list(_places(child, where + _name_of(child, where)))
            yield from inside or _method(child, where)


def _method(node: ast.AST, where: tuple[str, ...]) -> Iterator[_Place]:
    if isinstance(node, ast.FunctionDef) and where and where[-1].startswith(_CLASSES):
        yield _Place("method", ".".join((*where, node.name)), node, node, "body", 0, ast.Expr(_RAISES))


def _name_of(node: ast.AST, where: tuple[str, ...]) -> tuple[str, ...]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return (name,)
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if not where:
            return (name,)
    return ()


def _is_text(node: ast.AST) -> bool:
    """A docstring, or one of a name."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _as_broken(node: ast.AST) -> tuple[str, ast.expr, ast.AST] | None:
    """The kind of a use, the use, and what stands there if it is broken; None: it is none, but may hold some."""
    match node:
        case ast.Compare(ops=[op], left=left, comparators=[right]) if _is_of_device(left, right):
            goes_on = isinstance(op, _EQUAL) == _is_text_of(right, "cpu")
            return "branch", node, ast.Constant(goes_on)
        case ast.Attribute(attr="is_cuda"):
            return "branch", node, ast.Constant(False)
        case ast.Expr(value=ast.Call(func=called) as call) if _is_of_torch(called):
            return "call", call, ast.Pass()
        case ast.Attribute() | ast.Name(ctx=ast.Load()) if _is_of_torch(node):
            return "call", node, _RAISES
        case ast.Constant(value=str() as text) if text in _NAMES or text.startswith("cuda:"):
            return "name", node, ast.Constant("another")
        case ast.keyword(arg="pin_memory", value=value):
            return "name", value, ast.keyword("pin_memory", ast.Constant(False))
    return None


def _is_of_device(left: ast.expr, right: ast.expr) -> bool:
    is_type = isinstance(left, ast.Attribute) and left.attr in ("device", "type")
    return _is_text_of(right, *_NAMES) or (is_type and _is_text_of(right, "cpu"))


def _is_text_of(node: ast.expr, *texts: str) -> bool:
    return isinstance(node, ast.Constant) and node.value in texts


def _is_of_torch(node: ast.expr) -> bool:
    name = ast.unparse(node)
    return name.startswith(_OF_TORCH) or name.rpartition(".")[2] == "ProcessGroupNCCL"
