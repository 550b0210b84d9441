"""`diagnose --log`: whole logs through the command itself, and what is no log."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from invoke.exceptions import Exit as Leave

from lamplighter.errors import InventoryError, UsageError
from lamplighter.node.events import Exit
from lamplighter.run import diagnose as doctor
from lamplighter.run.command import Settings
from lamplighter.run.diagnose import diagnose_file, last_runs_text, text

PROJECT = Path(__file__).resolve().parents[2]
CASES = sorted((PROJECT / "tests/cases/logs").iterdir())
RECORDINGS = sorted((PROJECT / "tests/recordings/h200/sglang-0.5.16").glob("*.log"))
KEYS = ["engine", "version", "outcome", "phase", "cause", "evidence", "line", "rank", "hint", "phases"]
KEYS += ["cause_above", "rule"]


def answer(log: Path | str, capsys: pytest.CaptureFixture[str], **given: Any) -> dict[str, Any]:
    given = {"engine": None, "version": None, "host": [], "server": None, **given}
    with pytest.raises(Leave) as left:
        doctor.diagnose(Settings(Path("inventory"), as_json=True), log=str(log), **given)
    assert left.value.code == Exit.OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_gives_what_its_author_says(case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    want = yaml.safe_load((case / "expect.yml").read_text())
    found = answer(case / "server.log", capsys, engine=want["engine"], version=want["version"])
    assert list(found) == KEYS
    for key in ("engine", "version", "outcome", "phase", "cause"):
        assert found[key] == want[key], key
    assert (want["evidence"] or "") in found["evidence"]
    assert want["rank"] is None or found["rank"] == want["rank"]
    assert all(set(each) == {"phase", "seconds"} for each in found["phases"])
    if want["cause"]:
        assert found["hint"]
        assert "{" not in found["hint"]
        assert found["evidence"]
        assert found["line"] > 0


@pytest.mark.parametrize("log", RECORDINGS, ids=lambda log: log.stem)
def test_every_recording_of_a_real_server_is_diagnosed(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(log, capsys)
    assert list(found) == KEYS
    assert found["engine"] == "sglang"


def run(*words: str, stdin: bytes = b"", cwd: Path = PROJECT) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "invoke", "--search-root", str(PROJECT), "diagnose", *words]
    return subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=240, cwd=cwd)


def test_the_command_itself_speaks_json_and_text(tmp_path: Path) -> None:
    case = PROJECT / "tests/cases/logs/sglang-0512-tp6/server.log"
    (tmp_path / "a b.log").write_bytes(case.read_bytes())
    done = run("--log", "a b.log", "--json", "--engine", "sglang", "--engine-version", "0.5.12", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    found = json.loads(done.stdout)
    assert (found["cause"], found["rank"], found["version"]) == ("tp_divisibility", 4, "0.5.12")
    piped = run("--log", "-", "--server", "kimi", stdin=gzip.compress(b"\n" + case.read_bytes()))
    assert piped.returncode == 0
    assert "cause: tp_divisibility" in piped.stdout.decode()
    assert "servers.kimi.args.tp" in piped.stdout.decode()


def test_a_reader_who_has_gone_is_no_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        with pytest.raises(Leave) as left:
            doctor.diagnose(
                Settings(Path("inventory")), log=str(RECORDINGS[0]), engine=None, version=None, host=[], server=None
            )
    assert left.value.code == Exit.OK


def test_a_mistake_leaves_with_2_and_one_clear_message(tmp_path: Path) -> None:
    for words, said in (
        ((), "nothing to diagnose"),
        (("--log", str(tmp_path / "none.log")), "No such file"),
        (("--log", "~nobody-here/none.log"), "~nobody-here/none.log"),
        (("--log", "-", "--host", "demo"), "exclude each other"),
        (("--host", "demo", "--engine", "sglang"), "--engine and --engine-version go with --log"),
    ):
        done = run(*words)
        assert done.returncode == Exit.USAGE, (words, done)
        assert said in done.stderr.decode()
        assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b" \n\n \t\n", "is empty"),
        (bytes(range(256)) * 50, "is no log"),
        ("RuntimeError: x\n".encode("utf-16"), "is UTF-16"),
        (b"\x1f\x8bnot really gzip", "cannot be read"),
        (gzip.compress(b""), "is empty"),
        (gzip.compress(bytes(range(256)) * 50), "is no log"),
    ],
)
def test_what_is_no_log_is_refused_in_words(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        diagnose_file(str(path))


def test_a_directory_and_an_unknown_engine_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Is a directory"):
        diagnose_file(str(tmp_path))
    with pytest.raises(InventoryError, match="did you mean sglang"):
        diagnose_file(str(tmp_path), "sglan")


OOM = b"RuntimeError: CUDA error: invalid device ordinal\n"


def test_junk_among_the_lines_is_read_past(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"ok\n" * 50 + b"\x00\xff\xfe\n" * 20 + OOM)
    assert diagnose_file(str(path), "sglang").cause == "gpu_count"


def test_gzip_is_known_by_its_content_and_read_up_to_where_it_was_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.log"  # not .gz
    path.write_bytes(gzip.compress(OOM * 3))
    assert diagnose_file(str(path)).cause == "gpu_count"
    noise = OOM + b"".join(b"%d\n" % (n * n) for n in range(100_000))
    path.write_bytes(gzip.compress(noise)[:100_000])
    assert diagnose_file(str(path)).cause == "gpu_count"
    assert "cut short" in capsys.readouterr().err


def test_stdin_that_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = [b"\n", b"\n", OOM[:10], OOM[10:]]

    class Pieces(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            data = rest.pop(0) if rest else b""
            buffer[: len(data)] = data
            return len(data)

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(Pieces())))
    assert diagnose_file("-").cause == "gpu_count"


def test_the_text_says_what_is_known_and_no_more() -> None:
    found = {
        "engine": None,
        "version": None,
        "outcome": "failed",
        "phase": "boot",
        "cause": None,
        "evidence": "E\x1b[2J",
    }
    assert text(found) == "unknown engine: failed in phase boot\n  cause: unknown: no signature matches\n  why: E"
    told = last_runs_text({"gpu1": {"kimi": {**found, "run": "R"}, "other": {"error": "no log"}}})
    assert told.splitlines()[0] == "gpu1/kimi, run R"
    assert told.splitlines()[-2:] == ["gpu1/other", "  no log"]
