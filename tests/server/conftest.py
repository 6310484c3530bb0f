"""What the server's tests have in common."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_config` alone knows only the server's variables, and that of all tests is one of the command's."""
    monkeypatch.delenv("TILEWORK_DEVICE", raising=False)
