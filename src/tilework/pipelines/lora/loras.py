"""The contract of LoRAs that a family has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tilework.core.lora import UsedLora
from tilework.pipelines.lora.loaded import AddedLora


class Loras(Protocol):
    """The LoRAs on a device, by name, and those in use; none is at first."""

    def add(self, name: str, file: Path) -> AddedLora:
        """Read a LoRA from a safetensors file onto the device.

        Raises:
            InvalidLora: it cannot be read, or is not of this model; nothing has changed then.
        """

    def remove(self, name: str) -> None:
        """Free the memory of a LoRA."""

    def use(self, used: Sequence[UsedLora]) -> None:
        """Compute with these LoRAs, which must be there, and no others from now on."""
