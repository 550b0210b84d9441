"""What ``check`` says about ``sitecustomize.scope``, and what ``env`` says about a server that runs. Reads only."""

from __future__ import annotations

import os
from typing import Any, Iterable

from lamplighter.node.finding import Finding
from lamplighter.node.keeper import launcher
from lamplighter.node.layout import ServerHome
from lamplighter.node.plan import Plan
from lamplighter.node.start import startup
from lamplighter.node.variables import interpreter, live

STOPPED = "stopped"


def scope_findings(plan: Plan, home: ServerHome) -> Iterable[Finding]:
    """Say which scope this server's Python needs and why, naming the file that shadows others."""
    if not plan.python:
        yield Finding(
            "sitecustomize", "ok", f"{plan.engine['name']} is no Python: the launch script's exports reach it"
        )
        return
    environ = launcher.planned_environment(plan, {})
    try:
        told = startup.ask(_interpreter(plan, environ["PATH"]), environ)
    except startup.NoPython as error:
        yield Finding("sitecustomize", "warning", "the start of the server's Python cannot be looked at", str(error))
        return
    need = startup.needed_scope(told)
    setting, scope = f"servers.{plan.name}.sitecustomize.scope", plan.sitecustomize.scope
    if scope == "none":
        forced = sorted(name for name, entry in plan.env.items() if entry.mode == "force")
        level = "warning" if forced else "ok"
        hint = f"mode force has no effect: set {setting}: {need.scope}" if forced and need.scope else ""
        yield Finding("sitecustomize", level, "scope none: the launch script's exports alone", ", ".join(forced), hint)
    elif need.scope is None:
        hint = f"take -S from the command line, or set {setting}: none"
        yield Finding("sitecustomize", "error", "no scope of sitecustomize reaches the workers", need.why, hint)
    elif scope == "server" and need.scope != "server":
        message = f"scope server would not reach the workers, scope {need.scope} does"
        yield Finding("sitecustomize", "error", message, need.why, f"set {setting}: {need.scope}")
    elif scope == "server":
        yield Finding("sitecustomize", "ok", "scope server is what this node needs", need.why)
    else:
        yield _writable(plan, told, home, need)


def _interpreter(plan: Plan, path: str) -> list[str]:
    try:
        return startup.interpreter_of(plan.argv, path, plan.python)
    except startup.NoPython:  # started by a program of another kind; the proof does the same
        return [plan.python]


def _writable(plan: Plan, told: startup.Startup, home: ServerHome, need: startup.Need) -> Finding:
    scope = plan.sitecustomize.scope
    try:
        files = [place.path for place in interpreter.places_of(scope, told, home)]
        directories = {os.path.dirname(place.path) for place in interpreter.missing(scope, told, home)}
    except (interpreter.Refused, OSError) as error:
        return Finding("sitecustomize", "error", f"scope {scope} cannot be put in place", str(error))
    closed = sorted(directory for directory in directories if not os.access(directory, os.W_OK))
    if closed:
        hint = "let lamplighter write there (become: true), or choose another scope"
        return Finding("sitecustomize", "error", f"scope {scope} cannot write to {', '.join(closed)}", hint=hint)
    enough = f"; scope {need.scope} would be enough" if need.scope == "server" else ""
    return Finding("sitecustomize", "ok", f"scope {scope} edits {files[-1]}{enough}", need.why)


def live_report(home: ServerHome) -> dict[str, Any]:
    """Prove the environment of the server that runs now, against the release that it was started from."""
    record = launcher.read_record(home)
    now = launcher.present(record) if record is not None else launcher.Present(None)
    if record is None or now.main is None:
        message = now.note or ("its process is gone" if record is not None else "nothing has been deployed here")
        return {"state": STOPPED, "message": message, "variables": 0, "workers": [], "differences": [], "nccl": ""}
    release = home.release(record["release"])
    plan = release.read_plan()
    members = launcher.members_of(record, now.main)
    holders = live.gpu_holders(record.get("gpus") or ())
    workers = live.workers_of(members, holders, plan.engine if plan is not None else {}, now.main.pid)
    if plan is None:
        reason = f"release {release.name} is damaged or gone: what it gave to its server is not known"
        return {**live.not_proven(workers, reason).to_json(), "release": release.name}
    proof = live.prove_live(
        workers,
        live.expected_of(release),
        record.get("records") or os.path.join(os.path.dirname(record["log"]), "envproof"),
        plan.engine,
        live.version_of(plan, release),
        record["log"] if plan.nccl_proof else None,
    )
    return {**proof.to_json(), "release": release.name}
