"""Who stands where on the node: on the GPUs of a server, on its port, or elsewhere. Looks only.

nvidia-smi says who has memory of which GPU; ``/proc/*/fd`` also finds who has a GPU's device open without memory yet.
The second cannot tell the GPU, since a CUDA process opens all of them: who is at work elsewhere is passed over, and
whom that cannot be said of is *unsure*: named, never stopped on that ground.
"""

from __future__ import annotations

import time
from typing import Collection, Mapping, Optional, Sequence

from lamplighter.node.gpu import gpus
from lamplighter.node.keeper.ownership import Evidence
from lamplighter.node.system import ports, processes
from lamplighter.node.system.processes import Process

VISIBLE = "CUDA_VISIBLE_DEVICES"

#: Monitors open the devices for a moment: only who is seen this often, this many seconds apart, has them open.
LOOKS, APART_SECONDS = 3, 0.1

SHOWN_DEVICES = 3


def look(
    uuids: Sequence[str],
    port: int,
    allow: Collection[str],
    watchers: Collection[str],
    ours: Collection[int] = (),
    table: Optional[Mapping[int, Process]] = None,
    sample: Optional[gpus.Sample] = None,
) -> Evidence:
    """See who holds the GPUs ``uuids`` or listens on ``port``. ``ours``: the pids that are known to be ours.

    ``allow`` may stay, ``watchers`` may have the devices open. ``table`` and ``sample`` save another look.
    """
    table = processes.processes() if table is None else table
    listeners = frozenset(pid for listener in ports.listeners(port) for pid in listener.pids)
    if not uuids:
        return Evidence(table, frozenset(), listeners)
    sample = gpus.take_sample() if sample is None else sample
    verdict = gpus.judge(sample, uuids, {}, processes.is_pid_alive, allow=allow)
    everywhere = holders_by_gpu(sample)
    wanted = {uuid.lower() for uuid in uuids}
    neighbours = frozenset(pid for pid, where in everywhere.items() if not where & wanted) - set(verdict.holders)
    _, opened = lastingly_open(sample, uuids, {*ours, *verdict.holders}, {*allow, *watchers})
    return Evidence(
        table,
        gpu_holders=frozenset(verdict.holders) | opened.keys(),
        listeners=listeners,
        neighbours=neighbours,
        unsure=frozenset(pid for pid in opened if not _is_surely_on(pid, wanted, sample)),
        places={**opened, **places(verdict)},
    )


def places(verdict: gpus.Verdict) -> dict[int, str]:
    """Say of each holder in a verdict how much of which GPU it has."""
    indexes = {row.uuid.lower(): row.index for row in verdict.rows}
    found: dict[int, list[str]] = {}
    for app in verdict.apps:
        if app.pid is not None:
            amount = f"{app.memory} MiB" if app.memory.isdigit() else app.memory or "an unknown amount"
            found.setdefault(app.pid, []).append(f"{amount} of GPU {indexes.get(app.uuid.lower(), '?')}")
    return {pid: "holds " + " and ".join(parts) for pid, parts in found.items()}


def gpus_of(pids: Collection[int]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs on which nvidia-smi lists any of ``pids``, in its order."""
    sample = gpus.take_sample()
    on = holders_by_gpu(sample)
    used = {uuid for pid in pids for uuid in on.get(pid, ())}
    return tuple(gpu.uuid for gpu in gpus.list_gpus(sample) if gpu.uuid.lower() in used)


def holders_by_gpu(sample: gpus.Sample) -> dict[int, set[str]]:
    """Return the GPUs (UUIDs in lower case) on which nvidia-smi lists each pid."""
    found: dict[int, set[str]] = {}
    everything = [gpu.uuid for gpu in gpus.list_gpus(sample)]
    for app in gpus.judge(sample, everything, {}, processes.is_pid_alive).apps:
        if app.pid is not None:
            found.setdefault(app.pid, set()).add(app.uuid.lower())
    return found


def lastingly_open(
    sample: gpus.Sample, uuids: Sequence[str], known: Collection[int], allow: Collection[str]
) -> tuple[gpus.DeviceHolders, dict[int, str]]:
    """Return the first scan, and who has a GPU's device open at every look: see ``open_devices``."""
    scan = gpus.device_holders()
    found = open_devices(scan, sample, uuids, known, allow)
    for _ in range(LOOKS - 1):
        if not found:
            break
        time.sleep(APART_SECONDS)
        again = open_devices(gpus.device_holders(), sample, uuids, known, allow)
        found = {pid: place for pid, place in found.items() if pid in again}
    return scan, found


def open_devices(
    scan: gpus.DeviceHolders,
    sample: gpus.Sample,
    uuids: Sequence[str],
    ours: Collection[int],
    allow: Collection[str],
) -> dict[int, str]:
    """Return who has a GPU's device open and is not known to be at work on other GPUs: {pid: its place in words}.

    Passed over as neighbours: who is listed on other GPUs only, who was given only other GPUs to see, and the rest of
    their sessions (the launcher of a server for other GPUs opens all devices and is listed nowhere).
    """
    wanted = {uuid.lower() for uuid in uuids}
    everywhere = holders_by_gpu(sample)
    elsewhere = {pid for pid, where in everywhere.items() if not where & wanted}
    on_ours = everywhere.keys() - elsewhere
    sessions = {scan.by_pid[pid].process.sid for pid in elsewhere if pid in scan.by_pid}
    sessions -= {scan.by_pid[pid].process.sid for pid in on_ours if pid in scan.by_pid}
    found = {}
    for pid in gpus.foreign_holders(scan, sample, uuids, ours, allow):
        holder = scan.by_pid[pid]
        visible = _visible(pid, sample)
        if holder.process.sid in sessions or (visible is not None and not visible & wanted):
            continue
        found[pid] = f"has {shown_devices(holder.devices)} open"
    return found


def shown_devices(devices: Sequence[str]) -> str:
    """Name the first few devices, GPUs before the rest: a CUDA process has dozens open."""
    ordered = sorted(devices, key=lambda each: (not each[len(gpus.DEVICES) :].isdigit(), len(each), each))
    shown, rest = ordered[:SHOWN_DEVICES], ordered[SHOWN_DEVICES:]
    return ", ".join(shown) + (f" and {len(rest)} more" if rest else "")


def _visible(pid: int, sample: gpus.Sample) -> Optional[set[str]]:
    """Return the GPUs that a process was given to see; None where that is not known, or not said by UUID."""
    value = (processes.environ(pid) or {}).get(VISIBLE)
    words = [word.strip().lower() for word in value.split(",")] if value else []
    known = {gpu.uuid.lower() for gpu in gpus.list_gpus(sample)}
    return set(words) if words and known.issuperset(words) else None


def _is_surely_on(pid: int, ours: Collection[str], sample: gpus.Sample) -> bool:
    """Tell whether a process can use no GPU but ours: the node has no other, or it was given no other to see."""
    present: Mapping[str, object] = {gpu.uuid.lower(): gpu for gpu in gpus.list_gpus(sample)}
    visible = _visible(pid, sample)
    return set(present) <= set(ours) or (visible is not None and visible <= set(ours))
