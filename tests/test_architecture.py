"""The arrows of the design hold: who may import whom, and who may not know torch or a clock."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilework
from tilework.core.graph.shipped import latent_diffusion

ROOT = Path(tilework.__file__).parent
DECISIONS = {"core", "cost", "policy", "admission", "control"}
ARROWS: dict[str, set[str]] = {
    "core": set(),
    "ownership": set(),
    "formats": {"core"},
    "comm": {"core", "ownership"},
    "cost": {"core", "ownership"},
    "policy": {"core", "cost"},
    "admission": {"core", "cost", "policy"},
    "control": {"core", "cost", "policy", "admission"},
    "sim": DECISIONS | {"formats"},
    "runtime": DECISIONS | {"worker", "comm", "ownership"},
    "worker": {"core", "cost", "pipelines", "patches", "comm", "ownership"},
    "pipelines": {"core"},
    "patches": {"core"},
    "store": {"core", "ownership"},
    "sets": {"core", "policy"},
    "server": DECISIONS | {"runtime", "store", "worker", "pipelines", "comm", "sets"},
    "client": {"core", "formats"},
    "report": {"core", "formats"},
    "cli": DECISIONS
    | {"formats", "sim", "runtime", "server", "client", "report", "worker", "pipelines", "store", "sets", "ownership"},
}
POLICY_ARROWS: dict[str, set[str]] = {
    "traits": set(),
    "registry": {"traits"},
    "toolkit": set(),
    "placement": {"toolkit"},
    "published": {"registry", "toolkit", "placement", "traits"},
    "lookahead": {"registry", "toolkit"},
}
"""Inside `policy`: a published policy stands on the toolkit alone, so that no change of the default one changes it."""
SERVER_ARROWS: dict[str, set[str]] = {
    "bounded": set(),
    "text": {"bounded"},
    "schema": {"bounded"},
    "garbage": set(),
    "default_slo": set(),
    "webhooks": set(),
    "config": {"default_slo", "webhooks"},
    "toml_file": {"config"},
    "tenants": {"config", "toml_file", "default_slo"},
    "models_file": {"config", "toml_file", "default_slo"},
    "lora_directory": {"config"},
    "additions": {"calls", "config", "lora_directory", "models_file"},
    "safety_filter": {"config"},
    "request_rates": {"tenants"},
    "reload": {"config", "models_file", "tenants"},
    "http": {"bounded", "text", "config", "tenants"},
    "metrics": {"schema"},
    "live": {"http"},
    "page": set(),
    "planning": {"schema", "tenants", "http", "calls"},
    "calls": {
        "bounded",
        "text",
        "schema",
        "config",
        "default_slo",
        "tenants",
        "models_file",
        "metrics",
        "safety_filter",
        "sets",
    },
    "api": {
        "additions",
        "text",
        "schema",
        "config",
        "default_slo",
        "tenants",
        "models_file",
        "lora_directory",
        "http",
        "metrics",
        "live",
        "page",
        "planning",
        "calls",
        "sets",
        "request_rates",
        "safety_filter",
        "traces",
        "batches",
        "call_webhooks",
        "webhooks",
    },
    "call_webhooks": {"calls", "webhooks"},
    "traces": {"calls", "config", "schema"},
    "batches": {"bounded", "text", "schema", "config", "tenants", "http", "calls"},
    "drain": {"calls", "text", "webhooks"},
    "sets": {"config"},
    "frontends": {"http"},
    "standing_answer": {"calls", "api", "frontends"},
    "main": {
        "garbage",
        "config",
        "http",
        "calls",
        "api",
        "drain",
        "frontends",
        "reload",
        "sets",
        "standing_answer",
        "webhooks",
    },
}
"""Inside `server`: calls know nothing of HTTP, and `http` nothing of calls; `api` joins them. A front end knows neither
calls nor routes."""
ROOMS = {"policy": POLICY_ARROWS, "server": SERVER_ARROWS}
HTTP_LIBRARIES = {"fastapi", "starlette", "uvicorn", "h11"}
HEAVY = {"torch", "diffusers", "transformers", "fastapi", "uvicorn", "starlette", "prometheus_client"}
PURE = DECISIONS
IMPURE = {"time", "asyncio", "socket", "os", "threading", "subprocess", "random", "datetime", "numpy", "pydantic"}


def packages() -> list[str]:
    return sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_packages(path: Path) -> set[str]:
    parts = (module.split(".") for module in imports(path))
    return {part[1] for part in parts if part[0] == "tilework" and len(part) > 1 and part[1] in ARROWS}


def test_every_package_has_its_arrows() -> None:
    assert packages() == sorted(ARROWS)


@pytest.mark.parametrize("package", sorted(ARROWS))
def test_arrows(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        strays = own_packages(path) - ARROWS[package] - {package}
        assert not strays, f"{path.relative_to(ROOT)} may not import {strays}"


def test_the_product_knows_nothing_of_the_lab() -> None:
    """It finds it by entry points alone: all of it runs where the lab is not installed."""
    for path in ROOT.rglob("*.py"):
        roots = {module.split(".")[0] for module in imports(path)}
        assert "tilework_lab" not in roots, f"{path.relative_to(ROOT)} imports the lab"


@pytest.mark.parametrize("package", sorted(ROOMS))
def test_every_room_has_its_arrows(package: str) -> None:
    rooms = {
        path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms - {"__init__"} == set(ROOMS[package])


@pytest.mark.parametrize(("package", "room"), [(package, room) for package in ROOMS for room in sorted(ROOMS[package])])
def test_arrows_inside_a_package(package: str, room: str) -> None:
    for path in (path for path in (ROOT / package).rglob("*.py") if _room(package, path) == room):
        parts = [module.split(".") for module in imports(path)]
        rooms = {part[2] for part in parts if part[:2] == ["tilework", package] and len(part) > 2}
        strays = rooms - ROOMS[package][room] - {room}
        assert not strays, f"{path.relative_to(ROOT)} may not import {package}.{strays}"


def _room(package: str, path: Path) -> str:
    """The folder or module of a package that a file belongs to."""
    return path.relative_to(ROOT / package).parts[0].removesuffix(".py")


@pytest.mark.parametrize("room", ["calls", "schema"])
def test_calls_know_no_http(room: str) -> None:
    for path in (ROOT / "server" / room).rglob("*.py"):
        roots = {module.split(".")[0] for module in imports(path)}
        assert not roots & HTTP_LIBRARIES, f"{path.relative_to(ROOT)} imports {roots & HTTP_LIBRARIES}"


@pytest.mark.parametrize("package", sorted(PURE))
def test_pure_packages_touch_no_clock_socket_or_environment(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        roots = {module.split(".")[0] for module in imports(path)}
        assert not roots & (IMPURE | HEAVY), f"{path.relative_to(ROOT)} imports {roots & (IMPURE | HEAVY)}"


@pytest.mark.parametrize("package", packages())
def test_every_package_says_what_it_owns(package: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))
    assert docstring is not None
    assert docstring.startswith("Owns ")


@pytest.mark.parametrize("module", ["tilework", "tilework.sim.simulation", "tilework.cli", "tilework.client.drive"])
def test_the_base_install_needs_no_torch_and_no_server(module: str) -> None:
    """Imports with the heavy packages made unimportable, as on a machine without the `serve` extra."""
    block = f"import sys; sys.modules.update(dict.fromkeys({sorted(HEAVY | {'sklearn'})!r})); import {module}"
    result = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def architecture(heading: str) -> str:
    """The first block below a heading of the page on architecture."""
    page = (ROOT.parents[1] / "docs" / "architecture.md").read_text("utf-8")
    return page.partition(f"\n## {heading}\n")[2].partition("```text\n")[2].partition("```")[0]


def test_the_page_on_architecture_shows_the_tree_of_folders() -> None:
    shown: set[str] = set()
    above: list[tuple[int, str]] = [(0, "")]
    for line in architecture("The rooms").splitlines():
        indent = len(line) - len(line.lstrip())
        while above[-1][0] >= indent > 0:
            above.pop()
        folder = above[-1][1] + line.split()[0]
        if indent:
            shown.add(folder)
            above.append((indent, folder))
    folders = {f"{path.relative_to(ROOT)}/" for path in ROOT.rglob("*") if path.is_dir() and path.name != "__pycache__"}
    assert shown == {folder for folder in folders if not re.match("models/[^/]+/.", folder)}


def test_the_page_on_architecture_shows_a_request_pass_each_room_once() -> None:
    names = re.findall(r"^[│ ]*([a-z]+(?:/[a-z]+)?)  ", architecture("A request's way"), re.MULTILINE)
    rooms = [name for name in names if (ROOT / name).is_dir()]
    assert len(rooms) == len(set(rooms))
    drawn = {room.split("/")[0] for room in rooms}
    assert drawn >= set(ARROWS) - {"core", "ownership", "formats", "sim", "client", "report", "cli"}


def test_the_page_on_architecture_names_functions_that_exist() -> None:
    """A request in twelve functions: each is a method in the file that the page names."""
    page = (ROOT.parents[1] / "docs" / "architecture.md").read_text("utf-8")
    section = page.partition("\n## A request in twelve functions\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d+ \| `([\w/]+\.py)`: `(\w+)\.(\w+)` \|", section, re.MULTILINE)
    others = [(file, owner, name) for owner, name, file in re.findall(r"`(\w+)\.(\w+)`\s+\(`([\w/]+\.py)`", section)]
    assert len(rows) == 12
    assert others
    for file, owner, name in rows + others:
        classes = [node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.ClassDef)]
        methods = {
            (one.name, node.name)
            for one in classes
            for node in one.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert (owner, name) in methods, f"{file} has no {owner}.{name}"


def test_only_adapters_name_stages() -> None:
    """Other rooms ask what a stage is like. Prose may name one; a text that equals a name may not."""
    names = {stage.name for stage in latent_diffusion("any").stages}
    found = []
    for path in ROOT.rglob("*.py"):
        if "pipelines" in path.relative_to(ROOT).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and node.value in names:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}")
            if isinstance(node, ast.Name | ast.Attribute):
                name = node.id if isinstance(node, ast.Name) else node.attr
                if name in {one.upper() for one in names}:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert not found, "\n".join(found)
