"""The model that a command names: checked before any worker starts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from random import Random
from typing import TYPE_CHECKING, Any

from tilework.cli.console import UserError, console, user_errors
from tilework.cli.devices import FoundDevices
from tilework.cli.measured import keep_compiled
from tilework.cli.options.common import SetupGroup
from tilework.core.model import (
    ATTENTIONS,
    MODEL_NAME,
    OFFLOADS,
    LoraSource,
    ModelInfo,
    ModelSource,
    is_model_name,
)
from tilework.core.wire.spec import Spec

if TYPE_CHECKING:
    from tilework.pipelines.cuda.state import Card
    from tilework.pipelines.family import Family


def named_model(text: str) -> tuple[str, str]:
    """Return the name and path of NAME=PATH; a path alone has no name. What is in a directory called A=B is ./A=B."""
    name, equals, path = text.partition("=")
    return (name, path) if equals and path and not name.startswith((".", "/", "~")) else ("", text)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of how a model runs: see `core.model.ModelSource`.

    `cards` are those of this machine, if it runs on them.
    """

    adapter: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    memory_bytes: int | None = None
    quantize: str | None = None
    offload: str = OFFLOADS[0]
    attention: str = ATTENTIONS[0]
    compiles: bool = False
    cuda_graphs: bool = False
    copy_stream: bool = False
    vae_tiling: bool = False
    previews: bool = True
    loras: tuple[LoraSource, ...] = ()
    devices: tuple[int, ...] | None = None
    cards: tuple[Card, ...] = ()


def options_of(setup: SetupGroup, found: FoundDevices, **others: Any) -> ModelOptions:
    """Return the options of a model that is set up so, on what was found. Raises UserError."""
    return ModelOptions(
        device=found.device,
        dtype=found.dtype(setup.dtype),
        quantize=setup.quantize,
        offload=setup.offload,
        attention=setup.attention,
        compiles=setup.compiles,
        cuda_graphs=setup.cuda_graphs,
        copy_stream=setup.copy_stream,
        vae_tiling=setup.vae_tiling,
        cards=found.cards,
        **others,
    )


def model_source(model: str, options: ModelOptions, *, may_be_incomplete: bool = False) -> ModelSource:
    """Return where a model is and how it runs, if its files show that it can be served.

    `model` is PATH or NAME=PATH; a workflow is FILE.py:NAME, and its file is run. Nothing else here needs torch:
    `model_index.json` says what the model is. So a mistake is refused at once and once, not by each worker. One whose
    files are missing or damaged, if it `may_be_incomplete`, is left to workers, which serve the others. Raises
    UserError.
    """
    from tilework.pipelines.errors import IncompleteModel, ModelError
    from tilework.pipelines.model_index import check_model
    from tilework.pipelines.setup.quantize import check_schemes

    for field, value, known in (("offload", options.offload, OFFLOADS), ("attention", options.attention, ATTENTIONS)):
        if value not in known:
            raise UserError(f"{field} is {value!r}; choose one of {', '.join(known)}")
    if options.compiles:
        keep_compiled()
    name, path = named_model(model)
    if name and not is_model_name(name):
        raise UserError(f"{model!r} names a model {name!r}; give NAME=MODEL with a NAME of {MODEL_NAME}")
    with user_errors(ModelError):
        _check_attention(options)
        source = replace(usual_source(options), path=path, name=name, loras=options.loras, devices=options.devices)
        check_schemes(source.quantize, options.device, options.cards)
        with suppress(IncompleteModel) if may_be_incomplete else nullcontext():
            check_model(path, options.adapter, source.weights_files)
    return source


def usual_source(options: ModelOptions) -> ModelSource:
    """Return how any model runs with these options: a source without a path and without what belongs to one model.

    Raises UserError.
    """
    from tilework.pipelines.errors import ModelError
    from tilework.pipelines.setup.quantize import parse_schemes

    with user_errors(ModelError):
        schemes = () if options.quantize is None else parse_schemes(options.quantize)
    return ModelSource(
        path="",
        adapter=options.adapter,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        memory_bytes=options.memory_bytes,
        vae_tiling=options.vae_tiling,
        quantize=schemes,
        offload=options.offload,
        attention=options.attention,
        compiles=options.compiles,
        cuda_graphs=options.cuda_graphs,
        copy_stream=options.copy_stream,
        previews=options.previews,
    )


def _check_attention(options: ModelOptions) -> None:
    """Raise InvalidSource if a card, or the CPU, lacks the kernel of attention that is named."""
    if options.attention == ATTENTIONS[0]:
        return
    from tilework.pipelines.cuda.attention import check_attention, kernels_on

    places = {card.name: card.attentions for card in options.cards}
    if options.device == "cpu":
        import torch

        places = {"this CPU": kernels_on(torch.device("cpu"))}
    for place, kernels in places.items():
        check_attention(options.attention, options.dtype, place, kernels)


def checked_spec(fields: Mapping[str, object], info: ModelInfo, *, is_video: bool = False) -> Spec:
    """Check fields of a request as the server would, and return the spec that they ask for. Raises UserError."""
    from tilework.server.calls.errors import CallError
    from tilework.server.calls.parsing.image_call import image_call
    from tilework.server.calls.parsing.specs import Rules
    from tilework.server.calls.parsing.video_format import AskedVideo
    from tilework.server.config import ServerConfig
    from tilework.server.tenants import Tenant, Tenants

    rules = Rules(info=info, config=ServerConfig(), tenants=Tenants(), tenant=Tenant(), now=datetime.now(UTC))
    try:
        call = image_call(fields, rules, Random(), video=AskedVideo() if is_video else None)
    except CallError as error:
        raise UserError(error.message) from error
    for warning in call.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
    return call.specs[0]


def loaded_family(source: ModelSource) -> Family:
    """Return a model in this process. Raises UserError."""
    with console.status(f"loading {source.path}"):
        from tilework.pipelines.errors import ModelError
        from tilework.pipelines.loading import load, quiet
        from tilework.pipelines.numerics import pin_numerics

        quiet()
        pin_numerics(source.threads, source.attention)
        with user_errors(ModelError):
            return load(source)
