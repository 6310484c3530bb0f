"""A run that measures durations: the conditions under which they are valid, and the measured rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tilework.core.cost_row import CostRow
from tilework.cost.batch_latency import BatchLatencyModel
from tilework.cost.rows import RowKey, row_key
from tilework.cost.table import CostTable


class ProfileOrigin(StrEnum):
    """The origin of a profile: the start of a server (a short calibration), or `tilework profile` (thorough)."""

    CALIBRATION = "calibration"
    PROFILE = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """The conditions under which durations are valid; under any others they must be measured again.

    `hardware` is one device, `threads` are those of each worker. Durations belong to the `architecture` of a model, not
    to its weights: `model`, the identity of the measured one, is for people, and does not make another key. Durations
    measured by earlier versions have no architecture, and are valid for their model. `workers` is the number of workers
    that measured at the same time on a shared resource (the memory of CPUs), 1 where each has a device of its own.
    """

    hardware: str
    architecture: str
    model: str = field(compare=False)
    dtype: str
    threads: int
    workers: int
    libraries: str

    def covers(self, wanted: ProfileKey) -> bool:
        """Return whether measurements under this key are valid under the wanted key."""
        if self.architecture:
            return self == wanted
        return self == replace(wanted, architecture="") and self.model == wanted.model

    @property
    def name(self) -> str:
        """Name of the model for people: its identity without the digest."""
        return self.model.partition("@")[0]

    @property
    def content(self) -> str:
        """Content of the model, wherever it lies: its identity without the name of its directory."""
        return self.model.partition("@")[2] or self.model

    def table(
        self, rows: tuple[CostRow, ...], batch_models: Mapping[str, BatchLatencyModel] | None = None
    ) -> CostTable:
        """Return the table of these rows, which were measured under this key."""
        source = f"measured: {self.model}, {self.dtype}, {self.workers} x {self.threads} threads, {self.libraries}"
        sources = {row.pipeline: source for row in rows}
        return CostTable(hardware=self.hardware, sources=sources, rows=rows, batch_models=batch_models or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One run that measures durations. `created_unix_ns` is wall-clock time, `tilework` the version that measured.

    Only the key says what was measured: the `pipeline` of its rows, a name that an operator chose, is not saved with
    them, and may be the name of another model by now.

    `batch_model` is learned from all batches that were known at that time; None if there were too few.
    """

    key: ProfileKey
    origin: ProfileOrigin
    rows: tuple[CostRow, ...]
    tilework: str
    created_unix_ns: int
    batch_model: BatchLatencyModel | None = None


def best_table(profiles: Iterable[Profile], key: ProfileKey, pipeline: str) -> CostTable | None:
    """Return the best rows that `profiles`, oldest first, hold under `key`, as rows of `pipeline`; None without rows.

    For each stage, shape, degree, batch, link and cache the newest row is used. Rows of profiles come before those of
    calibrations. The newest batch model is used.
    """
    rows: dict[RowKey, CostRow] = {}
    batch_models: dict[str, BatchLatencyModel] = {}
    for profile in sorted(profiles, key=lambda profile: profile.origin is ProfileOrigin.PROFILE):
        if profile.key.covers(key):
            named = (replace(row, pipeline=pipeline) for row in profile.rows)
            rows.update((row_key(row), row) for row in named)
            if profile.batch_model is not None:
                batch_models[pipeline] = profile.batch_model
    return key.table(tuple(rows.values()), batch_models) if rows else None
