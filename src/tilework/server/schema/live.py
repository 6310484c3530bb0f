"""The answer of `/v1/live`: the state of the server at one moment. Times are seconds on its own clock (`now_s`)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LiveComponent(_Strict):
    """Weights on a device: `name` is their name in the stages of the first of `models`. All these models use them."""

    models: list[str]
    name: str
    bytes: int


class LiveCard(_Strict):
    """A card's report of itself, by NVML, at most ten seconds ago; null: it does not tell."""

    busy: float | None = Field(description="Share of the last moments in which a kernel ran")
    used_bytes: int | None = Field(description="Memory in use, by any process")
    worker_bytes: int | None = Field(description="Part of it that the worker uses")
    celsius: int | None
    watts: float | None
    limit_watts: float | None
    hertz: int | None = Field(description="Clock of the multiprocessors")
    slowed_by: list[str] | None = Field(description="Reasons that keep the clock down")


class LiveDevice(_Strict):
    """A device that is up, or a CPU slot, with the weights that it has when its runs have ended."""

    device: int
    node: int
    kind: Literal["accelerator", "cpu"]
    used_bytes: int | None = Field(description="Memory in use, by any process, when its latest run ended; GPUs only")
    weights_bytes: int | None = Field(description="Its memory for weights; null without a limit")
    weights_free_bytes: int | None
    components: list[LiveComponent]
    cards: list[LiveCard] = Field(description="Its card, or those of its cell; none where there is no NVML")


class LiveTile(_Strict):
    """A run on its devices, or a load of weights (without requests). The end of one that has not ended is predicted.

    `first_step` counts from 0; `steps` is 0 for a stage without steps. `ending` is empty while it has not ended.
    """

    start_s: float
    end_s: float
    devices: list[int]
    stage: str
    requests: list[int] = Field(description="Numbers of its requests, except those of other tenants")
    first_step: int
    steps: int
    ending: str


class LiveRequest(_Strict):
    """An image that is open, or has just ended; one call may have several."""

    number: int
    uid: str
    model: str
    size: str
    steps: int
    class_: str = Field(alias="class")
    tenant: str
    arrival_s: float
    deadline_s: float | None
    is_promise: bool
    status: str
    steps_done: int
    eta_s: float = Field(description="Predicted finish: as of now for the first 20, else as of its admission")
    finish_s: float | None
    on_time: bool | None = Field(description="Null while it is open, without a deadline, or if it was cancelled")


class LiveAttainment(_Strict):
    """Images that have ended, of one class, tenant or model; `recent_` ones in the latest `attainment_window_s`."""

    by: Literal["class", "tenant", "model"]
    name: str
    on_time: int
    late: int
    others: int = Field(description="Requests without a deadline, and cancelled ones")
    refused: int
    recent_on_time: int
    recent_late: int


class LiveState(_Strict):
    """The state of devices, of what waits and of what was on time.

    In a stream, `tiles` and `ended` are those since the event before, and `devices` is null if nothing has changed
    there.
    """

    now_s: float
    policy: str
    backlog_s: float = Field(description="Predicted device time of open images")
    num_open: int
    num_own: int = Field(description="Number of these that are the tenant's own")
    missed: int = Field(description="Number of past entries that are left out because there are too many")
    planned: list[LiveTile] = Field(description="Runs that are under way or queued on devices")
    tiles: list[LiveTile] = Field(description="Runs that have ended")
    requests: list[LiveRequest] = Field(
        description="Open images, 200 at most: those that run, then the most urgent ones"
    )
    ended: list[LiveRequest]
    attainment: list[LiveAttainment]
    attainment_window_s: float
    devices: list[LiveDevice] | None
