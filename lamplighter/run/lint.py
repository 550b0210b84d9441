"""Lint before anything is opened: what refuses a deploy, and the task with its report for people or as SARIF."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import quote

from invoke.exceptions import Exit as Leave

import lamplighter
from lamplighter.errors import UsageError
from lamplighter.inventory.values import Lint
from lamplighter.lint import About, load_rules
from lamplighter.lint.chosen import lint_chosen, place_of
from lamplighter.node.events import Exit
from lamplighter.paths import replace_file
from lamplighter.report.wording import plural
from lamplighter.run import command, verify

if TYPE_CHECKING:
    from sarif_pydantic import Location

    from lamplighter.run.command import Settings

FORMATS = ("text", "sarif")
#: How a report of ours begins.
_SARIF = re.compile(rb"\s*\{.{0,400}\"(?:version\"\s*:\s*\"2\.1|\$schema\"[^,]{0,200}sarif)", re.DOTALL)


def report(settings: Settings, patterns: Sequence[str], server: str | None, kind: str, out: str | None) -> NoReturn:
    """Lint the servers of the hosts, of all where none is named, say what was found and leave: 2 where errors are."""
    with command.guarded(settings):
        if kind not in FORMATS:
            raise UsageError(f"--format {kind}: there is no such format", next_step=f"write {' or '.join(FORMATS)}")
        if out is not None and kind != "sarif":
            raise UsageError("--out is for --format sarif", next_step="./inv lint > FILE")
        place = None if out is None else verify.place_of_report(out, "--out", _SARIF, "SARIF")
        inventory = settings.load()
        hosts = inventory.resolve(inventory.select(patterns or ["all"]))
        chosen = [(host, [each for each in host.servers.values() if server in (None, each.name)]) for host in hosts]
        if server and not any(servers for _, servers in chosen):
            raise command.no_host_has(server, patterns or ["all"])
        warned = [lint for host in hosts for lint in host.warnings]
        found = sorted(dict.fromkeys([*warned, *lint_chosen(chosen, settings.project)]), key=place_of)
        if kind == "text":
            command.say(text(found, sum(len(servers) for _, servers in chosen)))
        elif place is None:
            command.say(sarif(found, load_rules(settings.project / "roles")))
        else:
            _write(place, sarif(found, load_rules(settings.project / "roles")))
        raise Leave(code=Exit.USAGE if any(lint.level == "error" for lint in found) else Exit.OK)
    raise AssertionError  # guarded() lets nothing else through


def _write(place: Path, report: str) -> None:
    try:
        replace_file(place, report.encode())
    except OSError as error:
        raise UsageError(f"--out {place}: {error.strerror}") from error


def text(found: Sequence[Lint], servers: int) -> str:
    """One finding a line, as compilers write them, and the count."""
    lines = [f"{f'{lint.origin}: ' if lint.origin else ''}{lint.level}: {lint.what}" for lint in found]
    errors = sum(lint.level == "error" for lint in found)
    counts = f"{plural(errors, 'error')}, {plural(len(found) - errors, 'warning')} in {plural(servers, 'server')}"
    return "\n".join([*lines, counts])


def sarif(found: Sequence[Lint], rules: Mapping[str, About]) -> str:
    """The findings as SARIF 2.1.0, which forges show beside the lines."""
    from sarif_pydantic import Level, Message, ReportingDescriptor, Result, Run, Sarif, Tool, ToolDriver

    ids = sorted({lint.id for lint in found}, key=lambda each: (len(each), each))
    texts = {each: rules[each].about if each in rules else each for each in ids}
    about = [ReportingDescriptor(id=each, short_description=Message(text=texts[each])) for each in ids]
    driver = ToolDriver(name="lamplighter lint", version=lamplighter.__version__, rules=about)
    results = [
        Result(rule_id=lint.id, level=Level(lint.level), message=Message(text=lint.what), locations=_locations(lint))
        for lint in found
    ]
    whole = Sarif(runs=[Run(tool=Tool(driver=driver), results=results)])
    return str(whole.model_dump_json(by_alias=True, exclude_none=True, indent=2)) + "\n"


def _locations(lint: Lint) -> list[Location]:
    from sarif_pydantic import ArtifactLocation, Location, PhysicalLocation, Region

    if lint.origin is None:
        return []
    region = Region(start_line=lint.origin.line) if lint.origin.line else None
    place = PhysicalLocation(artifact_location=ArtifactLocation(uri=quote(lint.origin.file)), region=region)
    return [Location(physical_location=place)]
