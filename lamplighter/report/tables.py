"""What the reading verbs found, as text: status, check, verify, config.

Pure functions from ``{host: {server: data}}`` to text without a final line break. ``data`` is the JSON that the verbs
print with ``--json``; a missing field leaves its place empty. A host without servers is said to have none.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lamplighter.node import events
from lamplighter.report.history import hold_note, last_run_note
from lamplighter.report.summary import blocks, table
from lamplighter.report.wording import clean, clean_lines, moment, number, plural, seconds, whole

Hosts = Mapping[str, Mapping[str, Mapping[str, Any]]]

_NOT_VARIABLES = ("host", "origins", "lint", "engines")


def status_text(data: Hosts, width: int = 0) -> str:
    """One row a server: its state, what serves and since when, and below it a run that is at work.

    Here and below, ``width`` is that of a terminal, and 0 where nothing has to fit.

    ``data`` of a server: name, state (serving, starting, stopped, unknown), release, pid, port, model, since, run (null
    or {id, verb, by, stage, since}), last_run (also with state: at work, ended, killed; and outcome, exit_code, cause),
    message, hold (null or {message, by, since, until}), unlisted (no inventory names it), drift ({differences: [{kind,
    name, wanted, found, by}], unknown: [reason]}).
    """
    heads = ("server", "state", "model", "port", "pid", "release", "since")
    rows: list[tuple[str, ...]] = []
    notes: list[list[str]] = []
    for name, server in _servers(data):
        state = clean(server.get("state")) or "unknown"
        facts = [clean(server.get(key)) for key in ("model", "port", "pid", "release")]
        rows.append((name, state, *(fact or "-" for fact in facts), moment(server.get("since")) or "-"))
        notes.append(
            _unlisted_note(name, server)
            + [note for note in (hold_note(server.get("hold")),) if note]
            + _run_note(server)
            + clean_lines(server.get("message"))
            + _drift_notes(server.get("drift"))
        )
    if not rows:
        return _without_servers(data)
    head, *lines = blocks(heads, rows, width=width)
    text = head
    for block, below in zip(lines, notes, strict=True):
        text += [*block, *(line for note in below for line in _note(note, width))]
    return "\n".join(text + _empty_hosts(data))


def _note(text: str, width: int) -> list[str]:
    indent = " " * 6
    return textwrap.wrap(
        text, width or len(text) + 6, initial_indent=indent, subsequent_indent=f"{indent}  ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _unlisted_note(name: str, server: Mapping[str, Any]) -> list[str]:
    if not server.get("unlisted"):
        return []
    host, _, own = name.partition("/")
    if server.get("state") == "stopped":
        return ["the inventory does not name it"]
    return [f"the inventory does not name it: `{events.invocation('undeploy', host, own, '--stop')}` ends it"]


def _drift_notes(drift: object) -> list[str]:
    """One line a difference: what it is about, what is wanted, what is there."""
    if not isinstance(drift, Mapping):
        return []
    differences = _items(drift.get("differences"))
    notes = [
        f"drift, {clean(each.get('kind'))}: {clean(each.get('name'), 100)}: "
        f"wanted {_value_of(each.get('wanted'))}, found {_value_of(each.get('found'))}"
        + (f" ({clean(each.get('by'), 200)})" if each.get("by") else "")
        for each in differences
    ]
    unknown = drift.get("unknown")
    return notes + [f"not compared: {clean(why, 200)}" for why in (unknown if isinstance(unknown, list) else [])]


def _value_of(value: object) -> str:
    return "nothing" if value is None else clean(value, 120) or "''"


def releases_text(data: Hosts, width: int = 0) -> str:
    """One row a release, newest first: what it is worth, whether it is current or next for a rollback, age and size.

    ``data`` of a server: releases [{release, verdict (good, bad, unproven), is_current, is_rollback_target, is_adopted,
    written, judged, bytes, run, cause, message}].
    """

    def block(server: Mapping[str, Any]) -> list[str]:
        rows = [
            (
                clean(release.get("release")),
                clean(release.get("verdict")) or "?",
                _standing(release),
                moment(release.get("judged") or release.get("written")) or "-",
                _size(number(release.get("bytes"))),
                clean(release.get("message"), 100),
            )
            for release in _items(server.get("releases"))
        ]
        heads = ("release", "verdict", "standing", "since", "size", "")
        return table(heads, rows, (4,), width) if rows else ["  no release: nothing has been deployed here"]

    return _blocks(data, block)


def _standing(release: Mapping[str, Any]) -> str:
    words = {"is_current": "current", "is_rollback_target": "next for rollback", "is_adopted": "adopted"}
    return ", ".join(word for key, word in words.items() if release.get(key)) or "-"


def _size(count: float | None) -> str:
    return "-" if count is None else f"{count / 1024:.0f} KiB" if count < 1 << 20 else f"{count / (1 << 20):.1f} MiB"


def check_text(data: Hosts, width: int = 0) -> str:
    """Each question with its answer and the evidence, then what a deploy would stop and what it would leave alone.

    ``data`` of a server: findings [{id, level (ok, warning, error), message, evidence, hint}] and would_stop
    [{pid, user, title, why, action (stop, leave)}].
    """
    answers = {"ok": "ok", "warning": "WARNING", "error": "ERROR"}

    def block(server: Mapping[str, Any]) -> list[str]:
        findings = _items(server.get("findings"))
        rows = [
            (clean(found.get("id")), answers.get(str(found.get("level")), clean(found.get("level")) or "?"), said)
            for found in findings
            for said in [_said(found)]
        ]
        lines = table(("question", "answer", ""), rows, width=width) if rows else ["  nothing was asked"]
        for found in findings:
            lines += [f"  next ({clean(found.get('id'))}): {line}" for line in clean_lines(found.get("hint"))]
        return lines + _would_stop(_items(server.get("would_stop")), width) + ["", f"  {_count(findings, 'level')}"]

    return _blocks(data, block)


def plan_text(data: Hosts, width: int = 0) -> str:
    """What a deploy would change of each server, whom it would stop, which checks follow, and what would refuse it.

    ``data`` of a server: release, state, serving (a release or null), is_pending, changes ({argv, variables, secrets,
    settings: [{name, before, after}], files: {name: unified diff}, restarts}), drift, findings, would_stop, checks
    (names).
    """
    kinds = (("argv", "arguments"), ("variables", "variables"), ("secrets", "secrets"), ("settings", "settings"))

    def block(server: Mapping[str, Any]) -> list[str]:
        changes = server.get("changes") or {}
        lines = [f"  {_plan_head(server, changes)}"]
        for key, heading in kinds:
            found = _items(changes.get(key))
            lines += [f"  {heading}:", *(f"    {_changed(each)}" for each in found)] if found else []
        for name, diff in (changes.get("files") or {}).items():
            if str(diff).count("\n@@ ") == 1 and "\n@@ -0,0 " in str(diff):
                lines.append(
                    f"  {clean(name)}: new, {plural(str(diff).count(chr(10)) - 2, 'line')} (`render` writes it)"
                )
                continue
            lines += [f"  {clean(name)}:", *(f"    {line}" for line in map(_indented, str(diff).splitlines()))]
        lines += [f"  {note}" for note in _drift_notes(server.get("drift"))]
        lines += _would_stop(_items(server.get("would_stop")), width)
        findings = [each for each in _items(server.get("findings")) if each.get("level") in ("warning", "error")]
        lines += [f"  {clean(each.get('level'))}: {_said(each)}" for each in findings]
        names = [clean(name) for name in server.get("checks") or ()]
        return [*lines, f"  then {plural(len(names), 'check')}:", *_wrapped(names, width)] if names else lines

    return _blocks(data, block)


def _wrapped(names: Sequence[str], width: int) -> list[str]:
    """Names with commas between them, in lines that a terminal shows whole."""
    indent = " " * 4
    return textwrap.wrap(
        ", ".join(names), min(width or 100, 100), initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _plan_head(server: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    wanted, serving = clean(server.get("release")), clean(server.get("serving"))
    if not server.get("is_pending"):
        return f"nothing would change: release {serving} serves as the inventory wants it"
    if not serving:
        return f"nothing serves ({clean(server.get('state'))}): release {wanted} would be started"
    kind = "" if changes.get("restarts") else " (only how it is treated: nothing else would run)"
    return f"release {wanted} would replace {serving}{kind}"


def _indented(line: str) -> str:
    """A line of a diff, made printable: its mark and its indentation stay."""
    mark, text = line[:1], line[1:]
    return mark + text[: len(text) - len(text.lstrip())] + clean(text, 400)


def _changed(change: Mapping[str, Any]) -> str:
    name, before, after = (clean(change.get(key), 400) for key in ("name", "before", "after"))
    if change.get("before") is None:
        return f"+ {name} {after}".rstrip()
    return f"- {name} {before}".rstrip() if change.get("after") is None else f"~ {name}: {before} -> {after}"


def verify_text(data: Hosts, width: int = 0) -> str:
    """Each question with its answer, the seconds it took and the evidence.

    ``data`` of a server: checks [{name, question, outcome (passed, warning, failed, error, skipped), evidence,
    seconds}].
    """

    def block(server: Mapping[str, Any]) -> list[str]:
        checks = _items(server.get("checks"))
        rows = []
        for check in checks:
            outcome = clean(check.get("outcome")) or "?"
            took = number(check.get("seconds"))
            evidence = clean(check.get("evidence"), 200)
            if outcome in ("failed", "error", "warning"):  # -k and the inventory go by its name
                evidence = f"{evidence} [{clean(check.get('name'), 80)}]".lstrip()
            rows.append(
                (
                    clean(check.get("question") or check.get("name"), 80),
                    _ANSWERS.get(outcome, outcome),
                    "" if took is None else seconds(took),
                    evidence,
                )
            )
        heads = ("question", "answer", "took", "evidence")
        lines = table(heads, rows, (2,), width) if rows else ["  nothing was checked"]
        return [*lines, "", f"  {_count(checks, 'outcome')}"]

    return _blocks(data, block)


#: What a check found, as the answer to its question.
_ANSWERS = {"passed": "yes", "failed": "NO", "error": "ERROR", "warning": "no (warning)"}


def config_text(data: Mapping[str, Mapping[str, Any]]) -> str:
    """Each resolved variable of each host with the place that set it, then what the lint says.

    ``data`` of a host is ``Host.to_json()``: variables, nested; origins {dotted path: "file:line"}, where a path speaks
    for all below it that have none of their own; lint [{id, level, variable, message, origin, instead}].
    """
    text: list[str] = []
    for host, config in data.items():
        text += ["", f"{clean(host)}:"] if text else [f"{clean(host)}:"]
        origins = config.get("origins")
        rows = [
            (clean(path), _value(value), _origin(path, origins if isinstance(origins, Mapping) else {}))
            for path, value in _leaves({key: value for key, value in config.items() if key not in _NOT_VARIABLES})
        ]
        text += table(("variable", "value", "set at"), rows) if rows else ["  no variables"]
        for name, own in (config.get("engines") or {}).items():
            instead = ", which replaces the built-in one" if own.get("replaces") else ""
            text.append(f"  engine {clean(name)} is one of your own{instead}: {clean(own.get('place'))}")
        for found in _items(config.get("lint")):
            place = clean(found.get("origin"))
            instead = f"; instead: {clean(found.get('instead'))}" if found.get("instead") else ""
            told = f"{clean(found.get('variable'))}: {clean(found.get('message'))}{instead}"
            text.append(f"  {clean(found.get('level')) or '?'}: {place + ': ' if place else ''}{told}")
    return "\n".join(text) or "no hosts"


def difference_text(names: Sequence[str], found: Sequence[Mapping[str, Any]]) -> str:
    """In what two hosts differ: ``found`` [{variable, values of both, origins of both}]."""
    if not found:
        return f"{clean(names[0])} and {clean(names[1])} are alike"
    rows = [
        (clean(each["variable"]), *(f"{_value(value)}  {clean(origin)}".rstrip() for value, origin in _pairs(each)))
        for each in found
    ]
    return "\n".join(table(("variable", *map(clean, names)), rows))


def _pairs(different: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    return zip(different["values"], different["origins"], strict=True)


def _leaves(value: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        path = f"{above}.{key}" if above else str(key)
        if isinstance(item, Mapping) and item:
            yield from _leaves(item, path)
        else:
            yield path, item


def _origin(path: str, origins: Mapping[str, Any]) -> str:
    while path:
        if path in origins:
            return clean(origins[path])
        path = path.rpartition(".")[0]
    return ""


def _servers(data: Hosts) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for host, servers in data.items():
        for name, server in servers.items():
            yield f"{clean(host)}/{clean(name)}", server


def _blocks(data: Hosts, block: Callable[[Mapping[str, Any]], list[str]]) -> str:
    text: list[str] = []
    for name, server in _servers(data):
        text += ["", f"{name}:"] if text else [f"{name}:"]
        text += block(server)
    return "\n".join(text + _empty_hosts(data)) if text else _without_servers(data)


def _without_servers(data: Hosts) -> str:
    return "\n".join(_empty_hosts(data)) or "no hosts"


def _empty_hosts(data: Hosts) -> list[str]:
    return [f"  {clean(host)}: no servers" for host, servers in data.items() if not servers]


def _run_note(server: Mapping[str, Any]) -> list[str]:
    run, word = server.get("run"), "at work"
    if not isinstance(run, Mapping):
        run, word = server.get("last_run"), "killed without a last word"
        if not isinstance(run, Mapping):
            return []
        if run.get("state") != "killed":
            return [last_run_note(run)]
    parts = [f"{clean(run.get('verb')) or 'a run'} {word}"]
    if stage := clean(run.get("stage")):
        parts.append(f"at {stage}")
    if since := moment(run.get("since")):
        parts.append(f"since {since}")
    if by := clean(run.get("by")):
        parts.append(f"asked for by {by}")
    if identity := clean(run.get("id")):
        parts.append(f"run {identity}")
    return [", ".join(parts)]


def _said(found: Mapping[str, Any]) -> str:
    message, evidence = clean(found.get("message"), 200), clean(found.get("evidence"), 200)
    return f'{message}: "{evidence}"' if message and evidence else message or evidence


def _would_stop(rows: list[Mapping[str, Any]], width: int = 0) -> list[str]:
    if not rows:
        return []
    words = {"stop": "would stop", "leave": "would leave"}
    told = [
        (
            words.get(str(row.get("action")), clean(row.get("action")) or "?"),
            "" if whole(row.get("pid")) is None else str(whole(row.get("pid"))),
            clean(row.get("user")),
            clean(row.get("title"), 60),
            clean(row.get("why"), 240),
        )
        for row in rows
    ]
    return ["", *table(("process", "pid", "user", "title", "why"), told, (1,), width)]


def _count(rows: list[Mapping[str, Any]], key: str) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        word = clean(row.get(key)) or "?"
        counts[word] = counts.get(word, 0) + 1
    nouns = ("warning", "error")  # the others are no nouns: "3 passed"
    told = [
        plural(count, word) if word in nouns and key == "level" else f"{count} {word}" for word, count in counts.items()
    ]
    return ", ".join(told) or "nothing"


def _items(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, (list, tuple)) else []


def _value(value: object) -> str:
    return clean(value if isinstance(value, str) else json.dumps(value, default=str), 100)
