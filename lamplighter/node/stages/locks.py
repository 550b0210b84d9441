"""The stage ``lock``: the server, its port and its GPUs are ours until this process ends."""

from __future__ import annotations

import time
from typing import Optional

from lamplighter.node import preflight
from lamplighter.node.act import files, lock
from lamplighter.node.events import Exit
from lamplighter.node.layout import read_json
from lamplighter.node.plan import Plan
from lamplighter.node.worker import Run, StageFailure


def take_locks(run: Run) -> Optional[str]:
    """Lock the server, its port and its GPUs until this process ends; also those of the release we might return to."""
    files.make_directory(run.home.path)
    _take(run, f"server {run.plan.name}", run.home.lock)
    run.uuids = lock_resources(run, run.plan)
    current = run.home.current_release()
    record = read_json(current.plan) if current else None
    if record is not None:
        lock_resources(run, Plan.load(record["server"]))
    run.note_holder("lock")
    return None


def lock_resources(run: Run, plan: Plan) -> tuple[str, ...]:
    """Lock the port and the GPUs of ``plan``; return the GPUs' UUIDs."""
    _take(run, f"port {plan.port}", lock.shared_path(f"port-{plan.port}"))
    resolved = preflight.resolve_gpus(plan)
    if resolved.error is not None:
        raise StageFailure(
            Exit.REFUSED,
            "the GPUs of this server cannot be told",
            cause="gpu_unknown",
            evidence=resolved.error,
            hint=f"compare servers.{plan.name}.gpus with what nvidia-smi -L says on the node",
        )
    for uuid in sorted(resolved.uuids):  # always in this order, so that two runs cannot wait for each other
        _take(run, f"GPU {uuid}", lock.shared_path(f"gpu-{uuid}"))
    return resolved.uuids


def _take(run: Run, what: str, path: str) -> None:
    if any(held.what == what for held in run.locks):
        return
    try:
        run.locks.append(lock.acquire(what, path, float(run.request.get("wait") or 0), run.heed))
    except lock.Locked as locked:
        other = locked.holder
        age = f"{time.time() - float(other['since']):.0f} s ago" if "since" in other else "at an unknown time"
        raise StageFailure(
            Exit.LOCKED,
            f"{what} is locked by run {other.get('run', '?')} of {other.get('by', '?')}, begun {age}, "
            f"at stage {other.get('stage', '?')}",
            cause="locked",
            hint="wait for it (`attach` shows it live), or give --wait SECONDS",
        ) from locked
    except OSError as error:
        raise StageFailure(
            Exit.REFUSED, f"cannot lock {what}", cause="lock_file", evidence=f"{path}: {error.strerror}"
        ) from error
