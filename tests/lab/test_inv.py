"""`./inv` itself: how it starts Python, and how it ends when nobody has taken the signals yet."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.driver import PROJECT, eventually


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_imports_ends_it_without_a_word(number: signal.Signals) -> None:
    words = ["env", "--default-signal=INT", str(PROJECT / "inv"), "config", "--host", "demo"]  # may be ignored here
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as command:
        eventually(
            lambda: "pydantic_core" in Path(f"/proc/{command.pid}/maps").read_text() or command.poll() is not None
        )
        command.send_signal(number)
        said, _ = command.communicate(timeout=30)
    assert (command.returncode, said) == (-number, "")  # which a shell tells as 130 and 143


def test_what_lies_in_the_current_directory_is_not_imported(tmp_path: Path) -> None:
    for name in ("signal", "json", "invoke", "fabric"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current directory')")
    done = subprocess.run(
        [PROJECT / "inv", "config", "--host", "demo", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
