"""Values of each option of `tilework serve`: what its parser knows and is not here makes a test fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from suite.pairs.covering import Place
from suite.pairs.files import CLIP, STILL

Values = tuple[tuple[str, ...], ...]

ABSENT = 0
"""The level of an option that is not given. Its values are the levels from 1 on."""

LEFT_OUT: Mapping[str, str] = {
    "adapter": "adds stages that a cost table lacks, and measuring takes a minute (tests/live/test_adapter.py)",
    "agents": "is given with --nodes, since starts would listen at one port without it",
    "cluster": "needs Ray (tests/live/test_ray_server.py)",
    "measure_seconds": "is refused with --cost, without which every start would measure (tests/cli/test_cli.py)",
    "registry": "needs etcd (tests/live/test_sets.py)",
    "require_all": "changes nothing where all models run (tests/live/test_broken_start.py)",
    "results": "needs Redis or a bucket (tests/store)",
    "show_config": "starts nothing (tests/cli/test_config_file.py)",
    "json": "is given at each start, since it says when the server is ready",
    "device": "is cpu in each start of models, so that it is the same on all machines",
    "backend": "decides which of the two sets a start is of",
    "compiles": "takes a minute at each start (tests/live/test_gpu_setup.py)",
}
"""Options without values here, and why."""

OF_ANY: dict[str, Values] = {
    "config": (("--config", "{files}/settings.toml"),),
    "workers": (("--devices", "1"), ("--devices", "3")),
    "threads": (("--threads", "2"),),
    "cpu_slots": (("--cpu-slots", "2"),),
    "states_memory": (("--states-memory", "100MB"),),
    "cache_memory": (("--cache-memory", "100MB"),),
    "worker_memory": (("--worker-memory", "2GB"),),
    "collectives": (("--collectives", "sockets"), ("--collectives", "gloo")),
    "policy": tuple(("--policy", name) for name in ("edf", "tetriserve", "tridentserve", "patchedserve", "onepiece")),
    "profiles": (("--profiles", "{own}/profiles.sqlite"),),
    "stuck_after": (("--stuck-after", "5"),),
    "host": (("--host", "localhost"), ("--host", "0.0.0.0")),
    "port": (("--port", "{port}"),),
    "probe_port": (("--probe-port", "{probes}"),),
    "frontends": (("--frontends", "1"), ("--frontends", "2")),
    "api_key": (("--api-key", "{key}"),),
    "served_model_name": (("--served-model-name", "main,other"),),
    "allow_origin": (("--allow-origin", "https://example.org"), ("--allow-origin", "*")),
    "webhook_origins": (("--webhook-origins", "http://127.0.0.1:{collector}"),),
    "traces": (("--traces", "http://127.0.0.1:{collector}"),),
    "tenants": (("--tenants", "{files}/tenants.toml"),),
    "default_slo": (("--default-slo", "30s"), ("--default-slo", "3x")),
    "exact": (("--exact",),),
    "strict": (("--strict",),),
    "metadata": (("--no-metadata",),),
    "safety_filter": (("--safety-filter", "filters:Filter"),),
    "cache": (("--cache", "patch"), ("--cache", "taylorseer"), ("--cache", "if_late")),
    "cache_threshold": (("--cache-threshold", "0.01"),),
    "cache_interval": (("--cache-interval", "3"),),
    "max_backlog_s": (("--max-backlog", "600"),),
    "promise_price": (("--promise-price", "0"), ("--promise-price", "greedy")),
    "max_batch": (("--max-batch", "1"), ("--max-batch", "4")),
    "durable": (("--durable", "{own}/durable"),),
    "set_name": (("--set", "east"),),
    "log": (("--log", "{own}/events.jsonl"),),
    "no_log": (("--no-log",),),
    "log_segment": (("--log-segment", "8MB"),),
    "log_segment_days": (("--log-segment-days", "0.5"),),
    "log_kept": (("--log-kept", "100MB"),),
    "log_kept_days": (("--log-kept-days", "1"),),
    "log_level": (("--log-level", "info"), ("--log-level", "error")),
    "log_file": (("--log-file", "{own}/server.log"),),
    "nodes": tuple(("--nodes", number, "--agents", "127.0.0.1:{agents}") for number in ("1", "2")),
    "least_nodes": (("--least-nodes", "1"),),
    "state_copies": (("--state-copies", "2"),),
    "standby": (("--standby",),),
}
"""Options that mean something on devices of both kinds. Braces are filled in for each start (see `served`)."""

OF_MODELS: dict[str, Values] = {
    "models": (("shapes",), ("shapes", "shapes-motion")),
    "models_file": (("--models", "{files}/models.toml"), ("--models", "{files}/pools.toml")),
    "loras": (("--loras", "{files}/loras"),),
    "no_previews": (("--no-previews",),),
    "cell": (("--cell", "2"), ("--cell", "auto")),
    "weights_memory": (("--weights-memory", "200MB"),),
    "recalibrate": (("--recalibrate",),),
    "dtype": (("--dtype", "bfloat16"),),
    "quantize": (("--quantize", "int8"),),
    "offload": (("--offload", "components"), ("--offload", "layers")),
    "attention": (("--attention", "math"),),
    "cuda_graphs": (("--cuda-graphs",),),
    "copy_stream": (("--copy-stream",),),
    "vae_tiling": (("--vae-tiling",),),
}
"""Options of models with weights."""

OF_SIMULATED: dict[str, Values] = {
    "models": ((STILL,), (STILL, CLIP), (CLIP, STILL)),
    "cost": (("--cost", "{files}/costs.json"),),
}
"""Options that simulated devices need. Each of their starts has one of these values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """What is refused: these places, one or two, by a sentence with these words. Where it needs others to come so far,
    they are `beside`. Without words it follows from other pairs, so that no sentence is about it."""

    places: frozenset[Place]
    words: str
    beside: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The options of one kind of devices, with all their values, and what does not go together."""

    name: str
    base: tuple[str, ...]
    values: Mapping[str, Values]
    needed: frozenset[str]
    refused: tuple[Refused, ...]

    def levels(self, option: str) -> tuple[int, ...]:
        """All of an option that no start refuses by itself."""
        first = 1 if option in self.needed else ABSENT
        alone = {place for one in self.refused if len(one.places) == 1 for place in one.places}
        return tuple(level for level in range(first, len(self.values[option]) + 1) if (option, level) not in alone)

    @property
    def factors(self) -> dict[str, tuple[int, ...]]:
        return {option: self.levels(option) for option in self.values}

    @property
    def excluded(self) -> frozenset[frozenset[Place]]:
        return frozenset(one.places for one in self.refused if len(one.places) == 2)

    def arguments(self, row: Mapping[str, int]) -> tuple[str, ...]:
        """Of the command, with braces."""
        given = [self.values[option][level - 1] for option, level in row.items() if level != ABSENT]
        return (*self.base, *(word for words in given for word in words))


def _pair(words: str, **places: int) -> Refused:
    return Refused(places=frozenset(places.items()), words=words)


def _each(words: str, option: str, levels: int, **other: int) -> tuple[Refused, ...]:
    """The same of several values of an option."""
    return tuple(_pair(words, **{option: level}, **other) for level in range(1, levels + 1))


_ANYWHERE = (
    _pair("it waits for the directory of another server", standby=1, durable=ABSENT),
    *_each("images with it are not exact", "cache", 3, exact=1),
    _pair("--no-log wants no event log", log=1, no_log=1),
    _pair("it has no interval", cache=1, cache_interval=1),
    _pair("it has no threshold", cache=2, cache_threshold=1),
    *(_pair("the server has no nodes", **{option: 1}, nodes=ABSENT) for option in ("least_nodes", "state_copies")),
    _pair("give 1 to 1, the number of nodes", state_copies=1, nodes=1),
)
_MEANS_NOTHING = tuple(
    one
    for option, values in OF_MODELS.items()
    if option != "models"
    for one in _each(
        f"simulated devices {'have no weights' if option == 'cell' else 'run no model'}", option, len(values)
    )
)
"""What of models is refused of simulated devices."""
SIMULATED = Space(
    name="simulated devices",
    base=("--backend", "modelled"),
    values=OF_MODELS | OF_SIMULATED | OF_ANY,
    needed=frozenset(OF_SIMULATED),
    refused=_MEANS_NOTHING + _ANYWHERE,
)
_COST_OF_MODELS: dict[str, Values] = {"cost": (("--cost", "{files}/models.json"),)}
"""So that no start measures anything."""
_WITH_WEIGHTS = {"weights_memory": 1}
_REFUSED_OF_MODELS = (
    _pair("--cost says what steps cost", recalibrate=1),
    *(one for models in (1, 2) for one in _each("and MODEL names others", "models_file", 2, models=models)),
    *_each("has devices of its own", "policy", 2, models_file=2),
    _pair("the memory of the devices is not known", offload=1, weights_memory=ABSENT),
    _pair("leave out --weights-memory", offload=2, weights_memory=1),
    _pair("LoRAs are not applied then yet", quantize=1, loras=1),
    *_each("--weights-memory does not say what a device has for weights", "cell", 2, weights_memory=ABSENT),
    *_each("", "cell", 2, offload=2),
    *(
        replace(one, beside=_WITH_WEIGHTS)
        for one in (
            *_each("--cell divides weights as they are", "cell", 2, offload=1),
            *_each("--cell divides weights as they are", "cell", 2, quantize=1),
            _pair("its devices round otherwise than one", cell=1, exact=1),
            _pair("requests share no forward pass in cells", cell=1, max_batch=2),
            *_each("which does not divide", "workers", 2, cell=1),
        )
    ),
)
_OF_ANY_WITH_MODELS = (
    *("workers", "threads", "cpu_slots", "states_memory", "cache_memory", "worker_memory", "collectives", "policy"),
    *("profiles", "frontends", "exact", "cache", "cache_threshold", "cache_interval", "max_batch", "durable", "log"),
    *("nodes", "state_copies", "standby"),
)
"""Options of both kinds of devices that have to do with workers or models."""

_VALUES_OF_MODELS = (
    OF_MODELS
    | _COST_OF_MODELS
    | {name: OF_ANY[name] for name in _OF_ANY_WITH_MODELS}
    | {"policy": OF_ANY["policy"][:2]}
)
MODELS = Space(
    name="CPU workers",
    base=("--device", "cpu"),
    values=_VALUES_OF_MODELS,
    needed=frozenset({"cost"}),
    refused=tuple(
        one for one in (*_ANYWHERE, *_REFUSED_OF_MODELS) if all(name in _VALUES_OF_MODELS for name, _ in one.places)
    ),
)
