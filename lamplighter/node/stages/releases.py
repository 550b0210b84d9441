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
from lamplighter.node.stages import deployed, environment, swap
from lamplighter.node.stages.locks import lock_resources
from lamplighter.node.stages.ready import see_it_live
from lamplighter.node.system import files
from lamplighter.node.worker import Run, StageFailure


def write_release(run: Run) -> Optional[str]:
    """Write the release of the request beside the others; a complete and equal one stays as it is.

    What serves is not written to: the same digest with other secrets, GPUs or treatment gets a directory of its own.
    """
    wanted = run.request["release"]
    environment, plan = _environment(run), {"server": run.request["server"], "engine": run.plan.engine}
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
    run.release = release
    _tell_secret_words(run)
    return None


def _tell_secret_words(run: Run) -> None:
    """Warn of arguments that are secrets, the first time: who may list the processes of the node sees them."""
    before = run.home.current_release()
    known = before.read_plan() if before is not None else None
    told = known.argv_secrets if known is not None else {}
    new = [run.plan.argv[max(0, place - 1)] for name, place in run.plan.argv_secrets.items() if name not in told]
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


def _environment(run: Run) -> str:
    """Return what only the node knows, and what only its owner may read: the GPUs' UUIDs and the secrets."""
    values = dict(run.request.get("secrets") or {})
    if not run.plan.uses_gpus:
        values["CUDA_VISIBLE_DEVICES"] = ""
    elif run.plan.gpus != "all":
        values["CUDA_VISIBLE_DEVICES"] = ",".join(run.uuids)
    return environment_text(values)


def use_earlier_release(run: Run) -> Optional[str]:
    """Choose a release that is on the node: the one asked for, or the last good one that is not current."""
    wanted = run.request.get("to")
    if wanted:
        matching = [release for release in run.home.all_releases() if release.name.startswith(wanted)]
        matching = [release for release in matching if release.name == wanted] or matching
        if len(matching) != 1:
            known = ", ".join(release.name for release in run.home.all_releases()) or "none"
            problem = "no release" if not matching else f"{len(matching)} releases"
            begin = "begin" if matching else "begins"
            raise StageFailure(
                Exit.REFUSED,
                f"{problem} of {run.plan.name} {begin} with {wanted!r}",
                evidence=f"on the node: {known}",
                hint=f"{run.invocation('releases')} lists them",
            )
        release = matching[0]
    else:
        earlier = earlier_release(run.home)
        if earlier is None:
            raise StageFailure(
                Exit.REFUSED,
                f"there is no earlier good release of {run.plan.name} to roll back to",
                hint=f"deploy one first; {run.invocation('status')} shows what serves",
            )
        release = earlier
    use(run, release)
    return None


def use_current_release(run: Run) -> Optional[str]:
    """Choose the release that became ready last; refuse where a server is running already."""
    release = run.home.current_release()
    if release is None:
        raise StageFailure(Exit.REFUSED, f"no release of {run.plan.name} that became ready is here", hint="deploy it")
    if run.request["verb"] == "start" and serving.look(run.home).may_serve:
        raise StageFailure(
            Exit.REFUSED,
            f"{run.plan.name} is serving already",
            hint=f"{run.invocation('restart')} starts it again; {run.invocation('deploy')} replaces it",
        )
    use(run, release)
    return None


def use(run: Run, release: ReleaseDirectory) -> None:
    plan = release.read_plan()
    if plan is None:
        raise StageFailure(Exit.REFUSED, f"release {release.name} is damaged: plan.json is unreadable")
    # Warnings are the node's, not the release's: one that is accepted now must not forbid the way back.
    accepted = (*plan.gpu_warnings, *run.plan.gpu_warnings)
    programs = run.plan.engine.get("programs") or plan.engine.get("programs")  # likewise
    run.plan = dataclasses.replace(plan, gpu_warnings=accepted, engine={**plan.engine, "programs": programs})
    run.release = release
    run.uuids = lock_resources(run, run.plan)


def commit(run: Run) -> Optional[str]:
    """Make the release the current one, write down that it is good, and prune old ones.

    Its last word is that the server still lives: whoever dies before that is rolled back.
    """
    assert run.release is not None
    mark(run, run.release, "good", None)
    make_current(run, run.release)
    with contextlib.suppress(OSError):  # it serves; what could not be removed, the next run removes
        _prune(run, keep={run.release.name})
    see_it_live(run)
    return None


def make_current(run: Run, release: ReleaseDirectory) -> None:
    """Make the release that has just answered the lasting one: its unit, ``current``, and the server's record.

    Raises StageFailure where its server has died meanwhile; ``current`` is then as before.
    """
    swap.settle(run)
    see_it_live(run)
    files.point(run.home.current, os.path.join("releases", release.name))
    launcher.note_ready(run.home, run.record, run.new_answered_at)
    deployed.write_down(run)
    environment.give_back_unneeded(run)


def rollback_target(run: Run, *, is_to_blame: bool) -> Optional[ReleaseDirectory]:
    """Return the release to go back to: the current one, unless it is damaged or to blame and another is good."""
    return way_back(run.home, run.release.name if run.release is not None and is_to_blame else None)


def way_back(home: ServerHome, failed: Optional[str] = None) -> Optional[ReleaseDirectory]:
    """Return what a roll back would start, if the release ``failed`` is to blame for it; see ``rollback_target``."""
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


def _prune(run: Run, keep: set[str]) -> None:
    """Remove all but the newest ``keep_releases``; never the current one nor the one to roll back to."""
    good = good_releases(run.home)
    keep = keep | {release.name for release in good[:2]}
    dated = sorted(run.home.all_releases(), key=lambda release: os.stat(release.plan).st_mtime, reverse=True)
    for release in dated[run.plan.keep_releases :]:
        if release.name not in keep:
            files.remove_tree(release.path)
