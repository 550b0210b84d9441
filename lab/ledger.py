"""Who holds how much memory of which pretended GPU: one small JSON file an allocation, in the node's directory.

Promise: an allocation lives as long as its process (pid and start time), plus the time that a real driver needs to give
the memory back; a dead process never has to clean up after itself. Memory in MiB, times in seconds.

Files, below DIRECTORY/NAME/gpu/: ``board.json`` (the GPUs), ``control.json`` (injected odd states, see lab.control),
``ledger/PID-START-GPU.json``, and ``...died`` beside it, whose modification time is the moment of death. The SSH server
of the node watches for deaths; where none runs, the first one to look notes the time.

Facts: SIGKILL of a process with 100-130 GiB reads 0 after 0.2-0.3 s (1.4 s with pinned host memory); meanwhile it is a
zombie and its name reads ``[No data]``, or the list of processes is empty already (H200, driver 580.159).

Standard library only, and as little of that as possible: nvidia-smi must answer in 30 ms, `import json` alone costs 15.
"""

# pathlib would cost 8 ms, contextlib 4:
# ruff: noqa: PTH103, PTH105, PTH108, PTH116, PTH118, PTH123, PTH208, SIM105
from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` itself costs 5 ms
    from collections.abc import Iterator
    from typing import Any

#: Seconds from a process's death until its GPU memory reads free.
RELEASE_SECONDS = 0.3


class Allocation:
    """A process's share of one GPU: ``gpu`` is a UUID, or empty for a process that is only known as ours."""

    __slots__ = ("gpu", "mib", "name", "path", "pid", "release", "start")

    def __init__(self, path: str, entry: dict[str, Any]) -> None:
        self.path = path
        self.pid: int = entry["pid"]
        self.start: int = entry["start"]
        self.gpu: str = entry["gpu"]
        self.mib: int = entry["mib"]
        self.name: str = entry["name"]
        self.release: float | None = entry["release"]

    def __repr__(self) -> str:
        return f"Allocation(pid={self.pid}, start={self.start}, gpu={self.gpu!r}, mib={self.mib}, name={self.name!r})"

    def is_alive(self) -> bool:
        return start_of(self.pid) == self.start

    def died_at(self) -> float | None:
        """Wall clock of the owner's death; None while it lives. Notes the time on the first look."""
        if self.is_alive():
            return None
        mark = f"{self.path}.died"
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            pass
        except OSError:
            return time.time()  # somebody else's ledger: held, as far as we can tell
        try:
            return os.stat(mark).st_mtime
        except OSError:
            return 0.0  # released by another reader meanwhile

    def forget(self) -> None:
        # The mark goes last: an entry without its mark would be a death that just happened.
        for path in (self.path, f"{self.path}.died"):
            try:
                os.unlink(path)
            except OSError:
                pass


def start_of(pid: int) -> int | None:
    """Start time (clock ticks since boot, field 22 of stat) of a live process; None when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def argv0_of(pid: int) -> str:
    """The live argv[0] of ``pid``, which is what nvidia-smi calls the process name; empty for a zombie."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(4096).split(b"\0", 1)[0].decode("utf-8", "replace")
    except OSError:
        return ""


def allocate(
    gpu_directory: str, pid: int, gpu: str, mib: int, name: str = "", *, release: float | None = None
) -> Allocation:
    """Enter or change what ``pid`` holds of ``gpu``. Raises ProcessLookupError when there is no such live process."""
    start = start_of(pid)
    if start is None:
        raise ProcessLookupError(f"no live process {pid}")
    directory = os.path.join(gpu_directory, "ledger")
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, f"{pid}-{start}-{gpu or 'none'}.json")
    entry = {"pid": pid, "start": start, "gpu": gpu, "mib": mib, "name": name, "release": release}
    write_json(path, entry)
    return Allocation(path, entry)


def free(gpu_directory: str, pid: int, gpu: str | None = None) -> None:
    """Give back what ``pid`` holds (of ``gpu``, or of all), at once, as a process does that frees while it lives."""
    for allocation in allocations(gpu_directory):
        if allocation.pid == pid and gpu in (None, allocation.gpu):
            allocation.forget()


def allocations(gpu_directory: str) -> Iterator[Allocation]:
    """Every entry that is not released yet, living owners and dead ones; forgets those whose time is over."""
    directory = os.path.join(gpu_directory, "ledger")
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    default = release_seconds(gpu_directory)
    for name in names:
        if not name.endswith(".json"):
            continue
        path = os.path.join(directory, name)
        entry = read_json(path)
        if not isinstance(entry, dict):
            continue  # forgotten by another reader between the listing and here
        allocation = Allocation(path, entry)
        died = allocation.died_at()
        if died is not None and time.time() - died >= (default if allocation.release is None else allocation.release):
            allocation.forget()
            continue
        yield allocation


def release_seconds(gpu_directory: str) -> float:
    """How long the driver needs to give memory back: ``release`` of control.json, else RELEASE_SECONDS."""
    control = read_json(os.path.join(gpu_directory, "control.json"))
    value = control.get("release", RELEASE_SECONDS) if isinstance(control, dict) else RELEASE_SECONDS
    return float(value)


def write_json(path: str, value: Any) -> None:
    """Replace ``path`` by ``value``, atomically."""
    import json  # nvidia-smi only reads

    temporary = f"{path}.{os.getpid()}.new"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(json.dumps(value))
    os.replace(temporary, path)


def read_json(path: str) -> Any:
    """The value in ``path``, None when there is no such file or it is not JSON."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return None
    try:
        return _scan(text.strip())
    except (StopIteration, ValueError):
        return None


class _Context:
    """What the C scanner of the standard library asks of its decoder."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
    memo: dict[str, str] = {}  # noqa: RUF012  read by the scanner, shared by design


def _scan(text: str) -> Any:
    # json.loads without the 13 ms of imports (re, enum) that json.decoder needs around the same C scanner,
    # which takes any object with the attributes of a decoder.
    try:
        from _json import make_scanner
    except ImportError:
        import json

        return json.loads(text)
    return make_scanner(_Context())(text, 0)[0]  # type: ignore[arg-type]
