"""One measurement of one server: what it says of itself, the workload, idle latencies, and answers under load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

import httpx

from tilework.client.dialect import Dialect, ResponseFormat
from tilework.client.drive import OnResult, drive, open_client
from tilework.client.mix import PROMPTS, mixed_workload, parse_sizes, parse_slo, read_prompts, with_slo
from tilework.client.record import CallEnd, Record
from tilework.core.arrivals import constant_s, first_s, poisson_s
from tilework.core.request import OnMiss, Shape
from tilework.core.shares import skewed
from tilework.formats.trace import paced, read_trace
from tilework.formats.workload import WorkloadRequest

# For servers that do not name defaults.
OTHERS_SIZE = "1024"
OTHERS_STEPS = 50
NUM_REQUESTS = 100
OnProbe = Callable[[Shape], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The options of `tilework bench`, with the names and meanings that its help gives them.

    None means taken from the server (`model`, `plain`, `steps`, `sizes`), or no limit, or not given.
    """

    url: str
    requests: str | None = None
    arrivals: Literal["poisson", "constant"] = "poisson"
    rate_per_s: float | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    seed: int = 0
    sizes: str | None = None
    mix: Literal["uniform", "skewed"] = "uniform"
    steps: int | None = None
    guidance_scale: float | None = None
    prompts: str | None = None
    slo: str | None = None
    slo_scale: float = 1.0
    on_miss: OnMiss | None = None
    model: str | None = None
    plain: bool | None = None
    response_format: ResponseFormat = "b64_json"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    warmup: int = 1
    max_hops: int = 3

    @property
    def dialect(self) -> Dialect:
        guidance = {} if self.guidance_scale is None else {"guidance_scale": self.guidance_scale}
        return Dialect(
            model=self.model,
            response_format=self.response_format,
            plain=bool(self.plain),
            extra_body=guidance | dict(self.extra_body),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A measurement that is ready to run: `config` is complete; `workload` does not have the deadlines of `slo` yet."""

    config: BenchConfig
    server: ServerInfo
    workload: tuple[WorkloadRequest, ...]
    api_key: str | None = field(default=None, repr=False)

    @property
    def shapes(self) -> list[Shape]:
        """Every size once, small ones first."""
        return sorted({request.shape for request in self.workload}, key=lambda shape: (shape.pixels, shape))

    @property
    def probes_per_size(self) -> int:
        return self.config.warmup + self._needs_unloaded

    @property
    def _needs_unloaded(self) -> bool:
        return self.config.slo is not None and parse_slo(self.config.slo).factor is not None

    async def probe(self, on_probe: OnProbe = lambda _shape: None) -> dict[Shape, float]:
        """Ask for each size, one at a time: `warmup` unmeasured requests and, if the rule is "auto", a measured one.

        Returns the latencies of the measured ones in seconds by size; empty if the rule needs none.

        Raises:
            ServerUnusable: an image did not come.
        """
        unloaded_s: dict[Shape, float] = {}
        for shape in self.shapes:
            sample = next(request for request in self.workload if request.shape == shape)
            for number in range(self.probes_per_size):
                latency_s = await self._probe(replace(sample, arrival_s=0.0, slo_s=None))
                if number == self.config.warmup:
                    unloaded_s[shape] = latency_s
                on_probe(shape)
        return unloaded_s

    async def send(self, workload: Sequence[WorkloadRequest], on_result: OnResult | None = None) -> list[Record]:
        """Send the requests that `due` returned and wait for all ends; files are not kept."""
        return await drive(
            self.config.url,
            workload,
            dialect=self.config.dialect,
            api_key=self.api_key,
            timeout_s=self.config.timeout_s,
            keep_files=False,
            on_result=on_result,
            max_hops=self.config.max_hops,
        )

    def due(self, unloaded_s: Mapping[Shape, float]) -> tuple[WorkloadRequest, ...]:
        """Return the workload with its deadlines. Raises ValueError if the rule has none for a size."""
        config = self.config
        rule = None if config.slo is None else parse_slo(config.slo)
        return with_slo(self.workload, rule, unloaded_s=unloaded_s, scale=config.slo_scale, on_miss=config.on_miss)

    async def _probe(self, request: WorkloadRequest) -> float:
        (record,) = await self.send([request])
        if record.status is not CallEnd.DONE:
            raise ServerUnusable(
                f"the server, idle, did not draw {record.shape} ({record.cause}: {record.detail}); "
                "ask for what it can draw, or leave out the warm-up by --warmup 0"
            )
        return record.latency_s


async def prepare(config: BenchConfig, api_key: str | None = None) -> Bench:
    """Ask the server for its properties, complete `config` with them, and make the workload.

    Raises:
        ServerUnusable: nothing answers at the URL, or not to this key.
        ValueError, OSError: an option or a file cannot be used.
    """
    if config.slo is not None:
        parse_slo(config.slo)
    server = await ask_server(config.url, api_key, config.model)
    completed = _completed(config, server)
    bench = Bench(config=completed, server=server, workload=make_workload(completed), api_key=api_key)
    if not bench.workload:
        raise ValueError("there are no requests to send; raise --num-requests, --duration or the rate")
    bench.due(dict.fromkeys(bench.shapes, 1.0))
    return bench


def _completed(config: BenchConfig, server: ServerInfo) -> BenchConfig:
    """Complete `config` with what the server says, else with defaults."""
    if config.model is None and not server.models:
        raise ValueError("there is no model and the server lists none; give --model")
    made = config.requests is None
    unbounded = made and config.num_requests is None and config.duration_s is None
    return replace(
        config,
        model=config.model or server.models[0],
        plain=not server.is_tilework if config.plain is None else config.plain,
        num_requests=NUM_REQUESTS if unbounded else config.num_requests,
        steps=config.steps or (server.default_steps or OTHERS_STEPS if made else None),
        sizes=config.sizes or (server.default_size or OTHERS_SIZE if made else None),
    )


def make_workload(config: BenchConfig) -> tuple[WorkloadRequest, ...]:
    """Return the requests of a complete `config`, in order, drawn or from a trace, without the deadlines of `slo`.

    Raises:
        ValueError, OSError: an option or a file cannot be used.
    """
    if config.requests is not None:
        return _traced(config, config.requests)
    if config.rate_per_s is None:
        raise ValueError("there is no rate; give --rate, --rpm or --requests")
    assert config.sizes is not None
    assert config.steps is not None
    if config.arrivals == "poisson":
        arrivals_s = poisson_s(config.rate_per_s, Random(f"arrivals {config.seed}"))
    else:
        arrivals_s = constant_s(config.rate_per_s)
    shares = parse_sizes(config.sizes)
    return mixed_workload(
        first_s(arrivals_s, config.num_requests, config.duration_s),
        skewed(shares) if config.mix == "skewed" else shares,
        pipeline=config.model or "",
        steps=config.steps,
        prompts=_prompts(config),
        seed=config.seed,
    )


def _traced(config: BenchConfig, path: str) -> tuple[WorkloadRequest, ...]:
    """Return the trace with the pace, length and steps of `config`; seeds and prompts are filled in."""
    trace = read_trace(path, config.model or "")
    if trace and config.rate_per_s is not None:
        trace = paced(trace, config.rate_per_s)
    kept = [r for r in trace if config.duration_s is None or r.arrival_s < config.duration_s][: config.num_requests]
    rng = Random(f"mix {config.seed}")
    prompts = _prompts(config)
    return tuple(
        replace(
            request,
            id=index if request.id is None else request.id,
            pipeline=config.model or request.pipeline,
            steps=config.steps or request.steps,
            seed=rng.randrange(2**31) if request.seed is None else request.seed,
            prompt=request.prompt or rng.choice(prompts),
        )
        for index, request in enumerate(kept)
    )


def _prompts(config: BenchConfig) -> Sequence[str]:
    return PROMPTS if config.prompts is None else read_prompts(config.prompts)


TIMEOUT_S = 10.0


class ServerUnusable(Exception):
    """The server at the address cannot be measured; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A server's description of itself: `models` as it lists them. The rest is known of Tilework servers only."""

    models: tuple[str, ...] = ()
    is_tilework: bool = False
    default_size: str | None = None
    default_steps: int | None = None
    num_devices: int | None = None
    policy: str | None = None


async def ask_server(base_url: str, api_key: str | None = None, model: str | None = None) -> ServerInfo:
    """Read `/v1/models` and, of a Tilework server, `/ready`. Defaults are those of `model`, or of the first model.

    Raises:
        ServerUnusable: nothing answers, or not to this key, or a Tilework server has no device up.
        ValueError: `base_url` is no address of a server.
    """
    async with open_client(base_url, api_key) as http:
        listed = await _get(http, "/v1/models")
        cards = [card for card in _list(listed.get("data")) if isinstance(card, dict) and card.get("id")]
        chosen = next((card for card in cards if card["id"] == model), cards[0] if cards else {})
        limits = chosen.get("tilework")
        if not isinstance(limits, dict):
            return ServerInfo(models=tuple(str(card["id"]) for card in cards))
        ready = await _get(http, "/ready")
    return ServerInfo(
        models=tuple(str(card["id"]) for card in cards),
        is_tilework=True,
        default_size=_default_size(limits),
        default_steps=limits.get("default_steps"),
        num_devices=ready.get("devices"),
        policy=limits.get("policy"),
    )


def _default_size(limits: Mapping[str, Any]) -> str | None:
    """Return the default size in the form that `mix.parse_size` reads; None if the server names none."""
    size = limits.get("default_size")
    frames = limits.get("default_frames")
    return f"{size}x{frames}" if size and isinstance(frames, int) and frames > 1 else size


async def _get(http: httpx.AsyncClient, path: str) -> Mapping[str, Any]:
    """Return the JSON object at `path`; an empty one if the server has none."""
    url = f"{str(http.base_url).rstrip('/')}{path}"
    try:
        response = await http.get(path, timeout=TIMEOUT_S)
    except (httpx.HTTPError, OSError) as error:
        text = str(error) or type(error).__name__
        raise ServerUnusable(f"{url} does not answer ({text}); start a server there, or give its URL") from error
    if response.status_code in (401, 403):
        raise ServerUnusable(f"{url} answers {response.status_code}; give the key by --api-key or OPENAI_API_KEY")
    if response.status_code == 503:
        raise ServerUnusable(f"{url} answers 503, so the server is not ready; wait until it is")
    try:
        values = response.json() if response.status_code == 200 else {}
    except ValueError:
        values = {}
    return values if isinstance(values, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
