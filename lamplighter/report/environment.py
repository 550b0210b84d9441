"""What ``env`` found, as text: each worker's verdict, and a table of the variables that are not as planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamplighter.report.summary import table
from lamplighter.report.wording import clean, plural, whole

Hosts = Mapping[str, Mapping[str, Mapping[str, Any]]]

_WITNESSES = {
    "memory": "its live memory",
    "record": "its record, left at its start",
    "exec": "what it was started with",
    "nothing": "no witness",
}


def env_text(data: Hosts) -> str:
    """Return the text for ``{host: {server: data}}``.

    ``data`` of a server: state (carries, differs, inconclusive, stopped), message, variables (how many), workers
    [{pid, title, verdict, witness, proven, reason}], differences [{pid, title, name, expected, found, by}], advice
    (what to do about them), nccl.
    """
    blocks = []
    for host, servers in data.items():
        for name, found in servers.items():
            blocks.append("\n".join(_block(f"{host}/{name}", found)))
        if not servers:
            blocks.append(f"{host}: no servers")
    return "\n\n".join(blocks)


def _block(name: str, found: Mapping[str, Any]) -> list[str]:
    workers = found.get("workers") or []
    differences = found.get("differences") or []
    state = clean(found.get("state"))
    if state == "stopped" or not workers:
        return [f"{name}: {clean(found.get('message')) or state}"]
    total = whole(found.get("variables")) or 0
    rows = [
        (
            str(worker.get("pid")),
            clean(worker.get("title"), 40),
            clean(worker.get("verdict")),
            f"{whole(worker.get('proven')) or 0}/{total}",
            _WITNESSES.get(str(worker.get("witness")), "?"),
        )
        for worker in workers
    ]
    good = sum(worker.get("verdict") == "carries" for worker in workers)
    lines = [f"{name}: {good}/{len(workers)} workers carry {plural(total, 'variable')}"]
    lines += [f"  {line}" for line in table(("pid", "process", "verdict", "proven", "by"), rows)]
    reasons = dict.fromkeys(clean(worker.get("reason")) for worker in workers if worker.get("reason"))
    lines += [f"  {reason}" for reason in reasons]
    if differences:
        heads = ("pid", "process", "variable", "planned", "is", "why")
        cells = [
            (
                str(each.get("pid")),
                clean(each.get("title"), 40),
                clean(each.get("name")),
                _value(each.get("expected")),
                _value(each.get("found")),
                clean(each.get("by")),
            )
            for each in differences
        ]
        lines += ["", *(f"  {line}" for line in table(heads, cells))]
    if found.get("advice"):
        lines += [f"  next: {clean(found.get('advice'))}"]
    if found.get("nccl"):
        lines += ["", f"  {clean(found.get('nccl'))}"]
    return lines


def _value(value: Any) -> str:
    return "(not set)" if value is None else clean(value, 60) or "(empty)"
