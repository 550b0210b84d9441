"""What comes from outside and goes to people: text for a terminal, files that are none, options that are a mistake."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from invoke.program import Program

from lamplighter.errors import UsageError
from lamplighter.node.events import Exit
from lamplighter.paths import FILE_LIMIT, read_file, replace_file
from lamplighter.report.wording import LogText, clean, printable
from lamplighter.run import logs
from lamplighter.run.diagnose import diagnose_file
from lamplighter.run.verify import Results, junit_text
from tests.driver import PROJECT

ORDERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200b]")
COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
NASTY = st.text(st.sampled_from("ab1;\x1b\x1b[]m?HJ\x07\\\n\r\t\x9b\x9d\x9c\x00\x7f\u202e\u200b\ud800P_"), max_size=60)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb\x1b]0;title\x07c\n\td", "abc\n\td"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("over\rwritten\r\nnext", "over\nwritten\nnext"),
        ("\x1b]0;never ended\nnext line", "\nnext line"),
        ("gpu1\u202egpj\u200b\x9b2J\x7f", "gpu1gpj"),
    ],
)
def test_text_for_people_orders_no_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert not ORDERS.search(clean(text))


@given(NASTY)
def test_nothing_gets_through_to_a_terminal(text: str) -> None:
    assert not ORDERS.search(printable(text))


@given(st.lists(NASTY, max_size=5))
def test_a_log_keeps_its_colours_and_nothing_else_however_it_is_cut(pieces: list[str]) -> None:
    whole, parts = LogText(), LogText()
    together = whole.feed("".join(pieces)) + whole.finish()
    assert "".join(map(parts.feed, pieces)) + parts.finish() == together
    assert not ORDERS.search(COLOURS.sub("", together))


def test_colours_of_a_log_end_with_it() -> None:
    log = LogText()
    assert log.feed("\x1b[3") == ""
    assert log.feed("1mred\x1b[2J") == "\x1b[31mred"
    assert log.finish() == "\x1b[0m"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_log_is_made_safe_for_a_terminal_and_left_alone_for_a_file(
    is_terminal: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    said = "a\x1b[31mb\x1b]0;x\x07c\n"
    for name in ("", "gpu1/kimi"):
        place = logs.Screen().place(name)
        for piece in said:
            place.write(piece)
        place.finish()
    shown = "a\x1b[31mbc\n\x1b[0m" + "gpu1/kimi  abc\n"
    assert capfd.readouterr().out == (shown if is_terminal else said + f"gpu1/kimi  {said}")


def odd(name: str, directory: Path) -> Path:
    """A path that is no file to read or write."""
    path = directory / name
    make: dict[str, Callable[[], Any]] = {
        "fifo": lambda: os.mkfifo(path),
        "directory": path.mkdir,
        "zero": lambda: path.symlink_to("/dev/zero"),
        "socket": lambda: _bind(path),
        "huge": lambda: _grow(path),
        "kmsg": lambda: path.symlink_to("/proc/kmsg"),
    }
    make[name]()
    return path


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _grow(path: Path) -> None:
    path.touch()
    os.truncate(path, FILE_LIMIT + 1)


ODD = ["fifo", "directory", "zero", "socket", "huge"]


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_file_is_not_read(name: str, tmp_path: Path) -> None:
    path = odd(name, tmp_path)
    with pytest.raises(OSError, match=name.replace("zero", "device").replace("huge", "MiB")) as caught:
        read_file(path)
    assert caught.value.filename == str(path)
    if name != "huge":  # a log may be
        with pytest.raises(UsageError, match=f"--log {path}: [Ii]s a"):
            diagnose_file(str(path))


def test_what_would_wait_for_ever_has_nothing_and_dev_null_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "null"
    path.symlink_to(os.devnull)
    assert read_file(path) == b""


@pytest.mark.parametrize("name", [*ODD, "null", "text", "html"])
def test_a_report_replaces_nothing_but_a_report(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name in ODD:
        path = odd(name, tmp_path)
    elif name == "null":
        path.symlink_to(os.devnull)
    else:
        path.write_text("my notes\n" if name == "text" else "<html><testsuites/></html>")
    before = path.lstat().st_ino, path.lstat().st_size
    with pytest.raises(UsageError, match=f"--junit {path}: "):
        Results(str(path))
    assert (path.lstat().st_ino, path.lstat().st_size) == before
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    "before",
    [
        "",
        "\n",
        junit_text([]),
        '<?xml version="1.0"?><!-- pytest --><testsuites><testsuite/></testsuites>',
        "<testsuite>",
    ],
)
def test_a_report_replaces_a_report_and_keeps_its_mode_and_links(before: str, tmp_path: Path) -> None:
    path, link = tmp_path / "report.xml", tmp_path / "link.xml"
    path.write_text(before)
    path.chmod(0o640)
    link.symlink_to(path)
    Results(str(link)).add("gpu1", "demo", [])
    assert "gpu1/demo" in path.read_text()
    assert (link.is_symlink(), path.stat().st_mode & 0o777) == (True, 0o640)
    assert sorted(os.listdir(tmp_path)) == ["link.xml", "report.xml"]


def test_a_file_that_cannot_be_replaced_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.xml"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fchmod", full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new")
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["report.xml"])


# --------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def inv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line in this process: its exit code and what it said."""
    inventory = tmp_path / "inventory"
    inventory.mkdir()
    servers = "{demo: {engine: demo, model: m, port: 8000}}"
    (inventory / "hosts.yml").write_text(
        f"all: {{hosts: {{gpu1: {{ansible_host: gpu1.invalid, servers: {servers}}}}}}}\n"
    )
    monkeypatch.setenv("LAMPLIGHTER_INVENTORY", str(inventory))

    def run(*words: str) -> Any:
        line = ["inv", *words]
        monkeypatch.setattr(sys, "argv", line)
        with pytest.raises(SystemExit) as left:
            Program().run(["inv", "--search-root", str(PROJECT), *words])
        told = capfd.readouterr()
        return SimpleNamespace(code=left.value.code, out=told.out, err=told.err)

    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status", "--host", "--", "--json"), "what follows -- would be lost: --json"),
        (("stop", "--host", "gpu1", "--", "--server", "demo"), "what follows -- would be lost: --server demo"),
        (("status", "--host=--bogus"), "--host has the value '--bogus', which looks like an option"),
        (("verify", "--host", "gpu1", "-k", "-x"), "-k has the value '-x', which looks like an option"),
        (("verify", "--host", "gpu1", "--junit=-o"), "(a path that begins so: ./-o)"),
        (("deploy", "--host", "gpu1", "--max-age=-7d"), "--max-age has the value '-7d'"),
        (("deploy", "--host", ""), "--host is empty"),
        (("logs", "--host", "gpu1", "--lines", " "), "--lines is empty"),
        (("lab.down", "--name", "../x"), "'../x' is no name for a lab node"),
        (("lab.up", "--name", "a\nb"), "'a\\nb' is no name for a lab node"),
        (("lab.down", "--name", "\x1b[2J"), "'\\x1b[2J' is no name for a lab node"),
        (("status", "--host", "gpu1", "--watch", "999999999w"), "is more than thirty years"),
        (("dev.test", "--args", "-k 'x"), "No closing quotation"),
        (("diagnose", "--log", "/dev/zero"), "--log /dev/zero: is a device"),
        (("diagnose", "--log", "{text}", "--engine", "a" * 300), "no engine 'aaa"),
        (("diagnose", "--log", "{text}", "--engine", "../sglang"), "no engine '../sglang'"),
        (("verify", "--host", "gpu1", "--junit", "/dev/full"), "--junit /dev/full: is a device"),
        (("verify", "--host", "gpu1", "--junit", "/etc/passwd"), "it is no JUnit report"),
        (("verify", "--host", "gpu1", "--junit", "/etc/passwd/x"), "--junit /etc/passwd/x: Not a directory"),
        (("config", "--host", "\x1b]0;x\x07\x1b[2Jgpu1\u202e"), "gpu1"),
        (("status", "--host", "gpu1", "--server", "\x9b2J\r"), "no host of gpu1 has server"),
        (("logs", "--host", "gpu1", "--run", "\x1b[2J", "--lines", "\x1b[2J"), "is no whole number"),
    ],
)
def test_an_odd_value_is_a_mistake_of_usage_told_in_clean_words(
    words: tuple[str, ...], said: str, inv: Any, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("hello\n")
    done = inv(*(word.replace("{text}", str(text)) for word in words))
    assert done.code == Exit.USAGE, done
    told = done.err + done.out
    assert said in told
    assert not ORDERS.search(told)
    assert "Traceback" not in told


def test_json_asked_for_behind_a_double_dash_is_answered_in_json(inv: Any) -> None:
    assert '"exit_code": 2' in inv("status", "--host", "--", "--json").out
