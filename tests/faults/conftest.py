"""The table of the fault matrix, printed at the end of the session, and what else the rooms' tests have to say."""

from __future__ import annotations

import pytest

lines_key = pytest.StashKey[list[str]]()
cells_key = pytest.StashKey[dict[tuple[str, str, str], str]]()


def say(request: pytest.FixtureRequest, line: str) -> None:
    """Have ``line`` printed when all is over."""
    request.config.stash.setdefault(lines_key, []).append(line)


def say_now(request: pytest.FixtureRequest, line: str) -> None:
    """Print ``line`` at once, for whoever watches a test that takes hours."""
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    with capture.global_and_fixture_disabled():
        terminal.write_line(line)
        terminal.flush()


def note_cell(request: pytest.FixtureRequest, fault: str, stage: str, kind: str, word: str) -> None:
    """Put the result of one cell into the table."""
    request.config.stash.setdefault(cells_key, {})[fault, stage, kind] = word


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    cells = config.stash.get(cells_key, {})
    if cells:
        terminalreporter.section("faults: {fault} x {stage}: exit code, what serves afterwards, after one plain deploy")
        for line in table(cells):
            terminalreporter.write_line(line)
    for line in config.stash.get(lines_key, []):
        terminalreporter.write_line(line)


def table(cells: dict[tuple[str, str, str], str]) -> list[str]:
    rows: dict[str, list[str]] = {}
    for (fault, stage, kind), word in cells.items():
        rows.setdefault(fault, []).append(f"{stage}{'*' if kind == 'systemd' else ''}: {word}")
    width = max(map(len, rows))
    told = [f"{fault:{width}}  {row[0]:44}" + "".join(f"{cell:44}" for cell in row[1:]) for fault, row in rows.items()]
    return [*(line.rstrip() for line in told), "* on a node whose PID 1 is systemd"]
