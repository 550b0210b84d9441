"""What a node is and how it stands, in one look: the answer behind every check that needs no command of its own.

JSON-safe and flat enough to be read by eye. Runs nvidia-smi three times at most, reads /proc, /sys, /etc and file
system sizes; changes nothing. Nothing here raises on an odd node: what cannot be read is None, and where that matters
``error`` beside it says why.

Units: bytes, seconds, MiB where the name says so.
"""

from __future__ import annotations

import os
import platform
import time
from typing import Any, Callable, Collection, Dict, Iterable, List, Mapping, Optional, Sequence, Union

from lamplighter.node.gpu import driver, gpus, holders
from lamplighter.node.start import software
from lamplighter.node.system import disks, memory, ports, processes
from lamplighter.node.system.processes import Process

#: What is asked of every GPU beyond what a verdict needs; a driver that does not know one leaves it out.
DETAILS = (
    "driver_version",
    "persistence_mode",
    "compute_mode",
    "mig.mode.current",
    "gpu_recovery_action",
    "fabric.state",
    "fabric.status",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_event_reasons.active",
    "pcie.link.width.current",
    "pcie.link.width.max",
)


#: Seconds that nvidia-smi may take in all.
SMI_SECONDS = 20.0

#: For how long a process in D state is looked at before it counts as stuck, and how often.
STUCK_SECONDS = 2.0
STUCK_LOOKS = 10

_MEMORY = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree", "HugePages_Total", "HugePages_Free")


def node_facts(
    wanted: Union[str, Sequence[Union[int, str]]], paths: Iterable[str], accepted: Collection[str] = ()
) -> Dict[str, Any]:
    """Describe the node: its kernel, driver, GPUs, memory, mounts, listeners, stuck processes and leftovers.

    ``wanted`` are the server's ``gpus`` (none for an empty list), ``paths`` the places whose free space matters,
    ``accepted`` the warnings of nvidia-smi that may stay.
    """
    table = processes.processes()
    return {
        "t": time.time(),
        "host": _host(),
        "driver": {"module": driver.loaded_driver()},
        **gpu_facts(wanted, accepted),
        "ports": [
            {"address": found.address, "port": found.port, "pids": list(found.pids), "uid": found.uid}
            for found in ports.listeners()
        ],
        "memory": {name: value for name, value in memory.meminfo().items() if name in _MEMORY},
        "mounts": disks.read_mounts(_text(f"{processes.PROC}/self/mounts") or ""),
        "space": {path: disks.space(path) for path in dict.fromkeys(["/dev/shm", *paths])},  # noqa: S108 - looked at only
        "stuck": stuck(table),
        "iommu": {"groups": _count("/sys/kernel/iommu_groups"), "cmdline": (_text("/proc/cmdline") or "").strip()},
        "nccl_files": {path: _text(os.path.expanduser(path)) for path in software.NCCL_FILES},
    }


def _host() -> Dict[str, Any]:
    uptime = (_text(f"{processes.PROC}/uptime") or "0").split()
    uid = os.geteuid()
    return {
        "name": platform.node(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "boot_id": processes.boot_id(),
        "uptime": float(uptime[0]),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "uid": uid,
        "user": processes.user_name(uid),
        "has_systemd": os.path.isdir("/run/systemd/system"),
    }


def gpu_facts(wanted: Union[str, Sequence[Union[int, str]]], accepted: Collection[str] = ()) -> Dict[str, Any]:
    """Describe all GPUs of the node (``gpus``, ``smi``) and which of them the server's are (``wanted``)."""
    if not wanted and gpus.take_sample(SMI_SECONDS).gpus.rc == 127:  # not installed
        return {"gpus": [], "smi": {"error": None, "seconds": 0.0}, "wanted": {"uuids": [], "error": None}}
    began = time.monotonic()
    sample = gpus.accepting(gpus.take_sample(SMI_SECONDS), accepted)
    taken = time.monotonic() - began
    error = gpus.unreadable(sample)
    more = {} if sample.gpus.rc is None else gpus.details(DETAILS, SMI_SECONDS)
    resolved = gpus.resolve(wanted, sample) if wanted else gpus.Resolved(())
    return {
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "total_mib": gpu.total_mib,
                "used_mib": gpu.used_mib,
                "temperature": gpu.temperature,
                "pstate": gpu.pstate,
                "details": more.get(gpu.uuid, {}),
            }
            for gpu in gpus.list_gpus(sample)
        ],
        "smi": {"error": error, "seconds": round(taken, 3)},
        "wanted": {"uuids": list(resolved.uuids), "error": resolved.error},
    }


def holder_facts(
    uuids: Sequence[str],
    baseline: Mapping[str, Optional[int]],
    ours: Callable[[], Collection[int]],
    allow: Collection[str],
    watchers: Collection[str] = (),
    accepted: Collection[str] = (),
) -> Dict[str, Any]:
    """Judge who holds the server's GPUs: the verdict's word and reason, and every holder, ours or not.

    All of it is of one sample, the last: who else is there for a moment, and memory that no process has for a moment,
    is looked at again. ``ours`` returns the pids of the server; it is asked after the GPUs, for a server that goes on
    starting processes. ``watchers`` may have the devices open. ``unaccounted``: see ``gpus.unaccounted``.
    """
    if not uuids:
        nothing = {"word": None, "reason": "the server uses no GPU", "unaccounted": ""}
        return {**nothing, "holders": [], "open": [], "complete": True}
    until = time.monotonic() + gpus.TEARDOWN_SECONDS
    looks: Dict[int, int] = {}
    while True:
        sample, verdict = gpus.settle(uuids, baseline, allow, SMI_SECONDS, accepted)
        known = set(ours())
        names = {app.pid: app.name for app in verdict.apps}
        listed = _alive({pid: names.get(pid, "") for pid in verdict.holders})
        looks = {each["pid"]: looks.get(each["pid"], 0) + 1 for each in listed if each["pid"] not in known}
        unaccounted = gpus.unaccounted(verdict, baseline)
        is_lasting = len(listed) == len(verdict.holders) and all(count >= holders.LOOKS for count in looks.values())
        if (is_lasting and not unaccounted) or time.monotonic() > until:
            break
        time.sleep(holders.APART_SECONDS)
    scan, opened = holders.lastingly_open(sample, uuids, {*known, *verdict.holders}, {*allow, *watchers})
    others = _alive(dict.fromkeys(opened, ""))
    known.update(ours())
    return {
        "word": verdict.word,
        "reason": verdict.reason,
        "unaccounted": unaccounted,
        "holders": [{**each, "is_ours": each["pid"] in known} for each in listed],
        "open": [{**each, "is_ours": each["pid"] in known} for each in others],
        "complete": scan.complete,
    }


def _alive(named: Mapping[int, str]) -> List[Dict[str, Any]]:
    """Describe those pids that still run; ``named`` has a title for one that is hidden from this user."""
    found = []
    for pid, name in named.items():
        process = processes.read_process(pid)
        if processes.is_pid_alive(pid):
            title, user = (process.title, processes.user_name(process.uid)) if process else (name, "")
            found.append({"pid": pid, "title": title, "user": user})
    return found


def describe(process: Process) -> Dict[str, Any]:
    """Describe one process of the server."""
    return {
        "pid": process.pid,
        "ppid": process.ppid,
        "state": process.state,
        "title": process.title,
        "argv": list(process.argv),
        "exe": process.exe,
        "age": round(processes.age_seconds(process), 1),
    }


def limits_of(pid: int) -> Dict[str, Optional[float]]:
    """Return the soft limits of a process; None stands for unlimited, which JSON cannot say."""
    return {name: None if value == float("inf") else value for name, value in processes.limits(pid).items()}


def stuck(table: Mapping[int, Process]) -> List[Dict[str, Any]]:
    """List the processes that stay in uninterruptible sleep, with the place in the kernel where that can be read.

    A process that waits for a disk is in that state for a moment, and again the next: only one counts that is there in
    every look, and has done nothing in between.
    """
    waiting = [process for process in table.values() if process.state == "D"]
    before = {process.pid: processes.activity(process.pid) for process in waiting}
    for _ in range(STUCK_LOOKS):
        if waiting:
            time.sleep(STUCK_SECONDS / STUCK_LOOKS)
            waiting = [process for process in waiting if _still_waits(process, before[process.pid])]
    return [
        {
            "pid": process.pid,
            "comm": process.comm,
            "title": process.title,
            "wchan": (_text(f"{processes.PROC}/{process.pid}/wchan") or "").strip(),
        }
        for process in waiting
    ]


def _still_waits(process: Process, before: Optional[processes.Activity]) -> bool:
    now = processes.read_process(process.pid)
    is_there = now is not None and now.identity == process.identity and now.state == "D"
    return is_there and processes.activity(process.pid) == before


# ------------------------------------------------------------------------------------------------------------ files


def _text(path: str) -> Optional[str]:
    try:
        with open(path, "rb") as file:
            return file.read(16 << 20).decode("utf-8", "surrogateescape")
    except OSError:
        return None


def _count(directory: str) -> Optional[int]:
    try:
        return len(os.listdir(directory))
    except OSError:
        return None
