"""Amounts of memory as people write them."""

from __future__ import annotations

import re

import typer

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


def parse_bytes(text: str) -> int:
    """Bytes of "800MB" (powers of 1000), "2GiB" (powers of 1024) and the like.

    Raises:
        typer.BadParameter: it is not such a text, or less than a mebibyte.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise typer.BadParameter(f"{text!r} is not an amount of memory; write one with its unit, as in 800MB or 2GiB")
    num_bytes = int(float(match[1]) * _UNITS[match[2].upper()])
    if num_bytes < 1 << 20:
        raise typer.BadParameter(f"{text!r} is less than a mebibyte; give at least 1MiB")
    return num_bytes
