"""What a killed run left half done is finished, by the next run of any verb, before it does anything of its own.

Called under the server's lock, so what wrote there before is dead, but for runs that wait for this lock. May be
repeated and may itself be killed: each step looks first, and none needs another one. Processes that a dead run
started need no repair: their records make them ours, and the stages treat them as what they are. A step that the disk
does not let happen is left to the next run.
"""

from __future__ import annotations

import os
import re
import time
from typing import Callable, Optional

from lamplighter.node import events, journal
from lamplighter.node.events import Exit
from lamplighter.node.health import census
from lamplighter.node.keeper import launcher
from lamplighter.node.layout import IDENTITY, RunDirectory, ServerHome, read_json
from lamplighter.node.stages import releases
from lamplighter.node.system import files, http, processes
from lamplighter.node.worker import RESERVES, Run, is_at_work

#: Runs whose journals and logs are kept, besides those that a live server or a release refers to.
KEEP_RUNS = 20
#: A version of our own program that has not been used for so long is removed.
KEEP_RUNNER_SECONDS = 7 * 86400.0

_RUNNER = re.compile(r"[0-9a-f]{64}")


def repair(run: Run) -> None:
    """Bring what earlier runs left into the state that a run that ended leaves."""
    steps = (
        _clear_the_way,
        _end_abandoned_runs,
        _sweep,
        _repair_current,
        _repair_record,
        _drop_half_releases,
        _clear_units,
        _prune_runs,
        _prune_runners,
    )
    for step in steps:
        try:
            step(run)
        except OSError:
            pass  # it is left to the next run
        except Exception as error:
            what = step.__name__.strip("_").replace("_", " ")
            run.warn(
                f"repairing after earlier runs, the step to {what} failed: {type(error).__name__}: {error}",
                "this run goes on; it is a defect of lamplighter: report it",
            )


def _clear_the_way(run: Run) -> None:
    """Set aside directories in place of files that this run, or a later one, will write. They are kept beside them."""
    home = run.home
    if os.path.lexists(home.releases) and not os.path.isdir(home.releases):
        elsewhere = f"{home.releases}.before-{run.directory.run_id}"
        os.rename(home.releases, elsewhere)
        run.warn(f"{home.releases} was no directory; it is {elsewhere} now")
    wanted = [home.record, home.unit, home.deployed]
    for name in os.listdir(home.releases) if os.path.isdir(home.releases) else ():
        release = home.release(name)
        wanted += [release.plan, release.env, release.verdict]
    for other in home.all_runs():
        wanted.append(other.journal)
        for launch in map(other.launch, ("new", "old")):  # systemd writes there when it starts an old unit again
            wanted += [launch.log, launch.process, launch.exit]
    for path in wanted:
        aside = files.set_aside(path, run.directory.run_id)
        if aside is not None:
            run.warn(f"{path} was a directory; it is {aside} now")


def _dead_runs(run: Run) -> list[RunDirectory]:
    others = [other for other in run.home.all_runs() if other.run_id != run.directory.run_id]
    return [other for other in others if not is_at_work(other)]


def _end_abandoned_runs(run: Run) -> None:
    """Give every run whose worker was killed the end event that it could not write."""
    for dead in _dead_runs(run):
        if not journal.has_ended(dead.journal):
            told = journal.read(dead.journal)
            has_launched = any(os.path.exists(dead.launch(attempt).process) for attempt in ("new", "old"))
            if not told and not has_launched:
                files.remove_tree(dead.path)  # killed before its first word
                continue
            if os.path.exists(dead.journal):  # else it was removed, and may have told of a good end
                _write_its_end(run, dead, told)
        for leftover in (dead.ballast, *map(dead.reserve, range(RESERVES))):
            if os.path.exists(leftover):
                os.unlink(leftover)


def _write_its_end(run: Run, dead: RunDirectory, told: list[events.Event]) -> None:
    stage = next((event["stage"] for event in reversed(told) if event.get("stage")), None)
    common = {"host": run.request["host"], "server": run.server, "run": dead.run_id}
    last = max((event.get("seq", 0) for event in told), default=0)
    pen = journal.Journal(dead.journal, dead.ballast, common, after=last)
    heir = run.directory.run_id
    message = f"abandoned at stage {stage}: its worker was killed, or the node went down; run {heir} took over"
    pen.write(
        events.ended(
            "failed",
            Exit.INTERNAL,
            message,
            stage=stage,
            phase=None,
            cause="abandoned",
            evidence="",
            hint=f"{run.invocation('attach', '--run', heir)} shows what became of it",
            release=told[0].get("release") if told else None,
            durations={},
            ready_seconds=None,
            downtime_seconds=None,
            serving=None,
        )
    )
    pen.close()
    run.progress(f"run {dead.run_id} had been killed at stage {stage}; repairing after it")


def _sweep(run: Run) -> None:
    """Remove temporary files: all of them below this server, and of the shared places those of dead writers."""
    home = run.home
    for directory in (home.path, home.releases, home.runs):
        files.sweep_temporaries(directory)
    for release in home.all_releases():
        for base, _, _ in os.walk(release.path):
            files.sweep_temporaries(base)
    for dead in _dead_runs(run):
        for directory in (dead.path, dead.records):  # a supervisor may be writing how its server ended
            files.sweep_temporaries(directory, _writer_is_gone)
    for shared in (_root(home), os.path.join(_root(home), "bin")):
        files.sweep_temporaries(shared, _writer_is_gone)


def _writer_is_gone(name: str) -> bool:
    writer = files.writer_of(name)
    return writer is None or processes.read_process(writer) is None


def _repair_current(run: Run) -> None:
    """Where ``current`` names no complete release, point it to the newest good one, or to none where there is none."""
    home = run.home
    if home.current_release() is not None:
        return
    if os.path.lexists(home.current) and not os.path.islink(home.current):
        aside = f"{home.current}.before-{run.directory.run_id}"
        os.rename(home.current, aside)
        run.warn(f"`current` was no link; it is {aside} now")
    good = releases.good_releases(home)
    if good:
        files.point(home.current, os.path.join("releases", good[0].name))
        run.warn(f"`current` named no release that is whole; it is {good[0].name} now, the newest good one")
    elif os.path.lexists(home.current):
        os.unlink(home.current)
        run.warn("`current` named no release that is whole, and no other has been good")


def _repair_record(run: Run) -> None:
    """Write a lost record again; a server that was committed, and whose run was killed before, is ready."""
    record, current = launcher.read_record(run.home), run.home.current_release()
    if record is not None and launcher.is_record_lost(run.home):
        files.write_json(run.home.record, record)
        run.warn(f"{run.home.record} was missing or damaged; it is written again, from what the launches have recorded")
    if record is None or record.get("ready") or current is None or record["release"] != current.name:
        return
    identity = processes.Identity.of(record)
    if processes.is_alive(identity) and http.is_answering(record["host"], record["port"]):
        launcher.note_ready(run.home, record, time.time())


def _drop_half_releases(run: Run) -> None:
    """Remove releases that were being written, or removed, when their run was killed; never one that may be serving."""
    record = launcher.read_record(run.home)
    if record is None and census.living_members(run.home):
        return  # which of them it is, nothing tells any more
    kept = {(record or {}).get("release"), *(release.name for release in run.home.all_releases())}
    for name in os.listdir(run.home.releases):
        if name not in kept and not name.startswith(files.TEMP_PREFIX):
            files.remove_tree(os.path.join(run.home.releases, name))


def _clear_units(run: Run) -> None:
    """Drop the units of launches whose run was killed, and which have ended."""
    launcher.clear(run.home)


def _prune_runs(run: Run) -> None:
    """Remove old runs: journals and logs that neither a person nor the next deploy will ask for."""
    kept = {record["run"] for record in _references(run.home) if record.get("run")}
    alive = _living_launches(run.home)
    for old in run.home.all_runs()[:-KEEP_RUNS]:
        if old.run_id not in kept and not is_at_work(old) and not alive(old):
            files.remove_tree(old.path)


def _prune_runners(run: Run) -> None:
    """Remove old versions of our own program. Every session that uses one dates it again (see boot.py)."""
    shelf = os.path.join(_root(run.home), "bin")
    runners = {os.path.join(shelf, name) for name in os.listdir(shelf) if _RUNNER.fullmatch(name)} - {run.runner}
    for old in runners:
        is_old = time.time() - os.stat(old).st_mtime > KEEP_RUNNER_SECONDS
        if is_old and not processes.find_by_argument(old):  # of a worker or a supervisor
            files.remove_tree(old)


def _root(home: ServerHome) -> str:
    return os.path.dirname(os.path.dirname(home.path))


def _references(home: ServerHome) -> list[dict[str, object]]:
    verdicts = (release.read_verdict() for release in home.all_releases())
    found = [launcher.read_record(home), read_json(home.unit), *verdicts]
    return [record for record in found if record is not None]


def _living_launches(home: ServerHome) -> Callable[[RunDirectory], bool]:
    """Tell of runs whether something that they started still lives: without their records it would not be ours."""
    table = processes.processes()

    def lives(directory: RunDirectory) -> bool:
        records: list[Optional[dict[str, object]]] = [
            read_json(directory.launch(attempt).process, **IDENTITY) for attempt in ("new", "old")
        ]
        for record in records:
            if record is None or record.get("boot_id") != processes.boot_id():
                continue
            if any(record["pid"] in (process.pid, process.sid) for process in table.values()):
                return True
        return False

    return lives
