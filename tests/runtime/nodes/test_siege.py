"""Agents that know the token and turn against their server: it loses them, and nothing else."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.nodes.rig import run, started
from runtime.nodes.siege import PICTURE, Siege, siege
from tilework.comm.net.frames import frame
from tilework.core.component import LoadSource
from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import Forget
from tilework.core.wire.node_blobs import BlobsFetched
from tilework.core.wire.reports import (
    Absent,
    CardReading,
    DeviceReading,
    Ended,
    Ending,
    Failed,
    Loaded,
    LoraAdded,
    Preview,
    Progress,
    StartedOver,
    WeightsLoaded,
    WeightsRead,
)
from tilework.core.wire.spec import Image
from tilework.runtime.nodes.messages import (
    THE_NODE,
    BeginNode,
    Changed,
    Leave,
    Leaving,
    Links,
    Loading,
    LoadSpeeds,
    LoraRead,
    ModelMeasured,
    ModelRead,
    NodeMemory,
    Pong,
    StartFailed,
    WorkerJoined,
    WorkerLost,
    WorkersLeft,
)
from tilework.runtime.nodes.node_check import OF_DEVICES as NODE_CHECK_OF_DEVICES
from waiting import until

Nonsense = Callable[[Ended, int], object]
"""What the second agent says, of the right report on its work and the job of that."""


def ended(**changes: Any) -> Nonsense:
    return lambda right, _job: replace(right, **changes)


def blobs(*names: str, num_bytes: int = 1) -> Nonsense:
    return lambda right, job: replace(right, blobs={job + n: StateBlob(one, num_bytes) for n, one in enumerate(names)})


def preview(image: Image, steps_done: int = 1) -> Nonsense:
    return lambda right, job: Preview(right.work_id, job, steps_done, image)


OF_DEVICES: dict[str, Nonsense] = {
    "steps below zero": lambda right, _: Progress(right.work_id, -5),
    "steps beyond the work": lambda right, _: Progress(right.work_id, 5),
    "steps that fall": lambda right, _: Progress(right.work_id, 0),
    "steps beyond 64 bits": lambda right, _: Progress(right.work_id, 1 << 63),
    "a step that is a text": lambda right, _: Progress(right.work_id, "1"),  # type: ignore[arg-type]
    "a step that is no whole number": lambda right, _: Progress(right.work_id, 1.5),  # type: ignore[arg-type]
    "progress of an unknown work": lambda right, _: Progress(right.work_id + 999, 1),
    "progress of a work of another node": lambda right, _: Progress(0, 1),
    "the end of an unknown work": ended(work_id=999),
    "an end with too few steps": ended(steps_done=2),
    "an end with too many steps": ended(steps_done=6),
    "an end before its beginning": lambda right, _: replace(right, end_ns=right.start_ns - 1),
    "a work of a hundred years": lambda right, _: replace(right, start_ns=right.end_ns - 3 * 10**18),
    "a work of an hour, which was sent just now": lambda right, _: replace(right, start_ns=right.end_ns - 36 * 10**11),
    "a work of tomorrow": lambda right, _: replace(
        right, start_ns=right.start_ns + 10**14, end_ns=right.end_ns + 10**14
    ),
    "a failure without a reason": ended(ending=Ending.FAILED),
    "a loss that the lost device reports": ended(ending=Ending.LOST),
    "an end without a result": ended(blobs={}),
    "a state of a foreign job": ended(blobs={999: StateBlob("a", 1)}),
    "states of two jobs": blobs("a", "b"),
    "a state and a picture of a job": lambda right, job: replace(right, images={job: PICTURE}),
    "a blob outside of its directory": blobs("../../etc/passwd"),
    "a blob with an absolute path": blobs("/etc/passwd"),
    "a blob without a name": blobs(""),
    "a blob that hides": blobs(".hidden"),
    "a blob with a zero": blobs("a\0b"),
    "the lock of the directory as a blob": blobs("lock"),
    "a blob with a long name": blobs("a" * 500),
    "a blob of negative size": blobs("a", num_bytes=-1),
    "a blob of endless size": blobs("a", num_bytes=1 << 62),
    "an absent member that is none": ended(absent=(Absent(999, "", state_lost=True),)),
    "a member that is absent and there": lambda right, job: replace(right, absent=(Absent(job, "", state_lost=True),)),
    "any seed for a foreign job": ended(for_any_seed=frozenset({999})),
    "memory below zero": ended(memory_bytes=-1),
    "a picture with too few pixels": lambda right, job: replace(right, blobs={}, images={job: Image(8, 8, b"rgb")}),
    "a picture of negative size": lambda right, job: replace(right, blobs={}, images={job: Image(-8, -8, bytes(192))}),
    "a preview with too many pixels": preview(Image(8, 8, bytes(999))),
    "a preview that is no small one": preview(Image(512, 512, bytes(3 * 512 * 512))),
    "a preview of a later step": preview(PICTURE, steps_done=99),
    "a preview of a foreign job": lambda right, _: Preview(right.work_id, 999, 1, PICTURE),
    "a failure of an unknown work": lambda _, job: Failed(999, "?"),
    "a refusal of a foreign job": lambda right, _: Failed(right.work_id, "?", refuses=999),
    "an unknown load": lambda _, __: WeightsLoaded(7, 1),
    "a load of negative time": lambda _, __: WeightsLoaded(0, -1),
    "a model that has loaded": lambda _, __: Loaded((), 1),
    "an answer of a worker to its agent": lambda _, __: StartedOver(),
    "a LoRA that a worker has": lambda _, __: LoraAdded(None, "no"),
    "a reading of a device": lambda _, __: DeviceReading(card=CardReading(busy=math.nan), allocator=None),
    "a command": lambda _, __: Forget(1),
}
OF_THE_NODE: dict[str, object] = {
    "a start that comes twice": started(),
    "a failed start after the start": StartFailed("?"),
    "more workers ready than there are": Loading(99),
    "the loss of a device of another node": WorkerLost(5, "?"),
    "the loss of a negative device": WorkerLost(-1, "?"),
    "a worker of another node": WorkerJoined(4),
    "a worker that was there": WorkerJoined(0),
    "links of another node": Links((0, 7), False),
    "links that repeat": Links((0, 0), False),
    "a CPU slot that is alone": Links((2,), False),
    "devices of another node that are left": WorkersLeft((0, 5)),
    "a fetch that was not asked": BlobsFetched(99, (), 1),
    "a read that was not asked": WeightsRead(99, True),
    "memory of a worker without a number": NodeMemory({"x": 1}, {}),
    "memory of a worker of another node": NodeMemory({"9": 1}, {}),
    "memory of a cell that is none": NodeMemory({"0.1": 1}, {}),
    "memory of a number with a sign": NodeMemory({"-1": 1}, {}),
    "negative memory": NodeMemory({"0": -1}, {}),
    "a share that is no number": NodeMemory({}, {"0": DeviceReading(card=CardReading(busy=math.nan), allocator=None)}),
    "a pong without a ping": Pong(1, 1),
    "rows that were not asked": ModelMeasured(()),
    "speeds that were not asked": LoadSpeeds({LoadSource.DISK: math.inf}),
    "a model that was not asked": ModelRead(error="?"),
    "a LoRA that was not asked": LoraRead(error="?"),
    "a change that was not asked": Changed(),
    "a command to a node": BeginNode(
        node=0,
        silence_s=1.0,
        models=(),
        simulated=(),
        num_workers=1,
        num_slots=0,
        weights_bytes=None,
        states_bytes=0,
        cache_bytes=0,
        cell_size=1,
        collectives=None,
    ),
}
RAW: dict[str, bytes] = {
    "an empty message": b"",
    "a message of an unknown kind": struct.pack("!iH", 0, 9999),
    "a message that breaks off": struct.pack("!iH", 0, 0) + b"\x81",
    "a message of another shape": struct.pack("!iH", -1, 20) + msgspec.msgpack.encode([1, 2, 3]),
    "a deep message": struct.pack("!iH", -1, 20) + b"\x91" * 100_000,
}


async def says(one: Siege, make: Nonsense) -> None:
    device_id, command = await one.holds()
    one.bad.say(make(one.bad.end_of(command), command.members[0][0]), device_id)


@pytest.mark.parametrize("name", OF_DEVICES)
def test_a_device_that_reports_what_cannot_be_loses_its_node(name: str) -> None:
    async def test() -> None:
        async with siege() as one:
            await says(one, OF_DEVICES[name])
            await one.is_withstood()

    run(test())


@pytest.mark.parametrize("name", OF_THE_NODE)
def test_an_agent_that_says_what_cannot_be_is_lost(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is told why, and to end; the log says it once."""

    async def test() -> None:
        async with siege() as one:
            await one.holds()
            one.bad.say(OF_THE_NODE[name])
            await one.is_withstood()
            await until(lambda: one.bad.left is not None)
            assert "it has sent an impossible message" in str(one.bad.left)

    run(test())
    assert len([record for record in caplog.records if "an impossible message" in record.getMessage()]) == 1


@pytest.mark.parametrize("name", RAW)
def test_bytes_that_are_no_message_lose_their_node(name: str) -> None:
    async def test() -> None:
        async with siege() as one:
            await one.holds()
            one.bad.channel._writer.writelines(frame(RAW[name], one.bad.channel.epoch))
            await one.is_withstood()

    run(test())


@pytest.mark.parametrize("device_id", [-2, -1, 3, 4, 1 << 30])
def test_a_device_that_the_node_has_not_says_nothing(device_id: int) -> None:
    """3 and 4 are devices of the whole server: with the numbers of a node, 0 to 2, they would be of another one."""

    async def test() -> None:
        async with siege() as one:
            _, command = await one.holds()
            one.bad.say(one.bad.end_of(command), device_id)
            await one.is_withstood()

    run(test())


def test_what_the_node_says_is_not_said_by_a_device() -> None:
    async def test() -> None:
        async with siege() as one:
            await one.holds()
            one.bad.say(WorkerLost(0, "?"), 0)
            await one.is_withstood()

    run(test())


def test_a_work_ends_once() -> None:
    async def test() -> None:
        async with siege() as one:
            device_id, command = await one.holds()
            for _ in range(2):
                one.bad.say(one.bad.end_of(command), device_id)
            await one.is_withstood()

    run(test())


def test_no_node_writes_the_blob_of_another() -> None:
    async def test() -> None:
        async with siege() as one:
            one.executor._blobs.written([StateBlob("a", 1)], one.executor.nodes[0])
            await says(one, blobs("a", num_bytes=2))
            await one.is_withstood()

    run(test())


def test_a_node_that_leaves_is_not_believed_more() -> None:
    async def test() -> None:
        async with siege() as one:
            device_id, command = await one.holds()
            one.bad.say(Leaving("done with it"))
            one.bad.say(Progress(command.work_id, -5), device_id)
            await one.is_withstood()

    run(test())


def test_a_node_leaves_once_whatever_its_reason() -> None:
    async def test() -> None:
        async with siege() as one:
            device_id, command = await one.holds()
            for _ in range(2):
                one.bad.say(Leaving(""))
            one.bad.say(Progress(command.work_id, -5), device_id)
            await one.is_withstood()

    run(test())


def test_what_is_late_is_believed() -> None:
    """A worker is lost and back before what was on its way to it has come: the next one reports on that."""

    async def test() -> None:
        async with siege() as one:
            device_id, command = await one.holds()
            one.bad.say(WorkerLost(device_id, "killed"))
            one.bad.say(WorkerJoined(device_id))
            one.bad.say(one.bad.end_of(command), device_id)
            one.bad.say(Leaving("done"))
            await until(lambda: one.executor.nodes[1].leave == Leave("done", is_final=True))
            assert one.engine.status.usage().bad_reports == {0: 0, 1: 0}

    run(test())


# Whatever the types allow.

_INTS = st.one_of(
    st.integers(0, 8),  # Ids of works, jobs and devices that there are.
    st.sampled_from([-(1 << 63), -5, -1, 1 << 31, 1 << 53, (1 << 63) - 1, (1 << 64) - 1]),
)
_PLAIN: dict[object, st.SearchStrategy[Any]] = {
    int: _INTS,
    float: st.floats(),
    bool: st.booleans(),
    str: st.one_of(st.sampled_from(["", "0", "1", "0.1", "a", "../a", "lock"]), st.text(max_size=4)),
    bytes: st.sampled_from([b"", b"rgb", bytes(192)]),
    type(None): st.none(),
}


def anything(hint: Any) -> st.SearchStrategy[Any]:
    """What a type of a message allows, and little else."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.builds(hint, **{one.name: anything(hints[one.name]) for one in fields(hint)})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    origin, inner = get_origin(hint), [anything(one) for one in get_args(hint) if one is not ...]
    if origin is tuple:
        return st.lists(inner[0], max_size=2).map(tuple)
    if origin is frozenset:
        return st.frozensets(inner[0], max_size=2)
    if origin is Mapping:
        return st.dictionaries(*inner, max_size=2)
    return st.one_of(inner)


_KINDS = [Progress, Preview, Ended, Failed, WeightsLoaded, WeightsRead, BlobsFetched, Links, Loading, LoadSpeeds]
_KINDS += [NodeMemory, Pong, WorkerJoined, WorkerLost, WorkersLeft, Leaving, Changed, StartFailed]


@st.composite
def sayings(draw: st.DrawFn) -> tuple[int, object]:
    """A message, mostly with the address that it should have."""
    kind = draw(st.sampled_from(_KINDS))
    likely = st.integers(0, 2) if kind in NODE_CHECK_OF_DEVICES else st.just(THE_NODE)
    return draw(st.one_of(likely, likely, likely, st.integers(-2, 4))), draw(anything(kind))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(said=st.lists(sayings(), max_size=6))
def test_whatever_an_agent_says_the_server_lives(said: list[tuple[int, object]]) -> None:
    async def test() -> None:
        async with siege() as one:
            await one.holds()
            for device_id, message in said:
                one.bad.say(message, device_id)
            one.bad.say(Pong(1, 1))  # This loses it in any case.
            await one.is_withstood()

    run(test())
