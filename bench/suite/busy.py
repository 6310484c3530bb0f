"""What the devices of a live server did, and how long they idled while something waited."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from suite.case import CaseFailed
from suite.stages import DIFFUSE
from tilework.client.record import Record
from tilework.control.history_recorder import read_history
from tilework.core.request import Shape
from tilework.core.time import s_from_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One executed work, on the engine's clock."""

    request: int
    shape: Shape
    stage: str
    device: int
    steps: int
    arrival_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Between two works of a device; `shape` is the second one's, `moved` says that it ran elsewhere before."""

    kind: str
    shape: Shape
    seconds: float
    before_s: float
    moved: bool


class Timeline:
    """What each device did in one saturated run. `step_s` holds the seconds of every denoising step, by size."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = sorted(pieces, key=lambda piece: piece.start_s)
        self._last_s = {piece.request: piece.end_s for piece in self._pieces}
        self.gaps = tuple(self._gaps())
        self.step_s: dict[Shape, list[float]] = {}
        for piece in pieces:
            if piece.stage == DIFFUSE:
                seconds = (piece.end_s - piece.start_s) / piece.steps
                self.step_s.setdefault(piece.shape, []).extend([seconds] * piece.steps)

    @property
    def idle_share(self) -> float:
        idle_s = sum(gap.seconds for gap in self.gaps)
        return idle_s / (idle_s + sum(gap.before_s for gap in self.gaps))

    def _gaps(self) -> Iterator[Gap]:
        for device in sorted({piece.device for piece in self._pieces}):
            for before, after in pairwise(piece for piece in self._pieces if piece.device == device):
                if self._work_waited(before, after):
                    yield Gap(
                        kind=_kind(before, after),
                        shape=after.shape,
                        seconds=after.start_s - before.end_s,
                        before_s=before.end_s - before.start_s,
                        moved=self._device_before(after) not in (None, device),
                    )

    def _work_waited(self, before: Piece, after: Piece) -> bool:
        """Whether some request could have run here from the one work's end to the other's start."""
        elsewhere = {
            piece.request
            for piece in self._pieces
            if piece.device != before.device and piece.start_s < after.start_s and piece.end_s > before.end_s
        }
        here = {piece.request for piece in self._pieces if piece.arrival_s <= before.end_s} - elsewhere
        return any(self._last_s[request] > after.start_s for request in here)

    def _device_before(self, piece: Piece) -> int | None:
        former = [p.device for p in self._pieces if p.request == piece.request and p.end_s <= piece.start_s]
        return former[-1] if former else None


def _kind(before: Piece, after: Piece) -> str:
    return "same request" if before.request == after.request else "another request"


def pieces_of(records: list[Record], arrivals_s: dict[str, float]) -> list[Piece]:
    """What the answers tell; `arrivals_s` by uid, as the event log has them. Raises CaseFailed for one that failed."""
    pieces = []
    for record in records:
        if record.timeline is None:
            raise CaseFailed(f"request {record.index} failed: {record.detail}")
        arrival_s = arrivals_s[record.timeline["uid"]]
        for segment in record.timeline["segments"]:
            (device,) = segment["devices"]
            pieces.append(
                Piece(
                    request=record.index,
                    shape=record.shape,
                    stage=segment["stage"],
                    device=device,
                    steps=segment["steps"],
                    arrival_s=arrival_s,
                    start_s=arrival_s + segment["start_s"],
                    end_s=arrival_s + segment["end_s"],
                )
            )
    return pieces


def arrivals_in(log: Path) -> dict[str, float]:
    with log.open(encoding="utf-8") as lines:
        history = read_history(lines)
    return {past.request.uid: s_from_ns(past.request.arrival_ns) for past in history.requests}
