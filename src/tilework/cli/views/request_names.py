"""Names of the requests of a log: what a user's name means, and the shortest names to show."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence

from tilework.control.history import PastRequest

_LEAST_CHARS = 8


def call_of(uid: str) -> str:
    """The name of the call that a request came in: images are called `{call}-{index}`."""
    call, _, index = uid.rpartition("-")
    return call if call and index.isdecimal() else uid


class RequestNames:
    """Finds requests by their names. Takes time to sort them once, and next to none for each name."""

    def __init__(self, requests: Sequence[PastRequest]) -> None:
        self._by_uid = {past.request.uid: past for past in requests}
        self._by_job = {str(past.job_id): past for past in reversed(requests) if past.job_id is not None}
        self._sorted = sorted(self._by_uid)

    def named(self, name: str) -> list[PastRequest]:
        """The request of this uid, else of this job number, else the only one, or the only call, whose uid begins so.

        `cfe4-1` is image 1 of the only call that begins with `cfe4`. Empty if there is none, or no only one.
        """
        if (known := self._by_uid.get(name) or self._by_job.get(name)) is not None:
            return [known]
        begun = self.begun(name)
        if not begun:
            begin, _, index = name.rpartition("-")
            begun = [uid for uid in self._only_call(begin) if begin and uid == f"{call_of(uid)}-{index}"]
        elif len(begun) > 1:
            begun = self._only_call(name)
        return [self._by_uid[uid] for uid in begun]

    def begun(self, begin: str) -> list[str]:
        """The uids that begin so, in order."""
        end = bisect_left(self._sorted, begin + chr(sys.maxunicode))
        return self._sorted[bisect_left(self._sorted, begin) : end]

    def short(self, uid: str) -> str:
        """A name that means this request alone: its uid, or a beginning of it with eight characters or more."""
        past, call = self._by_uid[uid], call_of(uid)
        for num_chars in range(_LEAST_CHARS, len(call) + 1):
            for name in (uid[:num_chars], uid[:num_chars] + uid[len(call) :]):
                if self.named(name) == [past]:
                    return name
        return uid

    def _only_call(self, begin: str) -> list[str]:
        """The uids of the only call that begins so; empty if there are several. Its images arrive together."""
        begun = self.begun(begin)
        if not begun or call_of(begun[0]) != call_of(begun[-1]):  # Of many, most differ there already.
            return []
        calls = {(call_of(uid), self._by_uid[uid].request.arrival_ns) for uid in begun}
        return begun if len(calls) == 1 and call_of(begun[0]).startswith(begin) else []
