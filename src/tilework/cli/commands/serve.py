"""`tilework serve`: the HTTP server with its workers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tilework.cli.cells import Devices
from tilework.cli.console import UserError, require_serve_extra, user_errors
from tilework.cli.models import ModelOptions, model_source
from tilework.cli.nodes import NodesWanted, nodes_wanted
from tilework.cli.options import serve as options
from tilework.cli.options.common import Adapter, Device, Dtype, ProfilesFile, VaeTiling, WorkerThreads, examples
from tilework.cli.options.nodes import Agents, Cluster, Nodes, StateCopies
from tilework.control.watchdog import WatchdogConfig
from tilework.core.model import SimulatedSource, Source
from tilework.core.time import s_from_ns
from tilework.core.wire.commands import STATES_BYTES
from tilework.cost.table import BadCostTable, CostTable, check_devices
from tilework.cost.table_file import read_table
from tilework.policy.registry import DEFAULT_POLICY, UnknownPolicy, check_live, check_pools

if TYPE_CHECKING:
    from tilework.cli.workers import Workers

EXAMPLE = examples(
    "tilework serve",
    "tilework serve ./sd3-medium --device cuda --workers 4 --port 8000",
    "tilework serve sdxl=./sdxl anime=./animagine --weights-memory 12GB",
    "tilework serve --models models.toml --weights-memory 24GB",
    "tilework serve ./flux2-dev --device cuda --workers 4 --cell auto \\\n  --weights-memory 40GB",
    "tilework serve ./sdxl --loras ./loras",
    "tilework serve --durable ./state",
    "tilework serve --default-slo 3x",
    "tilework serve ./sdxl --nodes 2 --agents 10.0.0.5:7070",
    "tilework serve --backend modelled --devices 8 --cost flux1dev_h100_eager",
)
STUCK_AFTER_S = s_from_ns(WatchdogConfig().least_ns)


def command(
    models: options.Models = None,
    adapter: Adapter = None,
    workers: options.Workers = 2,
    cell: options.Cell = "1",
    cpu_slots: options.CpuSlots = 1,
    policy: options.Policy = DEFAULT_POLICY,
    device: Device = "cpu",
    dtype: Dtype = None,
    threads: WorkerThreads = 1,
    vae_tiling: VaeTiling = False,
    no_previews: options.NoPreviews = False,
    worker_memory: options.WorkerMemory = None,
    weights_memory: options.WeightsMemory = None,
    states_memory: options.StatesMemory = None,
    models_file: options.ModelsFile = None,
    loras: options.Loras = None,
    backend: options.BackendName = options.Backend.DIFFUSERS,
    cost: options.Cost = None,
    profiles: ProfilesFile = None,
    recalibrate: options.Recalibrate = False,
    host: options.Host = None,
    port: options.Port = None,
    api_key: options.ApiKey = None,
    tenants: options.Tenants = None,
    durable: options.Durable = None,
    results: options.Results = None,
    max_backlog: options.MaxBacklog = None,
    max_batch: options.MaxBatch = None,
    exact: options.Exact = False,
    default_slo: options.DefaultSlo = None,
    nodes: Nodes = None,
    agents: Agents = None,
    cluster: Cluster = None,
    copies: StateCopies = 1,
    log: options.Log = None,
    stuck_after: options.StuckAfter = STUCK_AFTER_S,
    log_level: options.LogLevelName = options.LogLevel.WARNING,
    json: options.ReadyJson = False,
) -> None:
    """Serve models behind OpenAI's images API, with deadlines.

    Further settings come from the environment: TILEWORK_MAX_STEPS, TILEWORK_RESULT_TTL_S, ... (docs/serving.md)."""
    asked = _checked(backend, workers, cell, weights_memory, cpu_slots, nodes_wanted(nodes, agents, cluster, copies))
    usual = ModelOptions(adapter, device, dtype, threads, worker_memory, vae_tiling, not no_previews)
    devices, table = _prepared(log_level, models, models_file, loras, usual, policy, cost, asked[0])
    from tilework.cli.serving import Serving

    Serving(
        workers=_workers(devices, asked[1], states_memory, _sources(backend, table, models, models_file, loras, usual)),
        policy=policy,
        table=table,
        profiles=profiles,
        recalibrate=recalibrate,
        settings=_settings(tenants=tenants, durable=durable, models=models_file, host=host, port=port, results=results)
        | _limits(api_key, max_backlog, max_batch, exact=exact, default_slo=default_slo),
        log=log,
        stuck_after_s=stuck_after,
        json=json,
    ).run()


def _prepared(
    log_level: str,
    models: Sequence[str] | None,
    file: Path | None,
    loras: Path | None,
    usual: ModelOptions,
    policy: str,
    cost: str | None,
    devices: Devices,
) -> tuple[Devices, CostTable | None]:
    """The devices, in cells that fit the models, and the cost table that is given, if any.

    Raises UserError, also if the models are given twice.
    """
    if models and file is not None:
        raise UserError(f"models are given twice, as {models[0]!r} and by --models; leave one out")
    require_serve_extra()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("tilework").setLevel(log_level.upper())  # Libraries stay as they are.
    if not devices.cell_size:
        devices = devices.chosen(_model_sources(models, file, loras, usual))
    return devices, _checked_table(policy, cost, devices.num_devices, file)


def _limits(
    api_key: str | None, max_backlog: float | None, max_batch: int | None, *, exact: bool, default_slo: str | None
) -> dict[str, object]:
    found: dict[str, object] = {"api_key": api_key, "max_backlog_s": max_backlog, "max_batch": max_batch}
    return found | {"exact": exact or None, "default_slo": default_slo}


def _checked(
    backend: options.Backend,
    workers: int,
    cell: str,
    weights_bytes: int | None,
    num_slots: int,
    nodes: NodesWanted | None,
) -> tuple[Devices, NodesWanted | None]:
    """The devices that are asked for, here or on each of several nodes. Raises UserError if there cannot be such."""
    if cell != "1" and backend is options.Backend.MODELLED:
        raise UserError(f"cell is {cell}, and simulated devices have no weights; give --cost NAME,cell={cell} instead")
    if cell != "1" and nodes is not None:
        raise UserError(f"cell is {cell}, and there are no cells on several nodes yet; serve on one machine")
    if weights_bytes is not None and backend is options.Backend.MODELLED:
        raise UserError("--weights-memory needs --backend diffusers: simulated devices have no weights; leave it out")
    return Devices.of(workers, cell, weights_bytes, num_slots), nodes


def _workers(
    devices: Devices, nodes: NodesWanted | None, states_memory: int | None, sources: tuple[Source, ...]
) -> Workers:
    from tilework.cli.workers import Workers
    from tilework.runtime.local_executor import LocalConfig

    each = LocalConfig(
        num_workers=devices.number,
        cell_size=devices.cell_size,
        sources=sources,
        num_slots=devices.num_slots,
        weights_bytes=devices.weights_bytes,
        states_bytes=states_memory or STATES_BYTES,
    )
    return Workers(each, nodes)


def _settings(**options: object) -> dict[str, object]:
    """Settings of the server by name; a path is a text there."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}


def _checked_table(policy: str, cost: str | None, num_workers: int, models: Path | None) -> CostTable | None:
    """The table of a name or file, if one is given; and there is such a policy, which can do that, and the devices of
    a file of models. Raises UserError."""
    _check_devices(models, policy, num_workers)
    with user_errors(UnknownPolicy, BadCostTable, OSError):
        check_live(policy)
        if cost is None:
            return None
        table = read_table(cost)
        check_devices(table, num_workers, cost)
        check_pools(policy, table.devices)
        return table


def _check_devices(file: Path | None, policy: str, num_workers: int) -> None:
    """Raises UserError if a file of models names workers that there are not, or that the policy would not heed."""
    from tilework.server.config import ConfigError
    from tilework.server.models_file import check_workers, read_models

    with user_errors(ConfigError, UnknownPolicy):
        models = read_models(None if file is None else str(file))
        check_workers(str(file), models, num_workers)
        check_pools(policy, [name for name, one in models.items() if one.devices is not None])


def _sources(
    backend: options.Backend,
    table: CostTable | None,
    models: Sequence[str] | None,
    file: Path | None,
    loras: Path | None,
    usual: ModelOptions,
) -> tuple[Source, ...]:
    if backend is options.Backend.MODELLED:
        return tuple(simulated_source(table, one, usual.memory_bytes) for one in models or ("",))
    return _model_sources(models, file, loras, usual)


def _model_sources(
    models: Sequence[str] | None, file: Path | None, loras: Path | None, options: ModelOptions
) -> tuple[Source, ...]:
    """The models that are named, or those of a file, whose own options count."""
    from tilework.server.config import ConfigError
    from tilework.server.lora_directory import loras_in
    from tilework.server.models_file import read_models

    with user_errors(ConfigError):
        usual = replace(options, loras=loras_in(loras) if loras is not None else ())
        if file is None:
            return tuple(model_source(one, usual) for one in models or ("shapes",))
        return tuple(
            model_source(
                f"{name}={one.path}",
                replace(
                    usual,
                    adapter=one.adapter or usual.adapter,
                    dtype=one.dtype or usual.dtype,
                    loras=usual.loras if one.loras is None else loras_in(Path(one.loras)),
                    devices=one.devices,
                    vae_tiling=usual.vae_tiling if one.vae_tiling is None else one.vae_tiling,
                    previews=usual.previews if one.previews is None else one.previews,
                ),
            )
            for name, one in read_models(str(file)).items()
        )


def simulated_source(table: CostTable | None, pipeline: str, memory_bytes: int | None = None) -> SimulatedSource:
    """Workers that take the time of a cost table for one of its pipelines, "" if it has one. Raises UserError."""
    if table is None:
        raise UserError("--backend modelled needs --cost; name a file, or a table of `tilework cost list`")
    known = sorted({row.pipeline for row in table.rows if table.graph(row.pipeline).stage(row.stage).has_steps})
    if not pipeline and len(known) == 1:
        pipeline = known[0]
    if pipeline not in known:
        raise UserError(f"MODEL is {pipeline!r}; the cost table has {', '.join(known)}")
    return SimulatedSource(
        pipeline=pipeline,
        stages=table.graph(pipeline).specs,
        frames_per_latent=table.graph(pipeline).frames_per_latent,
        hardware=table.hardware,
        steps=table.steps or 28,
        rows=table.rows,
        memory_bytes=memory_bytes,
    )
