"""`tilework doctor`: checks whether this machine can serve, and names a remedy for each problem."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tilework.cli.console import missing_serve_packages, out, print_json
from tilework.cli.models import named_model
from tilework.cli.options.common import AsJson, Device, examples
from tilework.distribution import install_command, python_wanted, requirements
from tilework.pipelines.setup.host_memory import free_host_bytes
from tilework.server.http.connections.descriptors import connections_within, possible_limit

if TYPE_CHECKING:
    from tilework.pipelines.cuda.state import Card, CudaState


class Level(StrEnum):
    """Level of a finding. ERROR: a server would not start, or not serve. WARNING: it serves with less than it could."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: `what` was checked, the state `found`, and a `remedy`, empty if none is needed."""

    level: Level
    what: str
    found: str
    remedy: str = ""


EXAMPLE = examples("tilework doctor", "tilework doctor ./sdxl --device cuda --port 80 --json")
_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "red"}


def command(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="Models to serve, as for serve.")
    ] = None,
    device: Device = "auto",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    json: AsJson = False,
) -> None:
    """Check Python, packages, torch and its devices, memory, ports and models; name a remedy for each problem.

    Starts nothing. The exit status is 1 if anything is an error, and 0 with warnings.
    """
    findings = []
    for one in _findings(models or (), device, host, port):
        findings.append(one)
        if not json:
            _print(one)
    worst = Level.ERROR if any(one.level is Level.ERROR for one in findings) else Level.OK
    if json:
        checks = [{"level": one.level, "what": one.what, "found": one.found, "remedy": one.remedy} for one in findings]
        print_json({"serves": worst is Level.OK, "checks": checks})
    if worst is Level.ERROR:
        raise typer.Exit(1)


def _findings(models: Sequence[str], device: str, host: str, port: int) -> Iterator[Finding]:
    yield from library_findings()
    weights_bytes = 0
    if not missing_serve_packages():
        from tilework.pipelines.cuda.look import cuda_state
        from tilework.server.config import ServerConfig

        yield from cuda_findings(device, cuda_state())
        yield videos_finding()
        for model in models:
            finding, num_bytes = model_finding(model)
            weights_bytes += num_bytes
            yield finding
        yield open_files_finding(ServerConfig().max_connections)
    yield memory_finding(weights_bytes)
    yield shared_memory_finding()
    yield port_finding(host, port)


def _print(one: Finding) -> None:
    colour = _COLOURS[one.level]
    out.print(f"[{colour}]{one.level:<7}[/{colour}]", end=" ")
    out.print(f"{one.what}: {one.found}", markup=False, highlight=False, soft_wrap=True)
    if one.remedy:
        out.print(f"        to do: {one.remedy}", markup=False, highlight=False, soft_wrap=True)


def ok(what: str, found: str) -> Finding:
    return Finding(Level.OK, what, found)


def warning(what: str, found: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, what, found, remedy)


def error(what: str, found: str, remedy: str) -> Finding:
    return Finding(Level.ERROR, what, found, remedy)


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


_BASE = ""
_OPTIONAL = ("cluster", "gguf", "nvml", "quantize", "redis", "ucx")
"""Extras that a server can do without."""
_OF_VIDEOS = "av"
"""A server of images can do without it, too: `served.videos_finding` is about it."""
_EXTENSION = "tilework.comm.ring._native"


def library_findings() -> Iterator[Finding]:
    """Check Python, the packages of the base install and of each extra, and the C extension."""
    yield python_finding(platform.python_version(), SpecifierSet(python_wanted()))
    asked = [one for text in requirements() if (one := Requirement(text)).name != _OF_VIDEOS]
    for extra in (_BASE, "serve", *_OPTIONAL):
        if named := _of(asked, extra):
            yield packages_finding(extra, named)
    yield _extension_finding()


def python_finding(present: str, wanted: SpecifierSet) -> Finding:
    if wanted.contains(present, prereleases=True):
        return ok("Python", present)
    return error("Python", f"{present}, and {wanted} is needed", "install tilework into a newer Python")


def packages_finding(extra: str, asked: Sequence[Requirement]) -> Finding:
    """Check whether the packages of an extra are there, in the versions asked for. The base install is "".

    Of an extra that a server can do without, a part or another version is no error: it may be there for other programs.
    """
    problem = warning if extra in _OPTIONAL else error
    what = f"packages of [{extra}]" if extra else "packages"
    install = install_command(extra)
    installed = {one.name: _version(one.name) for one in asked}
    missing = [one.name for one in asked if installed[one.name] is None]
    if extra in _OPTIONAL and len(missing) == len(asked):
        return ok(what, f"not installed, and optional: {install}")
    if missing:
        return problem(what, f"{', '.join(missing)} not installed", install)
    wrong = [one for one in asked if not one.specifier.contains(installed[one.name] or "", prereleases=True)]
    if wrong:
        found = ", ".join(f"{one.name} {installed[one.name]} is not {one.specifier}" for one in wrong)
        return problem(what, found, "pip install " + " ".join(f"'{one.name}{one.specifier}'" for one in wrong))
    return ok(what, ", ".join(f"{name} {number}" for name, number in installed.items()))


def _of(asked: Iterable[Requirement], extra: str) -> list[Requirement]:
    """Return the requirements of one extra alone, or those of the base install, which belong to no extra."""
    wanted = (one for one in asked if ("extra" in str(one.marker)) == bool(extra))
    return [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": extra})]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _extension_finding() -> Finding:
    if find_spec(_EXTENSION) is not None:
        return ok("C extension", "compiled")
    return warning(
        "C extension",
        "not compiled, so that messages through shared memory take locks",
        "install a C compiler and the headers of Python, and tilework again: "
        f"{install_command()} --force-reinstall --no-deps",
    )


SHARED = Path("/dev/shm")
_LEAST_SHARED_BYTES = 1 << 30
"""Least free bytes; with less, states and weights lie among the temporary files (`runtime.state_blobs`)."""
_LEAST_FREE_BYTES = 4 * 10**9
"""Two CPU workers with a small model, and the server."""


def memory_finding(weights_bytes: int) -> Finding:
    """Check whether there is memory for the server and for weights, by the machine and the control group of a
    container.
    """
    least_bytes = _LEAST_FREE_BYTES + weights_bytes
    free_bytes = free_host_bytes()
    found = f"{gigabytes(free_bytes)} free, {os.cpu_count()} cores"
    if free_bytes >= least_bytes:
        return ok("memory", found)
    return warning(
        "memory",
        f"{found}, and about {gigabytes(least_bytes)} may be needed",
        "stop other programs, raise the limit of the container, or start fewer workers",
    )


def shared_memory_finding() -> Finding:
    what = str(SHARED)
    try:
        usage = shutil.disk_usage(SHARED)
    except OSError:
        return warning(what, "there is none; states lie among the temporary files", f"mount a tmpfs at {SHARED}")
    found = f"{gigabytes(usage.free)} of {gigabytes(usage.total)} free"
    if usage.free >= _LEAST_SHARED_BYTES:
        return ok(what, found)
    return warning(
        what,
        f"{found}, so that states and weights lie among the temporary files, which is slower",
        f"mount -o remount,size=8G {SHARED}; for a container docker run --shm-size 8g",
    )


def open_files_finding(num_connections: int) -> Finding:
    """Check whether this number of connections can be open. The server raises its limit as far as it may."""
    limit = possible_limit()
    most = connections_within(limit)
    if most >= num_connections:
        return ok("open files", f"limit {limit}")
    return warning(
        "open files",
        f"limit {limit}, enough for {most} of {num_connections} connections",
        f"ulimit -Hn {4 * num_connections} (systemd: LimitNOFILE), or set TILEWORK_MAX_CONNECTIONS to {most}",
    )


def port_finding(host: str, port: int) -> Finding:
    what = f"port {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
    except OSError as problem:
        found = f"{host}:{port} cannot be listened on: {problem.strerror}"
        return error(what, found, "stop what listens there, or serve with another --port")
    return ok(what, f"free at {host}")


def cuda_findings(device: str, state: CudaState) -> Iterator[Finding]:
    """Yield the build of torch, and the cards that it sees; `device` is that of `tilework serve --device`."""
    wanted = device == "cuda"
    if state.built_for is None:
        yield (
            error("torch", f"{state.build}, and --device is cuda", state.remedy) if wanted else ok("torch", state.build)
        )
        return
    yield ok("torch", state.build)
    if not state.cards:
        judge = error if wanted else warning
        yield judge("devices", f"torch sees none ({state.problem}); the driver: {state.driver}", state.remedy)
        return
    yield ok("driver", state.driver)
    if not state.has_nvml:
        yield warning(
            "NVML",
            "does not answer, so that no worker can be forked, and each takes seconds to start",
            "give the container libnvidia-ml.so (NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
        )
    yield _compiler_finding()
    yield from (_card_finding(index, card) for index, card in enumerate(state.cards))


def _compiler_finding() -> Finding:
    """Check whether Triton finds a C compiler for its start and its kernels; looks for one as Triton does."""
    what = "C compiler"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if compiler and headers.is_file():
        return ok(what, compiler)
    missing = "there is none" if not compiler else f"{headers} is missing"
    lost = "Triton compiles nothing for cards: batches of several sizes take longer, and --compile fails"
    return warning(what, f"{missing}, so that {lost}", "install gcc and the headers of Python (gcc, python3-dev)")


def _card_finding(index: int, card: Card) -> Finding:
    what = f"device {index}"
    if card.problem:
        remedy = "end what uses it (nvidia-smi), install a build of torch for it, or leave it out: CUDA_VISIBLE_DEVICES"
        return error(what, f"{card.name}: {card.problem}", remedy)
    found = f"{card.name}, {gigabytes(card.free_bytes)} of {gigabytes(card.total_bytes)} free"
    if card.free_bytes < card.total_bytes / 2:
        return warning(what, found, "end other programs that use it (nvidia-smi shows them)")
    return ok(what, found)


def model_finding(model: str) -> tuple[Finding, int]:
    """Check whether the files of a model show that it can be served; return also its bytes of weights here.

    `model` is that of `tilework serve`. Loads no weights. The file of a workflow is run, as a server does.
    """
    from tilework.pipelines.errors import ModelError
    from tilework.pipelines.model_index import check_model

    _, path = named_model(model)
    try:
        check_model(path)
    except ModelError as problem:
        return error(f"model {model}", str(problem), "see docs/models.md, or `tilework classes`"), 0
    num_bytes = _weights_bytes(path)
    return ok(f"model {model}", f"{gigabytes(num_bytes)} of weights" if num_bytes else "can be served"), num_bytes


def _weights_bytes(path: str) -> int:
    from tilework.pipelines.model_index import model_directory
    from tilework.pipelines.workflow.source import is_workflow

    directory: Path | None = None if is_workflow(path) else model_directory(path)
    return 0 if directory is None else sum(file.stat().st_size for file in directory.glob("*/*.safetensors"))


def videos_finding() -> Finding:
    """Check whether PyAV has the encoders for video files."""
    try:
        import av

        from tilework.pipelines.video.mp4 import missing_encoders
    except ImportError as problem:
        return warning("videos", f"PyAV cannot be imported: {problem}; images need none", install_command("serve"))
    missing = missing_encoders()
    if missing:
        found = f"PyAV {av.__version__} lacks {', '.join(missing)}"
        return error("videos", found, "pip install --force-reinstall av, whose wheels bring them")
    return ok("videos", f"PyAV {av.__version__} encodes H.264, VP9 and AAC")
