"""A park of GPU nodes on this machine: one namespace set each, a real OpenSSH server, and no way out.

`NodePark` is a context manager; nodes boot when they are first asked for. The control side of a test runs in the hub's
network namespace (`NodePark.run`), the only place from which the nodes can be reached; their network ends there. A node
is a set of net, pid, mount, uts and ipc namespaces with its own root on its own small disk (tests/nodes/boot.py).

Everything hangs on two kinds of process: the hub and each node's PID 1. When they end, and they do when this process
ends in whatever way, the kernel ends every process of the nodes and drops every mount; this machine's own mount table
never sees one. Needs root, iproute2, util-linux, openssh-server.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
PROJECT = HERE.parent.parent
NETWORK = ipaddress.ip_network("10.77.0.0/24")
HUB_ADDRESS = NETWORK[1]
BRIDGE, BRIDGE_MAC = "br0", "02:00:00:77:00:01"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OPS = 1001
FILLER = "/var/tmp/filler"
SSH_LISTENS = " 00000000:0016 00000000:0000 0A "  # port 22 and state LISTEN as /proc/net/tcp prints them

Completed = subprocess.CompletedProcess[str]


class NodeTrouble(Exception):
    """The park could not do what a test asked of it; the message carries what the node said."""


@dataclass(frozen=True)
class BootSpec:
    """All that boot.py is told."""

    name: str
    disk: str
    systemd: bool
    cgroup: str
    hosts: str
    files: Mapping[str, str]
    shared: tuple[str, ...]
    authorized_key: str
    host_key: str
    visible: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Furniture:
    """What a node gets beside its operating system, at each boot: executable files, and directories for everybody."""

    files: Mapping[str, str] = field(default_factory=dict)
    shared: tuple[str, ...] = ()


# -- can it work here


def why_no_nodes() -> str | None:
    """Why this machine cannot hold nodes, or None if it can."""
    if os.geteuid() != 0:
        return "nodes need root"
    missing = [
        name for name in ("ip", "unshare", "nsenter", "setpriv", "ssh", "ssh-keygen") if shutil.which(name) is None
    ]
    if not Path("/usr/sbin/sshd").exists():
        missing.append("sshd")
    if missing:
        return f"not installed: {' '.join(missing)} (Debian: openssh-server openssh-client iproute2 util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "sh", "-c", TRIAL],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if tried.returncode != 0:
        return f"this machine lets nobody make namespaces: {(tried.stderr or tried.stdout).strip()}"
    return None


TRIAL = """set -e
mount -t tmpfs lamplighter-trial /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay lamplighter-trial -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
ip link add br0 type bridge
ip link add v0 type veth peer name v1
"""


def why_no_systemd() -> str | None:
    """Why no node can have systemd as PID 1 here, or None if one can."""
    absent = [path for path in ("/lib/systemd/systemd", "/usr/bin/dbus-daemon") if not Path(path).exists()]
    if not list(Path("/lib").glob("*/security/pam_systemd.so")):
        absent.append("pam_systemd.so")
    if absent:
        return f"not installed: {' '.join(absent)} (Debian: systemd dbus libpam-systemd)"
    return None if "\tcgroup2\n" in Path("/proc/filesystems").read_text() else "the kernel has no cgroup2"


# -- the park


class NodePark:
    """Up to 200 nodes around one hub.

    ``directory`` must be empty; ``visible`` are more places of this machine that nodes see read-only; ``furniture``
    tells what a node of some name gets; ``namespaces`` collects what was made, for the leak check. Several threads may
    have nodes, each its own: a node ends with the thread that booted it, and all end with the one that made the park.
    """

    def __init__(
        self,
        directory: Path,
        *,
        visible: Sequence[Path] = (),
        furniture: Callable[[str], Furniture] | None = None,
        namespaces: set[str] | None = None,
    ) -> None:
        self.directory = directory
        self.visible = visible_places(visible)
        self.furniture = furniture or (lambda name: Furniture())
        self.namespaces = set() if namespaces is None else namespaces
        self.nodes: dict[str, Node] = {}
        self.home = directory / "home"
        self.ssh_config = self.home / ".ssh/config"
        self.known_hosts = self.home / ".ssh/known_hosts"
        self.key = self.home / ".ssh/id_ed25519"
        self._hub: subprocess.Popen[bytes] | None = None
        self._hub_namespaces: set[str] = set()
        self._name = f"lamplighter-{secrets.token_hex(4)}"
        self._numbers: dict[str, int] = {}
        self._register = threading.Lock()

    def __enter__(self) -> NodePark:
        self.key.parent.mkdir(parents=True)
        self.home.chmod(0o700)
        make_key(self.key)
        self.ssh_config.touch()
        self.known_hosts.touch()
        self._hub = start(["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", HUB], stdin=True)
        assert self._hub.stdout is not None
        if self._hub.stdout.readline() != b"up\n":
            raise NodeTrouble("the hub did not come up")
        self._hub_namespaces = namespaces_of(self._hub.pid)
        self.namespaces |= self._hub_namespaces
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every node and the hub; harmless when called again."""
        for name in list(self.nodes):
            self.forget(name)
        if self._hub is not None:
            end(self._hub)
            self._hub = None
            self.namespaces -= self._hub_namespaces

    def node(self, name: str, *, systemd: bool = False, disk_mib: int = 256) -> Node:
        """The node of that name, booted if it is not there yet; how it boots is settled the first time."""
        if name not in self.nodes:
            with self._register:
                number = self._numbers.setdefault(name, len(self._numbers))
                self.nodes[name] = Node(self, name, NETWORK[11 + number], systemd=systemd, disk_mib=disk_mib)
                self._write_ssh_files()
            self.nodes[name].boot()
        return self.nodes[name]

    def forget(self, name: str) -> None:
        """End a node and lose its disk; another of that name starts again, with another host key."""
        with self._register:
            node = self.nodes.pop(name)
            self._write_ssh_files()
        node.power_off()
        node.drop_disk()

    def run(
        self,
        words: Sequence[str | Path],
        *,
        inventory: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 240,
        **options: Any,
    ) -> Completed:
        """Run a control-side command in the hub, in the project's directory, and wait. Never raises on an exit code.

        Its HOME is the park's, with a key that all nodes accept and their host keys.
        """
        return subprocess.run(
            self.hub_words(words), env=self.environment(inventory, env), cwd=options.pop("cwd", PROJECT),
            stdin=options.pop("stdin", subprocess.DEVNULL), text=True, capture_output=True, timeout=timeout,
            check=False, **options,
        )  # fmt: skip

    def popen(
        self,
        words: Sequence[str | Path],
        *,
        inventory: Path | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """As `run`, but started only; the caller ends it and waits for it."""
        return subprocess.Popen(
            self.hub_words(words),
            env=self.environment(inventory, env),
            cwd=options.pop("cwd", PROJECT),
            text=True,
            **options,
        )

    def hub_words(self, words: Sequence[str | Path]) -> list[str]:
        """``words`` so that they run in the hub's network, in the same process (`nsenter` execs)."""
        return ["nsenter", f"--net=/proc/{self._hub_pid()}/ns/net", "--", *map(str, words)]

    def environment(self, inventory: Path | None = None, env: Mapping[str, str] | None = None) -> dict[str, str]:
        ours = {"HOME": str(self.home)} | ({"LAMPLIGHTER_INVENTORY": str(inventory)} if inventory else {})
        inherited = {name: value for name, value in os.environ.items() if name != "SSH_AUTH_SOCK"}
        return inherited | ours | dict(env or {})

    def ssh(
        self, node: Node, command: str, *, user: str = "root", options: Sequence[str] = (), **rest: Any
    ) -> Completed:
        """Run a command on a node with the OpenSSH client, as an operator would."""
        words = ["ssh", "-F", self.ssh_config, "-o", "BatchMode=yes", *options, f"{user}@{node.name}", command]
        return self.run(words, **rest)

    def write_inventory(
        self, directory: Path, hosts: Mapping[str, Mapping[str, Any]], all_hosts: Mapping[str, Any] | None = None
    ) -> Path:
        """An inventory directory for the nodes named by ``hosts``: how to reach each, plus the variables given."""
        directory.mkdir(parents=True, exist_ok=True)
        entries = {name: {**self.nodes[name].connection(), **variables} for name, variables in hosts.items()}
        write_yaml(directory / "hosts.yml", {"all": {"hosts": entries}})
        if all_hosts:
            write_yaml(directory / "group_vars/all.yml", dict(all_hosts))
        return directory

    def _hub_pid(self) -> int:
        if self._hub is None:
            raise NodeTrouble("the park is closed")
        return self._hub.pid

    def _write_ssh_files(self) -> None:
        nodes = list(self.nodes.values())
        write_whole(self.known_hosts, "".join(f"{node.name},{node.address} {node.public_key}\n" for node in nodes))
        common = (
            f"IdentityFile {self.key}\n  IdentitiesOnly yes\n  UserKnownHostsFile {self.known_hosts}\n"
            "  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n  User root\n"
        )
        hosts = (f"Host {node.name}\n  HostName {node.address}\n  {common}" for node in nodes)
        write_whole(self.ssh_config, "".join(hosts))

    # what Node needs of the hub

    def hub_run(self, *words: str) -> str:
        """Run a command in the hub's network and mounts."""
        pid = self._hub_pid()
        return checked(["nsenter", f"--net=/proc/{pid}/ns/net", f"--mount=/proc/{pid}/ns/mnt", "--", *words])

    def node_words(self) -> list[str]:
        """What starts a node: the new namespaces begin as the hub's, whose mounts hold the disks."""
        pid = self._hub_pid()
        return [
            "nsenter", f"--net=/proc/{pid}/ns/net", f"--mount=/proc/{pid}/ns/mnt", "--",
            "unshare", "--net", "--mount", "--propagation", "private", "--uts", "--ipc",
            "--pid", "--fork", "--kill-child", os.path.realpath(sys.executable), "-I", "-S", str(HERE / "boot.py"),
        ]  # fmt: skip

    @property
    def name(self) -> str:
        return self._name


HUB = f"""set -e
ip link set lo up
ip link add {BRIDGE} type bridge
ip link set {BRIDGE} address {BRIDGE_MAC}
ip address add {HUB_ADDRESS}/{NETWORK.prefixlen} dev {BRIDGE}
ip link set {BRIDGE} up
mount -t tmpfs -o mode=0755 lamplighter-hub /mnt
mkdir /mnt/cgroup
mount -t cgroup2 lamplighter-hub /mnt/cgroup
echo up
exec cat
"""


# -- a node


class Node:
    """One node. ``pid`` is its PID 1 as this machine sees it; 0 while it is off."""

    def __init__(self, park: NodePark, name: str, address: Any, *, systemd: bool, disk_mib: int) -> None:
        self.park = park
        self.name = name
        self.address = str(address)
        self.systemd = systemd
        self.pid = 0
        self._disk_mib = disk_mib
        self._directory = park.directory / name
        self._directory.mkdir(exist_ok=True)
        self._disk = f"/mnt/{name}"
        self._cgroup = f"/mnt/cgroup/{park.name}-{name}"
        self._port = f"w-{name}"[:15]
        self._outer: subprocess.Popen[bytes] | None = None
        self._relay: subprocess.Popen[bytes] | None = None
        self._namespaces: set[str] = set()
        key = self._directory / "host_ed25519"
        if key.exists():
            key.unlink()
        make_key(key)
        self._host_key = key.read_text()
        self.public_key = " ".join(key.with_suffix(".pub").read_text().split()[:2])
        park.hub_run(
            "sh",
            "-c",
            f"mkdir {self._disk} && mount -t tmpfs -o size={disk_mib}m,mode=0755 lamplighter-disk {self._disk}",
        )

    def connection(self, user: str = "root") -> dict[str, Any]:
        """Inventory variables with which the control side reaches this node."""
        return {
            "ansible_host": self.address,
            "ansible_user": user,
            "ansible_ssh_private_key_file": str(self.park.key),
            "known_hosts": str(self.park.known_hosts),  # ssh looks for the one of the uid, whatever HOME says
        }

    # power

    def boot(self) -> None:
        """Start the node and wait until its sshd listens. The link is whole and without delay afterwards."""
        log = self._directory / "boot.log"
        with log.open("wb") as output:
            self._outer = start(self.park.node_words(), stdin=True, output=output)
        assert self._outer.stdin is not None
        self._outer.stdin.write(json.dumps(asdict(self._spec())).encode())
        self._outer.stdin.close()
        try:
            self.pid = wait_for(self._first_child, 60, "PID 1")
            self._plug_in()
            wait_for(self._sshd_listens, 60, "sshd")
        except NodeTrouble as trouble:
            self.power_off()
            raise NodeTrouble(f"{self.name} did not boot: {trouble}\n{log.read_text()}") from trouble
        self._namespaces = namespaces_of(self.pid)
        self.park.namespaces |= self._namespaces

    def power_off(self) -> None:
        """Pull the plug: PID 1 is killed, and with it the kernel ends all that ran here. The disk stays."""
        self._end_relay()
        if self._outer is not None:
            if self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            end(self._outer)
            self._outer, self.pid = None, 0
            self.park.namespaces -= self._namespaces  # the kernel gives their numbers to others, whom no check may end
            self.park.hub_run("sh", "-c", f"ip link delete {self._port} 2>/dev/null; true")  # the kernel takes its time
            if self.systemd:
                self._drop_cgroup()

    def reboot(self) -> None:
        """Off and on again: another boot id, everything in memory gone, the disk as it was."""
        self.power_off()
        self.boot()

    # inside

    def exec(
        self,
        words: Sequence[str],
        *,
        user: str = "root",
        check: bool = True,
        input: str | None = None,  # noqa: A002 - named as in subprocess.run
        timeout: float = 120,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run a command inside, past sshd. With ``check`` a failure raises NodeTrouble with all that was said."""
        result = subprocess.run(
            self.inside(words, user=user), env={"PATH": PATH, "LANG": "C.UTF-8", "HOME": home_of(user), **(env or {})},
            text=True, capture_output=True, check=False, timeout=timeout,
            **({"stdin": subprocess.DEVNULL} if input is None else {"input": input}),
        )  # fmt: skip
        if check and result.returncode != 0:
            said = (result.stderr or result.stdout).strip()
            raise NodeTrouble(f"{self.name}: {' '.join(words)}: exit code {result.returncode}: {said}")
        return result

    def sh(self, script: str, **options: Any) -> str:
        """Run a shell script inside as root and return what it printed."""
        return self.exec(["sh", "-c", script], **options).stdout

    def inside(self, words: Sequence[str], *, user: str = "root") -> list[str]:
        """``words`` so that they run in all of the node's namespaces."""
        if not self.pid:
            raise NodeTrouble(f"{self.name} is off")
        who = [] if user == "root" else ["--setuid", str(OPS), "--setgid", str(OPS)]
        kinds = ["--net", "--pid", "--mount", "--uts", "--ipc", *(["--cgroup"] if self.systemd else [])]
        return ["nsenter", f"--target={self.pid}", *kinds, "--root", "--wd", *who, "--", *words]

    def read(self, path: str) -> str:
        return self.exec(["cat", path]).stdout

    def write(self, path: str, text: str, mode: str = "644") -> None:
        script = 'mkdir -p "$(dirname "$1")" && cat >"$1" && chmod "$2" "$1"'
        self.exec(["sh", "-c", script, "write", path, mode], input=text)

    def processes(self) -> dict[int, str]:
        """Command line by pid, as the node numbers them."""
        lines = self.sh("ps -e -o pid=,args=").splitlines()
        return {int(pid): words for pid, words in (line.split(None, 1) for line in lines)}

    # the wire

    def cut(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        self.park.hub_run("ip", "link", "set", self._port, "down")

    def heal(self) -> None:
        self.park.hub_run("ip", "link", "set", self._port, "up")

    def delay(self, milliseconds: float, *, jitter: float = 0, loss: float = 0) -> None:
        """Delay each direction by ``milliseconds``; the round trip grows by twice that. Connections stay open.

        0 and no loss: a plain link again.
        """
        if not milliseconds and not loss:
            self._end_relay()
            return
        if self._relay is None:
            self._relay = self._start_relay()
        order = json.dumps({"delay_ms": milliseconds, "jitter_ms": jitter, "loss": loss}) + "\n"
        assert self._relay.stdin is not None
        self._relay.stdin.write(order.encode())
        self._relay.stdin.flush()

    # sshd

    def stop_sshd(self, *, sessions: bool = False) -> None:
        """No new connection is accepted; with ``sessions`` those that are open end too."""
        if self.systemd:
            self.exec(["systemctl", "stop", "ssh.service"])
        else:
            self.sh('kill "$(cat /run/sshd.pid)"')
        if sessions:
            self.kill_sessions()
        wait_for(lambda: not self._sshd_listens(), 60, "sshd to stop")

    def kill_sessions(self) -> None:
        """Kill the sshd process of each open session, as the OOM killer would."""
        self.sh('pkill -KILL -f "^sshd: .*@" || [ $? = 1 ]')

    def start_sshd(self) -> None:
        if self.systemd:
            self.exec(["systemctl", "start", "ssh.service"])
        else:
            self.exec(["/usr/sbin/sshd", "-f", "/etc/node/sshd_config", "-E", "/run/sshd.log"])
        wait_for(self._sshd_listens, 60, "sshd")

    # the disk

    def fill_disk(self, leave_kib: int = 0) -> None:
        """Fill the node's disk; / and the homes are on it, /run /tmp /dev/shm are not."""
        self.sh(
            f"dd if=/dev/zero of={FILLER} bs=64k 2>/dev/null; dd if=/dev/zero of={FILLER}.2 bs=1k 2>/dev/null; true"
        )
        if leave_kib:
            self.sh(f"truncate -s -{leave_kib * 1024} {FILLER}")

    def free_disk(self) -> None:
        self.sh(f"rm -f {FILLER} {FILLER}.2")

    def read_only(self, on: bool = True) -> None:
        """Make the root read-only, or writable again. Raises NodeTrouble while a process writes to it."""
        self.exec(["mount", "-o", f"remount,bind,{'ro' if on else 'rw'}", "/"])

    # users

    def allow_sudo(self, rule: str = "ALL=(ALL) NOPASSWD: ALL") -> None:
        """Let ops use sudo (it cannot at first); ``rule`` is what follows the name in sudoers."""
        self.write("/etc/sudoers.d/ops", f"ops {rule}\n", mode="440")

    def forbid_sudo(self) -> None:
        self.exec(["rm", "-f", "/etc/sudoers.d/ops"])

    # how

    def drop_disk(self) -> None:
        self.park.hub_run("sh", "-c", f"umount -l {self._disk} && rmdir {self._disk}")

    def _spec(self) -> BootSpec:
        others = "".join(f"{node.address} {node.name}\n" for node in list(self.park.nodes.values()) if node is not self)
        token = {name: os.environ[name] for name in ("LAMPLIGHTER_TEST_SESSION",) if name in os.environ}
        furniture = self.park.furniture(self.name)
        return BootSpec(
            name=self.name,
            disk=self._disk,
            systemd=self.systemd,
            cgroup=self._cgroup,
            hosts=others,
            files=furniture.files,
            shared=furniture.shared,
            authorized_key=self.park.key.with_suffix(".pub").read_text(),
            host_key=self._host_key,
            visible=tuple(map(str, self.park.visible)),
            environment=token,
        )

    def _first_child(self) -> int:
        assert self._outer is not None
        if self._outer.poll() is not None:
            raise NodeTrouble(f"it ended with {self._outer.returncode}")
        try:
            children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        except OSError:
            return 0
        return int(children[0]) if children else 0

    def _sshd_listens(self) -> bool:
        assert self._outer is not None
        if self._outer.poll() is not None:
            raise NodeTrouble(f"it ended with {self._outer.returncode}")
        try:
            return SSH_LISTENS in Path(f"/proc/{self.pid}/net/tcp").read_text()
        except OSError:  # its PID 1 is gone; the next look finds out how it ended
            return False

    def _plug_in(self) -> None:
        number = self.address.rpartition(".")[2]
        mac = (
            f"02:00:00:77:01:{int(number):02x}"  # the same at each boot, else the hub talks to the old one for a minute
        )
        self.park.hub_run(
            "sh", "-ec",
            f"ip link add {self._port} type veth peer name eth0 address {mac} netns {self.pid}\n"
            f"ip link set {self._port} master {BRIDGE} up\n"
            f"nsenter --net=/proc/{self.pid}/ns/net -- ip -batch - <<END\n"
            f"link set lo up\naddress add {self.address}/{NETWORK.prefixlen} dev eth0\nlink set eth0 up\nEND\n",
        )  # fmt: skip

    def _start_relay(self) -> subprocess.Popen[bytes]:
        near, far = f"n-{self.name}"[:15], f"f-{self.name}"[:15]
        self.park.hub_run(
            "sh", "-ec",
            f"ip link add {near} type veth peer name {far}\n"
            f"ip link set {far} arp off up\n"
            f"ip link set {self._port} nomaster arp off\n"
            f"ip link set {near} master {BRIDGE} up\n",
        )  # fmt: skip
        python = os.path.realpath(sys.executable)
        relay = start(self.park.hub_words([python, "-I", "-S", HERE / "relay.py", self._port, far]), stdin=True)
        assert relay.stdout is not None
        if relay.stdout.readline() != b"ready\n":
            end(relay)
            raise NodeTrouble("the delaying wire did not come up")
        return relay

    def _end_relay(self) -> None:
        if self._relay is None:
            return
        end(self._relay)
        self._relay = None
        self.park.hub_run(
            "sh", "-c", f"ip link delete n-{self.name[:13]}; ip link set {self._port} arp on master {BRIDGE}"
        )

    def _drop_cgroup(self) -> None:
        script = 'find "$1" -depth -type d -exec rmdir {} + 2>/dev/null; [ ! -d "$1" ] && echo gone || true'
        wait_for(
            lambda: self.park.hub_run("sh", "-c", script, "drop", self._cgroup), 60, "the node's cgroup to be empty"
        )


# -- atoms


def visible_places(more: Sequence[Path]) -> tuple[Path, ...]:
    """What nodes see of this machine, read-only, wherever it lies: the checkout and the interpreter of the tests."""
    places = [PROJECT, Path(sys.prefix), Path(sys.base_prefix), *more]
    return tuple(dict.fromkeys(place.resolve() for place in places if place.resolve() not in (Path("/usr"), Path("/"))))


def start(words: Sequence[str], *, stdin: bool = False, output: Any = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """Start a process in its own session, which the kernel kills when this one ends, in whatever way."""
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "--", *words], start_new_session=True,
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL, stdout=output,
        stderr=None if output is subprocess.PIPE else subprocess.STDOUT,
    )  # fmt: skip


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise NodeTrouble(f"waited {seconds:g} s for {what}")
        time.sleep(0.005)
    return found


def checked(words: Sequence[str]) -> str:
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        raise NodeTrouble(f"{' '.join(words)}: exit code {result.returncode}: {result.stderr.strip()}")
    return result.stdout


def make_key(path: Path) -> None:
    checked(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lamplighter-test", "-f", str(path)])


def namespaces_of(pid: int) -> set[str]:
    ours = {os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "mnt")}
    return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("pid", "net", "mnt")} - ours


def home_of(user: str) -> str:
    return "/root" if user == "root" else f"/home/{user}"


def write_whole(path: Path, text: str) -> None:
    """Write a file that commands of other nodes' threads may be reading."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)


def write_yaml(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(json.loads(json.dumps(data)), sort_keys=False))
