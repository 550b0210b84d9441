"""A server that is stopped or killed at a random moment of its start leaves no process and no GPU memory.

facts: a launcher killed three seconds after its workers were started left orphans: nvidia-smi read 0, and 13.5 seconds
later one of them took 130 GB. The server of the lab does the same.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import control
from lamplighter.node.keeper import ownership
from lamplighter.node.system import ports, processes
from tests.lab.bench import Bench, furnish
from tests.node.living import kill, until

SEED = 20261129
MOMENTS = 10
BOXES = 5 if os.environ.get("LAMPLIGHTER_SOAK") else 2


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    yield from furnish(tmp_path, monkeypatch)


@pytest.mark.timeout(900)  # eleven starts, each as long as this machine's load makes it
@pytest.mark.parametrize("box", range(BOXES))
def test_stopped_or_killed_at_random_moments_of_its_start(bench: Bench, box: int) -> None:
    chance = random.Random(SEED + box)
    began = time.monotonic()
    whole = bench.start()
    assert until(lambda: bool(ports.listeners(bench.port)), 120)
    seconds = time.monotonic() - began
    bench.end()
    assert bench.remains(whole) == []
    launches = []
    for number in range(MOMENTS):
        launched = bench.start()
        launches.append(launched)
        time.sleep(chance.uniform(0, seconds))
        if number % 2:
            kill(launched.main)  # its workers may be orphans from here on, and take their memory later
            time.sleep(chance.choice([0.0, 0.02, 0.2]))
        bench.end()
        assert bench.remains(launched) == [], f"seed {SEED + box}, moment {number}"
    time.sleep(seconds)  # the longest that an orphan would need to take its memory
    for launched in launches:
        assert bench.remains(launched) == []


def test_orphans_that_have_no_memory_yet_are_found_before_they_take_it(bench: Bench) -> None:
    """The recorded case: the launcher is dead, nvidia-smi reads 0, and the workers go on starting."""
    launched = bench.start("--lab-fail", "orphans", "--lab-speed", "0.25")  # they take it 6 s later
    assert until(lambda: not processes.is_alive(launched.main), 120)
    table = processes.processes()
    assert ownership.members(ownership.Recorded(launched.main, launched.supervisor), table)
    assert control.held(bench.node) == []
    bench.end()
    assert bench.remains(launched) == []


def test_orphans_are_what_they_seem_when_nobody_stops_them(bench: Bench) -> None:
    """The counterpart, which shows that the test above could fail: left alone, they do take memory."""
    launched = bench.start("--lab-fail", "orphans")
    assert until(lambda: bool(control.held(bench.node)), 120)
    assert not processes.is_alive(launched.main)
    bench.end()
    assert bench.remains(launched) == []
