"""Old names and new ones: how what the old code wrote would read if the new code had written it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = Path(__file__).with_name("names.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The table of `names.json`, which says what each part of it means. An empty table: nothing has a new name."""

    classes: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str | None] = field(default_factory=dict)
    added: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    spelled: Mapping[str, str] = field(default_factory=dict)
    follows: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    header: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    workloads: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, str] = field(default_factory=dict)
    python: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    deliberate: Mapping[str, str] = field(default_factory=dict)

    @property
    def policies(self) -> Mapping[str, str]:
        return self.values.get("config.policy", {})

    def renewed(self, value: Any, holder: str) -> Any:
        """An old value, of an event, an action or a header, as the new code writes it.

        `holder` is the key that holds it, which stands for the class of an object that does not name its own.
        """
        if isinstance(value, list):
            return [self.renewed(item, holder) for item in value]
        if not isinstance(value, dict):
            return value
        old = str(value.get("is", holder))
        if old in self.spelled:
            return self.spelled[old].format_map(value)
        new = self.classes.get(old, old)
        renewed: dict[str, Any] = {}
        for key, item in value.items():
            if key == "is":
                renewed["is"] = new
            elif (name := self._field(old, key)) is not None:
                renewed[name] = self._value(old, key, self.renewed(item, key))
        return {**self.added.get(new, {}), **renewed}

    def renewed_header(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """The first line of a log, unchecked: reading it may raise, this does not."""
        return {**self.renewed(dict(header), "header"), **self.header}

    def compared(self, value: Any) -> Any:
        """A value in new names without what is not compared: texts, and what follows from other fields."""
        new = (self.fields.get(text, text) for text in self.texts)
        return _without(value, frozenset({*self.texts, *self.follows, *(name for name in new if name is not None)}))

    def _field(self, old_class: str, key: str) -> str | None:
        own = f"{old_class}.{key}"
        return self.fields[own] if own in self.fields else self.fields.get(key, key)

    def _value(self, old_class: str, key: str, value: Any) -> Any:
        own = f"{old_class}.{key}"
        if own in self.counts:
            return 0 if value is None else value + self.counts[own]
        table = self.values.get(own)
        if table is None:
            return value
        if isinstance(value, list):
            return [table.get(item, item) if isinstance(item, str) else item for item in value]
        return table.get(value, value) if isinstance(value, str) else value


def _without(value: Any, texts: frozenset[str]) -> Any:
    if isinstance(value, list):
        return [_without(item, texts) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without(item, texts) for key, item in value.items() if key not in texts}


def read_names(path: Path = NAMES) -> Names:
    """Raises TypeError for a part that is not known, ValueError for what is not JSON, OSError."""
    document = json.loads(path.read_text("utf-8"))
    del document["about"]
    texts, follows = tuple(document.pop("texts", ())), tuple(document.pop("follows", ()))
    python = {name: tuple(places) for name, places in document.pop("python", {}).items()}
    return Names(**document, texts=texts, follows=follows, python=python)
