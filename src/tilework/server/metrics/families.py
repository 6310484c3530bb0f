"""Every metric that a server exports: its name, type, labels and meaning (`tools/metrics_table.py` prints them).

The values of a label are those of the enumeration that the code counts by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tilework.core.component import LoadSource
from tilework.core.request import RefusalCode, Status
from tilework.core.wire.reports import SLOWDOWNS, Ending
from tilework.server.schema.answers import Unready

PREFIX = "tilework_"

LATENCY_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 8, 13, 21, 34, 60, 120, 300, 600)
SLACK_S = (-600, -120, -60, -20, -10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 2, 5, 10, 20, 60, 120, 600)
ERROR_S = (-60, -20, -10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 2, 5, 10, 20, 60)
WORK_S = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
DEVICE_S = (0.1, 0.3, 1, 2, 3, 5, 8, 13, 21, 34, 60, 120, 300, 1000)
DECISION_S = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.2, 1)
RATIO = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 4)
ERROR_SHARE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2)


class Kind(StrEnum):
    """Types of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class CallRefusal(StrEnum):
    """Reasons why a call is not taken, beside those of the engine and those of `Unready`."""

    TOO_MANY_OPEN = "too_many_open"
    TOO_MANY_A_MINUTE = "rate_limit_exceeded"
    INPUT_FULL = "input_full"
    RESULTS_FULL = "results_full"


def reason_of(unready: Unready) -> str:
    """Return the reason why an image is not taken then; without devices it is the engine's."""
    return RefusalCode.NO_DEVICE if unready is Unready.NO_DEVICES else unready


class DeadlineResult(StrEnum):
    """Results of a deadline."""

    ON_TIME = "on_time"
    LATE = "late"


class PromiseResult(StrEnum):
    """Results of a promised deadline."""

    KEPT = "kept"
    BROKEN = "broken"


class PatchResult(StrEnum):
    """Results of a patch of a step."""

    COMPUTED = "computed"
    SKIPPED = "skipped"


class WebhookResult(StrEnum):
    """Results of an attempt to tell a webhook."""

    TAKEN = "taken"
    FAILED = "failed"


class Intervention(StrEnum):
    """Acts of the guard of promises against the planner, or in its place."""

    START_VETOED = "start_vetoed"
    STOP_VETOED = "stop_vetoed"
    START_FORCED = "start_forced"


class MemoryUser(StrEnum):
    """Users of the memory of a card. `ANY`: the card does not tell whose it is, as in a container."""

    WORKER = "worker"
    OTHERS = "others"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Label:
    """A label with all its `values`; for one without them, `text` describes the values."""

    name: str
    values: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """A metric under the name that Prometheus shows. `bounds` are those of a histogram; they ascend."""

    kind: Kind
    name: str
    text: str
    labels: tuple[Label, ...] = ()
    bounds: Sequence[float] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)


def _counter(name: str, text: str, *labels: Label) -> MetricFamily:
    return MetricFamily(Kind.COUNTER, f"{PREFIX}{name}_total", text, labels)


def _gauge(name: str, text: str, *labels: Label) -> MetricFamily:
    return MetricFamily(Kind.GAUGE, PREFIX + name, text, labels)


def _histogram(name: str, text: str, bounds: Sequence[float], *labels: Label) -> MetricFamily:
    return MetricFamily(Kind.HISTOGRAM, PREFIX + name, text, labels, bounds)


def _values(name: str, values: Iterable[str]) -> Label:
    return Label(name, tuple(map(str, values)))


CLASS = Label("class", text="the `priority` of a request; beyond the first 32: `other`")
SIZE = Label("size", text="as `1024x1024`; beyond the first 32: `other`; works of several images: `shared`")
DEGREE = Label("degree", text="number of devices of a work")
STAGE = Label("stage", text="a stage of the model's pipeline: `encode`, `diffuse`, `decode`")
DEVICE = Label("device", text="number of the device, which is that of its worker; in a cell `0.1`")
PLACEMENT = Label(
    "placement",
    text="stages that a device is for: `EDC`, `DC`, `ED`, `D`, `E`, `C` (stages before the steps, the steps, after "
    "them), with the model's name if several have devices of their own",
)
PROCESS = Label("process", text="`server`, or `worker-` and the number of its device")
VERSION = Label("version", text="version of tilework")
POLICY = Label("policy", text="the scheduling policy")
MODEL = Label("model", text="a served model")
NODE = Label("node", text="place of the node, as in the log; 0 without nodes")
OPEN_LABELS = (CLASS, SIZE, DEGREE, STAGE, DEVICE, PLACEMENT, PROCESS, VERSION, POLICY, MODEL, NODE)

SOURCE = _values("source", LoadSource)

# Results of calls.

REQUESTS = _counter(
    "requests",
    "Images that have ended, by outcome",
    CLASS,
    _values("outcome", (status for status in Status if status.is_final)),
)
REFUSALS = _counter(
    "refusals",
    "Refused images, by reason; one per call if a limit of the tenant, of the key or of memory refuses it",
    _values("reason", dict.fromkeys((*RefusalCode, *CallRefusal, *map(reason_of, Unready)))),
)
FRONTEND_REFUSALS = _counter(
    "frontend_refusals", "Calls that front ends refused by themselves because the queue is full"
)
INVALID_CALLS = _counter("invalid_calls", "Invalid calls, refused before they became images")
WARNINGS = _counter(
    "warnings",
    "Warnings: fields without effect, unknown fields (ten per call, and one for the rest), words that are not drawn",
)
WEBHOOK_ATTEMPTS = _counter(
    "webhook_attempts", "Attempts to send webhooks at the ends of calls", _values("result", WebhookResult)
)
DEADLINES = _counter(
    "deadlines",
    "Accepted images with a deadline, by whether they met it; a failed image counts as late, a cancelled one does "
    "not count",
    CLASS,
    _values("result", DeadlineResult),
    SIZE,
)
PROMISES = _counter(
    "promises",
    "Accepted images with on_miss reject, by whether they were done in time; a cancelled image does not count",
    _values("result", PromiseResult),
)
SLACK_SECONDS = _histogram(
    "slack_seconds",
    "Deadline minus end of images that are done; negative if late, so there is no sum",
    SLACK_S,
    CLASS,
    SIZE,
)
REQUEST_LATENCY_SECONDS = _histogram(
    "request_latency_seconds", "Time from arrival to the last pixel of images that are done", LATENCY_S, CLASS
)
REQUEST_QUEUE_SECONDS = _histogram(
    "request_queue_seconds", "Time from arrival to the first work of images that are done", LATENCY_S, CLASS
)
REQUEST_DEVICE_SECONDS = _histogram(
    "request_device_seconds",
    "Device time of images that are done, summed over devices; a shared work counts for each image in equal parts",
    DEVICE_S,
    SIZE,
)
ETA_ERROR_SECONDS = _histogram(
    "eta_error_seconds",
    "Finish minus the finish predicted at admission; negative if early, so there is no sum",
    ERROR_S,
)
ETA_ERROR_RATIO = _histogram(
    "eta_error_ratio",
    "Difference between the finish and that predicted at admission, without sign, as a share of the latency",
    ERROR_SHARE,
)
PREVIEWS = _counter("previews", "Previews that were drawn")
CACHED_PATCHES = _counter(
    "cached_patches",
    "Patches of blocks of steps, of images that are done and have a cache",
    _values("result", PatchResult),
)

# Open requests.

UNREADY = _gauge("unready", "1 if /ready answers 503 for this reason", _values("reason", Unready))
JOBS_QUEUED = _gauge("jobs_queued", "Images that wait for a device, before their first work or between two", CLASS)
JOBS_RUNNING = _gauge("jobs_running", "Images that a device works on or takes next", CLASS)
BACKLOG_DEVICE_SECONDS = _gauge("backlog_device_seconds", "Predicted device time that all open images still need")
PROMISE_INTERVENTIONS = _gauge(
    "promise_interventions",
    "Starts and stops of the planner held back to keep promises, and starts added to keep them",
    _values("kind", Intervention),
)

# Devices at work.

WORKS = _counter("works", "Works that have ended, by ending", STAGE, DEGREE, _values("ending", Ending))
STEPS = _counter(
    "steps",
    "Completed denoising steps of images, by degree of the work; a step that four images share counts four",
    DEGREE,
)
STEP_SECONDS = _histogram(
    "step_seconds", "Time of a denoising step: that of a chunk of steps, divided by their number", STEP_S, SIZE, DEGREE
)
WORK_SECONDS = _histogram(
    "work_seconds", "Time of a completed work; of a stage with steps, a chunk of them", WORK_S, STAGE, SIZE, DEGREE
)
PREDICTION_RATIO = _histogram("prediction_ratio", "Predicted over actual time of a completed work", RATIO, STAGE)
COST_CORRECTION_RATIO = _gauge(
    "cost_correction_ratio",
    "Measured over tabled time, as predictions use it; near 0.5 for steps without guidance if the table has guided "
    "ones",
    STAGE,
    SIZE,
    DEGREE,
)
COST_DEVIATION_RATIO = _gauge(
    "cost_deviation_ratio",
    "Measured over tabled time of the latest works of one image, for stages where it is off by more than half",
    MODEL,
    STAGE,
)
PROMISE_MARGIN_SECONDS = _gauge(
    "promise_margin_seconds",
    "Fixed part of the margin that a new promise needs between its predicted finish and its deadline",
)
PROMISE_MARGIN_RATIO = _gauge(
    "promise_margin_ratio", "Rest of that margin, as a share of the time until the predicted finish"
)
DEVICE_BUSY_SECONDS = _counter(
    "device_busy_seconds",
    "Time in works that were completed or stopped, added when they end; its rate is the busy share",
    DEVICE,
)
BUBBLE_SECONDS = _counter(
    "bubble_seconds", "Time between two works of a device in which some image had no device", DEVICE
)
DEVICE_LOSSES = _counter("device_losses", "Number of times that the worker of a device was lost", DEVICE)
BAD_REPORTS = _gauge(
    "bad_reports",
    "Number of times since the start that a node or a worker there was lost for an impossible report",
    NODE,
)
STUCK_WORKS = _counter(
    "stuck_works", "Works without a step for too long; their group was broken off, or their worker killed"
)
LOG_LOSSES = _counter("log_losses", "Event logs that could not be written to their end")
DEVICES = _gauge("devices", "Devices that the server was started with")
DEVICES_UP = _gauge("devices_up", "Devices that take work")
PREEMPTIONS = _counter("preemptions", "Times that an unfinished image waited while another image had its device")
MOVES = _counter("moves", "Times that an image continued on devices without its state")
WORK_STOPS = _counter("work_stops", "Works that were asked to end early because their image was cancelled")
DECISION_SECONDS = _histogram("decision_seconds", "Time that the controller takes for one event", DECISION_S)
WEIGHT_LOADS = _counter("weight_loads", "Loads of weights onto a device for its next run", SOURCE)
WEIGHT_LOAD_SECONDS = _counter("weight_load_seconds", "Time that these loads took", SOURCE)
WEIGHT_LOAD_BYTES = _counter("weight_load_bytes", "Bytes of these loads", SOURCE)
WEIGHTS_FREE_BYTES = _gauge(
    "weights_free_bytes",
    "Free room for weights on a device after its queued runs, where weights are loaded on demand",
    DEVICE,
)
PLACEMENT_DEVICES = _gauge(
    "placement_devices",
    "Devices of a placement type; this metric and the next four exist only with a policy that places stages",
    PLACEMENT,
)
PLACEMENT_BACKLOG = _gauge("placement_backlog", "Images that wait for devices of a placement type", PLACEMENT)
PLACEMENT_COMPLETIONS_PER_SECOND = _gauge(
    "placement_completions_per_second",
    "Rate of images whose stages devices of a placement type end, over the policy's window (one to ten minutes)",
    PLACEMENT,
)
PLACEMENT_BUSY_RATIO = _gauge(
    "placement_busy_ratio", "Share of that window in which devices of a placement type ran stages", PLACEMENT
)
PLACEMENT_CHANGES = _counter("placement_changes", "Changes of placement types by the policy")

# Held resources.

DISK_FREE_BYTES = _gauge("disk_free_bytes", "Free room on the disk of the durable directory")
STORE_BYTES = _gauge("store_bytes", "Size of the results kept for fetching; expired ones count until the next access")
STORE_ENTRIES = _gauge("store_entries", "Number of these results")
SPOOL_BYTES = _gauge("spool_bytes", "Size of the results on the disk that wait until their store takes them")
SPOOL_ENTRIES = _gauge("spool_entries", "Number of these results")
STORE_UNWRITTEN_SECONDS = _gauge(
    "store_unwritten_seconds", "Time since the store took a result; 0 unless the store is away or results wait for it"
)
STATE_BLOB_BYTES = _gauge("state_blob_bytes", "Size of the states of open images in memory that the workers share")
ENCODE_CACHE_BYTES = _gauge("encode_cache_bytes", "Size of the encoded prompts that are kept beside the states")
ENCODE_CACHE_HITS = _gauge("encode_cache_hits", "Images since the start whose prompt was already encoded")
ENCODE_CACHE_MISSES = _gauge("encode_cache_misses", "Images since the start whose prompt had to be encoded")
DEVICE_MEMORY_BYTES = _gauge(
    "device_memory_bytes",
    "Memory in use on a device, by any process, when its latest work ended; GPUs only",
    DEVICE,
)
DEVICE_KEPT_BYTES = _gauge(
    "device_kept_bytes", "Size of the states of images without a run on a device, as its latest run found them", DEVICE
)
DEVICE_SPILLS = _gauge(
    "device_spills", "States that the worker has dropped since its start because they exceeded states_memory", DEVICE
)
DEVICE_RETURNS = _gauge(
    "device_returns", "Number of these that it has read again from memory that the workers share", DEVICE
)
CARD_BUSY_RATIO = _gauge("card_busy_ratio", "Share of the last moments in which a kernel ran on the card", DEVICE)
CARD_MEMORY_BYTES = _gauge(
    "card_memory_bytes",
    "Memory of the card in use: by its worker, by others, or by any process if the card does not say whose it is",
    DEVICE,
    _values("user", MemoryUser),
)
CARD_MEMORY_TOTAL_BYTES = _gauge("card_memory_total_bytes", "Memory of the card", DEVICE)
CARD_TEMPERATURE_CELSIUS = _gauge("card_temperature_celsius", "Temperature of the card", DEVICE)
CARD_POWER_WATTS = _gauge("card_power_watts", "Power that the card takes", DEVICE)
CARD_POWER_LIMIT_WATTS = _gauge("card_power_limit_watts", "Power that the card may take", DEVICE)
CARD_CLOCK_HERTZ = _gauge("card_clock_hertz", "Clock of the card's multiprocessors", DEVICE)
CARD_CLOCK_MAX_HERTZ = _gauge("card_clock_max_hertz", "Maximum of this clock", DEVICE)
CARD_SLOWED = _gauge(
    "card_slowed", "1 if this reason keeps the clock of the card down", DEVICE, _values("reason", SLOWDOWNS)
)
ALLOCATOR_RESERVED_BYTES = _gauge("allocator_reserved_bytes", "CUDA memory that torch has in the worker", DEVICE)
ALLOCATOR_ALLOCATED_BYTES = _gauge("allocator_allocated_bytes", "Part of it that tensors use", DEVICE)
ALLOCATOR_PEAK_BYTES = _gauge(
    "allocator_peak_bytes", "Most of it that tensors used since the device was measured", DEVICE
)
ALLOCATOR_SPLIT_BYTES = _gauge(
    "allocator_split_bytes", "Free pieces of blocks that tensors use in part: fragments", DEVICE
)
ALLOCATOR_RETRIES = _gauge(
    "allocator_retries",
    "Allocations since the worker's start that first had to release unused blocks",
    DEVICE,
)
ALLOCATOR_FAILURES = _gauge("allocator_failures", "Allocations since the worker's start that failed", DEVICE)
RESIDENT_BYTES = _gauge("resident_bytes", "Memory of a process, shared pages counted in each; Linux only", PROCESS)
BUILD_INFO = _gauge("build_info", "Version, policy and model of the server; always 1", VERSION, POLICY, MODEL)
UPTIME_SECONDS = _gauge("uptime_seconds", "Time since the server began to load its models")

FAMILIES = tuple(one for one in tuple(globals().values()) if isinstance(one, MetricFamily))
"""All metrics, in the order of this file."""
