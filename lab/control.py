"""Puts a lab node into odd states: for tests, and for seeing what the tool says about them.

A node is its directory, DIRECTORY/NAME of lab.node. Injected states live in its gpu/control.json, take effect with the
next call of nvidia-smi, and stay until cleared. GPUs are named by index, UUID or bus id, ``*`` names all.

Facts: every state here was seen on real nodes: a lost GPU has no row, a message in the middle of the table or fault
tokens in its cells; nvidia-smi hangs, is slow on busy nodes, and exits 0 or not; a stale row names a pid that is gone.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from lab import ledger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.ledger import Allocation

#: What can be injected. nvidia-smi itself: exit status, text instead of its output, text on stderr, hang for ever,
#: seconds of delay. Its answers: cells ({gpu: {field: text}}), GPUs without a row, lines in the middle of the table,
#: rows of processes ([{gpu, pid, name, mib}]), used memory ({gpu: MiB}). The driver: seconds until memory is given
#: back, and whether a dead process shows as `[No data]` ("no-data") or not at all ("empty") meanwhile.
STATES = ("rc", "stdout", "stderr", "hang", "slow", "fields", "missing", "extra", "apps", "used", "release", "teardown")


def inject(node: Path, **states: object) -> None:
    """Add ``states`` (see STATES) to those in force. Raises ValueError for an unknown one."""
    unknown = set(states) - set(STATES)
    if unknown:
        raise ValueError(f"no such state: {', '.join(sorted(unknown))}; known: {', '.join(STATES)}")
    ledger.write_json(_control(node), {**injected(node), **states})


def injected(node: Path) -> dict[str, object]:
    """The states in force."""
    states = ledger.read_json(_control(node))
    return dict(states) if isinstance(states, dict) else {}


def clear(node: Path, *names: str) -> None:
    """Take back the named states, or all."""
    kept = {name: value for name, value in injected(node).items() if names and name not in names}
    ledger.write_json(_control(node), kept)


def uuids(node: Path) -> list[str]:
    """The node's GPUs, by index."""
    return [gpu["uuid"] for gpu in ledger.read_json(str(node / "gpu" / "board.json"))["gpus"]]


def held(node: Path) -> list[Allocation]:
    """Who holds GPU memory, the dead whose memory is not back yet included."""
    return [entry for entry in ledger.allocations(str(node / "gpu")) if entry.gpu]


def allocate(node: Path, pid: int, mib: int, gpu: int = 0) -> None:
    """Let a live process hold ``mib`` of a GPU, until it dies or ``free`` is called."""
    ledger.allocate(str(node / "gpu"), pid, uuids(node)[gpu], mib, ledger.argv0_of(pid))


def free(node: Path, pid: int) -> None:
    """Give back at once what ``pid`` holds."""
    ledger.free(str(node / "gpu"), pid)


@contextlib.contextmanager
def stranger(node: Path, mib: int, gpu: int = 0, name: str = "/usr/bin/trainer") -> Iterator[subprocess.Popen[bytes]]:
    """A process that is nobody's server, called ``name``, and holds ``mib`` of a GPU as long as the block runs."""
    process = subprocess.Popen([name, "3600"], executable=_sleep(), stdin=subprocess.DEVNULL)
    try:
        allocate(node, process.pid, mib, gpu)
        yield process
    finally:
        process.kill()
        process.wait()


def _sleep() -> str:
    return next(path for path in ("/bin/sleep", "/usr/bin/sleep") if Path(path).exists())


def _control(node: Path) -> str:
    return str(node / "gpu" / "control.json")
