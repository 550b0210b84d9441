"""A launcher at the gate: it has imported, waits as long as the run lives, and begins or ends as the run says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamplighter.node.keeper.gate import Gate
from tests.driver import eventually
from tests.node.test_sitecustomize import every3, pysite

BEGUN = """
import json, os, subprocess, sys
child = subprocess.run([sys.executable, "-c", "import os; print('LAMPLIGHTER_GATE' in os.environ)"],
                       stdout=subprocess.PIPE, universal_newlines=True)
print(json.dumps({
    "gate": "LAMPLIGHTER_GATE" in os.environ, "child": child.stdout.strip(), "argv": sys.argv,
    "badness": open("/proc/self/oom_score_adj").read().strip(), "imported": "lazy_part" in sys.modules,
    "variable": os.environ.get("V_A"),
}))
"""


class Launcher:
    """A Python that was started early, with the file at which it waits."""

    def __init__(self, directory: Path, python: str, gate: str) -> None:
        ours = pysite(directory / "ours", {"V_A": ("1", "force")})
        parts = directory / "parts"
        parts.mkdir()
        (parts / "lazy_part.py").write_text("import os\nseen = 'LAMPLIGHTER_GATE' in os.environ\n")
        (parts / "broken_part.py").write_text("raise RuntimeError('no such driver')\n")
        (directory / "begun.py").write_text(BEGUN)
        environ = {"PYTHONPATH": f"{ours}:{parts}", "LAMPLIGHTER_GATE": gate, "LC_ALL": "C.UTF-8"}
        self.process = subprocess.Popen(
            [python, "begun.py", "--flag"],
            env=environ, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def badness(self) -> str:
        return Path(f"/proc/{self.process.pid}/oom_score_adj").read_text().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(str(tmp_path / "gate"), ["lazy_part", "broken_part", "missing_part"])
    yield gate
    gate.close()


@every3
def test_it_waits_with_its_imports_done_and_begins_as_if_there_had_been_no_gate(
    python: str, gate: Gate, tmp_path: Path
) -> None:
    assert gate.reached() is None
    launcher = Launcher(tmp_path, python, gate.path)
    try:
        missing = eventually(gate.reached)
        assert [each.partition(":")[0] for each in missing] == ["broken_part", "missing_part"]
        assert "no such driver" in missing[0]
        assert launcher.badness() == "1000"
        assert launcher.process.poll() is None
        gate.open()
        said, words = launcher.process.communicate(timeout=60)
    finally:
        launcher.close()
    before = Path("/proc/self/oom_score_adj").read_text().strip()
    assert (launcher.process.returncode, words) == (0, "")
    assert json.loads(said) == {
        "gate": False, "child": "False", "argv": ["begun.py", "--flag"], "badness": before, "imported": True,
        "variable": "1",
    }  # fmt: skip


def test_a_gate_that_is_given_up_ends_who_waits_before_its_first_line(gate: Gate, tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, sys.executable, gate.path)
    try:
        eventually(lambda: gate.reached() is not None)
        gate.close()
        gate.close()
        said, _ = launcher.process.communicate(timeout=60)
    finally:
        launcher.close()
    assert (launcher.process.returncode, said) == (75, "")


def test_a_run_that_is_killed_leaves_nobody_at_the_gate(tmp_path: Path) -> None:
    gate = "from lamplighter.node.keeper.gate import Gate; gate = Gate(sys.argv[1], [])"
    make = f"import sys; {gate}; print(flush=True); input()"
    run = subprocess.Popen(
        [sys.executable, "-c", make, str(tmp_path / "gate")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert run.stdout is not None
    run.stdout.readline()
    launcher = Launcher(tmp_path, sys.executable, str(tmp_path / "gate"))
    try:
        eventually((tmp_path / "gate.reached").exists)
        assert launcher.process.poll() is None
        run.kill()
        said, _ = launcher.process.communicate(timeout=60)
    finally:
        run.kill()
        run.communicate()
        launcher.close()
    assert (launcher.process.returncode, said) == (75, "")


def test_an_opened_gate_lets_go_although_the_run_is_killed_at_once(gate: Gate, tmp_path: Path) -> None:
    """Whoever comes late finds the gate open, and the lock gone: it is the word in the file that counts."""
    gate.open()
    launcher = Launcher(tmp_path, sys.executable, gate.path)
    try:
        said, _ = launcher.process.communicate(timeout=60)
    finally:
        launcher.close()
    assert launcher.process.returncode == 0
    assert json.loads(said)["gate"] is False


def test_without_its_gate_it_does_not_begin(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, sys.executable, str(tmp_path / "nowhere"))
    try:
        said, words = launcher.process.communicate(timeout=60)
    finally:
        launcher.close()
    assert (launcher.process.returncode, said) == (75, "")
    assert "waiting for the GPUs" in words


def test_a_second_run_cannot_have_a_gate_that_another_one_holds(gate: Gate) -> None:
    with pytest.raises(BlockingIOError):
        Gate(gate.path, [])
