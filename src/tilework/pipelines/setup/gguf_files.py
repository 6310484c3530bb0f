"""Files of weights that are quantised already: GGUF, one component in each, as ComfyUI and others have them.

diffusers reads them for its own models. Weights stay as they are in the file, and a linear layer computes with the
values that they stand for. Imports no torch, so that a server can refuse a file before it starts workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilework.distribution import install_command
from tilework.pipelines.component_files import check_is_pulled
from tilework.pipelines.errors import InvalidSource, ModelNotFound, UnsupportedModel

_PLAIN = ("F32", "F16")
"""Types of tensors that are loaded as numbers of the model's own type; others stay as they are."""
_META = "meta"


@dataclass(frozen=True, slots=True)
class Header:
    """Contents of a file according to its header: the name of the `architecture`, and counts of weights and bytes.

    `num_plain` weights are not quantised; the others take `quantized_bytes`.
    """

    architecture: str
    num_plain: int
    num_quantized: int
    quantized_bytes: int

    @property
    def num_weights(self) -> int:
        return self.num_plain + self.num_quantized

    def num_bytes(self, plain_bytes: int) -> int:
        """Return the bytes of the loaded weights, with `plain_bytes` for each that is not quantised."""
        return self.num_plain * plain_bytes + self.quantized_bytes


def read_header(path: str) -> Header:
    """Return the header of a file, without its weights.

    Raises:
        InvalidSource: the package gguf, which reads it, is not installed.
        ModelNotFound: there is no such file, or it is not of this format, or not whole.
    """
    try:
        status = Path(path).stat()
    except OSError as error:
        raise ModelNotFound(f"quantize names {path}, which cannot be read ({error.strerror}); give its path") from error
    return _read_header(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)
def _read_header(path: str, _size: int, _mtime_ns: int) -> Header:
    """Read the header once: plans ask for it many times, and reading it takes a part of a second."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise InvalidSource(
            f"quantize names {path}, and gguf is not installed; run: {install_command('gguf')}"
        ) from None
    check_is_pulled(Path(path))
    try:
        reader = GGUFReader(path)
        field = reader.get_field("general.architecture")
        architecture = "unnamed" if field is None else str(field.contents())
    except (OSError, ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ModelNotFound(f"{path}: is no GGUF file, or not whole ({error}); fetch it again") from error
    plain = [one for one in reader.tensors if one.tensor_type.name in _PLAIN]
    others = [one for one in reader.tensors if one.tensor_type.name not in _PLAIN]
    return Header(
        architecture=architecture,
        num_plain=sum(int(one.n_elements) for one in plain),
        num_quantized=sum(int(one.n_elements) for one in others),
        quantized_bytes=sum(int(one.n_bytes) for one in others),
    )


def load_gguf(kind: Any, path: str, directory: str, name: str, dtype: Any) -> Any:
    """Load the component `name` of a diffusers directory, of this class, with the weights of a file, on the CPU.

    It computes in the type `dtype`.

    Raises:
        ModelNotFound: as `read_header`.
        UnsupportedModel: diffusers cannot read such files for this class, or the weights are those of another model.
    """
    import diffusers

    header = read_header(path)
    if not hasattr(kind, "from_single_file"):
        raise UnsupportedModel(
            f"quantize names {path} for {name}, and diffusers reads no such files for {kind.__name__}; take a scheme"
        )
    what = f"{path}: holds {header.num_weights} weights of the architecture {header.architecture!r}"
    wrong = f"{what}, which are not those of {name} ({kind.__name__}) in {directory}"
    try:
        module = kind.from_single_file(
            path,
            config=directory,
            subfolder=name,
            local_files_only=True,
            torch_dtype=dtype,
            quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=dtype),
        )
    except Exception as error:  # Converters of names fail in many ways on names of another model.
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UnsupportedModel(f"{wrong} ({cause}); give a file of that model") from error
    missing = next((key for key, weight in module.state_dict().items() if weight.device.type == _META), None)
    if missing is not None:
        raise UnsupportedModel(f"{wrong} (it has no {missing}); give a file of that model")
    return module
