"""Rules about variables that others write, or read for themselves: L18 to L26."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lamplighter.lint.view import Entry, Finding, View, c_number, error, warning
from lamplighter.node.versions import compare, is_version_in

_LOOPBACK = "127.0.0.1"
#: What a server listens on to be reached over any address, and what asks it on the node itself then.
_ANY = {"0.0.0.0": _LOOPBACK, "::": "::1"}  # noqa: S104 - compared, not bound


def owned(view: View) -> Iterator[Finding]:
    """L18, L19: what differs for each process, or is set by what starts it."""
    common = view.known.common
    for name, entry in view.env.items():
        if name in common.owned:
            yield error("L18", name, f"is not ours to set: {common.owned[name]}", "leave it out")
        elif entry.forced and name in common.not_forced:
            yield error("L19", name, f"must not be forced: {common.not_forced[name]}", "mode: default")


def overwritten(view: View) -> Iterator[Finding]:
    """L20 to L25: what this version of the engine writes over, or contradicts, with these arguments."""
    for rule in view.engine.get("overwrites") or ():
        entry, lint = view.env.get(rule["name"]), rule.get("lint")
        if entry is None or not lint or not is_version_in(view.version, rule["versions"]):
            continue
        level = lint["forced"] if entry.forced else lint["plain"]
        if level and _is_at_work(view, lint) and _is_against(view, entry, lint):
            make = error if level == "error" else warning
            yield make(lint["id"], rule["name"], *_words(view, rule["effect"], entry, lint))


def _is_at_work(view: View, lint: Mapping[str, Any]) -> bool:
    if lint["when"] and not view.has(lint["when"]):
        return False
    if lint["ranks"] and view.tensor_parallel < 2:
        return False
    return all(view.text(name) == value for name, value in lint["env"].items())


def _is_against(view: View, entry: Entry, lint: Mapping[str, Any]) -> bool:
    """Whether the value is one that is told of: another than the one written, or one of those named."""
    if entry.value is None:
        return not lint["against"]
    given = next((flag for flag in lint["by_flag"] if view.has([flag])), None)
    if lint["against"]:
        return given is not None and any(_is_same(entry.value, each) for each in lint["against"])
    written = lint["by_flag"][given] if given else lint["value"]
    if given and written is None:
        return False
    return written is None or not _is_same(entry.value, written)


def _is_same(one: str, other: str) -> bool:
    number = c_number(one)
    return one.strip() == other or (number is not None and number == c_number(other))


def _words(view: View, effect: str, entry: Entry, lint: Mapping[str, Any]) -> tuple[str, str]:
    if lint["against"]:
        flags = " and ".join(flag for flag in lint["by_flag"] if view.has([flag]))
        return f"{flags} needs the opposite ({view.called} writes {effect})", f"leave it out, or drop {flags}"
    if not entry.forced:
        way = "mode: force, if it must be another" if lint["forced"] != "warning" else "leave it out"
        return f"is lost: {view.called} writes it itself ({effect})", way if lint["forced"] is None else "leave it out"
    if lint["plain"] == lint["forced"]:
        return f"is lost, forced too: {view.called} writes it later ({effect})", "leave it out"
    return f"wins over what {view.called} writes itself ({effect}), which relies on that", "leave it out"


def proxies(view: View) -> Iterator[Finding]:
    """L26: a proxy that is asked for the server's own address."""
    common = view.known.common
    excepted = {part.strip().lower() for name in common.no_proxies for part in view.text(name).split(",")}
    host = asked_at_start(view)
    if host.lower() in excepted or "*" in excepted:
        return
    make = error if view.known.engine.proxy == "error" else warning
    for name in common.proxies:
        if name in view.env and view.env[name].value != "":
            why = f"a question to the server itself ({host}) goes to this proxy too: no_proxy does not name {host}"
            yield make("L26", name, why, f"no_proxy: localhost,{host}")


def asked_at_start(view: View) -> str:
    """The address that the server's own first question goes to."""
    host = (view.value_of(["--host"]) or _LOOPBACK).strip("[]")
    until = view.known.engine.literal_until
    is_literal = until is not None and compare(view.version, until) <= 0
    return host if is_literal else _ANY.get(host, host)
