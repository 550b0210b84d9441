"""Starts and stops a GPU node in a box: an SSH server on 127.0.0.1 whose commands see pretended GPUs.

Promise: ``ensure_up`` returns once the node answers SSH, starting it in the background unless it is up already, and
``down`` ends everything that runs on it; both may be called twice. A node is the directory DIRECTORY/NAME:

    home/        HOME and working directory of every command
    bin/         first on PATH: python3, nvidia-smi, lamplighter-demo-server
    gpu/         the pretended GPUs and who holds their memory (lab.ledger, lab.control)
    ssh/         host_key client_key known_hosts, server.json of the running server, server.log

The server behaves like sshd with OpenSSH's defaults: a command runs through a shell in its own session, in a clean
environment (nothing of ours, LANG and LC_* from the client), exits with its status or signal, and what it started
survives the end of the channel. One thing is kinder: the channel ends when the command does, even if a daemon kept its
pipes. No terminals, no SFTP, no forwarding. Works as root and as an ordinary user; writes nothing outside DIRECTORY.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import pwd
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lab import ledger
from lamplighter.errors import LamplighterError, UsageError
from lamplighter.node.system import ports

if TYPE_CHECKING:
    from collections.abc import Iterator

    import asyncssh

PROJECT = Path(__file__).resolve().parent.parent
ADDRESS = "127.0.0.1"
#: How far a port that somebody else has is moved at the most.
PORTS_TRIED = 50
SHELL = "/bin/sh"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: Seconds that a node may take to answer SSH; it takes half a second, the rest is for a machine under load.
START_SECONDS = 30.0
#: Seconds between two looks at the ledger for processes whose death should be noted.
WATCH_SECONDS = 0.1


#: A directory of that name is made; and people read it.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,39}")


class LabFailed(LamplighterError):
    """The node in a box did not come up or go down."""

    advice = "`./inv lab.down` ends all that runs on it, then try again"


@dataclass(frozen=True)
class Endpoint:
    """How to reach a node: all that an SSH client needs, and the interpreter its servers run with."""

    host: str
    port: int
    user: str
    key_file: Path
    known_hosts: Path
    python: Path

    @property
    def ssh_line(self) -> str:
        """The shell's words for a login by hand, whatever the paths are made of."""
        options = ["-p", str(self.port)]
        for keyword, path in (("UserKnownHostsFile", self.known_hosts), ("IdentityFile", self.key_file)):
            # ssh takes the value apart once more, and expands it
            value = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
            options += ["-o", f'{keyword}="{value}"']
        return shlex.join(["ssh", *options, f"{self.user}@{self.host}"])


@dataclass(frozen=True)
class Layout:
    """Where things lie below a node's directory."""

    root: Path

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def gpu(self) -> Path:
        return self.root / "gpu"

    @property
    def ssh(self) -> Path:
        return self.root / "ssh"

    @property
    def record(self) -> Path:
        """pid, start time and port of the running SSH server."""
        return self.ssh / "server.json"

    @property
    def ports(self) -> Path:
        """Which port a server got instead of the one that its inventory names."""
        return self.root / "ports.json"

    @property
    def log(self) -> Path:
        return self.ssh / "server.log"


def ensure_up(name: str, directory: Path, *, gpus: int = 2) -> Endpoint:
    """The node ``name`` of ``directory``, running: started in the background unless it answers already.

    ``gpus`` counts when the node is made for the first time. Raises LabFailed when it does not answer in time.
    """
    layout = _layout(name, directory)
    _user()
    with _taking_turns(layout):
        port = _answering_port(layout)
        if port is None:
            _end_server(layout)
            _furnish(layout, gpus)
            port = _start(layout)
        return _endpoint(layout, port)


def down(name: str, directory: Path) -> bool:
    """End the servers on the node, then the node; False when nothing ran. Files stay.

    Raises LabFailed when a process does not end.
    """
    layout = _layout(name, directory)
    if not layout.root.is_dir():
        return False
    with _taking_turns(layout):
        found = _end_processes(layout)
        return _end_server(layout) or found


def prepare(name: str, directory: Path, *, gpus: int = 2) -> Path:
    """Make a node's directory, programs and GPUs without starting it; returns the directory. Keeps GPUs it has."""
    layout = _layout(name, directory)
    with _taking_turns(layout):
        _furnish(layout, gpus)
    return layout.root


def port_for(name: str, directory: Path, wanted: int) -> int:
    """The port that a server of the node uses for ``wanted``: the same, unless somebody else on this machine has it.

    A node in a box has no network of its own, so two of them (another user's, another checkout's) would meet on one
    port. The choice is kept for as long as nobody else takes that port too.
    """
    layout = _layout(name, directory)
    with _taking_turns(layout):
        record = ledger.read_json(str(layout.ports))
        chosen = record if isinstance(record, dict) else {}
        candidates = [int(chosen.get(str(wanted), wanted)), *range(wanted, wanted + PORTS_TRIED)]
        port = next((port for port in candidates if _is_ours_or_free(layout, port)), wanted)
        if chosen.get(str(wanted)) != port:
            ledger.write_json(str(layout.ports), {**chosen, str(wanted): port})
        return port


def _is_ours_or_free(layout: Layout, port: int) -> bool:
    listening = ports.listeners(port)
    if not listening:
        return ports.is_free(ADDRESS, port)
    owners = {pid for listener in listening for pid in listener.pids}
    return bool(owners & _processes(layout).keys())


def processes(name: str, directory: Path) -> list[int]:
    """Every process on the node: recorded in its ledger, or started below its home by a command over SSH."""
    return sorted(_processes(_layout(name, directory)))


def _layout(name: str, directory: Path) -> Layout:
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a lab node", next_step="use a plain word, such as demo")
    return Layout(Path(directory).resolve() / name)


@contextlib.contextmanager
def _taking_turns(layout: Layout) -> Iterator[None]:
    """Two callers at once: the second waits and finds the work done."""
    layout.root.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(layout.root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _answering_port(layout: Layout) -> int | None:
    """The port of the live server, None when there is none or it does not speak SSH any more."""
    record = ledger.read_json(str(layout.record))
    if not isinstance(record, dict) or ledger.start_of(record["pid"]) != record["start"]:
        return None
    try:
        with socket.create_connection((ADDRESS, record["port"]), timeout=5) as connection:
            banner = connection.recv(8)
    except OSError:
        return None
    return int(record["port"]) if banner.startswith(b"SSH-2.0") else None


def _endpoint(layout: Layout, port: int) -> Endpoint:
    return Endpoint(
        host=ADDRESS,
        port=port,
        user=_user().pw_name,
        key_file=layout.ssh / "client_key",
        known_hosts=layout.ssh / "known_hosts",
        python=layout.bin / "python3",
    )


def _user() -> pwd.struct_passwd:
    try:
        return pwd.getpwuid(os.getuid())
    except KeyError as error:
        raise LabFailed(
            f"user {os.getuid()} has no name on this machine",
            why="SSH logs in by name",
            next_step="run this as a user of /etc/passwd",
        ) from error


def _furnish(layout: Layout, gpus: int) -> None:
    for directory in (layout.home, layout.bin, layout.gpu / "ledger", layout.ssh):
        directory.mkdir(parents=True, exist_ok=True)
    layout.ssh.chmod(0o700)
    python = shlex.quote(sys.executable)
    project = shlex.quote(str(PROJECT))
    gpu = shlex.quote(str(layout.gpu))
    smi = (
        "import sys; sys.path.insert(0, sys.argv[1]); from lab.nvidia_smi import main; "
        "sys.exit(main(sys.argv[2], sys.argv[3:]))"
    )
    programs = {
        "python3": f'exec {python} "$@"',
        "nvidia-smi": f'exec {python} -I -S -c "{smi}" {project} {gpu} "$@"',
        "lamplighter-demo-server": f"exec {python} {shlex.quote(str(PROJECT / 'lab' / 'launch_server.py'))} "
        f'--lab-gpus {gpu} "$@"',
    }
    for name, line in programs.items():
        path = layout.bin / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    if not (layout.gpu / "board.json").exists():
        ledger.write_json(str(layout.gpu / "board.json"), board(layout.root, gpus))


def board(root: Path, gpus: int) -> dict[str, object]:
    """The GPUs of a node as board.json has them. UUIDs differ from node to node: locks on them are shared by all."""
    return {
        "driver": "580.159.04",
        "cuda": "13.0",
        "cpus": f"0-{(os.cpu_count() or 1) - 1}",
        "gpus": [
            {
                "index": index,
                "uuid": f"GPU-{uuid.uuid5(uuid.NAMESPACE_URL, f'{root}#{index}')}",
                "name": "NVIDIA H200",
                "bus": f"00000000:00:{6 + index:02X}.0",
                "mib": 143771,
                "temperature": 34 + index % 3,
                "memory_temperature": 37 + index % 3,
                "watts": 76.24 + index % 4,
            }
            for index in range(gpus)
        ],
    }


def _start(layout: Layout) -> int:
    """Start the server in the background and wait until it accepts connections. Returns its port."""
    with layout.log.open("ab") as log:
        log.truncate(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "lab.node", "serve", str(layout.root)],
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        status = process.poll()
        if status is not None:
            raise LabFailed(
                f"the lab node in {layout.root} ended with status {status} before it answered",
                why=_tail(layout.log),
                next_step=f"read {layout.log}",
            )
        record = ledger.read_json(str(layout.record))
        if isinstance(record, dict) and record["pid"] == process.pid:
            process.returncode = 0  # it outlives us on purpose: no warning when this object goes
            return int(record["port"])
        time.sleep(0.01)
    process.kill()
    process.wait()
    raise LabFailed(
        f"the lab node in {layout.root} did not answer within {START_SECONDS:.0f} s",
        why=_tail(layout.log),
        next_step=f"read {layout.log}",
    )


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return lines[-1] if lines else "it printed nothing"


def _end_server(layout: Layout) -> bool:
    record = ledger.read_json(str(layout.record))
    if not isinstance(record, dict):
        return False
    ended = _end({record["pid"]: record["start"]}, signal.SIGTERM)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(record["pid"], os.WNOHANG)  # when this very process started it
    layout.record.unlink(missing_ok=True)
    return ended


def _end_processes(layout: Layout) -> bool:
    found = False
    while living := _processes(layout):
        _end(living, signal.SIGKILL)
        found = True  # look again: one of them may have started another meanwhile
    return found


def _end(victims: dict[int, int], number: signal.Signals) -> bool:
    """Signal each pid that still has its start time, wait for its end, kill what stays. False when none was alive."""
    handles: dict[int, int] = {}
    found = False
    try:
        for pid, start in victims.items():
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                handles[pid] = handle
                if ledger.start_of(pid) == start:
                    signal.pidfd_send_signal(handle, number)
                    found = True
        deadline = time.monotonic() + 10
        waiting = {pid: start for pid, start in victims.items() if pid in handles}
        while waiting := {pid: start for pid, start in waiting.items() if ledger.start_of(pid) == start}:
            if time.monotonic() > deadline:
                raise LabFailed(
                    f"processes {sorted(waiting)} of the lab node do not end", next_step="kill them by hand"
                )
            if time.monotonic() > deadline - 7:
                for pid in waiting:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(handles[pid], signal.SIGKILL)
            time.sleep(0.01)
        return found
    finally:
        for handle in handles.values():
            os.close(handle)


def _processes(layout: Layout) -> dict[int, int]:
    """Start times by pid. Not ours to end: this process, its ancestors, the SSH server."""
    record = ledger.read_json(str(layout.record))
    spared = {*_ancestors(os.getpid()), record["pid"] if isinstance(record, dict) else 0}
    found = {entry.pid: entry.start for entry in ledger.allocations(str(layout.gpu)) if entry.is_alive()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _is_started_on(layout, entry):
            start = ledger.start_of(int(entry.name))
            if start is not None:
                found[int(entry.name)] = start
    return {pid: start for pid, start in found.items() if pid not in spared}


def _is_started_on(layout: Layout, process: Path) -> bool:
    """Does ``process`` (its directory in /proc) have the node's HOME? A shell of somebody who looks around has not."""
    try:
        environ = b"\0" + (process / "environ").read_bytes()
        if b"\0HOME=" in environ:
            return b"\0HOME=" + os.fsencode(layout.home) + b"\0" in environ
        # setproctitle destroys what /proc shows of the environment, but not the working directory.
        return (process / "cwd").readlink().is_relative_to(layout.home)
    except OSError:
        return False  # gone, or another user's


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 0:
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except OSError:
            return


# --- the server process ------------------------------------------------------------------------------------------


async def serve(layout: Layout) -> None:
    """Be the node: listen, write server.json when ready, run commands until SIGTERM."""
    import asyncssh  # 0.3 s that only this process needs

    from lab.sshd import Account, Door

    host_key = _key(layout.ssh / "host_key")
    account = Account(
        name=_user().pw_name,
        home=layout.home,
        shell=SHELL,
        path=f"{layout.bin}:{SYSTEM_PATH}",
        public_key=_key(layout.ssh / "client_key").public_data,
    )

    async def listen(port: int) -> asyncssh.SSHAcceptor:
        return await asyncssh.create_server(
            lambda: Door(account), ADDRESS, port, server_host_keys=[host_key], allow_pty=False, line_editor=False
        )

    try:
        listener = await listen(_last_port(layout))
    except OSError:  # taken by somebody meanwhile
        listener = await listen(0)
    port = listener.get_port()
    public = host_key.export_public_key().decode("ascii").strip()
    (layout.ssh / "known_hosts").write_text(f"[{ADDRESS}]:{port} {public}\n")
    (layout.ssh / "port").write_text(f"{port}\n")
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    start = ledger.start_of(os.getpid())
    ledger.write_json(str(layout.record), {"pid": os.getpid(), "start": start, "port": port})
    watcher = asyncio.create_task(_watch_deaths(layout))
    await stop.wait()
    watcher.cancel()
    listener.close()


async def _watch_deaths(layout: Layout) -> None:
    """Keep the times of death in the ledger honest: reading it notes them."""
    while True:
        with contextlib.suppress(OSError):
            for _ in ledger.allocations(str(layout.gpu)):
                pass
        await asyncio.sleep(WATCH_SECONDS)


def _key(path: Path) -> asyncssh.SSHKey:
    import asyncssh

    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(asyncssh.generate_private_key("ssh-ed25519", comment="lamplighter lab").export_private_key())
    return asyncssh.read_private_key(path)


def _last_port(layout: Layout) -> int:
    try:
        return int((layout.ssh / "port").read_text())
    except (OSError, ValueError):
        return 0


def main(words: list[str] | None = None) -> int:
    """``python -m lab.node serve ROOT``: be the node in the foreground."""
    parser = argparse.ArgumentParser(prog="lab.node")
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("root", type=Path)
    options = parser.parse_args(words)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # a caller's nohup would reach every command
    os.umask(0o022)
    asyncio.run(serve(Layout(options.root)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
