"""The start of an engine: devices come up, models are loaded and measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TextIO

from tilework.control.controller import Controller
from tilework.core.checkpoint import CheckpointKeeper
from tilework.core.wire.reports import LoadedModel
from tilework.core.work import Group
from tilework.policy.registry import check_live
from tilework.runtime.engine import Engine, EngineConfig
from tilework.runtime.event_log.segmented_file import SegmentedFile
from tilework.runtime.executor import Executor, NodesListener
from tilework.runtime.models.measuring import Measuring, name_refused, with_weights
from tilework.runtime.models.start_parts import StartParts
from tilework.runtime.observer import Observer


class EngineStart(NodesListener):
    """Starts an engine over an executor. It is the executor's listener until the engine is there, and ignores most
    reports: a start fails with a device that is lost, and the engine asks which devices are up.

    `log`, if given, receives the event log (`control.log`); `on_progress` receives what the start waits for, which is
    `starting`. With a `keeper` open requests outlive the engine: the next one can `restore` them. `check_lease` as in
    `ControlLoop`.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        log: TextIO | SegmentedFile | None = None,
        on_progress: Callable[[str], None] = lambda _text: None,
        keeper: CheckpointKeeper | None = None,
        check_lease: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._executor = executor
        self._log = log
        self._on_progress = on_progress
        self._keeper = keeper
        self._check_lease = check_lease
        self._leaving = list[Callable[[], None]]()
        self._origin_ns = time.monotonic_ns() - config.begin_ns
        self.starting = "loading the models"
        """Activity that the start waits for, or waited for last."""
        self.parts = StartParts()
        """Durations of the parts of the start, once it is over."""

    def now_ns(self) -> int:
        """Return the time of the engine's clock: nanoseconds since the start was made, plus `begin_ns`."""
        return time.monotonic_ns() - self._origin_ns

    async def start(self, observer: Observer | None = None) -> Engine:
        """Load the models on every device and measure them; returns the engine, whose events the observer gets.

        If that fails or is cancelled, the devices are stopped. Raises WorkerStartFailed, UnknownPolicy.
        """
        check_live(self._config.controller.policy)
        try:
            return await self._start(observer or Observer())
        except BaseException:
            await self._executor.stop()
            raise

    async def _start(self, observer: Observer) -> Engine:
        executor = self._executor
        self.on_loading(0)
        begin_ns = time.monotonic_ns()
        loaded = await executor.start(self)
        loaded_ns = time.monotonic_ns()
        measuring = Measuring(
            executor=executor,
            num_devices=executor.num_devices,
            cache=self._config.cache,
            exact=self._config.exact,
            show=self._show,
            require_all=self._config.require_all,
            most_s=self._config.measure_s,
        )
        served, table = await measuring.start(loaded, executor.not_loaded, self._config.table)
        self.parts = StartParts.of(loaded, loaded_ns - begin_ns, time.monotonic_ns() - loaded_ns, measuring.first_ns)
        self._leave_out(measuring, served)
        table = with_weights(table, served, executor.weights_bytes, executor.host_bytes)
        table = replace(table, devices={**table.devices, **executor.serving})
        controller = Controller(self._config.controller, table)
        engine = Engine(
            config=self._config,
            executor=executor,
            controller=controller,
            measuring=measuring,
            loaded=served,
            log=self._log,
            observer=observer,
            keeper=self._keeper,
            check_lease=self._check_lease,
            origin_ns=self._origin_ns,
        )
        for let_go in self._leaving:
            let_go()
        return engine

    def _leave_out(self, measuring: Measuring, served: list[LoadedModel]) -> None:
        """Let devices forget models that are loaded and not served; warn of LoRAs that no request can use."""
        for name in [one.name for one in measuring.not_served.values() if one.info is not None]:
            self._executor.remove_model(name)
        name_refused(served)

    def _show(self, starting: str) -> None:
        self.starting = starting
        self._on_progress(starting)

    # For the executor.

    def on_loading(self, num_ready: int) -> None:
        num_workers = self._executor.num_devices + self._executor.num_slots
        self._show(f"loading the models, {num_ready} of {num_workers} workers ready")

    def on_node_leaving(self, node: int, device_ids: Group, reason: str, let_go: Callable[[], None]) -> None:
        self._leaving.append(let_go)  # The node may be measuring.
