"""The stages ``prove`` and ``confirm``: the variables reach every process, before the swap and after it."""

from __future__ import annotations

from typing import Optional

from lamplighter.node import envproof
from lamplighter.node.act import launcher
from lamplighter.node.events import Exit
from lamplighter.node.observe import processes
from lamplighter.node.worker import Run, StageFailure


def prove(run: Run) -> Optional[str]:
    """Start the server's interpreter as the launch script will, and a spawn child: do all variables arrive?"""
    assert run.release is not None
    secrets = run.request.get("secrets") or {}
    expected = {**{name: entry["value"] for name, entry in run.plan.env.items()}, **secrets}
    proof = envproof.prove_before(
        run.release.launch_script,
        [run.plan.python],
        expected,
        deadline=30.0,
        secret_names=tuple(secrets),
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
    return [] if run.launched is None else launcher.members(run.launched, processes.processes())
