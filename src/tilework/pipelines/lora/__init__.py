"""Owns LoRAs on a loaded pipeline: they are added beside its weights, and requests use them by name."""

from tilework.pipelines.lora.loaded import AddedLora, InvalidLora, LoadedLoras
from tilework.pipelines.lora.loras import Loras

__all__ = ["AddedLora", "InvalidLora", "LoadedLoras", "Loras"]
