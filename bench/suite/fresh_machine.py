"""A bare Debian in a folder, and what a new user types there.

Each program runs in namespaces of its own (`unshare`): its mounts, and processes that it leaves behind, end with it,
also when it is stopped. So nothing is mounted in the folder when it is removed.
"""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

PACKAGES = ("python3", "python3-venv", "git", "make")
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
_CHECKOUT = "root/tilework"
_CERTIFICATES = "etc/pip-certificates.pem"
_NETWORK = ("etc/hosts", "etc/resolv.conf")
_INDEX_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout", "retries")
_STOP_S = 60.0
_ALONE = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-ec")
_INTERRUPTIBLE = "trap 'exit 143' TERM; "  # The first process of a namespace ignores signals that it has no trap for.
_INSTALL = _INTERRUPTIBLE + '"$@" & wait $!'
_TYPE = (
    _INTERRUPTIBLE + 'root="$1"; shift; for name in proc sys dev; do mount --rbind "/$name" "$root/$name"; done; '
    'mount -t tmpfs tmpfs "$root/dev/shm"; chroot "$root" env -i "$@" & wait $!'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`what` as a person would say it; `words` is what runs."""

    what: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A Debian of `suite` in `root`, an absent folder, with a clone of `checkout`. `make` has settings for make."""

    suite: str
    root: Path
    checkout: Path
    mirror: str
    make: tuple[str, ...] = ()

    def setup(self, has_debootstrap: bool) -> Iterator[Step]:
        """Until the machine is there."""
        if not has_debootstrap:
            install = ("apt-get", "install", "--yes", "--no-install-recommends", "debootstrap")
            yield Step(what="apt-get install debootstrap", words=install)
        bootstrap = ("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", self.suite, str(self.root))
        yield Step(what=f"debootstrap {self.suite}", words=(*_ALONE, _INSTALL, "sh", *bootstrap, self.mirror))
        # `root` may run this in a checkout of another user, which git refuses to read otherwise.
        clone = ("git", "-c", "safe.directory=*", "clone", "--quiet", "--no-hardlinks", str(self.checkout))
        yield Step(what="git clone", words=(*clone, str(self.root / _CHECKOUT)))

    def types(self, target: str) -> Step:
        """`make` of this target, as a new user types it."""
        variables = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
        words = (*variables, "make", "--no-print-directory", "-C", f"/{_CHECKOUT}", target, *self.make)
        what = " ".join(["make", target, *self.make])
        return Step(what=what, words=(*_ALONE, _TYPE, "sh", str(self.root), *words))

    def connect(self, pip: Mapping[str, str]) -> None:
        """Let the machine reach the network as this one does: names of hosts, and where pip finds packages."""
        for name in _NETWORK:
            (self.root / name).unlink(missing_ok=True)
            shutil.copyfile(Path("/") / name, self.root / name)
        settings = {name: pip[name] for name in _INDEX_SETTINGS if name in pip}
        if "cert" in pip:
            shutil.copyfile(pip["cert"], self.root / _CERTIFICATES)
            settings["cert"] = f"/{_CERTIFICATES}"
        lines = [f"{name} = {value}" for name, value in settings.items()]
        (self.root / "etc/pip.conf").write_text("\n".join(["[global]", *lines, ""]), "utf-8")


def index_settings(listed: str) -> dict[str, str]:
    """Settings of pip by name, of what `pip config list` prints. Variables go before files, as in pip.

    Folders of this machine are left out: the new one does not have them.
    """
    found: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.removeprefix(":env:").rpartition(".")
        if section not in ("", "global"):
            continue
        words = str(ast.literal_eval(value)).split()
        kept = [word for word in words if name == "cert" or not word.startswith(("/", "file:"))]
        if kept and (key.startswith(":env:") or name not in found):
            found[name] = " ".join(kept)
    return found


def run(step: Step, log: Path) -> int:
    """The exit status of a step, whose output goes to the end of `log`; stopped if this process is interrupted."""
    with log.open("ab") as output:
        output.write(f"\n===== {step.what} =====\n".encode())
        output.flush()
        with _uninterrupted() as interruptible:
            process = subprocess.Popen(
                step.words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=interruptible,  # noqa: PLW1509 This program has no threads.
            )
            try:
                interruptible()
                return process.wait()
            finally:
                _stop(process)


@contextmanager
def _uninterrupted() -> Iterator[Callable[[], object]]:
    """Hold back what ends this process, until the function that this gives is called: no process is started unseen."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    interruptible = partial(signal.pthread_sigmask, signal.SIG_SETMASK, before)
    try:
        yield interruptible
    finally:
        interruptible()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """With all that it started. The one that waits for the namespace ends last, so it is not killed first."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)


def pip_config() -> str:
    """What `pip config list` prints here."""
    words = [sys.executable, "-m", "pip", "config", "list"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout
