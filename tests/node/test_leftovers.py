"""What a stopped server leaves behind: only what is surely nobody's any more is removed."""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamplighter.node.keeper import leftovers
from lamplighter.node.keeper.leftovers import Holdings
from tests.node.living import IS_ROOT, NOBODY, Living, kill, process_of

MAP = """
import mmap, os, time
fd = os.open(sys.argv[1], os.O_RDWR)
area = mmap.mmap(fd, 4096)
os.close(fd)
print("mapped")
time.sleep(600)
"""
OPEN = """
import os, time
fd = os.open(sys.argv[1], os.O_RDWR)
print("open")
time.sleep(600)
"""
LISTEN = """
import os, socket, time
tcp = socket.create_server(("127.0.0.1", 0))
unix = socket.socket(socket.AF_UNIX)
unix.bind(sys.argv[1])
unix.listen()
print(os.getpid(), tcp.getsockname()[1])
time.sleep(600)
"""


#: Files of these tests are dated ahead: no deploy of another test takes them for a dead server's, nor they its files.
AHEAD = 3600.0


class Segments:
    """Files in /dev/shm with names of this test alone."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.paths: list[str] = []

    def make(self, name: str, mode: int = 0o600, ahead: float = AHEAD) -> str:
        path = f"/dev/shm/{name}{self.mark}"
        with open(path, "wb") as file:
            file.write(b"\0" * 4096)
        os.chmod(path, mode)
        os.utime(path, (time.time() + ahead, time.time() + ahead))
        self.paths.append(path)
        return path


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[Segments]:
    made = Segments()
    monkeypatch.setattr(leftovers, "SEGMENTS", re.compile(f"(?:{leftovers.SEGMENTS.pattern})(?<={made.mark})"))
    yield made
    for path in made.paths:
        if os.path.lexists(path):
            os.unlink(path)


def later() -> float:
    """A moment that is surely after what was just written."""
    return time.time() + AHEAD + 1


def removed(segments: Segments, gone_at: float) -> set[str]:
    return set(leftovers.remove(Holdings(), gone_at)) & set(segments.paths)


@pytest.mark.parametrize("name", ["psm_", "sem.mp-", "torch_", "nccl-", "vllm_offload_", "sglang_loads_", "sem.loky-"])
def test_segments_of_engines_are_removed(segments: Segments, name: str) -> None:
    path = segments.make(name)
    assert removed(segments, later()) == {path}
    assert not os.path.exists(path)


def test_others_are_left(segments: Segments, living: Living) -> None:
    unknown = segments.make("my-own-file_")
    mapped, opened = segments.make("psm_mapped"), segments.make("psm_open")
    assert living.python(MAP, mapped).first_line == "mapped"
    assert living.python(OPEN, opened).first_line == "open"
    young = segments.make("psm_young", ahead=AHEAD + 60)
    assert removed(segments, later()) == set()
    assert all(os.path.exists(path) for path in (unknown, mapped, opened, young))


def test_a_name_that_is_no_plain_file_is_left(segments: Segments) -> None:
    target = segments.make("target_")
    link = f"/dev/shm/psm_link{segments.mark}"
    os.symlink(target, link)
    segments.paths.append(link)
    assert removed(segments, later()) == set()
    assert os.path.exists(target)


@pytest.mark.skipif(not IS_ROOT, reason="only root can give a file away")
def test_another_users_is_left(segments: Segments) -> None:
    path = segments.make("psm_")
    os.chown(path, NOBODY, NOBODY)
    assert removed(segments, later()) == set()


@pytest.mark.skipif(not IS_ROOT, reason="only root can be two users")
def test_without_a_look_at_every_process_only_private_ones_go(living: Living, runner_home: str) -> None:
    code = f"""
import os, time
sys.path.insert(0, {runner_home!r})
from lamplighter.node.keeper import leftovers
made = []
for name, mode in (("private", 0o600), ("shared", 0o666)):
    path = f"/dev/shm/psm_{{name}}{uuid.uuid4().hex}"
    open(path, "w").close()
    os.chmod(path, mode)
    made.append(path)
time.sleep(0.05)
gone = leftovers.remove(leftovers.Holdings(), time.time())
print([path in gone for path in made])
for path in made:
    if os.path.exists(path):
        os.unlink(path)
"""
    assert living.plain(code, user=NOBODY, group=NOBODY, cwd="/") == "[True, False]"


@pytest.mark.usefixtures("segments")  # what lies in /dev/shm of other tests is no business of these
def test_sockets_and_ports_of_a_killed_server(living: Living, tmp_path: Path) -> None:
    path = tmp_path / "ipc"
    server = living.python(LISTEN, str(path))
    pid, port = map(int, server.first_line.split())
    had = leftovers.observe({pid})
    assert had == Holdings(frozenset({port}), frozenset({str(path)}))
    assert leftovers.remove(had, later()) == []  # it lives
    assert str(pid) in leftovers.await_ports(had.ports, lambda: None, seconds=0.1)[0]
    kill(process_of(pid).identity)
    assert leftovers.await_ports(had.ports, lambda: None) == []
    assert leftovers.remove(had, later()) == [str(path)]
    assert not path.exists()


@pytest.mark.usefixtures("segments")
def test_a_socket_that_another_process_bound_again_is_left(living: Living, tmp_path: Path) -> None:
    path = tmp_path / "ipc"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        assert leftovers.remove(Holdings(sockets=frozenset({str(path)})), later()) == []
    assert path.exists()
