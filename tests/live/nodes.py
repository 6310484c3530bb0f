"""Agents in processes of their own on this machine, for an engine in the process of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tilework.cli.local_agents import LocalAgents as Agents
from tilework.cli.local_agents import local_agents

TOKEN = "known to both"


@asynccontextmanager
async def agents(port: int, count: int) -> AsyncIterator[Agents]:
    """So many agents for an executor that listens on this port."""
    with local_agents(count, port=port, token=TOKEN) as running:
        yield running
