"""Mistakes in the protocol, each with the setting whose exploration finds it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from comm.ring.explorer import Explorer, Violation
from comm.ring.programs import Protocol, setting
from tilework.comm.ring import consume, entry, layout, produce


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """Texts of a module of the protocol become others; `where` is what to explore, as arguments of `setting`."""

    name: str
    module: ModuleType
    changes: dict[str, str]
    where: dict[str, Any]

    def protocol(self) -> Protocol:
        module = mutated(self.module, self.changes)
        part = self.module.__name__.rpartition(".")[2]
        return Protocol(**{part: module.RingLayout if part == "layout" else module})

    def is_found(self) -> bool:
        try:
            Explorer(setting(protocol=self.protocol(), **self.where)).run()
        except Violation:
            return True
        return False


def mutated(module: ModuleType, changes: Mapping[str, str]) -> ModuleType:
    """The module with these texts replaced, each of which must occur once."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text("utf-8")
    for old, new in changes.items():
        assert text.count(old) == 1, f"{module.__name__} has {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    name = f"{module.__name__}_mutated"
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy  # Dataclasses look their module up.
    exec(compile(text, name, "exec"), copy.__dict__)
    return copy


ONE_LATE = {"sizes": ((1,), (1,)), "slots": 2, "units": 2, "abandons": 1}
LATE = {"sizes": ((2,), (2,)), "slots": 2, "units": 2, "abandons": 1}
CRASH = {"sizes": ((1, 1), (1,)), "slots": 2, "units": 4, "crashes": 1}
RESTART = {"sizes": ((1,), (1,)), "slots": 2, "units": 2, "restarts": 1}
TWO_EACH = {"sizes": ((1, 1), (1, 1)), "slots": 2, "units": 2}

HEAD_MOVES = '    yield Put(layout.head, (window.head.pack().to_bytes(8, "little"),))\n'
EMPTIED = '        yield Put(layout.slot(number), (layout.empty(number + layout.slots).to_bytes(8, "little"),))\n'

MISTAKES = (
    Mistake(
        name="a commit that is a plain write",
        module=produce,
        changes={
            "    if (yield Cas64(slot, reservation.word, word.to(SlotState.READY))) == reservation.word:\n": (
                "    yield Put(slot, (word.to(SlotState.READY).to_bytes(8, 'little'),))\n    if True:\n"
            )
        },
        where=ONE_LATE,
    ),
    Mistake(
        name="slots without generations",
        module=layout,
        changes={"        return number // self.slots % _GENERATIONS\n": "        return 0\n"},
        where=TWO_EACH,
    ),
    Mistake(
        name="bytes of an abandoned entry that are used again without a fence",
        module=consume,
        changes={
            "        if seen.state == SlotState.PAD:": "        if seen.state in (SlotState.PAD, SlotState.ABANDONED):"
        },
        where=LATE,
    ),
    Mistake(
        name="a checksum of the header alone, where fences cannot be trusted",
        module=entry,
        changes={
            "        for piece in (checked, header, *buffers):": "        for piece in (checked, header):",
            "        if payload_bytes:\n            seen": "        if False:\n            seen",
        },
        where={**LATE, "is_fenced": False},
    ),
    Mistake(
        name="no flush between write and commit",
        module=produce,
        changes={"    yield Flush()\n": ""},
        where=ONE_LATE,
    ),
    Mistake(
        name="an owner's later entry delivered before a former one",
        module=consume,
        changes={" or (entry.state == SlotState.READY and entry.owner in owners)": ""},
        where={"sizes": ((1, 1),), "slots": 2, "units": 4},
    ),
    Mistake(
        name="a message sent as the old owner after the new id was asked for",
        module=consume,
        changes={},
        where={"sizes": ((1, 1),), "slots": 2, "units": 4, "limit": 2, "rejoins": 1},
    ),
    Mistake(
        name="a released entry behind an open one that is not marked",
        module=consume,
        changes={"    if first_needed(window) == window.head:\n": "    if False:\n"},
        where=RESTART,
    ),
    Mistake(
        name="slots emptied before the head has moved",
        module=consume,
        changes={
            HEAD_MOVES: "",
            EMPTIED: EMPTIED + HEAD_MOVES,
        },
        where=RESTART,
    ),
    Mistake(
        name="a tail that starts at the hint although the head is ahead of it",
        module=produce,
        changes={"hint if hint.distance(head) > 0 else head": "hint"},
        where=CRASH,
    ),
    Mistake(
        name="a full ring that is taken for one with room",
        module=produce,
        changes={"        if position.units_from(head) + length > layout.units:\n            return None\n": ""},
        where={**TWO_EACH, "slots": 4},
    ),
)
