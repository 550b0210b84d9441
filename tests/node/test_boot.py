"""The boot program, driven by the very conversation that drives it over SSH; a plain process replaces the channel."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from lamplighter.errors import ContactLost, NodeRefused
from lamplighter.inventory.schema import ConnectionSpec
from lamplighter.node import events
from lamplighter.run import conversation
from lamplighter.run.payload import Runner, boot_source
from lamplighter.ssh.connection import Node, SilenceTimeout
from tests.node.living import IS_ROOT, NOBODY, is_running, until

STATUS = {"verb": "status", "servers": [], "host": "gpu1"}
OLD_PYTHONS = sorted(glob.glob("/root/.pyenv/versions/3.[678].*/bin/python")) if IS_ROOT else []
NEW_PYTHONS = sorted(glob.glob("/root/.pyenv/versions/3.9.*/bin/python")) if IS_ROOT else []
PYTHON_2 = sorted(glob.glob("/root/.pyenv/versions/2.7.*/bin/python")) if IS_ROOT else []


def zipped(contents: dict[str, bytes]) -> Runner:
    total = hashlib.sha256()
    for name, data in sorted(contents.items()):
        total.update(b"%d %s %d\n" % (len(name), name.encode(), len(data)) + data)
    return Runner(total.hexdigest(), dict(sorted(contents.items())))


#: A node side that is quick to unpack and to import; like the real one it starts itself again from its home.
TINY_MAIN = b"""
import json, subprocess, sys
def serve(request, root, home):
    again = subprocess.run([sys.executable, "-I", "-S", home], check=True, stdout=subprocess.PIPE).stdout
    assert again == b"started again", again
    for event in ({"event": "result", "root": root, "servers": []}, {"event": "bye"}):
        print(json.dumps(event), flush=True)
"""
TINY = zipped(
    {
        "__main__.py": b"import sys; sys.stdout.write('started again')",
        "lamplighter/__init__.py": b"",
        "lamplighter/node/__init__.py": b"# " + random.Random(1).randbytes(40_000).hex().encode(),
        "lamplighter/node/__main__.py": TINY_MAIN,
    }
)


@pytest.fixture(autouse=True)
def tiny(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests send TINY; those that ask for ``real`` the node side as it is."""
    monkeypatch.setattr(conversation, "MARKER_SECONDS", 120.0)
    monkeypatch.setattr(events, "SILENCE_SECONDS", 120.0)  # TINY sends no beats
    if "real" not in request.fixturenames:
        monkeypatch.setattr(conversation, "pack", lambda: TINY)


@pytest.fixture
def real() -> None:
    """See ``tiny``."""


class PlainChannel:
    """A command on this machine, spoken to as over SSH; counts what is written."""

    def __init__(self, words: list[str], options: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def read(self, timeout: float) -> bytes:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            raise SilenceTimeout("silent")
        return os.read(self.process.stdout.fileno(), 32768)

    def read_stderr(self) -> bytes:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    @property
    def exit_status(self) -> int:
        return self.process.wait(timeout=120)

    def lost(self) -> ContactLost:
        return ContactLost(f"ended with {self.exit_status}", why=self.read_stderr().decode())

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait(timeout=120)
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                stream.close()


class PlainNode:
    """A node that is this machine."""

    name = "gpu1"
    ssh_line = "ssh gpu1"
    spec = ConnectionSpec(host="gpu1")
    is_alive = True

    def __init__(self, noise: str = "", **options: Any) -> None:
        self.noise = noise
        self.options = options
        self.channels: list[PlainChannel] = []

    def refuse_sudo_that_logs_input(self) -> None:
        """No sudo is between us and this machine."""

    def stream(self, command: str) -> PlainChannel:
        assert command.isprintable()
        channel = PlainChannel(["/bin/sh", "-c", self.noise + command], self.options)
        self.channels.append(channel)
        return channel

    @property
    def word(self) -> str:
        """What the node answered: with ``need`` it got a second frame."""
        return {1: "have", 2: "need"}[len(self.channels[-1].written)]


def ask(
    root: str | Path | None, node: PlainNode | None = None, python: str = sys.executable
) -> tuple[str, dict[str, Any]]:
    """Ask for the status; return ``have`` or ``need``, and the answer."""
    node = node or PlainNode()
    heard: list[dict[str, Any]] = []
    request = STATUS if root is None else {**STATUS, "root": str(root)}
    bye = conversation.converse(cast("Node", node), python, request, heard.append)
    assert {name: value for name, value in bye.items() if name != "took"} == {"event": "bye"}
    assert [event["event"] for event in heard] == ["result"]
    return node.word, heard[0]


def home_in(root: Path) -> Path:
    return root / "bin" / conversation.pack().digest


def entries(root: Path) -> set[str]:
    return {name for name in os.listdir(root / "bin") if not name.startswith(".")}


# ------------------------------------------------------------------------------------------------------ have and need


@pytest.mark.usefixtures("real")
def test_the_runner_travels_once(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "root"
    word, answer = ask(root)
    assert (word, answer["root"], answer["servers"]) == ("need", str(root), [])
    assert ask(root)[0] == "have"
    assert entries(root) == {conversation.pack().digest}
    for place in (root, root / "bin", home_in(root)):
        assert os.stat(place).st_mode & 0o777 == 0o700
    assert os.stat(home_in(root) / "__main__.py").st_mode & 0o077 == 0


def test_bytecode_is_kept_and_does_not_count_as_damage(tmp_path: Path) -> None:
    ask(tmp_path / "root")
    assert list(home_in(tmp_path / "root").rglob("*.pyc"))
    assert ask(tmp_path / "root")[0] == "have"


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "changed", "missing", "extra", "a file", "nothing but the directory"]
)
def test_a_damaged_runner_is_repaired(tmp_path: Path, damage: str) -> None:
    root = tmp_path / "root"
    ask(root)
    victim = home_in(root) / "lamplighter" / "node" / "__main__.py"
    data = victim.read_bytes()
    if damage == "cut":
        victim.write_bytes(data[:100])
    elif damage == "empty":
        victim.write_bytes(b"")
    elif damage == "changed":
        victim.write_bytes(b"import os; os._exit(7)\n" + data)
    elif damage == "missing":
        victim.unlink()
    elif damage == "extra":
        (home_in(root) / "json.py").write_text("raise SystemExit(7)\n")
    else:
        shutil.rmtree(home_in(root))
        home_in(root).mkdir() if damage.startswith("nothing") else home_in(root).write_text("?")
    assert ask(root)[0] == "need"
    assert entries(root) == {conversation.pack().digest}
    assert ask(root)[0] == "have"


def test_noise_before_the_marker_is_not_parsed(tmp_path: Path) -> None:
    noise = "echo 'Welcome to gpu1'; printf '{\"event\": \"bye\"} no newline'; echo warning >&2; "
    assert ask(tmp_path / "root", PlainNode(noise))[0] == "need"


SECRET = "hunter2-and-a-half"
TOKEN = 'tröpf"chen'  # otherwise written in what we send


REQUEST = {**STATUS, "padding": "p" * 9000, "secrets": {"A": SECRET, "B": TOKEN, "C": "xyz"}}


def sent(root: Path) -> int:
    """How many bytes are sent to ask for REQUEST."""
    request = {**REQUEST, "root": str(root), "runner": conversation.pack().digest}
    return len(boot_source("0" * 16)) + len(frame(json.dumps(request).encode()))


def told_of(noise: str, root: Path) -> str:
    """All that is said of a node which refuses a request with secrets."""
    request = {**REQUEST, "root": str(root)}
    with pytest.raises((NodeRefused, ContactLost)) as caught:
        conversation.converse(cast("Node", PlainNode(noise)), sys.executable, request, lambda event: None)
    said = str(caught.value)
    for value in (SECRET, SECRET[6:], TOKEN, json.dumps(TOKEN)[1:-1], "xyz"):
        assert value not in said
    return said


@pytest.mark.parametrize("eaten", [1, 40, 3000, 9000])
@pytest.mark.parametrize("is_within", [False, True])
def test_whoever_eats_some_of_our_input_makes_nobody_quote_it(tmp_path: Path, eaten: int, is_within: bool) -> None:
    eat = f"head -c {eaten} >/dev/null; "
    if is_within:  # at first it is left alone: something reads in the background
        eat = f"(head -c {len(boot_source('0' * 16))}; {eat} head -c 100) | "
    said = told_of(eat, tmp_path / "root")
    assert "something on the way took the beginning of our input" in said
    assert "`echo all | ssh gpu1 cat`" in said
    assert "nothing was touched" in said
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    "how", ["", " >&2", " | fold -w 60 >&2", " | fold -w 24", " | sed 's/.*/sh: 1: &: not found/' >&2"]
)
def test_a_shell_that_repeats_our_input_is_not_quoted(tmp_path: Path, how: str) -> None:
    said = told_of(f"echo hello; echo hello >&2; head -c {sent(tmp_path / 'root')}{how}; exit 3; ", tmp_path / "root")
    assert "hello" in said
    assert "(here it repeats what we sent)" in said
    assert "serve(" not in said


def test_several_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    for turn in range(3):
        root = tmp_path / str(turn)
        if turn:  # also when all of them find the same damage
            ask(root)
            (home_in(root) / "__main__.py").write_text("damaged")
        failures: list[BaseException] = []

        def one(root: Path = root, failures: list[BaseException] = failures) -> None:
            try:
                ask(root)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=one) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert entries(root) == {conversation.pack().digest}
        assert ask(root)[0] == "have"


# ------------------------------------------------------------------------------------------------------------ the root


def user_options(directory: Path) -> dict[str, Any]:
    """Run as an ordinary user whose home is ``directory``."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(directory)}
    if not IS_ROOT:
        return {"env": environment}
    os.chown(directory, NOBODY, NOBODY)
    return {"env": environment, "user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}


def test_an_ordinary_users_root_is_below_home_and_names_the_machine(open_dir: Path) -> None:
    node = PlainNode(**user_options(open_dir))
    machine = Path("/etc/machine-id")
    name = machine.read_text().strip() if machine.exists() else ""
    root = open_dir / ".local" / "state" / "lamplighter" / (name or os.uname().nodename)
    assert ask(None, node, "/usr/bin/python3")[1]["root"] == str(root)
    assert os.stat(root).st_mode & 0o777 == 0o700


def test_a_root_may_begin_with_a_tilde(open_dir: Path) -> None:
    node = PlainNode(**user_options(open_dir))
    assert ask("~/lamplighter", node, "/usr/bin/python3")[1]["root"] == str(open_dir / "lamplighter")


def refusal(root: Path, **options: Any) -> NodeRefused:
    python = options.pop("python", sys.executable)
    with pytest.raises(NodeRefused) as caught:
        ask(root, PlainNode(**options), python)
    return caught.value


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o1777])
@pytest.mark.parametrize("place", ["root", "root/bin"])
def test_a_root_that_others_may_write_is_refused(tmp_path: Path, mode: int, place: str) -> None:
    (tmp_path / "root" / "bin").mkdir(parents=True, mode=0o700)
    os.chmod(tmp_path / "root", 0o700)
    os.chmod(tmp_path / place, mode)
    error = refusal(tmp_path / "root")
    assert error.what == "gpu1 refused our root directory"
    assert error.why == (
        f"{tmp_path / place} belongs to uid {os.getuid()}, mode {mode & 0o777:o}: others could replace what we run"
    )
    assert os.listdir(tmp_path / "root" / "bin") == []


def test_a_root_of_another_user_is_refused(tmp_path: Path) -> None:
    root = Path("/usr")
    if IS_ROOT:
        root = tmp_path / "root"
        root.mkdir(mode=0o700)
        os.chown(root, NOBODY, NOBODY)
    assert f"{root} belongs to uid {os.stat(root).st_uid}" in refusal(root).why


def test_a_root_that_is_a_link_a_file_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch(mode=0o600)
    assert refusal(tmp_path / "link").why == f"{tmp_path}/link is not a directory"
    assert refusal(tmp_path / "file").why == f"{tmp_path}/file: File exists"
    assert refusal(tmp_path / "file" / "root").why == f"{tmp_path}/file/root: Not a directory"
    assert os.listdir(tmp_path / "real") == []


def test_a_full_disk_is_refused_in_words_and_leaves_nothing(tmp_path: Path) -> None:
    error = refusal(tmp_path / "root", noise="ulimit -f 2; ")
    assert error.why.endswith(": File too large")
    assert entries(tmp_path / "root") == set()
    assert ask(tmp_path / "root")[0] == "need"


# -------------------------------------------------------------------------------------------------------- the Python


@pytest.mark.skipif(not OLD_PYTHONS, reason="no Python older than 3.9 here")
@pytest.mark.parametrize("python", OLD_PYTHONS)
def test_an_old_python_says_so(tmp_path: Path, python: str) -> None:
    error = refusal(tmp_path / "root", python=python)
    assert error.what == f"gpu1 has Python {python.split('/')[4]}; the node side needs 3.9 or newer"
    assert not (tmp_path / "root").exists()


@pytest.mark.skipif(not PYTHON_2, reason="no Python 2 here")
def test_python_2_does_not_even_start(tmp_path: Path) -> None:
    error = refusal(tmp_path / "root", python=PYTHON_2[0])
    assert error.what == "gpu1: python3 could not be started (exit status 2)"
    assert "Unknown option: -I" in error.why


@pytest.mark.parametrize("noise", ["exit 3; ", "echo This account is currently not available.; exit 1; "])
def test_a_login_shell_that_ends_by_itself_is_no_missing_python(tmp_path: Path, noise: str) -> None:
    error = refusal(tmp_path / "root", noise=noise)
    assert "the login ended before our program began (exit status " in error.what
    assert ("not available" in error.why) == ("echo" in noise)
    assert "install python3" not in str(error)


def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    error = refusal(tmp_path / "root", python="/no/such/python3")
    assert error.what == "gpu1: python3 could not be started (exit status 127)"
    assert "not found" in error.why


@pytest.mark.skipif(not NEW_PYTHONS, reason="no Python 3.9 here")
@pytest.mark.usefixtures("real")
def test_the_oldest_python_that_is_promised(tmp_path: Path) -> None:
    assert ask(tmp_path / "root", python=NEW_PYTHONS[0])[0] == "need"


# ---------------------------------------------------------------------------------------------------- wrong frames


@dataclasses.dataclass
class Raw:
    """The boot program with raw bytes on its stdin."""

    process: subprocess.Popen[bytes]

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def await_word(self, word: bytes) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"\n"
        assert self.process.stdout.readline().startswith(b"@@lamplighter 00 " + word)

    def finish(self) -> tuple[int, bytes, bytes]:
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


@pytest.fixture
def raw() -> Iterator[Raw]:
    boot = boot_source("00")
    code = f"import sys;exec(sys.stdin.buffer.read({len(boot)}))"
    started = Raw(
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    )
    started.send(boot)
    yield started
    started.process.kill()
    started.process.communicate()


def frame(data: bytes) -> bytes:
    return b"%d\n" % len(data) + data


def request_for(root: Path, digest: str) -> bytes:
    return frame(json.dumps({**STATUS, "root": str(root), "runner": digest}).encode())


@pytest.mark.parametrize(
    "sent",
    [b"", b"\n", b"what\n{}", b"-5\n{}", b"1000\n{}", b"2\n{}", b"9\nnot json!", frame(b"[]"), frame(b'{"root": 5}')],
)
def test_a_request_that_is_broken_touches_nothing(raw: Raw, tmp_path: Path, sent: bytes) -> None:
    raw.send(sent)
    code, out, _ = raw.finish()
    assert code != 0
    assert b"@@" not in out


@pytest.mark.parametrize("kept", [0, 1, 1000, -1])
def test_a_wire_that_breaks_within_the_runner_leaves_nothing(raw: Raw, tmp_path: Path, kept: int) -> None:
    packed = conversation.pack()
    raw.send(request_for(tmp_path / "root", packed.digest))
    raw.await_word(b"need")
    raw.send(frame(packed.data)[:kept])
    code, out, _ = raw.finish()
    assert (code, out) == (97, b"")
    assert entries(tmp_path / "root") == set()
    assert ask(tmp_path / "root")[0] == "need"


def test_what_is_not_the_runner_that_was_announced_never_runs(raw: Raw, tmp_path: Path) -> None:
    touch = f"open({str(tmp_path / 'it-ran')!r}, 'w')\n".encode()
    other = zipped({"lamplighter/__init__.py": touch, "__main__.py": b""})
    raw.send(request_for(tmp_path / "root", conversation.pack().digest))
    raw.await_word(b"need")
    raw.send(frame(other.data))
    code, out, _ = raw.finish()
    assert code == 3
    assert b"@@lamplighter 00 refused " in out
    assert not (tmp_path / "it-ran").exists()
    assert entries(tmp_path / "root") == set()


def test_a_boot_killed_while_it_waits_leaves_a_usable_root(raw: Raw, tmp_path: Path) -> None:
    raw.send(request_for(tmp_path / "root", conversation.pack().digest))
    raw.await_word(b"need")
    os.kill(raw.process.pid, signal.SIGKILL)
    assert until(lambda: not is_running(raw.process.pid))
    assert ask(tmp_path / "root")[0] == "need"
