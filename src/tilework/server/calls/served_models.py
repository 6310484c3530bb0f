"""The models that a server serves, as clients name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilework.core.model import ModelInfo
from tilework.server.calls.errors import UnknownModel
from tilework.server.default_slo import DefaultSlo
from tilework.server.models_file import ModelEntry
from tilework.server.text import shown


@dataclass(frozen=True, slots=True)
class ServedModels:
    """Models by name. A request that names none gets the first. A hub id is a name, too: SGLang's client sends it.

    `entries` are what the file of models says of some.
    """

    infos: Mapping[str, ModelInfo]
    entries: Mapping[str, ModelEntry] = field(default_factory=dict)

    @property
    def default(self) -> ModelInfo:
        return next(iter(self.infos.values()))

    @property
    def takes_pictures(self) -> bool:
        """Whether a request to some model may have pictures."""
        return any(info.pictures for info in self.infos.values())

    def has(self, name: str) -> bool:
        """Whether this names a model."""
        return any(name in self._names(one) for one in self.infos.values())

    def named(self, name: object) -> ModelInfo:
        """The model of this name; what is no text is refused with the body.

        Raises:
            UnknownModel: there is none.
        """
        if not isinstance(name, str):
            return self.default
        info = next((one for one in self.infos.values() if name in self._names(one)), None)
        if info is None:
            names = ", ".join(map(shown, self.infos))
            give = f"use {names}" if len(self.infos) == 1 else f"use one of {names}"
            raise UnknownModel(
                f"The model {shown(name)} does not exist here; {give}, or leave model out.", field="model"
            )
        return info

    def _names(self, info: ModelInfo) -> tuple[str, ...]:
        return (info.name, *self.aliases(info.name), public_source(info))

    def aliases(self, name: str) -> tuple[str, ...]:
        """What else clients call the model of this name."""
        return self.entries[name].aliases if name in self.entries else ()

    def default_slo(self, name: str) -> DefaultSlo | None:
        """What the model of this name says of the deadline of requests that give none."""
        return self.entries[name].default_slo if name in self.entries else None


def public_source(info: ModelInfo) -> str:
    """The hub id of the model, or its name if it came from a directory: no answer names a path of the server."""
    return info.name if info.path.startswith("/") else info.path or info.name
