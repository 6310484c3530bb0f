"""Words that reports and commands share."""

from __future__ import annotations


def counted_devices(number: int) -> str:
    """ "1 device", "8 devices"."""
    return "1 device" if number == 1 else f"{number} devices"
