"""The pure parts of `lamplighter.ssh.connection`: places, become, refusals of sudo, and what it imports."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lamplighter.errors import Unreachable, UsageError
from lamplighter.inventory.schema import ConnectionSpec
from lamplighter.node.events import Exit
from lamplighter.ssh.become import SUDOERS_FILE, become_words, stop_logging_input, sudo_logs_input, sudo_refusal
from lamplighter.ssh.config import Place, Settings, parse_place
from lamplighter.ssh.connection import Node
from lamplighter.ssh.trouble import unreachable

PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("gpu1", Place("gpu1")),
        ("ada@gpu1", Place("gpu1", "ada")),
        ("ada@gpu1:2222", Place("gpu1", "ada", 2222)),
        ("ada@gpu1:0022", Place("gpu1", "ada", 22)),
        ("ssh://ada@gpu1:2222/", Place("gpu1", "ada", 2222)),
        ("ada@corp@gpu1", Place("gpu1", "ada@corp")),
        ("::1", Place("::1")),
        ("fe80::1%eth0", Place("fe80::1%eth0")),
        ("[::1]:2222", Place("::1", None, 2222)),
        ("ada@[::1]", Place("::1", "ada")),
    ],
)
def test_places(text: str, place: Place) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize(
    "text", ["gpu1:ssh", "gpu1:0", "[::1]:99999", "gpu1:٢٢", pytest.param("gpu1:" + "9" * 5000, id="huge")]
)
def test_a_place_without_a_usable_port(text: str) -> None:
    with pytest.raises(UsageError, match="no usable port"):
        parse_place(text)


@pytest.mark.parametrize(
    ("wish", "line"),
    [
        ({"host": "gpu1"}, "ssh gpu1"),
        ({"host": "gpu1", "user": "root", "port": 22904}, "ssh -p 22904 root@gpu1"),
        ({"host": "ada@gpu1:2222", "key_file": "~/my key"}, "ssh -p 2222 -i '~/my key' ada@gpu1"),
    ],
)
def test_the_same_login_by_hand(wish: dict[str, Any], line: str) -> None:
    spec = ConnectionSpec(**wish)
    assert Node("kimi-box", spec).ssh_line == line
    assert unreachable("kimi-box", Settings(spec, {}), "other", "odd").next_step == f"try `{line} -v`"


@pytest.mark.parametrize("transport", ["fabric", "openssh"])
@pytest.mark.parametrize("name", ["gpu1..example.net", f"{'x' * 64}.example.net", "."])
def test_what_can_be_no_name_does_not_resolve(name: str, transport: Any, tmp_path: Path) -> None:
    (tmp_path / "config").touch()
    spec = ConnectionSpec(host=name, transport=transport, ssh_config=str(tmp_path / "config"))
    with pytest.raises(Unreachable, match="does not resolve") as caught:
        Node("gpu1", spec).open()
    assert name in caught.value.what
    assert "check ansible_host" in caught.value.next_step


def test_become_never_asks_and_takes_roots_home() -> None:
    assert become_words(["id", "-u"]) == ["sudo", "-n", "-H", "id", "-u"]


def test_wrap_quotes_the_command_once() -> None:
    command = "exec /bin/sh -c 'echo \"$HOME\"'"

    assert Node("gpu1", ConnectionSpec(host="gpu1")).wrap(command) == command
    wrapped = Node("gpu1", ConnectionSpec(host="gpu1", become=True)).wrap(command)
    assert wrapped.startswith("exec sudo -n -H /bin/sh -c ")
    assert not set("\n!\\") & set(wrapped)  # csh and fish would read them
    shown = subprocess.run(
        ["/bin/sh", "-c", wrapped.replace("exec sudo -n -H /bin/sh -c", "printf %s")], capture_output=True, check=True
    )
    assert shown.stdout.decode() == command


@pytest.mark.parametrize(
    ("stderr", "status", "advice"),
    [
        ("sudo: a password is required", 1, "ada ALL=(root) NOPASSWD: ALL"),
        ("sudo: a terminal is required to read the password", 1, "NOPASSWD"),
        ("sudo: interactive authentication is required", 1, "NOPASSWD"),  # sudo-rs
        ("sudo: Ein Passwort ist notwendig", 1, "NOPASSWD"),
        ("Sorry, user ada is not allowed to execute '/bin/sh' as root on gpu1.", 1, "NOPASSWD"),
        ("sudo: sorry, you must have a tty to run sudo", 1, "Defaults:ada !requiretty"),
        ("sh: 1: exec: sudo: not found", 127, "leave out become"),
        ("sudo: Command not found.", 1, "leave out become"),  # csh
        ("sudo: /opt/py/bin/python3: command not found", 1, "ansible_python_interpreter"),
        ("sudo: python3: command not found", 1, "secure_path"),
        ("sudo: /opt/py/bin/python3: Befehl nicht gefunden", 1, "ansible_python_interpreter"),
        ("sudo: unable to execute /opt/py: Exec format error", 1, "ansible_python_interpreter"),
        ('sudo: The "no new privileges" flag is set, which prevents sudo', 1, "container"),
    ],
)
def test_refusals_of_sudo(stderr: str, status: int, advice: str) -> None:
    error = sudo_refusal("gpu1", "ada", f"Welcome to gpu1\n{stderr}\n".encode(), status)

    assert error is not None
    assert error.what.startswith("gpu1: ")
    assert advice in error.next_step
    assert error.why == stderr
    assert error.exit_code == Exit.REFUSED


@pytest.mark.parametrize(
    ("stderr", "status"),
    [("", 1), ("python3: not found", 127), ("sudo: a password is required", 0), ("sudo: unable to resolve host", 3)],
)
def test_what_is_not_sudos_fault(stderr: str, status: int) -> None:
    assert sudo_refusal("gpu1", "ada", stderr.encode(), status) is None


RULE = "(ALL) NOPASSWD: ALL"
SOME = "for some commands or targets"


@pytest.mark.parametrize(
    ("defaults", "special", "rules", "said"),
    [
        ("env_reset, use_pty", "", RULE, ""),
        ("env_reset, log_input", "", RULE, "log_input"),
        ("env_reset, !log_input", "", RULE, ""),
        ("env_reset, log_stdin", "", RULE, "log_stdin"),
        ("log_output, maxseq=1000", "", RULE, ""),
        # the last default counts
        ("log_input, env_reset, use_pty, !log_input", "", RULE, ""),
        ("!log_input, env_reset, log_input", "", RULE, "log_input"),
        ("log_input, !log_input, !log_stdin", "", RULE, ""),
        ("log_stdin, !log_input", "", RULE, ""),
        ("!log_input, log_stdin", "", RULE, "log_stdin"),
        ("log_input, !log_stdin", "", RULE, "log_input"),  # sudo before 1.9.14 lists the second and logs
        (r"secure_path=/sbin\:/bin, log_input, badpass_message=\"no, !log_input\"", "", RULE, "log_input"),
        ("log_input, !log_input", "Defaults>root log_input    Defaults!/bin/ls !log_input", RULE, f"log_input {SOME}"),
        ("env_reset", "Defaults!/bin/sh log_stdin", RULE, f"log_stdin {SOME}"),
        ("env_reset", "Defaults!/bin/sh !log_input", RULE, ""),
        # a rule's tag wins, where every rule has it
        ("env_reset", "", "(ALL) NOPASSWD: LOG_INPUT: ALL", "LOG_INPUT:"),
        ("log_input", "", "(ALL) NOPASSWD: NOLOG_INPUT: ALL", ""),
        ("log_input", "", f"{RULE}\n    (ALL) NOPASSWD: NOLOG_INPUT: /bin/ls", "log_input"),
        ("log_input", "", f"(ALL) NOPASSWD: NOLOG_INPUT: /bin/ls\n    {RULE}", "log_input"),
        ("log_input", "", "(ALL) NOPASSWD: ALL, NOLOG_INPUT: /bin/ls", "log_input"),
        ("log_input", "", "(root, ada : ALL) CWD=/tmp NOPASSWD: NOLOG_INPUT: /bin/ls, !/bin/su, ALL", ""),
        ("log_input", "", "(ALL) NOLOG_INPUT: /bin/ls, LOG_INPUT: /bin/cat, NOLOG_INPUT: ALL", "LOG_INPUT:"),
        ("log_input", "", r"(ALL) NOPASSWD: /bin/echo NOLOG_INPUT\:, /bin/echo a\, NOLOG_INPUT\:", "log_input"),
        ("log_input", "", "", "log_input"),
        ("", "", "(ALL) NOLOG_INPUT: ALL\n    (root) LOG_INPUT: /bin/cat", "LOG_INPUT:"),
    ],
)
def test_what_sudo_lists_is_read(defaults: str, special: str, rules: str, said: str) -> None:
    listing = f"Matching Defaults entries for ops on gpu1:\n    {defaults}\n\n"
    if special:
        listing += f"Runas and Command-specific defaults for ops:\n    {special}\n\n"
    listing += f"User ops may run the following commands on gpu1:\n    {rules}\n"

    assert sudo_logs_input(listing) == said


@pytest.mark.parametrize(
    ("found", "cure"),
    [
        ("log_input", f"`visudo -f {SUDOERS_FILE}`, add the line: Defaults:ops !log_input,!log_stdin"),
        (f"log_stdin {SOME}", "from the Defaults! and Defaults> lines"),  # they win over Defaults:ops
        ("LOG_INPUT:", "take LOG_INPUT: from the rules for ops"),  # so does a tag
    ],
)
def test_the_cure_for_logged_input(found: str, cure: str) -> None:
    assert cure in stop_logging_input("ops", found)


def test_the_wait_for_a_banner_that_drips_is_told_as_it_was() -> None:
    def drip() -> None:
        client, _ = server.accept()
        with client, contextlib.suppress(OSError):
            while not ended.wait(0.05):
                client.sendall(b"x")

    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip)
        thread.start()
        spec = ConnectionSpec(host="127.0.0.1", port=server.getsockname()[1], connect_timeout=0.5, transport="fabric")
        started = time.monotonic()
        with pytest.raises(Unreachable, match="does not speak SSH in time") as caught:
            Node("gpu1", spec).open()
        took = time.monotonic() - started
        ended.set()
        thread.join(60)

    (waited,) = re.findall(r"waited ([\d.]+) s", caught.value.why)
    assert 1.0 <= float(waited) <= took + 0.1


def importers(*names: str) -> set[str]:
    starts = tuple(f"{word} {name}" for name in names for word in ("import", "from"))
    return {
        str(file.relative_to(PROJECT / "lamplighter"))
        for file in PROJECT.glob("lamplighter/**/*.py")
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith(starts)
    }


def test_the_libraries_stay_behind_their_transport() -> None:
    assert importers("fabric") == {"ssh/fabric.py"}
    assert importers("paramiko") == {"ssh/fabric.py"}
    assert importers("lamplighter.ssh.fabric", "lamplighter.ssh.openssh") == {"ssh/connection.py"}


def test_a_connection_loads_no_library_before_it_logs_in() -> None:
    script = "import sys, lamplighter.errors, lamplighter.ssh.connection, lamplighter.ssh.openssh\n"
    script += "sys.exit('fabric' in sys.modules or 'paramiko' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], cwd=PROJECT, check=False).returncode == 0
