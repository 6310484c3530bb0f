"""Configuration of the worker processes of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tilework.core.comm import LINK_TIMEOUT_S
from tilework.core.model import Source
from tilework.core.wire.commands import CACHE_BYTES, STATES_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """Configuration of worker processes: `num_workers` accelerators, and `num_slots` CPU slots if a model needs some.

    The `sources` of their models agree on threads, memory and the type of device. Each worker has the models that it
    serves from the start; with `weights_bytes` it knows all models, and an accelerator holds at most that many bytes of
    weights at a time. Each worker keeps at most `states_bytes` of jobs that have no work there, and at most
    `cache_bytes` for the caches of requests. Accelerators are in cells of `cell_size`, which divides their number: see
    `LocalExecutor`. Groups of them communicate by `collectives`, a key of `core.comm.COLLECTIVES`; None: by the usual
    one of the device. If that is a communicator of their node, it has to form within `link_timeout_s`; otherwise they
    run alone.

    A worker that dies is restarted after `restart_delay_s`. From the third death in a row without a finished work the
    delay doubles each time, up to `max_delay_s`, so that a broken device does not interrupt one request after another.
    After `max_restarts` deaths in a row before its model was loaded, a worker is given up. `owner` is the data
    directory of a durable server, whose next start uses the remaining blobs.
    """

    num_workers: int
    sources: tuple[Source, ...]
    num_slots: int = 1
    weights_bytes: int | None = None
    states_bytes: int = STATES_BYTES
    cache_bytes: int = CACHE_BYTES
    cell_size: int = 1
    collectives: str | None = None
    link_timeout_s: float = LINK_TIMEOUT_S
    restart_delay_s: float = 0.5
    max_delay_s: float = 30.0
    max_restarts: int = 6
    start_timeout_s: float = 600.0
    stop_grace_s: float = 5.0
    owner: Path | None = None
