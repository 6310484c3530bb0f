"""The JSON that the server sends back; files have other forms."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tilework.server.schema.image_request import FileFormat, OutputFormat
from tilework.server.schema.provenance import Provenance

ErrorType = Literal["invalid_request_error", "rate_limit_error", "server_error"]
State = Literal["queued", "running", "paused", "done", "failed", "cancelled"]

_SOURCE = (
    "Source of the deadline: the request, else its tenant, class or model, else the server; null without a deadline"
)

PROMISED = "True if it was accepted with the promise to be done by its deadline"
WARNINGS = "Fields without effect, ignored or changed, and words of the prompt that the model does not know"


class SegmentModel(BaseModel):
    """One piece of work that was done for an image; times in seconds from its arrival.

    `steps` is 0 for a stage without steps. A `sliced` piece took less memory and more time. The steps of `batch`
    images, this one included, were done together. Before the piece, `load_s` seconds were spent on loading weights.
    """

    stage: str
    devices: list[int]
    steps: int
    start_s: float
    end_s: float
    sliced: bool = False
    batch: int = 1
    load_s: float = 0.0


class CacheModel(BaseModel):
    """The work of an image's cache: a patch of a block of a step was either `computed` or `skipped`.

    A cache has a `threshold` or an `interval`. For a cache of whole steps the image is one patch. `saving` is the share
    that was skipped. `off` says why the cache did not work throughout; null if it did.
    """

    kind: str
    threshold: float | None
    interval: int | None
    computed: int
    skipped: int
    saving: float
    off: str | None


class RequestTimeline(BaseModel):
    """The timeline of one image; times in seconds from its arrival. `on_time` is null without a deadline."""

    uid: str
    seed: int
    status: str
    eta_s: float = Field(description="Finish that admission predicted")
    eta_p90_s: float | None = Field(
        None, description="Time by which nine of ten such images finish, as predicted at admission"
    )
    latency_s: float
    queue_s: float | None
    slo_s: float | None
    slo_source: str | None = Field(None, description=_SOURCE)
    is_promised: bool = Field(False, description=PROMISED)
    on_time: bool | None
    exact: bool = Field(description="True if it was exact: each of its works ran on one device, alone and whole")
    vae_tiling: bool = Field(False, description="True if it was decoded in tiles, as after stock `enable_tiling()`")
    warnings: list[str] = Field([], description=WARNINGS)
    cache: CacheModel | None = Field(None, description="Work of its cache; null if it had none")
    segments: list[SegmentModel]
    provenance: Provenance | None = Field(None, description="Provenance of an exact image, for `tilework verify`")


class ImageData(BaseModel):
    """One image, as `b64_json` or as `url`. A clip has one for each frame, in order, clip after clip."""

    b64_json: str | None = None
    url: str | None = None
    revised_prompt: str | None = None
    frame: int | None = Field(None, description="Index of the frame in its clip, from 0 on; null if it is no clip")
    tilework: RequestTimeline


class ImagesResponse(BaseModel):
    created: int
    data: list[ImageData]
    output_format: OutputFormat
    size: str


class ImageUrl(BaseModel):
    """The image itself, in `url`: `data:image/png;base64,...`"""

    url: str


class ImagePart(BaseModel):
    """One image in a chat, or one frame of a clip; `stage_durations` in seconds by stage."""

    type: Literal["image_url"] = "image_url"
    image_url: ImageUrl
    frame: int | None = None
    stage_durations: dict[str, float]
    tilework: RequestTimeline


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: list[ImagePart]


class ChatChoice(BaseModel):
    index: Literal[0] = 0
    message: ChatMessage
    finish_reason: Literal["stop"] = "stop"


class ChatUsage(BaseModel):
    """Numbers of tokens, all 0: images have none."""

    prompt_tokens: Literal[0] = 0
    completion_tokens: Literal[0] = 0
    total_tokens: Literal[0] = 0


class ChatCompletion(BaseModel):
    """The images of a call, all of them in one message."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage = ChatUsage()


class ErrorDetail(BaseModel):
    """An error. Some have further fields, for example the earliest deadline that could be met (`earliest_s`)."""

    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Any refusal."""

    error: ErrorDetail


_P90 = "Time by which nine of ten such requests finish, as far as is known; never before `eta_s`"
_ETA = "Predicted finish: as of now, in lists as of its admission; null once it has ended"


class ImageStatus(BaseModel):
    """The status of one image; durations in seconds from arrival. `timeline` is there once it is done."""

    uid: str
    index: int
    state: State
    step: int
    steps: int
    eta_s: float | None = Field(description=_ETA)
    eta: str | None = Field(description="The same as a time (RFC 3339)")
    eta_p90_s: float | None = Field(None, description=_P90)
    eta_p90: str | None = Field(None, description="The same as a time (RFC 3339)")
    queue_s: float | None = Field(description="Time that it waited for a device; null while it waits")
    reason: str | None = Field(description="Reason why it failed or was cancelled")
    timeline: RequestTimeline | None


class RequestStatus(BaseModel):
    """The status of a call, or of one image of it. A call is all or nothing: it is done when all its images are."""

    uid: str
    object: Literal["tilework.request"] = "tilework.request"
    status: State
    created: int
    arrived: str = Field(description="Time of its arrival (RFC 3339)")
    priority: str
    slo_s: float | None
    slo_source: str | None = Field(None, description=_SOURCE)
    is_promised: bool = Field(False, description=PROMISED)
    warnings: list[str] = Field([], description=WARNINGS)
    eta_s: float | None = Field(description=_ETA)
    eta: str | None
    eta_p90_s: float | None = Field(None, description=_P90)
    eta_p90: str | None = Field(None, description="The same as a time (RFC 3339)")
    size: str
    frames: int = Field(1, description="Number of frames of each clip; 1 for images")
    output_format: FileFormat
    images: list[ImageStatus]
    error: ErrorDetail | None
    expires: str | None = Field(description="Latest time until which its images are kept, if they are (RFC 3339)")

    @property
    def num_parts(self) -> int:
        """Number of files of each image: one for each frame of a clip, one for a video."""
        return 1 if self.output_format == "mp4" else self.frames


class RequestList(BaseModel):
    """Calls, newest first. If there are more, `after` = `last_id` asks for them."""

    object: Literal["list"] = "list"
    data: list[RequestStatus]
    first_id: str | None = Field(description="Uid of the first one; null if there is none")
    last_id: str | None = Field(description="Uid of the last one; null if there is none")
    has_more: bool


class DecisionModel(BaseModel):
    """One decision about an image; `at_s` in seconds from its arrival, `steps` the first and the last one."""

    uid: str
    at_s: float
    kind: str
    text: str
    devices: list[int]
    degree: int | None
    steps: list[int] | None


class Decisions(BaseModel):
    """All decisions about a call or an image of it, in order."""

    uid: str
    status: State
    decisions: list[DecisionModel]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["tilework"] = "tilework"
    tilework: dict[str, Any]


class NotServedModel(BaseModel):
    """A model with which the server was started and that cannot run on its devices."""

    id: str
    reason: str


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    not_served: list[NotServedModel]


class ModelPath(BaseModel):
    """The first model: `model_path` is its hub id, or its name, never a path. Calls may give it as `model`."""

    model_path: str


class NodeModel(BaseModel):
    """A node of a set: the share of the window that its devices were busy, and why it is there.

    `epoch` is that of the node manager which has put it there; null if none has.
    """

    name: str
    utilisation: float | None
    epoch: int | None
    why: str | None


class SetModel(BaseModel):
    """A server among others. `utilisation` is the share of `window_s` seconds that its devices were busy."""

    name: str
    object: Literal["set"] = "set"
    url: str = Field(description="URL at which clients reach it")
    models: list[str]
    is_open: bool = Field(description="True if it accepts calls now")
    devices_up: int
    backlog_s: float = Field(description="Predicted device time of its open requests")
    start_in_s: float = Field(
        description="Seconds until a new request could start, if the devices share this time evenly"
    )
    window_s: float
    utilisation: float
    stages: dict[str, float] = Field(description="Part of the utilisation that each stage takes")
    nodes: list[NodeModel]
    most_nodes: int = Field(description="Most nodes that it has places for; 0 for the devices of one machine")


class SetList(BaseModel):
    """The sets of a registry by name, this one included, and which of them is their node manager.

    `is_current` is false while the registry does not answer: then the other sets are as they were last.
    """

    object: Literal["list"] = "list"
    data: list[SetModel]
    own: str = Field(description="Name of the set that answers")
    node_manager: str | None
    is_current: bool


class Alive(BaseModel):
    status: Literal["ok"] = "ok"


class Unready(StrEnum):
    """Reasons why no call is taken: the `status` of such an error."""

    STARTING = "starting"
    STOPPING = "stopping"
    NO_DEVICES = "no_devices"
    DISK_UNWRITABLE = "disk_unwritable"


class ReadyModel(BaseModel):
    """A ready server. `open_requests` counts images that have not ended, `restored_requests` those of the last run.

    `waiting_results` are on this server's disk until their store takes them. `unwritten_s` is the time since it last
    took one; 0 while none waits.
    """

    status: Literal["ready"] = "ready"
    devices_up: int
    devices: int
    open_requests: int
    restored_requests: int
    waiting_results: int
    unwritten_s: float
