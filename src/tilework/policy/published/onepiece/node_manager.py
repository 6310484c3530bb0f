"""The node manager: which instance is for which service, and when that changes.

Theory of operation. Devices of a node are cut into instances as wide as the widest request wants. The first division
follows the requests that were seen, by the times of their stages (`proportional`, Theorem 1). It is made anew while it
has not been tried, until the first window ends: when a class of requests comes for the first time, and when their
number has doubled. From then on `UtilisationRule` decides at the end of each window. A service that has no instance
gets one at once, when a request waits for it: an idle one, or one of the least used. Devices that have joined are idle
until a service needs them, and those that come back are for what they were for; only if the services are others than
before are all divided again.

Nothing moves with a change: devices load what their next start needs, and end what they have.

Source: OnePiece §8.2. Use is the time that devices have works, loads for these included, and the time that refused
requests would have taken: where requests are refused in time, no stage is ever at 85%, and none would get more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tilework.core.policy import CostModel, DeviceView
from tilework.core.request import Request
from tilework.core.work import Group, NewPlacement
from tilework.policy.placement.utilisation import Use, UtilisationRule, proportional
from tilework.policy.published.onepiece.services import Service
from tilework.policy.published.onepiece.traffic import Traffic
from tilework.policy.toolkit.buddy_allocator import nodes
from tilework.policy.toolkit.fixed_groups import LaneDivision
from tilework.policy.toolkit.starts import devices_text
from tilework.policy.traits import PlacementStatus

Divide = Callable[[Mapping[Service, float], int], Mapping[Service, int]]
"""Division of a number of instances among services, by the device time that the traffic takes of each."""

_NO_DEVICES: Sequence[DeviceView] = ()
_IDLE = "idle"


@dataclass(slots=True, kw_only=True)
class NodeManager:
    """Keeps the service of each instance, and what services did in this window.

    Attributes:
        rule: when a service gets more instances.
        moves: whether instances change their service after the first window.
        division: how all instances are divided.
        instances: the service of each instance, in order of their devices; None: it is idle.
        services: all services.
    """

    traffic: Traffic
    rule: UtilisationRule
    moves: bool = True
    division: Divide = proportional
    instances: dict[Group, Service | None] = field(default_factory=dict, init=False)
    services: Sequence[Service] = field(default=(), init=False)
    _devices: Sequence[DeviceView] = field(default=_NO_DEVICES, init=False)
    _of_device: dict[int, Group] = field(default_factory=dict, init=False)
    _occasion: tuple[int, int] = field(default=(0, 0), init=False)
    _is_cut: bool = field(default=False, init=False)  # True if the latest look cut the devices anew.
    _has_lost: bool = field(default=False, init=False)  # True if a service has gone since the latest update.
    _was_for: dict[int, Service | None] = field(
        default_factory=dict, init=False
    )  # Services at the latest cut, by device.
    _told: dict[Group, Service | None] = field(default_factory=dict, init=False)
    _reasons: list[str] = field(default_factory=list, init=False)  # Why instances have changed since they were told.
    _news: NewPlacement | None = field(default=None, init=False)
    _waiting: Counter[Service] = field(default_factory=Counter, init=False)
    _since_ns: int | None = field(default=None, init=False)  # The begin of this window.
    _has_tried: bool = field(default=False, init=False)  # True if a window has ended.
    _looked_ns: int = field(default=0, init=False)
    _noted_ns: int = field(default=0, init=False)
    _num_changes: dict[int, int] = field(default_factory=dict, init=False)
    _busy_since_ns: dict[int, int] = field(default_factory=dict, init=False)
    _had_ns: Counter[Service] = field(default_factory=Counter, init=False)
    _used_ns: Counter[Service] = field(default_factory=Counter, init=False)
    _refused_ns: Counter[Service] = field(default_factory=Counter, init=False)
    _ends_ns: dict[Service, list[int]] = field(default_factory=dict, init=False)

    def of(self, service: Service) -> list[Group]:
        """Return the instances of a service, in order."""
        return [one for one, own in self.instances.items() if own == service]

    def num_workers(self, service: Service) -> int:
        """Return how many devices a service has."""
        return sum(len(one) for one in self.of(service))

    def take_news(self) -> NewPlacement | None:
        """Return the new placement that no plan has told yet; None if there is none."""
        news, self._news = self._news, None
        return news

    def wake_ns(self) -> int | None:
        """Return when this window ends, if there is something to do until then."""
        is_at_work = self._waiting.total() > 0 or any(device.works for device in self._devices)
        return self._since_ns + self.rule.window_ns if is_at_work and self._since_ns is not None else None

    def forget_unserved(self) -> None:
        """Drop what is known of services that no pipeline has any more. Instances are divided at the next update."""
        served = self.traffic.services.all()
        if all(one in served for one in self.services):
            return
        self._has_lost = True
        self._told = {}
        self.services = [one for one in self.services if one in served]
        self.instances = {one: own if own in served else None for one, own in self.instances.items()}
        self._was_for = {one: own for one, own in self._was_for.items() if own in served}
        self._ends_ns = {one: ends for one, ends in self._ends_ns.items() if one in served}
        for counter in (self._waiting, self._had_ns, self._used_ns, self._refused_ns):
            for service in [one for one in counter if one not in served]:
                del counter[service]

    def refused(self, request: Request, costs: CostModel) -> None:
        """Note a request that was refused: its services were asked for its time."""
        for service, run in self.traffic.parts(request, costs).items():
            self._refused_ns[service] += run.device_ns

    def started(self, service: Service, end_ns: int) -> None:
        """Note that a request began on a service; `end_ns` is predicted."""
        self._ends_ns.setdefault(service, []).append(end_ns)

    def status(self, now_ns: int) -> list[PlacementStatus]:
        """Return what each service did in this window. Times are of the latest look."""
        since_ns = self._since_ns or 0
        return [
            PlacementStatus(
                name=str(service),
                num_devices=self.num_workers(service),
                window_ns=self.rule.window_ns,
                completions=sum(since_ns < end_ns <= now_ns for end_ns in self._ends_ns.get(service, ())),
                busy_ns=self._used_ns[service],
                backlog=self._waiting[service],
            )
            for service in self.services
        ]

    def look(self, devices: Sequence[DeviceView], now_ns: int) -> None:
        """Count what devices did since the latest look, and cut them into instances. A request was seen."""
        self._count_use(devices, now_ns)
        if self._since_ns is None:
            self._since_ns = now_ns
        self._is_cut = self._cut(devices, now_ns)

    def update(self, costs: CostModel, waiting: Counter[Service], now_ns: int) -> None:
        """Change what instances are for if that is due, after a look at the devices, of which some are up.

        `waiting` is how many requests wait for each service. Raises UnknownCost.
        """
        assert self._since_ns is not None
        self._waiting = waiting
        before, self.services = self.services, self.traffic.services.all()
        occasion = self._is_cut, *self.traffic.occasion
        has_changed = occasion != (False, *self._occasion)
        self._occasion = self.traffic.occasion
        if self._is_cut:
            self.instances = {one: own if own in self.services else None for one, own in self.instances.items()}
        has_lost, self._has_lost = self._has_lost or bool(set(before) - set(self.services)), False
        if has_lost:
            self._divide(costs, f"stages are served apart as {len(self.services)} services", now_ns)
        elif has_changed and not self._has_tried:
            self._divide(costs, f"by the times of the stages, for the first {self.traffic.num} requests", now_ns)
        if now_ns >= self._since_ns + self.rule.window_ns:
            self._end_window(now_ns)
        for service in self.services:
            if waiting[service] and service not in self.instances.values():
                self._give_one(service, now_ns)
        if self.instances != self._told:
            groups = sorted((one, _IDLE if own is None else str(own)) for one, own in self.instances.items())
            self._news = NewPlacement(groups=tuple(groups), why="; ".join(self._reasons))
            self._told = dict(self.instances)
        self._reasons.clear()

    def _cut(self, devices: Sequence[DeviceView], now_ns: int) -> bool:
        """Cut the devices into instances, if they or what requests want have changed; returns whether it did.

        An instance is for what its first device was for, which may have been lost meanwhile.
        """
        width = min(self.traffic.wanted, max(map(len, nodes(devices)), default=1))
        if self._devices is devices and width == self.traffic.widest:
            return False
        what = "devices have joined or were lost" if self._devices is not devices else "a request wants wider ones"
        self._reasons.append(f"instances of {devices_text(width)}, as {what}")
        self._note_time(now_ns)
        self._devices = devices
        self._was_for.update({device_id: own for ids, own in self.instances.items() for device_id in ids})
        lanes = sorted(lane.ids for lane in LaneDivision(width).lanes(devices))
        self.instances = {ids: self._was_for.get(ids[0]) for ids in lanes}
        self._of_device = {device_id: ids for ids in lanes for device_id in ids}
        self.traffic.set_instances(len(lanes), width)
        return True

    # Use.

    def _count_use(self, devices: Sequence[DeviceView], now_ns: int) -> None:
        """Count for how long devices have had works since the latest look.

        A device that has changed has had works from then on, or from now on: a plan is made whenever anything changes.
        """
        lost = dict(self._busy_since_ns)
        for device in devices:
            device_id = device.device_id
            since_ns = lost.pop(device_id, None)
            if self._num_changes.get(device_id) == device.num_changes:
                continue
            if device_id in self._num_changes:
                self._use(device_id, self._looked_ns if since_ns is None else since_ns, now_ns)
            self._num_changes[device_id] = device.num_changes
            if device.works:
                self._busy_since_ns[device_id] = now_ns
            else:
                self._busy_since_ns.pop(device_id, None)
        for device_id, since_ns in lost.items():
            self._use(device_id, since_ns, now_ns)
            del self._busy_since_ns[device_id], self._num_changes[device_id]
        self._looked_ns = now_ns

    def _use(self, device_id: int, since_ns: int, now_ns: int) -> None:
        service = self.instances.get(self._of_device.get(device_id, ()))
        if service is not None:
            self._used_ns[service] += now_ns - since_ns

    def _note_time(self, now_ns: int) -> None:
        """Count what devices could do and did up to now, before instances change."""
        for device_id, since_ns in self._busy_since_ns.items():
            self._use(device_id, since_ns, now_ns)
            self._busy_since_ns[device_id] = now_ns
        for ids, service in self.instances.items():
            if service is not None:
                self._had_ns[service] += len(ids) * (now_ns - self._noted_ns)
        self._noted_ns = now_ns

    def _uses(self) -> dict[Service, Use]:
        """Return what each service that has instances did in this window, up to when it was noted."""
        nums = Counter(self.instances.values())
        asked_ns = self._used_ns + self._refused_ns
        return {one: Use(nums[one], asked_ns[one] / max(1, self._had_ns[one])) for one in self.services if nums[one]}

    # Changes.

    def _end_window(self, now_ns: int) -> None:
        """Let the rule decide, and begin the next window."""
        self._note_time(now_ns)
        uses = self._uses()
        num_idle = sum(own is None for own in self.instances.values())
        change = self.rule.reassignment(uses, num_idle) if self.moves else None
        if change is not None:
            for giver in change.givers:
                self.instances[self._least_used(giver)] = change.to
            self._reasons.append(change.why)
        self._has_tried = True
        self._since_ns = now_ns
        for counter in (self._used_ns, self._refused_ns, self._had_ns):
            counter.clear()
        self._ends_ns = {one: [at_ns for at_ns in ends if at_ns > now_ns] for one, ends in self._ends_ns.items()}
        self.traffic.end_window()

    def _give_one(self, service: Service, now_ns: int) -> None:
        """Give a service without instances one. There are as many instances as services, so one can be spared."""
        self._note_time(now_ns)
        giver = None
        what = "an idle instance"
        if None not in self.instances.values():
            uses = self._uses()
            may = [one for one, use in uses.items() if use.num_instances > 1 or not (use.share or self._waiting[one])]
            giver = min(may, key=lambda one: uses[one].share_with(-1))
            what = f"one of {giver}, which was asked for {uses[giver].share:.0%} of its time"
        self.instances[self._least_used(giver)] = service
        self._reasons.append(f"a request waits for {service}, which has no instance; it gets {what}")

    def _least_used(self, service: Service | None) -> Group:
        """Return the instance of a service, or the idle one, with the fewest busy devices, the last of equals."""
        return min(
            [one for one, own in self.instances.items() if own == service],
            key=lambda one: (sum(device_id in self._busy_since_ns for device_id in one), -one[0]),
        )

    def _divide(self, costs: CostModel, why: str, now_ns: int) -> None:
        """Divide all instances anew by the times of what was asked for; as many as can stay what they are."""
        self._note_time(now_ns)
        left = dict(self.division(self.traffic.loads(costs), len(self.instances)))
        before = dict(self.instances)
        for one, service in before.items():
            kept = service if service is not None and left.get(service) else None
            self.instances[one] = kept
            if kept is not None:
                left[kept] -= 1
        lacking = [service for service, num in left.items() for _ in range(num)]
        free = [one for one, own in self.instances.items() if own is None]
        self.instances.update(zip(free, lacking, strict=True))
        self._reasons.append(why)
