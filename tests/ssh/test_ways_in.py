"""Where `ssh HOST true` gets in, lamplighter does; where ssh refuses, it refuses and says why."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamplighter.node.events import Exit
from tests.nodes.park import Node, NodePark
from tests.ssh.sshd import make_key, public

MakeNode = Callable[..., Node]


def keygen(*words: object) -> None:
    subprocess.run(["ssh-keygen", "-q", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


class Ways:
    """A node, two jump hosts, and an ssh_config for each way to the first."""

    def __init__(self, park: NodePark, make_node: MakeNode, directory: Path) -> None:
        self.park = park
        self.directory = directory
        self.gpu, self.first, self.second = (make_node(name) for name in ("gpu1", "jump1", "jump2"))
        self.ca = make_key(directory / "ca")
        self._prepare_sshd()

    def _prepare_sshd(self) -> None:
        """Let the node trust certificates of our authority, show one of its own, and listen on another port too."""
        host_key = self.directory / "host.pub"
        host_key.write_text(f"{self.gpu.public_key} gpu1\n")
        keygen("-s", self.ca, "-I", "gpu1", "-h", "-n", f"gpu1.lab,{self.gpu.address}", host_key)
        self.gpu.write("/etc/node/host-cert.pub", (self.directory / "host-cert.pub").read_text())
        self.gpu.write("/etc/node/ca.pub", f"{public(self.ca)}\n")
        config = "Port 22\nPort 2222\nTrustedUserCAKeys /etc/node/ca.pub\nHostCertificate /etc/node/host-cert.pub\n"
        self.gpu.write("/etc/node/sshd_config", config + self.gpu.read("/etc/node/sshd_config"))
        self.gpu.stop_sshd()
        self.gpu.start_sshd()

    @property
    def known(self) -> str:
        return f"{self.gpu.address} {self.gpu.public_key}\n"

    def file(self, name: str, text: str) -> Path:
        file = self.directory / name
        file.write_text(text)
        return file

    def config(self, name: str, text: str = "", known: str | None = None, key: object = None, **rest: object) -> Path:
        """``text`` comes first, so it wins; ``known`` is the whole of known_hosts."""
        file = self.file(f"{name}.known", self.known if known is None else known)
        lines = {
            "HostName": self.gpu.address,
            "User": "root",
            "IdentityFile": key or self.park.key,
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": file,
            "GlobalKnownHostsFile": "none",
            "StrictHostKeyChecking": "yes",
            **rest,
        }
        block = "".join(f"  {keyword} {value}\n" for keyword, value in lines.items())
        return self.file(name, f"{text}\nHost target\n{block}")

    def certified(self, name: str, *options: str) -> Path:
        key = make_key(self.directory / name)
        keygen("-s", self.ca, "-I", name, "-n", "root", *options, f"{key}.pub")
        return key


@contextlib.contextmanager
def agent(key: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # a socket's name holds 107 bytes
        address = Path(short, "agent")
        process = subprocess.Popen(["ssh-agent", "-D", "-a", str(address)], stdout=subprocess.DEVNULL)
        try:
            while not address.exists():
                assert process.poll() is None
            environment = {"SSH_AUTH_SOCK": str(address), "PATH": "/usr/bin:/bin"}
            subprocess.run(["ssh-add", "-q", str(key)], check=True, env=environment)
            yield address
        finally:
            process.terminate()
            process.wait(60)


@contextlib.contextmanager
def control_master(park: NodePark, config: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        address = Path(short, "master")
        words = ["ssh", "-F", str(config), "-M", "-N", "-S", str(address), "target"]
        process = park.popen(words, stdin=subprocess.DEVNULL)
        try:
            while not address.exists():
                assert process.poll() is None
            yield address
            assert process.poll() is None  # it is somebody else's: we have not ended it
        finally:
            process.terminate()
            process.wait(60)


def test_where_ssh_gets_in_we_do(park: NodePark, make_node: MakeNode, tmp_path: Path) -> None:
    ways = Ways(park, make_node, tmp_path)
    gpu, address = ways.gpu, ways.gpu.address
    jumps = "".join(
        f"Host {node.name}\n  HostName {node.address}\n  User root\n  IdentityFile {park.key}\n"
        f"  UserKnownHostsFile {tmp_path}/jumps.known\n  GlobalKnownHostsFile none\n"
        for node in (ways.first, ways.second)
    )
    ways.file("jumps.known", "".join(f"{node.address} {node.public_key}\n" for node in (ways.first, ways.second)))
    blob = ways.file("revoked.pub", f"{gpu.public_key}\n")
    keygen("-k", "-f", tmp_path / "of-gpu1.krl", blob)
    keygen("-k", "-f", tmp_path / "of-another.krl", f"{park.key}.pub")
    stranger = make_key(tmp_path / "stranger")
    to_hash = ways.file("to_hash", ways.known)
    keygen("-H", "-f", to_hash)
    authority = f"@cert-authority *.lab,10.77.0.* {public(ways.ca)}\n"
    ways.file("more", f"Host target\n  HostName {address}\n  Port 2222\n")
    expected: dict[str, bool] = {}

    def add(is_in: bool, words_for_it: str, *words: str, **options: object) -> None:
        name = words_for_it.replace(" ", "_")  # ssh_config takes names apart at blanks
        ways.config(name, *words, **options)  # type: ignore[arg-type]
        expected[name] = is_in

    add(True, "plain")
    add(True, "user certificate", key=ways.certified("id_signed"))
    add(False, "expired user certificate", key=ways.certified("id_old", "-V", "20200101:20200102"))
    add(True, "host certificate", known=authority)
    add(True, "host certificate and alias", known=authority, HostKeyAlias="gpu1.lab")
    add(False, "host certificate of another name", known=authority, HostKeyAlias="gpu2.lab")
    add(True, "ProxyJump of two hops", jumps, ProxyJump="jump1,jump2")
    add(False, "ProxyJump over a host that is unknown", jumps.replace("jumps.known", "none"), ProxyJump="jump1")
    add(True, "ProxyCommand", jumps, ProxyCommand=f"ssh -F '{tmp_path}/ProxyCommand' -W [%h]:%p jump1")
    add(False, "ProxyCommand that fails", ProxyCommand="sh -c 'echo no way >&2; exit 3'")
    add(True, "Include", f"Include {tmp_path}/more")
    add(True, "Match host", f"Match host target\n  Port 2222\nMatch host {address}\n  Port 1\n")
    add(True, "Match exec", 'Match exec "test %n = target"\n  Port 2222\nMatch !exec true\n  Port 1\n')
    add(True, "hashed known_hosts", known=to_hash.read_text())
    add(True, "wildcard known_hosts", known=ways.known.replace(address, "10.77.0.*,!10.77.0.1"))
    add(False, "revoked in known_hosts", known=f"{ways.known}@revoked * {gpu.public_key}\n")
    add(True, "KRL of others", RevokedHostKeys=tmp_path / "of-another.krl")
    add(False, "KRL of this key", RevokedHostKeys=tmp_path / "of-gpu1.krl")
    add(True, "KnownHostsCommand", known="", KnownHostsCommand=f"/bin/cat {tmp_path}/plain.known")
    add(True, "port by ssh_config alone", Port=2222)
    add(False, "unknown host key", known="")
    add(False, "changed host key", known=f"{address} {public(stranger)}\n")
    add(False, "key that is not let in", key=stranger)
    add(False, "nobody listens", Port=1)
    with agent(park.key) as held, control_master(park, tmp_path / "plain") as master:
        none = {"key": "none", "IdentitiesOnly": "no"}
        add(True, "IdentityAgent", IdentityAgent=held, **none)
        add(True, "agent only", **none)
        add(True, "ControlMaster that is up", ControlPath=master, IdentityFile="none", known="")
        python = [sys.executable, "-m", "tests.ssh.ways", *(str(tmp_path / name) for name in expected)]
        done = park.run(python, env={"SSH_AUTH_SOCK": str(held)})
        assert done.returncode == 0, done.stderr
    found = {Path(file).name: row for file, row in json.loads(done.stdout).items()}
    rows = [f"{name:40} {[(code, by) for code, _, by in row.values()]}" for name, row in found.items()]
    print("\n".join(rows))

    assert {name: row["ssh"][0] == 0 for name, row in found.items()} == expected
    for name, row in found.items():
        for transport in ("auto", "openssh"):
            code, said, _ = row[transport]
            assert code in ((Exit.OK,) if expected[name] else (Exit.UNREACHABLE, Exit.USAGE)), f"{name}: {said}"
            assert code == Exit.OK or ("why: " in said and "next: " in said)
        assert row["fabric"][0] in (Exit.UNREACHABLE, Exit.USAGE) or expected[name], name
    assert found["plain"]["auto"][2] == found["ProxyJump_of_two_hops"]["auto"][2] == "FabricWay"
    assert "no way" in found["ProxyCommand_that_fails"]["auto"][1]
    assert str(ways.first.address) in found["ProxyJump_over_a_host_that_is_unknown"]["auto"][1]


def test_what_ssh_config_wants_of_a_login_by_hand_is_no_matter(
    park: NodePark, make_node: MakeNode, tmp_path: Path
) -> None:
    odd = "IgnoreUnknown UseKeychain\nUseKeychain yes\nForkAfterAuthentication yes\nRemoteCommand date\n"
    odd += f"RequestTTY force\nLocalForward {tmp_path}/socket localhost:1\nControlMaster auto\nLogLevel QUIET\n"
    config = Ways(park, make_node, tmp_path).config("odd", f"Host *\n{odd}ControlPath {tmp_path}/theirs\n")
    done = park.run([sys.executable, "-m", "tests.ssh.ways", str(config)])
    row = json.loads(done.stdout)[str(config)]
    assert [row[transport][2] for transport in ("auto", "fabric", "openssh")] == [
        "FabricWay",
        "FabricWay",
        "OpenSSHWay",
    ]
    assert not list(tmp_path.glob("theirs*"))


def test_inv_gets_in_where_ssh_does(park: NodePark, make_node: MakeNode, tmp_path: Path) -> None:
    ways = Ways(park, make_node, tmp_path)
    authority = f"@cert-authority 10.77.0.* {public(ways.ca)}\n"
    server = {"demo": {"engine": "demo", "model": "/m", "port": 8000, "gpus": []}}
    codes = {}
    for name, known in {"plain": ways.known, "certified": authority, "unknown": "", "broken": None}.items():
        config = ways.config(name, "" if known is not None else "Nonsense yes", known=known)
        inventory = tmp_path / f"{name}.inventory"
        inventory.mkdir()
        host = {"ansible_host": "target", "ansible_ssh_common_args": f"-F {config}", "servers": server}
        (inventory / "hosts.yml").write_text(json.dumps({"all": {"hosts": {"gpu1": host}}}))
        codes[name] = park.run(["./inv", "status", "--host", "gpu1"], inventory=inventory)
    assert codes["plain"].returncode == codes["certified"].returncode, codes
    assert codes["plain"].stdout == codes["certified"].stdout
    assert codes["unknown"].returncode == Exit.UNREACHABLE
    assert "the host key of" in codes["unknown"].stderr
    assert codes["broken"].returncode == Exit.USAGE
    assert f"{tmp_path}/broken:1: " in codes["broken"].stderr


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
def test_an_ssh_of_ours_ends_with_us(park: NodePark, node: Node, tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from lamplighter.inventory.schema import ConnectionSpec\n"
        "from lamplighter.ssh.connection import Node\n"
        "node = Node('gpu1', ConnectionSpec(sys.argv[1], user='root', transport='openssh', known_hosts=sys.argv[2],"
        " key_file=sys.argv[3]))\n"
        "node.open(); print(node._way._directory, node._way._keeper.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = park.run([sys.executable, "-c", script, node.address, str(park.known_hosts), str(park.key)])
    directory, keeper = done.stdout.split()
    while Path(directory).exists() or Path(f"/proc/{keeper}").exists():
        pass  # the time limit of the test is the only one


WATCH = """
import json, sys, threading
from lamplighter.inventory.schema import ConnectionSpec
from lamplighter.ssh.connection import Node
address, known, key = sys.argv[1:]
told = {}
def listen(transport, channel, node):
    told[transport] = [channel.read(120).decode(), str(channel.lost()), node.is_alive]
threads = []
for transport in ("fabric", "openssh"):
    node = Node("gpu1", ConnectionSpec(address, user="root", transport=transport, known_hosts=known, key_file=key))
    channel = node.stream("exec cat")
    channel.write(b"up")
    assert channel.read(60) == b"up"
    threads.append(threading.Thread(target=listen, args=(transport, channel, node)))
for thread in threads:
    thread.start()
print("up", flush=True)
for thread in threads:
    thread.join()
print(json.dumps(told))
"""


def test_a_cut_wire_is_noticed_by_both_transports(park: NodePark, node: Node) -> None:
    words = [sys.executable, "-c", WATCH, node.address, str(park.known_hosts), str(park.key)]
    process = park.popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    node.cut()
    told = json.loads(process.communicate(timeout=120)[0])
    node.heal()
    assert set(told) == {"fabric", "openssh"}
    for said, lost, is_alive in told.values():
        assert (said, is_alive) == ("", False)
        assert f"the connection to root@{node.address} broke" in lost
    assert "not responding" in told["openssh"][1]
