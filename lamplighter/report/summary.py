"""The closing words on a report, for people: the outcome first, then how each server got there and what to do next.

Pure: a Report in, lines out, free of control bytes and in ASCII except for what the node itself said.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

from lamplighter.node.events import Exit
from lamplighter.project import called
from lamplighter.report.report import Report, ServerReport, Stage
from lamplighter.report.wording import clean, clean_lines, clean_log_line, moment, plural, seconds, serving, time_of_day

#: Above this many servers, those that are as wanted get one line instead of a block.
FULL_BLOCKS = 4

_LABEL = 13


def summary(report: Report, width: int = 0) -> list[str]:
    """The closing lines of ``report``; the first is the outcome in one sentence. Tables fit into ``width``."""
    parts = report.parts()
    if not parts:
        return ["Nothing was heard from any host (exit code 1)."]
    warned: set[tuple[str, str]] = set()
    if len(parts) == 1:
        name, only = parts[0]
        return [_sentence(name, only), *_block(name, only, warned, width)]
    lines = [_overall(report, parts), "", *_overview(parts, width)]
    for name, part in parts:
        if part.exit_code != Exit.OK or len(parts) <= FULL_BLOCKS:
            lines += ["", _sentence(name, part), *_block(name, part, warned, width)]
    return lines


def result(report: Report) -> list[str]:
    """The outcome alone: a sentence for each server, and the whole story of what did not go as wanted."""
    parts = report.parts()
    if not parts:
        return summary(report)
    warned: set[tuple[str, str]] = set()
    return [
        line
        for name, part in parts
        for line in (_sentence(name, part), *(_block(name, part, warned) if part.exit_code != Exit.OK else ()))
    ]


def _overall(report: Report, parts: list[tuple[str, ServerReport]]) -> str:
    counts: dict[str, int] = {}
    for _, part in parts:
        word = "degraded" if part.exit_code == Exit.DEGRADED else clean(part.outcome)
        counts[word] = counts.get(word, 0) + 1
    told = ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in counts.items())
    return f"{plural(len(report.hosts), 'host')}: {told}{_code(report.exit_code)}."


def _overview(parts: list[tuple[str, ServerReport]], width: int) -> list[str]:
    rows = []
    for name, part in parts:
        spent = sum(part.durations.values())
        took = seconds(spent) if spent else ""
        news = clean(part.message, 100) if part.exit_code != Exit.OK else f"release {clean(part.release) or '?'}"
        rows.append((clean(name) or "-", clean(part.outcome), str(part.exit_code), took, news))
    return table(("server", "outcome", "code", "took", ""), rows, (2, 3), width)


def _sentence(name: str, part: ServerReport) -> str:
    subject = f"{clean(name)}: " if name else ""
    return f"{subject}{_what_happened(part)}{_code(part.exit_code)}."


def _what_happened(part: ServerReport) -> str:
    release = f"release {clean(part.release)}" if part.release else "the new release"
    old = _named(clean(part.serving.release)) if part.serving and part.serving.release else "the old release"
    at = f" at {clean(part.stage)}" if part.stage else ""
    spent = sum(part.durations.values())
    after = f" after {seconds(spent)}" if spent else ""
    was_ready = any(stage.name == "commit" and stage.ok for stage in part.stages)
    nothing = "; NOTHING IS SERVING" if part.serving is None else f"; {old} is serving"
    sentences: dict[tuple[str, int], str] = {
        ("deployed", Exit.OK): f"{release} is deployed and serving{after}",
        ("unchanged", Exit.OK): f"unchanged, {release} is serving already" if part.release else "unchanged",
        ("started", Exit.OK): f"started, {old} is serving{after}",
        ("stopped", Exit.OK): f"stopped{after}",
        ("undeployed", Exit.OK): "undeployed: nothing of it is left outside lamplighter's own directory",
        ("rolled_back", Exit.OK): f"rolled back, {old} is serving{after}",
    }
    if sentence := sentences.get((part.outcome, part.exit_code)):
        return sentence
    codes: dict[int, str] = {
        Exit.USAGE: "the command or the inventory is wrong; nothing was opened",
        Exit.REFUSED: f"refused{at}; nothing was touched",
        Exit.UNREACHABLE: "unreachable; nothing was touched",
        Exit.NOT_FREED: f"failed{at}, the GPUs were not free for a new server{nothing}",
        Exit.CRASHED: f"{release} {'serves no more' if was_ready else 'crashed in start-up'}{nothing}",
        Exit.NOT_READY: f"{release} {'does not answer any more' if was_ready else 'did not become ready'}{nothing}",
        Exit.DEGRADED: _degraded(part, release),
        Exit.ROLLED_BACK: f"cancelled{at}; {old} is serving again"
        if part.cause == "cancelled"
        else f"{release} failed{at} and was rolled back; {old} is serving",
        Exit.LOCKED: f"refused, {'it is on hold' if part.cause == 'hold' else 'another run is at work on it'}; "
        "nothing was touched",
        Exit.DETACHED: f"{_what_goes_on(part)}{_whereabouts(part)}",
        Exit.INTERRUPTED: "interrupted; nothing was touched",
        Exit.TERMINATED: "interrupted; nothing was touched",
    }
    return codes.get(part.exit_code) or f"{clean(part.outcome).replace('_', ' ')}{at}"


def _named(release: str) -> str:
    """What serves, by its name: a release, else a unit, a container or a process, which say what they are."""
    return release if " " in release else f"release {release}"


def _degraded(part: ServerReport, release: str) -> str:
    if part.serving is None:
        return f"{release} was put into service, but whether it serves is not known"
    return f"{release} is serving, but not everything about it is right"


def _code(exit_code: int) -> str:
    return f" (exit code {exit_code})" if exit_code else ""


def _what_goes_on(part: ServerReport) -> str:
    is_heard_of = part.verb or part.stages
    return "the run goes on on the node without us" if is_heard_of else "not known here whether the run has begun"


def _whereabouts(part: ServerReport) -> str:
    phase = f", phase {clean(part.phase)}" if part.phase else ""
    return f", last seen at {clean(part.stage)}{phase}" if part.stage else ""


def _block(name: str, part: ServerReport, warned: set[tuple[str, str]], width: int = 0) -> list[str]:
    host, _, server = map(clean, name.partition("/"))
    lines = [] if part.exit_code == Exit.OK else ["", *_four_things(part)]
    if part.stages or part.durations:
        lines += ["", *_stage_table(part, width)]
    lines += _figures(part)
    lines += _warnings(host, part, warned)
    tail = [clean_log_line(line) for line in part.log_tail]
    if part.exit_code != Exit.OK and any(tail):
        lines += ["", "  last lines of its log:", *(f"    | {line}".rstrip() for line in tail)]
    if part.exit_code not in (Exit.OK, Exit.USAGE, Exit.REFUSED, Exit.UNREACHABLE, Exit.LOCKED) and server:
        started = part.exit_code != Exit.DEGRADED and any(stage.name == "start" for stage in part.stages)
        of_run = f" --run {clean(part.run)}" if started and part.run else ""  # not of what was put back
        lines.append(f"  more: {called()} logs --host {host} --server {server}{of_run}")
    return lines


def _four_things(part: ServerReport) -> list[str]:
    """What failed, why, what is serving now, what to do next."""
    where = clean(part.stage) + (f" (phase {clean(part.phase)})" if part.phase else "")
    happened = clean_lines(part.message) or ["no reason was given"]
    what = f"{where}: {happened[0]}" if where else happened[0]
    why = [f'"{line}"' for line in clean_lines(part.evidence)]
    if part.cause:
        why = [*why[:-1], f"{why[-1]} [{clean(part.cause)}]"] if why else [f"[{clean(part.cause)}]"]
    label = "contact" if part.outcome == "detached" else "by order" if part.cause == "cancelled" else "what failed"
    lines = _labelled(label, [what, *happened[1:]])
    lines += _labelled("why", why if part.cause != "cancelled" else [])
    for later in part.failures[1:]:
        if later.message and later.message != part.message:
            lines += _labelled("then", [f"{clean(later.stage)}: {clean(later.message)}".lstrip(": ")])
            lines += _labelled("why", [f'"{line}"' for line in clean_lines(later.evidence)])
    lines += _labelled("serving now", [_serving_now(part)])
    return lines + _labelled("next", clean_lines(part.hint))


def _serving_now(part: ServerReport) -> str:
    if part.serving:
        return serving(dataclasses.asdict(part.serving))
    if part.serving_text:
        return clean(part.serving_text)
    if part.outcome in ("refused", "unreachable") or part.exit_code == Exit.USAGE:
        had_lock = any(stage.name == "lock" and stage.ok for stage in part.stages)  # else another run may decide it
        return "nothing, as before: nothing was touched" if had_lock else "as before, nothing was touched"
    if part.outcome == "detached":
        return "not known here; the node decides it without us"
    return "unknown" if part.exit_code in (Exit.INTERNAL, Exit.DEGRADED) else "nothing"


def _labelled(label: str, lines: list[str]) -> list[str]:
    """``label`` beside the first line, the others below each other."""
    return [f"  {label if index == 0 else '':<{_LABEL}}{line}" for index, line in enumerate(lines)]


def _stage_table(part: ServerReport, width: int) -> list[str]:
    stages = part.stages or tuple(Stage(name, spent, True) for name, spent in part.durations.items())
    rows = []
    for stage in stages:
        if stage.skipped:
            note = f"skipped: {clean(stage.skipped, 100)}"
        elif stage.ok is None:
            note = "not over"
        elif stage.ok:
            note = clean(stage.message, 100)
        else:
            note = "FAILED"
        rows.append((clean(stage.name, 20), "" if stage.seconds is None else f"{stage.seconds:.1f}", note))
    return table(("stage", "seconds", ""), rows, (1,), width)


def _figures(part: ServerReport) -> list[str]:
    lines = []
    if part.began is not None and part.ended is not None:
        lines += _labelled("from", [f"{moment(part.began)} to {time_of_day(part.ended)}"])
    if part.ready_seconds is not None:
        took = seconds(part.ready_seconds)
        if part.exit_code == Exit.ROLLED_BACK:
            lines += _labelled("rollback", [f"the old server was ready again after {took}"])
        else:
            lines += _labelled("ready after", [took])
    if part.downtime_seconds is not None:
        lines += _labelled("downtime", [seconds(part.downtime_seconds)])
    if part.exit_code == Exit.OK and (part.serving or part.outcome in ("stopped", "undeployed")):
        lines += _labelled("serving now", [_serving_now(part)])
    return ["", *lines] if lines else []


def _warnings(host: str, part: ServerReport, told: set[tuple[str, str]]) -> list[str]:
    """What it warned of, but for what the same host was ``told`` to have warned of already."""
    lines = []
    for warned in part.warnings:
        if (host, warned.message) in told:
            continue
        told.add((host, warned.message))
        lines += _labelled("warning", [clean(warned.message)])
        lines += _labelled("", clean_lines(warned.hint))
    return ["", *lines] if lines else []


def table(
    heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = (), width: int = 0
) -> list[str]:
    """Rows below their heads, columns two blanks apart; the columns in ``right`` are aligned to the right.

    With a ``width`` that they do not fit into, they are laid out as in ``blocks``.
    """
    return [line for block in blocks(heads, rows, right, width) for line in block]


def blocks(
    heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = (), width: int = 0
) -> list[list[str]]:
    """The lines of the heads, then those of each row: one, where they fit into ``width`` (0: they always do).

    Else the last column is wrapped, if the others leave it room; else a row is its first two cells, and below them the
    others with their heads.
    """
    lines = _in_columns(heads, rows, right)
    if not width or max(map(len, lines)) <= width:
        return [[line] for line in lines]
    before = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads) - 1)]
    indent = 2 + sum(before) + 2 * len(before)
    if indent <= width // 2:
        others = _in_columns(heads, [(*row[:-1], "") for row in rows], right)
        cells = [_fill(row[-1], width - indent) for row in [heads, *rows]]
        return [
            [f"{line:<{indent}}{first}".rstrip(), *(" " * indent + more for more in rest)]
            for line, (first, *rest) in zip(others, cells, strict=True)
        ]
    return [_as_block((heads[0], heads[1]), before[0], [], width)] + [
        _as_block(
            (row[0], row[1]),
            before[0],
            [f"{head} {cell}".lstrip() for head, cell in zip(heads[2:], row[2:], strict=True) if cell not in ("", "-")],
            width,
        )
        for row in rows
    ]


def _as_block(first: tuple[str, str], column: int, facts: Sequence[str], width: int) -> list[str]:
    """A row's first two cells, as columns where they fit, and below them whole facts, as many as a line takes."""
    head = f"  {first[0]:<{column}}  {first[1]}".rstrip()
    lines, facts = [head, ""], list(facts)
    if len(head) > width:
        lines, facts = [f"  {first[0]}", ""], [first[1], *facts]
    for number, fact in enumerate(facts):
        told = fact + ("," if number + 1 < len(facts) else "")
        if lines[-1] and len(lines[-1]) + 1 + len(told) <= width:
            lines[-1] += f" {told}"
        else:
            lines += [f"    {line}" for line in _fill(told, width - 4)]
    return [line for line in lines if line]


def _fill(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _in_columns(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: tuple[int, ...]) -> list[str]:
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines
