"""What lint says of variables and arguments: the cases, a pair for each rule, and recipes of others without a word."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lamplighter.lint import Entry, Finding, View, inspect, load_knowledge
from lamplighter.release.engine import load_engine

PROJECT = Path(__file__).parents[2]
ROLES = PROJECT / "roles"
CASES = PROJECT / "tests" / "cases"


@functools.cache
def engine_of(name: str) -> Mapping[str, Any]:
    return load_engine(name, ROLES).compiled


def view(engine: str, version: str | None, argv: Sequence[str], env: Mapping[str, Any], **more: Any) -> View:
    compiled = engine_of(engine)
    known = load_knowledge(ROLES, (engine, *compiled["ancestors"]))
    entries = {
        name: Entry(each["value"], bool(each.get("force"))) if isinstance(each, dict) else Entry(each)
        for name, each in env.items()
    }
    return View(compiled, known, tuple(argv), entries, version, extra=tuple(argv), **more)


def judged(found: Sequence[Finding]) -> dict[str, list[str]]:
    """As the cases say it: names with errors, and names with warnings alone."""
    errors = {each.name for each in found if each.level == "error"}
    return {"errors": sorted(errors), "warnings": sorted({each.name for each in found} - errors)}


@pytest.mark.parametrize("path", sorted((CASES / "env").glob("*.yml")), ids=lambda path: path.stem)
def test_a_case_has_the_errors_and_warnings_that_it_expects(path: Path) -> None:
    case = yaml.safe_load(path.read_text())
    argv = case.get("server_args") or case.get("extra_args") or []
    found = inspect(view(case["engine"], case["engine_version"], argv, case["env"]))
    assert judged(found) == case["expect"], found
