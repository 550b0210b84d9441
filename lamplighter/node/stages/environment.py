"""The stages ``prove`` and ``confirm``: the variables reach every process, before the swap and after it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import Collection, Mapping, Optional

from lamplighter.node.events import Exit
from lamplighter.node.health import drift
from lamplighter.node.keeper import launcher
from lamplighter.node.stages.ready import answer_again, see_it_live
from lamplighter.node.stages.values import Staged, Started
from lamplighter.node.start import ground, startup
from lamplighter.node.system import disks, lock, processes
from lamplighter.node.variables import before, interpreter, live
from lamplighter.node.worker import Run, StageFailure

PROOF_SECONDS = 30.0


def prove(run: Run, staged: Staged) -> None:
    """Start the server's interpreter as the launch script will, and a spawn child: do all variables arrive?

    In scopes pth and interpreter the start-up files outside our root come first, else there would be nothing to prove;
    they hold nothing that the old server's processes would notice. Where this fails, new ones are taken away again.
    """
    try:
        kept = interpreter.present(run.home)
    except OSError as error:
        raise _refused(staged, error) from error
    try:
        _prove(run, staged)
    except StageFailure:
        _give_back(run, kept)
        raise


def _prove(run: Run, staged: Staged) -> None:
    environ = launcher.bare_environment()
    expected = live.expected_of(staged.release)
    if not staged.plan.python:
        _prove_exports(run, staged, expected)
        return
    python = _interpreter(run, staged, environ)
    _reach(run, staged, python)
    proof = before.prove_before(
        staged.release.launch_script,
        python,
        {**expected.values, **_pythonpath(staged)},
        deadline=PROOF_SECONDS,
        secret_names=expected.secrets,
        environ=environ,
        scope=staged.plan.sitecustomize.scope,
    )
    if not proof.ok:
        evidence = "; ".join(f"{d.name}: {d.reason}" for d in proof.differences) or proof.message
        raise _not_reaching(run, staged, proof.message, evidence)
    run.progress(f"{_count(expected)} proven in the interpreter and a spawn child, in {proof.seconds:.2f} s")


def _prove_exports(run: Run, staged: Staged, expected: live.Expected) -> None:
    """Does the launch script give all variables to what it starts? Where that is no Python, no more can be proven."""
    began = time.monotonic()
    try:
        given, _ = ground.surroundings(staged.release.launch_script, launcher.bare_environment())
    except ground.NoAnswer as error:
        raise _not_reaching(run, staged, str(error), str(error)) from error
    lost = sorted(name for name, value in expected.values.items() if given.get(name) != value)
    if lost:
        verb = "is" if len(lost) == 1 else "are"
        message = f"{', '.join(lost)} {verb} not as wanted in what the launch script starts"
        raise _not_reaching(run, staged, message, message)
    seconds = time.monotonic() - began
    run.progress(f"{_count(expected)} proven in what the launch script starts, in {seconds:.2f} s")


def _count(expected: live.Expected) -> str:
    count = len(expected.values)
    return "1 variable" if count == 1 else f"{count} variables"


def _not_reaching(run: Run, staged: Staged, message: str, evidence: str) -> StageFailure:
    return StageFailure(
        Exit.REFUSED,
        f"the variables would not reach the server: {message}",
        cause="environment",
        evidence=evidence,
        hint=_how_to_fix(run, staged),
    )


def _how_to_fix(run: Run, staged: Staged) -> str:
    plan, release = staged.plan, staged.release
    setting, program = ("python", plan.python) if plan.python else ("program", plan.argv[0])
    place = shutil.which(os.path.expanduser(program)) or os.path.expanduser(program)
    ways = {
        release.launch_script: "choose another `root` for this host",
        place: f"move servers.{plan.name}.{setting}",
    }
    for path, way in ways.items():
        if disks.forbids_programs(path):
            return f"{path} lies on a file system mounted noexec, where no program can start: {way}, or remount it exec"
    damage = drift.damage(release)
    if run.request["verb"] == "deploy" or not damage:
        return f"fix servers.{plan.name}.env, .python or .sitecustomize.scope, then deploy again"
    others = f"`{run.invocation('rollback', '--to', 'RELEASE')}` takes another of `{run.invocation('releases')}`"
    return f"release {release.name} is damaged ({damage[0]}): `{run.invocation('deploy')}` writes it again; {others}"


def confirm(run: Run, started: Started) -> None:
    """Have it answer a second time, and look into every live worker: does each carry the variables, as far as is seen?

    What is found wrong fails the stage, and so does a server that has died since it answered; what cannot be read is a
    warning.
    """
    answer_again(run, started)
    plan, main = started.plan, started.launched.main
    members = launcher.members(started.launched, processes.processes())
    proof = live.prove_live(
        live.workers_of(members, live.gpu_holders(started.uuids), plan.engine, main.pid),
        live.expected_of(started.release),
        run.directory.records,
        plan.engine,
        live.version_of(plan, started.release),
        started.launch.log if plan.nccl_proof else None,
    )
    see_it_live(run, started)
    if proof.differences:
        if proof.use:
            run.progress(proof.use)
        raise StageFailure(
            Exit.DEGRADED,
            f"the server runs with other variables than the inventory says: {proof.message}",
            cause="environment",
            evidence=str(proof.differences[0]),
            hint=proof.advice,
        )
    if proof.is_proven:
        run.progress(proof.message)
    else:
        run.warn(proof.message)
    if proof.use:
        run.progress(proof.use)


def give_back_unneeded(run: Run, staged: Staged) -> None:
    """Give back the start-up files that the release which serves now has no use for: an earlier scope, or Python."""
    if not interpreter.recorded(run.home):
        return
    keep: Collection[interpreter.Place] = ()
    plan = staged.plan
    if plan.sitecustomize.scope in interpreter.SCOPES:
        environ = launcher.bare_environment()
        try:
            told = startup.ask(_interpreter(run, staged, environ), launcher.planned_environment(plan, {}))
            keep = interpreter.places_of(plan.sitecustomize.scope, told, run.home)
        except (startup.NoPython, interpreter.Refused):
            return
    _give_back(run, keep)


def _interpreter(run: Run, staged: Staged, environ: Mapping[str, str]) -> list[str]:
    """Return the words that start the server's Python, with the flags that its command line or script gives it."""
    plan = staged.plan
    try:
        path = launch_path(staged.release.launch_script, environ)
        return startup.interpreter_of(plan.argv, path, plan.python)
    except startup.NoPython as reason:
        run.progress(f"the command line does not tell which Python runs ({reason}): {plan.python} stands for it")
        return [plan.python]


def known_interpreter(staged: Staged) -> Optional[list[str]]:
    """Return the words that start the server's Python, None where its command line does not tell, or it is none."""
    if not staged.plan.python:
        return None
    try:
        path = launch_path(staged.release.launch_script, launcher.bare_environment())
        return startup.interpreter_of(staged.plan.argv, path, staged.plan.python)
    except startup.NoPython:
        return None


def launch_path(launch_script: str, environ: Mapping[str, str]) -> str:
    """Return the PATH that the launch script gives to the server."""
    command = [launch_script, "sh", "-c", 'printf %s "$PATH"']
    try:
        done = subprocess.run(command, env=dict(environ), capture_output=True, timeout=PROOF_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return environ.get("PATH", "")  # the proof that follows says what is wrong with the script
    return done.stdout.decode("utf-8", "surrogateescape")


def _pythonpath(staged: Staged) -> dict[str, str]:
    return {name: value for name, value in staged.plan.exports.items() if name == "PYTHONPATH"}


def _reach(run: Run, staged: Staged, python: list[str]) -> None:
    """Put the start-up files of scope pth or interpreter in place, if that is the scope and they are not there."""
    plan, scope = staged.plan, staged.plan.sitecustomize.scope
    if scope not in interpreter.SCOPES:
        return
    try:
        told = startup.ask(python, launcher.planned_environment(plan, {}))
        for path in interpreter.install(scope, told, run.home):
            run.progress(f"scope {scope}: {path} now runs our sitecustomize.py for {told.prefix}")
    except (startup.NoPython, interpreter.Refused, lock.Locked, OSError) as error:
        raise _refused(staged, error) from error


def _refused(staged: Staged, error: Exception) -> StageFailure:
    is_closed = isinstance(error, OSError)
    fix = "let lamplighter write there (become: true)" if is_closed else "fix what the evidence names"
    return StageFailure(
        Exit.REFUSED,
        f"sitecustomize.scope {staged.plan.sitecustomize.scope} cannot be put in place",
        cause="sitecustomize",
        evidence=f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error),
        hint=f"{fix}, or choose another servers.{staged.plan.name}.sitecustomize.scope",
    )


def _give_back(run: Run, keep: Collection[interpreter.Place]) -> None:
    try:
        for path in interpreter.remove(run.home, keep):
            run.progress(f"{path}: what this release does not need is taken out again")
    except (interpreter.Refused, lock.Locked, OSError) as error:
        run.warn(f"a start-up file that is not needed stays: {error}", f"{run.invocation('undeploy')} removes it")
