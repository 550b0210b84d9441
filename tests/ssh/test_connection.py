"""`lamplighter.ssh.connection`, by both transports, against real OpenSSH servers on loopback ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import paramiko
import pytest

from lamplighter.errors import (
    ContactLost,
    LamplighterError,
    LoginFailed,
    NodeRefused,
    SessionRefused,
    Unreachable,
    UsageError,
)
from lamplighter.inventory.schema import ConnectionSpec
from lamplighter.node.events import Exit
from lamplighter.run import shell as shells
from lamplighter.run.conversation import converse
from lamplighter.ssh import config, connection, fabric, openssh
from lamplighter.ssh.config import decoded, fingerprint
from lamplighter.ssh.connection import CommandTimedOut, Node, SilenceTimeout, TooMuchOutput
from lamplighter.ssh.host_keys import HostKeyChanged, HostKeyUnknown
from tests.driver import eventually, free_port
from tests.ssh.sshd import Sshd, make_key, missing, public, sign

Require = Callable[[str, "str | None"], None]


@pytest.fixture(scope="session")
def client_key(require: Require, tmp_path_factory: pytest.TempPathFactory) -> Path:
    require("sshd", missing())
    return make_key(tmp_path_factory.mktemp("client") / "id_client")


@pytest.fixture(scope="session")
def sshd(client_key: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd") / "node", client_key, ("ed25519", "rsa"), "MaxSessions 3")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def jump(client_key: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd") / "jump", client_key)
    yield server
    server.stop()


class Desk:
    """The operator's machine: an ssh_config of this test alone, and what it names."""

    def __init__(self, home: Path) -> None:
        self.transport: Literal["auto", "fabric", "openssh"] = "auto"
        self.user_ssh = home / ".ssh"
        self.user_ssh.mkdir(parents=True)
        self.known_hosts = self.user_ssh / "known_hosts"
        self.config = self.user_ssh / "config"
        self.config.touch()
        self._whole = home / "ssh_config"
        self._whole.write_text(
            f"Include {self.config}\nUserKnownHostsFile {self.known_hosts}\nGlobalKnownHostsFile none\n"
            f"IdentityFile {self.user_ssh}/id_ed25519\n"
        )

    def node(self, spec: ConnectionSpec) -> Node:
        return Node("gpu1", replace(spec, ssh_config=str(self._whole), transport=self.transport))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return Desk(tmp_path)


@pytest.fixture(params=["fabric", "openssh"])
def either(desk: Desk, request: pytest.FixtureRequest) -> None:
    """Each of the two transports."""
    desk.transport = request.param


@pytest.fixture
def spec(sshd: Sshd, client_key: Path) -> ConnectionSpec:
    return ConnectionSpec(
        host=sshd.host, port=sshd.port, user=sshd.user, key_file=str(client_key), connect_timeout=60.0
    )


@pytest.fixture
def node(desk: Desk, sshd: Sshd, spec: ConnectionSpec, either: None) -> Iterator[Node]:
    desk.known_hosts.write_text(sshd.known_line())
    with desk.node(spec) as node:
        yield node


# -- commands


def test_run_gives_output_and_exit_status(node: Node) -> None:
    result = node.run("printf out; printf err >&2; exit 7", timeout=60)

    assert (result.exit_status, result.stdout, result.stderr) == (7, b"out", b"err")


def test_stdin_streams_while_the_command_answers(node: Node) -> None:
    with node.stream("exec cat") as channel:
        channel.write(b"first\n")
        assert channel.read(60) == b"first\n"
        channel.write(b"second\n")
        assert channel.read(60) == b"second\n"
        channel.close_write()
        assert channel.read(60) == b""
        assert channel.exit_status == 0


def test_more_than_the_window_both_ways(node: Node) -> None:
    sent = os.urandom(5 * 1024 * 1024)  # a channel's window is 2 MiB: echoing it needs reading while writing

    result = node.run("exec cat", timeout=60, stdin=sent)

    assert result.exit_status == 0
    assert result.stdout == sent


def test_a_flood_on_stderr_does_not_block_stdout(node: Node) -> None:
    flood = "head -c 6000000 /dev/zero | tr '\\0' x >&2; echo; echo done; echo last >&2"

    result = node.run(f"exec /bin/sh -c {flood!r}", timeout=60)

    assert result.stdout.endswith(b"done\n")
    assert result.stderr.endswith(b"xlast\n")
    assert len(result.stderr) < connection.STDERR_LIMIT + 100
    assert b"bytes left out" in result.stderr[:40]


def test_a_command_that_ends_before_reading_its_input(node: Node) -> None:
    result = node.run("exec /bin/sh -c 'echo no python >&2; exit 127'", timeout=60, stdin=b"x" * 5_000_000)

    assert (result.exit_status, result.stderr) == (127, b"no python\n")


def test_a_killed_command_has_no_exit_status(node: Node) -> None:
    assert node.run("kill -9 $$", timeout=60).exit_status is None
    assert node.is_alive


def test_run_ends_at_its_timeout(node: Node) -> None:
    started = time.monotonic()

    with pytest.raises(CommandTimedOut) as caught:
        node.run("echo starting >&2; while :; do echo .; sleep 0.05; done", timeout=3)

    assert time.monotonic() - started < 60
    assert "starting" in str(caught.value)
    assert caught.value.exit_code == Exit.DETACHED
    assert node.run("echo on", timeout=60).stdout == b"on\n"


@pytest.mark.parametrize("command", ["exec yes", "exec yes >&2", "exec sleep 120"])
def test_run_ends_at_its_timeout_whatever_the_command_does(node: Node, command: str) -> None:
    started = time.monotonic()

    with pytest.raises(CommandTimedOut):
        node.run(command, timeout=0.3, stdin=b"x" * 5_000_000)

    assert time.monotonic() - started < 60


def test_run_gives_up_a_command_that_never_stops_printing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "OUTPUT_LIMIT", 1 << 20)
    with pytest.raises(TooMuchOutput, match="more than 1 MiB came of: exec yes"):
        node.run("exec yes", timeout=600)
    assert node.run("echo on", timeout=60).stdout == b"on\n"


def test_run_times_out_when_only_the_output_has_ended(node: Node) -> None:
    with pytest.raises(CommandTimedOut):
        node.run("exec >&- 2>&-; sleep 60", timeout=0.4)


def test_a_command_that_takes_no_input_does_not_hang_the_writer(node: Node) -> None:
    with node.stream("exec sleep 60") as channel, pytest.raises(SilenceTimeout, match="took no input"):
        channel.write(b"x" * 5_000_000, timeout=0.3)


def test_silence_is_not_the_end(node: Node) -> None:
    with node.stream("exec cat") as channel:
        with pytest.raises(SilenceTimeout):
            channel.read(0.05)
        with pytest.raises(SilenceTimeout):
            channel.read(0)
        channel.write(b"late")
        assert channel.read(60) == b"late"


def test_no_terminal(node: Node) -> None:
    assert node.run("tty", timeout=60).stdout == b"not a tty\n"


def test_too_many_sessions(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TEARDOWN_SECONDS", 0.0)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(node.stream("exec cat"))
        with pytest.raises(Unreachable, match="refuses another session") as caught:
            node.run("true", timeout=60)

    assert "MaxSessions" in caught.value.next_step


def test_the_session_ends_while_a_command_runs(node: Node) -> None:
    with pytest.raises(ContactLost) as caught:
        node.run("kill -9 $PPID; sleep 5", timeout=60)

    assert "broke" in caught.value.what
    assert not node.is_alive
    with pytest.raises(Unreachable, match="is gone"):
        node.stream("true")


def test_a_stopped_session_does_not_hang_us(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fabric, openssh):
        monkeypatch.setattr(module, "CHANNEL_SECONDS", 0.5)
    session = int(node.run("echo $PPID", timeout=60).stdout)
    os.kill(session, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(Unreachable, match="is gone") as caught:
            node.run("true", timeout=60)
        assert time.monotonic() - started < 60
        assert "Timeout opening channel" in caught.value.why
    finally:
        os.kill(session, signal.SIGKILL)


def test_a_node_that_runs_no_commands(
    desk: Desk, spec: ConnectionSpec, client_key: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = Sshd(tmp_path_factory.mktemp("sshd") / "sftp", client_key, extra="MaxSessions 0")
    try:
        desk.known_hosts.write_text(server.known_line())
        with desk.node(replace(spec, port=server.port)) as node, pytest.raises(Unreachable):
            node.run("true", timeout=60)
    finally:
        server.stop()


@pytest.fixture
def narrow(desk: Desk, spec: ConnectionSpec, client_key: Path, tmp_path: Path, either: None) -> Iterator[Node]:
    """A node that takes one session at a time."""
    server = Sshd(tmp_path / "narrow", client_key, extra="MaxSessions 1")
    try:
        desk.known_hosts.write_text(server.known_line())
        with desk.node(replace(spec, port=server.port)) as node:
            yield node
    finally:
        server.stop()


def test_one_session_at_a_time_is_enough(narrow: Node) -> None:
    for number in range(5):
        assert narrow.run(f"sleep 0.1 & echo {number}", timeout=60).stdout == f"{number}\n".encode()
    with narrow.stream("exec cat") as left:  # nobody waits for its end
        left.write(b"x")
        assert left.read(60) == b"x"
    assert narrow.run("echo next", timeout=60).stdout == b"next\n"


def test_a_shell_for_checks_gives_its_session_up_to_another_question(narrow: Node) -> None:
    shell = shells.Shell(narrow)
    shell.begin()
    for _ in range(3):
        assert shell.run("echo checked").stdout == b"checked\n"
        assert narrow.run("echo asked", timeout=60).stdout == b"asked\n"
    shell.close()


def test_a_check_that_hangs_is_killed_though_it_holds_the_only_session(
    narrow: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TEARDOWN_SECONDS", 0.2)
    shell = shells.Shell(narrow)
    with pytest.raises(CommandTimedOut):
        shell.run(f"echo $$ >{tmp_path}/pid; sleep 600", timeout=1.0)
    assert shell.run("echo still here").stdout == b"still here\n"
    assert eventually(lambda: not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists())
    shell.close()


def test_a_session_that_somebody_else_holds_is_told(narrow: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TEARDOWN_SECONDS", 0.2)
    with narrow.stream("exec cat"), pytest.raises(SessionRefused, match="refuses another session"):
        narrow.run("true", timeout=60)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("ForceCommand echo no", "the login shell printed: no"),
        ("ForceCommand internal-sftp", "ended before our program began"),
        ("ForceCommand /bin/false", "ForceCommand in sshd_config"),
        ("MaxSessions 0", "refuses another session"),
    ],
)
def test_a_node_that_runs_another_command_is_refused_in_words(
    desk: Desk, spec: ConnectionSpec, client_key: Path, tmp_path: Path, setting: str, said: str
) -> None:
    server = Sshd(tmp_path / "forced", client_key, extra=f"PermitTTY no\n{setting}")
    try:
        desk.known_hosts.write_text(server.known_line())
        with desk.node(replace(spec, port=server.port)) as node, pytest.raises(LamplighterError) as caught:
            converse(node, "python3", {"verb": "status", "servers": []}, lambda event: None)
    finally:
        server.stop()
    assert said in str(caught.value)
    assert caught.value.exit_code in (Exit.REFUSED, Exit.UNREACHABLE)


# -- host keys


def test_an_unknown_host_key_is_refused(desk: Desk, sshd: Sshd, spec: ConnectionSpec) -> None:
    with pytest.raises(HostKeyUnknown) as caught:
        desk.node(spec).open()

    shown = key_fingerprint(sshd, "ed25519")
    error = caught.value
    assert error.fingerprint == shown
    assert shown in str(error)
    assert f"ssh-keyscan -p {sshd.port} {sshd.host} >> {desk.known_hosts}" in error.next_step
    assert error.exit_code == Exit.UNREACHABLE
    assert not desk.known_hosts.exists()


@pytest.mark.parametrize("user_file", ["/dev/null"])
def test_a_host_key_that_no_file_would_keep(desk: Desk, spec: ConnectionSpec, user_file: str) -> None:
    desk.config.write_text(f"UserKnownHostsFile {user_file}\nGlobalKnownHostsFile none\n")

    with pytest.raises(HostKeyUnknown) as caught:
        desk.node(spec).open()

    assert ">> /dev/null" not in caught.value.next_step
    assert "set the host variable known_hosts" in caught.value.next_step
    with desk.node(replace(spec, host_key_checking="accept-new")) as node:
        assert node.is_alive


@pytest.mark.parametrize("kind", ["device", "fifo"])
def test_a_known_hosts_without_an_end_is_named(desk: Desk, spec: ConnectionSpec, tmp_path: Path, kind: str) -> None:
    place = "/dev/zero" if kind == "device" else str(tmp_path / "pipe")
    if kind == "fifo":
        os.mkfifo(place)
    with pytest.raises(Unreachable, match=f"{place}: is a {kind.replace('fifo', 'FIFO')}") as caught:
        desk.node(replace(spec, known_hosts=place)).open()
    assert "the host variable known_hosts, to a file" in caught.value.next_step


@pytest.mark.parametrize("place", ["known_hosts", "new/deep/known_hosts", "directory", "it's"])
def test_the_line_that_we_print_makes_the_host_known(desk: Desk, spec: ConnectionSpec, place: str) -> None:
    file = desk.user_ssh / place
    if place == "directory":
        file.mkdir()
    spec = replace(spec, known_hosts=str(file))
    with pytest.raises(HostKeyUnknown) as caught:
        desk.node(spec).open()

    accept(caught.value)

    assert "new" not in place or file.parent.stat().st_mode & 0o777 == 0o700
    with desk.node(spec) as node:
        assert node.run("echo in", timeout=60).stdout == b"in\n"


def test_accept_new_that_cannot_write_says_what_to_do(desk: Desk, spec: ConnectionSpec) -> None:
    desk.known_hosts.mkdir()
    with pytest.raises(Unreachable, match="cannot write down the new host key") as caught:
        desk.node(replace(spec, host_key_checking="accept-new")).open()

    assert str(desk.known_hosts) in caught.value.why
    assert f"make {desk.known_hosts} a file" in caught.value.next_step


def test_a_changed_host_key_names_both_fingerprints_and_the_line(
    desk: Desk, sshd: Sshd, jump: Sshd, spec: ConnectionSpec
) -> None:
    old = jump.known_line().split()[1:]
    desk.known_hosts.write_text(f"# mine\n[{sshd.host}]:{sshd.port} {' '.join(old)}\n")

    with pytest.raises(HostKeyChanged) as caught:
        desk.node(spec).open()

    told = str(caught.value)
    assert key_fingerprint(sshd, "ed25519") in told
    assert key_fingerprint(jump, "ed25519") in told
    assert f"{desk.known_hosts}:2" in told
    assert f"ssh-keygen -R '[{sshd.host}]:{sshd.port}'" in told


def test_accept_new_remembers_the_key_but_not_a_changed_one(
    desk: Desk, sshd: Sshd, jump: Sshd, spec: ConnectionSpec
) -> None:
    wish = replace(spec, host_key_checking="accept-new")
    with desk.node(wish):
        pass
    assert desk.known_hosts.read_text() == sshd.known_line()
    with desk.node(spec):  # strict is content now
        pass

    desk.known_hosts.write_text(f"[{sshd.host}]:{sshd.port} {jump.known_line().split(None, 1)[1]}")
    with pytest.raises(HostKeyChanged):
        desk.node(wish).open()


def test_accept_new_hashes_the_name_where_ssh_config_says_so(desk: Desk, sshd: Sshd, spec: ConnectionSpec) -> None:
    desk.config.write_text("Host *\n  HashKnownHosts yes\n")
    with desk.node(replace(spec, host_key_checking="accept-new")):
        pass

    assert sshd.host not in desk.known_hosts.read_text()
    name = f"[{sshd.host}]:{sshd.port}"
    found = subprocess.run(["ssh-keygen", "-F", name, "-f", str(desk.known_hosts)], capture_output=True, check=False)
    assert found.returncode == 0
    with desk.node(spec):  # strict is content
        pass


def test_off_accepts_any_key(desk: Desk, spec: ConnectionSpec) -> None:
    with desk.node(replace(spec, host_key_checking="off")) as node:
        assert node.is_alive
    assert not desk.known_hosts.exists()


@pytest.mark.parametrize("kind", ["rsa", "ed25519"])
def test_a_host_with_two_keys_is_asked_for_the_known_one(
    desk: Desk, sshd: Sshd, spec: ConnectionSpec, kind: str
) -> None:
    desk.known_hosts.write_text(sshd.known_line(kind))

    with desk.node(spec) as node:
        assert node.is_alive


def test_known_hosts_of_the_inventory_with_hashed_and_special_lines(
    desk: Desk, sshd: Sshd, spec: ConnectionSpec, tmp_path: Path
) -> None:
    file = tmp_path / "team_known_hosts"
    file.write_text(sshd.known_line())
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(file)], check=True, capture_output=True)
    assert file.read_text().startswith("|1|")
    authority = f"@cert-authority *.example.org {sshd.known_line('rsa').split(None, 1)[1]}"
    file.write_text(f"{authority}nonsense\n{file.read_text()}")

    with desk.node(replace(spec, known_hosts=str(file))) as node:
        assert node.is_alive


def test_a_revoked_key_is_refused(desk: Desk, sshd: Sshd, spec: ConnectionSpec) -> None:
    desk.known_hosts.write_text(sshd.known_line() + f"@revoked * {sshd.known_line().split(None, 1)[1]}")

    with pytest.raises(HostKeyChanged, match="is revoked") as caught:
        desk.node(spec).open()

    assert f"{desk.known_hosts}:2" in caught.value.why


@pytest.mark.parametrize("checking", ["strict", "accept-new", "off"])
def test_a_key_that_ssh_config_revokes_is_refused(
    desk: Desk, sshd: Sshd, jump: Sshd, spec: ConnectionSpec, checking: str
) -> None:
    desk.known_hosts.write_text(sshd.known_line())
    revoked = desk.user_ssh / "revoked"
    desk.config.write_text(f"Host *\n  RevokedHostKeys {revoked}\n")
    wish = replace(spec, host_key_checking=checking)
    revoked.write_text(f"# ours\n\n{public(jump.host_keys['ed25519'])} jump\n")
    with desk.node(wish) as node:
        assert node.is_alive
    assert ssh_says(desk, spec) == 0

    revoked.write_text(f"{revoked.read_text()}\t{public(sshd.host_keys['ed25519'])} gpu1\r\n")
    with pytest.raises(HostKeyChanged, match="is revoked") as caught:
        desk.node(wish).open()

    assert str(revoked) in caught.value.why
    assert caught.value.fingerprint == key_fingerprint(sshd, "ed25519")
    assert ssh_says(desk, spec) == 255


def test_revoked_keys_count_at_the_jump_host_and_as_certificates(
    desk: Desk, sshd: Sshd, jump: Sshd, spec: ConnectionSpec, through: Callable[..., None], tmp_path: Path
) -> None:
    through()
    desk.known_hosts.write_text(sshd.known_line() + jump.known_line())
    shutil.copy(f"{jump.host_keys['ed25519']}.pub", tmp_path / "host.pub")
    certificate = sign(make_key(tmp_path / "authority"), tmp_path / "host", "jump", "-h")
    desk.config.write_text(f"{desk.config.read_text()}Host *\n  RevokedHostKeys {certificate}\n")

    with pytest.raises(HostKeyChanged, match=f"host key of {jump.host}:{jump.port} is revoked"):
        desk.node(spec).open()


@pytest.mark.parametrize(
    ("made", "told"),
    [("missing", "No such file"), ("a directory", "Is a directory"), ("junk", "invalid format"), ("a torn line", "")],
)
def test_revoked_keys_that_cannot_be_read_leave_no_key_acceptable(
    desk: Desk, sshd: Sshd, jump: Sshd, spec: ConnectionSpec, made: str, told: str
) -> None:
    desk.known_hosts.write_text(sshd.known_line())
    revoked, other = desk.user_ssh / "revoked", public(jump.host_keys["ed25519"])
    desk.config.write_text(f"Host *\n  RevokedHostKeys {revoked}\n")
    if made == "a directory":
        revoked.mkdir()
    elif made != "missing":
        revoked.write_text(f"{other}\n{'junk' if made == 'junk' else other[:-8]}\n")

    with pytest.raises(UsageError, match="no host key can be accepted") as caught:
        desk.node(replace(spec, host_key_checking="off")).open()

    assert f"{revoked}: {told}" in caught.value.why
    assert ssh_says(desk, spec) == 255


# -- keys of the user


def test_a_wrong_user_key_says_who_and_what_was_tried(desk: Desk, sshd: Sshd, spec: ConnectionSpec) -> None:
    desk.known_hosts.write_text(sshd.known_line())
    wrong = make_key(desk.user_ssh / "id_ed25519")

    with pytest.raises(LoginFailed) as caught:
        desk.node(replace(spec, key_file=None)).open()

    assert f"{sshd.user}@{sshd.host}:{sshd.port}" in caught.value.what
    assert str(wrong) in caught.value.why
    assert "publickey" in caught.value.why
    assert "authorized_keys" in caught.value.next_step


def test_no_key_at_all(desk: Desk, sshd: Sshd, spec: ConnectionSpec) -> None:
    desk.known_hosts.write_text(sshd.known_line())

    with pytest.raises(LoginFailed, match="no key to try") as caught:
        desk.node(replace(spec, key_file=None)).open()

    assert "no ssh-agent" in caught.value.why


def test_an_encrypted_key_without_an_agent(desk: Desk, sshd: Sshd, spec: ConnectionSpec) -> None:
    desk.known_hosts.write_text(sshd.known_line())
    locked = make_key(desk.user_ssh / "locked", passphrase="sesame")

    with pytest.raises(LoginFailed, match="encrypted") as caught:
        desk.node(replace(spec, key_file=str(locked))).open()

    assert f"ssh-add {locked}" in caught.value.next_step


@pytest.mark.parametrize("content", [None, "no key\n", "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n"])
def test_a_key_file_that_is_not_usable(desk: Desk, sshd: Sshd, spec: ConnectionSpec, content: str | None) -> None:
    desk.known_hosts.write_text(sshd.known_line())
    file = desk.user_ssh / "broken"
    if content is not None:
        file.write_text(content)

    with pytest.raises(LoginFailed) as caught:
        desk.node(replace(spec, key_file=str(file))).open()

    assert f"{file} {'does not exist' if content is None else 'is not a usable private key'}" in caught.value.why


def test_files_of_a_user_who_is_not_known_here(desk: Desk, sshd: Sshd, spec: ConnectionSpec) -> None:
    desk.known_hosts.write_text(sshd.known_line())

    with pytest.raises(LoginFailed, match="~nobody-here/key does not exist"):
        desk.node(replace(spec, key_file="~nobody-here/key")).open()
    desk.known_hosts.unlink()
    with pytest.raises(HostKeyUnknown) as caught:
        desk.node(replace(spec, known_hosts="~nobody-here/known")).open()
    assert "~nobody-here/known" in caught.value.next_step


def test_a_key_file_that_is_a_directory_is_named(desk: Desk, sshd: Sshd, spec: ConnectionSpec) -> None:
    desk.known_hosts.write_text(sshd.known_line())

    with pytest.raises(LoginFailed, match=r"Is a directory"):
        desk.node(replace(spec, key_file=str(desk.user_ssh))).open()


@pytest.mark.parametrize("kind", ["device", "FIFO", "MiB"])
@pytest.mark.parametrize("where", ["", ".pub", "-cert.pub"])
def test_a_key_file_without_an_end_is_named(
    desk: Desk, sshd: Sshd, spec: ConnectionSpec, client_key: Path, tmp_path: Path, kind: str, where: str
) -> None:
    desk.known_hosts.write_text(sshd.known_line())
    key, odd = tmp_path / "key", tmp_path / f"key{where}"
    if where:
        shutil.copy(client_key, key)
    if kind == "device":
        odd.symlink_to("/dev/zero")
    elif kind == "FIFO":
        os.mkfifo(odd)
    else:
        odd.touch()
        os.truncate(odd, 1 << 30)
    with pytest.raises(LoginFailed, match=f"{odd}.*{kind}"):
        desk.node(replace(spec, key_file=str(key))).open()


@pytest.fixture
def wary(client_key: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Sshd]]:
    """Starts a node that is not content with one key: these are its AuthenticationMethods."""
    servers: list[Sshd] = []

    def start(methods: str) -> Sshd:
        extra = f"HostbasedAuthentication yes\nAuthenticationMethods {methods}"
        servers.append(Sshd(tmp_path_factory.mktemp("sshd") / "wary", client_key, extra=extra))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_a_node_that_wants_several_keys_gets_them(
    desk: Desk, spec: ConnectionSpec, client_key: Path, wary: Callable[[str], Sshd]
) -> None:
    server = wary("publickey,publickey")
    desk.known_hosts.write_text(server.known_line())
    wish = replace(spec, port=server.port)
    stranger, second = make_key(desk.user_ssh / "stranger"), make_key(desk.user_ssh / "second")
    server.authorize(client_key, second)
    desk.config.write_text(f"IdentityFile {stranger}\nIdentityFile {second}\n")
    with desk.node(wish) as node:
        assert node.run("echo in", timeout=60).stdout == b"in\n"
    assert ssh_says(desk, wish) == 0

    desk.config.write_text(f"IdentityFile {stranger}\n")
    with pytest.raises(LoginFailed) as caught:
        desk.node(wish).open()
    assert "no key to try" not in caught.value.why
    assert f"{stranger} ED25519" in caught.value.why
    assert f"{client_key} was accepted, but the node wants one key more" in caught.value.why
    assert "was accepted, but the node wants one key more, and there is none left to try" in caught.value.why
    assert "each must be in" in caught.value.next_step
    assert ssh_says(desk, wish) == 255

    strangers = [make_key(desk.user_ssh / f"stranger{number}") for number in range(8)]  # MaxAuthTries is 6
    desk.config.write_text("".join(f"IdentityFile {key}\n" for key in strangers))
    with pytest.raises(LoginFailed, match="accepted, but the node wants one key more; ") as caught:
        desk.node(wish).open()
    assert "MaxAuthTries" in caught.value.next_step


def test_a_node_that_wants_more_than_keys_is_told(
    desk: Desk, spec: ConnectionSpec, client_key: Path, wary: Callable[[str], Sshd]
) -> None:
    server = wary("publickey,hostbased")
    desk.known_hosts.write_text(server.known_line())
    locked = make_key(desk.user_ssh / "locked", passphrase="sesame")
    desk.config.write_text(f"IdentityFile {locked}\n")

    with pytest.raises(LoginFailed) as caught:
        desk.node(replace(spec, port=server.port)).open()

    assert f"{client_key} was accepted, but the node wants hostbased as well" in caught.value.why
    assert "logs in with keys alone" in caught.value.next_step


@pytest.fixture
def agent(desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    # A short path: a socket's name holds 107 bytes.
    directory = Path(subprocess.run(["mktemp", "-d"], check=True, capture_output=True, text=True).stdout.strip())
    address = directory / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(address)], stdout=subprocess.DEVNULL)
    try:
        wait_until(address.exists)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(address))
        yield
    finally:
        process.terminate()
        process.wait(60)
        address.unlink(missing_ok=True)
        directory.rmdir()


@pytest.mark.usefixtures("agent")
def test_a_key_in_the_agent_logs_in(desk: Desk, sshd: Sshd, spec: ConnectionSpec, client_key: Path) -> None:
    desk.known_hosts.write_text(sshd.known_line())
    add_to_agent(make_key(desk.user_ssh / "other"))
    add_to_agent(client_key)

    with desk.node(replace(spec, key_file=None)) as node:
        assert node.is_alive

    desk.config.write_text(f"Host *\n  IdentitiesOnly yes\n  IdentityFile {desk.user_ssh}/other\n")
    with pytest.raises(LoginFailed, match="other"):
        desk.node(replace(spec, key_file=None)).open()


@pytest.mark.usefixtures("agent")
def test_the_named_key_comes_before_an_agent_full_of_others(desk: Desk, sshd: Sshd, spec: ConnectionSpec) -> None:
    desk.known_hosts.write_text(sshd.known_line())
    for number in range(8):  # MaxAuthTries is 6
        add_to_agent(make_key(desk.user_ssh / f"other{number}"))

    with desk.node(spec) as node:
        assert node.is_alive
    with pytest.raises(LoginFailed, match="Too many authentication failures") as caught:
        desk.node(replace(spec, key_file=None)).open()
    assert "IdentitiesOnly" in caught.value.next_step


@pytest.mark.usefixtures("agent")
def test_the_agent_that_ssh_config_names(
    desk: Desk, sshd: Sshd, spec: ConnectionSpec, client_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.known_hosts.write_text(sshd.known_line())
    add_to_agent(client_key)
    address = os.environ["SSH_AUTH_SOCK"]
    monkeypatch.setenv("SSH_AUTH_SOCK", "/nowhere")
    monkeypatch.setenv("AGENT_OF_MINE", address)
    (desk.user_ssh / "it.pub").write_text(f"{public(client_key)}\n")
    by_public_half = f"IdentitiesOnly yes\nIdentityFile {desk.user_ssh}/it.pub\n"

    for said in (f'"{address}"', "$AGENT_OF_MINE", "${AGENT_OF_MINE}"):
        desk.config.write_text(f"IdentityAgent {said}\n{by_public_half}")
        with desk.node(replace(spec, key_file=None)) as node:
            assert node.is_alive


# -- certificates


@pytest.fixture(scope="session")
def authority(client_key: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture(scope="session")
def trusting(authority: Path, client_key: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A node that knows no key but the authority's."""
    stranger = make_key(tmp_path_factory.mktemp("stranger") / "key")
    server = Sshd(tmp_path_factory.mktemp("sshd") / "trusting", stranger, extra=f"TrustedUserCAKeys {authority}.pub")
    yield server
    server.stop()


@pytest.fixture
def certified(desk: Desk, trusting: Sshd, authority: Path) -> ConnectionSpec:
    """A login with a key that has a certificate beside it."""
    desk.known_hosts.write_text(trusting.known_line())
    key = make_key(desk.user_ssh / "id_signed")
    sign(authority, key, trusting.user)
    return ConnectionSpec(
        host=trusting.host, port=trusting.port, user=trusting.user, key_file=str(key), connect_timeout=60.0
    )


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_a_certificate_beside_the_key_logs_in(
    desk: Desk, trusting: Sshd, authority: Path, certified: ConnectionSpec, kind: str
) -> None:
    key = make_key(desk.user_ssh / kind, kind)
    with pytest.raises(LoginFailed):
        desk.node(replace(certified, key_file=str(key))).open()
    sign(authority, key, trusting.user)

    with desk.node(replace(certified, key_file=str(key))) as node:
        assert node.is_alive


def test_the_certificate_of_ssh_config_belongs_to_its_key(desk: Desk, certified: ConnectionSpec) -> None:
    aside = desk.user_ssh / "elsewhere.pub"
    (desk.user_ssh / "id_signed-cert.pub").rename(aside)
    desk.config.write_text(f"Host *\n  CertificateFile {desk.user_ssh}/of-another-key\n  CertificateFile {aside}\n")
    with desk.node(certified) as node:
        assert node.is_alive


@pytest.mark.usefixtures("agent")
def test_a_certificate_in_the_agent_logs_in(desk: Desk, certified: ConnectionSpec) -> None:
    assert certified.key_file
    add_to_agent(Path(certified.key_file))
    with desk.node(replace(certified, key_file=None)) as node:
        assert node.is_alive

    Path(certified.key_file).unlink()  # its public half alone is left, as with a key on a token
    desk.config.write_text(f"Host *\n  IdentitiesOnly yes\n  IdentityFile {certified.key_file}\n")
    with desk.node(replace(certified, key_file=None)) as node:
        assert node.is_alive


def test_a_key_whose_certificate_has_expired_is_tried_by_itself(
    desk: Desk, sshd: Sshd, authority: Path, spec: ConnectionSpec, client_key: Path
) -> None:
    desk.known_hosts.write_text(sshd.known_line())
    key = desk.user_ssh / "id_client"
    key.write_bytes(client_key.read_bytes())
    key.chmod(0o600)
    Path(f"{key}.pub").write_text(f"{public(client_key)} client\n")
    sign(authority, key, sshd.user, "-V", "20200101:20200102")

    with desk.node(replace(spec, key_file=str(key))) as node:
        assert node.is_alive


# -- hosts that do not answer


def test_nobody_listens(desk: Desk, spec: ConnectionSpec) -> None:
    port = free_port()

    with pytest.raises(Unreachable, match=f"nothing listens on 127.0.0.1:{port}") as caught:
        desk.node(replace(spec, port=port)).open()

    assert caught.value.exit_code == Exit.UNREACHABLE
    assert "nothing was touched" in caught.value.serving


def test_an_sshd_that_is_just_restarting(desk: Desk, spec: ConnectionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [ConnectionRefusedError(111, "Connection refused")]
    really = fabric._dial

    def first_refused(*args: object) -> socket.socket:
        if refusals:
            raise refusals.pop()
        return really(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(fabric, "_dial", first_refused)
    with desk.node(replace(spec, host_key_checking="off")) as node:
        assert node.is_alive


def test_a_name_that_does_not_resolve(desk: Desk, spec: ConnectionSpec) -> None:
    with pytest.raises(Unreachable, match=r"gpu1\.invalid does not resolve"):
        desk.node(replace(spec, host="gpu1.invalid")).open()


@pytest.mark.parametrize(
    ("says", "told", "seconds"),
    [
        (None, "does not speak SSH in time", 0.5),
        (b"", "hung up during the handshake", 30.0),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not an SSH server", 30.0),
        (b"SSH-2.0-Silent\r\n", "does not speak SSH in time", 0.5),
    ],
)
def test_a_port_that_speaks_no_ssh(
    desk: Desk, spec: ConnectionSpec, says: bytes | None, told: str, seconds: float
) -> None:
    with listener(says) as port:
        started = time.monotonic()
        with pytest.raises(Unreachable, match=told):
            desk.node(replace(spec, port=port, connect_timeout=seconds)).open()
        assert time.monotonic() - started < 60


def test_a_host_that_swallows_packets(desk: Desk, spec: ConnectionSpec) -> None:
    with full_listener() as port, pytest.raises(Unreachable, match="does not answer"):
        desk.node(replace(spec, port=port, connect_timeout=0.3)).open()


def test_nothing_of_paramiko_reaches_the_user(
    desk: Desk, spec: ConnectionSpec, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with listener(b"HTTP/1.1 400\r\n") as port, pytest.raises(Unreachable):
        desk.node(replace(spec, port=port, connect_timeout=0.3)).open()

    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_the_socket_is_tuned(node: Node) -> None:
    if not isinstance(node._way, fabric.FabricWay):
        pytest.skip("ssh has a socket of its own, and ServerAliveInterval")
    sock = node._way._hops[0].transport.sock

    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000


# -- ssh_config


def test_ssh_config_with_include_names_the_host(desk: Desk, sshd: Sshd, client_key: Path) -> None:
    (desk.user_ssh / "conf.d").mkdir()
    (desk.user_ssh / "conf.d" / "gpu").write_text(
        f"Host gpu-a gpu-b\n  HostName {sshd.host}\n  Port {sshd.port}\n  User {sshd.user}\n"
        f"  IdentityFile {client_key}\n  UserKnownHostsFile {desk.user_ssh}/lab_known\n"
    )
    desk.config.write_text("Include conf.d/*\nHost *\n  ServerAliveInterval 5\n")
    (desk.user_ssh / "lab_known").write_text(sshd.known_line())

    with desk.node(ConnectionSpec(host="gpu-a")) as node:
        assert node.run("echo in", timeout=60).stdout == b"in\n"


def test_the_inventory_wins_over_ssh_config(desk: Desk, sshd: Sshd, spec: ConnectionSpec) -> None:
    desk.known_hosts.write_text(sshd.known_line())
    desk.config.write_text("Host *\n  User nobody-there\n  Port 1\n  StrictHostKeyChecking no\n")

    with desk.node(spec) as node:
        assert node.is_alive
    desk.known_hosts.unlink()
    with pytest.raises(HostKeyUnknown):
        desk.node(spec).open()


def test_host_key_alias(desk: Desk, sshd: Sshd, spec: ConnectionSpec) -> None:
    desk.config.write_text("Host *\n  HostKeyAlias rack7\n")
    with pytest.raises(HostKeyUnknown) as caught:
        desk.node(spec).open()
    accept(caught.value)
    assert desk.known_hosts.read_text() == "rack7 " + sshd.known_line().split(None, 1)[1]

    with desk.node(spec) as node:
        assert node.is_alive


def test_proxy_command(desk: Desk, sshd: Sshd, spec: ConnectionSpec, tmp_path: Path) -> None:
    relay = tmp_path / "relay.py"
    relay.write_text(
        "import os, socket, sys, threading\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n"
        "    while data := os.read(0, 65536): s.sendall(data)\n"
        "    s.shutdown(1)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while data := s.recv(65536): os.write(1, data)\n"
    )
    desk.config.write_text(f"Host *\n  Port 1\n  ProxyCommand python3 {relay} %h %p\n")
    desk.known_hosts.write_text(sshd.known_line())

    with desk.node(spec) as node:
        assert node.run("echo in", timeout=60).stdout == b"in\n"


def test_a_proxy_command_that_fails(desk: Desk, spec: ConnectionSpec) -> None:
    desk.config.write_text("Host *\n  ProxyCommand /bin/sh -c 'echo no route to %h >&2; exit 3'\n")

    with pytest.raises(Unreachable, match="does not get through") as caught:
        desk.node(spec).open()

    assert caught.value.why == f"no route to {spec.host}"


def test_where_there_is_no_ssh_fabric_does_it_alone(
    desk: Desk, sshd: Sshd, spec: ConnectionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "has_ssh", lambda: False)
    monkeypatch.setattr(connection, "has_ssh", lambda: False)
    with pytest.raises(HostKeyUnknown) as caught:
        desk.node(spec).open()
    assert caught.value.fingerprint == key_fingerprint(sshd, "ed25519")
    with desk.node(replace(spec, host_key_checking="accept-new")):
        pass
    assert desk.known_hosts.read_text() == sshd.known_line()
    with desk.node(spec) as node:
        assert node.run("echo in", timeout=60).stdout == b"in\n"
    with pytest.raises(LoginFailed, match=r"tried .*other") as failed:
        desk.node(replace(spec, key_file=str(make_key(desk.user_ssh / "other")))).open()
    assert "ssh -F" in failed.value.next_step
    desk.known_hosts.write_text(f"{sshd.known_line()}@revoked * {sshd.known_line().split(None, 1)[1]}")
    with pytest.raises(HostKeyUnknown):
        desk.node(spec).open()


# -- jump hosts


@pytest.fixture
def through(desk: Desk, jump: Sshd, client_key: Path) -> Callable[..., None]:
    def write(proxy_jump: str = "bastion") -> None:
        desk.config.write_text(
            f"Host bastion bastion2\n  HostName {jump.host}\n  Port {jump.port}\n  IdentityFile {client_key}\n"
            f"Host {jump.host}\n  ProxyJump {proxy_jump}\n"
        )

    return write


@pytest.mark.parametrize("chain", ["bastion", "bastion,bastion2"])
def test_jump_with_known_keys_on_every_hop(
    desk: Desk, sshd: Sshd, jump: Sshd, spec: ConnectionSpec, through: Callable[..., None], *, chain: str
) -> None:
    through(chain)
    desk.known_hosts.write_text(sshd.known_line() + jump.known_line())

    with desk.node(spec) as node:
        assert node.run("echo in", timeout=60).stdout == b"in\n"
        assert [stop.port for stop in node.route] == [jump.port] * len(chain.split(",")) + [sshd.port]


@pytest.mark.parametrize("has_key", [True, False])
def test_a_jump_host_that_takes_no_key_of_ours_is_mended_in_ssh_config(
    desk: Desk, sshd: Sshd, jump: Sshd, spec: ConnectionSpec, *, has_key: bool
) -> None:
    key = make_key(desk.user_ssh / "other") if has_key else "none"
    desk.config.write_text(
        f"Host bastion\n  HostName {jump.host}\n  Port {jump.port}\n  IdentityFile {key}\n"
        f"Host {jump.host}\n  ProxyJump bastion\n"
    )
    desk.known_hosts.write_text(sshd.known_line() + jump.known_line())

    with pytest.raises(LoginFailed) as caught:
        desk.node(spec).open()

    assert "ansible_" not in caught.value.next_step
    wanted = "on the jump host, or set its User in ssh_config" if has_key else "set its IdentityFile in ssh_config"
    assert wanted in caught.value.next_step


def test_an_unknown_jump_host_is_refused(
    desk: Desk, sshd: Sshd, jump: Sshd, spec: ConnectionSpec, through: Callable[..., None]
) -> None:
    through()
    desk.known_hosts.write_text(sshd.known_line())

    with pytest.raises(HostKeyUnknown) as caught:
        desk.node(spec).open()

    assert caught.value.fingerprint == key_fingerprint(jump, "ed25519")
    accept(caught.value)
    assert jump.known_line() in desk.known_hosts.read_text()


def test_an_unknown_target_behind_a_known_jump_host_is_refused(
    desk: Desk, sshd: Sshd, jump: Sshd, spec: ConnectionSpec, through: Callable[..., None]
) -> None:
    through()
    desk.known_hosts.write_text(jump.known_line())

    with pytest.raises(HostKeyUnknown) as caught:
        desk.node(spec).open()

    assert caught.value.fingerprint == key_fingerprint(sshd, "ed25519")
    accept(caught.value)  # ssh-keyscan does not reach it
    assert sshd.known_line() in desk.known_hosts.read_text()


def test_a_jump_host_that_cannot_reach_the_target_says_why(
    desk: Desk, jump: Sshd, spec: ConnectionSpec, through: Callable[..., None]
) -> None:
    through()
    desk.known_hosts.write_text(jump.known_line())

    with pytest.raises(Unreachable, match=r"the jump host cannot connect") as caught:
        desk.node(replace(spec, port=free_port())).open()

    assert "refused" in caught.value.why


def test_a_host_that_is_named_as_its_own_jump_is_refused_as_ssh_does(
    desk: Desk, sshd: Sshd, spec: ConnectionSpec
) -> None:
    desk.config.write_text(f"Host *\n  ProxyJump {sshd.host}:{sshd.port}\n")
    desk.known_hosts.write_text(sshd.known_line())

    with pytest.raises(UsageError, match="jumphost loop"):
        desk.node(spec).open()
    assert ssh_says(desk, spec) == 255


# -- become


def test_wrap_survives_quotes_on_its_way_through_the_login_shell(desk: Desk, node: Node, spec: ConnectionSpec) -> None:
    # Without sudo at hand the words that would follow it are run instead.
    wrapped = desk.node(replace(spec, become=True)).wrap("exec /bin/sh -c 'echo \"a  b\"; id -u'")

    assert wrapped.startswith("exec sudo -n -H /bin/sh -c ")
    result = node.run(wrapped.replace("sudo -n -H ", ""), timeout=60)
    assert result.stdout.splitlines()[0] == b"a  b"


def test_refused_commands_are_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(node._way, fabric.FabricWay):
        pytest.skip("no OpenSSH server refuses an exec")
    ask_for = paramiko.Channel.invoke_subsystem
    monkeypatch.setattr("paramiko.Channel.exec_command", lambda channel, _: ask_for(channel, "there-is-none"))
    for ask in (lambda channel: channel.read(), lambda channel: channel.wait(60), lambda channel: channel.exit_status):
        with node.stream("true") as channel:
            channel.write(b"input of the command\n" * 10)
            with pytest.raises(NodeRefused, match="runs no commands"):
                ask(channel)
    with pytest.raises(NodeRefused, match="runs no commands"):
        node.run("true", stdin=b"input")
    monkeypatch.undo()
    assert node.run("echo still here").stdout == b"still here\n"


def test_a_login_in_the_background_is_waited_for_and_tells_its_trouble(
    desk: Desk, sshd: Sshd, spec: ConnectionSpec
) -> None:
    with contextlib.closing(desk.node(spec)) as node:
        node.begin()
        with pytest.raises(HostKeyUnknown):
            node.run("true")
    desk.known_hosts.write_text(sshd.known_line())
    with contextlib.closing(desk.node(spec)) as node:
        node.begin()
        eventually(lambda: not any(thread.name == "login to gpu1" for thread in threading.enumerate()))
        assert node.is_alive  # and nobody has asked it for anything
        assert node.run("echo hello").stdout == b"hello\n"
    node.begin()
    node.close()  # Ctrl-C in the middle of it
    deadline = time.monotonic() + 60
    while any(thread.name == "login to gpu1" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not node.is_alive


@pytest.mark.parametrize("made", ["no socket", "a socket", "a login"])
def test_a_login_that_is_given_up_at_any_moment_leaves_nothing_open(
    desk: Desk, sshd: Sshd, spec: ConnectionSpec, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    desk.known_hosts.write_text(sshd.known_line())
    node = desk.node(spec)

    give_up_a_login(node, monkeypatch, made)

    with pytest.raises(Unreachable, match="given up"):
        node.run("true")


@pytest.mark.parametrize("made", ["no socket", "a socket", "a login"])
def test_a_login_that_is_given_up_at_the_jump_host_dials_nothing_further(
    desk: Desk,
    sshd: Sshd,
    jump: Sshd,
    spec: ConnectionSpec,
    through: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    made: str,
) -> None:
    through()
    desk.known_hosts.write_text(sshd.known_line() + jump.known_line())
    connections = sshd.log.read_text().count("Connection from")
    node = desk.node(spec)

    give_up_a_login(node, monkeypatch, made)

    assert sshd.log.read_text().count("Connection from") == connections
    with pytest.raises(Unreachable, match="given up"):
        node.run("true")
    monkeypatch.undo()
    with node:  # asked for again
        assert node.run("echo in", timeout=60).stdout == b"in\n"
    assert sshd.log.read_text().count("Connection from") == connections + 1


# -- what the tests need


def accept(error: LamplighterError) -> None:
    """Run the line that the message ends with."""
    command = error.next_step.partition("run: ")[2]
    subprocess.run(["/bin/sh", "-c", command], check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def key_fingerprint(server: Sshd, kind: str) -> str:
    return fingerprint(decoded(server.known_line(kind).split()[2]))


def ssh_says(desk: Desk, spec: ConnectionSpec) -> int:
    """The exit status of ssh itself, with this desk's ssh_config and known_hosts: 255 where it does not log in."""
    known = ("-o", f"UserKnownHostsFile={desk.known_hosts}", "-o", "GlobalKnownHostsFile=none")
    words = ["ssh", "-F", str(desk.config), *known, "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes"]
    words += ["-i", str(spec.key_file), "-p", str(spec.port), f"{spec.user}@{spec.host}", "true"]
    return subprocess.run(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode


def give_up_a_login(node: Node, monkeypatch: pytest.MonkeyPatch, made: str) -> None:
    """Begin a login, close ``node`` once its first hop has got as far as ``made``, and wait until all has ended."""
    reached, go_on = threading.Event(), threading.Event()

    def paused(really: Callable[..., object], *, before: bool) -> Callable[..., object]:
        def call(*words: object, **options: object) -> object:
            result = None if before else really(*words, **options)
            reached.set()
            assert go_on.wait(60)
            return really(*words, **options) if before else result

        return call

    moments = {
        "no socket": (fabric, "_dial", True),
        "a socket": (fabric, "_dial", False),
        "a login": (paramiko.SSHClient, "connect", False),
    }
    place, name, before = moments[made]
    monkeypatch.setattr(place, name, paused(getattr(place, name), before=before))
    node.begin()
    assert reached.wait(60)
    node.close()
    go_on.set()
    wait_until(lambda: not any(thread.name == "login to gpu1" for thread in threading.enumerate()))
    wait_until(lambda: not any(isinstance(thread, paramiko.Transport) for thread in threading.enumerate()))


def add_to_agent(file: Path) -> None:
    subprocess.run(["ssh-add", "-q", str(file)], check=True, capture_output=True)


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@contextlib.contextmanager
def listener(says: bytes | None) -> Iterator[int]:
    """A port that says ``says`` to everybody and hangs up after it; it keeps the line open where it ends in silence."""
    held: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                if says:
                    client.sendall(says)
                if says == b"":
                    client.close()
                else:
                    held.append(client)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield int(server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(60)
            for client in held:
                client.close()


@contextlib.contextmanager
def full_listener() -> Iterator[int]:
    """A port whose queue is full, so that the kernel drops every further SYN."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        yield int(server.getsockname()[1])
