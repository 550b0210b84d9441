"""How a server stands on its node: all facts for the checks, its drift, and whether a deploy may leave it alone.

Reads only, but for ``write_down``: that notes in ``deployed.json`` what a release was like when it became ready, which
drift is measured against later.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import os
import re
import time
from typing import Any, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

from lamplighter.node import arguments, confidential
from lamplighter.node.gpu import driver, freeing, gpus
from lamplighter.node.health import drift, facts
from lamplighter.node.health.drift import Difference
from lamplighter.node.keeper import launcher, systemd
from lamplighter.node.keeper.launched import unit_in
from lamplighter.node.layout import ReleaseDirectory, ServerHome, read_json
from lamplighter.node.plan import Plan
from lamplighter.node.start import ground, probe, startup
from lamplighter.node.system import disks, distributions, files, http, ports, processes
from lamplighter.node.system.processes import Process
from lamplighter.node.variables import scope
from lamplighter.node.worker import Run

COUNTERS_SECONDS = 5.0
#: A process that is stopped, or waits in the kernel, for so long does not do so by the way.
STUCK_SECONDS = 2.0
STUCK = {
    "T": "is stopped by a signal (kill -CONT lets it go on)",
    "t": "is held by a debugger",
    "D": "hangs in the kernel (state D)",
}
#: Of the newest lines of a log, bytes.
MOST_LOG_BYTES = 1 << 20
#: A server under load may take long for its first token; one that hangs never gives it.
TOKEN_SECONDS = 60.0

#: For the model's name, which the HTTP process tells alone.
MODELS_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Drift:
    """Every difference found, and what could not be compared, with the reason."""

    differences: Tuple[Difference, ...] = ()
    unknown: Tuple[str, ...] = ()

    def to_json(self) -> Dict[str, Any]:
        return {
            "differences": [each.to_json() for each in self.differences],
            "unknown": list(self.unknown),
        }


# -------------------------------------------------------------------------------------------------- written down


def write_down(run: Run) -> None:
    """Note what the release that has just become current is like. Never fails a run: a loss is a warning."""
    try:
        record = launcher.read_record(run.home) or {}
        process = processes.read_process(int(record["pid"]))
        report = scope.live_report(run.home)
        files.write_json(
            run.home.deployed,
            {
                **{name: record[name] for name in ("run", "attempt", "release")},
                "argv": run.confidential.hide(process.argv) if process else None,
                "engine": _installed_engine(run.plan, run.engine, run.release),
                "driver": _driver(),
                "drop_ins": _drop_ins(run.home),
                "environment": [[each.name, each.found] for each in _in_environment(report, [])],
                "crew": _crew(run.engine, members_of(record), [each["pid"] for each in report["workers"]]),
            },
        )
    except Exception as error:
        run.warn(f"drift will not be told: {type(error).__name__}: {error}", "deploy again once that is fixed")


def _crew(engine: Mapping[str, Any], members: Sequence[Process], workers: Collection[int]) -> List[Dict[str, Any]]:
    """Tell who the server cannot do without: whom its engine needs, and ``workers``, who hold its GPUs or compute."""
    needed = [re.compile(pattern) for pattern in (engine.get("processes") or {}).get("needed_workers", ())]
    return [
        {"pid": each.pid, "start": each.start, "title": each.title}
        for each in members
        if each.pid in workers or any(pattern.search(each.title) for pattern in needed)
    ]


def _installed_engine(plan: Plan, engine: Mapping[str, Any], release: Optional[ReleaseDirectory]) -> Dict[str, Any]:
    distribution = engine.get("distribution")
    if not distribution:
        return {}
    try:
        found = ground.installed(ground.start_of(plan, engine, release))
    except (startup.NoPython, ground.NoAnswer) as error:
        return {"error": str(error)}
    if not found.place:
        return {"error": found.trouble}
    return {"distribution": distribution, "dist_info": found.place, **distributions.engine_files(found.place)}


def _driver() -> Dict[str, Optional[str]]:
    """Return the version of the loaded driver, and of the library that nvidia-smi speaks through."""
    versions = {cells["driver_version"] for cells in gpus.details(("driver_version",)).values()}
    return {"module": driver.loaded_driver(), "library": ", ".join(sorted(versions)) or None}


# --------------------------------------------------------------------------------------------------------- drift


def find_drift(home: ServerHome, wanted: Optional[Mapping[str, Any]]) -> Drift:
    """Compare the server with its release and the inventory. ``wanted``: {digest, server, files} of the inventory now.

    Takes some calls of nvidia-smi and a look at every file of the engine (not into it, unless it was touched). Never
    raises: records of another version of ours are compared as far as they can be read.
    """
    try:
        return _find_drift(home, wanted)
    except Exception as error:
        return Drift(unknown=(f"the comparison failed: {type(error).__name__}: {error}",))


def _find_drift(home: ServerHome, wanted: Optional[Mapping[str, Any]]) -> Drift:
    record = launcher.read_record(home)
    if record is None:
        return Drift()
    release = home.release(record["release"])
    stored = release.read_plan()
    if stored is None:
        return Drift(unknown=(f"release {release.name} is damaged, or not on the node any more",))
    written = _manifest(release)
    if written is not None and "files" not in written:
        return Drift(unknown=(f"release {release.name} was not made by lamplighter",))
    deployed = read_json(home.deployed) or {}
    if any(deployed.get(name) != record.get(name) for name in ("run", "attempt", "release")):
        deployed = {}
    now = launcher.present(record)
    found: List[Difference] = []
    unknown: List[str] = []
    if wanted is not None:
        found += _from_inventory(wanted, release, stored["server"])
    if written is None and (wanted is None or wanted["digest"] != release.digest):
        unknown.append(f"files of release {release.name}: its release.json cannot be read")
    found += [
        *_in_release(release, wanted),
        *_in_env_mode(release),
        *_beside_the_release(release),
        *_in_current(home, record),
    ]
    if now.main is not None:
        found += _in_process(home, now.main, deployed, unknown)
        found += _in_environment(scope.live_report(home), unknown)
    else:
        found += _in_its_place(record, deployed)
    found += _in_engine(deployed, unknown)
    found += _in_driver(deployed, unknown)
    found += [*_in_unit(home, record), *_in_drop_ins(home, deployed)]
    if not record.get("ready"):
        unknown.append("argv, engine and driver: the last start has not become ready")
    elif not deployed:
        unknown.append("argv, engine and driver: not written down when this release became ready")
    return Drift(tuple(found), tuple(unknown))


def since_deploy(home: ServerHome, found: Drift) -> List[Difference]:
    """Return the differences that another deploy could mend: not what was so right after the last one already.

    A variable that the server itself overwrites is so again after every deploy.
    """
    written = (read_json(home.deployed, environment=list) or {"environment": ()})["environment"]
    known = [tuple(pair) for pair in written if isinstance(pair, list)]
    return [
        each for each in found.differences if each.kind != drift.ENVIRONMENT or (each.name, each.found) not in known
    ]


def _from_inventory(
    wanted: Mapping[str, Any], release: ReleaseDirectory, deployed: Mapping[str, Any]
) -> List[Difference]:
    if wanted["digest"] == release.digest:
        return []
    found = drift.of_plans(wanted["server"], deployed)
    if not found:  # another template, or another version of lamplighter
        now = {name: entry["sha256"] for name, entry in _recorded_files(release).items()}
        asked = {name: digest for name, digest in wanted["files"].items() if name != "release.json"}
        found = drift.of_digests(drift.INVENTORY, asked, dict(now))
    return found or [Difference(drift.INVENTORY, "release", wanted["digest"], release.digest)]


def _manifest(release: ReleaseDirectory) -> Optional[Dict[str, Any]]:
    """Return the release's ``release.json``; None where it is missing or damaged."""
    written = read_json(os.path.join(release.path, "release.json"))
    listed = (written or {}).get("files", {})
    entries = listed.values() if isinstance(listed, dict) else (None,)
    is_whole = all(
        isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and isinstance(entry.get("mode"), str)
        for entry in entries
    )
    return written if is_whole else None


def _recorded_files(release: ReleaseDirectory) -> Dict[str, Any]:
    return dict((_manifest(release) or {}).get("files") or {})


def _in_release(release: ReleaseDirectory, wanted: Optional[Mapping[str, Any]]) -> List[Difference]:
    """Compare the files of the release with their digests; the inventory knows them, too, where it is the same."""
    recorded = _recorded_files(release)
    digests = {name: entry["sha256"] for name, entry in recorded.items()}
    if wanted is not None and wanted["digest"] == release.digest:
        digests = dict(wanted["files"])
    now = {name: _sha256(os.path.join(release.path, name)) for name in digests}
    modes = {f"{name} mode": entry["mode"] for name, entry in recorded.items() if now.get(name) is not None}
    modes_now = {name: _mode(os.path.join(release.path, name[: -len(" mode")])) for name in modes}
    found = drift.of_digests(drift.RELEASE, digests, now)
    return found + drift.of_digests(drift.RELEASE, modes, modes_now)


def damage(release: ReleaseDirectory) -> List[Difference]:
    """Return what of a release is no longer as it was written, or gone; nothing is known of what has no digests."""
    return _in_release(release, None) + ([] if os.path.isfile(release.env) else _in_env_mode(release))


def _in_env_mode(release: ReleaseDirectory) -> List[Difference]:
    """The file of secrets, which every release has: no digest knows what is in it, its mode is always the same."""
    return drift.of_digests(drift.RELEASE, {"env mode": "0600"}, {"env mode": _mode(release.env)})


def _beside_the_release(release: ReleaseDirectory) -> List[Difference]:
    """Find what was put where the server imports from; bytecode is Python's own."""
    directory = os.path.join(release.path, "pysite")
    try:
        added = sorted(set(os.listdir(directory)) - {"sitecustomize.py", "__pycache__"})
    except OSError:
        return []
    now = {f"pysite/{name}": _sha256(os.path.join(directory, name)) or "no file" for name in added}
    return drift.of_digests(drift.RELEASE, {}, dict(now))


def _in_current(home: ServerHome, record: Mapping[str, Any]) -> List[Difference]:
    """What the next start, and a rollback, take for the release that became ready last."""
    if not record.get("ready"):
        return []
    current = home.current_release()
    found = current.name if current is not None else None
    return [] if found == record["release"] else [Difference(drift.RELEASE, "current", record["release"], found)]


def _sha256(path: str) -> Optional[str]:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None


def _mode(path: str) -> Optional[str]:
    try:
        return f"{os.stat(path).st_mode & 0o7777:04o}"
    except OSError:
        return None


def _in_process(
    home: ServerHome, main: processes.Identity, deployed: Mapping[str, Any], unknown: List[str]
) -> List[Difference]:
    process = processes.read_process(main.pid)
    if process is None or not deployed.get("argv"):
        return []
    if not process.argv:
        unknown.append(f"argv of pid {main.pid}: it shows none")
        return []
    shown = confidential.of_homes([home]).hide(process.argv)
    return drift.of_words(drift.ARGV, "argv", deployed["argv"], shown)


def _in_its_place(record: Mapping[str, Any], deployed: Mapping[str, Any]) -> List[Difference]:
    """Compare whoever listens on the port of a server that is gone: somebody may have started it by hand."""
    for pid in ports.owners(int(record["port"])):
        process = processes.read_process(pid)
        if process is not None:
            name = f"process on port {record['port']}"
            other = Difference(drift.PROCESS, name, f"pid {record['pid']}", f"pid {pid} ({process.title})")
            known, shown = deployed.get("argv"), arguments.without_secrets(process.argv, drift.HIDDEN)
            return [other, *(drift.of_words(drift.ARGV, "argv", known, shown) if known else ())]
    return []


def _in_environment(report: Mapping[str, Any], unknown: List[str]) -> List[Difference]:
    if report["state"] == "inconclusive":
        unknown.append(f"environment: {report['message']}")
    return [
        Difference(
            drift.ENVIRONMENT,
            each["name"],
            each["expected"],
            each["found"],
            f"{each['title']}, pid {each['pid']}: {each['by']}",
        )
        for each in report["differences"]
    ]


def _in_engine(deployed: Mapping[str, Any], unknown: List[str]) -> List[Difference]:
    known = deployed.get("engine") or {}
    if not known:
        return []
    if known.get("error"):
        unknown.append(f"engine: {known['error']}")
    if not known.get("dist_info"):
        return []
    now = _engine_now(known)
    return drift.of_engine(known, now, known["distribution"])


def _engine_now(known: Mapping[str, Any]) -> Dict[str, Any]:
    """Look at the engine again; after an upgrade its metadata lies in a directory of another name beside the old."""
    site = os.path.dirname(known["dist_info"])
    place = distributions.find_distribution([site], known["distribution"])
    if place is None:
        return {"version": None}
    same = distributions.version_in(place) == known.get("version")
    return distributions.engine_files(place, known) if same else {"version": distributions.version_in(place)}


def _in_driver(deployed: Mapping[str, Any], unknown: List[str]) -> List[Difference]:
    known = deployed.get("driver") or {}
    if not any(known.values()):
        return []
    now = _driver()
    if known.get("library") is not None and now["library"] is None:
        unknown.append("driver: nvidia-smi does not tell its version")
        now["library"] = known["library"]
    names = {"module": "driver (kernel module)", "library": "driver (nvidia-smi)"}
    return [
        Difference(drift.DRIVER, names[key], known.get(key), now[key])
        for key in names
        if known.get(key) != now[key] and known.get(key) is not None
    ]


def _in_unit(home: ServerHome, record: Mapping[str, Any]) -> List[Difference]:
    committed = read_json(home.unit) or {}
    unit = unit_in(committed)
    if unit is None or not record.get("unit") or not committed.get("text"):
        return []
    path = os.path.join(systemd.Manager(unit.manager_uid).directory, unit.name)
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            text: Optional[str] = file.read()
    except OSError:
        text = None
    return drift.of_units(committed["text"], text, unit.name)


def _drop_ins(home: ServerHome) -> Dict[str, str]:
    """Read what `systemctl edit` and administrators add to the unit; ours, there for a moment only, is none."""
    unit = unit_in(read_json(home.unit) or {})
    if unit is None:
        return {}
    manager = systemd.Manager(unit.manager_uid)
    found = {}
    for place in (manager.directory, manager.runtime_directory):
        directory = os.path.join(place, f"{unit.name}.d")
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(directory)):
                if name.endswith(".conf") and name != systemd.HOLD:
                    with open(os.path.join(directory, name), encoding="utf-8", errors="replace") as file:
                        found[f"{unit.name}.d/{name}"] = file.read()
    return found


def _in_drop_ins(home: ServerHome, deployed: Mapping[str, Any]) -> List[Difference]:
    before = deployed.get("drop_ins")
    if before is None:  # nothing was written down when the release became ready
        return []
    now = _drop_ins(home)
    names = sorted({*before, *now})
    return [each for name in names for each in drift.of_drop_in(before.get(name), now.get(name), name)]


# ------------------------------------------------------------------------------------------------------ left alone


def trouble_of(home: ServerHome, seconds: float = TOKEN_SECONDS) -> Optional[str]:
    """Say why the server is not healthy: not ours on its port, another model, no token in time. None: it is well.

    A server that is too busy for a token within ``seconds`` is well where its counters of tokens grow, or its log gains
    lines of such work. No health endpoint is asked: with a stopped engine vLLM's /health and /v1/models go on saying
    200, and so does SGLang's /health_generate while anything else comes out of it.
    """
    record = launcher.read_record(home)
    if record is None or not record.get("ready"):
        return "nothing that became ready runs here"
    release = home.release(record["release"])
    stored = release.read_plan()
    if stored is None:
        return f"release {release.name} is damaged, or not on the node any more: how to ask it is not known"
    plan, engine = Plan.load(stored["server"]), stored["engine"]
    members = members_of(record)
    port = probe.who_answers(plan, lambda: [member.pid for member in members])
    if not port.ours:
        return f"port {plan.port} is not held by its processes" + (f": {port}" if port.others else "")
    key = probe.find_api_key(plan, engine, release)
    work = _Work(plan, engine, key, record["log"])
    answer = probe.ask(plan, engine, key, seconds)
    if answer.ok:
        return None
    if not answer.is_wrong_model and work.goes_on():
        return None
    stopped = [f"{each.title} (pid {each.pid})" for each in members_of(record) if each.state in ("T", "t")]
    because = f"; stopped by a signal or a debugger: {', '.join(stopped)}" if stopped else ""
    return f"it does not answer a question: {answer.trouble}{because}"


class _Work:
    """What shows that tokens come out for others, from now on."""

    def __init__(self, plan: Plan, engine: Mapping[str, Any], key: Optional[str], log: str) -> None:
        self._plan, self._engine, self._key, self._log = plan, engine, key, log
        self._tokens = _tokens_so_far(plan, engine, key)
        self._size = self._size_of_log()

    def goes_on(self) -> bool:
        tokens = _tokens_so_far(self._plan, self._engine, self._key)
        return (self._tokens is not None and tokens is not None and tokens > self._tokens) or self._is_written()

    def _is_written(self) -> bool:
        line = (self._engine.get("counters") or {}).get("lines")
        if not line or self._size is None:
            return False
        with contextlib.suppress(OSError), open(self._log, "rb") as file:
            file.seek(max(self._size, (self._size_of_log() or 0) - MOST_LOG_BYTES))
            return re.search(line, file.read(MOST_LOG_BYTES).decode("utf-8", "replace")) is not None
        return False

    def _size_of_log(self) -> Optional[int]:
        try:
            return os.stat(self._log).st_size
        except OSError:
            return None


def lost_workers(home: ServerHome) -> List[str]:
    """Name each process that the server needs and has no more: gone, dead, stopped, or stuck in the kernel.

    They are those that were there when it became ready, or others of the same titles (after a restart by systemd).
    Takes ``STUCK_SECONDS`` where one may be stuck.
    """
    record, deployed = launcher.read_record(home), read_json(home.deployed, crew=list)
    if record is None or deployed is None:
        return []
    if any(deployed.get(name) != record.get(name) for name in ("run", "attempt", "release")):
        return []
    crew = [each for each in deployed["crew"] if isinstance(each, dict)]
    known = {(each.get("pid"), each.get("start")) for each in crew}
    members = members_of(record)
    if not members:
        return []  # there is no server, which is told otherwise
    substitutes = collections.Counter(
        each.title for each in members if not each.is_dead and (each.pid, each.start) not in known
    )
    found = []
    for each in crew:
        process = processes.read_process(int(each["pid"]))
        is_there = process is not None and process.start == each["start"]
        trouble = _trouble_with(process) if process is not None and is_there else "is gone"
        if trouble and substitutes[each["title"]] > 0:
            substitutes[each["title"]] -= 1
        elif trouble:
            found.append(f"{each['title']} (pid {each['pid']}{_rank(each['title'], home, record)}) {trouble}")
    return found


def _rank(title: str, home: ServerHome, record: Mapping[str, Any]) -> str:
    engine = (home.release(record["release"]).read_plan() or {}).get("engine") or {}
    pattern = (engine.get("processes") or {}).get("rank")
    match = re.search(pattern, title) if pattern else None
    return f", rank {match['rank']}" if match is not None else ""


def _trouble_with(process: Process) -> str:
    """Say why a process of the server does nothing; "" where it may. One look proves no stop: debuggers pause, too."""
    until = time.monotonic() + STUCK_SECONDS
    now: Optional[Process] = process
    while True:
        if now is None or now.identity != process.identity or now.is_dead:
            return "is dead, and its parent has not noticed" if now is not None and now.is_dead else "is gone"
        if now.state not in STUCK:
            return ""
        if time.monotonic() >= until:
            return STUCK[now.state]
        time.sleep(0.1)
        now = processes.read_process(process.pid)


def _tokens_so_far(plan: Plan, engine: Mapping[str, Any], key: Optional[str]) -> Optional[float]:
    """Return the sum of the engine's counters of tokens; None where it does not tell."""
    rule = engine.get("counters")
    reply = _get(plan, rule["path"], COUNTERS_SECONDS, key) if rule else None
    if rule is None or reply is None or reply.status != 200:
        return None
    found = [line.rpartition(" ")[2] for line in reply.text.splitlines() if re.search(rule["tokens"], line)]
    try:
        return sum(map(float, found)) if found else None
    except ValueError:
        return None


def _get(plan: Plan, path: str, timeout: float, key: Optional[str]) -> Optional[http.Reply]:
    host = ports.probe_host(plan.host)
    try:
        return http.request("GET", host, plan.port, path, timeout=timeout, api_key=key, tls=plan.tls)
    except http.HttpFailed:
        return None


def age_of(home: ServerHome) -> Optional[float]:
    """Return for how many seconds the server's main process has run; None when there is none."""
    record = launcher.read_record(home)
    main = launcher.present(record).main if record is not None else None
    process = processes.read_process(main.pid) if main is not None else None
    return processes.age_seconds(process) if process is not None else None


def members_of(record: Mapping[str, Any]) -> List[Process]:
    """Return the processes of the server that ``server.json`` stands for now."""
    main = launcher.present(record).main
    return [] if main is None else launcher.members_of(record, main)


# ----------------------------------------------------------------------------------------------------------- facts


def all_facts(plan: Plan, engine: Mapping[str, Any], home: ServerHome) -> Dict[str, Any]:
    """Return everything that checks may ask about the node and this server. Takes about a second on a GPU node."""
    record = launcher.read_record(home)
    members = members_of(record) if record is not None else []
    main = launcher.present(record).main if record is not None else None
    found = facts.node_facts(plan.gpus, disks.places(home.path, plan.model), plan.gpu_warnings)
    uuids = found["wanted"]["uuids"]
    report = scope.live_report(home)

    def ours() -> List[int]:
        return [process.pid for process in members_of(record)] if record is not None else []

    return {
        **found,
        "holders": facts.holder_facts(uuids, freeing.read_baseline(home), ours, plan.allow, plan.gpu_warnings),
        "processes": [facts.describe(process) for process in members],
        "limits": facts.limits_of(main.pid) if main is not None else {},
        "environment": report,
        "sitecustomize": {"scope": plan.scope, "workers": _sitecustomize(home, record or {}, report)},
        "engine": _engine_facts(plan, engine, home, record or {}),
        "unit": _unit_facts(home, record or {}),
        "logind": _logind_facts(found["host"]),
        "release": _release_facts(home, record or {}),
        "answers": _answers(plan, engine, home, record or {}),
        "lost_workers": lost_workers(home),
    }


def _answers(plan: Plan, engine: Mapping[str, Any], home: ServerHome, record: Mapping[str, Any]) -> Dict[str, Any]:
    """Ask the server for one token and for its model: {"token", "model": {"ok", "message"}}.

    With the key that the running release asks for, which is in no answer of ours.
    """
    release = home.release(record["release"]) if record.get("release") else None
    stored = release.read_plan() if release is not None else None
    if stored is not None:
        key = probe.find_api_key(Plan.load(stored["server"]), stored["engine"], release)
    else:
        key = probe.find_api_key(plan, engine, release)
    host, wanted = ports.probe_host(plan.host), {"served_name": plan.served_name, "model": plan.model}
    is_in_reply = (engine.get("identity") or {}).get("source") == "reply"
    reply: Optional[http.Reply] = None
    trouble = ""
    try:
        generation = http.generate(engine, host, plan.port, plan.served_name, TOKEN_SECONDS, api_key=key, tls=plan.tls)
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
    return {"ok": ok, "message": message.replace(key, drift.HIDDEN) if key else message}


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


def _engine_facts(plan: Plan, engine: Mapping[str, Any], home: ServerHome, record: Mapping[str, Any]) -> Dict[str, Any]:
    running = home.release(record["release"]) if record.get("release") else None
    found = _installed_engine(plan, engine, running if running is not None and running.is_complete() else None)
    found.pop("stats", None)
    return found


def _unit_facts(home: ServerHome, record: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    unit = unit_in(dict(record))
    if unit is None:
        return None
    shown = systemd.Manager(unit.manager_uid).show(
        unit.name, "ActiveState", "UnitFileState", "NRestarts", "NeedDaemonReload", "DropInPaths"
    )
    return {"name": unit.name, **shown, "edited": systemd.edited_by_hand(home)}


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
        "launch_mode": _mode(current.launch_script),
        "env_mode": _mode(current.env),
        "files": [each.to_json() for each in _in_release(current, None)] if _recorded_files(current) else [],
        "verdict": (current.read_verdict() or {}).get("verdict"),
    }
