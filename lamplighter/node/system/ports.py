"""Who listens where on this node, from sock_diag or ``/proc/net/tcp{,6}``, and ``/proc/*/fd``; needs no ss and lsof.

Looks only; ``can_bind`` binds a socket for a moment and never listens on it. Addresses are written as people write them
(``127.0.0.1``, ``::``), ports are numbers. Nothing raises on what /proc says or hides.

facts: a socket that is bound but does not listen is in no table of /proc (two vLLM servers can both be bound to a port
while they load); sockets in TIME_WAIT keep a port from a bind without SO_REUSEADDR, which servers set.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Collection, Dict, FrozenSet, Iterable, List, Optional, Set, Tuple

from lamplighter.node.system import processes

_LISTEN = "0A"

_TABLES = (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6))


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket. ``pids``: every process that has it open; empty where the owner may not be looked into.

    ``uid`` is the socket's user, known in any case.
    """

    address: str
    port: int
    inode: int
    uid: int
    pids: Tuple[int, ...]

    @property
    def is_wildcard(self) -> bool:
        return self.address in ("0.0.0.0", "::")  # noqa: S104 (compared, not bound)


@dataclass(frozen=True)
class PortCheck:
    """Whether a server could bind; ``reason`` says why not, or what was noticed although it can.

    ``taken``: somebody has the port, and would have to let it go; else address or port can never be had as they are.
    ``silent``: a socket is in the way that is bound and does not listen. Nothing tells whose it is.
    """

    free: bool
    reason: str = ""
    silent: bool = False
    taken: bool = False


def listeners(port: Optional[int] = None, among: Optional[Collection[int]] = None) -> Tuple[Listener, ...]:
    """List the sockets that listen on ``port`` (any port for None), IPv4 and IPv6, with the processes that own them.

    Owners are looked for ``among`` these pids alone, where given: far cheaper than among all processes.
    """
    return _with_owners(_listening(port), among)


def accepts(host: str, port: int, seconds: float = 0.2) -> bool:
    """Tell whether anybody accepts connections there: the cheapest question, on nodes with many sockets too."""
    try:
        return any(_accepts(family, address, seconds) for family, address in _addresses(probe_host(host), port))
    except (OSError, UnicodeError):
        return False


def refuses(host: str, port: int, seconds: float = 0.2) -> bool:
    """Tell whether every address of ``host`` refuses connections to the port: nobody listens where it is asked."""
    try:
        found = _addresses(probe_host(host), port)
        return all(_connects(family, address, seconds) == errno.ECONNREFUSED for family, address in found)
    except (OSError, UnicodeError):
        return False


def _addresses(host: str, port: int) -> List[Tuple[int, Tuple[object, ...]]]:
    for family in (socket.AF_INET, socket.AF_INET6):  # a number needs no look-up, which takes longer than the answer
        with contextlib.suppress(OSError, UnicodeError):
            socket.inet_pton(family, host)
            return [(family, (host, port))]
    return [(family, address) for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _accepts(family: int, address: Tuple[object, ...], seconds: float) -> bool:
    return _connects(family, address, seconds) == 0


def _connects(family: int, address: Tuple[object, ...], seconds: float) -> int:
    """Return the errno of a connection, 0 when somebody took it."""
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        problem = connection.connect_ex(address)
        if problem == 0 and connection.getsockname() == connection.getpeername():
            # The kernel picked the very port as our end: nobody listens; a reset keeps TIME_WAIT off it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return errno.ECONNREFUSED
        return problem


def listening_inodes(port: int) -> FrozenSet[int]:
    """Name the sockets that listen on ``port``, without asking whose they are."""
    return frozenset(socket_.inode for socket_ in _listening(port))


def listening(pids: Collection[int]) -> Tuple[Listener, ...]:
    """List the sockets on which any of ``pids`` listens: a server's HTTP port and those it derived from it."""
    return tuple(listener for listener in listeners() if not set(pids).isdisjoint(listener.pids))


def socket_files(pids: Collection[int]) -> FrozenSet[str]:
    """Name the socket files that any of ``pids`` has bound."""
    inodes = {target for pid in pids for target in (processes.open_files(pid) or {}).values()}
    return frozenset(path for inode, path in _bound_files() if f"socket:[{inode}]" in inodes)


def who_has_file(path: str, but: Collection[int] = ()) -> str:
    """Name who has bound the socket file ``path``, as ``who_listens`` does; "" for nobody but the pids ``but``."""
    inodes = {f"socket:[{inode}]" for inode, bound in _bound_files() if bound == path}
    names = []
    for pid in processes.pids() if inodes else ():
        if pid not in but and not inodes.isdisjoint((processes.open_files(pid) or {}).values()):
            process = processes.read_process(pid)
            if process is not None:
                names.append(f"pid {pid} ({processes.user_name(process.uid)}, {process.title})")
    return ", ".join(names)


def bound_paths() -> FrozenSet[str]:
    """Name all socket files that a living socket of this network namespace is bound to."""
    return frozenset(path for _, path in _bound_files())


def owners(port: int) -> Tuple[int, ...]:
    """List the pids that listen on ``port``, each once."""
    return tuple(sorted({pid for listener in listeners(port) for pid in listener.pids}))


def who_listens(port: int, but: Collection[int] = ()) -> str:
    """Name who listens on ``port``, as a person looks for them: pid, user, command; "" for nobody but the pids ``but``.

    Of a process that may not be looked into, only the user.
    """
    names: Dict[str, None] = {}
    for listener in listeners(port):
        user = processes.user_name(listener.uid)
        if not listener.pids:
            names[f"a process of {user}"] = None
        for pid in sorted(set(listener.pids) - set(but)):
            process = processes.read_process(pid)
            if process is not None:
                names[f"pid {pid} ({processes.user_name(process.uid)}, {process.title})"] = None
    return ", ".join(names)


def is_free(host: str, port: int) -> bool:
    """Tell whether a server could bind ``host``:``port`` now; see ``can_bind`` for the reason."""
    return can_bind(host, port).free


def can_bind(host: str, port: int) -> PortCheck:
    """Try to bind ``host``:``port`` as a server would, and once more strictly, to notice a socket that only is bound.

    Not free: somebody listens, somebody is bound without listening yet, the address is not this node's, or the port
    needs root. Connections of a server that has just ended (TIME_WAIT) do not make it busy.
    """
    if not 0 < port < 1 << 16:
        return PortCheck(False, f"{port} is no port")
    try:
        found = socket.getaddrinfo(
            _bare(host) or None, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
    except (OSError, OverflowError, UnicodeError) as error:
        return PortCheck(False, f"{host} is no address: {getattr(error, 'strerror', None) or error}")
    lingering = False
    for family, _, _, _, address in dict.fromkeys(found):
        problem = _try_bind(family, address, reuse=True)
        if problem == errno.EADDRINUSE:
            return _who_has(port)
        if problem == errno.EADDRNOTAVAIL:
            return PortCheck(False, f"{address[0]} is not an address of this node")
        if problem == errno.EACCES:
            return PortCheck(False, f"port {port} needs root")
        if problem == errno.EAFNOSUPPORT and len(found) > 1:  # "localhost" on a node without IPv6
            continue
        if problem:
            return PortCheck(False, f"{address[0]} port {port}: {os.strerror(problem)}")
        if _try_bind(family, address, reuse=False) == errno.EADDRINUSE:
            if not _has_lingering(port):
                return PortCheck(
                    False, f"a process is bound to port {port} without listening yet", silent=True, taken=True
                )
            lingering = True
    return PortCheck(True, f"connections of an earlier server linger on port {port}" if lingering else "")


def probe_host(host: str) -> str:
    """Name the address under which a server bound to ``host`` can be asked on the node itself."""
    bare = _bare(host)
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(bare, bare)  # noqa: S104 (compared, not bound)


def _who_has(port: int) -> PortCheck:
    held = listeners(port)
    if not held:
        return PortCheck(False, f"a process is bound to port {port}", silent=True, taken=True)
    table = {pid: processes.read_process(pid) for listener in held for pid in listener.pids}
    names = [f"pid {pid} ({process.title})" for pid, process in sorted(table.items()) if process is not None]
    users = sorted({processes.user_name(listener.uid) for listener in held})
    who = ", ".join(names) or f"a process of {', '.join(users)}"
    return PortCheck(False, f"port {port} is in use by {who}", taken=True)


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _try_bind(family: int, address: Tuple[object, ...], reuse: bool) -> int:
    """Return the errno of a bind, 0 when it worked."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if reuse:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


# ---------------------------------------------------------------------------------------------------- the parser


@dataclass(frozen=True)
class _Socket:
    address: str
    port: int
    state: str
    uid: int
    inode: int


def _listening(port: Optional[int]) -> List[_Socket]:
    found = _asked_of_the_kernel(port)
    found = _sockets() if found is None else found
    return [each for each in found if each.state == _LISTEN and port in (None, each.port)]


# facts: /proc/net/tcp takes 12 ms and more to read, however few its lines, since the kernel goes through all the
# buckets of its table of connections; sock_diag goes through the listening ones alone (linux/inet_diag.h).
_DIAG_REQUEST = struct.Struct("=IHHII BBBxI HH16s16sI8s")
_DIAG_HEADER = struct.Struct("=IHHII")
_DIAG_ANSWER = struct.Struct("=BBBB 2s2s16s16sI8s IIIII")
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLMSG_ERROR, _NLMSG_DONE = 4, 20, 2, 3
_REQUEST_DUMP, _TCP_LISTEN, _DIAG_SECONDS = 0x301, 10, 1.0


def _asked_of_the_kernel(port: Optional[int]) -> Optional[List[_Socket]]:
    """The listening sockets by sock_diag; None where this kernel, or a sandbox around us, has none."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(_DIAG_SECONDS)
            found = []
            for family in (socket.AF_INET, socket.AF_INET6):
                wanted = (family, socket.IPPROTO_TCP, 0, 1 << _TCP_LISTEN, socket.htons(port or 0))
                head = (_DIAG_REQUEST.size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, family, 0)
                kernel.send(_DIAG_REQUEST.pack(*head, *wanted, 0, b"", b"", 0, b"\xff" * 8))
                found += _diag_answers(kernel, family)
            return found
    except (OSError, AttributeError, struct.error):
        return None


def _diag_answers(kernel: socket.socket, family: int) -> List[_Socket]:
    found: List[_Socket] = []
    while True:
        data = kernel.recv(1 << 16)
        start = 0
        while start + _DIAG_HEADER.size <= len(data):
            size, kind, _, _, _ = _DIAG_HEADER.unpack_from(data, start)
            if kind == _NLMSG_DONE:
                return found
            if kind == _NLMSG_ERROR or size < _DIAG_HEADER.size:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            _, _, _, _, port, _, address, _, _, _, _, _, _, uid, inode = _DIAG_ANSWER.unpack_from(
                data, start + _DIAG_HEADER.size
            )
            shown = socket.inet_ntop(family, address[:4] if family == socket.AF_INET else address)
            found.append(_Socket(shown, int.from_bytes(port, "big"), _LISTEN, uid, inode))
            start += (size + 3) & ~3


def _sockets() -> List[_Socket]:
    return [found for path, family in _TABLES for found in _parse_table(_read_table(path), family)]


def _read_table(path: str) -> str:
    try:
        with open(path, "rb") as table:
            return table.read().decode("ascii", "replace")
    except OSError:  # no IPv6 on this node
        return ""


def _parse_table(text: str, family: int) -> List[_Socket]:
    """``sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode``, header first."""
    found = []
    digits = 8 if family == socket.AF_INET else 32
    for line in text.splitlines()[1:]:
        cells = line.split()
        local = re.fullmatch(r"([0-9A-F]+):([0-9A-F]{4})", cells[1]) if len(cells) >= 10 else None
        if local and len(local.group(1)) == digits and cells[7].isdigit() and cells[9].isdigit():
            address = _address(local.group(1), family)
            found.append(_Socket(address, int(local.group(2), 16), cells[3], int(cells[7]), int(cells[9])))
    return found


def _bound_files() -> List[Tuple[int, str]]:
    """``Num: RefCount Protocol Flags Type St Inode Path``, header first; the path is missing where there is none."""
    found = []
    for line in _read_table("/proc/net/unix").splitlines()[1:]:
        cells = line.split(maxsplit=7)
        if len(cells) == 8 and cells[6].isdigit():
            found.append((int(cells[6]), cells[7]))
    return found


def _address(text: str, family: int) -> str:
    """The kernel prints each 32-bit word of the address as a number of the machine's own byte order."""
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(words))


def _has_lingering(port: int) -> bool:
    """Connections without a listener: TIME_WAIT and the last moments of a server's sockets."""
    return any(socket_.port == port and socket_.state != _LISTEN for socket_ in _sockets())


def _with_owners(sockets: Iterable[_Socket], among: Optional[Collection[int]] = None) -> Tuple[Listener, ...]:
    chosen = list(sockets)
    pids = _owners_of({socket_.inode for socket_ in chosen}, among)
    return tuple(
        Listener(socket_.address, socket_.port, socket_.inode, socket_.uid, tuple(sorted(pids[socket_.inode])))
        for socket_ in sorted(chosen, key=lambda socket_: (socket_.port, socket_.address, socket_.inode))
    )


def _owners_of(inodes: Collection[int], among: Optional[Collection[int]] = None) -> Dict[int, Set[int]]:
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: Dict[int, Set[int]] = {inode: set() for inode in inodes}
    for pid in (processes.pids() if among is None else among) if wanted else ():
        for target in set((processes.open_files(pid) or {}).values()) & wanted.keys():
            found[wanted[target]].add(pid)
    return found
