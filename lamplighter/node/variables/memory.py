"""The live environment of another process: what its ``getenv`` would answer now, read without stopping it.

Reads ``/proc/PID/maps``, ``/proc/PID/exe`` and ``/proc/PID/mem``; touches nothing. Takes 1 to 4 ms a process, less from
the second process of the same executable on. Needs the same user and the kernel's leave (ptrace): Unreadable names what
forbids it.

facts: ``/proc/PID/environ`` is the memory given at exec, which later changes never reach and setproctitle erases; the
C variable ``environ`` is what getenv, exec and a child's ``os.environ`` use. An executable that mentions it has its own
copy, and libc's is then a dead one: hence the executable first.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import struct
import time
from typing import Dict, List, Optional, Sequence, Tuple

from lamplighter.node.system import processes
from lamplighter.node.system.processes import PROC, Process

#: The names of one variable in the C library; the first is what programs use.
SYMBOLS = (b"environ", b"__environ", b"_environ")
LIBRARIES = re.compile(r"/(libc\.so\.6|libc-2\.\d+\.so|ld-musl-\w+\.so\.1|libc\.musl-\w+\.so\.1|libc\.so)$")

MAX_VARIABLES = 20_000
MAX_BYTES = 8 << 20  # of one value; the kernel passes at most 128 KiB a string, setenv has no limit
ATTEMPTS = 6
PAUSE_SECONDS = 0.005

_ELF64_LITTLE = b"\x7fELF\x02\x01"
_ET_DYN, _PT_LOAD, _SHT_SYMTAB, _SHT_DYNSYM, _STT_OBJECT = 3, 1, 2, 11, 1


class Unreadable(Exception):
    """The live environment cannot be read; the text says what forbids it."""


@dataclasses.dataclass(frozen=True)
class _Mapping:
    start: int
    offset: int
    path: str


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a file keeps the symbol: ``value`` as linked; ``first`` is the address of the first segment as linked."""

    value: int
    first: int
    is_relocated: bool


def live_environment(process: Process) -> Dict[str, str]:
    """Read the environment of ``process`` as it is now. Raises Unreadable; then nothing is known."""
    problem = "its memory changes faster than it can be read"
    found: Optional[Dict[str, str]] = None
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE_SECONDS if attempt else 0)
        try:
            found = _read(process)
        except PermissionError as error:
            raise Unreadable(why_forbidden(process)) from error
        except OSError as error:  # EIO: the array moved while we followed it; ENOENT: in the middle of an exec
            found, problem = None, f"its memory cannot be read: {errno.errorcode.get(error.errno or 0, error)}"
        except (struct.error, ValueError, IndexError) as error:
            raise Unreadable(f"its executable is in no form that we can read: {error}") from error
        now = processes.read_process(process.pid)
        if now is None or now.identity != process.identity or now.is_dead:
            raise Unreadable("it has ended")
        if found:  # an empty one is looked at again: a program that has only just begun has not set it up yet
            return found
    if found is None:
        raise Unreadable(problem)
    return found


def why_forbidden(process: Process) -> str:
    """Say which rule of the node keeps us from reading the memory of ``process``."""
    user = processes.user_name(process.uid)
    if os.geteuid() not in (0, process.uid):
        return f"it belongs to {user}, and we are {processes.user_name(os.geteuid())}"
    scope = _yama_scope()
    if scope == 3 or (scope == 2 and os.geteuid() != 0):
        return f"Yama forbids it: kernel.yama.ptrace_scope is {scope}"
    if scope == 1 and os.geteuid() != 0:
        return "Yama forbids it: kernel.yama.ptrace_scope is 1, so that only an ancestor or root may read"
    if _namespace(process.pid) not in (None, _namespace(os.getpid())):
        return "it lives in a container with users of its own"
    if os.geteuid() == 0:
        return "we are root without CAP_SYS_PTRACE, as in a container"
    return "the kernel refuses (it changed its user, is marked as not dumpable, or lives in a container)"


def _yama_scope() -> int:
    try:
        with open(f"{PROC}/sys/kernel/yama/ptrace_scope", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def _namespace(pid: int) -> Optional[str]:
    try:
        return os.readlink(f"{PROC}/{pid}/ns/user")
    except OSError:
        return None


def _read(process: Process) -> Optional[Dict[str, str]]:
    """Return one reading, None where the array changed meanwhile. Raises OSError, ValueError, struct.error."""
    address = _address_of_environ(process.pid)
    memory = os.open(f"{PROC}/{process.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        array = _pointer(memory, address)
        if array == 0:  # clearenv() leaves this
            return {}
        pointers = _array(memory, array)
        values = [_string(memory, pointer) for pointer in pointers]
        if _pointer(memory, address) != array or _array(memory, array) != pointers:
            return None
    finally:
        os.close(memory)
    found: Dict[str, str] = {}
    for entry in values:
        name, equals, value = entry.decode("utf-8", "surrogateescape").partition("=")
        if equals and name:
            found.setdefault(name, value)  # getenv takes the first
    return found


# ------------------------------------------------------------------------------------------------ where it is kept


def _address_of_environ(pid: int) -> int:
    """Return the address of the variable that the process's C library uses."""
    mappings = _mappings(pid)
    executable = os.readlink(f"{PROC}/{pid}/exe")
    # By way of /proc: the file may be deleted (an upgrade in place), or another one under this path in our own tree.
    place = _place(f"{PROC}/{pid}/exe", (_SHT_DYNSYM, _SHT_SYMTAB))
    if place is not None:
        return _address(place, mappings, executable)
    for path in dict.fromkeys(mapping.path for mapping in mappings):
        if LIBRARIES.search(path):
            place = _place(f"{PROC}/{pid}/root{path}", (_SHT_DYNSYM,))
            if place is not None:
                return _address(place, mappings, path)
    raise ValueError("no symbol environ")


def _address(place: _Place, mappings: Sequence[_Mapping], path: str) -> int:
    if not place.is_relocated:
        return place.value
    # The lowest mapping of the file holds its first segment, page-aligned on both sides.
    start = min(mapping.start for mapping in mappings if mapping.path == path)
    return start - place.first + place.value


def _mappings(pid: int) -> List[_Mapping]:
    found = []
    with open(f"{PROC}/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            parts = line.rstrip("\n").split(None, 5)
            if len(parts) == 6 and parts[5].startswith("/"):
                found.append(_Mapping(int(parts[0].split("-")[0], 16), int(parts[2], 16), parts[5]))
    if not found:
        raise FileNotFoundError(errno.ENOENT, "no memory map")  # a zombie, or a kernel thread
    return found


_places: Dict[Tuple[int, int, int, int], Optional[_Place]] = {}


def _place(path: str, tables: Sequence[int]) -> Optional[_Place]:
    """Find the symbol in the ELF file ``path``; None where it is only asked for there. All workers share one answer."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        state = os.fstat(fd)
        key = (state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size)
        if key not in _places:
            _places[key] = _search(fd, tables)
        return _places[key]
    finally:
        os.close(fd)


def _search(fd: int, tables: Sequence[int]) -> Optional[_Place]:
    header = os.pread(fd, 64, 0)
    if header[:6] != _ELF64_LITTLE:
        raise ValueError("not a 64-bit little-endian ELF file")
    kind, program_at, section_at, program_size, programs, section_size, sections = struct.unpack(
        "<16xH14xQQ6xHHHH2x", header
    )
    raw = os.pread(fd, program_size * programs, program_at)
    segments = [struct.unpack_from("<I4x8xQ24xQ", raw, number * program_size) for number in range(programs)]
    first = min(address & -max(align, 1) for kind_, address, align in segments if kind_ == _PT_LOAD)
    raw = os.pread(fd, section_size * sections, section_at)
    table = [struct.unpack_from("<4xI16xQQI", raw, number * section_size) for number in range(sections)]
    for wanted in tables:
        for section_kind, offset, size, link in table:
            if section_kind == wanted:
                value = _look_up(os.pread(fd, size, offset), os.pread(fd, table[link][2], table[link][1]))
                if value is not None:
                    return _Place(value, first, kind == _ET_DYN)
    return None


def _look_up(symbols: bytes, strings: bytes) -> Optional[int]:
    """Return the linked address of the defined object of one of our names, the first of them that there is."""
    # A name is known by where it begins in the table of strings: linkers let it be the tail of a longer one.
    ranks = {
        found.start(): rank
        for rank, name in enumerate(SYMBOLS)
        for found in re.finditer(re.escape(name) + b"\0", strings)
    }
    found = [
        (ranks[name_at], value)
        for name_at, info, section, value in struct.iter_unpack("<IBxHQ8x", symbols)
        if name_at in ranks and section != 0 and info & 0xF == _STT_OBJECT
    ]
    return min(found)[1] if found else None


# --------------------------------------------------------------------------------------------------- what is there


def _pointer(memory: int, address: int) -> int:
    (value,) = struct.unpack("<Q", _bytes(memory, address, 8))
    return int(value)


def _array(memory: int, address: int) -> List[int]:
    """Return the pointers up to the NULL that ends them."""
    found: List[int] = []
    while len(found) < MAX_VARIABLES:
        piece = _bytes(memory, address, 512, at_least=8)
        for (pointer,) in struct.iter_unpack("<Q", piece[: len(piece) & -8]):
            if pointer == 0:
                return found
            found.append(pointer)
        address += len(piece) & -8
    raise OSError(errno.EIO, "no end of the array")


def _string(memory: int, address: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < MAX_BYTES:
        piece = _bytes(memory, address + len(pieces), 4096 if pieces else 256, at_least=1)
        end = piece.find(b"\0")
        if end >= 0:
            return bytes(pieces + piece[:end])
        pieces += piece
    raise OSError(errno.EIO, "no end of the string")


def _bytes(memory: int, address: int, size: int, at_least: Optional[int] = None) -> bytes:
    """Read ``size`` bytes, or as many as are mapped there, but ``at_least`` so many. Raises OSError."""
    if address >= 1 << 63:
        raise OSError(errno.EIO, "no address of a process")
    data = os.pread(memory, size, address)
    if len(data) < (size if at_least is None else at_least):
        raise OSError(errno.EIO if data or address else errno.ESRCH, "not mapped")
    return data
