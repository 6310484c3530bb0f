"""All settings of a server as a page: `python tools/settings_table.py` prints it, from the fields of `ServerConfig`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tilework.cli.options.settings import default_of, flag_of, option_of, range_of
from tilework.server.config import ServerConfig

HEAD = """\
# Settings

Written by `make site` from the fields of `ServerConfig`. [Operations](operations.md#settings) says where a server finds
settings; `tilework serve --help` has the options that are no settings.

| setting | default | range | meaning |
|---|---|---|---|"""
_PAGE = re.compile(r"docs/(\w+\.md)")


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    yield from map(_row, ServerConfig.model_fields)


def _row(name: str) -> str:
    field = ServerConfig.model_fields[name]
    option = option_of(field)
    names = f"`{name}`" if option is None else f"`{name}`, `{flag_of(name, option)}`"
    meaning = _PAGE.sub(r"[\1](\1)", " ".join(str(field.description).split()))
    return f"| {names} | {default_of(name) or 'none'} | {range_of(name)} | {meaning} |".replace("|  |", "| |")


if __name__ == "__main__":
    print("\n".join(page()))
