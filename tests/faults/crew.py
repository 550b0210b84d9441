"""Plays cells of the fault matrix on several nodes at once, one thread a node; each cell has a result of its own.

Of all nodes only so many are at work as keep the processors busy; a cell that only lets time pass gives up its place
and keeps its node. A node ends when the thread that booted it does (tests/nodes/park.py), so a thread boots its node
itself and stays until nothing is left to play.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

from tests.faults.ground import Ground
from tests.nodes.park import NodePark, NodeTrouble

#: A cell yields the seconds that it lets pass.
Cell = Callable[[Ground], Generator[float, None, str]]
KINDS = ("plain", "systemd")
#: A cell at work waits for about half of its time.
PLACES = min(8, 2 * len(os.sched_getaffinity(0)))
#: Enough that a place is not left empty while a cell lets time pass.
NODES_OF_A_KIND = PLACES * 3 // 4


class Crew:
    """The players and what they still have to play; at the end of the block their nodes are gone."""

    def __init__(self, park: NodePark, directory: Path, *, without_systemd: bool) -> None:
        self.park = park
        self.directory = directory
        self._todo: dict[str, SimpleQueue[tuple[Cell, Future[str]] | None]] = {kind: SimpleQueue() for kind in KINDS}
        self._kinds = KINDS[:1] if without_systemd else KINDS
        self._players = [
            threading.Thread(target=self._player, args=(kind, f"faults-{kind[:4]}{number}"))
            for kind in self._kinds
            for number in range(NODES_OF_A_KIND)
        ]
        self._places = threading.Semaphore(PLACES)
        self._is_over = False
        self._at_work: set[str] = set()

    def __enter__(self) -> Crew:
        for player in self._players:
            player.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._is_over = True
        for name in list(self._at_work):  # the session was interrupted: what runs there shall not keep it waiting
            if name in self.park.nodes:
                self.park.nodes[name].power_off()
        for kind_of_node in self._kinds:
            for _ in range(NODES_OF_A_KIND):
                self._todo[kind_of_node].put(None)
        for player in self._players:
            player.join()

    def play(self, kind: str, cell: Cell) -> Future[str]:
        """Have ``cell`` played on a node of that kind, after all that were asked for before."""
        result: Future[str] = Future()
        self._todo[kind].put((cell, result))
        return result

    def _player(self, kind: str, name: str) -> None:
        ground: Ground | None = None
        number = 0
        while (work := self._todo[kind].get()) is not None:
            cell, result = work
            if self._is_over:
                result.cancel()
                continue
            self._at_work.add(name)
            self._places.acquire()
            try:
                if ground is None:
                    number += 1
                    directory = self.directory / f"{name}-{number}"
                    ground = Ground.make(self.park, name, directory, systemd=kind == "systemd")
                result.set_result(self._play_to_the_end(cell(ground)))
            except BaseException as error:
                result.set_exception(error)
                ground = None  # the next cell does not inherit the ruins
                with contextlib.suppress(KeyError, NodeTrouble):  # it did not boot, or all is being torn down
                    self.park.forget(name)
            finally:
                self._places.release()
                self._at_work.discard(name)
        if ground is not None:
            self.park.forget(name)

    def _play_to_the_end(self, cell: Generator[float, None, str]) -> str:
        while True:
            try:
                seconds = next(cell)
            except StopIteration as end:
                return str(end.value)
            self._places.release()
            try:
                time.sleep(seconds)
            finally:
                self._places.acquire()
