"""LoRAs of workflows: each changes the pipelines that it fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tilework.core.lora import UsedLora
from tilework.pipelines.lora import AddedLora, InvalidLora
from tilework.pipelines.workflow.loras import WorkflowLoras

INK, CHALK = UsedLora("ink", 1.0), UsedLora("chalk", 0.5)


class Fake:
    """The LoRAs of a pipeline that files with one of these names fit."""

    def __init__(self, *fits: str, has_memory: bool = True) -> None:
        self.fits, self.has_memory, self.here, self.used = fits, has_memory, set[str](), tuple[UsedLora, ...]()

    def add(self, name: str, file: Path) -> AddedLora:
        if not self.has_memory:
            raise MemoryError
        if file.name not in self.fits:
            raise InvalidLora(f"{file} is not for this model")
        self.here.add(name)
        return AddedLora(frozenset({"unet"}), 100)

    def remove(self, name: str) -> None:
        self.here.remove(name)

    def use(self, used: Sequence[UsedLora]) -> None:
        assert all(one.name in self.here for one in used)
        self.used = tuple(used)


def test_each_changes_the_pipelines_that_it_fits() -> None:
    first, second = Fake("both"), Fake("both", "one")
    loras = WorkflowLoras({"a.": first, "b.": second})
    assert loras.add("ink", Path("both")) == AddedLora(frozenset({"a.unet", "b.unet"}), 200)
    assert loras.add("chalk", Path("one")) == AddedLora(frozenset({"b.unet"}), 100)
    loras.use((INK, CHALK))
    assert (first.used, second.used) == ((INK,), (INK, CHALK))
    loras.use(())
    assert first.used == second.used == ()
    loras.remove("chalk")
    loras.use((INK,))
    assert (first.used, second.used, second.here) == ((INK,), (INK,), {"ink"})


def test_one_that_fits_none_is_refused() -> None:
    with pytest.raises(InvalidLora, match="other is not for this model"):
        WorkflowLoras({"a.": Fake("one"), "b.": Fake()}).add("ink", Path("other"))


def test_one_that_cannot_be_read_leaves_no_trace() -> None:
    first = Fake("half")
    with pytest.raises(MemoryError):
        WorkflowLoras({"a.": first, "b.": Fake(has_memory=False)}).add("ink", Path("half"))
    assert not first.here
