"""The stage ``preflight``: the first error that the node shows refuses the run, before anything is touched."""

from __future__ import annotations

from typing import Optional

from lamplighter.node import preflight
from lamplighter.node.events import Exit
from lamplighter.node.observe import gpus
from lamplighter.node.worker import Run, StageFailure


def examine(run: Run) -> Optional[str]:
    """Look at everything that can be known before anything is touched; the first error refuses."""
    found = preflight.examine(run.plan, run.engine, run.home, gpus.Resolved(run.uuids), run.request["host"])
    for finding in found.findings:
        if finding.level == "warning":
            run.warn(f"{finding.message}: {finding.evidence}" if finding.evidence else finding.message, finding.hint)
    for finding in found.findings:
        if finding.level == "error":
            raise refusal(finding)
    return None


def refusal(finding: preflight.Finding) -> StageFailure:
    """The failure of a stage that refuses because of what the node shows."""
    return StageFailure(Exit.REFUSED, finding.message, cause=finding.id, evidence=finding.evidence, hint=finding.hint)
