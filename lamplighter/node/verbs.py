"""What a request may ask for: the verbs that run in a worker, and those that only read."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from typing import Any, Callable, Iterable, Optional

from lamplighter.node import (
    deploy,
    events,
    hindsight,
    journal,
    preflight,
    reach,
    relay,
    serving,
    standing,
    undeploy,
    wayback,
)
from lamplighter.node.act import files, launcher, lock
from lamplighter.node.events import Exit
from lamplighter.node.layout import ReleaseDirectory, RunDirectory, ServerHome, all_servers, read_json, server_home
from lamplighter.node.observe import confidential, drift, ownership, ports, processes, software
from lamplighter.node.observe.ground import Finding
from lamplighter.node.plan import Plan
from lamplighter.node.stages import releases as catalogue
from lamplighter.node.worker import RESERVES, Run, is_at_work

#: So long may a person who asks for the status wait for a token of each server.
TOKEN_SECONDS = 10.0


def _deploy(run: Run) -> None:
    """Deploy; with ``--if-changed``, the journal says first why the server was not left alone."""
    for reason in run.request.get("because") or ():
        run.progress(reason)
    deploy.deploy(run)


def _warned(verb: Callable[[Run], None]) -> Callable[[Run], None]:
    """Warn first of what the request could not say."""

    def warn_and_do(run: Run) -> None:
        for reason in run.request.get("because") or ():
            run.warn(reason, "fix it before the next deploy")
        verb(run)

    return warn_and_do


#: Verbs that change the node: each runs in a detached worker, under locks, with a journal.
RUNS: dict[str, Callable[[Run], None]] = {
    "deploy": _deploy,
    "rollback": _warned(deploy.roll_back_to),
    "start": _warned(deploy.start_server),
    "restart": _warned(deploy.restart),
    "stop": _warned(deploy.stop_server),
    "undeploy": _warned(undeploy.undeploy),
}


def plan_from_release(request: dict[str, Any], root: str) -> Optional[dict[str, Any]]:
    """Complete a request that the inventory could give no plan: by the current release's, or the newest good one's.

    None where there is no such release.
    """
    home = server_home(root, request["server"]["name"])
    current = home.current_release()
    for release in (*((current,) if current else ()), *catalogue.good_releases(home)):
        known = release.read_plan()
        if known is not None:
            server = {**known["server"], **request["server"]}
            because = f"the inventory gives no plan ({request['unplanned']}); that of release {release.name} is used"
            return {**request, "server": server, "engine": known["engine"], "because": (because,)}
    return None


def status(request: dict[str, Any], root: str) -> dict[str, Any]:
    """Tell for every server the node knows, and the ones asked for, what serves and which run is in progress."""
    asked = request.get("servers") or []
    homes = {home.name: home for home in all_servers(root)}
    for name in asked:
        homes.setdefault(name, server_home(root, name))
    wanted = request.get("wanted") or {}
    seconds = float(request.get("patience") or TOKEN_SECONDS)
    chosen = [homes[name] for name in sorted(homes) if not asked or name in asked]
    found = [_asked(home, request["host"], seconds) for home in chosen]
    if "wanted" in request:
        found = [
            {**each, "drift": standing.find_drift(homes[each["name"]], wanted.get(each["name"])).to_json()}
            for each in found
        ]
    return {"root": root, "servers": found}


def _status_of(home: ServerHome, host: str) -> dict[str, Any]:
    record = launcher.read_record(home)
    found: dict[str, Any] = {"name": home.name, "state": "stopped", "message": "nothing has been deployed here"}
    found["run"] = _run_at_work(home)
    lost = _lost_record(home, host) if found["run"] is None else ""
    if record is None:
        living = preflight.living_members(home)
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
        found["since"] = record.get("since") if record.get("ready") and now.main else None
        if now.main is None:
            found["state"] = "starting" if now.is_restarting else "stopped"
            found["message"] = _joined(_why_gone(record), now.note)
        elif not record.get("ready"):
            found["state"], found["message"] = _unconfirmed(home, record, host)
        elif not ports.listeners(record["port"]):
            found["state"] = "starting" if now.is_other else "unknown"
            found["message"] = _joined(now.note, f"its process is alive, port {record['port']} has no listener")
        elif not preflight.is_answering(record["host"], record["port"]):
            found["state"] = "starting" if now.is_other else "unknown"
            found["message"] = _joined(now.note, f"port {record['port']} accepts and does not answer")
        else:
            found["state"], found["message"] = "serving", now.note
        found["message"] = _joined(found["message"], lost)
    last = home.all_runs()[-1:]
    found["last_run"] = _last_run(last[0]) if last else None
    return found


def _lost_record(home: ServerHome, host: str) -> str:
    """Say that ``server.json`` is missing or damaged, and what repairs that; "" where it is as it should be."""
    if not launcher.is_record_lost(home):
        return ""
    what = "damaged" if os.path.lexists(home.record) else "missing"
    return f"{home.record} is {what}; `{events.invocation('deploy', host, home.name)}` writes it again"


def _asked(home: ServerHome, host: str, seconds: float = TOKEN_SECONDS) -> dict[str, Any]:
    """Tell how the server stands; one that seems to serve is asked for a token, and its workers are looked for.

    With a hung engine all else answers.
    """
    found, record = _status_of(home, host), launcher.read_record(home)
    if found["state"] != "serving" or record is None:
        return found
    trouble = standing.trouble_of(home, seconds) if record.get("ready") else serving.first_answer(home, record, seconds)
    lost = standing.lost_workers(home)
    message = _joined(found["message"], trouble or "", *lost)
    return {**found, "state": "serving" if trouble is None else "unknown", "message": message}


def _last_run(directory: RunDirectory) -> dict[str, Any]:
    """Tell how the newest run stands: at work, ended, or killed without a last word, and at which stage."""
    told = journal.read(directory.journal)
    end = _end_in(told)
    known = {"id": directory.run_id, "verb": None, "by": None, "stage": None, "since": None, "outcome": None}
    if told:
        known.update({"verb": told[0].get("verb"), "by": told[0].get("by"), "since": told[0].get("t")})
        known["stage"] = next((event["stage"] for event in reversed(told) if event.get("stage")), None)
    if end is not None:
        known.update({"state": "ended", "outcome": end.get("outcome"), "stage": end.get("stage")})
    else:
        known["state"] = "at work" if is_at_work(directory) else "killed"
    return known


def _end_in(told: list[events.Event]) -> Optional[events.Event]:
    return next((event for event in reversed(told) if event["event"] == events.END), None)


def _unconfirmed(home: ServerHome, record: dict[str, Any], host: str) -> tuple[str, str]:
    """Judge a server that was started and never confirmed: its run is at work, was killed, or ended without that."""
    run = home.run(record["run"])
    if is_at_work(run):
        return "starting", "its process is alive and has not been ready yet"
    end = _end_in(journal.read(run.journal))
    how = "was killed before it had"
    if end is not None and end.get("cause") != "abandoned":  # the word of a run that took over from a killed one
        how = f"ended with exit code {end.get('exit_code')} and has not"
    why = f"run {run.run_id} {how} confirmed it; `{events.invocation('deploy', host, home.name)}` repairs that"
    if ports.listeners(record["port"]) and preflight.is_answering(record["host"], record["port"]):
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


def _run_at_work(home: ServerHome) -> Optional[dict[str, Any]]:
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


def releases(request: dict[str, Any], root: str) -> dict[str, Any]:
    """List the releases of the servers asked for, newest first: what each is worth and what `rollback` would take."""
    return {"servers": [_releases_of(server_home(root, name)) for name in request["servers"]]}


def _releases_of(home: ServerHome) -> dict[str, Any]:
    current, earlier = home.current_release(), catalogue.earlier_release(home)
    rows: list[dict[str, Any]] = []
    for release in home.all_releases():
        verdict = release.read_verdict() or {}
        plan = release.read_plan() or {}
        rows.append(
            {
                "release": release.name,
                "verdict": verdict.get("verdict") or "unproven",
                "is_current": current is not None and release.name == current.name,
                "is_rollback_target": release == earlier,
                "is_adopted": bool(plan.get("adopted")),
                "written": os.stat(release.plan).st_mtime,
                "judged": verdict.get("t"),
                "bytes": _size_of(release.path),
                "run": verdict.get("run"),
                "cause": verdict.get("cause"),
                "message": verdict.get("message") or "",
            }
        )
    rows.sort(key=lambda row: float(row["judged"] or row["written"]), reverse=True)
    return {"name": home.name, "releases": rows}


def _size_of(directory: str) -> int:
    total = 0
    for base, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(base, name)).st_size
    return total


def take_place(run: RunDirectory) -> bool:
    """Make the directory of ``run``; False where it is there already: of several who try, one has made it.

    Raises OSError.
    """
    runs = os.path.dirname(run.path)
    files.make_directory(runs)
    try:
        os.mkdir(run.path, 0o700)
    except FileExistsError:
        return False
    files.sync_directory(runs)
    return True


def _forbid(home: ServerHome, request: dict[str, Any], outcome: str, code: Exit, message: str, **fields: Any) -> bool:
    """See that the run asked for never begins, if it has not; tell whether that is so, and its journal says it.

    The request that asks for it may still be on its way here, or looking at the server before it begins.
    """
    run = home.run(request["to"])
    try:
        if not take_place(run):
            return False
        about = {"host": request["host"], "server": home.name, "run": run.run_id}
        told = journal.Journal(run.journal, run.ballast, about)
    except OSError:  # nothing is sure then, and nothing is claimed
        return False
    asked = request["forbid"]
    told.write(events.run_started(asked["verb"], asked["by"], None))
    told.write(_ended(outcome, code, message, serving.look(home).record, **fields))
    told.close()
    return True


def cancel(request: dict[str, Any], root: str) -> None:
    """Ask the run at work to end: before ``stop`` all stays as it is, afterwards it rolls back. Shows its events.

    An order that has been heard before only shows the run that it was for.
    """
    home = server_home(root, request["servers"][0])
    is_forbidden = request.get("forbid") and _forbid(
        home,
        request,
        "refused",
        Exit.INTERRUPTED,
        f"cancelled by {request['by']} before it began; nothing was touched",
        cause="cancelled",
        hint="deploy again when you like",
    )
    directory = _run_told(home, request.get("order"))
    if directory is not None:
        relay.follow(directory, after=int(request.get("after") or 0))
        return
    directory = home.run(request["to"]) if is_forbidden else _run_to_cancel(home, request.get("to"))
    if directory is None:
        relay.send({"event": events.RESULT, "error": _why_nothing_to_cancel(home, request.get("to"))})
        relay.send({"event": events.BYE})
        return
    files.Room.give_back = lambda: _give_back_reserve(directory)
    try:
        known = read_json(directory.cancel, orders=list) or {"by": request["by"], "t": time.time(), "orders": []}
        files.write_json(directory.cancel, {**known, "orders": [*known["orders"], request.get("order")]})
    except OSError as error:
        told = f"the node takes no writes, so the run cannot be told: {error}"
        relay.send({"event": events.RESULT, "error": told, "hint": "make room there, then cancel again"})
        relay.send({"event": events.BYE})
        return
    relay.follow(directory, after=int(request.get("after") or 0))


def _why_nothing_to_cancel(home: ServerHome, wanted: Optional[str]) -> str:
    if not wanted:
        return f"no run of server {home.name} is at work on this node"
    if not os.path.isdir(home.run(wanted).path):
        return f"there is no run {wanted} of server {home.name} on this node"
    known = _last_run(home.run(wanted))
    how = f"it ended {known['outcome']}" if known["state"] == "ended" else "it was killed"
    return f"run {wanted} of server {home.name} is not at work: {how}"


def _run_told(home: ServerHome, order: Optional[str]) -> Optional[RunDirectory]:
    """Return the run that has been told to end by ``order``."""
    for directory in reversed(home.all_runs()):
        if order is not None and order in (read_json(directory.cancel, orders=list) or {"orders": ()})["orders"]:
            return directory
    return None


def _give_back_reserve(directory: RunDirectory) -> bool:
    """Free the room for one record, the one that the run itself would use last."""
    for reserve in map(directory.reserve, range(RESERVES)):
        with contextlib.suppress(OSError):
            os.unlink(reserve)
            return True
    return False


def _run_to_cancel(home: ServerHome, wanted: Optional[str]) -> Optional[RunDirectory]:
    """Return the run asked for, or the one that holds the server's lock (others may wait for it), if it is at work."""
    holder = lock.holder_of(home.lock) or {}
    run_id = wanted or holder.get("run")
    for directory in reversed(home.all_runs()):
        if run_id in (None, directory.run_id) and is_at_work(directory) and not journal.has_ended(directory.journal):
            return directory
    return None


def check(request: dict[str, Any], root: str) -> dict[str, Any]:
    """Answer the preflight's questions, and say who would be stopped by a deploy, who would be left, and why."""
    plan = Plan.load(request["server"])
    home = server_home(root, plan.name)
    resolved, engine, host = preflight.resolve_gpus(plan), request["engine"], request["host"]
    found = preflight.examine(plan, engine, home, resolved, host, request=request)
    change = wayback.Change(plan, engine, request["release"]["digest"])
    findings = [
        *found.findings,
        *wayback.examine(home, change, catalogue.way_back(home), found.claims, host),
        *reach.scope_findings(plan, home),
        *software.changed_files(preflight.start_of(plan, engine), request.get("lint") or {}),
        *_failed_before(home, request),
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
    verdict = _verdict_on(home, request)
    if verdict.get("verdict") == "bad":
        digest, run = request["release"]["digest"], str(verdict.get("run"))
        message = f"release {digest} failed on {_date_of(verdict)}: a deploy tries it again, --if-changed does not"
        why = f"{verdict.get('message') or verdict.get('cause') or 'why is not known'} (run {run})"
        hint = f"`{events.invocation('logs', request['host'], home.name, '--run', run)}` shows its log"
        yield Finding("bad_release", "warning", message, why, hint)


def _date_of(verdict: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(float(verdict.get("t") or 0)))


def preview(request: dict[str, Any], root: str) -> dict[str, Any]:
    """Answer as ``check`` does, with what serves: its state, its release with plan and files, its drift.

    And which secrets of the request are others than those of that release. Reads only.
    """
    home = server_home(root, request["server"]["name"])
    release = home.current_release()
    return {
        **check(request, root),
        "status": _asked(home, request["host"]),
        "current": None if release is None else _described(release),
        "changed_secrets": _changed_secrets(release, request),
        "drift": standing.find_drift(home, None).to_json(),
    }


def _described(release: ReleaseDirectory) -> dict[str, Any]:
    """Return plan and files of a release; of one that was adopted no file, since its owner's secrets may be in it."""
    known = release.read_plan() or {}
    found: dict[str, Any] = {"name": release.name, "digest": release.digest, "server": known.get("server"), "files": {}}
    if known.get("adopted"):
        return {**found, "adopted": True, "server": {**known["server"], "argv": [], "secrets": []}}
    stored = read_json(os.path.join(release.path, "release.json"), files=dict) or {"files": {}}
    for name in stored["files"]:
        text = files.read_text(os.path.join(release.path, name))
        if text is not None:
            found["files"][name] = text
    return found


def facts(request: dict[str, Any], root: str) -> dict[str, Any]:
    """Return all that checks may ask about the node and one server, its status and its drift included."""
    plan = Plan.load(request["server"])
    home = server_home(root, plan.name)
    return {
        "root": root,
        "directory": home.path,
        **standing.all_facts(plan, request["engine"], home),
        "server": _status_of(home, request["host"]),
        "drift": standing.find_drift(home, request.get("wanted")).to_json(),
    }


@dataclasses.dataclass(frozen=True)
class Before:
    """What ``deploy --if-changed`` found: the event that ends it here, or the reasons to go on."""

    end: Optional[events.Event]
    reasons: tuple[str, ...] = ()


def look_before(request: dict[str, Any], root: str) -> Before:
    """Decide whether a deploy may leave the server alone: it is well, as wanted, without drift, and not too old.

    A release that is known to be bad is not tried again: exit 9 while another one serves, 7 when nothing does.
    """
    home = server_home(root, request["server"]["name"])
    digest = request["release"]["digest"]
    found = standing.find_drift(home, request["wanted"])
    reasons = _reasons(home, request, standing.since_deploy(home, found))
    now = serving.look(home, Plan.load(request["server"]), request["engine"])
    if not reasons:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(float((now.record or {}).get("since") or 0)))
        message = f"release {digest} serves since {since}"
        if not found.differences:
            return Before(_ended("unchanged", Exit.OK, f"{message}; nothing differs", now.record))
        first = found.differences[0]
        command = events.invocation("env", request["host"], home.name)
        hint = f"{command} shows who overwrote it, and what to do"
        message += f"; what differs did so right after its deploy: {first}"
        return Before(_ended("unchanged", Exit.DEGRADED, message, now.record, cause="environment", hint=hint))
    verdict = _verdict_on(home, request)
    if verdict.get("verdict") != "bad" or lock.holder_of(home.lock) is not None:
        return Before(None, tuple(reasons))
    end = _ended(
        "refused",
        Exit.ROLLED_BACK if now.record else Exit.NOT_READY,
        f"release {digest} failed on {_date_of(verdict)} and is not tried again; {now.as_before}",
        now.record,
        cause="bad_release",
        evidence=verdict.get("message") or "",
        hint="fix the cause and change the inventory, or try it again with a deploy without --if-changed",
        release=digest,
    )
    return Before(end, tuple(reasons))


def _reasons(home: ServerHome, request: dict[str, Any], differences: Iterable[drift.Difference]) -> list[str]:
    state = _status_of(home, request["host"])
    if state["run"] is not None:
        return [f"a run is at work: {state['run'].get('id')}"]
    if state["state"] != "serving":
        return [f"it does not serve ({state['state']}): {state['message']}"]
    reasons = standing.lost_workers(home)
    trouble = standing.trouble_of(home) if not reasons else None  # a reason is enough: the other one may take a minute
    reasons += [] if trouble is None else [trouble]
    reasons += [f"{each.kind}: {each}" for each in differences]
    if not reasons and home.release(state["release"]).digest != request["release"]["digest"]:
        reasons.append(f"release {state['release']} serves, {request['release']['digest']} is wanted")
    reasons += [f"secret {name} has another value" for name in _changed_secrets(home.current_release(), request)]
    age, most = standing.age_of(home), request.get("max_age")
    if most is not None and age is not None and age >= most:
        reasons.append(f"it has run for {age / 86400:.1f} days, at most {most / 86400:.1f} are wanted")
    return reasons


def _verdict_on(home: ServerHome, request: dict[str, Any]) -> dict[str, Any]:
    """Return what became of the very thing that is asked for when it ran last; {} where it never ran."""
    for release in reversed(home.releases_of(request["release"]["digest"])):
        is_same = (release.read_plan() or {}).get("server") == request["server"]
        if is_same and not _changed_secrets(release, request):
            return release.read_verdict() or {}
    return {}


def _changed_secrets(release: Optional[ReleaseDirectory], request: dict[str, Any]) -> list[str]:
    known = release.read_environment() if release is not None else {}
    return sorted(name for name, value in (request.get("secrets") or {}).items() if known.get(name) != value)


def _ended(outcome: str, code: Exit, message: str, record: Optional[dict[str, Any]], **fields: Any) -> events.Event:
    known: dict[str, Any] = {"stage": None, "phase": None, "cause": None, "evidence": None, "hint": "", "durations": {}}
    release = record["release"] if record else None
    times = {"ready_seconds": None, "downtime_seconds": None}
    return events.ended(outcome, code, message, **{**known, **times, "release": release, "serving": record, **fields})


def env(request: dict[str, Any], root: str) -> dict[str, Any]:
    """Prove the live environment of every worker of one server."""
    return reach.live_report(server_home(root, request["servers"][0]))


def logs(request: dict[str, Any], root: str) -> None:
    """Send the last lines of the log of what serves (or served last), or of the server that the run ``to`` started.

    And what the log gains, when asked to follow.
    """
    home = server_home(root, request["servers"][0])
    wanted = request.get("to")
    record = launcher.read_record(home)
    if wanted:
        path, why = _log_of_run(home, wanted)
    else:
        path, why = (record or {}).get("log"), "nothing has been deployed there"
    if path is None:
        relay.send({"event": events.LOG, "server": home.name, "text": "", "missing": True, "why": why})
        return
    try:
        with open(path, "rb") as file:
            hide = confidential.of_homes([home]).hide
            _send_tail(file, home.name, hide, int(request.get("lines") or 100))
            while request.get("follow"):
                data = file.read(65536)
                if data:
                    _send_text(home.name, hide, data)
                else:
                    relay.send({"event": events.BEAT})
                    time.sleep(0.25)
    except OSError as error:
        relay.send(
            {"event": events.LOG, "server": home.name, "text": "", "missing": True, "path": path, "why": error.strerror}
        )


def _log_of_run(home: ServerHome, wanted: str) -> tuple[Optional[str], str]:
    """Return the log of the server that a run started (of the new one, where it rolled back), or why there is none."""
    run = next((run for run in home.all_runs() if run.run_id == wanted), None)
    if run is None:
        return None, f"the node has no run {wanted} of it"
    found = [path for path in (run.launch("new").log, run.launch("old").log) if os.path.exists(path)]
    return (found[0], "") if found else (None, f"run {wanted} started no server")


def _send_tail(file: Any, name: str, hide: Callable[[Any], Any], lines: int) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - lines * 400))
    data = file.read()
    _send_text(name, hide, b"\n".join(data.split(b"\n")[-lines - 1 :]))


def _send_text(name: str, hide: Callable[[Any], Any], data: bytes) -> None:
    relay.send({"event": events.LOG, "server": name, "text": hide(data.decode("utf-8", "replace"))})


def attach(request: dict[str, Any], root: str) -> None:
    """Show a run from its first event (or from ``after``), and follow it if it is still going on.

    With ``forbid`` the run that is asked for ends here, if it has not begun: whoever asked has lost contact.
    """
    home = server_home(root, request["servers"][0])
    wanted = request.get("to")
    if wanted and request.get("forbid"):
        message = "contact was lost before the run began; nothing was touched"
        _forbid(home, request, "unreachable", Exit.UNREACHABLE, message, hint="run the same command again")
    runs = [run for run in home.all_runs() if not wanted or run.run_id == wanted]
    runs = [run for run in runs if os.path.exists(run.journal) or is_at_work(run)]
    at_work = (lock.holder_of(home.lock) or {}).get("run")  # not a newer one that was refused because of it
    runs = [run for run in runs if run.run_id == at_work] or runs
    if not runs:
        which = f"run {wanted}" if wanted else "run"
        relay.send({"event": events.RESULT, "error": f"no {which} of server {home.name} on this node"})
        relay.send({"event": events.BYE})
        return
    relay.follow(runs[-1], after=int(request.get("after") or 0))


#: Verbs that read, and answer with one object.
READING: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "status": status,
    "check": check,
    "diagnose": hindsight.diagnose,
    "env": env,
    "facts": facts,
    "plan": preview,
    "releases": releases,
}
