"""What the stages hand on to one another: each value is the one before, and what a stage has added to it."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Optional

from lamplighter.node.keeper.early import Waiting
from lamplighter.node.keeper.launched import Launched, Order
from lamplighter.node.keeper.restarters import Restarter
from lamplighter.node.layout import LaunchFiles, ReleaseDirectory
from lamplighter.node.plan import Plan
from lamplighter.node.system.processes import Unit


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A server's plan, and the UUIDs of its GPUs, which this run has locked with its port."""

    plan: Plan
    uuids: tuple[str, ...]

    @property
    def spared(self) -> frozenset[int]:
        """Return the pids that are neither stopped nor in the way."""
        return frozenset()

    @property
    def spared_unit(self) -> Optional[Unit]:
        return None


@dataclasses.dataclass(frozen=True)
class Staged(Allocation):
    """What is to be started: its release lies on the node."""

    release: ReleaseDirectory


@dataclasses.dataclass(frozen=True)
class Prestarted(Staged):
    """What is to be started, with its launcher, if that waits for its turn already."""

    waiting: Optional[Waiting]

    @property
    def spared(self) -> frozenset[int]:
        return self.waiting.pids() if self.waiting is not None else frozenset()

    @property
    def spared_unit(self) -> Optional[Unit]:
        return self.waiting.unit if self.waiting is not None else None


@dataclasses.dataclass(frozen=True)
class Started(Staged):
    """A server that was launched by ``order``, and ``record``, its ``server.json``. It may have died since."""

    order: Order
    launched: Launched
    record: Mapping[str, Any]

    @property
    def launch(self) -> LaunchFiles:
        return self.launched.launch or self.order.launch


@dataclasses.dataclass
class Former:
    """What served before, as far as it was stopped. Written as it happens: a stop that fails halfway is undone, too.

    ``answered_at``: when it answered last. ``was_ours``: lamplighter had started it. ``restarters``: the units and
    containers that were stopped with it. ``may_return``: who may start a server all the same, left running or seen to
    have started one. ``successor``: what this run has launched since.
    """

    answered_at: Optional[float] = None
    was_ours: bool = False
    restarters: list[Restarter] = dataclasses.field(default_factory=list)
    may_return: list[str] = dataclasses.field(default_factory=list)
    successor: Optional[Started] = None
