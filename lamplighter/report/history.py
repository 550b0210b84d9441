"""What has been done to servers, and who holds which of them, as text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamplighter.report.summary import blocks
from lamplighter.report.wording import clean, moment, number, seconds

Hosts = Mapping[str, Mapping[str, Mapping[str, Any]]]


def history_text(data: Hosts, width: int = 0) -> str:
    """One row a run over all hosts, oldest first: when, on what, who asked for what, how it ended, and its id.

    ``data`` of a server: runs [{id, verb, by, since, state (at work, ended, killed, unknown), outcome, exit_code,
    cause, message, downtime_seconds}]. What a failed one said stands below its row. ``width`` is that of a
    terminal, and 0 where nothing has to fit.
    """
    runs = [
        (number(run.get("since")) or 0.0, f"{clean(host)}/{clean(name)}", run)
        for host, servers in data.items()
        for name, server in servers.items()
        for run in _items(server.get("runs"))
    ]
    if not runs:
        return "no runs"
    runs.sort(key=lambda each: each[0])
    heads = ("when", "server", "verb", "by", "outcome", "downtime", "cause", "run")
    rows = [
        (
            moment(run.get("since")) or "?",
            name,
            clean(run.get("verb")) or "?",
            clean(run.get("by"), 60) or "?",
            outcome_of(run),
            "-" if (down := number(run.get("downtime_seconds"))) is None else seconds(down),
            clean(run.get("cause")) or "-",
            clean(run.get("id")),
        )
        for _, name, run in runs
    ]
    text, *told = blocks(heads, rows, right=(5,), width=width)
    for lines, (_, _, run) in zip(told, runs, strict=True):
        text += lines
        if run.get("exit_code") and run.get("message"):
            text.append(f"      {clean(run.get('message'), 200)}")
    return "\n".join(text)


def outcome_of(run: Mapping[str, Any]) -> str:
    """How a run stands or ended: ``deployed``, ``failed (6)``, ``at work``, ``killed``."""
    if run.get("state") != "ended":
        return clean(run.get("state")) or "?"
    code = number(run.get("exit_code"))
    return (clean(run.get("outcome")).replace("_", " ") or "ended") + (f" ({code:.0f})" if code else "")


def last_run_note(run: Mapping[str, Any]) -> str:
    """``last run: deploy, failed (6) [cuda_out_of_memory], 2026-01-02 03:09:11 UTC, asked for by ann@desk, run ID``."""
    cause = f" [{clean(run.get('cause'))}]" if run.get("cause") else ""
    parts = [f"last run: {clean(run.get('verb')) or 'a run'}", f"{outcome_of(run)}{cause}"]
    parts += [since] if (since := moment(run.get("since"))) else []
    parts += [f"asked for by {by}"] if (by := clean(run.get("by"))) else []
    return ", ".join([*parts, f"run {clean(run.get('id')) or '?'}"])


def hold_text(data: Hosts) -> str:
    """One line a server: who holds it, why and until when, or that nobody does.

    ``data`` of a server: hold (null or {message, by, since, until}), ended (the hold that was ended), run (at work).
    """
    lines = []
    for host, servers in data.items():
        for name, server in servers.items():
            ended = server.get("ended")
            told = hold_note(server.get("hold")) or (
                f"no longer on hold (it was {hold_note(ended).removeprefix('on hold ')})" if ended else "not on hold"
            )
            lines.append(f"{clean(host)}/{clean(name)}: {told}")
            run = server.get("run")
            if isinstance(run, Mapping) and server.get("hold"):
                who = f"run {clean(run.get('id'))} ({clean(run.get('verb'))}, by {clean(run.get('by'))})"
                lines.append(f"  {who} was at work already, and goes on")
    return "\n".join(lines) or "no servers"


def hold_note(hold: object) -> str:
    """``on hold until ..., by ann@desk since ...: "why"``; empty where there is none."""
    if not isinstance(hold, Mapping):
        return ""
    until, since = moment(hold.get("until")) or "?", moment(hold.get("since")) or "?"
    by, why = clean(hold.get("by")) or "?", clean(hold.get("message"), 300)
    return f'on hold until {until}, by {by} since {since}: "{why}"'


def _items(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, (list, tuple)) else []
