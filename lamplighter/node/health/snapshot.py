"""Everything that checks may ask about a node and one server on it, in one look. Reads only."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Mapping, Optional

from lamplighter.node.gpu import freeing, xids
from lamplighter.node.health import differences, drift, facts, liveness
from lamplighter.node.keeper import launcher, parents, systemd
from lamplighter.node.keeper.launched import unit_in
from lamplighter.node.layout import ServerHome, read_json
from lamplighter.node.plan import Plan
from lamplighter.node.start import probe
from lamplighter.node.system import disks, http, ports, processes
from lamplighter.node.variables import scope

#: For the model's name, which the HTTP process tells alone.
MODELS_SECONDS = 10.0


def all_facts(plan: Plan, home: ServerHome) -> Dict[str, Any]:
    """Return everything that checks may ask about the node and this server. Takes about a second on a GPU node."""
    record = launcher.read_record(home)
    members = launcher.present_members(record) if record is not None else []
    main = launcher.present(record).main if record is not None else None
    found = facts.node_facts(plan.gpus, disks.places(home.path, plan.model), plan.gpu_warnings.accept)
    uuids = found["wanted"]["uuids"]
    report, watchers = scope.live_report(home), parents.Programs.of(plan.engine).watchers

    def ours() -> List[int]:
        return [process.pid for process in launcher.present_members(record)] if record is not None else []

    return {
        **found,
        "fatal_xids": xids.fatal(plan.engine),
        "holders": facts.holder_facts(
            uuids, freeing.read_baseline(home), ours, plan.allow, watchers, plan.gpu_warnings.accept
        ),
        "processes": [facts.describe(process) for process in members],
        "limits": facts.limits_of(main.pid) if main is not None else {},
        "environment": report,
        "sitecustomize": {"scope": plan.sitecustomize.scope, "workers": _sitecustomize(home, record or {}, report)},
        "engine": _engine_facts(plan, home, record or {}),
        "unit": _unit_facts(home, record or {}),
        "logind": _logind_facts(found["host"]),
        "release": _release_facts(home, record or {}),
        "answers": _answers(plan, home, record or {}),
        "lost_workers": liveness.lost_workers(home),
    }


def _answers(plan: Plan, home: ServerHome, record: Mapping[str, Any]) -> Dict[str, Any]:
    """Ask the server for one token and for its model: {"token", "model": {"ok", "message"}}.

    With the key that the running release asks for, which is in no answer of ours.
    """
    release = home.release(record["release"]) if record.get("release") else None
    stored = release.read_plan() if release is not None else None
    key, engine = probe.find_api_key(stored or plan, release), plan.engine
    host, wanted = ports.probe_host(plan.host), {"served_name": plan.served_name, "model": plan.model}
    is_in_reply = (engine.get("identity") or {}).get("source") == "reply"
    reply: Optional[http.Reply] = None
    trouble = ""
    try:
        generation = http.generate(
            engine, host, plan.port, plan.served_name, liveness.PATIENT_SECONDS, api_key=key, tls=plan.tls
        )
        reply, trouble = generation.reply, generation.error
    except http.HttpFailed as failed:
        trouble = failed.reason
    token = _told(not trouble, trouble or f"a token in {reply.seconds if reply else 0.0:.2f} s", key, reply)
    if not is_in_reply:
        try:
            reply = http.models(engine, host, plan.port, MODELS_SECONDS, api_key=key, tls=plan.tls)
        except http.HttpFailed as failed:
            reply, trouble = None, failed.reason
    if reply is None:
        return {"token": token, "model": _told(False, trouble, key, reply)}
    match = http.identity_matches(engine, wanted, reply)
    return {"token": token, "model": _told(match.ok, match.message, key, reply)}


def _told(ok: bool, message: str, key: Optional[str], reply: Optional[http.Reply]) -> Dict[str, Any]:
    if reply is not None and reply.status == 401:
        message += "; asked with the API key of its release" if key else "; its release has no API key"
    return {"ok": ok, "message": message.replace(key, differences.HIDDEN) if key else message}


def _sitecustomize(home: ServerHome, record: Mapping[str, Any], report: Mapping[str, Any]) -> Dict[str, str]:
    """Say for every worker whether our sitecustomize of the running release has left its record there."""
    records, running = record.get("records") or "", home.release(record.get("release") or "")
    verdicts: Dict[str, str] = {}
    for worker in report["workers"]:
        process = processes.read_process(worker["pid"])
        left = read_json(os.path.join(records, f"{worker['pid']}.json"))
        if process is None:
            continue
        if left is None or left.get("start") != process.start:
            verdicts[str(worker["pid"])] = "none has run"
        elif left.get("digest") != running.digest:
            verdicts[str(worker["pid"])] = f"that of release {left.get('digest')}"
        else:
            verdicts[str(worker["pid"])] = "in force"
    return verdicts


def _engine_facts(plan: Plan, home: ServerHome, record: Mapping[str, Any]) -> Dict[str, Any]:
    running = home.release(record["release"]) if record.get("release") else None
    found = drift.installed_engine(plan, running if running is not None and running.is_complete() else None)
    found.pop("stats", None)
    return found


def _unit_facts(home: ServerHome, record: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    recorded = unit_in(dict(record))
    if recorded is None:
        return None
    unit = systemd.known_as(recorded)
    shown = systemd.Manager(unit.manager_uid).show(
        unit.name, "ActiveState", "UnitFileState", "NRestarts", "NeedDaemonReload", "DropInPaths"
    )
    return {"name": unit.name, "manager_uid": unit.manager_uid, **shown, "edited": systemd.edited_by_hand(home)}


def _logind_facts(host: Mapping[str, Any]) -> Dict[str, Any]:
    if not host["has_systemd"]:
        return {}
    return {
        "RemoveIPC": systemd.logind("RemoveIPC"),
        "KillUserProcesses": systemd.logind("KillUserProcesses"),
        "lingering": systemd.is_lingering(host["uid"]),
    }


def _release_facts(home: ServerHome, record: Mapping[str, Any]) -> Dict[str, Any]:
    current = home.current_release()
    if current is None:
        return {"current": None}
    return {
        "current": current.name,
        "running": record.get("release"),
        "gpus": record.get("gpus"),
        "launch_mode": drift.mode_of(current.launch_script),
        "env_mode": drift.mode_of(current.env),
        "files": [each.to_json() for each in drift.in_release(current, None)] if drift.recorded_files(current) else [],
        "verdict": (current.read_verdict() or {}).get("verdict"),
    }
