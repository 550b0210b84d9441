"""The rooms of the house, from the ground up: a module imports only from rooms below its own, and from its own."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
#: Rooms are packages or single modules; what is in one line may import one another, as long as no circle comes of it.
FLOORS = (
    ("node.system",),
    ("node.events", "node.finding", "node.plan", "node.versions"),
    ("node.layout", "node.journal", "node.confidential", "node.arguments"),
    ("node.keeper",),
    ("node.gpu",),
    ("node.log",),
    ("node.start",),
    ("node.variables",),
    ("node.health",),
    ("node.worker", "node.relay"),
    ("node.stages",),
    ("node.verbs",),
    ("node.__main__",),
    ("node.boot",),
    ("paths", "project", "errors", "exits"),
    ("kept",),
    ("inventory",),
    ("release",),
    ("lint",),
    ("report",),
    ("ssh",),
    ("run",),
    ("tasks", "start"),
)
ROOMS = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
#: What the control side knows of the node side's insides: words both speak, and the reader of a log on this machine.
SHARED = ("node.events", "node.log", "node.arguments", "node.versions")


def modules() -> dict[str, Path]:
    """Every module of the product by its name below ``lamplighter``."""
    package = PROJECT / "lamplighter"
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package).with_suffix("").parts)
        found[name.removesuffix(".__init__").removesuffix("__init__")] = path
    return {name: path for name, path in found.items() if name}


MODULES = modules()


def imported(path: Path) -> Iterator[str]:
    """The full names of all that a file imports, wherever in it, but for what only a type checker reads."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def arrows(name: str) -> set[str]:
    """The modules of the product that one imports."""
    found = set()
    for full in imported(MODULES[name]):
        inner = full.removeprefix("lamplighter.")
        while inner and inner != full and inner not in MODULES:
            inner = inner.rpartition(".")[0]
        if inner and inner != full:
            found.add(inner)
    return found - {name}


def room_of(name: str) -> str:
    return next(room for room in ROOMS if name == room or name.startswith(f"{room}."))


@pytest.mark.parametrize("name", [name for name, path in MODULES.items() if path.stat().st_size])
def test_no_room_reaches_upward(name: str) -> None:
    own = room_of(name)
    for other in arrows(name):
        room = room_of(other)
        assert room == own or ROOMS[room] <= ROOMS[own], f"{name} imports {other}, which is above it"
        if not own.startswith("node.") and room.startswith("node."):
            assert room in SHARED, f"{name} imports {other}, which is the node's own affair"


def test_there_is_no_circle() -> None:
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way, name))
        if name not in done:
            for other in sorted(arrows(name)):
                visit(other, (*way, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def test_the_node_side_needs_the_standard_library_alone() -> None:
    for name, path in MODULES.items():
        if name.startswith("node."):
            tops = {full.partition(".")[0] for full in imported(path)}
            assert tops <= {"lamplighter", *sys.stdlib_module_names}, name


def test_only_the_tasks_know_the_lab() -> None:
    knowing = [name for name, path in MODULES.items() if any(full.split(".")[0] == "lab" for full in imported(path))]
    assert [name for name in knowing if room_of(name) != "tasks"] == []
