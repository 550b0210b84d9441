"""The journal: numbered, readable while it is written, and never the end of a run, also on a full disk."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node import events, journal
from tests.node.living import Living, until

COMMON = {"host": "gpu1", "server": "kimi", "run": "20260101T000000Z-abcdef"}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[journal.Journal]:
    written = open_in(tmp_path)
    yield written
    written.close()


def open_in(directory: Path) -> journal.Journal:
    return journal.Journal(str(directory / "events.jsonl"), str(directory / "ballast"), COMMON)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[journal.Reader]:
    with contextlib.closing(journal.Reader(str(tmp_path / "events.jsonl"))) as following:
        yield following


def numbers(events_read: list[dict[str, Any]]) -> list[int]:
    return [event["seq"] for event in events_read]


def progress(text: str = "x" * 100) -> events.Event:
    return events.progress("ready", text)


def test_events_are_numbered_stamped_and_say_whose_they_are(opened: journal.Journal, tmp_path: Path) -> None:
    written = [opened.write(event) for event in (events.stage_started("lock"), progress("é\n\udcff"))]
    read = journal.read(str(tmp_path / "events.jsonl"))
    assert read == written
    assert numbers(read) == [1, 2]
    assert all(event.items() >= COMMON.items() for event in read)
    assert read[0]["mono"] <= read[1]["mono"]
    assert os.stat(tmp_path / "events.jsonl").st_mode & 0o777 == 0o600


def test_a_reader_gets_each_event_once_and_whole(
    opened: journal.Journal, reader: journal.Reader, tmp_path: Path
) -> None:
    assert list(reader.new()) == []
    opened.write(progress())
    assert numbers(list(reader.new())) == [1]
    assert list(reader.new()) == []
    line = json.dumps({"event": "progress", "seq": 2}).encode() + b"\n"
    with open(tmp_path / "events.jsonl", "ab", buffering=0) as file:
        file.write(line[:7])
        assert list(reader.new()) == []
        file.write(line[7:])
    assert numbers(list(reader.new())) == [2]


def test_lines_that_are_no_events_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    good = b'{"event":"progress","seq":%d}\n'
    bad = b"\n".join([b'{"event":"prog', b"\xff\xfe\x00", b"[1]", b'"event"', b'{"seq":9}', b"", b"\0\0\0\0", b""])
    path.write_bytes(good % 1 + bad + good % 2 + b'{"event":"progress","seq":3}')
    assert numbers(journal.read(str(path))) == [1, 2]
    assert journal.read(str(tmp_path / "missing")) == []


def test_the_ballast_lies_there_while_the_run_runs(tmp_path: Path) -> None:
    opened = open_in(tmp_path)
    assert os.stat(tmp_path / "ballast").st_size == journal.BALLAST_BYTES
    opened.close()
    assert not (tmp_path / "ballast").exists()


def test_a_writer_killed_in_the_middle_leaves_numbers_without_a_gap(
    tmp_path: Path, reader: journal.Reader, living: Living
) -> None:
    code = """
from lamplighter.node import events, journal
opened = journal.Journal(sys.argv[1] + "/events.jsonl", sys.argv[1] + "/ballast", {})
print("writing")
while True:
    opened.write(events.progress("ready", "x" * 1000))
"""
    writer = living.python(code, str(tmp_path))
    followed: list[int] = []
    assert until(lambda: followed.extend(numbers(list(reader.new()))) or len(followed) > 500)
    os.kill(writer.pid, signal.SIGKILL)
    writer.child.wait()
    followed += numbers(list(reader.new()))
    assert followed == list(range(1, len(followed) + 1))


# ------------------------------------------------------------------------------------------------------ a full disk


def check_full_disk(directory: Path, opened: journal.Journal, make_room: Any, limit: int) -> None:
    """Write more than fits below ``limit`` bytes, make room, write on: nothing raises, readers see whole events."""
    for _ in range(3 * limit // 200):
        opened.write(progress())
    assert not (directory / "ballast").exists()
    fitted = numbers(journal.read(str(directory / "events.jsonl")))
    assert fitted == list(range(1, len(fitted) + 1))
    last = opened.write(progress("the disk is still full"))
    assert last["seq"] > len(fitted) + 10
    make_room()
    later = [opened.write(events.stage_started("commit")), opened.write(progress("after"))]
    read = journal.read(str(directory / "events.jsonl"))
    assert read[-2:] == later
    assert numbers(read) == [*fitted, later[0]["seq"], later[1]["seq"]]
    opened.close()


@pytest.mark.parametrize("surplus", [0, 1, 50, 200])
def test_a_file_that_may_not_grow(tmp_path: Path, surplus: int) -> None:
    opened = open_in(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    limit(20_000 + surplus)
    try:
        check_full_disk(tmp_path, opened, lambda: limit(soft), 20_000)
    finally:
        limit(soft)
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines()
    assert max(map(len, lines)) < 500  # a torn line is ended before the next one


def test_a_full_disk(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48k", "lamplighter-full", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    request.addfinalizer(lambda: subprocess.run(["umount", str(disk)], check=True))
    opened = open_in(disk)
    size = os.stat(disk / "ballast").st_size
    assert size == journal.BALLAST_BYTES
    check_full_disk(
        disk,
        opened,
        lambda: subprocess.run(["mount", "-o", "remount,size=256k", str(disk)], check=True),
        48 * 1024,
    )
    assert os.stat(disk / "events.jsonl").st_size > 48 * 1024 - journal.BALLAST_BYTES  # it went on into the ballast


def test_a_disk_that_is_full_from_the_start_does_not_end_the_run(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        opened = open_in(tmp_path)
        assert opened.write(events.stage_started("lock"))["seq"] == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    opened.write(progress("after"))
    opened.close()
    assert numbers(journal.read(str(tmp_path / "events.jsonl"))) == [2]
