"""The settings that a running server reads again at SIGHUP: its keys and tenants, and with its command the log.

A request keeps the tenants with which it came. So open calls end as they were accepted, with their weights, also those
of a tenant that has gone. Limits hold from the next request on, and count open calls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tilework.server.config import RELOADED, ConfigError, ServerConfig
from tilework.server.models_file import ModelEntry, read_models
from tilework.server.tenants import CurrentTenants, Tenants, load_tenants

logger = logging.getLogger("tilework.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reread:
    """The settings as files and environment have them by now.

    `differ` names settings of the command that have changed since the start; `apply` puts those into effect that can
    change.
    """

    config: ServerConfig
    differ: tuple[str, ...] = ()
    apply: Callable[[], None] = lambda: None


@dataclass(slots=True, kw_only=True, eq=False)
class Reloading:
    """Replaces settings by those that were read again. A mistake in any file leaves everything as it was.

    The server was started with `config` and these `models` of the file of models. `reread` opens the log anew in any
    case, and raises ConfigError.
    """

    config: ServerConfig
    models: Mapping[str, ModelEntry]
    tenants: CurrentTenants
    reread: Callable[[], Reread]

    async def run(self, wanted: asyncio.Event) -> None:
        """Reload whenever this event is set."""
        while True:
            await wanted.wait()
            wanted.clear()
            self.reload()

    def reload(self) -> None:
        """Read the settings again, and put them into effect. Blocks while files are read."""
        try:
            now = self.reread()
            tenants = load_tenants(now.config)
            differ = (*now.differ, *self._differences(now.config))
            self._check_closed(tenants)
        except ConfigError as error:
            logger.error("settings were read again, and none has changed: %s", error)
            return
        before, self.tenants.value = self.tenants.value, tenants
        now.apply()
        logger.warning("settings were read again: %s", _told(before, tenants, differ))

    def _differences(self, config: ServerConfig) -> tuple[str, ...]:
        """Return the settings that differ from the start, and stay so until the next one. Raises ConfigError."""
        names = [name for name in ServerConfig.model_fields if name not in RELOADED]
        found = [name for name in names if getattr(config, name) != getattr(self.config, name)]
        if "models" not in found and read_models(config.models) != self.models:
            found.append(f"what is in {config.models}")
        return tuple(found)

    def _check_closed(self, tenants: Tenants) -> None:
        """Raise ConfigError if a server that asks for keys would be open to all: a file may have been cut short."""
        if self.tenants.value.has_keys and not tenants.has_keys:
            where = "api_key" if self.config.tenants is None else f"api_key or in {self.config.tenants}"
            raise ConfigError(
                f"no key is left, so any client could call; give one in {where}, or start the server again."
            )


def _told(before: Tenants, now: Tenants, differ: tuple[str, ...]) -> str:
    num_keys = sum(len(tenant.keys) for tenant in now.members)
    gone = [tenant.name for tenant in before.members if now.named(tenant.name) is None]
    parts = [f"tenants: {len(now.members)}, their keys: {num_keys}"]
    parts += [f"gone: {', '.join(gone)}"] if gone else []
    parts += [f"not before the next start: {', '.join(differ)}"] if differ else []
    return "; ".join(parts)


@dataclass(slots=True)
class Terminal:
    """Tells a SIGHUP that was sent from one of a closed terminal, which ends what runs there.

    A process that ignores SIGHUP from its start (`nohup`) goes on without its terminal.
    """

    _ends_us: bool = field(default_factory=lambda: _has_terminal() and _heeds_hangup(), init=False)

    @property
    def has_closed(self) -> bool:
        return self._ends_us and not _has_terminal()


def _heeds_hangup() -> bool:
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
