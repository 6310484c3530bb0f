"""Processes that run requests together, as the members of a group."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import lru_cache
from multiprocessing.connection import Connection
from types import TracebackType

from suite.case import CaseFailed
from suite.exactness.runs import Run, in_group
from tilework.comm.groups import Groups
from tilework.comm.rendezvous import Rendezvous
from tilework.core.model import ModelSource
from tilework.core.wire import GroupRef, Spec
from tilework.pipelines.family import Family
from tilework.pipelines.loading import load, quiet
from tilework.pipelines.numerics import pin_numerics
from tilework.runtime.worker_process import forkserver_context


class Team:
    """`size` processes of one thread each."""

    def __init__(self, size: int) -> None:
        context = forkserver_context()
        self._num_groups = 0
        self._pipes: list[Connection] = []
        with ExitStack() as stack:
            rendezvous = stack.enter_context(closing(Rendezvous()))
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, rendezvous.address, theirs), daemon=True)
                process.start()
                theirs.close()
                stack.callback(process.join, 10)
                stack.callback(ours.close)
                self._pipes.append(ours)
            self._resources = stack.pop_all()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._resources.close()

    def run(self, source: ModelSource, degree: int, specs: Sequence[Spec]) -> list[Run]:
        """Each request on the first `degree` members; the results of the first one.

        Raises:
            CaseFailed: a member failed; with its trace.
        """
        self._num_groups += 1
        ref = GroupRef(self._num_groups, tuple(range(degree)))
        members = self._pipes[:degree]
        for pipe in members:
            pipe.send((ref, source, tuple(specs)))
        answers = [pipe.recv() for pipe in members]
        for answer in answers:
            if isinstance(answer, str):
                raise CaseFailed(answer)
        runs: list[Run] = answers[0]
        return runs


def _serve(rank: int, address: str, pipe: Connection) -> None:
    pin_numerics(threads=1)
    quiet()
    groups = Groups(rank, address)
    while True:
        try:
            ref, source, specs = pipe.recv()
        except EOFError:
            return
        try:
            comm, model = groups.open(ref), _model(source)
            pipe.send([in_group(model, comm, spec) for spec in specs])
        except Exception:
            groups.break_off(ref.group_id)  # The others must not wait.
            pipe.send(f"member {rank} of {ref.devices}: {traceback.format_exc()}")
        groups.close(ref.group_id)


@lru_cache(maxsize=1)
def _model(source: ModelSource) -> Family:
    return load(source)
