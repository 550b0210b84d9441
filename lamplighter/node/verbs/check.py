"""What a deploy would meet and change, and the facts for checks. Reads only."""

from __future__ import annotations

import os
from typing import Any, Iterable

from lamplighter.node import events
from lamplighter.node.finding import Finding
from lamplighter.node.gpu import choice
from lamplighter.node.health import drift, hold, preflight, renamed, snapshot, unlisted, wayback
from lamplighter.node.keeper import ownership
from lamplighter.node.layout import ReleaseDirectory, ServerHome, read_json, server_home
from lamplighter.node.plan import Plan
from lamplighter.node.stages import releases as catalogue
from lamplighter.node.start import ground, software, words
from lamplighter.node.system import files, processes
from lamplighter.node.variables import scope
from lamplighter.node.verbs import releases, status


def check(request: dict[str, Any], root: str) -> dict[str, Any]:
    """Answer the preflight's questions, and say who would be stopped by a deploy, who would be left, and why."""
    home = server_home(root, request["server"]["name"])
    plan = renamed.plan_of(request, home)
    resolved, host = choice.resolve_gpus(plan), request["host"]
    found = preflight.examine(plan, home, resolved, host, request=request)
    findings = [
        *hold.findings(home, host),
        *found.findings,
        *wayback.examine(home, plan, request["release"]["digest"], catalogue.way_back(home), found.claims, host),
        *words.examine(ground.start_of(plan, secrets=request.get("secrets")), plan),
        *scope.scope_findings(plan, home),
        *software.changed_files(ground.start_of(plan), request.get("lint") or {}),
        *_failed_before(home, request),
        *unlisted.findings(home, request),
    ]
    return {
        "findings": [vars(finding) for finding in findings],
        "would_stop": [
            {
                "pid": claim.process.pid,
                "user": processes.user_name(claim.process.uid),
                "title": ownership.shown_command(claim.process),
                "why": f"{claim.kind}: {claim.why}" + (f"; lives in {claim.home}" if claim.home else ""),
                "command": ownership.shown_command(claim.process),
                "home": claim.home,
                "action": "stop" if claim.may_be_stopped else "leave",
            }
            for claim in found.claims
        ],
    }


def _failed_before(home: ServerHome, request: dict[str, Any]) -> Iterable[Finding]:
    """Warn where the very thing that a deploy would start has failed here before."""
    verdict = releases.verdict_on(home, request)
    if verdict.get("verdict") == "bad":
        digest, run = request["release"]["digest"], str(verdict.get("run"))
        message = (
            f"release {digest} failed on {releases.date_of(verdict)}: a deploy tries it again, --if-changed does not"
        )
        why = f"{verdict.get('message') or verdict.get('cause') or 'why is not known'} (run {run})"
        hint = f"`{events.invocation('logs', request['host'], home.name, '--run', run)}` shows its log"
        yield Finding("bad_release", "warning", message, why, hint)


def preview(request: dict[str, Any], root: str) -> dict[str, Any]:
    """Answer as ``check`` does, with what serves: its state, its release with plan and files, its drift.

    And which secrets of the request are others than those of that release. Reads only.
    """
    home = server_home(root, request["server"]["name"])
    release = home.current_release()
    return {
        **check(request, root),
        "status": status.describe(home, request["host"]),
        "current": None if release is None else _described(release),
        "changed_secrets": releases.changed_secrets(release, request),
        "drift": drift.find_drift(home, None).to_json(),
    }


def _described(release: ReleaseDirectory) -> dict[str, Any]:
    """Return plan and files of a release; of one that was adopted no file, since its owner's secrets may be in it."""
    known = release.read_request() or {}
    found: dict[str, Any] = {"name": release.name, "digest": release.digest, "server": known.get("server"), "files": {}}
    if known.get("adopted"):
        return {**found, "adopted": True, "server": {**known["server"], "argv": [], "secrets": []}}
    stored = read_json(os.path.join(release.path, "release.json"), files=dict) or {"files": {}}
    for name in stored["files"]:
        text = files.read_text(os.path.join(release.path, name))
        if text is not None:
            found["files"][name] = text
    return found


def released(request: dict[str, Any], root: str) -> dict[str, Any]:
    """Return the plan of the release that became ready last as ``server``; None where there is none."""
    release = server_home(root, request["servers"][0]).current_release()
    return {"server": None if release is None else _described(release)["server"]}


def facts(request: dict[str, Any], root: str) -> dict[str, Any]:
    """Return all that checks may ask about the node and one server, its status and its drift included."""
    plan = Plan.load(request)
    home = server_home(root, plan.name)
    return {
        "root": root,
        "directory": home.path,
        **snapshot.all_facts(plan, home),
        "server": status.status_of(home, request["host"]),
        "drift": drift.find_drift(home, request.get("wanted")).to_json(),
    }


def env(request: dict[str, Any], root: str) -> dict[str, Any]:
    """Prove the live environment of every worker of one server."""
    return scope.live_report(server_home(root, request["servers"][0]))
