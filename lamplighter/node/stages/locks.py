"""The stage ``lock``: the server, its port and its GPUs are ours until this process ends."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any, Optional

from lamplighter.node import events
from lamplighter.node.events import Exit
from lamplighter.node.gpu import choice
from lamplighter.node.health import hold, renamed
from lamplighter.node.layout import ServerHome, all_servers
from lamplighter.node.plan import Plan
from lamplighter.node.stages.values import Allocation
from lamplighter.node.system import files, lock
from lamplighter.node.worker import Run, StageFailure

#: How often a waiter looks how far the holder of its lock has come.
LOOK_SECONDS = 1.0


def take_locks(run: Run, plan: Plan) -> Allocation:
    """Lock the server, its port and its GPUs until this process ends; also those of the release we might return to."""
    files.make_directory(run.home.path)
    until = _patience(run)
    aside = _clear_lock(run)
    if aside is not None:
        run.warn(f"the lock of {run.server} was a directory; it is {aside} now")
    _take(run, f"server {run.server}", run.home.lock, until)
    _heed_hold(run, run.home)
    former = renamed.former_home(plan, run.home)
    if former is not None:
        _take(run, f"server {former.name}", former.lock, until)
        _heed_hold(run, former)
    current = (former or run.home).current_release()
    served = current.read_plan() if current else None
    plans = (plan,) if served is None else (plan, served)
    return Allocation(plan, _lock_resources(run, plans, until))


def _heed_hold(run: Run, home: ServerHome) -> None:
    """Refuse while somebody has asked that no run touches the server, whoever asks for this one."""
    found = hold.of(home)
    if found is not None:
        raise StageFailure(
            Exit.LOCKED,
            f"{home.name} is {found}",
            cause="hold",
            evidence=found.message,
            hint=hold.how_to_end(home, run.request["host"]),
        )


def _clear_lock(run: Run) -> Optional[str]:
    try:
        return files.set_aside(run.home.lock, run.directory.run_id)
    except OSError:
        return None  # another run was faster, or taking the lock says what is wrong


def lock_resources(run: Run, plan: Plan) -> Allocation:
    """Lock the port and the GPUs of ``plan``."""
    return Allocation(plan, _lock_resources(run, (plan,), _patience(run)))


def _lock_resources(run: Run, plans: tuple[Plan, ...], until: float) -> tuple[str, ...]:
    """Lock what any of ``plans`` uses; return the UUIDs of the first one's GPUs."""
    uuids = _resolve(plans[0])
    wanted = {f"port-{plans[0].port}": f"port {plans[0].port}", **{f"gpu-{uuid}": f"GPU {uuid}" for uuid in uuids}}
    for other in plans[1:]:
        wanted[f"port-{other.port}"] = f"port {other.port}"
        found = choice.resolve_gpus(dataclasses.replace(other, gpu_warnings=plans[0].gpu_warnings))
        wanted.update((f"gpu-{uuid}", f"GPU {uuid}") for uuid in found.uuids)
        if found.error is not None:
            run.warn(
                f"it is not known which GPUs the current release uses: {found.error}",
                "it could not be brought back if this run fails",
            )
    for name in sorted(wanted):  # always in this order, so that two runs cannot wait for each other
        _take(run, wanted[name], _shared_path(wanted[name], name), until)
    return uuids


def _resolve(plan: Plan) -> tuple[str, ...]:
    resolved = choice.resolve_gpus(plan)
    if resolved.error is not None:
        raise StageFailure(
            Exit.REFUSED,
            "it is not known which GPUs this server uses",
            cause="gpu_unknown",
            evidence=resolved.error,
            hint=choice.how_to_name_gpus(plan, resolved.error),
        )
    return resolved.uuids


def _patience(run: Run) -> float:
    """Return the moment (monotonic) until which all locks together may be waited for."""
    return time.monotonic() + float(run.request.get("wait") or 0)


def _shared_path(what: str, name: str) -> str:
    try:
        return lock.shared_path(name)
    except OSError as error:
        places = " or ".join(lock.SHARED_DIRECTORIES)
        raise StageFailure(
            Exit.REFUSED, f"cannot lock {what}", cause="lock_file", evidence=f"{places}: {error.strerror}"
        ) from error


def _take(run: Run, what: str, path: str, until: float) -> None:
    if any(held.what == what for held in run.locks):
        return
    try:
        waiting = _Waiting(run, what, path, until)
        run.locks.append(lock.acquire(what, path, max(0.0, until - time.monotonic()), waiting))
        run.note_holder("lock")  # the next one may have to be waited for
    except lock.Locked as locked:
        raise StageFailure(
            Exit.LOCKED,
            f"{what} is locked by {_named(locked.holder)}",
            cause="locked",
            hint=_how_to_wait(run, locked.holder),
        ) from locked
    except OSError as error:
        raise StageFailure(
            Exit.REFUSED, f"cannot lock {what}", cause="lock_file", evidence=f"{path}: {error.strerror}"
        ) from error


class _Waiting:
    """What is done while a lock is waited for: heed orders, and say who has it and how far that one has come."""

    def __init__(self, run: Run, what: str, path: str, until: float) -> None:
        self._run, self._what, self._path, self._until = run, what, path, until
        self._looked_at = float("-inf")
        self._told: tuple[object, ...] = ()

    def __call__(self) -> None:
        self._run.heed()
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        holder = lock.holder_of(self._path)
        if holder is None:
            return
        news = (holder.get("run"), holder.get("stage"))
        if news != self._told:
            self._told = news
            left = max(0.0, self._until - now)
            self._run.progress(f"waiting for {self._what}, for {left:.0f} s more at most: {_named(holder)} has it")


def _named(holder: dict[str, Any]) -> str:
    since = holder.get("since")
    age = f"{max(0.0, time.time() - since):.0f} s ago" if isinstance(since, (int, float)) else "at an unknown time"
    who = f"run {holder.get('run', '?')} of {holder.get('by', '?')}"
    return f"{who}, begun {age}, at stage {holder.get('stage', '?')}"


def _how_to_wait(run: Run, holder: dict[str, Any]) -> str:
    """A run below another root is none that we could show: mostly it is another user's."""
    name, theirs = holder.get("server"), str(holder.get("run"))
    homes = all_servers(os.path.dirname(os.path.dirname(run.home.path)))
    if not any(home.name == name and os.path.isdir(home.run(theirs).path) for home in homes):
        return "give --wait SECONDS, or ask who began it; it is not of this root, so that it cannot be shown here"
    shows = events.invocation("attach", run.request["host"], str(name))
    return f"wait for it ({shows} shows it live), or give --wait SECONDS"
