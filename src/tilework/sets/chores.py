"""Chores that must go on as long as their process: a chore that fails is started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

_log = logging.getLogger(__name__)
_PAUSE_S = 1.0
Chore = Callable[[], Coroutine[object, object, None]]


async def kept_alive(what: str, chore: Chore) -> None:
    """Run a chore until it returns or is cancelled; after an exception, start it again after a pause.

    `what` names the chore in the log. A traceback is logged once, until the chore fails with another exception.
    """
    last = ""
    while True:
        try:
            return await chore()
        except Exception as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            reason = f"{type(error).__name__}: {error}"
            traceback = error if reason != last else None
            _log.error("%s has failed, and begins again in %g s: %s", what, _PAUSE_S, reason, exc_info=traceback)
            last = reason
        await asyncio.sleep(_PAUSE_S)
