"""Files that survive a crash: writers are killed at every step and at random moments, readers look all the while."""

from __future__ import annotations

import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lamplighter.node import worker
from lamplighter.node.layout import RunDirectory
from lamplighter.node.system import files
from tests.node.living import PROJECT, Living, until

OLD, NEW = "old" * 50_000, "new" * 70_000

WRITE_FOR_EVER = """
import itertools
from lamplighter.node.system import files
path = sys.argv[1]
for turn in itertools.count():
    files.write_file(path, ("old" * 50_000, "new" * 70_000)[turn % 2])
    if turn == 0:
        print("writing")
"""

#: Dies by KILL just before, or just after, the step named by its first argument.
DIE_AT = """
import os, shutil, signal, sys
sys.path.insert(0, {project!r})
from lamplighter.node.system import files
step, when = sys.argv[1].split(":")
owner = shutil if step == "rmtree" else os
real = getattr(owner, step)
def die(*arguments, **options):
    if when == "after":
        real(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, step, die)
{action}
"""


def die_at(step: str, action: str, *arguments: Path) -> int:
    code = DIE_AT.format(project=str(PROJECT), action=action)
    words = [sys.executable, "-I", "-S", "-c", code, step, *map(str, arguments)]
    return subprocess.run(words, check=False, timeout=120).returncode


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


# ---------------------------------------------------------------------------------------------------------- one file


def test_a_file_is_written_with_its_mode_whatever_the_umask(tmp_path: Path) -> None:
    for mode in (0o600, 0o755, 0o644):
        files.write_file(str(tmp_path / "file"), "text \udcff", mode)
        assert stat.S_IMODE(os.stat(tmp_path / "file").st_mode) == mode
    assert (tmp_path / "file").read_bytes() == b"text \xff"
    assert names(tmp_path) == ["file"]


def test_json_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    files.write_json(str(tmp_path / "file"), {"b": 1, "a": [None]})
    assert (tmp_path / "file").read_text() == '{\n "a": [\n  null\n ],\n "b": 1\n}\n'
    assert stat.S_IMODE(os.stat(tmp_path / "file").st_mode) == 0o600


def test_a_writer_killed_at_random_moments_leaves_old_or_new(tmp_path: Path, living: Living) -> None:
    target = tmp_path / "file"
    chance = random.Random(5)
    seen: set[str] = set()
    for turn in range(60):
        writer = living.python(WRITE_FOR_EVER, str(target))
        assert writer.first_line == "writing"
        time.sleep(chance.uniform(0, 0.02))
        os.kill(writer.pid, signal.SIGKILL)
        writer.child.wait()
        content = target.read_text()
        assert content in (OLD, NEW)
        seen.add(content)
        if turn > 6 and len(seen) == 2:
            break
    files.sweep_temporaries(str(tmp_path))
    assert names(tmp_path) == ["file"]
    assert seen == {OLD, NEW}


def test_a_reader_never_sees_half_a_file(tmp_path: Path, living: Living) -> None:
    target = tmp_path / "file"
    writer = living.python(WRITE_FOR_EVER, str(target))
    sizes: list[int] = []
    assert until(lambda: sizes.append(len(target.read_bytes())) or (len(sizes) > 300 and len(set(sizes)) > 1))
    writer.kill()
    assert set(sizes) == {len(OLD), len(NEW)}


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("open:after", OLD),
        ("fchmod:before", OLD),
        ("fsync:before", OLD),
        ("rename:before", OLD),
        ("rename:after", NEW),
    ],
)
def test_a_writer_killed_at_each_step(tmp_path: Path, step: str, expected: str) -> None:
    target = tmp_path / "file"
    target.write_text(OLD)
    assert die_at(step, "files.write_file(sys.argv[2], 'new' * 70_000)", target) == -signal.SIGKILL
    assert target.read_text() == expected
    files.write_file(str(target), "again")  # a leftover is in nobody's way
    files.sweep_temporaries(str(tmp_path))
    assert target.read_text() == "again"
    assert names(tmp_path) == ["file"]


def test_a_write_that_finds_the_disk_full_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text(OLD)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # Python ignores SIGXFSZ, so that the write gets EFBIG
    try:
        with pytest.raises(OSError, match="File too large"):
            files.write_file(str(target), NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert target.read_text() == OLD
    assert names(tmp_path) == ["file"]


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / f"{files.TEMP_PREFIX}file.{os.getpid()}").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        files.write_file(str(tmp_path / "file"), "text")
    assert (tmp_path / "victim").read_text() == "precious"


# ------------------------------------------------------------------------------------------------------------- links


def test_a_link_moves_at_once(tmp_path: Path) -> None:
    link = tmp_path / "current"
    files.point(str(link), "releases/a")
    assert os.readlink(link) == "releases/a"
    (tmp_path / f"{files.TEMP_PREFIX}current.{os.getpid()}").symlink_to("left/over")
    files.point(str(link), "releases/b")
    assert os.readlink(link) == "releases/b"
    assert names(tmp_path) == ["current"]


@pytest.mark.parametrize(("step", "expected"), [("symlink:after", "releases/a"), ("rename:after", "releases/b")])
def test_a_link_is_old_or_new_after_a_kill(tmp_path: Path, step: str, expected: str) -> None:
    link = tmp_path / "current"
    link.symlink_to("releases/a")
    assert die_at(step, "files.point(sys.argv[2], 'releases/b')", link) == -signal.SIGKILL
    assert os.readlink(link) == expected


# ------------------------------------------------------------------------------------------------------- directories


def make_tree(path: Path, version: str) -> Path:
    (path / "sub").mkdir(parents=True)
    (path / "sub" / "one").write_text(version)
    (path / "two").write_text(version)
    return path


def version_of(path: Path) -> set[str]:
    return {(path / "sub" / "one").read_text(), (path / "two").read_text()}


def test_directories_are_private_with_their_parents(tmp_path: Path) -> None:
    files.make_directory(str(tmp_path / "a" / "b"))
    assert [stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("a", "a/b")] == [0o700, 0o700]
    files.make_directory(str(tmp_path / "a" / "b"))


def test_a_directory_is_placed_where_none_was(tmp_path: Path) -> None:
    fresh = make_tree(tmp_path / ".tmp-fresh", "new")
    files.place_directory(str(fresh), str(tmp_path / "release"))
    assert names(tmp_path) == ["release"]
    assert version_of(tmp_path / "release") == {"new"}


def test_a_directory_is_placed_over_an_existing_one(tmp_path: Path) -> None:
    make_tree(tmp_path / "release", "old")
    (tmp_path / "release" / "extra").write_text("of the old one")
    fresh = make_tree(tmp_path / ".tmp-fresh", "new")
    files.place_directory(str(fresh), str(tmp_path / "release"))
    assert names(tmp_path) == ["release"]
    assert names(tmp_path / "release") == ["sub", "two"]
    assert version_of(tmp_path / "release") == {"new"}


@pytest.mark.parametrize("step", ["rename:before", "rename:after", "rmtree:before", "rmtree:after"])
def test_a_directory_is_old_or_new_after_a_kill_at_any_step(tmp_path: Path, step: str) -> None:
    target = make_tree(tmp_path / "release", "old")
    fresh = make_tree(tmp_path / ".tmp-fresh", "new")
    died = die_at(step, "files.place_directory(*sys.argv[2:])", fresh, target)
    assert died in (-signal.SIGKILL, 0)
    files.sweep_temporaries(str(tmp_path))
    assert version_of(target) in ({"old"}, {"new"})
    if died == 0:
        assert version_of(target) == {"new"}
    assert names(tmp_path) == ["release"]


def test_a_directory_that_is_replaced_is_never_missing(tmp_path: Path, living: Living) -> None:
    make_tree(tmp_path / "release", "old")
    code = """
import os
from lamplighter.node.system import files
print("placing")
for turn in range(100):
    os.mkdir(sys.argv[1] + "/.tmp-fresh")
    files.place_directory(sys.argv[1] + "/.tmp-fresh", sys.argv[1] + "/release")
"""
    placing = living.python(code, str(tmp_path))
    missing = 0
    while placing.child.poll() is None:
        missing += not os.path.isdir(tmp_path / "release")
    assert placing.child.returncode == 0
    assert missing == 0


def test_a_file_system_that_cannot_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_exchange", lambda _one, _other: False)
    make_tree(tmp_path / "release", "old")
    fresh = make_tree(tmp_path / ".tmp-fresh", "new")
    files.place_directory(str(fresh), str(tmp_path / "release"))
    assert version_of(tmp_path / "release") == {"new"}
    assert names(tmp_path) == ["release"]


def test_a_removed_tree_is_never_seen_half(tmp_path: Path) -> None:
    make_tree(tmp_path / "release", "old")
    died = die_at("rmtree:before", "files.remove_tree(sys.argv[2])", tmp_path / "release")
    assert died == -signal.SIGKILL
    assert not (tmp_path / "release").exists()
    files.sweep_temporaries(str(tmp_path))
    assert names(tmp_path) == []
    files.remove_tree(str(tmp_path / "release"))


def test_the_sweep_takes_only_temporaries(tmp_path: Path) -> None:
    make_tree(tmp_path / "release", "v")
    make_tree(tmp_path / ".tmp-release.77.old", "v")
    (tmp_path / ".tmp-env.78").write_text("half a secr")
    (tmp_path / ".tmp-current.79").symlink_to("release")
    (tmp_path / ".other").write_text("not ours")
    files.sweep_temporaries(str(tmp_path))
    assert names(tmp_path) == [".other", "release"]
    assert version_of(tmp_path / "release") == {"v"}
    files.sweep_temporaries(str(tmp_path / "missing"))


def test_a_run_whose_worker_was_killed_in_its_first_write_is_over(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path / "20261129T120000Z-abcdef"))
    os.mkdir(run.path)
    assert worker.is_at_work(run)  # it may be about to begin
    begun = Path(f"{run.path}/.tmp-worker.json.{os.getpid()}")
    begun.touch()
    assert files.writers_of(run.worker) == [os.getpid()]
    assert worker.is_at_work(run)
    with subprocess.Popen(["true"]) as ended:
        pass
    begun.rename(f"{run.path}/.tmp-worker.json.{ended.pid}")
    assert not worker.is_at_work(run)
    assert files.writers_of(f"{run.path}/nowhere/at.all") == []
