"""What the documents name is there: tasks, their options, files, and what they link to."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamplighter.tasks.program import Lamplighter
from tests.driver import PROJECT

DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "inventory/**/*.md", "templates/**/*.md", ".ci/*.md")
    for path in PROJECT.glob(pattern)
    if path.name != "CHANGELOG.md"  # tells of what was, too
)
#: A command line, at the beginning of what is code.
COMMAND = re.compile(r"(?:^ *|&& |\$ )(?:\./inv|lamplighter|invoke) +(?!-)([a-z][a-z._]*)((?: +[^`\n|#&;>)]*)?)")
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)]*))?\)")
#: A path of this project between backquotes.
NAMED = re.compile(r"`((?:lamplighter|lab|roles|templates|tests|docs|inventory)/[A-Za-z0-9_./-]+)`")
#: Paths of a user's own, by which the documents show what to write.
OF_USERS = re.compile(r"(our|own|gpu1|NAME|pcie|lamplighter/share)")


def place(document: Path) -> str:
    return str(document.relative_to(PROJECT))


@pytest.fixture(scope="module")
def tasks() -> dict[str, set[str]]:
    """The options of each task of a checkout, by its name on the command line."""
    import tasks as of_checkout

    program = Lamplighter()
    core = {flag for argument in (*program.core_args(), *_invokes()) for flag in _flags(argument.names)}
    contexts = of_checkout.ns.to_contexts()
    return {
        name: {*context.flags, *core}
        for context in contexts
        for name in (context.name, *context.aliases)
        if name is not None
    }


def _invokes() -> Iterator[object]:
    from invoke.program import Program

    yield from Program().core_args()


def _flags(names: tuple[str, ...]) -> set[str]:
    return {f"--{name}" if len(name) > 1 else f"-{name}" for name in names}


def code(document: Path) -> Iterator[tuple[int, str]]:
    """What a document shows as code, with line numbers: fenced and indented blocks, and what backquotes hold."""
    is_fenced = False
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            yield number, line
        else:
            yield from ((number, span) for span in re.findall(r"`([^`]+)`", line))


@pytest.mark.parametrize("document", DOCUMENTS, ids=place)
def test_every_command_line_can_be_typed(document: Path, tasks: dict[str, set[str]]) -> None:
    wrong = []
    for number, text in code(document):
        for found in COMMAND.finditer(text):
            name, words = found.group(1), re.sub(r"'[^']*'|\"[^\"]*\"", "", found.group(2)).partition("   ")[0]
            if name not in tasks:
                wrong.append(f"{number}: no task {name}")
            else:
                wrong += [
                    f"{number}: {name} has no {flag}" for flag in OPTION.findall(words) if flag not in tasks[name]
                ]
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=place)
def test_every_link_and_path_leads_somewhere(document: Path) -> None:
    text = document.read_text()
    ground = document.parent
    missing = [path for path, _ in LINK.findall(text) if "://" not in path and not (ground / path).exists()]
    kept = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout.split()
    missing += [
        path
        for path in NAMED.findall(text)
        if not OF_USERS.search(path) and not (PROJECT / path).exists() and not any(path in each for each in kept)
    ]
    assert missing == []


def test_the_documents_are_read_as_code() -> None:
    found = [span for document in DOCUMENTS for _, text in code(document) for span in COMMAND.findall(text)]
    assert len(found) > 75
