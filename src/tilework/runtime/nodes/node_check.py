"""Checks of the messages of a node's agent: each is compared with what the node is and was told."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tilework.comm.net.limits import BadMessage
from tilework.control.driver.report_check import BadReport, blob_name_error
from tilework.core.wire.node_blobs import BlobsFetched
from tilework.core.wire.reports import Ended, Failed, Preview, Progress, WeightsLoaded, WeightsRead
from tilework.runtime.local_config import LocalConfig
from tilework.runtime.nodes.messages import (
    THE_NODE,
    Changed,
    Contents,
    Leaving,
    Links,
    Loading,
    LoadSpeeds,
    LoraRead,
    MeasureModel,
    ModelMeasured,
    ModelRead,
    NodeMemory,
    Pong,
    Started,
    StartFailed,
    WorkerJoined,
    WorkerLost,
    WorkersLeft,
)
from tilework.runtime.nodes.remote_node import RemoteNode

OF_DEVICES = (Progress, Preview, Ended, Failed, WeightsLoaded)
"""Reports of devices; all other messages come from the node itself."""
_BEFORE_STARTED = (Contents, Started, StartFailed, Loading, Leaving, Pong)
_WORKER = re.compile(r"(0|[1-9][0-9]{0,5})(?:\.(0|[1-9][0-9]{0,5}))?")
_MOST_SECONDS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheck:
    """Checks what the agents of a server may send. Each of its nodes has `each`."""

    each: LocalConfig

    def check(self, node: RemoteNode, address: int, message: Any, now_ns: int) -> None:
        """Check a message of a node. Raises BadMessage if it is impossible."""
        if node.started is None and not isinstance(message, _BEFORE_STARTED):
            raise BadMessage(f"{type(message).__name__} before its workers have started")
        if isinstance(message, OF_DEVICES):
            self._check_device(node, address)
            try:
                node.check(address, message, now_ns)
            except BadReport as error:
                raise BadMessage(f"device {address} of the node: {error}") from error
        elif address != THE_NODE:
            raise BadMessage(f"{type(message).__name__} of device {address}, which only the node itself may say")
        else:
            self._check_of_node(node, message)

    @property
    def _num_accelerators(self) -> int:
        return self.each.num_workers // self.each.cell_size

    def _num_devices(self, node: RemoteNode) -> int:
        return self._num_accelerators + (0 if node.started is None else node.started.num_slots)

    def _check_device(self, node: RemoteNode, device_id: int) -> None:
        if not 0 <= device_id < self._num_devices(node):
            raise BadMessage(f"device {device_id}, and the node has {self._num_devices(node)}")

    def _check_devices(self, device_ids: Collection[int], num: int) -> None:
        if len(set(device_ids)) != len(device_ids) or not set(range(num)).issuperset(device_ids):
            raise BadMessage(f"devices {sorted(device_ids)[:20]}, and the node has {num}")

    def _check_of_node(self, node: RemoteNode, message: Any) -> None:
        match message:
            case Started():
                self._check_started(node, message)
            case Loading(num_ready):
                _demand(num_ready <= self.each.num_workers + self.each.num_slots, f"{num_ready} workers are ready")
            case WorkerLost() | WorkerJoined() | Links() | WorkersLeft() | NodeMemory():
                self._check_workers(node, message)
            case StartFailed():
                _demand(node.started is None, "it could not start, and has started")
            case Leaving() | Contents():
                pass
            case BlobsFetched() | WeightsRead() | Pong():
                _check_done(node, message)
            case ModelMeasured() | LoadSpeeds() | ModelRead() | LoraRead() | Changed():
                _check_answer(node.asked(type(message)), message)
            case _:
                raise BadMessage(f"{type(message).__name__}, which no node may say")

    def _check_workers(
        self, node: RemoteNode, message: WorkerLost | WorkerJoined | Links | WorkersLeft | NodeMemory
    ) -> None:
        match message:
            case WorkerLost(device_id):
                self._check_device(node, device_id)
            case WorkerJoined(device_id):
                self._check_device(node, device_id)
                _demand(device_id not in node.up, f"device {device_id} has joined, which was not lost")
            case Links(alone):
                self._check_devices(alone, self._num_accelerators)
            case WorkersLeft(device_ids):
                self._check_devices(device_ids, self._num_devices(node))
            case NodeMemory():
                for name in (*message.resident_bytes, *message.readings):
                    self._check_worker(node, name)

    def _check_started(self, node: RemoteNode, started: Started) -> None:
        _demand(node.started is None, "its workers have started twice")
        slots = started.num_slots
        _demand(slots in (0, self.each.num_slots), f"{slots} CPU slots, and it was told {self.each.num_slots}")
        names = [one.info.name for one in started.models]
        left = {one.place for one in started.not_loaded}
        _demand(
            len(set(names)) == len(names) == node.num_models - len(left) and started.keys.keys() == set(names),
            f"models {names}, and it was told {node.num_models}",
        )
        _demand(
            len(left) == len(started.not_loaded) < node.num_models and left <= set(range(node.num_models)),
            f"models that it could not load at {sorted(left)[:20]}, and it was told {node.num_models}",
        )
        _demand(len(set(started.blobs)) == len(started.blobs), "blobs of the same name")
        for name in started.blobs:
            if error := blob_name_error(name):
                raise BadMessage(error)

    def _check_worker(self, node: RemoteNode, name: str) -> None:
        """Check that a worker has a name of the form in `Executor.resident_bytes`."""
        matched = _WORKER.fullmatch(name)
        _demand(matched is not None, f"a worker named {name!r:.60}")
        assert matched is not None
        device_id, rank = int(matched[1]), matched[2]
        self._check_device(node, device_id)
        is_cell = self.each.cell_size > 1 and device_id < self._num_accelerators
        _demand(is_cell == (rank is not None), f"a worker named {name!r}")
        _demand(rank is None or int(rank) < self.each.cell_size, f"a worker named {name!r}")


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise BadMessage(what)


def _check_done(node: RemoteNode, message: BlobsFetched | WeightsRead | Pong) -> None:
    match message:
        case BlobsFetched(fetch_id, blobs):
            asked = node.fetches.get(fetch_id)
            fits = asked is not None and set(asked.blobs).issuperset(blobs)
            _demand(fits, f"it has fetched {len(blobs)} blobs ({fetch_id}) that it was not told to fetch")
        case WeightsRead(read_id):
            _demand(read_id in node.reads, f"it has read {read_id}, which it was not told to read")
        case Pong(sent_ns):
            _demand(node.has_pinged(sent_ns), f"it answers a ping of {sent_ns}, which was not sent")


def _check_answer(asked: object | None, answer: Any) -> None:
    """Check that an answer belongs to a question, and is either a result or an error."""
    if asked is None:
        raise BadMessage(f"{type(answer).__name__}, which was not asked")
    match answer:
        case ModelMeasured() if isinstance(asked, MeasureModel):
            for row in answer.rows:
                fits = row.pipeline == asked.model and 0 <= row.seconds <= _MOST_SECONDS and row.degree > 0
                _demand(
                    fits, f"a row of {row.pipeline!r:.60} with {row.seconds} s, and {asked.model} was to be measured"
                )
        case ModelRead():
            is_model = answer.model is not None and answer.key is not None
            _demand(is_model != bool(answer.error), "it has neither a model nor an error, or both")
        case LoraRead():
            _demand((answer.lora is not None) != bool(answer.error), "it has neither a LoRA nor an error, or both")
        case _:
            pass
