"""Each place that CUDA alone runs, or decides, has a test that drives it without a card: `cuda_branches.py`."""

from __future__ import annotations

import ast

import pytest

from cuda_branches import DRIVERS, SOURCE, TESTS, found, table
from cuda_uses import uses


def test_each_place_has_a_test_and_each_test_a_place() -> None:
    there = {one.place for one in found()}
    driven = {place for places in DRIVERS.values() for place in places}
    assert there - driven == set(), "write a test that fails if it is broken, and name it in DRIVERS"
    assert driven - there == set(), "take these out of DRIVERS"


@pytest.mark.parametrize("test", DRIVERS)
def test_the_test_is_there(test: str) -> None:
    file, *names = test.split("::")
    node: ast.AST = ast.parse((TESTS / file).read_text("utf-8"))
    for name in names:
        inside = {getattr(one, "name", ""): one for one in ast.iter_child_nodes(node)}
        assert name in inside, f"{test} is no test"
        node = inside[name]


def test_the_page_has_the_table() -> None:
    assert table() in (TESTS / "README.md").read_text("utf-8"), "copy what `python -m cuda_branches` prints"


def test_no_module_calls_cuda_by_another_name() -> None:
    """By that it would not be found."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{one.name}" for one in node.names]
                assert not any(name.startswith("torch.cuda") for name in names), path
            elif isinstance(node, ast.Import):
                assert not any(one.name.startswith("torch.") and one.asname for one in node.names), path


@pytest.mark.parametrize(
    ("kind", "code", "broken"),
    [
        ("branch", "d.type == 'cuda'", "False"),
        ("branch", "d.type != 'cuda'", "True"),
        ("branch", "d.type == 'cpu'", "True"),
        ("branch", "source.device != 'cpu'", "False"),
        ("branch", "name == 'nccl'", "False"),
        ("branch", "x.is_cuda", "False"),
        ("call", "torch.cuda.empty_cache()", "pass"),
        ("call", "given = torch.cuda.memory_stats(d)", "given = (1 // 0)(d)"),
        ("call", "given = torch.version.cuda", "given = 1 // 0"),
        ("call", "given = ProcessGroupNCCL(s)", "given = (1 // 0)(s)"),
        ("name", "device('cuda', 1)", "device('another', 1)"),
        ("name", "f(f'cuda:{i}')", "f(f'another{i}')"),
        ("name", "empty(n, pin_memory=True)", "empty(n, pin_memory=False)"),
    ],
)
def test_each_kind_is_found_and_broken(kind: str, code: str, broken: str) -> None:
    (one,) = uses(f"class A:\n\n    def f(self, x):\n        {code}")
    assert (one.kind, one.where, one.line) == (kind, "A.f", 4)
    assert one.broken == f"class A:\n\n    def f(self, x):\n        {broken}"


def test_a_method_of_a_class_of_cards_is_broken_as_a_whole() -> None:
    (one,) = uses("class CudaA:\n\n    def f(self):\n        g()")
    assert (one.kind, one.where, one.broken) == (
        "method",
        "CudaA.f",
        "class CudaA:\n\n    def f(self):\n        1 // 0",
    )


def test_a_table_has_the_name_that_it_is_assigned_to() -> None:
    (one,) = uses("LINKS = {'nccl': Link}")
    assert (one.kind, one.where, one.broken) == ("name", "LINKS", "LINKS = {'another': Link}")


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    '''On cuda: torch.cuda.Stream().'''",
        "x: int\n'cuda'",
        "def f():\n    return torch.backends.cuda.matmul",
        "def f(error):\n    return error.type == 'text'",
        "# torch.cuda.empty_cache()",
    ],
)
def test_what_is_of_no_card_is_not_found(code: str) -> None:
    assert uses(code) == []
