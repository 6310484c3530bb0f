"""The answer of `/v1/plan`: the number of devices that the traffic of the latest hour needs. Shares are parts of 1."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PlanPoint(_Strict):
    """A number of devices that was simulated: the share on time, and its 95% interval.

    Unless it `is_whole`, simulations were ended early, and `share` is an upper bound.
    """

    devices: int
    share: float
    low: float
    high: float
    verdict: Literal["meets", "misses", "unsure", "open"]
    is_whole: bool


class PlanUse(_Strict):
    """The number of devices that a stage keeps busy on average, and the share of its device time at each degree."""

    pipeline: str
    stage: str
    devices: float
    degrees: dict[str, float]


class PlanErrorModel(_Strict):
    """The same traffic simulated on the devices that served it: `points` is the simulated share less the live one."""

    points: float
    simulated: float
    live: float
    num_requests: int


class PlanResult(_Strict):
    """The fewest `devices` that are enough; null if no number is. Fewer than `least` never are."""

    devices: int | None
    devices_in_the_mean: int | None = Field(description="Fewest devices that reach the target in the mean")
    load: float = Field(description="Number of devices that the requests keep busy, each at its least device time")
    least: int
    points: list[PlanPoint]
    uses: list[PlanUse]
    error: PlanErrorModel
    wall_s: float


class PlanState(_Strict):
    """A plan. While it is `running`, ask again; a finished plan is given again for five minutes."""

    status: Literal["running", "done", "failed"]
    target: float
    devices_now: int = Field(description="Number of devices of the server")
    num_requests: int = Field(description="Number of requests of the latest hour that the plan uses")
    num_due: int = Field(description="Number of these that have a deadline")
    span_s: float = Field(description="Seconds from the first of them to the last")
    simulations: int = Field(description="Number of simulations that are done")
    result: PlanResult | None
    error: str | None = Field(description="Reason why it failed")
