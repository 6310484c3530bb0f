"""The event log: the events and actions of a controller, one JSON object per line.

The first line is the header: versions, configuration and the cost table that the controller started from. Every other
line is one `handle` call: `{"t": now_ns, "event": {...}, "actions": [...]}`. An event, action or other value of a class
is an object with the class's name under "is". Prompts are not in the log.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from enum import EnumType
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from tilework.control.controller import Controller, ControllerConfig
from tilework.core.actions import Action
from tilework.core.cache import CacheChoice
from tilework.core.events import Event, ModelServed
from tilework.core.graph.stage import Stage
from tilework.core.lora import UsedLora
from tilework.cost.table import CostTable
from tilework.cost.table_file import parse_table, table_json
from tilework.policy.registry import check_live

FORMAT = 18
"""Before format 18 nothing was measured while requests were served.
Before format 17 all accelerators of a node could always form groups.
Before format 16 no request got a cache after it was accepted, and cost tables said nothing of caches.
Before format 15 no request had a cache.
Before format 14 no node left before it was gone, and no time of a move between nodes was measured.
Before format 13 no node was lost as a whole.
Before format 12 no load was dropped before its end.
Before format 11 no request was for a video.
Before format 10 each request began with its encode; before format 9 hosts read nothing ahead of need.
Before format 8 requests used no LoRAs, and loads did not say what a host forgets.
Before format 7 decodes were not shared, and hosts kept no copies.
Before format 6 devices had no components.
Before format 5 a work named its stage by pipeline and name, and had no positions.
Format 2 had no exact requests; format 1 had other names: GPUs for devices, SetAside for DropToBestEffort."""


class BadLog(ValueError):
    """A log that cannot be read; the message names the line and the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One `handle` call; `text` is its line in the log."""

    line: int
    now_ns: int
    event: Event
    actions: tuple[Action, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    version: str
    config: ControllerConfig
    table: CostTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first line at which a new controller answers differently from the log."""

    line: int
    logged: str
    replayed: str


def header_line(version: str, config: ControllerConfig, table: CostTable) -> str:
    return _dump(
        {"tilework_log": FORMAT, "version": version, "config": asdict(config), "cost_table": table_json(table)}
    )


def entry_line(event: Event, actions: tuple[Action, ...], now_ns: int) -> str:
    return _dump({"t": now_ns, "event": event, "actions": actions})


def read_log(lines: Iterable[str]) -> tuple[Header, Iterator[Entry]]:
    """Split a log into its header and its entries. Raises BadLog, for later lines while iterating."""
    iterator = iter(lines)
    first = _load(next(iterator, ""), 1)
    if "tilework_log" not in first:
        raise BadLog("line 1 is not the header of a log; give a file that `tilework serve --log` wrote")
    if first["tilework_log"] != FORMAT:
        raise BadLog(
            f"line 1 is the header of a log of format {first['tilework_log']!r}, "
            f"and this Tilework reads format {FORMAT}; "
            f"read the log with the version that wrote it ({first.get('version', 'unknown')})"
        )
    try:
        config, table = ControllerConfig(**first["config"]), parse_table(first["cost_table"])
        header = Header(version=first["version"], config=config, table=table)
    except (KeyError, TypeError, ValueError) as error:
        raise BadLog(f"line 1 is not the header of a log: {error!r}") from error
    return header, _entries(iterator, _Stages(table))


def _entries(lines: Iterator[str], stages: _Stages) -> Iterator[Entry]:
    now_ns = 0
    for line, text in enumerate(lines, start=2):
        entry = _entry(text, line, stages)
        if entry.now_ns < now_ns:
            raise BadLog(f"line {line} has time {entry.now_ns}, before that of the line above; lines were moved")
        now_ns = entry.now_ns
        yield entry


def replay(lines: Iterable[str]) -> tuple[int, Difference | None]:
    """Feed a log's events to a new controller; returns the number of equal lines and the first difference, if any.

    The actions are recomputed from the events and the header alone, and the whole line is compared as text. An event
    at which the controller raises an error is a difference, too.

    Raises:
        BadLog: a line cannot be read.
        UnknownPolicy: the log's policy does not exist in this version, or needs to know the requests that will come.
    """
    header, entries = read_log(lines)
    check_live(header.config.policy)
    controller = Controller(header.config, header.table)
    count = 0
    for entry in entries:
        try:
            replayed = entry_line(entry.event, controller.handle(entry.event, entry.now_ns), entry.now_ns)
        except Exception as error:
            replayed = f"the controller fails: {error!r}"
        if replayed != entry.text:
            return count, Difference(line=entry.line, logged=entry.text, replayed=replayed)
        count += 1
    return count, None


class _Stages:
    """The stages of a log's pipelines, by what a line calls them: "flux/encode", "flux/encode[anime=0.8]", or, with a
    cache, "flux/diffuse{patch=0.01}".
    """

    def __init__(self, table: CostTable) -> None:
        self._by_text: dict[str, Stage] = {}
        self.add(table)

    def add(self, table: CostTable) -> None:
        """Add the stages of a table's pipelines."""
        pipelines = {row.pipeline for row in table.rows}
        self._by_text |= {str(stage): stage for one in pipelines for stage in table.graph(one).stages}

    def __getitem__(self, text: str) -> Stage:
        """Raises KeyError, ValueError."""
        if text not in self._by_text:
            used, _, cache = text.removesuffix("}").rpartition("{") if text.endswith("}") else (text, "", "")
            plain = self._used(used)
            self._by_text[text] = plain.with_cache(CacheChoice.parse(cache)) if cache else plain
        return self._by_text[text]

    def _used(self, text: str) -> Stage:
        """A stage without a cache."""
        if text not in self._by_text:
            plain, _, loras = text.removesuffix("]").rpartition("[")
            self._by_text[text] = replace(self._by_text[plain], loras=tuple(map(UsedLora.parse, loras.split(","))))
        return self._by_text[text]


def _entry(text: str, line: int, stages: _Stages) -> Entry:
    document = _load(text, line)
    try:
        event = _from_plain(document["event"], _EVENTS[document["event"]["is"]], stages)
        if isinstance(event, ModelServed):
            stages.add(parse_table(json.loads(event.costs)))
        return Entry(
            line=line,
            now_ns=_from_plain(document["t"], int, stages),
            event=event,
            actions=tuple(_from_plain(action, _ACTIONS[action["is"]], stages) for action in document["actions"]),
            text=text.rstrip("\n"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadLog(f"line {line} is not an entry: {error!r}") from error


def _load(text: str, line: int) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise BadLog(
            f"line {line} is not JSON ({error}); the log may have been cut off while it was written"
        ) from error
    if not isinstance(document, dict):
        raise BadLog(f"line {line} is not a JSON object")
    return document


_EVENTS: dict[str, type] = {event.__name__: event for event in get_args(Event)}
_ACTIONS: dict[str, type] = {action.__name__: action for action in get_args(Action)}


def _plain(value: Any) -> Any:
    """A value that JSON does not know, as one that it knows; sets are sorted, so that equal values give equal text."""
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Stage):
        return str(value)
    cls: Any = type(value)
    return {"is": cls.__name__, **{name: getattr(value, name) for name in _field_names(cls)}}


# One encoder for all lines, without the search for cycles, since it runs for every event.
_dump = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False, default=_plain).encode


def _from_plain(plain: Any, cls: Any, stages: _Stages) -> Any:
    """The inverse of `_plain` for a value annotated as `cls`. Raises KeyError, TypeError or ValueError."""
    if cls is Stage:
        return stages[plain]
    origin, arguments = get_origin(cls), get_args(cls)
    if origin in (Union, types.UnionType):
        return None if plain is None else _from_plain(plain, next(a for a in arguments if a is not type(None)), stages)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(_from_plain(item, kind, stages) for item, kind in zip(plain, arguments, strict=True))
    if origin in (tuple, frozenset):
        return origin(_from_plain(item, arguments[0], stages) for item in plain)
    if isinstance(cls, EnumType):
        return cls(plain)
    if cls in (int, float, str, bool):
        if type(plain) is not cls:
            raise TypeError(f"{plain!r} is not of type {cls.__name__}")
        return plain
    hints = _hints(cls)
    return cls(**{name: _from_plain(plain[name], hint, stages) for name, hint in hints.items()})


@cache
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls) if field.init)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {name: hints[name] for name in _field_names(cls)}
