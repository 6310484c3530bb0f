"""The options of `tilework serve`, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from tilework.cli.options.common import Adapter, ProfilesFile, WorkerThreads, parse_bytes
from tilework.cli.options.logs import LogFile, LogLevel, LogLevelName
from tilework.cli.options.settings import help_of
from tilework.control.watchdog import WatchdogConfig
from tilework.core.time import s_from_ns
from tilework.pipelines.fits.beside import Beside
from tilework.policy.registry import DEFAULT_POLICY
from tilework.runtime.event_log.segmented_file import DAY_NS, LogBounds

_BOUNDS = LogBounds()
STUCK_AFTER_S = s_from_ns(WatchdogConfig().least_ns)


class Backend(StrEnum):
    """Work of the workers for a request: run a model, or take as long as a cost table says."""

    DIFFUSERS = "diffusers"
    MODELLED = "modelled"


Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME=]MODEL...",
        help="shapes (the default), shapes-motion, a diffusers directory, or a hub id; a workflow, FILE.py:NAME; a "
        "pipeline of --cost. The first of several serves requests that name no model.",
    ),
]
Cell = Annotated[
    str,
    typer.Option(
        "--cell",
        metavar="N|auto",
        envvar="TILEWORK_CELL",
        help="Number of devices that hold the weights of a model together, for a model that exceeds one: --devices 4 "
        "--cell 2 are two devices of twice the size; auto: as few as its stages fit into. Needs --weights-memory, "
        "which stays that of one device.",
    ),
]
StatesMemory = Annotated[
    int | None,
    typer.Option(
        parser=parse_bytes,
        metavar="SIZE",
        envvar="TILEWORK_STATES_MEMORY",
        help="Device memory for the states of requests that wait for their next work, as in 500MB; the others lie in "
        "host memory. Default: 2GB.",
    ),
]
CacheMemory = Annotated[
    int | None,
    typer.Option(
        parser=parse_bytes,
        metavar="SIZE",
        envvar="TILEWORK_CACHE_MEMORY",
        help="Device memory for the steps of requests with a cache, as in 8GB. Default: 4GB.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "--devices",
        min=1,
        max=1024,
        help="Worker processes, one per device; default: as many as CUDA devices, or 2 on CPUs.",
    ),
]
WeightsMemory = Annotated[
    int | None,
    typer.Option(
        parser=parse_bytes,
        metavar="SIZE",
        envvar="TILEWORK_WEIGHTS_MEMORY",
        help="Device memory for weights, as in 24GB: devices load models when they need them. Default: all models stay "
        "on every device.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGroup:
    """Options of how models run."""

    heading: ClassVar[str] = "Models"
    models_file: Annotated[
        Path | None,
        typer.Option(
            "--models",
            envvar="TILEWORK_MODELS",
            help=help_of("models"),
        ),
    ] = None
    adapter: Adapter = None
    loras: Annotated[
        Path | None,
        typer.Option(
            envvar="TILEWORK_LORAS",
            help="Directory of LoRAs (NAME.safetensors): requests use those that fit their model by name and scale.",
        ),
    ] = None
    require_all: Annotated[
        bool,
        typer.Option(
            "--require-all",
            help="Do not start if one of several models cannot run here. Default: serve the others.",
        ),
    ] = False
    no_previews: Annotated[
        bool,
        typer.Option("--no-previews", help="Draw no previews, so that steps do not need the autoencoder."),
    ] = False
    worker_memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_bytes,
            metavar="SIZE",
            envvar="TILEWORK_WORKER_MEMORY",
            help="Memory that a run may take beside the model, as in 800MB or 2GiB; default: all that the device has.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Options of the devices that models run on, here or on each node."""

    heading: ClassVar[str] = "Devices"
    workers: Workers = None
    threads: WorkerThreads = 1
    cell: Cell = "1"
    cpu_slots: Annotated[
        int,
        typer.Option(
            min=1, max=1024, help="Worker processes for stages that need no accelerator, if the model has any."
        ),
    ] = 1
    weights_memory: WeightsMemory = None
    states_memory: StatesMemory = None
    cache_memory: CacheMemory = None
    collectives: Annotated[
        str | None,
        typer.Option(
            metavar="sockets|gloo|nccl",
            help="Collectives between devices that share a request. Default: nccl on GPUs, sockets on CPUs. gloo "
            "rehearses on CPUs what NCCL does when a worker is lost.",
        ),
    ] = None
    backend: Annotated[
        Backend,
        typer.Option(
            "--backend", help="diffusers runs the model; modelled simulates devices that take the time of --cost."
        ),
    ] = Backend.DIFFUSERS

    @property
    def beside(self) -> Beside:
        """Memory that each device holds beside models."""
        return Beside.of(self.states_memory, self.cache_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingGroup:
    """Options of the policy and of the step times by which it plans."""

    heading: ClassVar[str] = "Scheduling"
    policy: Annotated[str, typer.Option(help="A name of docs/policies.md, or module:Class.")] = DEFAULT_POLICY
    cost: Annotated[
        str | None,
        typer.Option(
            help="Cost table to plan with: a JSON file, or a name of `tilework cost list`; default: measure it."
        ),
    ] = None
    profiles: ProfilesFile = None
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Measure again what an earlier start measured.")
    ] = False
    measure_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds that a start measures at most; default 60, or inf with --recalibrate. The server predicts "
            "the other costs, and measures them when devices are idle.",
        ),
    ] = None
    stuck_after: Annotated[
        float,
        typer.Option(
            min=1, help="Seconds without a step after which a run counts as stuck; more for a run with longer steps."
        ),
    ] = STUCK_AFTER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LogGroup:
    """Options of output and logs."""

    heading: ClassVar[str] = "Logs"
    log: Annotated[
        Path | None,
        typer.Option(
            help="Write the event log here, for replay, explain, timeline and simulate; keep an older one under "
            "another name. Default: none; with --durable DIR a new DIR/events-N.jsonl at every start.",
        ),
    ] = None
    no_log: Annotated[bool, typer.Option("--no-log", help="Write no event log, also with --durable.")] = False
    log_segment: Annotated[
        int | None,
        typer.Option(
            parser=parse_bytes,
            metavar="SIZE",
            help="Begin a new file of the event log at this size, and compress the old one. Default: 64MB.",
        ),
    ] = None
    log_segment_days: Annotated[float, typer.Option(min=0.001, metavar="DAYS", help="Begin one at this age, too.")] = (
        _BOUNDS.segment_ns / DAY_NS
    )
    log_kept: Annotated[
        int | None,
        typer.Option(
            parser=parse_bytes,
            metavar="SIZE",
            help="Disk space for the event log, with --durable for those of all starts; delete the oldest files. "
            "Default: 2GB.",
        ),
    ] = None
    log_kept_days: Annotated[
        float, typer.Option(min=0.001, metavar="DAYS", help="Delete files of the event log that are older.")
    ] = _BOUNDS.kept_ns / DAY_NS
    log_level: LogLevelName = LogLevel.WARNING
    log_file: LogFile = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line when ready, instead of text.")] = False

    def bounds(self) -> LogBounds:
        """Return the bounds of the event log's files."""
        return LogBounds(
            segment_bytes=self.log_segment or _BOUNDS.segment_bytes,
            segment_ns=round(self.log_segment_days * DAY_NS),
            kept_bytes=self.log_kept or _BOUNDS.kept_bytes,
            kept_ns=round(self.log_kept_days * DAY_NS),
        )
