"""Loads the family of a `ModelSource`: finds the model, checks it, and loads it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline

from tilework.core.model import ATTENTIONS, DEVICES, DTYPES, ModelSource, is_weights_file
from tilework.entry_points import NotThere, load_named
from tilework.pipelines.caching.forest import read_forest
from tilework.pipelines.component_files import has_variant, quantized_by
from tilework.pipelines.components import is_denoiser_class, modules_of, weights_of
from tilework.pipelines.cuda.attention import check_attention, kernels_on
from tilework.pipelines.cuda.graphs import CudaRecorder, record_steps
from tilework.pipelines.cuda.look import look
from tilework.pipelines.cuda.state import Card
from tilework.pipelines.defaults import asks_for_tiles, read_overrides
from tilework.pipelines.errors import InvalidSource, ModelError, ModelNotFound, UnsupportedModel
from tilework.pipelines.family import Family
from tilework.pipelines.model_index import STOCK, ModelIndex, read_model_index
from tilework.pipelines.modular.loading import load_modular
from tilework.pipelines.setup.compiled import compile_blocks
from tilework.pipelines.setup.gguf_files import load_gguf
from tilework.pipelines.setup.offload import offload_layers
from tilework.pipelines.setup.quantize import SCHEMES, check_schemes, schemes_of
from tilework.pipelines.staged import StagedPipeline
from tilework.pipelines.stock.shared_calls import perturbs_attention
from tilework.pipelines.workflow.loading import load_workflow, load_workflow_component
from tilework.pipelines.workflow.source import is_workflow

_NEEDED = ("scheduler", "text_encoder", "tokenizer", "transformer", "unet", "vae")
_WRONG_WEIGHT = "{place}: its files hold no {name} of the shape that its config.json asks for; fetch the model again"


Place = Callable[[torch.nn.Module], object]
"""Puts the weights of a component elsewhere, without changing them; they may lie in a mapped file of the host."""


def load(source: ModelSource, place: Place | None = None) -> Family:
    """Load a model onto its device, ready to draw.

    `place` gets each component when it has been read, before anything of the model goes to the device: weights that it
    leaves without memory take none there. Without `place`, weights on a CPU lie in their own aligned memory.

    `source.path` is "shapes" or "shapes-motion" (the models that come with Tilework), a diffusers directory, or a hub
    id; with the index of a modular pipeline alone it is loaded as that. A directory is read without any network; a
    directory called shapes is reached as ./shapes. `tilework.json` is read from directories only. No code of a model is
    run. FILE.py:NAME is a workflow, whose file is run.

    Raises:
        ModelError: one of its subclasses, each for one thing that can be wrong.
    """
    if is_workflow(source.path):
        return load_workflow(source, place, lambda one: load(one, place))
    return family_of(source, load_stock(source, place))


def family_of(source: ModelSource, pipeline: Any) -> Family:
    """Return the family of a model around its stock pipeline, as `load_stock` returns it.

    Raises:
        ModelError: as `load`.
    """
    index = _index(source)
    named = _named(index.adapter)
    adapter = _named(STOCK) if _is_pipeline(named) else named
    overrides = {} if index.directory is None else read_overrides(index.directory)
    if source.name:
        overrides = {**overrides, "name": source.name}
    if not source.previews:
        overrides = {**overrides, "previews": False}
    name = source.path if index.directory is None else index.directory.resolve().name
    with _explained(index.path):
        family: Family = adapter(pipeline, name, overrides, library_versions())
    if isinstance(family, StagedPipeline) and index.directory is not None:
        family.cache_forest = read_forest(index.directory, family.device)
    if source.device == "cuda" and source.cuda_graphs and not perturbs_attention(pipeline):
        record_steps(family, CudaRecorder())
    return family


def load_stock(source: ModelSource, place: Place | None = None) -> Any:
    """Return the diffusers pipeline of a model on its device, with the very weights that `load` draws with.

    Raises:
        ModelError: as `load`.
    """
    dtype = _dtype(source)
    device = device_of(source)
    check_schemes(source.quantize, source.device, _cards(device) if source.quantize else ())
    if source.attention != ATTENTIONS[0]:
        check_attention(source.attention, source.dtype, f"the device {device}", kernels_on(device))
    index = _index(source)
    _named(index.adapter)  # Reports a wrong adapter before anything is read.
    schemes = _schemes(index, source)
    place = place or (_copy_weights if device.type == "cpu" else None)
    pipeline = _stock(index, dtype, torch.device("cpu") if source.offload == "layers" else device, schemes, place)
    if source.offload == "layers":
        offload_layers(pipeline, device)
    if source.compiles:
        compile_blocks(pipeline)
    if source.vae_tiling or (index.directory is not None and asks_for_tiles(read_overrides(index.directory))):
        _enable_tiling(pipeline, index.path)
    return pipeline


def quiet() -> None:
    """Turn off the progress bars and advice of diffusers, transformers and PEFT."""
    warnings.filterwarnings("ignore", module=r"peft\.")
    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()


@contextmanager
def quietly() -> Iterator[None]:
    """Do as `quiet`, while the block runs."""
    libraries = (diffusers.utils.logging, transformers.utils.logging)
    before = [(logging.get_verbosity(), logging.is_progress_bar_enabled()) for logging in libraries]
    with warnings.catch_warnings():
        quiet()
        try:
            yield
        finally:
            for logging, (verbosity, has_bars) in zip(libraries, before, strict=True):
                logging.set_verbosity(verbosity)
                if has_bars:
                    logging.enable_progress_bar()


def library_versions() -> str:
    """Return the versions of the libraries that compute the pixels."""
    return f"torch {torch.__version__}, diffusers {diffusers.__version__}, transformers {transformers.__version__}"


def _index(source: ModelSource) -> ModelIndex:
    return read_model_index(source.path, source.adapter, source.weights_files)


def _named(name: str) -> Any:
    """Return the class that an adapter names: a family, or a pipeline, which the family of any pipeline then serves."""
    try:
        return load_named(name)
    except NotThere as error:
        raise InvalidSource(f"adapter is {name!r}: {error}") from error


def _is_pipeline(named: Any) -> bool:
    return isinstance(named, type) and issubclass(named, DiffusionPipeline)


def _dtype(source: ModelSource) -> torch.dtype:
    if source.dtype not in DTYPES:
        raise InvalidSource(f"dtype is {source.dtype!r}; choose one of {', '.join(DTYPES)}")
    return cast(torch.dtype, getattr(torch, source.dtype))


def device_of(source: ModelSource) -> torch.device:
    """Return the device of a model in this process.

    Raises:
        InvalidSource: there is no such device here.
    """
    if source.device not in DEVICES:
        raise InvalidSource(f"device is {source.device!r}; choose one of {', '.join(DEVICES)}")
    if source.device != "cuda":
        return torch.device(source.device)
    if reason := (state := look(all_cards=False)).reason_against:
        raise InvalidSource(f"device is {source.device!r}, and {reason}; {state.remedy}")
    # The index is included: hooks of offloaded layers keep this device, and without an index some of torch's calls
    # fail, and others mean another card on another thread.
    return torch.device("cuda", torch.cuda.current_device())


def _cards(device: torch.device) -> Sequence[Card]:
    """Return the card that this process uses, if it uses one."""
    return look(all_cards=False).cards if device.type == "cuda" else ()


def _schemes(index: ModelIndex, source: ModelSource) -> dict[str, str]:
    """Return the scheme of each component that is quantised, by its name."""
    if source.quantize and (index.is_modular or index.directory is None):
        kind = "a modular pipeline" if index.is_modular else "a hub id"
        raise UnsupportedModel(
            f"{index.path} is {kind}, of which nothing can be quantised; give a classic one's directory"
        )
    kinds = {name: _kind_of(index, name) for name in index.components}
    components = [name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, torch.nn.Module)]
    denoisers = [name for name in components if is_denoiser_class(kinds[name])]
    schemes = schemes_of(source.quantize, denoisers, components)
    for name, scheme in schemes.items():
        if not is_weights_file(scheme) and (method := quantized_by(Path(f"{index.directory}/{name}"))):
            raise UnsupportedModel(f"quantize is {scheme!r}, and {name} is quantised already ({method}); leave it out")
    return schemes


def _stock(
    index: ModelIndex,
    dtype: torch.dtype,
    device: torch.device,
    schemes: Mapping[str, str],
    place: Place | None = None,
) -> Any:
    """Load the pipeline with its weights on the device. Without `place`, CPU weights may be mapped from their files.

    An accelerator has its own copy anyway. So a worker that has one writes no weights to the host's memory.
    """
    with _explained(index.path):
        models: dict[str, torch.nn.Module] = {}
        for name, module in _read_singly(index, dtype, schemes):
            models[name] = _placed(f"{index.path}/{name}", module, place)
        pipeline = load_modular(index, dtype, models) if index.is_modular else _load_classic(index, dtype, models)
        for name in _NEEDED:
            if name in pipeline.components and pipeline.components[name] is None and not _has_other(pipeline, name):
                raise ModelNotFound(f"{index.path}: {index.file} names no {name}, without which nothing can be drawn")
        for name, module in modules_of(pipeline).items():
            if name not in models:
                _placed(f"{index.path}/{name}", module, place)
        pipeline.to(device)
    return pipeline


def _placed(name: str, module: torch.nn.Module, place: Place | None) -> torch.nn.Module:
    """Return a component as it will be used, in its place, or ready to go to its device.

    Raises:
        ModelNotFound: a weight was in no file.
    """
    _require_weights(name, module)
    module.eval()
    if place is not None:
        place(module)
    return module


def _enable_tiling(pipeline: Any, path: str) -> None:
    vae: Any = getattr(pipeline, "vae", None)
    if not hasattr(vae, "use_tiling"):
        kind = "it has none" if vae is None else f"{type(vae).__name__} cannot"
        raise UnsupportedModel(f"{path}: its autoencoder is to decode in tiles (vae_tiling), but {kind}; leave it out")
    vae.enable_tiling()


def _has_other(pipeline: Any, name: str) -> bool:
    """Return whether another component replaces an optional one: the refiner of SDXL has its second text encoder."""
    optional = getattr(pipeline, "_optional_components", ())
    return name in optional and pipeline.components.get(f"{name}_2") is not None


def _load_classic(index: ModelIndex, dtype: torch.dtype, loaded: Mapping[str, Any]) -> Any:
    """Load the stock pipeline with some components already `loaded`. Those that the index leaves empty must be None."""
    kind = _named(index.adapter)
    if not _is_pipeline(kind) or kind is DiffusionPipeline:
        kind = _pipeline_class(index)
    absent = {name: None for name, value in index.components.items() if value == [None, None]}
    return kind.from_pretrained(
        index.path if index.directory is None else str(index.directory),
        local_files_only=index.directory is not None,
        use_safetensors=True,
        variant=index.variant,
        dtype=dtype,
        **absent,
        **loaded,
    )


def _pipeline_class(index: ModelIndex) -> Any:
    """Return the class that the index names.

    `DiffusionPipeline.from_pretrained` would read again components that the class calls optional, such as the
    transformer of Wan, and ignore the given ones.
    """
    name = index.components["_class_name"]
    if not hasattr(diffusers, name):
        raise UnsupportedModel(
            f"{index.path}: {index.file} names the pipeline class {name!r}, which diffusers {diffusers.__version__} "
            "lacks; install a version that has it, or name the class itself as the adapter, MODULE:CLASS"
        )
    return getattr(diffusers, name)


def load_component(source: ModelSource, name: str) -> torch.nn.Module:
    """Load one component of a model, by its name, on the CPU: the very weights that `load` draws with.

    Raises:
        ModelError: as `load`.
    """
    if is_workflow(source.path):
        return load_workflow_component(source, name, load_component)
    index = _index(source)
    dtype = _dtype(source)
    with _explained(index.path):
        kind = _kind_of(index, name)
        if index.directory is None or index.is_modular or kind is None:  # Only the whole pipeline knows the file.
            return modules_of(_stock(index, dtype, torch.device("cpu"), {}))[name]
        return _read_one(index, name, dtype, _schemes(index, source).get(name))


def _kind_of(index: ModelIndex, name: str) -> Any:
    """Return the class of a component, of diffusers or transformers; None if it is of neither."""
    match index.components.get(name):
        case ["diffusers", str(kind)]:
            return getattr(diffusers, kind, None)
        case ["transformers", str(kind)]:
            return getattr(transformers, kind, None)
    return None


def _read_singly(
    index: ModelIndex, dtype: torch.dtype, schemes: Mapping[str, str]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Read those components of a directory that are read one after another, by name: the models of transformers, and
    quantised ones, because some libraries put each of these on the device while they read it.

    Raises:
        ModelNotFound: a weight of a model of transformers is in no file, or of another shape. Loaded with the pipeline,
            it would be drawn at random, and nothing would say so.
    """
    for name in index.components if index.directory is not None else ():
        kind = _kind_of(index, name)
        is_of_transformers = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        if is_of_transformers or name in schemes:
            yield name, _read_one(index, name, dtype, schemes.get(name))


def _read_one(index: ModelIndex, name: str, dtype: torch.dtype, scheme: str | None) -> torch.nn.Module:
    """Read a component of a directory, whose class is one of diffusers or transformers, onto the CPU unless its library
    quantises elsewhere.

    Raises:
        ModelNotFound: a weight is in no file, or of another shape.
    """
    kind = _kind_of(index, name)
    folder = f"{index.directory}/{name}"
    if scheme is not None and is_weights_file(scheme):
        return cast(torch.nn.Module, load_gguf(kind, scheme, str(index.directory), name, dtype))
    if issubclass(kind, transformers.PreTrainedModel):
        return cast(torch.nn.Module, _transformers_model(index, name, kind, dtype, scheme))
    module: torch.nn.Module = kind.from_pretrained(
        folder,
        local_files_only=True,
        use_safetensors=True,
        variant=index.variant if has_variant(Path(folder), index.variant) else None,
        torch_dtype=dtype,
        **({} if scheme is None else {"quantization_config": SCHEMES[scheme].config(diffusers)}),
    )
    return module


def _transformers_model(index: ModelIndex, name: str, kind: Any, dtype: torch.dtype, scheme: str | None) -> Any:
    folder = f"{index.directory}/{name}"
    model, report = kind.from_pretrained(
        folder,
        local_files_only=True,
        use_safetensors=True,
        variant=index.variant if has_variant(Path(folder), index.variant) else None,
        dtype=dtype,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **({} if scheme is None else {"quantization_config": SCHEMES[scheme].config(transformers)}),
    )
    wrong = [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]
    if wrong:
        raise ModelNotFound(_WRONG_WEIGHT.format(place=folder, name=min(wrong)))
    return model


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turn what libraries raise while they load a model into a ModelError that names it."""
    try:
        yield
    except ModelError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise UnsupportedModel(
            f"{path}: does not fit into memory; choose a dtype of 16 bits, or a larger device"
        ) from error
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]  # Advice to programmers follows.
        raise ModelNotFound(f"{path}: cannot be loaded; check that the model is complete ({reason})") from error
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise UnsupportedModel(f"{path}: cannot be loaded; its files do not fit its classes ({cause})") from error


def _require_weights(place: str, module: torch.nn.Module) -> None:
    """Raise ModelNotFound if a weight was in no file: it has no values then, and lies on the device "meta"."""
    missing = next((name for name, tensor in module.state_dict().items() if tensor.is_meta), None)
    if missing is not None:
        raise ModelNotFound(_WRONG_WEIGHT.format(place=place, name=missing))


@torch.no_grad()
def _copy_weights(module: torch.nn.Module) -> None:
    """Copy every weight into its own memory.

    Safetensors are mapped from the file, where weights lie unaligned; kernels then round differently, by 6e-7. The
    weights are not marked as frozen: convolutions in float16 on CPUs then round differently from stock, by 8e-3.
    """
    for tensor in weights_of(module):
        tensor.data = tensor.data.clone()
