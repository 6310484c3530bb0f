"""The event log: the events and actions of a controller, one JSON object per line.

The first line is the header: versions, configuration and the cost table that the controller started from. Every other
line is one `handle` call: `{"t": now_ns, "event": {...}, "actions": [...]}`. An event or action is an object with its
class's name under "is"; the class of other values follows from their fields. Fields that have their default are left
out. Prompts are not in the log.

A log may be in *segments*. Each begins with a header, so that it can be read when earlier ones are gone: the header of
a later segment has its number, the costs at that time, the devices that are up and the requests that are open.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from enum import EnumType
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from tilework.control.controller import Controller, ControllerConfig
from tilework.control.log_state import LoggedDevice, LogState, OpenRequest
from tilework.core.actions import Action
from tilework.core.cache import CacheChoice
from tilework.core.events import Event, ModelServed
from tilework.core.graph.stage import Stage
from tilework.core.lora import UsedLora
from tilework.core.work import Member, Work
from tilework.cost.table import BadCostTable, CostTable
from tilework.cost.table_file import parse_table, table_json
from tilework.policy.registry import check_live

FORMAT = 22
"""Number of the format. Before format 22 no start or stop was recorded as held back for promises.
Before format 21 no accept had the time by which nine of ten are done.
Before format 20 no node was silent.
Before format 19 logs had no segments, and their lines had all fields, and the class of each value.
Before format 18 nothing was measured while requests were served.
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
class LogEntry:
    """One `handle` call; `text` is its line in the log."""

    line: int
    now_ns: int
    event: Event
    actions: tuple[Action, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHeader:
    """The first line of a log, or of one of its segments.

    `devices` are up and `open` requests are open where a later segment begins; both are empty where a log begins. If it
    `is_simulated`, a simulation wrote the log, else a server.
    """

    version: str
    config: ControllerConfig
    table: CostTable
    segment: int = 1
    devices: tuple[LoggedDevice, ...] = ()
    open: tuple[OpenRequest, ...] = ()
    is_simulated: bool = False

    @property
    def is_continued(self) -> bool:
        """True if the log has an earlier part, which its reader does not know."""
        return self.segment > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first line at which a new controller answers differently from the log."""

    line: int
    logged: str
    replayed: str


def header_line(
    version: str,
    config: ControllerConfig,
    table: CostTable,
    segment: int = 1,
    state: LogState | None = None,
    *,
    is_simulated: bool = False,
) -> str:
    """Return the header of a log; for a later segment, that with the `state` of the log so far."""
    document = {"tilework_log": FORMAT, "version": version, "config": asdict(config), "cost_table": table_json(table)}
    if state is not None:
        document |= {"segment": segment, "devices": state.devices, "open": state.open}
    if is_simulated:
        document["simulated"] = True
    return _dump(document)


def entry_line(event: Event, actions: tuple[Action, ...], now_ns: int) -> str:
    return _dump({"t": now_ns, "event": _named(event), "actions": [_named(action) for action in actions]})


def ignore(_text: str) -> None:
    """Ignore a warning."""


def read_log(lines: Iterable[str], warn: Callable[[str], None] = ignore) -> tuple[LogHeader, Iterator[LogEntry]]:
    """Split a log, of one or more segments in order, into the header of the first and all entries.

    `warn` gets a text about what is left out: what is unknown in a header, and the last line if it was cut off while it
    was written. Raises BadLog, for later lines while iterating.
    """
    iterator = iter(lines)
    header = _header(_load(next(iterator, ""), 1), 1, warn)
    return header, _entries(iterator, header.segment, _Stages(header.table), warn)


def _header(document: dict[str, Any], line: int, warn: Callable[[str], None]) -> LogHeader:
    """Return the header in a document. Raises BadLog."""
    if "tilework_log" not in document:
        raise BadLog(f"line {line} is not the header of a log; give a file that `tilework serve --log` wrote")
    if document["tilework_log"] != FORMAT:
        raise BadLog(
            f"line {line} is the header of a log of format {document['tilework_log']!r}, "
            f"and this Tilework reads format {FORMAT}; "
            f"read the log with the version that wrote it ({document.get('version', 'unknown')})"
        )
    unknown = _Unknown()
    try:
        table = parse_table(document["cost_table"], unknown.table)
        header = LogHeader(
            version=document["version"],
            config=_config(document["config"], unknown),
            table=table,
            segment=document.get("segment", 1),
            devices=_from_plain(document.get("devices", ()), tuple[LoggedDevice, ...], _Stages(table)),
            open=_from_plain(document.get("open", ()), tuple[OpenRequest, ...], _Stages(table)),
            is_simulated=_from_plain(document.get("simulated", False), bool, _Stages(table)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadLog(f"line {line} is not the header of a log: {error!r}") from error
    unknown.tell(f"line {line}", warn)
    return header


def _config(document: dict[str, Any], unknown: _Unknown) -> ControllerConfig:
    """Return the configuration, without fields of other versions."""
    known = _field_names(ControllerConfig)
    if not isinstance(document, dict):
        raise TypeError(f"config is {document!r}")
    for name in document.keys() - set(known):
        unknown.texts.append(f"config.{name} is not a field")
    return ControllerConfig(**{name: document[name] for name in known if name in document})


@dataclass(slots=True)
class _Unknown:
    """Parts of a line that are left out, since this version does not know them."""

    texts: list[str] = field(default_factory=list)

    def table(self, error: BadCostTable) -> None:
        self.texts.append(f"cost_table.{error}")

    def tell(self, place: str, warn: Callable[[str], None]) -> None:
        """Warn once, whatever the number of texts."""
        if self.texts:
            more = f" (and {len(self.texts) - 1} more)" if len(self.texts) > 1 else ""
            warn(f"{place} is read without what is unknown in it: {self.texts[0]}{more}")


def _entries(lines: Iterator[str], segment: int, stages: _Stages, warn: Callable[[str], None]) -> Iterator[LogEntry]:
    now_ns = 0
    for line, text in enumerate(lines, start=2):
        try:
            document = _load(text, line)
        except BadLog:
            if text.endswith("\n") or next(lines, None) is not None:
                raise
            warn(f"line {line}, the last, was cut off while it was written; it is left out")
            return
        if "tilework_log" in document:
            header = _header(document, line, warn)
            _check_next(header.segment, segment, line)
            segment = header.segment
            continue
        entry = _entry(document, text, line, stages, warn)
        if entry.now_ns < now_ns:
            raise BadLog(f"line {line} has time {entry.now_ns}, before that of the line above; lines were moved")
        now_ns = entry.now_ns
        yield entry


def _check_next(segment: int, last: int, line: int) -> None:
    if segment != last + 1:
        raise BadLog(f"line {line} begins segment {segment}, after segment {last}; those between are missing")


def replay(lines: Iterable[str], warn: Callable[[str], None] = ignore) -> tuple[int, Difference | None]:
    """Feed a log's events to a new controller; returns the number of equal lines and the first difference, if any.

    The actions are recomputed from the events and the header alone, and the whole line is compared as text. An event
    at which the controller raises an error is a difference, too.

    `warn` is as in `read_log`.

    Raises:
        BadLog: a line cannot be read, or the log does not begin with its first segment.
        UnknownPolicy: the log's policy does not exist in this version, or needs to know the requests that will come.
    """
    header, entries = read_log(lines, warn)
    if header.is_continued:
        raise BadLog(
            f"the log begins with segment {header.segment}: earlier segments are gone, and the controller cannot "
            "decide again without them; explain and timeline read the rest"
        )
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
    """The stages of a log's pipelines, by their texts in its lines.
    Examples are "flux/encode", "flux/encode[anime=0.8]", or, with a cache, "flux/diffuse{patch=0.01}".
    """

    def __init__(self, table: CostTable) -> None:
        self._by_text: dict[str, Stage] = {}
        self.add(table)

    def add(self, table: CostTable) -> None:
        """Add the stages of a table's pipelines."""
        pipelines = {row.pipeline for row in table.rows}
        self._by_text |= {str(stage): stage for one in pipelines for stage in table.graph(one).stages}

    def __getitem__(self, text: str) -> Stage:
        """Return the stage with this text. Raises KeyError, ValueError."""
        if text not in self._by_text:
            used, _, cache = text.removesuffix("}").rpartition("{") if text.endswith("}") else (text, "", "")
            plain = self._used(used)
            self._by_text[text] = plain.with_cache(CacheChoice.parse(cache)) if cache else plain
        return self._by_text[text]

    def _used(self, text: str) -> Stage:
        """Return a stage without a cache."""
        if text not in self._by_text:
            plain, _, loras = text.removesuffix("]").rpartition("[")
            self._by_text[text] = replace(self._by_text[plain], loras=tuple(map(UsedLora.parse, loras.split(","))))
        return self._by_text[text]


def _entry(document: dict[str, Any], text: str, line: int, stages: _Stages, warn: Callable[[str], None]) -> LogEntry:
    try:
        event = _from_plain(document["event"], _EVENTS[document["event"]["is"]], stages)
        if isinstance(event, ModelServed):
            stages.add(served_table(event, f"line {line}", warn))
        return LogEntry(
            line=line,
            now_ns=_from_plain(document["t"], int, stages),
            event=event,
            actions=tuple(_from_plain(action, _ACTIONS[action["is"]], stages) for action in document["actions"]),
            text=text.rstrip("\n"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadLog(f"line {line} is not an entry: {error!r}") from error


def served_table(event: ModelServed, place: str = "", warn: Callable[[str], None] = ignore) -> CostTable:
    """Return the costs of a model that is served from now on, without unknown parts. Raises BadCostTable."""
    unknown = _Unknown()
    table = parse_table(json.loads(event.costs), unknown.table)
    unknown.tell(place, warn)
    return table


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
_MEMBER_LISTS = tuple(f"{name}s" for name in Member._fields)
"""Names of the lists in which the log has the members of a work: their job ids, their attempts and so on."""


def _plain(value: Any) -> Any:
    """Return a value that JSON knows for one that it does not; sets are sorted, so equal values give equal text."""
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Stage):
        return str(value)
    if isinstance(value, Work):
        return _plain_work(value)
    return _given(value)


def _plain_work(work: Work) -> dict[str, Any]:
    """Return the fields of a work, with a list for each field of its members in the place of these."""
    lists = {name: [one[place] for one in work.members] for place, name in enumerate(_MEMBER_LISTS)}
    plain: dict[str, Any] = {}
    for name, one in _given(work).items():
        plain |= lists if name == "members" else {name: one}
    return plain


def _given(value: Any) -> dict[str, Any]:
    """Return the fields of a value that do not have their default."""
    given = {}
    cls: Any = type(value)
    for name, default in _defaults(cls):
        one = getattr(value, name)
        if one != default:
            given[name] = one
    return given


def _named(value: Event | Action) -> dict[str, Any]:
    return {"is": type(value).__name__} | _given(value)


# One encoder for all lines, without the search for cycles, since it runs for every event.
_dump = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False, default=_plain).encode


def _from_plain(plain: Any, cls: Any, stages: _Stages) -> Any:
    """Undo `_plain` for a value annotated as `cls`. Raises KeyError, TypeError or ValueError."""
    if cls is Stage:
        return stages[plain]
    origin, arguments = get_origin(cls), get_args(cls)
    if origin in (Union, types.UnionType):
        return None if plain is None else _from_plain(plain, next(a for a in arguments if a is not type(None)), stages)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(_from_plain(item, kind, stages) for item, kind in zip(plain, arguments, strict=True))
    if origin in (tuple, frozenset):
        return origin(_from_plain(item, arguments[0], stages) for item in plain)
    if cls is Member:
        return Member(*(_from_plain(number, int, stages) for number in plain))
    if isinstance(cls, EnumType):
        return cls(plain)
    if cls in (int, float, str, bool):
        if type(plain) is not cls:
            raise TypeError(f"{plain!r} is not of type {cls.__name__}")
        return plain
    hints = _hints(cls)
    if cls is Work:
        plain = plain | {"members": zip(*(plain[name] for name in _MEMBER_LISTS), strict=True)}
    return cls(**{name: _from_plain(plain[name], hint, stages) for name, hint in hints.items() if name in plain})


@cache
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls) if field.init)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {name: hints[name] for name in _field_names(cls)}


@cache
def _defaults(cls: Any) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a class, each with its default, or MISSING."""
    return tuple(
        (one.name, one.default if one.default_factory is MISSING else one.default_factory())
        for one in fields(cls)
        if one.init
    )
