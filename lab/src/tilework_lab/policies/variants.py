"""Variants and ablations of the five papers' policies, which ship with Tilework."""

from __future__ import annotations

from functools import partial

from tilework.core.time import ns_from_s
from tilework.policy.published.ddit import DDiT
from tilework.policy.published.onepiece.dispatch import OnePieceDispatch
from tilework.policy.published.onepiece.policy import OnePiece
from tilework.policy.published.onepiece.traffic import Mode
from tilework.policy.published.tetriserve.policy import TetriServe
from tilework.policy.published.tridentserve.orchestration import Orchestration
from tilework.policy.published.tridentserve.policy import TridentServe
from tilework.policy.published.tridentserve.program import shortest_first
from tilework_lab.policies.tridentserve_ilp import solve_by_ilp

DOWNTIME_S = 45.0
"""Time that a device that is stopped and loaded anew is away: ours, the paper says "an extended interval"."""

TETRISERVE_EARLY = partial(TetriServe, ends_early=True)
DDIT_DROP = partial(DDiT, drops_to_best_effort=True)
ONEPIECE_COLLABORATION = partial(OnePiece, mode=Mode.COLLABORATION)
ONEPIECE_INDIVIDUAL = partial(OnePiece, mode=Mode.INDIVIDUAL)
ONEPIECE_WITHOUT_UTILISATION = partial(OnePiece, moves=False)
ONEPIECE_WITHOUT_REJECT = OnePieceDispatch


def tridentserve_ilp() -> TridentServe:
    """Build TridentServe with its dispatch program solved exactly."""
    return TridentServe(solver=solve_by_ilp)


def tridentserve_without_switch() -> TridentServe:
    """Build an ablation: the placement of the first requests stays."""
    return TridentServe(orchestration=Orchestration(switches=False))


def tridentserve_without_stages() -> TridentServe:
    """Build an ablation: all stages of a request run where its steps do."""
    return TridentServe(is_stage_aware=False)


def tridentserve_without_scheduler() -> TridentServe:
    """Build an ablation: the shortest request goes first, instead of the dispatch program."""
    return TridentServe(solver=shortest_first)


def tridentserve_downtime() -> TridentServe:
    """Build TridentServe with downtime: a device whose placement changes is closed for `DOWNTIME_S`."""
    return TridentServe(orchestration=Orchestration(downtime_ns=ns_from_s(DOWNTIME_S)))
