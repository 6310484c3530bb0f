"""OnePiece: its dispatch, with requests refused that are more than its stages can do; and its variants by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tilework.core.actions import Reject
from tilework.core.interfaces import CostModel
from tilework.core.request import Request
from tilework.policy.published.onepiece.dispatch import OnePieceDispatch
from tilework.policy.published.onepiece.request_monitor import Claim, RateLimit, RequestMonitor
from tilework.policy.published.onepiece.services import Service


@dataclass(slots=True, kw_only=True)
class OnePiece(OnePieceDispatch):
    """`OnePieceDispatch`, which accepts requests no faster than its slowest stage can begin them.

    A refusal names when there will be room; the paper's client goes to another set. Requests of a pipeline that was not
    seen yet are accepted: it has no instances, and gets one.

    Source: OnePiece §5; departures in `request_monitor`.

    Attributes:
        limit: how fast requests may come.
    """

    limit: RateLimit = field(default_factory=RateLimit)
    _monitor: RequestMonitor = field(init=False)

    def __post_init__(self) -> None:
        OnePieceDispatch.__post_init__(self)  # Dataclasses with slots know no super().
        self._monitor = RequestMonitor(self.limit)

    def refusal(self, request: Request, costs: CostModel, now_ns: int) -> Reject | None:
        if not self._traffic.services.knows(request.pipeline):
            return None
        refusal = self._monitor.refusal(request, self._claims(request, costs), now_ns)
        if refusal is not None:
            self._manager.refused(request, costs)
        return refusal

    def forget(self, pipeline: str, costs: CostModel) -> None:
        OnePieceDispatch.forget(self, pipeline, costs)
        self._monitor.forget_unserved(self._traffic.services.all())

    def _accepted(self, requests: Sequence[Request], costs: CostModel, now_ns: int) -> None:
        for request in requests:
            self._monitor.accept(request, self._claims(request, costs), now_ns)

    def _claims(self, request: Request, costs: CostModel) -> dict[Service, Claim]:
        """What a request takes of each service that has instances."""
        return {
            service: Claim(run.device_ns, num, self._traffic.longest_ns(service, costs))
            for service, run in self._traffic.parts(request, costs).items()
            if (num := self._manager.num_workers(service))
        }
