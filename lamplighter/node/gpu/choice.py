"""The GPUs that a server is to use: which they are, and whether one could be started on them. Asks nvidia-smi."""

from __future__ import annotations

from typing import Iterable

from lamplighter.node.finding import Finding
from lamplighter.node.gpu import freeing, gpus
from lamplighter.node.layout import ServerHome
from lamplighter.node.plan import Plan


def resolve_gpus(plan: Plan) -> gpus.Resolved:
    """Return the UUIDs of the GPUs that the server will use, or what is wrong."""
    return (
        gpus.resolve(plan.gpus, gpus.accepting(gpus.take_sample(), plan.gpu_warnings.accept))
        if plan.uses_gpus
        else gpus.Resolved(())
    )


def how_to_name_gpus(plan: Plan, trouble: str) -> str:
    """Say what to do where the GPUs of a server cannot be told: the inventory is wrong, or nvidia-smi speaks oddly."""
    if "nvidia-smi" in trouble:
        return gpus.how_to_see(trouble, plan.name)
    return f"compare servers.{plan.name}.gpus with what nvidia-smi -L says on the node"


def settled_verdict(plan: Plan, home: ServerHome, uuids: tuple[str, ...]) -> gpus.Verdict:
    """Judge the GPUs; wait for a moment while the driver tears a dead process's memory down, which outlives it."""
    return gpus.settle(uuids, freeing.read_baseline(home), plan.allow, accepted=plan.gpu_warnings.accept)[1]


def unfit_gpus(plan: Plan, uuids: tuple[str, ...], verdict: gpus.Verdict) -> Iterable[Finding]:
    """What forbids to stop a server on these GPUs: no other could be started on them. One more call of nvidia-smi."""
    wanting = gpus.recovery_trouble(uuids, accepted=plan.gpu_warnings.accept)
    if wanting is not None:
        hint = "do that on the node first; until then every answer about this GPU may be wrong"
        if wanting.startswith(gpus.NO_ANSWER):
            hint = gpus.how_to_see(wanting, plan.name)
        yield Finding("gpu_recovery", "error", wanting, "", hint)
    if verdict.word == gpus.UNKNOWN:
        hint = gpus.how_to_see(verdict.reason, plan.name)
        yield Finding("gpu_unknown", "error", "the state of the GPUs is not known", verdict.reason, hint)
