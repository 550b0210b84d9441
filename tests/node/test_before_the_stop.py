"""What is done for a server before the old one is stopped: its words parsed, its weights read ahead."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.start import weights, words
from lamplighter.release.engine import load_engine
from tests.driver import eventually

PROJECT = Path(__file__).parents[2]
TORCH: dict[str, Any] = load_engine("sglang", PROJECT / "roles").compiled
PARSES = """
import argparse, sys
parser = argparse.ArgumentParser(prog="launch_server.py")
parser.add_argument("--port", type=int, choices=range(1, 65536), metavar="PORT")
parser.add_argument("--api-key")
print(parser.parse_args(sys.argv[sys.argv.index("serve") + 1:]))
"""


def parsed(tmp_path: Path, code: str, *argv: str, **rule: Any) -> words.Verdict:
    """What a parser of these lines makes of a launch, run by a launch script that gives a variable."""
    script = tmp_path / "launch.sh"
    script.write_text('#!/bin/sh\nexport GIVEN=1\nexec "$@"\n')
    script.chmod(0o755)
    engine = {**TORCH, "parser": {"code": code, **rule}}
    parser = words.Parser(engine, [str(script), sys.executable], ["serve", *argv], {"PATH": os.environ["PATH"]})
    try:
        verdict = eventually(parser.poll)
        assert isinstance(verdict, words.Verdict)
        return verdict
    finally:
        parser.close()
        parser.close()


def test_words_that_the_parser_takes(tmp_path: Path) -> None:
    verdict = parsed(tmp_path, "import os\nassert os.environ['GIVEN'] == '1'\n" + PARSES, "--port", "80")
    assert (verdict.refusal, verdict.unsure) == (None, "")


@pytest.mark.parametrize(
    ("argv", "cause", "evidence"),
    [
        (["--no-such-flag", "7"], "unknown_flag", "unrecognized arguments: --no-such-flag 7"),
        (["--port", "lots"], None, "invalid int value: 'lots'"),
        (["--port", "70000"], None, "invalid choice: 70000"),
    ],
)
def test_words_that_it_refuses(tmp_path: Path, argv: list[str], cause: str | None, evidence: str) -> None:
    verdict = parsed(tmp_path, PARSES, *argv)
    assert verdict.refusal is not None
    assert cause is None or verdict.refusal.cause == cause
    assert evidence in (verdict.refusal.evidence or verdict.last_line)


def test_a_package_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    verdict = parsed(tmp_path, "import sgl_kernel_of_nobody")
    assert verdict.refusal is not None
    assert verdict.refusal.cause == "import_error"
    assert "sgl_kernel_of_nobody" in verdict.refusal.evidence


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit(77)", "none that is known here"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("import time; time.sleep(1000)", "did not end within 1 s"),
        ("raise RuntimeError('CUDA out of memory. Tried to allocate 20.00 MiB.')", "CUDA out of memory"),
    ],
)
def test_what_says_nothing_of_the_words_refuses_nothing(tmp_path: Path, code: str, why: str) -> None:
    verdict = parsed(tmp_path, code, seconds=1 if "sleep" in code else 60, passes=["gpu_oom"])
    assert verdict.refusal is None
    assert why in verdict.unsure


def test_a_parser_that_is_closed_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text('#!/bin/sh\nexec "$@"\n')
    script.chmod(0o755)
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    engine = {**TORCH, "parser": {"code": code}}
    parser = words.Parser(engine, [str(script), sys.executable], [], {"PATH": os.environ["PATH"]})
    eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    assert parser.poll() is None
    parser.close()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_no_secret_reaches_the_parser() -> None:
    assert words.words_of(["serve", "--api-key", "k3y", "--port"], {"LAMPLIGHTER_ARG_0": 2}) == [
        "serve", "--api-key", "secret", "--port",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Three files of weights and one of something else, on a real disk, with nothing of them in the page cache."""
    directory = tmp_path / "model"
    directory.mkdir()
    for number in range(3):
        (directory / f"model-{number}.safetensors").write_bytes(os.urandom(12 << 20))
    (directory / "notes.txt").write_bytes(bytes(1 << 20))
    drop(directory)
    return directory


def drop(directory: Path) -> None:
    for file in directory.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def found_cold(model: Path) -> weights.Weights:
    found = weights.look(str(model), ["*.safetensors"])
    assert found.size == 36 << 20
    if found.cached == found.size:
        pytest.skip("this file system keeps its pages")
    return found


def read(ahead: weights.ReadAhead) -> int:
    eventually(lambda: not ahead.is_at_work)
    ahead.close()
    assert ahead.trouble == ""
    return ahead.read


def test_cold_weights_are_read_once(model: Path) -> None:
    found = found_cold(model)
    assert 0 < read(weights.ReadAhead(found, 1 << 40)) <= found.missing  # the kernel reads ahead, too
    again = weights.look(str(model), ["*.safetensors"])
    assert (again.cached, again.missing) == (again.size, 0)


def test_no_more_is_read_than_there_is_room_for(model: Path) -> None:
    found = found_cold(model)
    assert read(weights.ReadAhead(found, weights.PIECE)) == weights.PIECE


def test_weights_that_go_away_are_told(model: Path) -> None:
    found = weights.Weights(((str(model / "gone.safetensors"), 1 << 20),), 0)
    ahead = weights.ReadAhead(found, 1 << 40)
    eventually(lambda: not ahead.is_at_work)
    assert ahead.trouble == f"{model / 'gone.safetensors'}: No such file or directory"


def test_a_file_and_nothing_are_models_too(model: Path) -> None:
    assert weights.look(str(model / "model-0.safetensors"), ["*.gguf"]).size == 12 << 20
    assert weights.look(str(model / "nowhere"), ["*.safetensors"]).files == ()


def test_there_is_no_room_beside_what_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    monkeypatch.setattr(weights.memory, "available_bytes", lambda: 100 * gib)
    assert weights.room_beside(60 * gib) == 30 * gib
    assert weights.room_beside(95 * gib) == 0
    monkeypatch.setattr(weights.memory, "available_bytes", lambda: None)
    assert weights.room_beside(0) == 0


def test_the_engines_parsers_and_gates_are_sound() -> None:
    """Each compiles, and none imports the module that the launch itself runs: runpy would warn of it."""
    for name in ("sglang", "vllm", "transformers"):
        engine = load_engine(name, PROJECT / "roles").compiled
        compile(engine["parser"]["code"], name, "exec")
        assert engine["prestart"]["modules"]
        assert engine["prestart"]["memory_mib"] >= 2048  # what the role does not say itself is filled in
        assert not set(engine["prestart"]["modules"]) & set(engine["launch"]["command"])
