"""The wheels that a machine without a network lacks, in a folder that travels with the checkout."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "bench" / "gpu" / "wheels"
"""Git ignores it. Each Python has a folder of its own in it."""
SITE = ROOT / "bench" / "gpu" / "site"
"""Where they are installed there, so that the environment of the interpreter stays as it is. Git ignores it, too."""
PYTHON = "3.12"
MOST_BYTES = 30_000_000
_NATIVE = Path("src/tilework/comm/ring/_native.abi3.so")
_NOTE = "pack.json"
_UNFINISHED = ".pack-"
_PLATFORMS = ("2_28", "2_27", "2_24", "2_17", "2_12", "2_5")

THERE = {
    "accelerate": "1.15.0",
    "huggingface-hub": "1.33.0",
    "numpy": "",
    "safetensors": "0.8.0",
    "sentencepiece": "0.2.2",
    "tokenizers": "0.23.2",
    "torch": "",
    "transformers": "5.17.0",
    "triton": "3.6.0",
    **dict.fromkeys(
        (
            *("annotated-doc", "anyio", "certifi", "charset-normalizer", "click", "cloudpickle", "contourpy"),
            *(
                "cycler",
                "filelock",
                "fonttools",
                "fsspec",
                "h11",
                "hf-xet",
                "httpcore",
                "httpx",
                "hypothesis",
                "idna",
                "iniconfig",
                "jinja2",
            ),
            *("joblib", "kiwisolver", "markdown-it-py", "markupsafe", "matplotlib", "mdurl", "mpmath", "msgpack"),
            *("narwhals", "networkx", "nvidia-ml-py", "packaging", "peft", "pillow", "pip", "pluggy"),
            *("prometheus-client", "psutil", "pygments", "pyparsing", "pytest", "pytest-timeout", "python-dateutil"),
            *("pyyaml", "regex", "requests", "rich", "scikit-learn", "scipy", "setuptools", "shellingham", "six"),
            *("sortedcontainers", "sympy", "threadpoolctl", "tqdm", "typer", "typing-extensions", "urllib3", "zipp"),
        ),
        "",
    ),
}
"""What is installed there, of that which a server or a case imports, and its version where it decides what fits."""

PACKED = (
    "annotated-types",
    "diffusers",
    "fastapi",
    "fastapi-offline",
    "ftfy",
    "greenlet",
    "importlib-metadata",
    "lazy-importer",
    "msgspec",
    "opentelemetry-api",
    "pydantic",
    "pydantic-core",
    "python-multipart",
    "setproctitle",
    "sse-starlette",
    "starlette",
    "typing-inspection",
    "uvicorn",
    "wcwidth",
)
"""What travels, with all that these need."""

LEFT_OUT = {
    "av": "35 MB; no case serves a clip",
    "bitsandbytes": "60 MB; nf4 alone needs it",
    "torchao": "every process would import it, and each of its versions is built for one of torch",
}
"""What does not, and why."""


class PackFailed(RuntimeError):
    """The wheels cannot be packed or installed; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """What a folder holds. `commit` is the revision that it was packed beside."""

    python: str
    commit: str
    native: bool
    versions: dict[str, str]
    num_bytes: int


def requirements() -> dict[str, str]:
    """What the base install and the extras serve and quantize ask for, as pyproject.toml has it, by name."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["serve"], *extras["quantize"]]
    return {name_of(line): line for line in lines}


def name_of(requirement: str) -> str:
    """The normalised name in a line such as "Typing_Extensions>=4; python_version < '3.13'"."""
    end = next((i for i, letter in enumerate(requirement) if not (letter.isalnum() or letter in "-_.")), None)
    return requirement[:end].lower().replace("_", "-").replace(".", "-")


def folder_for(python: str) -> Path:
    return FOLDER / python


def pack(python: str) -> Pack:
    """Fill the folder for a Python such as "3.12" with wheels, and with what is compiled of Tilework.

    Tilework's own wheel stays here: nearly all of its 15 MB are the shipped models, which the checkout has. Of it
    travels the extension, of which one build serves for all Pythons.

    Raises:
        PackFailed: something cannot be had, is on no list of this file, or the folder is larger than it may be or
            cannot be written; or another run uses the wheels.
    """
    if not re.fullmatch(r"3\.\d+", python):
        raise PackFailed(f"--python {python}: give a version such as {PYTHON}")
    with alone_with_wheels(), _beside_them() as temporary:
        fresh = temporary / "wheels"
        fresh.mkdir()
        versions = _resolve(temporary)
        _download(versions, python, fresh)
        native = _take_extension(temporary, fresh)
        num_bytes = _size_of(fresh)
        done = Pack(python=python, commit=_revision(), native=native, versions=versions, num_bytes=num_bytes)
        note = {name: getattr(done, name) for name in done.__slots__}
        (fresh / _NOTE).write_text(json.dumps(note, indent=2) + "\n", "utf-8")
        if num_bytes > MOST_BYTES:
            raise PackFailed(f"the wheels have {num_bytes / 1e6:.1f} MB, and {MOST_BYTES / 1e6:.0f} may travel")
        shutil.rmtree(folder := folder_for(python), ignore_errors=True)
        try:
            fresh.rename(folder)
        except OSError as error:
            raise PackFailed(f"{folder} cannot be replaced: {error.strerror}") from error
    return done


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold a file as the only process that does.

    Raises:
        PackFailed: another one holds it, or it cannot be written.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise PackFailed(f"{lock} cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PackFailed("another quarter.py is at work in this checkout: wait for its end, or end it") from None
        yield


def alone_with_wheels() -> AbstractContextManager[None]:
    """`alone`, of what changes or uses FOLDER and SITE."""
    return alone(FOLDER / ".lock")


@contextmanager
def _beside_them() -> Iterator[Path]:
    """A new folder from which wheels can be moved to their place. Those of runs that were killed are removed."""
    for left in FOLDER.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=FOLDER) as temporary:
        yield Path(temporary)


def install() -> Pack:
    """Install the wheels for this Python into SITE.

    Raises:
        PackFailed: there are none for it, some are missing or damaged, or pip cannot.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = folder_for(python)
    if not (folder / _NOTE).is_file():
        raise PackFailed(
            f"there are no wheels for Python {python} in {FOLDER}; where there is a network, run: "
            f"python bench/gpu/quarter.py pack --python {python}"
        )
    again = f"where there is a network, run again: python bench/gpu/quarter.py pack --python {python}"
    try:
        done = Pack(**json.loads((folder / _NOTE).read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise PackFailed(f"{folder / _NOTE} is damaged ({error}); {again}") from error
    wheels = sorted(folder.glob("*.whl"))
    if lacking := sorted(set(done.versions) - {name_of(path.name.partition("-")[0]) for path in wheels}):
        raise PackFailed(f"{folder} lacks the wheels of {', '.join(lacking)}; {again}")
    shutil.rmtree(SITE, ignore_errors=True)
    _pip(["install", "--no-index", "--no-deps", "--no-compile", "--target", str(SITE), *map(str, wheels)])
    if done.native:
        shutil.copyfile(folder / _NATIVE.name, ROOT / _NATIVE)
    return done


def _resolve(temporary: Path) -> dict[str, str]:
    """Versions of what is packed that fit each other and what is there; all that these need must be known here."""
    asked = requirements()
    report, fixed = temporary / "report.json", temporary / "constraints.txt"
    fixed.write_text("".join(f"{name}=={version}\n" for name, version in THERE.items() if version), "utf-8")
    wanted = [line for name, line in asked.items() if name in PACKED]
    _pip(["install", "--dry-run", "--ignore-installed", "--report", str(report), "-c", str(fixed), *wanted])
    found = {name_of(one["metadata"]["name"]): one["metadata"]["version"] for one in _installs(report)}
    if unknown := sorted(set(found) - set(PACKED) - set(THERE)):
        raise PackFailed(f"{', '.join(unknown)} would be needed there: name it in PACKED, THERE or LEFT_OUT")
    if superfluous := sorted(set(PACKED) - set(found)):
        raise PackFailed(f"nothing needs {', '.join(superfluous)}; take it out of PACKED")
    return {name: found[name] for name in PACKED}


def _installs(report: Path) -> list[dict[str, dict[str, str]]]:
    installs: list[dict[str, dict[str, str]]] = json.loads(report.read_text("utf-8"))["install"]
    return installs


def _download(versions: dict[str, str], python: str, folder: Path) -> None:
    platforms = [f"--platform=manylinux_{glibc}_x86_64" for glibc in _PLATFORMS]
    others = ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    options = ["--no-deps", "--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    wheels = [f"{name}=={version}" for name, version in versions.items()]
    _pip(["download", *options, *platforms, *others, "--dest", str(folder), *wheels])


def _take_extension(temporary: Path, folder: Path) -> bool:
    """Whether Tilework's wheel has the extension: without a compiler it has none, and works."""
    _pip(["wheel", "--no-deps", "--wheel-dir", str(temporary / "own"), str(ROOT)])
    (wheel,) = (temporary / "own").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if name.endswith(_NATIVE.name)]
        for name in found:
            (folder / _NATIVE.name).write_bytes(archive.read(name))
    return bool(found)


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _revision() -> str:
    run = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def _pip(arguments: Sequence[str], python: str = sys.executable) -> None:
    run = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    with tempfile.TemporaryDirectory(prefix="tilework-pip-") as temporary:  # pip leaves its own ones if it is killed.
        there = os.environ | {"TMPDIR": temporary}
        done = subprocess.run(run, capture_output=True, text=True, check=False, env=there)
    if done.returncode:
        raise PackFailed(f"pip {arguments[0]} failed:\n{done.stderr.strip()[-2000:]}")
