"""The stages ``stage`` and ``commit``: releases on the node, which of them is good, current, or to be gone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from typing import Any, Mapping, Optional, Sequence

from lamplighter.node.events import Exit
from lamplighter.node.health import drift, serving
from lamplighter.node.keeper import launcher
from lamplighter.node.layout import ReleaseDirectory, ServerHome, environment_text
from lamplighter.node.plan import OF_NODE, GpuWarnings, Plan
from lamplighter.node.stages import deployed, environment, swap
from lamplighter.node.stages.locks import lock_resources
from lamplighter.node.stages.ready import see_it_live
from lamplighter.node.stages.values import Allocation, Staged, Started
from lamplighter.node.system import files
from lamplighter.node.worker import Run, StageFailure


def write_release(run: Run, allocation: Allocation) -> Staged:
    """Write the release of the request beside the others; a complete and equal one stays as it is.

    What serves is not written to: the same digest with other secrets, GPUs or treatment gets a directory of its own.
    """
    wanted = run.request["release"]
    environment, plan = (
        _environment(run, allocation),
        {"server": run.request["server"], "engine": run.request["engine"]},
    )
    files.make_directory(run.home.releases)
    release = _place_for(run.home, wanted["digest"], environment, plan)
    fresh = ReleaseDirectory(os.path.join(run.home.releases, f"{files.TEMP_PREFIX}{release.name}.{os.getpid()}"))
    is_complete = _is_complete(release, wanted["files"])
    written = release if is_complete else fresh
    try:
        if not is_complete:
            for name, content in wanted["files"].items():
                path = os.path.join(fresh.path, name)
                files.make_directory(os.path.dirname(path))
                files.write_file(path, content["text"], content["mode"])
        files.write_file(written.env, environment)
        files.write_json(written.plan, plan)
        if not is_complete:
            files.place_directory(fresh.path, release.path)
    except OSError as error:
        shutil.rmtree(fresh.path, ignore_errors=True)
        raise StageFailure(
            Exit.REFUSED,
            f"cannot write release {release.name}",
            cause="disk_full" if error.errno == 28 else "files",
            evidence=f"{error.filename or release.path}: {error.strerror}",
            hint=f"make room or fix the file system below {run.home.path}",
        ) from error
    _tell_secret_words(run, allocation.plan)
    return Staged(allocation.plan, allocation.uuids, release)


def _tell_secret_words(run: Run, plan: Plan) -> None:
    """Warn of arguments that are secrets, the first time: who may list the processes of the node sees them."""
    before = run.home.current_release()
    known = before.read_plan() if before is not None else None
    told = known.argv_secrets if known is not None else {}
    new = [plan.argv[max(0, place - 1)] for name, place in plan.argv_secrets.items() if name not in told]
    if new:
        run.warn(
            f"a secret stands in the server's command line (after {', '.join(new)}): `ps` on the node shows it",
            "give it in a variable under secrets, if the engine reads one",
        )


def _is_complete(release: ReleaseDirectory, wanted: dict[str, Any]) -> bool:
    for name, content in wanted.items():
        path = os.path.join(release.path, name)
        try:
            with open(path, "rb") as file:
                data = file.read()
            if (
                data != content["text"].encode("utf-8", "surrogateescape")
                or os.stat(path).st_mode & 0o7777 != content["mode"]
            ):
                return False
        except OSError:
            return False
    return True


def _place_for(home: ServerHome, digest: str, environment: str, plan: dict[str, Any]) -> ReleaseDirectory:
    """Return the release of that digest that has this environment and plan, or has lost them; else a free place."""
    alike = home.releases_of(digest)
    fitting = [
        each
        for each in alike
        if each.read_request() in (plan, None) and files.read_text(each.env) in (environment, None)
    ]
    if fitting:
        return next((release for release in fitting if release.is_complete()), fitting[0])
    number = max((release.number for release in alike), default=0) + 1
    return home.release(digest if number == 1 else f"{digest}.{number}")


def _environment(run: Run, allocation: Allocation) -> str:
    """Return what only the node knows, and what only its owner may read: the GPUs' UUIDs and the secrets."""
    values = dict(run.request.get("secrets") or {})
    if not allocation.plan.uses_gpus:
        values["CUDA_VISIBLE_DEVICES"] = ""
    elif allocation.plan.gpus != "all":
        values["CUDA_VISIBLE_DEVICES"] = ",".join(allocation.uuids)
    return environment_text(values)


def use_earlier_release(run: Run, allocation: Allocation) -> Staged:
    """Choose a release that is on the node: the one asked for, or the last good one that is not current."""
    wanted, blamed = run.request.get("to"), run.request.get("blamed")
    if blamed:
        _refuse_another_than(run, blamed["release"])
    if wanted:
        matching = [release for release in run.home.all_releases() if release.name.startswith(wanted)]
        matching = [release for release in matching if release.name == wanted] or matching
        if len(matching) != 1:
            known = ", ".join(release.name for release in run.home.all_releases()) or "none"
            problem = "no release" if not matching else f"{len(matching)} releases"
            begin = "begin" if matching else "begins"
            raise StageFailure(
                Exit.REFUSED,
                f"{problem} of {run.server} {begin} with {wanted!r}",
                evidence=f"on the node: {known}",
                hint=f"{run.invocation('releases')} lists them",
            )
        release = matching[0]
    else:
        earlier = earlier_release(run.home)
        if earlier is None:
            raise StageFailure(
                Exit.REFUSED,
                f"there is no earlier good release of {run.server} to roll back to",
                hint=f"deploy one first; {run.invocation('status')} shows what serves",
            )
        release = earlier
    if blamed:
        _blame(run, blamed)
    return use(run, release, allocation.plan)


def _refuse_another_than(run: Run, blamed: str) -> None:
    """Refuse where another run has put something else into service since the one that is to be undone."""
    current = run.home.current_release()
    if current is None or current.name != blamed:
        now = f"release {current.name}" if current is not None else "no release"
        raise StageFailure(
            Exit.REFUSED,
            f"release {blamed} of {run.server} was to be replaced, and {now} is current by now",
            cause="superseded",
            hint=f"{run.invocation('status')} shows what serves",
        )


def _blame(run: Run, blamed: Mapping[str, Any]) -> None:
    """Write down what the checks after its deploy found wrong with the current release."""
    why = StageFailure(Exit.DEGRADED, blamed["message"], cause=blamed["cause"])
    with contextlib.suppress(OSError):  # a full disk costs us a word in `releases`, not the rollback
        mark(run, run.home.release(blamed["release"]), "bad", why)


def use_current_release(run: Run, allocation: Allocation) -> Staged:
    """Choose the release that became ready last; refuse where a server is running already."""
    release = run.home.current_release()
    if release is None:
        raise StageFailure(Exit.REFUSED, f"no release of {run.server} that became ready is here", hint="deploy it")
    if run.request["verb"] == "start" and serving.look(run.home).may_serve:
        raise StageFailure(
            Exit.REFUSED,
            f"{run.server} is serving already",
            hint=f"{run.invocation('restart')} starts it again; {run.invocation('deploy')} replaces it",
        )
    return use(run, release, allocation.plan)


def use(run: Run, release: ReleaseDirectory, asked: Plan) -> Staged:
    """Make a release that is on the node the one to start; ``asked`` is the plan of the request."""
    plan = release.read_plan()
    if plan is None:
        raise StageFailure(Exit.REFUSED, f"release {release.name} is damaged: plan.json is unreadable")
    # Warnings are the node's, not the release's: one that is accepted now must not forbid the way back.
    accepted = GpuWarnings((*plan.gpu_warnings.accept, *asked.gpu_warnings.accept))
    of_node = {name: asked.engine[name] for name in OF_NODE if asked.engine.get(name)}  # likewise
    plan = dataclasses.replace(plan, gpu_warnings=accepted, engine={**plan.engine, **of_node})
    return Staged(plan, lock_resources(run, plan).uuids, release)


def commit(run: Run, started: Started, answered_at: float) -> None:
    """Make the release the current one, write down that it is good, and prune old ones.

    Its last word is that the server still lives: a server that dies before that is rolled back.
    """
    mark(run, started.release, "good", None)
    make_current(run, started, answered_at)
    with contextlib.suppress(OSError):  # it serves; what could not be removed, the next run removes
        _prune(run, started.plan.keep_releases, keep={started.release.name})
    see_it_live(run, started)


def make_current(run: Run, started: Started, answered_at: float) -> None:
    """Make the release that has just answered the lasting one: its unit, ``current``, and the server's record.

    Raises StageFailure where its server has died meanwhile; ``current`` is then as before.
    """
    swap.settle(run, started)
    see_it_live(run, started)
    files.point(run.home.current, os.path.join("releases", started.release.name))
    launcher.note_ready(run.home, started.record, answered_at)
    deployed.write_down(run, started)
    environment.give_back_unneeded(run, started)


def way_back(home: ServerHome, failed: Optional[str] = None) -> Optional[ReleaseDirectory]:
    """Return the release that a roll back would start: the current one, unless it is damaged and another is good.

    ``failed`` is the one that is to blame for the roll back: another good one is better than that.
    """
    current = home.current_release()
    others = [release for release in good_releases(home) if release.name != failed]
    if current is not None and current.name != failed:
        others.insert(0, current)
    return _first_whole(others) or current


def _first_whole(releases: Sequence[ReleaseDirectory]) -> Optional[ReleaseDirectory]:
    """Return the first that is as it was written; where there is none, a damaged one may still start."""
    return next((release for release in releases if not drift.damage(release)), next(iter(releases), None))


def earlier_release(home: ServerHome) -> Optional[ReleaseDirectory]:
    """Return what ``rollback`` takes: the last good and whole release other than the one that was started last."""
    record, current = launcher.read_record(home), home.current_release()
    leaving = record["release"] if record is not None else current.name if current is not None else None
    return _first_whole([release for release in good_releases(home) if release.name != leaving])


def good_releases(home: ServerHome) -> list[ReleaseDirectory]:
    """Return the releases that became ready when they ran last, the one judged last first, whatever the clock said."""
    judged = []
    for release in home.all_releases():
        verdict = release.read_verdict()
        if verdict is not None and verdict["verdict"] == "good":
            judged.append((_place_of(verdict), release))
    return [release for _, release in sorted(judged, key=lambda pair: pair[0], reverse=True)]


def _place_of(verdict: Mapping[str, Any]) -> tuple[int, float]:
    """Where a verdict stands among all; those without a number are older, and have their time alone."""
    number = verdict.get("number")
    return number if isinstance(number, int) else 0, float(verdict["t"])


def mark(run: Run, release: ReleaseDirectory, word: str, failure: Optional[StageFailure]) -> None:
    """Write down what came of a release. Verdicts are numbered, since clocks jump."""
    files.write_json(
        release.verdict,
        {
            "verdict": word,
            "number": run.home.next_verdict(),
            "t": time.time(),
            "run": run.directory.run_id,
            "cause": failure.cause if failure else None,
            "message": failure.message if failure else "",
        },
    )


def _prune(run: Run, number: int, keep: set[str]) -> None:
    """Remove all but the newest ``number``; never the current one nor the one to roll back to."""
    good = good_releases(run.home)
    keep = keep | {release.name for release in good[:2]}
    dated = sorted(run.home.all_releases(), key=lambda release: os.stat(release.plan).st_mtime, reverse=True)
    for release in dated[number:]:
        if release.name not in keep:
            files.remove_tree(release.path)
