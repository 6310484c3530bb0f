"""Notes what is asked of `torch.cuda`, and answers as a test says: a device of which only the calls are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


class CudaCalls:
    """The calls, each with its name and arguments, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: list[tuple[Any, ...]] = []
        self._monkeypatch = monkeypatch

    @property
    def names(self) -> list[str]:
        return [one[0] for one in self.noted]

    def answer(self, **answers: Any) -> None:
        """What these functions return from now on."""
        for name, value in answers.items():
            self._monkeypatch.setattr(torch.cuda, name, self._answering(name, value))

    def note(self, *call: Any) -> None:
        self.noted.append(call)

    def _answering(self, name: str, value: Any) -> Callable[..., Any]:
        def answer(*arguments: Any, **named: Any) -> Any:
            self.note(name, *arguments, *named.values())
            return value

        return answer
