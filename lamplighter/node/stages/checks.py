"""The stage ``preflight``: the first error that the node shows refuses the run, before anything is touched."""

from __future__ import annotations

from typing import Optional

from lamplighter.node.events import Exit
from lamplighter.node.finding import Finding
from lamplighter.node.gpu import gpus
from lamplighter.node.health import preflight, unlisted, wayback
from lamplighter.node.layout import ReleaseDirectory
from lamplighter.node.stages.values import Allocation
from lamplighter.node.worker import Run, StageFailure


def examine(
    run: Run, wanted: Allocation, release: Optional[ReleaseDirectory], target: Optional[ReleaseDirectory]
) -> None:
    """Look at everything that can be known before anything is touched; the first error refuses.

    Asked of what is to start, by ``release`` where that is on the node already, and of ``target``, which a roll back
    would start.
    """
    resolved, host, plan = gpus.Resolved(wanted.uuids), run.request["host"], wanted.plan
    with gpus.one_look():  # nothing is touched here; who stops and who starts looks for himself
        found = preflight.examine(plan, run.home, resolved, host, release=release, request=run.request)
        digest = release.digest if release is not None else run.request["release"]["digest"]
        findings = [
            *found.findings,
            *wayback.examine(run.home, plan, digest, target, found.claims, host),
            *unlisted.findings(run.home, run.request),
        ]
    for finding in findings:
        if finding.level == "warning":
            run.warn(f"{finding.message}: {finding.evidence}" if finding.evidence else finding.message, finding.hint)
    for finding in findings:
        if finding.level == "error":
            raise refusal(finding)


def refusal(finding: Finding) -> StageFailure:
    """The failure of a stage that refuses because of what the node shows."""
    return StageFailure(Exit.REFUSED, finding.message, cause=finding.id, evidence=finding.evidence, hint=finding.hint)
