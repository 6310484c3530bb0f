"""Continues the calls that the previous start of the server accepted, and restores the records of ended ones."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from tilework.core.checkpoint import Checkpoint
from tilework.runtime.engine import Engine
from tilework.runtime.ticket import Wanted
from tilework.server.calls.call import Call
from tilework.server.calls.journal import DurableJournal, KeptCall, OpenAgain
from tilework.server.calls.submitter import CallSubmitter


def restore(engine: Engine, journal: DurableJournal, submitter: CallSubmitter, gone: Collection[str] = ()) -> int:
    """Take over calls and records, right after the engine has started; return the number of open images.

    No client is connected to these calls any more: they go on as asynchronous ones, to be joined by uid or key. Calls
    for models that are `gone`, or cannot run here, fail.

    Raises:
        JournalUnusable: there are open calls for another model, or the journal cannot be read.
    """
    journal.serve([*engine.models, *engine.not_served, *gone])
    kept = journal.open_calls()
    wanted = [
        (one, checkpoint if _is_same(engine, each.call) else Checkpoint())
        for each in kept
        for one, checkpoint in zip(_wanted(each), each.checkpoints, strict=True)
    ]
    tickets = iter(engine.restore(wanted))
    calls = [
        Call(
            uid=call.uid,
            ask=call.ask,
            key=call.key,
            arrival_ns=call.arrival_ns,
            arrived_s=call.arrived_s,
            tickets=tuple(next(tickets) for _ in call.ask.specs),
            identity=call.identity,
            end=asyncio.get_running_loop().create_future(),
            is_detached=True,
        )
        for call in (each.call for each in kept)
    ]
    submitter.call_registry.restore(calls, journal.records())
    for call in calls:
        submitter.follow(call)
    return len(wanted)


def _is_same(engine: Engine, call: KeptCall) -> bool:
    """Return whether model and LoRAs are those that computed a call's states: others may have their names by now."""
    ask = call.ask
    return ask.model in engine.models and engine.status.identity(ask.model, ask.lora_names) == call.identity


def _wanted(each: OpenAgain) -> list[Wanted]:
    """Return what the engine is asked for, image by image."""
    call = each.call
    return [
        Wanted(
            uid=uid,
            model=call.ask.model,
            spec=spec,
            arrival_ns=call.arrival_ns,
            deadline_ns=call.deadline_ns,
            terms=call.ask.terms,
            lost=each.lost,
        )
        for uid, spec in zip(call.image_uids, call.ask.specs, strict=True)
    ]
