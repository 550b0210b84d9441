"""How the servers of a node are: asked, not assumed. Reads only."""

from __future__ import annotations

import os
import time
from typing import Any, Optional

from lamplighter.node import events, journal
from lamplighter.node.health import (
    census,
    drift,
    hold,
    liveness,
    serving,
)
from lamplighter.node.keeper import launcher
from lamplighter.node.layout import RunDirectory, ServerHome, all_servers, server_home
from lamplighter.node.system import http, lock, ports, processes
from lamplighter.node.verbs import history
from lamplighter.node.worker import is_at_work


def status(request: dict[str, Any], root: str) -> dict[str, Any]:
    """Tell for every server the node knows, and the ones asked for, what serves and which run is in progress."""
    asked = [] if request.get("everything") else request.get("servers") or []
    homes = {home.name: home for home in all_servers(root)}
    for name in request.get("servers") or []:
        homes.setdefault(name, server_home(root, name))
    wanted = request.get("wanted") or {}
    seconds = float(request.get("patience") or serving.TOKEN_SECONDS)
    chosen = [homes[name] for name in sorted(homes) if not asked or name in asked]
    found = [describe(home, request["host"], seconds) for home in chosen]
    if "wanted" in request:
        found = [
            {**each, "drift": drift.find_drift(homes[each["name"]], wanted.get(each["name"])).to_json()}
            for each in found
        ]
    return {"root": root, "servers": found}


def status_of(home: ServerHome, host: str) -> dict[str, Any]:
    record = launcher.read_record(home)
    found: dict[str, Any] = {"name": home.name, "state": "stopped", "message": "nothing has been deployed here"}
    found["run"] = run_at_work(home)
    lost = _lost_record(home, host) if found["run"] is None else ""
    if record is None:
        living = census.living_members(home)
        if living:
            pids = ", ".join(str(process.pid) for process in living)
            found.update({"state": "unknown", "message": _joined(f"pid {pids} runs, launched by lamplighter", lost)})
        elif os.path.lexists(home.record):
            found.update({"state": "unknown", "message": lost})
    else:
        found.update({name: record.get(name) for name in ("release", "pid", "port", "model", "since")})
        now = launcher.present(record)
        found["unit"], found["restarts"] = record.get("unit"), now.restarts
        found["pid"] = now.main.pid if now.main else None
        found["since"] = launcher.serving_since(record, now)
        if now.main is None:
            found["state"] = "starting" if now.is_restarting else "stopped"
            found["message"] = _joined(_why_gone(record), now.note)
        elif not record.get("ready"):
            found["state"], found["message"] = _unconfirmed(home, record, host)
        elif not ports.listeners(record["port"]):
            found["state"] = "starting" if now.is_other else "unknown"
            found["message"] = _joined(now.note, f"its process is alive, port {record['port']} has no listener")
        elif not http.is_answering(record["host"], record["port"]):
            found["state"] = "starting" if now.is_other else "unknown"
            found["message"] = _joined(now.note, f"port {record['port']} accepts and does not answer")
        else:
            found["state"], found["message"] = "serving", now.note
        found["message"] = _joined(found["message"], lost)
    last = home.all_runs()[-1:]
    found["last_run"] = history.run_of(last[0]) if last else None
    held = hold.of(home)
    found["hold"] = None if held is None else held.to_json()
    return found


def _lost_record(home: ServerHome, host: str) -> str:
    """Say that ``server.json`` is missing or damaged, and what repairs that; "" where it is as it should be."""
    if not launcher.is_record_lost(home):
        return ""
    what = "damaged" if os.path.lexists(home.record) else "missing"
    return f"{home.record} is {what}; `{events.invocation('deploy', host, home.name)}` writes it again"


def describe(home: ServerHome, host: str, seconds: float = serving.TOKEN_SECONDS) -> dict[str, Any]:
    """Tell how the server stands; one that seems to serve is asked for a token, and its workers are looked for.

    With a hung engine all else answers.
    """
    found, record = status_of(home, host), launcher.read_record(home)
    if found["state"] != "serving" or record is None:
        return found
    trouble = liveness.trouble_of(home, seconds) if record.get("ready") else serving.first_answer(home, record, seconds)
    lost = liveness.lost_workers(home)
    message = _joined(found["message"], trouble or "", *lost)
    return {**found, "state": "serving" if trouble is None else "unknown", "message": message}


def _unconfirmed(home: ServerHome, record: dict[str, Any], host: str) -> tuple[str, str]:
    """Judge a server that was started and never confirmed: its run is at work, was killed, or ended without that."""
    run = home.run(record["run"])
    if is_at_work(run):
        return "starting", "its process is alive and has not been ready yet"
    end = history.end_in(journal.read(run.journal))
    how = "was killed before it had"
    if end is not None and end.get("cause") != "abandoned":  # the word of a run that took over from a killed one
        how = f"ended with exit code {end.get('exit_code')} and has not"
    why = f"run {run.run_id} {how} confirmed it; `{events.invocation('deploy', host, home.name)}` repairs that"
    if ports.listeners(record["port"]) and http.is_answering(record["host"], record["port"]):
        return "serving", why
    return "starting", f"its process is alive and does not answer yet; {why}"


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _why_gone(record: dict[str, Any]) -> str:
    directory = os.path.dirname(record["log"])
    attempt = "old" if os.path.basename(record["log"]) == "server.old.log" else "new"
    launch = RunDirectory(directory).launch(attempt)
    by = launcher.stopped_by(record, launch)
    if by is not None:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(by["t"]))
        told = f"run {by.get('run')} ({by.get('verb')}, {by.get('by')}) stopped it at {when}"
        return told if record.get("ready") else f"the last start did not become ready, and {told}"
    if record["boot_id"] != processes.boot_id():
        return "the node has been rebooted since"
    ending = launcher.read_exit(launch)
    gone = "its process is gone" if ending is None else f"its process ended: {ending}"
    return gone if record.get("ready") else f"the last start failed: {gone}"


def run_at_work(home: ServerHome) -> Optional[dict[str, Any]]:
    """Tell which run has the server's lock, and how far it is; None where none has."""
    holder = lock.holder_of(home.lock)
    if holder is None:
        return None
    return {
        "id": holder.get("run"),
        "verb": holder.get("verb"),
        "by": holder.get("by"),
        "stage": holder.get("stage"),
        "since": holder.get("since"),
    }
