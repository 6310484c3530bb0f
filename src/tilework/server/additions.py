"""Models and LoRAs that were added while a durable server ran: they are served again after its next start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tilework.core.model import LORA_NAME, LoraSource, NewModel, is_lora_name
from tilework.runtime.executor import ModelRefused
from tilework.runtime.models.catalog import Catalog
from tilework.server.calls.journal import CallJournal
from tilework.server.config import ConfigError
from tilework.server.models_file import ModelEntry
from tilework.store.journal import Added

logger = logging.getLogger("tilework.server")
_ENTRY = TypeAdapter(ModelEntry)
_PATH = TypeAdapter(str)


@dataclass(slots=True)
class Additions:
    """Models and LoRAs that were added, kept in the `journal` of calls.

    Each LoRA is an entry of its own, so that LoRAs of a directory come and go like any other. `gone` holds what could
    not be served again, as model and LoRA ("" for the model): its open calls fail.
    """

    journal: CallJournal
    gone: set[tuple[str, str]] = field(default_factory=set, init=False)

    @property
    def gone_models(self) -> list[str]:
        return [model for model, lora in self.gone if not lora]

    def add_model(self, name: str, entry: ModelEntry, loras: Iterable[LoraSource]) -> None:
        """Record that a model is served from now on, with these LoRAs."""
        kept = replace(entry, path=_absolute(entry.path), loras=None)
        model = Added(model=name, lora="", document=_ENTRY.dump_json(kept))
        self.journal.add(model, *(_kept_lora(name, one) for one in loras))
        self.gone = {one for one in self.gone if one[0] != name}

    def add_lora(self, model: str, lora: LoraSource) -> None:
        self.journal.add(_kept_lora(model, lora))
        self.gone.discard((model, lora.name))

    def remove(self, model: str, lora: str = "") -> None:
        """Record that a LoRA was removed; without `lora`, a model with all its LoRAs."""
        self.journal.remove(model, lora)
        self.gone = {one for one in self.gone if one != (model, lora) and (lora or one[0] != model)}

    async def serve_again(
        self,
        catalog: Catalog,
        begun: Mapping[str, Collection[str]],
        entries: dict[str, ModelEntry],
        check_free: Callable[[str, Sequence[str]], None],
    ) -> None:
        """Serve again what was added before this start: add it to `catalog` and `entries`.

        `begun` are the models of this start, with their LoRAs. They take precedence: an added model whose name one of
        them has is left out with all its LoRAs, and so is an added LoRA whose name the model has already. `check_free`
        refuses names and aliases, as `ServedModels.check_free`.
        """
        others = set[str]()  # Names of added models that a model of this start has taken.
        for added in self.journal.added():
            if not added.lora and added.model in begun:
                others.add(added.model)
            is_other = added.model in others or added.lora in begun.get(added.model, ())
            if is_other or (added.model, "") in self.gone:
                continue
            what = f"the LoRA {added.lora} of {added.model}" if added.lora else f"the model {added.model}"
            try:
                if added.lora:
                    await _add_lora(catalog, added)
                else:
                    entry = _ENTRY.validate_json(added.document)
                    await _add_model(catalog, added.model, entry, check_free)
                    entries[added.model] = entry
            except (ModelRefused, ConfigError, ValidationError) as error:
                logger.error(
                    "%s was added to the server before this start, and cannot be served again: %s; its open calls fail",
                    what,
                    error,
                )
                self.gone.add((added.model, added.lora))


async def _add_model(
    catalog: Catalog, name: str, entry: ModelEntry, check_free: Callable[[str, Sequence[str]], None]
) -> None:
    new = NewModel(path=entry.path, name=name, dtype=entry.dtype)
    await catalog.add(new, measure=True, check_name=lambda one: check_free(one, entry.aliases))


async def _add_lora(catalog: Catalog, added: Added) -> None:
    if not is_lora_name(added.lora):
        raise ModelRefused(f"its name is {added.lora!r}; use {LORA_NAME}")
    await catalog.add_lora(added.model, LoraSource(added.lora, _PATH.validate_json(added.document)))


def _kept_lora(model: str, lora: LoraSource) -> Added:
    return Added(model=model, lora=lora.name, document=_PATH.dump_json(_absolute(lora.path)))


def _absolute(path: str) -> str:
    """Return a path that holds from any working directory of the next start; a hub id as it is."""
    return str(Path(path).resolve()) if Path(path).exists() else path
