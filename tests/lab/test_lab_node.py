"""The node in a box: up and down again and again, and commands that run as sshd runs them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import asyncssh
import paramiko
import pytest

from lab import control, ledger, node
from lamplighter.errors import UsageError

NAME = "gpu 1"
#: Only a hang takes that long.
PATIENCE = {"timeout": 120, "banner_timeout": 120, "auth_timeout": 120}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("a lab with spaces")
    yield path
    node.down(NAME, path)


@pytest.fixture(scope="module")
def endpoint(directory: Path) -> node.Endpoint:
    return node.ensure_up(NAME, directory)


@pytest.fixture(scope="module")
def client(endpoint: node.Endpoint) -> Iterator[paramiko.SSHClient]:
    with connected(endpoint) as connection:
        yield connection


def connected(endpoint: node.Endpoint, **changes: str) -> paramiko.SSHClient:
    client = paramiko.SSHClient()
    client.load_host_keys(str(endpoint.known_hosts))
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    login = {"username": endpoint.user, "key_filename": str(endpoint.key_file), **changes}
    client.connect(endpoint.host, endpoint.port, look_for_keys=False, allow_agent=False, **PATIENCE, **login)
    return client


def run(client: paramiko.SSHClient, command: str, data: bytes = b"") -> tuple[int, bytes, bytes]:
    channel = opened(client, command)
    channel.sendall(data)
    channel.shutdown_write()
    out, err = channel.makefile("rb").read(), channel.makefile_stderr("rb").read()
    return channel.recv_exit_status(), out, err


def opened(client: paramiko.SSHClient, command: str) -> paramiko.Channel:
    transport = client.get_transport()
    assert transport
    channel = transport.open_session(timeout=120)
    channel.settimeout(120)
    channel.exec_command(command)
    return channel


def ssh_says(endpoint: node.Endpoint) -> bytes:
    """What ssh itself brings back by the line that we print, strict about the host key and without any ssh_config."""
    strict = "ssh -F /dev/null -o BatchMode=yes -o StrictHostKeyChecking=yes -o GlobalKnownHostsFile=none "
    line = endpoint.ssh_line.replace("ssh ", strict, 1) + " echo in"
    return subprocess.run(["/bin/sh", "-c", line], stdin=subprocess.DEVNULL, capture_output=True, check=False).stdout


def wait_until(condition: Callable[[], object], timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


# Commands.


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
def test_the_line_that_we_print_logs_in_whatever_the_paths_are_made_of(endpoint: node.Endpoint, tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s 100% "odd" \\ %h'
    shutil.copytree(endpoint.key_file.parent, odd)

    assert " " in str(endpoint.known_hosts)
    assert ssh_says(endpoint) == b"in\n"
    assert ssh_says(replace(endpoint, key_file=odd / "client_key", known_hosts=odd / "known_hosts")) == b"in\n"


def test_a_command_starts_in_a_clean_environment(
    client: paramiko.SSHClient, directory: Path, endpoint: node.Endpoint
) -> None:
    status, out, err = run(client, 'env -0; printf %s "$PWD"')
    *variables, place = out.decode().split("\0")
    environment = dict(variable.split("=", 1) for variable in variables)
    home = str(directory / NAME / "home")
    assert (status, err, place) == (0, b"", home)
    assert environment["HOME"] == home
    assert environment["PATH"].split(":")[0] == str(directory / NAME / "bin")
    assert environment["USER"] == environment["LOGNAME"] == endpoint.user
    assert set(environment) - {"OLDPWD", "_", "SHLVL"} == {
        "HOME", "PATH", "USER", "LOGNAME", "SHELL", "PWD", "SSH_CLIENT", "SSH_CONNECTION",
    }  # fmt: skip


def test_only_lang_is_taken_from_the_client(client: paramiko.SSHClient) -> None:
    transport = client.get_transport()
    assert transport
    channel = transport.open_session()
    for name in ("LC_TEST", "LANG", "NCCL_PROTO", "LD_PRELOAD"):
        channel.set_environment_variable(name, "C.UTF-8")
    channel.exec_command("env")
    lines = channel.makefile("rb").read().decode().splitlines()
    assert {"LC_TEST=C.UTF-8", "LANG=C.UTF-8"} <= set(lines)
    assert not any(line.startswith(("NCCL", "LD_")) for line in lines)


def test_output_error_output_and_exit_status_are_kept_apart(client: paramiko.SSHClient) -> None:
    assert run(client, "echo out; echo err >&2; exit 7") == (7, b"out\n", b"err\n")


def test_a_command_ended_by_a_signal_has_no_exit_status(client: paramiko.SSHClient) -> None:
    assert run(client, "kill -KILL $$")[0] == -1


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
def test_bytes_pass_unchanged_both_ways(client: paramiko.SSHClient, size: int) -> None:
    data = bytes(range(256)) * (size // 256) + b"\r\n\0\xff"[: size % 256]
    with ThreadPoolExecutor() as pool:  # cat answers while it is still being fed
        channel = opened(client, "cat")
        reading = pool.submit(channel.makefile("rb").read)
        channel.sendall(data)
        channel.shutdown_write()
        assert reading.result(timeout=120) == data
        assert channel.recv_exit_status() == 0


def test_a_command_that_does_not_read_its_input_still_ends(client: paramiko.SSHClient) -> None:
    channel = opened(client, "exec <&-; echo done")
    with contextlib.suppress(OSError):  # it may be over already
        channel.sendall(b"x" * 100_000)
    assert channel.makefile("rb").read() == b"done\n"
    assert channel.recv_exit_status() == 0


def test_a_daemon_that_keeps_the_pipes_does_not_keep_the_channel(client: paramiko.SSHClient) -> None:
    started = time.monotonic()
    status, out, _ = run(client, "sleep 600 & echo $!")
    assert (status, time.monotonic() - started < 120) == (0, True)
    os.kill(int(out), signal.SIGKILL)


def test_a_slow_reader_gets_everything_that_was_written_before_the_end(client: paramiko.SSHClient) -> None:
    channel = opened(client, "head -c 4000000 /dev/zero; exit 3")
    received = 0
    while data := channel.recv(4096):
        received += len(data)
    assert (received, channel.recv_exit_status()) == (4_000_000, 3)


def test_closing_the_channel_ends_no_process(client: paramiko.SSHClient) -> None:
    channel = opened(client, "echo $$; exec sleep 60")
    pid = int(channel.makefile("r").readline())
    start = ledger.start_of(pid)
    channel.close()
    assert run(client, "true")[0] == 0
    assert ledger.start_of(pid) == start is not None
    os.kill(pid, signal.SIGKILL)


def test_a_child_in_its_own_session_survives_the_connection(endpoint: node.Endpoint) -> None:
    with connected(endpoint) as client:
        _, out, _ = run(client, "setsid sleep 60 >/dev/null 2>&1 </dev/null & echo $!")
        pid = int(out)
    with connected(endpoint) as client:
        assert run(client, f"kill -0 {pid}")[0] == 0
    os.kill(pid, signal.SIGKILL)


def test_closed_pipes_are_felt_by_the_one_who_writes(client: paramiko.SSHClient) -> None:
    channel = opened(client, "echo $$; exec yes")
    pid = int(channel.makefile("r", 64).readline())
    channel.close()
    wait_until(lambda: ledger.start_of(pid) is None)


def test_a_signal_request_reaches_the_command_s_group(client: paramiko.SSHClient, directory: Path) -> None:
    # paramiko cannot send one, OpenSSH's and asyncssh's clients can.
    program = (
        "import asyncio, asyncssh, sys\n"
        "async def main(host, port, user, key, known):\n"
        "    async with asyncssh.connect(host, int(port), username=user, client_keys=[key], known_hosts=known) as c:\n"
        "        async with c.create_process('echo on; sleep 60; echo never') as p:\n"
        "            print((await p.stdout.readline()).strip()); p.send_signal('TERM')\n"
        "            done = await p.wait(); print(done.exit_signal[0], repr(done.stdout))\n"
        "asyncio.run(main(*sys.argv[1:]))\n"
    )
    end = node.ensure_up(NAME, directory)
    words = [end.host, str(end.port), end.user, str(end.key_file), str(end.known_hosts)]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["on", "TERM ''"]


def test_each_command_has_its_own_session(client: paramiko.SSHClient) -> None:
    _, out, _ = run(client, "cut -d' ' -f1,5,6 /proc/$$/stat")
    pid, group, session = out.split()
    assert pid == group == session


def test_many_commands_at_once(client: paramiko.SSHClient) -> None:
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda number: run(client, f"sleep 0.1; echo {number}"), range(10)))
    assert answers == [(0, f"{number}\n".encode(), b"") for number in range(10)]


def test_no_terminal_and_no_sftp(client: paramiko.SSHClient) -> None:
    transport = client.get_transport()
    assert transport
    with pytest.raises(paramiko.SSHException):
        transport.open_session().get_pty()
    with pytest.raises(paramiko.SSHException):
        client.open_sftp()


def test_a_shell_reads_commands_from_its_input(client: paramiko.SSHClient) -> None:
    transport = client.get_transport()
    assert transport
    channel = transport.open_session()
    channel.invoke_shell()
    channel.sendall(b"echo $((40 + 2))\nexit 5\n")
    assert channel.makefile("rb").read().endswith(b"42\n")
    assert channel.recv_exit_status() == 5


def test_another_key_or_user_is_turned_away(endpoint: node.Endpoint, tmp_path: Path) -> None:
    key = tmp_path / "key"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(key))
    for wrong in ({"key_filename": str(key)}, {"username": "nobody-else"}):
        with pytest.raises(paramiko.AuthenticationException):
            connected(endpoint, **wrong)


def test_its_programs_are_found_and_work(client: paramiko.SSHClient, directory: Path) -> None:
    uuid = control.uuids(directory / NAME)[0]
    assert run(client, "nvidia-smi -L")[1].decode().startswith(f"GPU 0: NVIDIA H200 (UUID: {uuid})\n")
    assert run(client, "python3 -c 'import setproctitle, sys; print(sys.prefix)'")[1].decode().strip() == sys.prefix
    status, out, err = run(client, "lamplighter-demo-server --lab-fail no-such-kind --model-path x")
    assert (status, out) == (1, b"")
    assert b"unknown failure" in err


# Up and down.


def test_up_twice_is_the_same_node(directory: Path, endpoint: node.Endpoint) -> None:
    before = ledger.read_json(str(directory / NAME / "ssh" / "server.json"))
    assert node.ensure_up(NAME, directory) == endpoint
    assert ledger.read_json(str(directory / NAME / "ssh" / "server.json")) == before


def test_down_ends_everything_on_the_node_and_up_brings_it_back_on_its_port(tmp_path: Path) -> None:
    end = node.ensure_up("box", tmp_path)
    retitled = "import setproctitle, time; setproctitle.setproctitle('x'); print(1, flush=True); time.sleep(60)"
    with connected(end) as client:
        channel = opened(client, f'setsid python3 -c "{retitled}" & wait')
        assert channel.makefile("r").readline() == "1\n"
        with control.stranger(tmp_path / "box", 1000) as stranger:
            running = node.processes("box", tmp_path)
            assert stranger.pid in running
            assert len(running) >= 3  # the shell, the retitled one, the stranger
            assert node.down("box", tmp_path) is True
            assert stranger.wait(60) == -signal.SIGKILL
    assert (node.processes("box", tmp_path), node.down("box", tmp_path)) == ([], False)
    assert node.ensure_up("box", tmp_path) == end
    assert node.down("box", tmp_path) is True


def test_down_spares_who_asks_for_it(tmp_path: Path) -> None:
    """Also when it is asked from a shell on the node: it must not end itself half way."""
    end = node.ensure_up("box", tmp_path)
    program = f"from lab import node; from pathlib import Path; print(node.down('box', Path({str(tmp_path)!r})))"
    environment = {"HOME": str(tmp_path / "box" / "home"), "PYTHONPATH": str(node.PROJECT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    with pytest.raises(OSError, match=r"refused|Unable to connect"):
        connected(end)


def test_a_dead_server_is_replaced(tmp_path: Path) -> None:
    end = node.ensure_up("box", tmp_path)
    record = json.loads((tmp_path / "box" / "ssh" / "server.json").read_text())
    os.kill(record["pid"], signal.SIGKILL)
    wait_until(lambda: ledger.start_of(record["pid"]) is None)
    assert node.ensure_up("box", tmp_path) == end
    with connected(end) as client:
        assert run(client, "echo hi")[1] == b"hi\n"
    assert node.down("box", tmp_path) is True


def test_a_record_of_another_process_is_not_believed_and_that_process_is_left_alone(tmp_path: Path) -> None:
    node.ensure_up("box", tmp_path)
    assert node.down("box", tmp_path) is True
    with control.stranger(node.prepare("other", tmp_path), 1) as stranger:
        record = tmp_path / "box" / "ssh" / "server.json"
        record.write_text(json.dumps({"pid": stranger.pid, "start": 1, "port": 1}))
        end = node.ensure_up("box", tmp_path)
        assert stranger.poll() is None
        with connected(end) as client:
            assert run(client, "true")[0] == 0
    assert node.down("box", tmp_path) is True


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    root = node.prepare("box", tmp_path)
    (root / "ssh" / "host_key").write_text("no key at all")
    with pytest.raises(node.LabFailed, match="ended with status 1 before it answered") as failed:
        node.ensure_up("box", tmp_path)
    assert "Invalid private key" in failed.value.why
    assert str(root / "ssh" / "server.log") in failed.value.next_step


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\n", "-x", "\x1b[2J", "x" * 41])
def test_a_name_is_a_plain_word(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is no name for a lab node"):
        node.ensure_up(name, tmp_path)


def test_down_of_a_node_that_never_was(tmp_path: Path) -> None:
    assert node.down("box", tmp_path) is False
    assert list(tmp_path.iterdir()) == []


def test_deaths_are_timed_by_the_node_even_when_nobody_looks(tmp_path: Path) -> None:
    node.ensure_up("box", tmp_path)
    root = tmp_path / "box"
    with control.stranger(root, 1000) as stranger:
        stranger.kill()
        stranger.wait()
    wait_until(lambda: not list((root / "gpu" / "ledger").iterdir()))
    assert node.down("box", tmp_path) is True


def test_a_port_that_somebody_else_has_is_replaced_and_the_choice_kept(tmp_path: Path) -> None:
    node.prepare("box", tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        wanted = other.getsockname()[1]
        moved = node.port_for("box", tmp_path, wanted)
        assert moved != wanted
        assert node.port_for("box", tmp_path, wanted) == moved
    assert node.port_for("box", tmp_path, wanted) == moved
