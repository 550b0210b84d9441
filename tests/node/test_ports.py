"""Listeners and free ports on real sockets, IPv4 and IPv6."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lamplighter.node.system import ports
from lamplighter.node.system.ports import PortCheck

if TYPE_CHECKING:
    from collections.abc import Iterator


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


PROJECT = str(Path(__file__).resolve().parents[2])
needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def bound(
    stack: ExitStack, host: str = "127.0.0.1", port: int = 0, *, reuse: bool = True, only6: bool = True
) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    if reuse:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only6)
    made.bind((host, port))
    return made


def port_of(made: socket.socket) -> int:
    return int(made.getsockname()[1])


def listening(stack: ExitStack, host: str = "127.0.0.1", **options: bool) -> int:
    made = bound(stack, host, **options)
    made.listen()
    return port_of(made)


# ------------------------------------------------------------------------------------------------------- listeners


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "127.0.0.2"])
def test_an_ipv4_listener_is_found_with_its_owner(sockets: ExitStack, host: str) -> None:
    port = listening(sockets, host)
    [found] = ports.listeners(port)
    assert (found.address, found.port, found.pids, found.uid) == (host, port, (os.getpid(),), os.getuid())
    assert found.is_wildcard == (host == "0.0.0.0")
    assert found in ports.listeners()
    assert ports.owners(port) == (os.getpid(),)


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "::"])
def test_an_ipv6_listener_is_found_with_its_owner(sockets: ExitStack, host: str) -> None:
    port = listening(sockets, host)
    [found] = ports.listeners(port)
    assert (found.address, found.pids, found.is_wildcard) == (host, (os.getpid(),), host == "::")


def test_what_does_not_listen_is_no_listener(sockets: ExitStack) -> None:
    port = listening(sockets)
    client = sockets.enter_context(socket.create_connection(("127.0.0.1", port)))
    assert ports.listeners(port_of(client)) == ()
    assert ports.listeners(port_of(bound(sockets))) == ()
    assert len(ports.listeners(port)) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", pytest.param("::1", marks=needs_ipv6)])
def test_the_kernel_tells_what_proc_tells(sockets: ExitStack, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    port = listening(sockets, host)
    asked = ports.listeners(port)
    monkeypatch.setattr(ports, "_NETLINK_SOCK_DIAG", 4711)  # as in a sandbox that has none
    assert ports.listeners(port) == asked
    assert ports.listening_inodes(port) == {each.inode for each in asked}
    assert len(asked) == 1


CHILD = "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); print('up', flush=True); sys.stdin.read()"


def test_every_process_that_has_the_socket_owns_it(sockets: ExitStack) -> None:
    shared = bound(sockets)
    shared.listen()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(shared.fileno())],
        pass_fds=[shared.fileno()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        port = port_of(shared)
        assert ports.owners(port) == tuple(sorted((os.getpid(), child.pid)))
        assert [found.port for found in ports.listening([child.pid])] == [port]
        shared.close()
        assert ports.owners(port) == (child.pid,)
        check = ports.can_bind("127.0.0.1", port)
        assert not check.free
        assert f"pid {child.pid}" in check.reason


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start another user's process")
def test_an_owner_that_may_not_be_looked_into_is_named_by_its_user(sockets: ExitStack) -> None:
    port = listening(sockets)
    code = f"import sys; sys.path.insert(0, {PROJECT!r}); import os\n"
    code += "from lamplighter.node.system import ports\n"
    code += f"ports.can_bind('127.0.0.1', {port})  # all modules are loaded before their files may be unreadable\n"
    code += "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    code += (
        f"[found] = ports.listeners({port}); print(found.pids, found.uid, ports.can_bind('127.0.0.1', {port}).reason)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"() 0 port {port} is in use by a process of root"


# Two lines of a little-endian node: ::ffff:10.0.0.7 and 2001:db8::1.
TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0000000000000000FFFF00000700000A:1F90 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0
   1: B80D0120000000000000000001000000:1F91 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4712 1 0
   2: torn
"""  # noqa: E501


@pytest.mark.skipif(sys.byteorder != "little", reason="the kernel writes addresses in the machine's byte order")
def test_ipv6_addresses_are_read_word_by_word() -> None:
    found = ports._parse_table(TCP6, socket.AF_INET6)
    assert [(each.address, each.port, each.uid, each.inode, each.state) for each in found] == [
        ("::ffff:10.0.0.7", 8080, 1000, 4711, "0A"),
        ("2001:db8::1", 8081, 0, 4712, "0A"),
    ]
    assert ports._parse_table(TCP6, socket.AF_INET) == []
    assert ports._parse_table("", socket.AF_INET) == []


# ----------------------------------------------------------------------------------------------------- free or not


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "", "localhost"])
def test_a_port_with_a_listener_is_not_free(sockets: ExitStack, host: str) -> None:
    port = listening(sockets)
    check = ports.can_bind(host, port)
    assert not check.free
    assert f"port {port} is in use by pid {os.getpid()} (" in check.reason
    assert not ports.is_free(host, port)


def test_a_listener_on_another_address_is_in_nobodys_way(sockets: ExitStack) -> None:
    assert ports.can_bind("127.0.0.2", listening(sockets)) == PortCheck(True)


def test_a_wildcard_listener_is_in_every_addresses_way(sockets: ExitStack) -> None:
    assert not ports.is_free("127.0.0.1", listening(sockets, "0.0.0.0"))


@needs_ipv6
def test_ipv6_ports(sockets: ExitStack) -> None:
    port = listening(sockets, "::1")
    assert not ports.is_free("::1", port)
    assert not ports.is_free("[::1]", port)
    assert not ports.is_free("::", port)
    assert ports.is_free("127.0.0.1", port)
    both = listening(sockets, "::", only6=False)
    assert not ports.is_free("127.0.0.1", both)


@pytest.mark.parametrize("reuse", [True, False])
def test_a_socket_that_is_bound_but_does_not_listen_is_noticed(sockets: ExitStack, reuse: bool) -> None:
    made = bound(sockets, reuse=reuse)
    port = port_of(made)
    check = ports.can_bind("127.0.0.1", port)
    assert not check.free
    assert "is bound to port" in check.reason
    made.close()
    assert ports.can_bind("127.0.0.1", port) == PortCheck(True)


def test_connections_that_linger_after_a_server_do_not_make_its_port_busy(sockets: ExitStack) -> None:
    server = bound(sockets)
    server.listen()
    port = port_of(server)
    client = sockets.enter_context(socket.create_connection(("127.0.0.1", port)))
    served, _ = server.accept()
    served.close()  # the server closes first: TIME_WAIT stays on its side
    assert client.recv(1) == b""
    client.close()
    server.close()
    check = ports.can_bind("127.0.0.1", port)
    assert check.free
    assert "linger" in check.reason


@pytest.mark.parametrize(
    ("host", "port", "says"),
    [
        ("192.0.2.1", 8000, "192.0.2.1 is not an address of this node"),
        ("no-such-host.invalid", 8000, "no-such-host.invalid is no address"),
        ("127.0.0.1", 0, "0 is no port"),
        ("127.0.0.1", 65536, "65536 is no port"),
        ("127.0.0.1", -1, "-1 is no port"),
        ("a" * 300, 8000, "is no address"),
    ],
)
def test_what_cannot_be_bound_is_said(host: str, port: int, says: str) -> None:
    check = ports.can_bind(host, port)
    assert not check.free
    assert says in check.reason


@pytest.mark.parametrize(
    ("host", "probe"),
    [
        ("0.0.0.0", "127.0.0.1"),
        ("", "127.0.0.1"),
        ("::", "::1"),
        ("[::]", "::1"),
        ("[fd00::7]", "fd00::7"),
        ("127.0.0.1", "127.0.0.1"),
        ("10.0.0.7", "10.0.0.7"),
        ("localhost", "localhost"),
    ],
)
def test_the_address_to_ask_under(host: str, probe: str) -> None:
    assert ports.probe_host(host) == probe
