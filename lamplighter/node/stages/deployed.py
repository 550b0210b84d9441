"""What a release is like when it becomes ready, written down: drift is measured against it later."""

from __future__ import annotations

import re
from typing import Any, Collection, Dict, List, Mapping, Sequence

from lamplighter.node.gpu import driver
from lamplighter.node.health import drift
from lamplighter.node.keeper import launcher
from lamplighter.node.stages.values import Staged
from lamplighter.node.system import files, processes
from lamplighter.node.system.processes import Process
from lamplighter.node.variables import scope
from lamplighter.node.worker import Run


def write_down(run: Run, staged: Staged) -> None:
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
                "engine": drift.installed_engine(staged.plan, staged.release),
                "driver": driver.versions(),
                "drop_ins": drift.drop_ins(run.home),
                "environment": [[each.name, each.found] for each in drift.in_environment(report, [])],
                "crew": _crew(
                    staged.plan.engine, launcher.present_members(record), [each["pid"] for each in report["workers"]]
                ),
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
