"""One look at the GPUs serves all who only read, for a second; a proof, and whatever failed, is asked about anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamplighter.node.gpu import gpus

TOOL = """#!/bin/sh
echo called >>{calls}
[ ! -e {broken} ] || {{ echo "NVML: gone"; exit 9; }}
case "$1" in *compute-apps*) ;; *) echo "0, {uuid}, H200, 100000, 90000, 0, 40, P0" ;; esac
"""
UUID = "GPU-11111111-2222-3333-4444-555555555555"


class Tool:
    """A nvidia-smi that counts its calls, and can be broken."""

    def __init__(self, place: Path) -> None:
        self._calls, self.broken = place / "calls", place / "broken"
        tool = place / "nvidia-smi"
        tool.write_text(TOOL.format(calls=self._calls, broken=self.broken, uuid=UUID))
        tool.chmod(0o755)

    @property
    def calls(self) -> int:
        return len(self._calls.read_text().splitlines()) if self._calls.exists() else 0


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Tool(tmp_path)


def test_who_only_reads_shares_what_was_answered(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "LOOK_SECONDS", 1e9)
    with gpus.one_look():
        assert gpus.take_sample() == gpus.take_sample()
        assert tool.calls == 2, "its two questions"
        gpus.details(("driver_version",))
        gpus.details(("driver_version",))
        assert tool.calls == 3
    gpus.take_sample()
    assert tool.calls == 5, "and nobody else's"


def test_an_answer_of_long_ago_serves_nobody(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "LOOK_SECONDS", 0.0)
    with gpus.one_look():
        gpus.take_sample()
        gpus.take_sample()
    assert tool.calls == 4


def test_what_failed_is_asked_again(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "LOOK_SECONDS", 1e9)
    tool.broken.touch()
    with gpus.one_look():
        assert gpus.unreadable(gpus.take_sample()) is not None
        tool.broken.unlink()
        assert gpus.unreadable(gpus.take_sample()) is None


def test_who_waits_for_memory_to_settle_looks_each_time(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "LOOK_SECONDS", 1e9)
    monkeypatch.setattr(gpus, "SAMPLE_SECONDS", 0.01)
    monkeypatch.setattr(gpus, "TEARDOWN_SECONDS", 0.2)
    with gpus.one_look():
        _, verdict = gpus.settle((UUID,), {})
    assert (verdict.word, verdict.holders) == (gpus.HELD, ())
    assert tool.calls > 2
