"""`./inv` itself: how it starts Python, and how it ends when nobody has taken the signals yet."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.driver import PROJECT, eventually

#: Stops at the import of a module, and says so.
HOLD = """
import sys, time
class Hold:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            open({imports!r}, "w").close()
            time.sleep(600)
sys.meta_path.insert(0, Hold())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_imports_ends_it_without_a_word(number: signal.Signals, tmp_path: Path) -> None:
    imports = tmp_path / "imports"
    (tmp_path / "sitecustomize.py").write_text(HOLD.format(module="pydantic_core", imports=str(imports)))
    words = ["env", "--default-signal=INT", str(PROJECT / "inv"), "config", "--host", "demo"]  # may be ignored here
    held = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(words, env=held, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as command:
        eventually(lambda: imports.exists() or command.poll() is not None)
        command.send_signal(number)
        said, _ = command.communicate(timeout=120)
    assert (command.returncode, said) == (-number, "")  # which a shell tells as 130 and 143


def test_what_lies_in_the_current_directory_is_not_imported(tmp_path: Path) -> None:
    for name in ("signal", "json", "invoke", "fabric"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current directory')")
    done = subprocess.run(
        [PROJECT / "inv", "config", "--host", "demo", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
