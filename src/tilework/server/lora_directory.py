"""The LoRAs of a directory: their files and their names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tilework.core.model import LORA_NAME, LoraSource, is_lora_name
from tilework.server.config import ConfigError

_SAVED = "pytorch_lora_weights.safetensors"  # diffusers saves a LoRA under this name in its own directory.


def loras_in(directory: Path) -> tuple[LoraSource, ...]:
    """Return the LoRAs of a directory, by name: NAME.safetensors, and NAME/pytorch_lora_weights.safetensors.

    Raises:
        ConfigError: there is no such directory, or a name cannot be used.
    """
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise ConfigError(f"loras = {str(directory)!r} {what}; give a directory that holds NAME.safetensors.")
    found: dict[str, Path] = {}
    for name, file in _files(directory):
        if not is_lora_name(name):
            raise ConfigError(f"{file} has a name that no request can give; use {LORA_NAME}.")
        if name in found:
            raise ConfigError(f"{found[name]} and {file} are both called {name!r}; rename one.")
        found[name] = file
    return tuple(LoraSource(name, str(found[name].absolute())) for name in sorted(found))


def _files(directory: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(directory.iterdir()):
        if path.suffix == ".safetensors" and path.is_file():
            yield path.stem, path
        elif (path / _SAVED).is_file():
            yield path.name, path / _SAVED
