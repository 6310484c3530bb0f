"""`tilework serve`: the HTTP server with its workers."""

from __future__ import annotations

import json as jsonlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tilework.cli.console import UserError, out, print_json, require_serve_extra, user_errors
from tilework.cli.devices import Devices, FoundDevices, checked_collectives, found_devices
from tilework.cli.models import ModelOptions, model_source, options_of, usual_source
from tilework.cli.nodes import Machines, RayNodes, ThisMachine, follow, is_kept, machines_of
from tilework.cli.options import serve as options
from tilework.cli.options.common import SetupGroup, examples
from tilework.cli.options.config_file import ConfigFile, ShowConfig, all_settings, reader, resolved, server_settings
from tilework.cli.options.contradictions import refuse_in_cells, refuse_options
from tilework.cli.options.groups import grouped
from tilework.cli.options.logs import ServerLog
from tilework.cli.options.nodes import NodeGroup
from tilework.cli.options.settings import ServerGroup
from tilework.core.model import ModelSource, SimulatedSource, Source
from tilework.cost.table import BadCostTable, CostTable, check_devices
from tilework.cost.table_file import read_table
from tilework.policy.registry import UnknownPolicy, check_live, check_pools
from tilework.server.config import ConfigError, ServerConfig, config_sources

if TYPE_CHECKING:
    from tilework.cli.serving import Workers

EXAMPLE = examples(
    "tilework serve",
    "tilework serve ./sd3-medium --device cuda --workers 4 --port 8000",
    "tilework serve sdxl=./sdxl anime=./animagine --weights-memory 12GB",
    "tilework serve --models models.toml --weights-memory 24GB",
    "tilework serve ./flux2-dev --device cuda --workers 4 --cell auto \\\n  --weights-memory 40GB",
    "tilework serve ./sdxl --loras ./loras",
    "tilework serve --config tilework.toml",
    "tilework serve --durable ./state",
    "tilework serve --durable ./state --standby",
    "tilework serve --default-slo 3x",
    "tilework serve ./sdxl --nodes 2 --agents 10.0.0.5:7070",
    "tilework serve --backend modelled --devices 8 --cost flux1dev_h100_eager",
)


@grouped
def command(
    ctx: typer.Context,
    models: options.Models = None,
    *,
    config: ConfigFile = None,
    show_config: ShowConfig = False,
    how: options.ModelGroup,
    setup: SetupGroup,
    where: options.DeviceGroup,
    over: NodeGroup,
    when: options.SchedulingGroup,
    server: ServerGroup,
    logs: options.LogGroup,
) -> None:
    """Serve models behind OpenAI's images API, with deadlines.

    Further settings come from a file (--config) or the environment: TILEWORK_MAX_STEPS, TILEWORK_RESULT_TTL_S, ...
    (docs/operations.md)."""
    given = server.settings() | ({} if how.models_file is None else {"models": str(how.models_file)})
    with user_errors(ConfigError):
        settings = resolved(ctx, config, given)
    if show_config:
        _show(ctx, settings, config_sources(given, server_settings(ctx, config)), as_json=logs.json)
        return
    refuse_options(ctx, settings)
    machines = machines_of(over)
    require_serve_extra()
    with user_errors(OSError):
        log = ServerLog(logs.log_level, logs.log_file)
    if isinstance(machines, RayNodes) and settings.durable is not None and not is_kept():
        follow(machines, Path(settings.durable), json=logs.json)
        return
    is_modelled = where.backend is options.Backend.MODELLED
    found = (
        FoundDevices("cpu")
        if is_modelled
        else found_devices(setup.device, elsewhere=not isinstance(machines, ThisMachine))
    )
    usual = options_of(
        setup,
        found,
        adapter=how.adapter,
        threads=where.threads,
        memory_bytes=how.worker_memory,
        previews=not how.no_previews,
    )
    devices = Devices.of(found.number(where.workers), where.cell, where.weights_memory, where.cpu_slots, where.beside)
    if not is_modelled:
        devices = devices.planned(_sources(where, None, models, how, usual), found)
    refuse_in_cells(devices.cell_size, settings)
    table = _checked_table(when, _num_of_all(devices, machines), how.models_file)
    from tilework.cli.serving import Serving

    Serving(
        workers=_workers(devices, machines, where, _sources(where, table, models, how, usual)),
        usual=usual_source(usual),
        found=found,
        policy=when.policy,
        table=table,
        profiles=when.profiles,
        recalibrate=when.recalibrate,
        measure_s=_measure_s(when),
        require_all=how.require_all,
        config=settings,
        reread=reader(ctx, config, given, log),
        standby=over.standby,
        logs=logs,
        server_log=log,
        stuck_after_s=when.stuck_after,
    ).run()


_MEASURE_S = 60.0


def _measure_s(when: options.SchedulingGroup) -> float:
    if when.measure_seconds is not None:
        return when.measure_seconds
    return math.inf if when.recalibrate else _MEASURE_S


def _show(ctx: typer.Context, settings: ServerConfig, sources: Mapping[str, str], *, as_json: bool) -> None:
    found = list(all_settings(ctx, {name: (value, sources[name]) for name, value in settings}))
    if as_json:
        shown = {one.name: {"value": one.value, "source": one.source} for one in found}
        print_json(jsonlib.loads(jsonlib.dumps(shown, default=str)))
        return
    width = max(len(one.name) for one in found)
    for one in found:
        value = "" if one.value is None else one.value
        out.print(f"{one.name:<{width}}  {one.source:<11}  {value}", markup=False, highlight=False, soft_wrap=True)


def _num_of_all(devices: Devices, machines: Machines) -> int | None:
    """Return the devices of all nodes; None while it is not known how many a cluster has."""
    return None if machines.num_nodes is None else machines.num_nodes * devices.num_devices


def _workers(devices: Devices, machines: Machines, where: options.DeviceGroup, sources: tuple[Source, ...]) -> Workers:
    from tilework.cli.serving import Workers
    from tilework.runtime.local_config import LocalConfig

    each = LocalConfig(
        num_workers=devices.number,
        cell_size=devices.cell_size,
        sources=sources,
        num_slots=devices.num_slots,
        weights_bytes=devices.weights_bytes,
        states_bytes=devices.beside.states_bytes,
        cache_bytes=devices.beside.cache_bytes,
        collectives=checked_collectives(where.collectives, sources),
    )
    return Workers(each, machines, devices.plan)


def _checked_table(when: options.SchedulingGroup, num_workers: int | None, models: Path | None) -> CostTable | None:
    """Return the table of a name or file, if given; check the policy, and the devices of a file of models.

    Raises UserError.
    """
    _check_devices(models, when.policy, num_workers)
    with user_errors(UnknownPolicy, BadCostTable, OSError):
        check_live(when.policy)
        if when.cost is None:
            return None
        table = read_table(when.cost)
        if num_workers is not None:
            check_devices(table, num_workers, when.cost)
        check_pools(when.policy, table.devices)
        return table


def _check_devices(file: Path | None, policy: str, num_workers: int | None) -> None:
    """Raise UserError if a file of models names missing workers, or workers that the policy would not heed."""
    from tilework.server.models_file import check_workers, read_models

    with user_errors(ConfigError, UnknownPolicy):
        models = read_models(None if file is None else str(file))
        if num_workers is not None:
            check_workers(str(file), models, num_workers)
        check_pools(policy, [name for name, one in models.items() if one.devices is not None])


def _sources(
    where: options.DeviceGroup,
    table: CostTable | None,
    models: Sequence[str] | None,
    how: options.ModelGroup,
    usual: ModelOptions,
) -> tuple[Source, ...]:
    if where.backend is options.Backend.MODELLED:
        return tuple(simulated_source(table, one, how.worker_memory) for one in models or ("",))
    return _model_sources(models, how, usual)


def _model_sources(models: Sequence[str] | None, how: options.ModelGroup, usual: ModelOptions) -> tuple[Source, ...]:
    """Return the models that are named, or those of a file, whose own options count."""
    from tilework.server.lora_directory import loras_in
    from tilework.server.models_file import read_models

    with user_errors(ConfigError):
        usual = replace(usual, loras=loras_in(how.loras) if how.loras is not None else ())
        if how.models_file is None:
            named = models or ("shapes",)
            may_be_incomplete = len(named) > 1 and not how.require_all
            return _of_own_names([model_source(one, usual, may_be_incomplete=may_be_incomplete) for one in named])
        of_file = read_models(str(how.models_file))
        may_be_incomplete = len(of_file) > 1 and not how.require_all
        return tuple(
            model_source(
                f"{name}={one.path}",
                replace(
                    usual,
                    adapter=one.adapter or usual.adapter,
                    dtype=one.dtype or usual.dtype,
                    loras=usual.loras if one.loras is None else loras_in(Path(one.loras)),
                    devices=one.devices,
                    quantize=one.quantize or usual.quantize,
                    vae_tiling=usual.vae_tiling if one.vae_tiling is None else one.vae_tiling,
                    previews=usual.previews if one.previews is None else one.previews,
                ),
                may_be_incomplete=may_be_incomplete,
            )
            for name, one in of_file.items()
        )


def _of_own_names(sources: Sequence[ModelSource]) -> tuple[ModelSource, ...]:
    """Return these models. Raises UserError if two have the same name."""
    from tilework.pipelines.model_index import name_of

    paths = dict[str, str]()
    for one in sources:
        name = name_of(one)
        if name in paths:
            raise UserError(
                f"the models of {paths[name]} and {one.path} are both called {name!r}; give one another name, as in "
                f"{name}-2={one.path}"
            )
        paths[name] = one.path
    return tuple(sources)


def simulated_source(table: CostTable | None, pipeline: str, memory_bytes: int | None = None) -> SimulatedSource:
    """Return workers that take the time of a cost table for one of its pipelines, "" if it has one.

    Raises UserError.
    """
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
