"""The stages ``stop``, ``free`` and ``start``: the old server goes, its GPUs become free, the new one begins."""

from __future__ import annotations

import signal
import time
from typing import Optional

from lamplighter.node import freed, preflight
from lamplighter.node.act import files, launcher, stop
from lamplighter.node.events import Exit
from lamplighter.node.layout import LaunchFiles, ReleaseDirectory
from lamplighter.node.observe import ownership
from lamplighter.node.worker import Run, StageFailure


def stop_old(run: Run) -> Optional[str]:
    """Stop what we recorded and, by policy, stale processes of the engine; leave all others."""
    claimed = _claims(run)
    stopping = [claim for claim in claimed if claim.may_be_stopped]
    if not stopping:
        return "nothing of ours is running"
    for claim in stopping:
        run.progress(f"stopping {claim}", pids=[claim.process.pid])
    run.heed()
    if preflight.is_answering(run.plan.host, run.plan.port):
        run.old_answered_at = time.time()
    look = run.engine.get("stop") or {}
    manner = stop.Manner(
        signal=getattr(signal, "SIG" + look.get("signal", "TERM")),
        to_all=look.get("scope", "group") == "group",
        grace=run.plan.timeouts.stop,
    )
    run.touched = True
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
    run.heed()
    return {claim.process.pid for claim in _claims(run) if claim.may_be_stopped}


def start_new(run: Run) -> Optional[str]:
    """Start the release under its launcher, after a last look at the port and the GPUs."""
    assert run.release is not None
    launch_release(run, run.release, run.directory.launch("new"))
    return None


def launch_release(run: Run, release: ReleaseDirectory, launch: LaunchFiles) -> None:
    intruders = [claim for claim in _claims(run) if not claim.may_be_stopped]
    if intruders:
        raise StageFailure(
            Exit.NOT_FREED,
            "somebody took a GPU or the port between the check and the start",
            cause="foreign",
            evidence="; ".join(map(str, intruders)),
            hint="end it or agree with its owner, then deploy again",
        )
    run.touched = True
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
