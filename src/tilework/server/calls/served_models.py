"""The models that a server serves, as clients name them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from tilework.core.model import MODEL_NAME, ModelInfo, NotServed, is_model_name
from tilework.runtime.executor import ModelRefused
from tilework.server.calls.errors import ModelNotServed, UnknownModel
from tilework.server.config import ConfigError
from tilework.server.default_slo import DefaultSlo
from tilework.server.models_file import ModelEntry
from tilework.server.schema.foreign_fields import OPENAI_MODELS
from tilework.server.text import shown


class NameRefused(ModelRefused):
    """A model cannot be called so. `field` is `name` or `aliases`; the message is the remedy."""

    def __init__(self, field: str, name: str, remedy: str) -> None:
        super().__init__(f"{field} = {shown(name)} is not accepted: {remedy}")
        self.field, self.name, self.remedy = field, name, remedy


@dataclass(frozen=True, slots=True)
class ServedModels:
    """Models by name. A request that names none gets the first that suits it. A hub id leads to its model, too, unless
    another has it as its name: SGLang's client sends it.

    `entries` are what the file of models says of some. `names` are what clients call the first one, if the server has
    been told so; its own name still leads to it. Unless it `is_strict`, a name of OpenAI's is as none. Those of
    `not_served` cannot run here: their names lead to the reason.
    """

    infos: Mapping[str, ModelInfo]
    entries: Mapping[str, ModelEntry] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    is_strict: bool = False
    not_served: Mapping[str, NotServed] = field(default_factory=dict)

    def check(self) -> None:
        """Raises ConfigError if a model is called as none can be, or if a name of the first model is one of another."""
        for info in (*self.infos.values(), *self._refused_infos):
            if not is_model_name(info.name):
                raise ConfigError(
                    f"the model of {info.path!r} is called {info.name!r}; start it as NAME=MODEL, with {MODEL_NAME}."
                )
        models = (*self.infos, *self.not_served)
        others = [name for model in models if not self._has_names(model) for name in self._given_names(model)]
        for name in self.names:
            if name in others:
                raise ConfigError(f"served_model_name has {name!r}, which is another model here; leave it out.")

    def check_free(self, name: str, aliases: Sequence[str]) -> None:
        """Check the names of a model that is added. An empty `name` is not known yet.

        The answer holds while no other change of models is made.

        Raises:
            NameRefused: it is no name, or leads to a model that is served.
        """
        if name and not is_model_name(name):
            raise NameRefused("name", name, f"Give {MODEL_NAME}.")
        for setting, one in (("name", name), *(("aliases", alias) for alias in aliases)):
            if (owner := self._owner(one)) is not None:
                raise NameRefused(setting, one, f"It leads to the model {owner.name}, which is served; give another.")

    @property
    def default(self) -> ModelInfo:
        return next(iter(self.infos.values()))

    @property
    def takes_pictures(self) -> bool:
        """Whether a request to some model may have pictures."""
        return any(info.pictures for info in self.infos.values())

    def named(self, name: object, *suits: Callable[[ModelInfo], bool]) -> ModelInfo:
        """The model of this name; without one the first that passes the first test that any passes, or the first.

        What is no text is refused with the body.

        Raises:
            UnknownModel: there is none.
            ModelNotServed: it cannot run here.
        """
        if not isinstance(name, str) or not name or self.stands_in(name):
            return next((one for test in suits for one in self.infos.values() if test(one)), self.default)
        info = self._owner(name)
        if info is None:
            self._refuse_if_not_served(name)
            listed = [name for one in self.infos for name in self.listed(one)]
            names = ", ".join(map(shown, listed))
            give = f"use {names}" if len(listed) == 1 else f"use one of {names}"
            raise UnknownModel(
                f"The model {shown(name)} does not exist here; {give}, or leave model out.", field="model"
            )
        return info

    def stands_in(self, name: str) -> bool:
        """Whether a model of OpenAI's has this name, and none here: another stands in for it."""
        if self.is_strict or OPENAI_MODELS.fullmatch(name) is None:
            return False
        return self._led_to(name, self.not_served, self._refused_infos) is None and self._owner(name) is None

    def _refuse_if_not_served(self, name: str) -> None:
        if (model := self._led_to(name, self.not_served, self._refused_infos)) is not None:
            reason = self.not_served[model].reason
            message = f"The model {shown(name)} cannot run on this server: {reason}. Use another model."
            raise ModelNotServed(message, field="model", resend=False)

    @property
    def _refused_infos(self) -> list[ModelInfo]:
        """What is known of those of `not_served`: nothing of those that could not be loaded."""
        return [one.info for one in self.not_served.values() if one.info is not None]

    def _owner(self, name: str) -> ModelInfo | None:
        """The model that a name leads to, of those that are served."""
        model = self._led_to(name, self.infos, self.infos.values())
        return None if model is None else self.infos[model]

    def _led_to(self, name: str, models: Iterable[str], infos: Iterable[ModelInfo]) -> str | None:
        """Which of these models a name leads to, by its own name; `infos` are theirs."""
        by_name = (one for one in models if name in self._given_names(one))
        by_source = (one.name for one in infos if name == public_source(one))
        return next(chain(by_name, by_source), None)

    def _given_names(self, model: str) -> tuple[str, ...]:
        return (*self.listed(model), model, *self.aliases(model))

    def listed(self, model: str) -> tuple[str, ...]:
        """The names under which the model of this name is shown to clients, one or more."""
        return self.names if self.names and self._has_names(model) else (model,)

    def _has_names(self, model: str) -> bool:
        """Whether it is the first one, which `names` are for, served or not."""
        firsts = [one.name for one in self.not_served.values() if one.is_first] or [self.default.name]
        return model == firsts[0]

    @property
    def listed_not_served(self) -> list[tuple[str, str]]:
        """The names under which models that cannot run here are shown to clients, and the reasons."""
        return [(name, one.reason) for one in self.not_served.values() for name in self.listed(one.name)]

    def called(self, name: str) -> str:
        """What answers call the model of this name, which may be served no more."""
        return self.listed(name)[0] if name in self.infos else name

    def aliases(self, name: str) -> tuple[str, ...]:
        """What else clients call the model of this name."""
        return self.entries[name].aliases if name in self.entries else ()

    def default_slo(self, name: str) -> DefaultSlo | None:
        """What the model of this name says of the deadline of requests that give none."""
        return self.entries[name].default_slo if name in self.entries else None


def public_source(info: ModelInfo) -> str:
    """The hub id of the model, or its name if it came from a directory: no answer names a path of the server."""
    return info.name if info.path.startswith("/") else info.path or info.name
