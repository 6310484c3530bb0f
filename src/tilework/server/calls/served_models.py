"""The models that a server serves, as clients name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tilework.core.model import ModelInfo
from tilework.server.calls.errors import UnknownModel
from tilework.server.config import ConfigError
from tilework.server.default_slo import DefaultSlo
from tilework.server.models_file import ModelEntry
from tilework.server.text import shown


@dataclass(frozen=True, slots=True)
class ServedModels:
    """Models by name. A request that names none gets the first that suits it. A hub id is a name, too: SGLang's client
    sends it.

    `entries` are what the file of models says of some. `names` are what clients call the first one, if the server has
    been told so; its own name still leads to it.
    """

    infos: Mapping[str, ModelInfo]
    entries: Mapping[str, ModelEntry] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises ConfigError if a name of the first model is one of another."""
        others = [name for info in list(self.infos.values())[1:] for name in self._names(info)]
        for name in self.names:
            if name in others:
                raise ConfigError(f"served_model_name has {name!r}, which is another model here; leave it out.")

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

    def named(self, name: object, suits: Callable[[ModelInfo], bool] = lambda _: True) -> ModelInfo:
        """The model of this name; without one the first that `suits`, or the first if none does.

        What is no text is refused with the body.

        Raises:
            UnknownModel: there is none.
        """
        if not isinstance(name, str):
            return next(filter(suits, self.infos.values()), self.default)
        info = next((one for one in self.infos.values() if name in self._names(one)), None)
        if info is None:
            listed = [name for one in self.infos.values() for name in self.listed(one)]
            names = ", ".join(map(shown, listed))
            give = f"use {names}" if len(listed) == 1 else f"use one of {names}"
            raise UnknownModel(
                f"The model {shown(name)} does not exist here; {give}, or leave model out.", field="model"
            )
        return info

    def _names(self, info: ModelInfo) -> tuple[str, ...]:
        return (*self.listed(info), info.name, *self.aliases(info.name), public_source(info))

    def listed(self, info: ModelInfo) -> tuple[str, ...]:
        """The names under which a model is shown to clients, one or more."""
        return self.names if self.names and info.name == self.default.name else (info.name,)

    def called(self, name: str) -> str:
        """What answers call the model of this name, which may be served no more."""
        return self.listed(self.infos[name])[0] if name in self.infos else name

    def aliases(self, name: str) -> tuple[str, ...]:
        """What else clients call the model of this name."""
        return self.entries[name].aliases if name in self.entries else ()

    def default_slo(self, name: str) -> DefaultSlo | None:
        """What the model of this name says of the deadline of requests that give none."""
        return self.entries[name].default_slo if name in self.entries else None


def public_source(info: ModelInfo) -> str:
    """The hub id of the model, or its name if it came from a directory: no answer names a path of the server."""
    return info.name if info.path.startswith("/") else info.path or info.name
