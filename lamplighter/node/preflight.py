"""Everything that can be known about the node before anything is touched. Reads only.

``examine`` serves both the ``preflight`` stage and ``check``: a finding of level error refuses a deploy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
from typing import Any, Iterable, Mapping, Optional

from lamplighter.node import freed
from lamplighter.node.layout import ServerHome, read_json
from lamplighter.node.observe import gpus, http, ownership, ports, processes
from lamplighter.node.plan import Plan

#: A release, its journal and the first minutes of a log; engines' caches and weights are their own affair.
ROOT_FREE_BYTES = 64 << 20
SHM_FREE_BYTES = 1 << 30
VERSION_SECONDS = 20.0
ANSWER_SECONDS = 2.0

_ASK_VERSION = "import sys, importlib.metadata as m; sys.stdout.write(m.version(sys.argv[1]))"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One question about the node and its answer; ``level`` is ok, warning or error."""

    id: str
    level: str
    message: str
    evidence: str = ""
    hint: str = ""


@dataclasses.dataclass(frozen=True)
class Examination:
    """The findings, and the processes that a deploy would stop or leave."""

    findings: tuple[Finding, ...]
    claims: tuple[ownership.Claim, ...]


def examine(plan: Plan, engine: Mapping[str, Any], home: ServerHome, resolved: gpus.Resolved) -> Examination:
    """Ask every question of the preflight. Touches nothing; takes some nvidia-smi calls and one start of Python."""
    claims = tuple(find_claims(plan, engine, home, resolved.uuids))
    findings = [
        *_interpreter(plan),
        *_engine_version(plan, engine),
        *_model(plan),
        *_port(plan, claims),
        *_space(home),
        *_gpus(plan, home, resolved, claims),
    ]
    return Examination(tuple(findings), claims)


# ---------------------------------------------------------------------------------------------------------- questions


def _interpreter(plan: Plan) -> Iterable[Finding]:
    path = shutil.which(os.path.expanduser(plan.python))
    where = f"servers.{plan.name}.python"
    if path is None:
        yield Finding(
            "interpreter_missing",
            "error",
            f"the server's Python {plan.python} is not there or not executable",
            hint=f"install it, or correct {where}",
        )
    else:
        yield Finding("interpreter", "ok", f"Python {plan.python}", path)


def _engine_version(plan: Plan, engine: Mapping[str, Any]) -> Iterable[Finding]:
    distribution = engine.get("distribution")
    if not distribution or shutil.which(os.path.expanduser(plan.python)) is None:
        return
    version, trouble = installed_version(plan.python, distribution)
    where = f"servers.{plan.name}"
    if version is None:
        yield Finding(
            "engine_missing",
            "error",
            f"{distribution} is not installed for {plan.python}",
            trouble,
            f"install it there, or correct {where}.python",
        )
    elif plan.engine_version not in (None, version):
        yield Finding(
            "engine_version",
            "error",
            f"the node has {distribution} {version}, the inventory says {plan.engine_version}",
            hint=f"install that version, or correct {where}.engine_version",
        )
    else:
        yield Finding("engine_version", "ok", f"{distribution} {version}")


def installed_version(python: str, distribution: str) -> tuple[Optional[str], str]:
    """Ask the server's interpreter for a distribution's version, by its metadata; (None, why) if it has none."""
    command = [os.path.expanduser(python), "-c", _ASK_VERSION, distribution]
    try:
        done = subprocess.run(command, capture_output=True, timeout=VERSION_SECONDS, check=False, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if done.returncode:
        return None, (done.stderr.decode("utf-8", "replace").strip().splitlines() or [""])[-1]
    return done.stdout.decode("utf-8", "replace").strip(), ""


def _model(plan: Plan) -> Iterable[Finding]:
    if not plan.model.startswith(("/", "~")):
        return  # a hub id or a name: the engine's own affair
    path = os.path.expanduser(plan.model)
    if os.path.exists(path):
        yield Finding("model", "ok", f"model {plan.model}")
    else:
        yield Finding(
            "model_path",
            "error",
            f"the model path {plan.model} does not exist on the node",
            hint=f"put the model there, or correct servers.{plan.name}.model",
        )


def _port(plan: Plan, claims: Iterable[ownership.Claim]) -> Iterable[Finding]:
    owners = {pid for listener in ports.listeners(plan.port) for pid in listener.pids}
    strangers = [claim for claim in claims if claim.process.pid in owners and not claim.may_be_stopped]
    hint = f"end it, choose another servers.{plan.name}.port, or list its name in stale.kill"
    if strangers:
        message = f"port {plan.port} is taken by a process that is not ours"
        yield Finding("port_in_use", "error", message, "; ".join(map(str, strangers)), hint)
    elif not owners and not (check := ports.can_bind(plan.host, plan.port)).free:
        message = f"port {plan.port} on {plan.host} cannot be bound"
        yield Finding("port_in_use", "error", message, check.reason, hint)
    else:
        yield Finding("port", "ok", f"port {plan.port} is free, or held by what will be stopped")


def _space(home: ServerHome) -> Iterable[Finding]:
    place = home.path
    while not os.path.exists(place):
        place = os.path.dirname(place)
    free = _free_bytes(place)
    if free < ROOT_FREE_BYTES:
        message = f"only {free >> 20} MiB free below {place}"
        yield Finding("disk_full", "error", message, hint="make room: releases, journals and logs live there")
    else:
        yield Finding("disk", "ok", f"{free >> 20} MiB free below {place}")
    shm = _free_bytes("/dev/shm")  # noqa: S108
    if shm < SHM_FREE_BYTES:
        hint = "NCCL and multiprocessing need it: enlarge the tmpfs, or remove dead segments"
        yield Finding("shm_small", "warning", f"only {shm >> 20} MiB free in /dev/shm", hint=hint)


def _free_bytes(path: str) -> int:
    try:
        state = os.statvfs(path)
    except OSError:
        return 0
    return state.f_bavail * state.f_frsize


def _gpus(
    plan: Plan, home: ServerHome, resolved: gpus.Resolved, claims: Iterable[ownership.Claim]
) -> Iterable[Finding]:
    if not plan.uses_gpus:
        yield Finding("gpus", "ok", "the server uses no GPU (gpus: [])")
        return
    if resolved.error is not None:
        hint = f"compare servers.{plan.name}.gpus with what nvidia-smi -L says on the node"
        yield Finding("gpu_unknown", "error", "the GPUs of this server cannot be told", resolved.error, hint)
        return
    uuids = resolved.uuids
    verdict = gpus.judge(gpus.take_sample(), uuids, freed.read_baseline(home), processes.is_pid_alive, allow=plan.allow)
    stoppable = {claim.process.pid for claim in claims if claim.may_be_stopped}
    foreign = [pid for pid in verdict.holders if pid not in stoppable]
    if verdict.word == "UNKNOWN":
        hint = "run nvidia-smi on the node: what it says is not fit to start a server on"
        yield Finding("gpu_unknown", "error", "the state of the GPUs cannot be told", verdict.reason, hint)
    elif foreign:
        hint = f"end them, or list their names in servers.{plan.name}.stale.kill"
        yield Finding("gpu_held", "error", "foreign processes hold GPU memory", describe_pids(foreign), hint)
    elif verdict.word == "HELD" and not verdict.holders and not stoppable:
        hint = "look for holders outside this PID namespace (containers), or reset the GPU"
        yield Finding("gpu_held", "error", "GPU memory is held, and no process is seen", verdict.reason, hint)
    elif verdict.word == "NO_HOLDERS" and plan.gpus_unified != "accept":
        hint = f"servers.{plan.name}.gpus_unified: accept says that no visible holder is enough here"
        yield Finding("gpu_unified", "error", "the memory of these GPUs cannot be read", verdict.reason, hint)
    else:
        yield Finding("gpus", "ok", f"{len(uuids)} GPUs: {verdict.word}", verdict.reason)


# ----------------------------------------------------------------------------- what other stages need to know as well


def resolve_gpus(plan: Plan) -> gpus.Resolved:
    """Return the UUIDs of the GPUs that the server will use, or what is wrong."""
    return gpus.resolve(plan.gpus, gpus.take_sample()) if plan.uses_gpus else gpus.Resolved(())


def find_claims(
    plan: Plan, engine: Mapping[str, Any], home: ServerHome, uuids: tuple[str, ...]
) -> list[ownership.Claim]:
    """Return every process that matters to this server, judged: ours, stale, listed or foreign."""
    table = processes.processes()
    listeners = {pid for listener in ports.listeners(plan.port) for pid in listener.pids}
    holders: set[int] = set()
    if uuids:
        verdict = gpus.judge(gpus.take_sample(), uuids, {}, processes.is_pid_alive, allow=plan.allow)
        holders = set(verdict.holders)
    evidence = ownership.Evidence(table, frozenset(holders), frozenset(listeners))
    return ownership.claims(
        evidence,
        recorded_launches(home),
        engine,
        policy=plan.stale_policy,
        listed=plan.stale_kill,
        uid=os.geteuid(),
    )


def recorded_launches(home: ServerHome) -> list[ownership.Recorded]:
    """Return all launches that the node remembers, as far as they are of this boot."""
    found = []
    for launch in home.launches():
        record = read_json(launch.process)
        if record is None or record.get("boot_id") != processes.boot_id():
            continue
        found.append(
            ownership.Recorded(
                processes.Identity(record["boot_id"], record["pid"], record["start"]),
                processes.Identity(record["boot_id"], record["supervisor_pid"], record["supervisor_start"]),
            )
        )
    return found


def what_serves(home: ServerHome) -> Optional[dict[str, Any]]:
    """Return what serves now: the recorded server, if its process is alive, was ready, and its port has a listener."""
    record = read_json(home.record)
    if record is None or not record.get("ready"):
        return None
    if not processes.is_alive(processes.Identity(record["boot_id"], record["pid"], record["start"])):
        return None
    if not ports.listeners(record["port"]):
        return None
    return {name: record[name] for name in ("release", "pid", "port", "model", "since")}


def is_answering(host: str, port: int) -> bool:
    """Tell whether anybody answers HTTP there, whatever it says, within two seconds."""
    try:
        http.request("GET", ports.probe_host(host), port, "/v1/models", timeout=ANSWER_SECONDS)
    except http.HttpFailed:
        return False
    return True


def describe_pids(pids: Iterable[int]) -> str:
    """Name processes as a person would look for them: pid, user, command, since when."""
    parts = []
    for pid in pids:
        process = processes.read_process(pid)
        if process is None:
            parts.append(f"pid {pid} (gone)")
        else:
            with contextlib.suppress(OSError):
                parts.append(f"pid {pid} ({processes.user_name(process.uid)}, {process.title})")
    return ", ".join(parts)
