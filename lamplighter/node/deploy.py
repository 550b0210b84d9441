"""One deploy, as a list of stages.

Until ``stop`` nothing that serves is touched: a failure there leaves the old server alone. From ``stop`` on the run
goes to *ready* or to *rolled back*, whoever is still watching.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import time
from typing import Any, Callable, Optional

from lamplighter.node import envproof, freed, preflight, readiness
from lamplighter.node.act import files, launcher, lock, stop
from lamplighter.node.events import Exit
from lamplighter.node.layout import LaunchFiles, ReleaseDirectory, read_json
from lamplighter.node.observe import gpus, ownership, processes
from lamplighter.node.plan import Plan
from lamplighter.node.worker import Run, StageFailure

Stage = Callable[[Run], Optional[str]]


def deploy(run: Run) -> None:
    """Replace the server by the release of the request, or put the old one back and say why."""
    _carry_out(run, checks=DEPLOY_CHECKS, changes=CHANGES, outcome="deployed")


def roll_back_to(run: Run) -> None:
    """Replace the server by a release that is on the node already: the one asked for, or the last other good one."""
    _carry_out(run, checks=ROLLBACK_CHECKS, changes=CHANGES, outcome="deployed")


def start(run: Run) -> None:
    """Start the current release where nothing serves."""
    _carry_out(run, checks=START_CHECKS, changes=CHANGES, outcome="started")


def stop_server(run: Run) -> None:
    """Stop the server, and see its GPUs FREED."""
    try:
        run.perform("lock", take_locks)
        run.perform("stop", stop_old)
        run.perform("free", wait_until_freed)
    except StageFailure as failure:
        run.failure = failure
        run.end("failed", failure.exit_code, failure.message, serving_now(run))
    else:
        run.end("stopped", Exit.OK, "stopped; nothing is serving", None)


def _carry_out(
    run: Run, *, checks: tuple[tuple[str, Stage], ...], changes: tuple[tuple[str, Stage], ...], outcome: str
) -> None:
    try:
        for name, stage in checks:
            run.perform(name, stage)
    except StageFailure as failure:
        run.failure = failure
        code = failure.exit_code
        run.end("refused", code, f"{failure.message}; nothing was touched", serving_now(run))
        return
    try:
        for name, stage in changes:
            run.perform(name, stage)
    except StageFailure as failure:
        run.failure = failure
        roll_back(run, failure)
    else:
        run.end(
            outcome, Exit.OK, f"{outcome}: {run.plan.served_name} answers on port {run.plan.port}", serving_now(run)
        )


# ------------------------------------------------------------------------------------------ stages that touch nothing


def take_locks(run: Run) -> Optional[str]:
    """Lock the server, its port and its GPUs until this process ends; also those of the release we might return to."""
    files.make_directory(run.home.path)
    _take(run, f"server {run.plan.name}", run.home.lock)
    for directory in (run.home.path, run.home.releases, run.home.runs):
        files.sweep_temporaries(directory)
    run.uuids = _lock_resources(run, run.plan)
    current = run.home.current_release()
    record = read_json(current.plan) if current else None
    if record is not None:
        _lock_resources(run, Plan.load(record["server"]))
    run.note_holder("lock")
    return None


def _lock_resources(run: Run, plan: Plan) -> tuple[str, ...]:
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
        run.locks.append(lock.acquire(what, path, float(run.request.get("wait") or 0)))
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


def examine(run: Run) -> Optional[str]:
    """Look at everything that can be known before anything is touched; the first error refuses."""
    found = preflight.examine(run.plan, run.engine, run.home, gpus.Resolved(run.uuids))
    for finding in found.findings:
        if finding.level == "warning":
            run.warn(f"{finding.message}: {finding.evidence}" if finding.evidence else finding.message, finding.hint)
    for finding in found.findings:
        if finding.level == "error":
            raise StageFailure(
                Exit.REFUSED, finding.message, cause=finding.id, evidence=finding.evidence, hint=finding.hint
            )
    return None


def write_release(run: Run) -> Optional[str]:
    """Write the release of the request beside the others; a complete and equal one stays as it is."""
    wanted = run.request["release"]
    release = run.home.release(wanted["digest"])
    files.make_directory(run.home.releases)
    fresh = os.path.join(run.home.releases, f"{files.TEMP_PREFIX}{release.digest}.{os.getpid()}")
    try:
        if not _is_complete(release, wanted["files"]):
            for name, content in wanted["files"].items():
                path = os.path.join(fresh, name)
                files.make_directory(os.path.dirname(path))
                files.write_file(path, content["text"], content["mode"])
            files.place_directory(fresh, release.path)
        _write_environment(run, release)
        files.write_json(release.plan, {"server": run.request["server"], "engine": run.engine})
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise StageFailure(
            Exit.REFUSED,
            f"cannot write release {release.digest}",
            cause="disk_full" if error.errno == 28 else "files",
            evidence=f"{error.filename or release.path}: {error.strerror}",
            hint=f"make room or mend the file system below {run.home.path}",
        ) from error
    run.release = release
    return None


def _is_complete(release: ReleaseDirectory, wanted: dict[str, Any]) -> bool:
    for name, content in wanted.items():
        path = os.path.join(release.path, name)
        try:
            with open(path, "rb") as file:
                data = file.read()
            if (
                data != content["text"].encode("utf-8", "surrogateescape")
                or os.stat(path).st_mode & 0o777 != content["mode"]
            ):
                return False
        except OSError:
            return False
    return True


def _write_environment(run: Run, release: ReleaseDirectory) -> None:
    """Write what only the node knows, and what only its owner may read: the GPUs' UUIDs and the secrets."""
    values = dict(run.request.get("secrets") or {})
    if not run.plan.uses_gpus:
        values["CUDA_VISIBLE_DEVICES"] = ""
    elif run.plan.gpus != "all":
        values["CUDA_VISIBLE_DEVICES"] = ",".join(run.uuids)
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in sorted(values.items())]
    files.write_file(release.env, "".join(lines))


def use_earlier_release(run: Run) -> Optional[str]:
    """Choose a release that is on the node: the one asked for, or the last good one that is not current."""
    wanted = run.request.get("to")
    if wanted:
        matching = [release for release in run.home.all_releases() if release.digest.startswith(wanted)]
        if len(matching) != 1:
            known = ", ".join(release.digest for release in run.home.all_releases()) or "none"
            problem = "no release" if not matching else f"{len(matching)} releases"
            raise StageFailure(
                Exit.REFUSED, f"{problem} of {run.plan.name} begin with {wanted!r}", evidence=f"on the node: {known}"
            )
        release = matching[0]
    else:
        current = run.home.current_release()
        others = [release for release in good_releases(run) if current is None or release.digest != current.digest]
        if not others:
            raise StageFailure(
                Exit.REFUSED,
                f"there is no earlier good release of {run.plan.name} to roll back to",
                hint="deploy one first; `status` shows what serves",
            )
        release = others[0]
    _use(run, release)
    return None


def use_current_release(run: Run) -> Optional[str]:
    """Choose the release that became ready last; refuse where a server is running already."""
    release = run.home.current_release()
    if release is None:
        raise StageFailure(Exit.REFUSED, f"no release of {run.plan.name} has ever become ready here", hint="deploy it")
    if run.request["verb"] == "start" and serving_now(run) is not None:
        raise StageFailure(
            Exit.REFUSED, f"{run.plan.name} is serving already", hint="`restart` or `deploy` replaces it"
        )
    _use(run, release)
    return None


def _use(run: Run, release: ReleaseDirectory) -> None:
    record = read_json(release.plan)
    if record is None:
        raise StageFailure(Exit.REFUSED, f"release {release.digest} is damaged: plan.json is unreadable")
    run.plan, run.engine, run.release = Plan.load(record["server"]), record["engine"], release
    run.uuids = _lock_resources(run, run.plan)


def prove(run: Run) -> Optional[str]:
    """Start the server's interpreter as the launch script will, and a spawn child: do all variables arrive?"""
    assert run.release is not None
    expected = {name: entry["value"] for name, entry in run.plan.env.items()}
    proof = envproof.prove_before(
        run.release.launch_script,
        [run.plan.python],
        expected,
        deadline=30.0,
        secret_names=tuple(run.request.get("secrets") or ()),
        environ=launcher.bare_environment(),
    )
    if not proof.ok:
        raise StageFailure(
            Exit.REFUSED,
            f"the variables would not reach the server: {proof.message}",
            cause="environment",
            evidence="; ".join(f"{d.name}: {d.reason}" for d in proof.differences) or proof.message,
            hint=f"mend servers.{run.plan.name}.env or .python, then deploy again",
        )
    run.progress(f"{len(expected)} variables proven in the interpreter and a spawn child, in {proof.seconds:.2f} s")
    return None


# ------------------------------------------------------------------------------------- stages that change what serves


def stop_old(run: Run) -> Optional[str]:
    """Stop what we recorded and, by policy, stale processes of the engine; leave all others."""
    claimed = _claims(run)
    stopping = [claim for claim in claimed if claim.may_be_stopped]
    if not stopping:
        return "nothing of ours is running"
    for claim in stopping:
        run.progress(f"stopping {claim}", pids=[claim.process.pid])
    if preflight.is_answering(run.plan.host, run.plan.port):
        run.old_answered_at = time.time()
    look = run.engine.get("stop") or {}
    manner = stop.Manner(
        signal=getattr(signal, "SIG" + look.get("signal", "TERM")),
        to_all=look.get("scope", "group") == "group",
        grace=run.plan.timeouts.stop,
    )
    survivors = stop.stop(
        lambda: [claim.process for claim in _claims(run) if claim.may_be_stopped], manner, run.progress
    )
    if survivors:
        raise StageFailure(
            Exit.NOT_FREED,
            "the old server would not die",
            cause="unkillable",
            evidence=stop.describe_survivors(survivors),
            hint="a process that KILL does not end is held by the kernel: look at dmesg, then reboot the node",
        )
    return None


def _claims(run: Run) -> list[ownership.Claim]:
    return preflight.find_claims(run.plan, run.engine, run.home, run.uuids)


def wait_until_freed(run: Run) -> Optional[str]:
    """Wait for FREED on every GPU of the server: only that may start one."""
    if not run.plan.uses_gpus:
        return "gpus: [] - the server uses no GPU"
    found = freed.await_freed(run.plan, run.home, run.uuids, lambda: _stoppable_pids(run), run.progress)
    if isinstance(found, freed.NotFreed):
        holders = preflight.describe_pids(found.holders)
        raise StageFailure(
            Exit.NOT_FREED,
            f"the GPUs are not free: {found.word}",
            cause="gpu_unknown" if found.word == "UNKNOWN" else "gpu_held",
            evidence=f"{found.reason}; {holders}" if holders else found.reason,
            hint=f"end the holder, or list its name in servers.{run.plan.name}.stale.kill; then deploy again",
        )
    return None


def _stoppable_pids(run: Run) -> set[int]:
    return {claim.process.pid for claim in _claims(run) if claim.may_be_stopped}


def start_new(run: Run) -> Optional[str]:
    """Start the release under its launcher, after a last look at the port and the GPUs."""
    assert run.release is not None
    _launch(run, run.release, run.directory.launch("new"))
    return None


def _launch(run: Run, release: ReleaseDirectory, launch: LaunchFiles) -> None:
    intruders = [claim for claim in _claims(run) if not claim.may_be_stopped]
    if intruders:
        raise StageFailure(
            Exit.NOT_FREED,
            "somebody took a GPU or the port between the check and the start",
            cause="foreign",
            evidence="; ".join(map(str, intruders)),
            hint="end it or agree with its owner, then deploy again",
        )
    files.make_directory(run.directory.records)
    try:
        launched = launcher.launch_detached(
            [release.launch_script],
            release.path,
            launch,
            run.runner,
            f"lamplighter-{run.plan.name}-{run.directory.run_id}-{launch.attempt}",
        )
    except (launcher.LaunchFailed, OSError) as error:
        raise StageFailure(Exit.CRASHED, f"the launcher failed: {error}", cause="launcher") from error
    run.launch = launch
    main = launched.main
    files.write_json(
        run.home.record,
        {
            "boot_id": main.boot_id,
            "pid": main.pid,
            "start": main.start,
            "supervisor_pid": launched.supervisor.pid,
            "supervisor_start": launched.supervisor.start,
            "port": run.plan.port,
            "host": run.plan.host,
            "model": run.plan.served_name,
            "gpus": list(run.uuids),
            "release": release.digest,
            "run": run.directory.run_id,
            "log": launch.log,
            "ready": False,
            "since": time.time(),
        },
    )
    run.progress(f"started as pid {main.pid}", pids=[main.pid])


def wait_until_ready(run: Run) -> Optional[str]:
    """Watch the start until the server has answered a question, died, or run out of time."""
    _await_ready(run)
    return None


def _await_ready(run: Run) -> None:
    assert run.launch is not None
    launched = launcher.read_launched(run.launch)
    assert launched is not None
    verdict = readiness.watch(run.plan, run.engine, run.launch, launched, run.request.get("api_key"), run.progress)
    if isinstance(verdict, readiness.NotReady):
        diagnosis = verdict.diagnosis
        raise StageFailure(
            Exit.CRASHED if verdict.crashed else Exit.NOT_READY,
            verdict.message,
            cause=diagnosis.cause,
            evidence=diagnosis.evidence or (verdict.log_tail[-1] if verdict.log_tail else ""),
            hint=(diagnosis.hint or "").replace("{server}", run.plan.name) or "read the log: `logs` shows it whole",
            phase=diagnosis.phase,
            rank=diagnosis.rank,
            log_tail=list(verdict.log_tail),
        )
    run.progress("ready: it generated a token", phase="ready", percent=100.0)
    run.new_answered_at = verdict.answered_at
    run.ready_seconds = verdict.seconds


def confirm(run: Run) -> Optional[str]:
    """Look at the live processes: does each carry the variables, as far as the kernel lets us read them?"""
    assert run.launch is not None
    expected = {name: entry["value"] for name, entry in run.plan.env.items()}
    carrying, unreadable = 0, 0
    for process in _members(run):
        live = processes.environ(process.pid)
        if not live or not expected.keys() & live.keys():
            unreadable += 1  # a process title wipes this area: absence proves nothing
            continue
        wrong = {name: live[name] for name in expected if name in live and live[name] != expected[name]}
        for name, value in wrong.items():
            run.warn(f"{process.title} (pid {process.pid}) has {name}={value}, the inventory says {expected[name]}")
        carrying += not wrong
    run.progress(f"{carrying} processes carry the variables they were started with, {unreadable} inconclusive")
    return None


def _members(run: Run) -> list[processes.Process]:
    assert run.launch is not None
    launched = launcher.read_launched(run.launch)
    if launched is None:
        return []
    return ownership.members(ownership.Recorded(launched.main, launched.supervisor), processes.processes())


def commit(run: Run) -> Optional[str]:
    """Make the release the current one, write down that it is good, and prune old ones."""
    assert run.release is not None
    _mark(run, run.release, "good", None)
    files.point(run.home.current, os.path.join("releases", run.release.digest))
    record = read_json(run.home.record) or {}
    files.write_json(run.home.record, {**record, "ready": True, "since": run.new_answered_at})
    _prune(run, keep={run.release.digest})
    return None


DEPLOY_CHECKS: tuple[tuple[str, Stage], ...] = (
    ("lock", take_locks),
    ("preflight", examine),
    ("stage", write_release),
    ("prove", prove),
)
ROLLBACK_CHECKS: tuple[tuple[str, Stage], ...] = (
    ("lock", take_locks),
    ("stage", use_earlier_release),
    ("preflight", examine),
    ("prove", prove),
)
START_CHECKS: tuple[tuple[str, Stage], ...] = (
    ("lock", take_locks),
    ("stage", use_current_release),
    ("preflight", examine),
    ("prove", prove),
)
CHANGES: tuple[tuple[str, Stage], ...] = (
    ("stop", stop_old),
    ("free", wait_until_freed),
    ("start", start_new),
    ("ready", wait_until_ready),
    ("confirm", confirm),
    ("commit", commit),
)


# ------------------------------------------------------------------------------------------------------- rolling back


def roll_back(run: Run, failure: StageFailure) -> None:
    """Put the last good release back after ``failure``, or say exactly why nothing serves."""
    failed = run.release
    target = _rollback_target(run)
    if failed is not None and failure.stage in ("ready", "confirm"):
        _mark(run, failed, "bad", failure)
    try:
        run.perform("rollback", lambda run: _restore(run, target))
    except StageFailure as second:
        run.release = failed
        code = second.exit_code if second.exit_code == Exit.NOT_FREED else failure.exit_code
        run.end(
            "failed",
            code,
            f"{failure.message}; rolling back failed too: {second.message} ({second.evidence}); nothing is serving",
            serving_now(run),
        )
        return
    run.release = failed
    if target is None:
        run.end(
            "failed",
            failure.exit_code,
            f"{failure.message}; no earlier release to go back to; nothing is serving",
            None,
        )
    else:
        run.end(
            "rolled_back",
            Exit.ROLLED_BACK,
            f"{failure.message}; rolled back: release {target.digest} is serving again",
            serving_now(run),
        )


def _restore(run: Run, target: Optional[ReleaseDirectory]) -> Optional[str]:
    """Stop the failed server, wait for FREED, start the old one and wait for its answer."""
    stop_old(run)
    if target is None:
        return "no earlier good release on this node"
    _use(run, target)
    wait_until_freed(run)
    _launch(run, target, run.directory.launch("old"))
    _await_ready(run)
    files.point(run.home.current, os.path.join("releases", target.digest))
    record = read_json(run.home.record) or {}
    files.write_json(run.home.record, {**record, "ready": True, "since": run.new_answered_at})
    return None


def _rollback_target(run: Run) -> Optional[ReleaseDirectory]:
    """Return the release to go back to: the current one, unless it is the one that failed and another is good."""
    current = run.home.current_release()
    if current is None:
        return None
    if run.release is None or current.digest != run.release.digest:
        return current
    others = [release for release in good_releases(run) if release.digest != current.digest]
    return others[0] if others else current


def good_releases(run: Run) -> list[ReleaseDirectory]:
    """Return the releases that became ready when they ran last, newest first."""
    dated = []
    for release in run.home.all_releases():
        verdict = read_json(release.verdict)
        if verdict is not None and verdict.get("verdict") == "good":
            dated.append((float(verdict["t"]), release))
    return [release for _, release in sorted(dated, key=lambda pair: pair[0], reverse=True)]


def _mark(run: Run, release: ReleaseDirectory, word: str, failure: Optional[StageFailure]) -> None:
    files.write_json(
        release.verdict,
        {
            "verdict": word,
            "t": time.time(),
            "run": run.directory.run_id,
            "cause": failure.cause if failure else None,
            "message": failure.message if failure else "",
        },
    )


def _prune(run: Run, keep: set[str]) -> None:
    """Remove all but the newest ``keep_releases``; never the current one nor the one to roll back to."""
    good = good_releases(run)
    keep = keep | {release.digest for release in good[:2]}
    dated = sorted(run.home.all_releases(), key=lambda release: os.stat(release.plan).st_mtime, reverse=True)
    for release in dated[run.plan.keep_releases :]:
        if release.digest not in keep:
            files.remove_tree(release.path)


def serving_now(run: Run) -> Optional[dict[str, Any]]:
    """Return what serves now, by the node's own record and a look at its process and port; None when nothing does."""
    return preflight.what_serves(run.home)
