"""Results, kept one per run under a digest of its configuration, so that a comparison can be continued."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tilework.formats.workload import WorkloadRequest
from tilework_lab.compare.figures import EtaFigures, Figures, PromiseFigures, SizeFigures

FORMAT = 1


class BadRecords(ValueError):
    """A file of results cannot be read; names the file, the line and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Wall-clock times, which no seed repeats: of the calls of `Policy.plan`, and of the whole run.

    `num_processes` were running on the machine.
    """

    num_plans: int
    plan_p50_ms: float
    plan_p99_ms: float
    wall_s: float
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundFigures:
    """Bound of one run: no schedule has more than `most_on_time` of the `num_due` requests with a deadline on time."""

    num_due: int
    most_on_time: float
    wall_s: float


Result = Figures | BoundFigures | PromiseFigures
_FIELDS: Mapping[type[Result], str] = {Figures: "run", BoundFigures: "bound", PromiseFigures: "promises"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The result of one run of a policy, or the bound of one workload and seed.

    `config` is all that decides it. `cell` and `code`, a digest of the program, are kept for information.
    """

    config: Mapping[str, Any]
    result: Result
    timing: Timing | None = None
    cell: str = ""
    code: str = ""

    @property
    def key(self) -> str:
        return key_of(self.config)

    def to_json(self) -> dict[str, Any]:
        document = {"format": FORMAT, "key": self.key, "cell": self.cell, "code": self.code, "config": self.config}
        document[_FIELDS[type(self.result)]] = _finite(asdict(self.result))
        return document | ({} if self.timing is None else {"timing": asdict(self.timing)})


def key_of(config: Mapping[str, Any]) -> str:
    return digest(config)


def parse_record(document: Mapping[str, Any]) -> Record:
    """Return the record of a JSON object. Raises KeyError, TypeError or ValueError if it is not one."""
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']}")
    timing = Timing(**document["timing"]) if "timing" in document else None
    return Record(
        config=document["config"],
        result=_result(document),
        timing=timing,
        cell=document["cell"],
        code=document["code"],
    )


class Records:
    """The results so far; with a file, each is written as soon as it is known."""

    def __init__(self, path: Path | None = None) -> None:
        """Read what the file holds. A last line that was cut off while it was written is removed.

        Raises:
            BadRecords: a line is not what this class writes.
            OSError: the file cannot be read or written.
        """
        self.path = path
        self._by_key: dict[str, Record] = {}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            _mend(path)
            self._by_key = {record.key: record for record in _read(path)}

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: str) -> Record | None:
        return self._by_key.get(key)

    def add(self, record: Record) -> None:
        """Raises OSError."""
        self._by_key[record.key] = record
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record.to_json(), ensure_ascii=False) + "\n")


def _mend(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)


def _read(path: Path) -> Iterator[Record]:
    for index, line in enumerate(path.read_text("utf-8").splitlines()):
        try:
            yield parse_record(json.loads(line))
        except (ValueError, LookupError, TypeError) as error:
            remedy = "give another --out, or remove the line"
            raise BadRecords(f"{path}:{index + 1}: no result of tilework compare ({error}); {remedy}") from error


def _result(document: Mapping[str, Any]) -> Result:
    if "bound" in document:
        return BoundFigures(**document["bound"])
    if "promises" in document:
        return _promise_figures(document["promises"])
    return _figures(document["run"])


def _promise_figures(values: Mapping[str, Any]) -> PromiseFigures:
    figures = PromiseFigures(**values)
    return replace(
        figures,
        asked=tuple(figures.asked),
        accepted=tuple(figures.accepted),
        on_time=tuple(figures.on_time),
        eta=EtaFigures(**values["eta"]),
    )


def _figures(values: Mapping[str, Any]) -> Figures:
    figures = Figures(**_infinite(values))
    by_size = {size: SizeFigures(**_infinite(one)) for size, one in values["by_size"].items()}
    return replace(figures, by_size=by_size, quantiles_s=tuple(figures.quantiles_s))


# JSON knows no infinity: a latency that is infinite is null there.


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if value == math.inf else value


def _infinite(values: Mapping[str, Any]) -> dict[str, Any]:
    def read(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [math.inf if each is None else each for each in value]
        return math.inf if value is None and name.endswith("_s") else value

    return {name: read(name, value) for name, value in values.items()}


def digest_of_requests(requests: Sequence[WorkloadRequest]) -> str:
    return digest([asdict(one) for one in requests])


def digest(value: Any) -> str:
    """Return the same for equal values of plain JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
