"""What an engine counts of its own work, read where ``counters`` of its engine.yml says. Asks only."""

from __future__ import annotations

import re
from typing import Optional, Sequence

from lamplighter.node.plan import Plan
from lamplighter.node.system import http, ports

SECONDS = 5.0


def tokens_so_far(plan: Plan, api_key: Optional[str]) -> Optional[float]:
    """Return how many tokens it has read or written; None where it does not tell."""
    rule = plan.engine.get("counters") or {}
    return _sum(plan, [rule["tokens"]], api_key) if rule else None


def requests_at_work(plan: Plan, api_key: Optional[str]) -> Optional[float]:
    """Return how many requests run or wait in it now; None where it does not tell all of it."""
    return _sum(plan, (plan.engine.get("counters") or {}).get("requests") or (), api_key)


def _sum(plan: Plan, patterns: Sequence[str], api_key: Optional[str]) -> Optional[float]:
    if not patterns:
        return None
    path, host = plan.engine["counters"]["path"], ports.probe_host(plan.host)
    try:
        reply = http.request("GET", host, plan.port, path, timeout=SECONDS, api_key=api_key, tls=plan.tls)
    except http.HttpFailed:
        return None
    total, lines = 0.0, reply.text.splitlines() if reply.status == 200 else []
    for pattern in patterns:
        found = [line.rpartition(" ")[2] for line in lines if re.search(pattern, line)]
        try:
            total += sum(map(float, found))
        except ValueError:
            return None
        if not found:
            return None
    return total
