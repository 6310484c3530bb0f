"""Memory, shared memory, files, ports, and the cards that torch sees."""

from __future__ import annotations

import os
import shutil
import socket
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tilework.cli.doctor.finding import Finding, error, gigabytes, ok, warning
from tilework.pipelines.setup.host_memory import free_host_bytes
from tilework.server.http.connections.descriptors import connections_within, possible_limit

if TYPE_CHECKING:
    from tilework.pipelines.cuda.state import Card, CudaState

SHARED = Path("/dev/shm")
_LEAST_SHARED_BYTES = 1 << 30
"""With less free, states and weights lie among the temporary files (`runtime.state_blobs`)."""
_LEAST_FREE_BYTES = 4 * 10**9
"""Two CPU workers with a small model, and the server."""


def memory_finding(weights_bytes: int) -> Finding:
    """Whether there is memory for the server and for weights, by the machine and the control group of a container."""
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
    """Whether this number of connections can be open. The server raises its limit as far as it may."""
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
    """The build of torch, and the cards that it sees; `device` is that of `tilework serve --device`."""
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
    """Whether Triton finds what it compiles its own start and kernels with, as it looks for it."""
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
