"""Models and LoRAs that were added while a durable server ran: they are served again after its next start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tilework.core.model import LORA_NAME, LoraSource, NewModel, is_lora_name
from tilework.runtime.executor import ModelRefused
from tilework.server.calls.journal import CallJournal
from tilework.server.config import ConfigError
from tilework.server.engine_protocol import Catalog
from tilework.server.lora_directory import loras_in
from tilework.server.models_file import ModelEntry
from tilework.store.journal import Added

logger = logging.getLogger("tilework.server")
_ENTRY = TypeAdapter(ModelEntry)
_PATH = TypeAdapter(str)


@dataclass(slots=True)
class Additions:
    """Kept in the `journal` of calls.

    `gone` are the models that could not be served again, by name: their open calls fail.
    """

    journal: CallJournal
    gone: set[str] = field(default_factory=set, init=False)

    def add_model(self, name: str, entry: ModelEntry) -> None:
        loras = None if entry.loras is None else _absolute(entry.loras)
        kept = replace(entry, path=_absolute(entry.path), loras=loras)
        self.journal.add(Added(model=name, lora="", document=_ENTRY.dump_json(kept)))
        self.gone.discard(name)

    def add_lora(self, model: str, lora: LoraSource) -> None:
        self.journal.add(Added(model=model, lora=lora.name, document=_PATH.dump_json(_absolute(lora.path))))

    def remove(self, model: str, lora: str = "") -> None:
        """A LoRA is no more, or without one a model with all its LoRAs."""
        self.journal.remove(model, lora)
        self.gone.discard(model)

    async def serve_again(
        self,
        catalog: Catalog,
        served: Collection[str],
        entries: dict[str, ModelEntry],
        check_free: Callable[[str, Sequence[str]], None],
    ) -> None:
        """Add to the models that are `served`, and to their `entries`, what was added before this start.

        What the server was started with counts: one that has this name by now takes its place. `check_free` refuses
        names and aliases, as `ServedModels.check_free`.
        """
        for added in self.journal.added():
            what = f"the LoRA {added.lora} of {added.model}" if added.lora else f"the model {added.model}"
            try:
                if added.lora:
                    await _add_lora(catalog, served, added)
                elif added.model not in served:
                    entry = _ENTRY.validate_json(added.document)
                    await _add_model(catalog, added.model, entry, check_free)
                    entries[added.model] = entry
            except (ModelRefused, ConfigError, ValidationError) as error:
                logger.error(
                    "%s was added to the server before this start, and cannot be served again: %s; its open calls fail",
                    what,
                    error,
                )
                if not added.lora:
                    self.gone.add(added.model)


async def _add_model(
    catalog: Catalog, name: str, entry: ModelEntry, check_free: Callable[[str, Sequence[str]], None]
) -> None:
    loras = () if entry.loras is None else loras_in(Path(entry.loras))
    new = NewModel(path=entry.path, name=name, dtype=entry.dtype, loras=loras)
    await catalog.add(new, measure=True, check_name=lambda one: check_free(one, entry.aliases))


async def _add_lora(catalog: Catalog, served: Collection[str], added: Added) -> None:
    if added.model not in served:
        raise ModelRefused(f"{added.model} is not served")
    if not is_lora_name(added.lora):
        raise ModelRefused(f"its name is {added.lora!r}; use {LORA_NAME}")
    await catalog.add_lora(added.model, LoraSource(added.lora, _PATH.validate_json(added.document)))


def _absolute(path: str) -> str:
    """A path that the next start finds from wherever it is made; a hub id as it is."""
    return str(Path(path).resolve()) if Path(path).exists() else path
