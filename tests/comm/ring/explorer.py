"""Runs the steps of the ring's protocol in all interleavings, with crashes, delays and writes that arrive late.

A state is a value: the words and units of the memory, the writes under way, and where each process is. A process is a
generator that yields verbs; it is run again from its beginning to take one more step, and where it is, is what its
frames hold. So two ways to one state are one, and the states of small rings can all be visited.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import GeneratorType
from typing import Any, NamedTuple

from tilework.comm.ring.errors import RingCorrupted
from tilework.comm.ring.layout import UNIT, RingLayout, SlotState, Word
from tilework.comm.ring.verbs import Cas64, Flush, Get, Put

CONSUMER = 0
"""The number of the consumer's process. Producers are 1, 2, ...; each has its own owner id, which is the same."""


@dataclass(frozen=True, slots=True)
class Sending:
    """The process begins its message number `index`, of this content."""

    index: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """The consumer has read an entry. `content` is None if it found no valid one."""

    slot: int
    offset: int
    size: int
    content: bytes | None


@dataclass(frozen=True, slots=True)
class Done:
    """The consumer does not read the entry any more, and begins to give it back."""

    slot: int


@dataclass(frozen=True, slots=True)
class Released:
    """The consumer has given the entry back."""

    slot: int


@dataclass(frozen=True, slots=True)
class Choose:
    """Answers both True and False. `what` is "abandon", "kill", or "dead": then True only if `owner` has crashed."""

    what: str
    owner: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Returns when nothing of the owner's can write any more: its process has ended, its writes are done or lost."""

    owner: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A producer asks the consumer for another owner id."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Returns when the consumer has answered that since."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The consumer answers producers that have asked."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The consumer has done what there was to do."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the producer was told of its message: sent, lost or full."""

    index: int
    outcome: str


Program = Callable[[], Generator[Any, Any, None]]
LOCAL = (Sending, Deliver, Done, Released, Told)
"""Steps that touch nothing shared: they take place together with the step before."""


class Violation(AssertionError):
    """Something that must hold does not; the message has the steps that lead there."""


class Automaton:
    """A program as numbered states, made as they are reached: state 0 is its beginning."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._numbers: dict[object, int] = {}
        self._histories: list[tuple[Any, ...]] = []
        self._next: dict[tuple[int, Any], int] = {}
        self.verbs: list[Any] = []
        self.start = self._reach(())

    def step(self, number: int, answer: Any) -> int:
        """The state after `answer` to the verb of state `number`."""
        key = (number, answer)
        if key not in self._next:
            self._next[key] = self._reach((*self._histories[number], answer))
        return self._next[key]

    def _reach(self, history: tuple[Any, ...]) -> int:
        generator = self._program()
        verb: Any = None
        try:
            verb = next(generator)
            for answer in history:
                verb = generator.send(answer)
        except StopIteration:
            verb = None
        except RingCorrupted as error:
            raise Violation(f"a process that follows the protocol finds the ring corrupted: {error}") from None
        key = frames_of(generator)
        if key not in self._numbers:
            self._numbers[key] = len(self.verbs)
            self.verbs.append(verb)
            self._histories.append(history)
        number = self._numbers[key]
        assert self.verbs[number] == verb, f"two histories with equal frames differ: {self.verbs[number]}, {verb}"
        return number


def frames_of(generator: Generator[Any, Any, Any]) -> object:
    """All that decides what a suspended generator does next, but for iterators: these must run over local names."""
    frames = []
    inner: Any = generator
    while isinstance(inner, GeneratorType) and inner.gi_frame is not None:
        frame = inner.gi_frame
        frames.append((inner.gi_code, frame.f_lasti, tuple((k, freeze(v)) for k, v in sorted(frame.f_locals.items()))))
        inner = inner.gi_yieldfrom
    return tuple(frames)


def freeze(value: Any) -> object:
    """The value as one that can be compared and hashed."""
    if isinstance(value, Enum) or value is None or isinstance(value, int | str | bytes):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(freeze(getattr(value, part.name)) for part in fields(value)))
    if isinstance(value, dict):
        return tuple((freeze(k), freeze(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return (type(value), *map(freeze, value))
    if isinstance(value, set):
        return frozenset(map(freeze, value))
    return id(value)


class Journal(NamedTuple):
    """What has happened, as far as it matters: masks of messages (bit `owner * MESSAGES + index`)."""

    sending: tuple[int, ...]
    committed: int = 0
    delivered: int = 0
    interrupted: int = 0  # Delivered to a consumer that ended before it had given them back: they may come again.
    reading: tuple[Deliver, ...] = ()
    held: tuple[Deliver, ...] = ()  # Delivered and not given back: a consumer that begins anew gets them again.
    lost: int = 0
    abandoned: int = 0


MESSAGES = 8


class Global(NamedTuple):
    """A state of everything. `pending` are writes (place, value) of each process that have not taken place."""

    memory: tuple[Any, ...]
    pending: tuple[tuple[tuple[int, Any], ...], ...]
    at: tuple[int, ...]
    crashed: int
    crashes: int
    restarts: int
    abandons: int
    asking: int  # Processes that wait for another owner id.
    journal: Journal


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is explored.

    `is_fenced`: a fence works. Otherwise an owner that is taken for dead lives on, and its writes arrive later: then
    committed messages may be lost, but what is delivered is still right.
    """

    layout: RingLayout
    consumer: Program
    producers: tuple[Program, ...]
    contents: Mapping[bytes, tuple[int, int]]
    """What is sent: which message of which owner it is."""
    probe: Program
    """Sends a message; must succeed in a ring that is idle."""
    peer: Program | None = None
    crashes: int = 0
    restarts: int = 0
    abandons: int = 0
    is_fenced: bool = True


class Explorer:
    """Visits all `states` of a setting. With `is_traced` a violation names the steps that lead to it."""

    def __init__(self, setting: Setting, is_traced: bool = False) -> None:
        self.setting = setting
        self.layout = setting.layout
        programs = (setting.consumer, *setting.producers, *((setting.peer,) if setting.peer else ()))
        self.automata = [Automaton(program) for program in programs]
        self.states: set[Global] = set()
        self._parents: dict[Global, tuple[Global, str] | None] | None = {} if is_traced else None
        self._drained: set[object] = set()

    def run(self) -> None:
        """Raises Violation."""
        start = self._start()
        seen, stack = self.states, [start]
        seen.add(start)
        if self._parents is not None:
            self._parents[start] = None
        while stack:
            state = stack.pop()
            try:
                for label, after in self._steps(state):
                    if after not in seen:
                        seen.add(after)
                        stack.append(after)
                        if self._parents is not None:
                            self._parents[after] = (state, label)
                self._check_end(state)
            except Violation as violation:
                raise Violation(f"{violation}\n" + "\n".join(self._way_to(state))) from None

    def _start(self) -> Global:
        layout = self.layout
        words = [0, 0, *(layout.empty(number) for number in range(layout.slots))]
        count = len(self.automata)
        state = Global(
            memory=(*words, *([bytes(UNIT)] * layout.units)),
            pending=((),) * count,
            at=tuple(automaton.start for automaton in self.automata),
            crashed=0,
            crashes=self.setting.crashes,
            restarts=self.setting.restarts,
            abandons=self.setting.abandons,
            asking=0,
            journal=Journal((0,) * count),
        )
        for process in range(count):
            state = self._run_local(state, process)
        return state

    def _steps(self, state: Global) -> Iterator[tuple[str, Global]]:
        for process, pending in enumerate(state.pending):
            for write in pending:
                rest = tuple(other for other in pending if other is not write)
                landed = state._replace(pending=_with(state.pending, process, rest))
                yield f"{process}: a write arrives at {write[0]}", self._written(landed, process, *write)
        for process, number in enumerate(state.at):
            if state.crashed >> process & 1:
                continue
            verb = self.automata[process].verbs[number]
            if verb is None:
                continue
            for label, after in self._carry_out(state, process, verb):
                yield f"{process}: {label}", after
            if 0 < process <= len(self.setting.producers) and state.crashes:
                yield (
                    f"{process} crashes",
                    state._replace(crashed=state.crashed | 1 << process, crashes=state.crashes - 1),
                )
        yield from self._consumer_restart(state)

    def _consumer_restart(self, state: Global) -> Iterator[tuple[str, Global]]:
        """The consumer ends and a new one begins; what it was delivered and has not given back comes again."""
        if not state.restarts:
            return
        journal = state.journal
        again = sum(self._bit(one.content) for one in journal.held)
        interrupted, delivered = journal.interrupted | again, journal.delivered & ~again
        journal = journal._replace(reading=(), held=(), delivered=delivered, interrupted=interrupted)
        at = _with(state.at, CONSUMER, self.automata[CONSUMER].start)
        yield "the consumer begins anew", state._replace(at=at, restarts=state.restarts - 1, journal=journal)

    def _carry_out(self, state: Global, process: int, verb: Any) -> Iterator[tuple[str, Global]]:
        match verb:
            case Get():
                answer = self._read(state.memory, verb.offset, verb.size)
                yield f"get {verb.offset}", self._answered(state, process, answer)
            case Cas64():
                place = self._place(verb.offset)
                seen = state.memory[place]
                after = self._written(state, process, place, verb.desired) if seen == verb.expected else state
                yield f"cas {verb.offset}: {after is not state}", self._answered(after, process, seen)
            case Put():
                yield f"put {verb.offset}", self._answered(self._posted(state, process, verb), process, None)
            case Flush() if state.pending[process]:
                pass  # It waits.
            case Asked() if state.asking >> process & 1:
                pass  # It waits.
            case Ask():
                yield "asks", self._answered(state._replace(asking=state.asking | 1 << process), process, None)
            case Grant():
                yield "grants", self._answered(state._replace(asking=0), process, None)
            case Flush() | Pause() | Asked():
                yield type(verb).__name__, self._answered(state, process, None)
            case Choose():
                yield f"{verb.what} {verb.owner}: no", self._answered(state, process, False)
                if verb.what == "abandon":
                    state = state._replace(abandons=state.abandons - 1)
                yield f"{verb.what} {verb.owner}: yes", self._answered(state, process, True)
            case Fence():
                yield f"fences {verb.owner}", self._answered(self._fenced(state, verb.owner), process, None)
            case _:
                raise AssertionError(verb)

    def _posted(self, state: Global, process: int, verb: Put) -> Global:
        """The consumer's writes take place at once, since the memory is beside it; those of others at some time."""
        if process == CONSUMER:
            for write in self._writes(verb):
                state = self._written(state, process, *write)
            return state
        pending = (*state.pending[process], *self._writes(verb))
        return state._replace(pending=_with(state.pending, process, pending))

    def _fenced(self, state: Global, owner: int) -> Global:
        if not self.setting.is_fenced:
            return state
        return state._replace(crashed=state.crashed | 1 << owner, pending=_with(state.pending, owner, ()))

    def _answered(self, state: Global, process: int, answer: Any) -> Global:
        number = self.automata[process].step(state.at[process], answer)
        return self._run_local(state._replace(at=_with(state.at, process, number)), process)

    def _run_local(self, state: Global, process: int) -> Global:
        """The state after the steps that take no time of their own; a choice that has one way is one."""
        automaton = self.automata[process]
        while True:
            verb = automaton.verbs[state.at[process]]
            if isinstance(verb, LOCAL):
                state = state._replace(journal=self._noted(state.journal, process, verb))
                answer = None
            elif isinstance(verb, Choose) and not self._is_open(state, verb):
                answer = False
            else:
                return state
            state = state._replace(at=_with(state.at, process, automaton.step(state.at[process], answer)))

    def _is_open(self, state: Global, choice: Choose) -> bool:
        match choice.what:
            case "abandon":
                return state.abandons > 0
            case "dead":
                return bool(state.crashed >> choice.owner & 1)
        return True

    def _noted(self, journal: Journal, process: int, verb: Any) -> Journal:
        match verb:
            case Sending():
                return journal._replace(sending=_with(journal.sending, process, verb.index))
            case Told():
                is_committed = bool(journal.committed >> process * MESSAGES + verb.index & 1)
                _hold(is_committed == (verb.outcome == "sent"), f"producer {process} is told a wrong outcome: {verb}")
                return journal._replace(lost=journal.lost + (verb.outcome == "lost"))
            case Deliver():
                return self._delivered(journal, verb)
            case Done():
                return journal._replace(reading=tuple(one for one in journal.reading if one.slot != verb.slot))
            case Released():
                return journal._replace(held=tuple(one for one in journal.held if one.slot != verb.slot))
        raise AssertionError(verb)

    def _delivered(self, journal: Journal, verb: Deliver) -> Journal:
        if verb.content is None:
            _hold(not self.setting.is_fenced, "a committed message arrives damaged")
            return journal
        bit = self._bit(verb.content)
        _hold(bit != 0, f"a message is delivered that was never sent so: {verb.content!r}")
        _hold(bool(journal.committed & bit), "a message is delivered that was not committed")
        _hold(not journal.delivered & bit, "a message is delivered twice")
        owner = (bit.bit_length() - 1) // MESSAGES
        later = journal.delivered >> bit.bit_length() & (1 << (owner + 1) * MESSAGES - bit.bit_length()) - 1
        _hold(later == 0, f"messages of {owner} are delivered out of order")
        held, reading = (*journal.held, verb), (*journal.reading, verb)
        return journal._replace(delivered=journal.delivered | bit, held=held, reading=reading)

    def _bit(self, content: bytes | None) -> int:
        if content not in self.setting.contents:
            return 0
        owner, index = self.setting.contents[content]
        return 1 << owner * MESSAGES + index

    def _written(self, state: Global, process: int, place: int, value: Any) -> Global:
        journal = state.journal
        if 2 <= place < 2 + self.layout.slots:
            word = Word.unpack(value)
            if word.state == SlotState.READY and process != CONSUMER:
                bit = 1 << process * MESSAGES + journal.sending[process]
                journal = journal._replace(committed=journal.committed | bit)
            if word.state == SlotState.ABANDONED:
                journal = journal._replace(abandoned=journal.abandoned + 1)
        elif self.setting.is_fenced:
            first = self.layout.data + (place - 2 - self.layout.slots) * UNIT
            for one in journal.reading:
                overlaps = one.offset <= first < one.offset + one.size
                _hold(not overlaps, "bytes are written while the consumer reads them")
        return state._replace(memory=_with(state.memory, place, value), journal=journal)

    def _place(self, offset: int) -> int:
        layout = self.layout
        if offset >= layout.data:
            return 2 + layout.slots + (offset - layout.data) // UNIT
        if offset >= layout.first_slot:
            return 2 + (offset - layout.first_slot) // 8
        return {layout.head: 0, layout.hint: 1}[offset]

    def _read(self, memory: tuple[Any, ...], offset: int, size: int) -> bytes:
        place = self._place(offset)
        if offset < self.layout.data:
            assert size == 8
            word: int = memory[place]
            return word.to_bytes(8, "little")
        return b"".join(memory[place : place + -(-size // UNIT)])[:size]

    def _writes(self, verb: Put) -> Iterator[tuple[int, Any]]:
        data = b"".join(verb.buffers)
        place = self._place(verb.offset)
        if verb.offset < self.layout.data:
            yield place, int.from_bytes(data, "little")
            return
        for start in range(0, len(data), UNIT):
            yield place + start // UNIT, data[start : start + UNIT].ljust(UNIT, b"\0")

    def _check_end(self, state: Global) -> None:
        """Where no producer can step any more, the consumer alone reaches an empty ring, which takes a message."""
        if any(state.pending) or not isinstance(self._verb(state, CONSUMER), Pause):
            return
        others = range(1, len(state.at))
        if not all(state.crashed >> process & 1 or self._verb(state, process) is None for process in others):
            return
        key = (state.memory, state.at[CONSUMER], state.crashed, state.journal)
        if key in self._drained:
            return
        self._drained.add(key)
        state = self._drain(state)
        if self.setting.is_fenced:
            journal = state.journal
            arrived = journal.delivered | journal.interrupted
            _hold(arrived == journal.committed, "a committed message is never delivered")
            _hold(journal.lost <= journal.abandoned, "a message is lost that was not abandoned")
        head, hint = state.memory[0], state.memory[1]
        _hold(head >> 32 >= hint >> 32, "the hint is ahead of the tail")
        for number in range(head >> 32, (head >> 32) + self.layout.slots):
            word = state.memory[self._place(self.layout.slot(number))]
            _hold(word == self.layout.empty(number), f"slot {number} is not empty in an idle ring")
        self._probe(state)

    def _probe(self, state: Global) -> None:
        memory, steps, answer = list(state.memory), self.setting.probe(), None
        while not isinstance(verb := steps.send(answer), Told):
            answer = None
            match verb:
                case Get():
                    answer = self._read(tuple(memory), verb.offset, verb.size)
                case Cas64():
                    answer = memory[self._place(verb.offset)]
                    if answer == verb.expected:
                        memory[self._place(verb.offset)] = verb.desired
        _hold(verb.outcome == "sent", f"an idle ring takes no message: {verb.outcome}")

    def _drain(self, state: Global) -> Global:
        """The state after the consumer ran alone, taking back what is in its way, until nothing changes."""
        before: object = None
        while (state.memory, state.at) != before:
            before = (state.memory, state.at)
            is_at_pause = False
            while not is_at_pause:
                *_, (_, state) = self._carry_out(state, CONSUMER, self._verb(state, CONSUMER))  # The yes of a choice.
                is_at_pause = isinstance(self._verb(state, CONSUMER), Pause)
        return state

    def _verb(self, state: Global, process: int) -> Any:
        return self.automata[process].verbs[state.at[process]]

    def _way_to(self, state: Global) -> list[str]:
        if self._parents is None:
            return ["(explore with is_traced=True to see the steps)"]
        labels: list[str] = []
        parent = self._parents[state]
        while parent is not None:
            before, label = parent
            labels.append(label)
            parent = self._parents[before]
        return labels[::-1]


def _with(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _hold(condition: bool, text: str) -> None:
    if not condition:
        raise Violation(text)
