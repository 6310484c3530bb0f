"""Many runs on all cores."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice

from tilework_lab.compare.records import Record
from tilework_lab.compare.runs import Conditions, Task, run


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A run that raised: a policy that breaks the rules, or does not end. It has no result."""

    task: Task
    error: str


def run_all(
    tasks: Iterable[Task],
    conditions: Conditions,
    num_processes: int,
    begin: Callable[[Task], None] = lambda task: None,
) -> Generator[tuple[Task, Record | Failed], None, None]:
    """Run the tasks and yield their results as they come; `begin` is called as each task begins, in the order given.

    Closing the generator ends the runs that are running.
    """
    todo = iter(tasks)
    if num_processes == 1:
        for task in todo:
            begin(task)
            yield task, _tried(task, conditions, 1)
        return
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(num_processes, initializer=_ignore_interrupts) as pool:
        try:
            yield from _run_in(pool, todo, conditions, num_processes, begin)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                if child not in others:
                    child.terminate()
            raise


def _run_in(
    pool: ProcessPoolExecutor,
    todo: Iterator[Task],
    conditions: Conditions,
    num_processes: int,
    begin: Callable[[Task], None],
) -> Iterator[tuple[Task, Record | Failed]]:
    running: dict[Future[Record | Failed], Task] = {}

    def fill() -> None:
        for task in islice(todo, num_processes - len(running)):
            begin(task)
            running[pool.submit(_tried, task, conditions, num_processes)] = task

    fill()
    while running:
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        ended = [(running.pop(future), future.result()) for future in done]
        fill()
        yield from ended


def _ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent process, which ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _tried(task: Task, conditions: Conditions, num_processes: int) -> Record | Failed:
    try:
        return run(task, conditions, num_processes)
    except Exception as error:
        return Failed(task=task, error=f"{type(error).__name__}: {error}")
