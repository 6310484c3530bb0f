"""Tasks that a session between a server and an agent needs."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from tilework.comm.net.channel import Channel

_log = logging.getLogger(__name__)


def end_if_failed(channel: Channel, task: asyncio.Task[Any]) -> bool:
    """Return whether a task that has ended failed. Then the session ends, too, and the agent begins another one."""
    if task.cancelled() or (error := task.exception()) is None:
        return False
    _log.error("the session of an agent has failed, and ends", exc_info=error)
    channel.abort()
    return True
