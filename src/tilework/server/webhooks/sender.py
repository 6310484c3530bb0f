"""Sends notices until their receivers have taken them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, repeat

import httpx

from tilework.server.webhooks.notice import Notice

logger = logging.getLogger("tilework.server")

WAITS_S = (5, 30, 120, 600, 1800)
"""Seconds before the second attempt, the third, and so on; after these, an hour each."""
_HOUR_S = 3600
_TIMEOUT_S = 10.0
AT_ONCE = 16
_GONE = 410


class WebhookSender:
    """Sends each notice at least once, unless its call is forgotten first. Every method runs on the event loop.

    An attempt counts if its answer is 2xx, or 410: then the receiver wants no more of it. Redirects are not followed.
    `on_told` is called with the uid of a call whose notice need not be sent again, `on_attempt` with whether an attempt
    counted. `is_known` returns whether there is still a record of a call.
    """

    def __init__(
        self,
        secret: str,
        *,
        on_told: Callable[[str], None],
        is_known: Callable[[str], bool],
        on_attempt: Callable[[bool], None],
    ) -> None:
        self._secret = secret
        self._on_told = on_told
        self._is_known = is_known
        self._on_attempt = on_attempt
        self._tasks: set[asyncio.Task[None]] = set()
        self._untried: set[str] = set()
        self._all_tried = asyncio.Event()
        self._all_tried.set()
        self._places = asyncio.Semaphore(AT_ONCE)
        self._client: httpx.AsyncClient | None = None

    def send(self, notice: Notice) -> None:
        """Begin to send a notice; return at once."""
        self._untried.add(notice.id)
        self._all_tried.clear()
        task = asyncio.create_task(self._deliver(notice))
        self._tasks.add(task)  # The loop alone would not keep the task.
        task.add_done_callback(self._tasks.discard)

    async def all_tried(self) -> None:
        """Wait until each notice was tried once."""
        await self._all_tried.wait()

    async def close(self) -> None:
        """Give up notices that were not taken yet."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def _deliver(self, notice: Notice) -> None:
        for wait_s in _waits_s():
            try:
                is_taken = await self._try(notice)
            finally:
                self._tried(notice)
            self._on_attempt(is_taken)
            if is_taken:
                self._on_told(notice.call_uid)
                return
            await asyncio.sleep(wait_s)
            if not self._is_known(notice.call_uid):
                logger.warning("the webhook of call %s was never accepted, and the call is forgotten", notice.call_uid)
                return

    async def _try(self, notice: Notice) -> bool:
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False)
        async with self._places:
            headers = notice.headers(self._secret, int(time.time()))
            try:
                status = await _status(self._client, notice, headers)
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
                logger.warning("the webhook of call %s cannot be sent: %s", notice.call_uid, _reason(error))
                return False
        is_taken = httpx.codes.is_success(status) or status == _GONE
        if not is_taken:
            logger.warning("the webhook of call %s was answered with %d", notice.call_uid, status)
        return is_taken

    def _tried(self, notice: Notice) -> None:
        self._untried.discard(notice.id)
        if not self._untried:
            self._all_tried.set()


def _waits_s() -> Iterator[int]:
    return chain(WAITS_S, repeat(_HOUR_S))


async def _status(client: httpx.AsyncClient, notice: Notice, headers: Mapping[str, str]) -> int:
    """Return the status of the answer, which has to come in time. Its body is not read: it may be long."""
    posting = client.stream("POST", notice.url, content=notice.body, headers=headers)
    async with asyncio.timeout(_TIMEOUT_S), posting as answer:
        return answer.status_code


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"there is no answer after {_TIMEOUT_S:g} seconds"
    return str(error) or type(error).__name__
