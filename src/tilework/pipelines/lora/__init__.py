"""Owns adapters (LoRAs) on a loaded pipeline: they are added beside its weights, and requests use them by name."""

from tilework.pipelines.lora.adapters import AddedAdapter, InvalidAdapter, LoadedAdapters

__all__ = ["AddedAdapter", "InvalidAdapter", "LoadedAdapters"]
