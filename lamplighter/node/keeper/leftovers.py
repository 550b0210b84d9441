"""What a stopped server leaves behind that its end does not take away: shared memory, socket files, busy ports.

``observe`` is called before the stop and ``remove`` after it. Removed is only what is this user's, older than the end
of the last process, and in no living process's memory or open files; where that cannot be seen of every process, only
what no other user may open. Everything is said, nothing is guessed.

facts: SIGKILL of one process lets multiprocessing's resource tracker remove its segments, SIGKILL of the group leaves
them in /dev/shm; after SIGKILL and a start on the same port a server can look healthy and then hang, so the ports that
it derived from the first one (dist_init, NCCL, RPC) must be free again as well.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import time
from typing import Callable, Collection, Iterable

from lamplighter.node.system import ports, processes

SHARED_MEMORY = "/dev/shm"  # noqa: S108

#: Names below /dev/shm, and who gives them.
#: psm_*, sem.mp-*: Python's multiprocessing. torch_*: PyTorch's file_system sharing. nccl-*: NCCL's intra-node
#: transport. vllm_offload_*: vLLM's CPU offloading. sglang_loads_*: SGLang 0.5.16's load table. sem.loky-*: joblib.
SEGMENTS = re.compile(r"psm_.+|sem\.mp-.+|torch_.+|nccl-.+|vllm_offload_.+|sglang_loads_.+|sem\.loky-.+")

#: Seconds that a port may take to be free after the last of its processes is gone.
PORT_SECONDS = 10.0
POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Holdings:
    """What the processes that will be stopped have: TCP ports on which they listen, and bound socket files."""

    ports: frozenset[int] = frozenset()
    sockets: frozenset[str] = frozenset()


def observe(pids: Collection[int]) -> Holdings:
    """See what ``pids`` have, while they live. Reads only."""
    return Holdings(
        frozenset(listener.port for listener in ports.listening(pids)),
        frozenset(path for path in ports.socket_files(pids) if path.startswith("/")),
    )


def remove(holdings: Holdings, gone_at: float) -> list[str]:
    """Remove shared memory and socket files that the stopped processes left; return the paths removed.

    ``gone_at``: wall clock seconds when none of them was left; younger files are somebody else's.
    """
    candidates = {path: seen for path in _segments() if (seen := _is_ours(path, gone_at, stat.S_ISREG))}
    gone = []
    if candidates:
        used, complete = processes.files_in_use()
        for path, seen in candidates.items():
            is_private = seen.st_mode & 0o077 == 0
            if (seen.st_dev, seen.st_ino) not in used and (complete or is_private) and _unlink(path):
                gone.append(path)
    bound = ports.bound_paths() if holdings.sockets else frozenset()
    sockets = [path for path in sorted(holdings.sockets - bound) if _is_ours(path, gone_at, stat.S_ISSOCK)]
    return gone + [path for path in sockets if _unlink(path)]


def await_ports(wanted: Iterable[int], heed: Callable[[], None], seconds: float = PORT_SECONDS) -> list[str]:
    """Wait until nobody listens on the ports that the stopped server had; return in words who still does."""
    deadline = time.monotonic() + seconds
    while True:
        busy = [listener for port in sorted(wanted) for listener in ports.listeners(port)]
        if not busy or time.monotonic() >= deadline:
            return [f"port {listener.port} is in use by {_names(listener.pids)}" for listener in busy]
        heed()
        time.sleep(POLL_SECONDS)


def _names(pids: Iterable[int]) -> str:
    found = [process for process in map(processes.read_process, pids) if process is not None]
    names = [f"pid {process.pid} ({processes.user_name(process.uid)}, {process.title})" for process in found]
    return ", ".join(names) or "a process of another user"


def _segments() -> list[str]:
    try:
        names = os.listdir(SHARED_MEMORY)
    except OSError:
        return []
    return [os.path.join(SHARED_MEMORY, name) for name in sorted(names) if SEGMENTS.fullmatch(name)]


def _is_ours(path: str, gone_at: float, kind: Callable[[int], bool]) -> os.stat_result | None:
    try:
        seen = os.lstat(path)
    except OSError:
        return None
    is_old = max(seen.st_mtime, seen.st_ctime) < gone_at
    return seen if kind(seen.st_mode) and seen.st_uid == os.geteuid() and is_old else None


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True
