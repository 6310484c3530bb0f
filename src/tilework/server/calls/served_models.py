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
    """The name of a model is not accepted. `field` is `name` or `aliases`; the message is the remedy."""

    def __init__(self, field: str, name: str, remedy: str) -> None:
        super().__init__(f"{field} = {shown(name)} is not accepted: {remedy}")
        self.field = field
        self.name = name
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class ServedModels:
    """Models by name. A request that names none gets the first that suits it.

    A hub id also leads to its model, unless another model has it as its name: SGLang's client sends it. `entries` are
    the settings of models in the file of models. `names` are the names of the first model for clients, if the server
    was given any; its own name still leads to it. Unless `is_strict`, a name of OpenAI's counts as none. Models of
    `not_served` cannot run here: their names lead to the reason.
    """

    infos: Mapping[str, ModelInfo]
    entries: Mapping[str, ModelEntry] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    is_strict: bool = False
    not_served: Mapping[str, NotServed] = field(default_factory=dict)

    def check(self) -> None:
        """Check the names. Raises ConfigError if one is invalid, or one of the first model is that of another."""
        for info in (*self.infos.values(), *self._refused_infos):
            if not is_model_name(info.name):
                raise ConfigError(
                    f"the model of {info.path!r} is called {info.name!r}; start it as NAME=MODEL, with {MODEL_NAME}."
                )
        models = (*self.infos, *self.not_served)
        others = [name for model in models if not self._has_names(model) for name in self._given_names(model)]
        for name in self.names:
            if name in others:
                raise ConfigError(
                    f"served_model_name has {name!r}, which is another model of this server; leave it out."
                )

    def check_free(self, name: str, aliases: Sequence[str]) -> None:
        """Check the names of a model that is added. An empty `name` is not known yet.

        The result holds while no other change of models is made.

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
        """True if a request to some model may have pictures."""
        return any(info.pictures for info in self.infos.values())

    def named(self, name: object, *suits: Callable[[ModelInfo], bool]) -> ModelInfo:
        """Return the model of this name. Without one: the first to pass the first test that any passes, or the first.

        A name that is no text is refused with the body.

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
        """Return whether OpenAI has a model of this name, and this server has none: another stands in for it."""
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
        """Models of `not_served`, without those that could not be loaded."""
        return [one.info for one in self.not_served.values() if one.info is not None]

    def _owner(self, name: str) -> ModelInfo | None:
        """Return the served model that a name leads to."""
        model = self._led_to(name, self.infos, self.infos.values())
        return None if model is None else self.infos[model]

    def _led_to(self, name: str, models: Iterable[str], infos: Iterable[ModelInfo]) -> str | None:
        """Return the one of these models that a name leads to, by its own name; `infos` are theirs."""
        by_name = (one for one in models if name in self._given_names(one))
        by_source = (one.name for one in infos if name == public_source(one))
        return next(chain(by_name, by_source), None)

    def _given_names(self, model: str) -> tuple[str, ...]:
        return (*self.listed(model), model, *self.aliases(model))

    def listed(self, model: str) -> tuple[str, ...]:
        """Return the names under which the model of this name is shown to clients, one or more."""
        return self.names if self.names and self._has_names(model) else (model,)

    def _has_names(self, model: str) -> bool:
        """Return whether it is the first model, served or not, which has `names`."""
        firsts = [one.name for one in self.not_served.values() if one.is_first] or [self.default.name]
        return model == firsts[0]

    @property
    def listed_not_served(self) -> list[tuple[str, str]]:
        """Names under which models that cannot run here are shown to clients, and the reasons."""
        return [(name, one.reason) for one in self.not_served.values() for name in self.listed(one.name)]

    def called(self, name: str) -> str:
        """Return the name that answers give to the model of this name, which may be served no more."""
        return self.listed(name)[0] if name in self.infos else name

    def aliases(self, name: str) -> tuple[str, ...]:
        """Return the other names by which clients call the model of this name."""
        return self.entries[name].aliases if name in self.entries else ()

    def default_slo(self, name: str) -> DefaultSlo | None:
        """Return the default deadline that the model of this name sets, if any."""
        return self.entries[name].default_slo if name in self.entries else None


def public_source(info: ModelInfo) -> str:
    """Return the hub id of the model, or its name if it came from a directory: no answer shows a path of the server."""
    return info.name if info.path.startswith("/") else info.path or info.name
