"""One parser of nvidia-smi and one of /proc in the whole tree: a second one would know less than the first."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]

#: Who may name a path of a process (or of the network) below /proc, or an option of nvidia-smi, and why.
PROC = {
    "lamplighter/node/system/processes.py": "the parser of /proc/PID",
    "lamplighter/node/variables/memory.py": "the memory of a process, by way of the paths of the above",
    "lamplighter/node/system/ports.py": "the parser of /proc/net",
    "lamplighter/node/keeper/detached.py": "words of an error",
    "lamplighter/node/variables/before.py": "the probe opens its own pipe again; it runs in the server's Python, alone",
    "roles/node/checks/test_server.py": "an independent witness: it runs commands on the node and shares no code",
    "roles/node/checks/test_node.py": "the same one",
    "lamplighter/run/shell.py": "the same witness's way to the node",
    "lamplighter/inventory/limits.py": "the memory of this very process, on the control machine",
    "lamplighter/report/timings.py": "the age of the same",
}
SMI = {
    "lamplighter/node/gpu/gpus.py": "the parser of nvidia-smi",
    "roles/node/checks/test_gpus.py": "an independent witness, as above",
}
OF_A_PROCESS = re.compile(r"/proc(?:/(?:[0-9*{%$]|self|net|stat\b|$)|$)")
OPTIONS = re.compile(r"--query-|--format=csv")


def sources() -> Iterator[Path]:
    """What we ship; lab/ is the pretended node, so it writes what is parsed here."""
    yield PROJECT / "tasks.py"
    for folder in ("lamplighter", "roles"):
        yield from (PROJECT / folder).rglob("*.py")


def literals(path: Path) -> Iterator[str]:
    """Every text in the code of a file but its docstrings, the pieces of f-strings too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@pytest.mark.parametrize(("pattern", "homes"), [(OF_A_PROCESS, PROC), (OPTIONS, SMI)], ids=["proc", "nvidia-smi"])
def test_only_the_parser_names_its_source(pattern: re.Pattern[str], homes: dict[str, str]) -> None:
    found = {
        str(path.relative_to(PROJECT)): text for path in sources() for text in literals(path) if pattern.search(text)
    }
    assert {name: text for name, text in found.items() if name not in homes} == {}
    assert next(iter(homes)) in found  # the search does find what it looks for
