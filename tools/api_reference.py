"""The OpenAPI document as a page to read: `python tools/api_reference.py` prints it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

from tilework.core.model import ModelSource
from tilework.runtime.engine import EngineConfig
from tilework.runtime.engine_start import EngineStart
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.local_executor import LocalExecutor
from tilework.server.api.app import create_app
from tilework.server.api.examples import ERRORS, EXAMPLES
from tilework.server.api.openapi import CALL
from tilework.server.config import ServerConfig

JSON = "application/json"
WIDTH = 110
HEAD = """\
# HTTP API

Written by `make site` from the OpenAPI document, which every server shows at `/docs`. How deadlines, streams and
further calls work is in [serving](serving.md), keys, tenants and limits are in [operations](operations.md).

Examples are for a shell with `export URL=http://127.0.0.1:8000`. Answers are those of a server with `shapes` on two CPU
cores, and about videos those of a simulated model; long lists show their first entries, and images their first bytes.
If the server has keys, every call needs `-H "Authorization: Bearer KEY"`, except `/health` and `/ready`. HEAD works
wherever GET does. `/` is a [page](operations.md#the-page) for a browser.
"""


@dataclass(slots=True)
class _Page:
    """The page. `described` has the route where a field of bodies, by (name, description), first appears."""

    openapi: Mapping[str, Any]
    described: dict[tuple[str, str], str] = field(default_factory=dict)

    def routes(self) -> list[tuple[str, str, dict[str, Any]]]:
        paths = self.openapi["paths"].items()
        return [(method.upper(), path, operation) for path, methods in paths for method, operation in methods.items()]

    def blocks(self) -> Iterator[str]:
        yield HEAD
        rows = [[f"[`{method} {path}`](#{_anchor(method, path)})", _purpose(it)] for method, path, it in self.routes()]
        yield _table(["route", ""], rows)
        for method, path, operation in self.routes():
            yield f"## `{method} {path}`\n\n{_purpose(operation)}\n"
            yield from self._parameters(operation)
            yield from self._body(f"{method} {path}", operation)
            yield _statuses(operation)
            yield from _examples(method, path, operation, self.openapi["components"]["schemas"])
        yield self._errors()

    def _parameters(self, operation: Mapping[str, Any]) -> Iterator[str]:
        rows = [[f"`{one['name']}`", one["in"], one["description"]] for one in operation.get("parameters", ())]
        if rows:
            yield _table(["parameter", "in", ""], rows)

    def _body(self, route: str, operation: Mapping[str, Any]) -> Iterator[str]:
        if "requestBody" not in operation:
            return
        schema = operation["requestBody"]["content"][JSON]["schema"]
        rows = []
        known = []
        for name, rules in schema["properties"].items():
            first = self.described.setdefault((name, rules["description"]), route)
            if first == route:
                rows.append([f"`{name}`", _default(name, rules, schema["required"]), rules["description"]])
            else:
                known.append(f"`{name}`")
        if rows:
            yield _table(["field", "default", "give"], rows)
        if known:
            routes = next(iter(self.described.values()))
            yield f"As in `{routes}`: {', '.join(known)}.\n"

    def _errors(self) -> str:
        """Return the section on all errors. 405 is the answer of no operation, so it is not in the document."""
        rows = [[str(status), error[0]] for status, error in ERRORS.items()]
        example = in_lines(EXAMPLES["error 429"])
        text = "Every refusal has this form; further fields follow `code` where they apply.\n\n"
        return f"## Errors\n\n{_table(['status', 'when'], rows)}\n{text}```json\n{example}\n```\n"


def reference(openapi: Mapping[str, Any]) -> str:
    """Return the page in Markdown: for each route its purpose, parameters, fields, statuses, and one example."""
    return "\n".join(_Page(openapi).blocks())


def in_lines(value: object, indent: int = 0) -> str:
    """Format JSON with as much on a line as fits."""
    flat = json.dumps(value, ensure_ascii=False)
    space = " " * (indent + 2)
    if len(flat) + indent <= WIDTH or not isinstance(value, dict | list):
        return flat
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {in_lines(inner, indent + 2)}" for name, inner in value.items()]
        first, last = "{}"
    else:
        parts = [in_lines(inner, indent + 2) for inner in value]
        first, last = "[]"
    return f"{first}\n{space}" + f",\n{space}".join(parts) + f"\n{' ' * indent}{last}"


def _purpose(operation: Mapping[str, Any]) -> str:
    return " ".join(operation["description"].split())


def _default(name: str, rules: Mapping[str, Any], required: list[str]) -> str:
    if name in required:
        return "required"
    default = rules.get("default")
    return "" if default in (None, "") else f"`{json.dumps(default)}`"


def _statuses(operation: Mapping[str, Any]) -> str:
    answers = operation["responses"].items()
    good = [f"**{status}** {answer['description']}." for status, answer in answers if int(status) < 400]
    bad = ", ".join(status for status, _ in answers if int(status) >= 400)
    return f"{' '.join(good)} Otherwise {bad}: see [errors](#errors).\n"


def _examples(method: str, path: str, operation: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[str]:
    """Yield examples of the usual answer, and of every other answer that names the call which gets it."""
    good = [
        (status, media_type, content)
        for status, answer in operation["responses"].items()
        if int(status) < 400
        for media_type, content in answer["content"].items()
    ]
    for status, media_type, content in (good[0], *(one for one in good[1:] if CALL in one[2])):
        if CALL in content:
            yield f"**{status}** as `{media_type}`:\n"
        yield f"```console\n{_command(method, path, operation, media_type, content.get(CALL, {}))}\n```\n"
        if media_type == JSON:
            of_model = models[content["schema"]["$ref"].rpartition("/")[2]]
            yield f"```json\n{in_lines(content.get('example') or of_model['examples'][0])}\n```\n"
        elif media_type.startswith("text/"):
            yield f"```text\n{content['example'].strip()}\n```\n"


def _command(
    method: str, path: str, operation: Mapping[str, Any], media_type: str, call: Mapping[str, Mapping[str, Any]]
) -> str:
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", parameter["schema"]["examples"][0])
    words = ["curl", "-sN" if "event-stream" in media_type else "-s"]
    if method == "DELETE":
        words += ["-X", method]
    line = f"{shlex.join(words)} $URL{path}"
    if "requestBody" in operation:
        headers = {"Content-Type": JSON, **call.get("headers", {})}
        example = operation["requestBody"]["content"][JSON]["schema"]["examples"][0]
        body = json.dumps({**example, **call.get("fields", {})})
        line += "".join(f" -H {shlex.quote(f'{name}: {value}')}" for name, value in headers.items())
        line += f" \\\n    -d {shlex.quote(body)}"
    names = {"image": "image.png", "video": "video.mp4"}
    kind = media_type.partition("/")[0]
    return f"{line} -o {names[kind]}" if kind in names else line


def _anchor(method: str, path: str) -> str:
    """Return GitHub's anchor of a heading: lower case, dashes for blanks, no marks but dashes and underscores."""
    kept = (one for one in f"{method} {path}".lower() if one.isalnum() or one in " -_")
    return "".join(kept).replace(" ", "-")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Print the page; no engine is behind the routes."""
    config = LocalConfig(num_workers=1, sources=(ModelSource(path="shapes"),))
    app = create_app(EngineStart(EngineConfig(), LocalExecutor(config)), ServerConfig())
    app.state.add_engine(Mock())
    sys.stdout.write(reference(app.openapi()))


if __name__ == "__main__":
    main()
