"""Locks that heal themselves: held by the life of a process, and by nobody who merely descends from it."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lamplighter.node.layout import RunDirectory, server_home
from lamplighter.node.stages import locks
from lamplighter.node.system import lock
from tests.node.living import IS_ROOT, NOBODY, Living, Speaking, is_running, kill, process_of, until

HOLD = """
import time
from lamplighter.node.system import lock
held = lock.acquire("GPU 0", sys.argv[1])
held.note({"run": "r1", "by": "ada@desk", "stage": "ready"})
print("held")
time.sleep(600)
"""
NOTE = {"run": "r1", "by": "ada@desk", "stage": "ready"}


def hold(living: Living, path: Path) -> Speaking:
    holder = living.python(HOLD, str(path))
    assert holder.first_line == "held"
    return holder


def assert_locked(path: Path, holder: dict[str, object], *, is_held: bool = True) -> None:
    with pytest.raises(lock.Locked) as caught:
        lock.acquire("GPU 0", str(path))
    assert (caught.value.what, caught.value.holder) == ("GPU 0", holder)
    assert lock.holder_of(str(path)) == (holder if is_held else None)


def test_others_are_told_who_holds_it(tmp_path: Path, living: Living) -> None:
    assert lock.holder_of(str(tmp_path / "lock")) is None
    hold(living, tmp_path / "lock")
    assert_locked(tmp_path / "lock", NOTE)


def test_a_shorter_note_replaces_a_longer_one(tmp_path: Path) -> None:
    held = lock.acquire("GPU 0", str(tmp_path / "lock"))
    held.note({"stage": "x" * 1000})
    held.note({"stage": "y"})
    assert_locked(tmp_path / "lock", {"stage": "y"})
    held.release()


def test_release_frees_it_and_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = lock.acquire("GPU 0", str(path))
    inode = os.stat(path).st_ino
    held.note(NOTE)
    held.release()
    assert lock.holder_of(str(path)) is None
    assert os.stat(path).st_ino == inode
    lock.acquire("GPU 0", str(path)).release()


def test_a_killed_holder_holds_nothing_though_its_note_is_still_there(tmp_path: Path, living: Living) -> None:
    path = tmp_path / "lock"
    hold(living, path).kill()
    assert path.read_text()
    assert lock.holder_of(str(path)) is None
    again = lock.acquire("GPU 0", str(path))
    again.note({"run": "r2"})
    assert_locked(path, {"run": "r2"})
    again.release()


def test_a_waiter_gets_it_as_soon_as_the_holder_is_killed(tmp_path: Path, living: Living) -> None:
    holder = hold(living, tmp_path / "lock")
    began = time.monotonic()
    killer = threading.Timer(0.3, holder.kill)
    killer.start()
    lock.acquire("GPU 0", str(tmp_path / "lock"), wait=120).release()
    killer.join()
    assert 0.3 <= time.monotonic() - began < 60


def test_a_waiter_gives_up_after_its_time(tmp_path: Path, living: Living) -> None:
    hold(living, tmp_path / "lock")
    began = time.monotonic()
    with pytest.raises(lock.Locked):
        lock.acquire("GPU 0", str(tmp_path / "lock"), wait=0.4)
    assert 0.4 <= time.monotonic() - began < 60


def test_a_look_at_the_holder_does_not_keep_anybody_out(tmp_path: Path, living: Living) -> None:
    path = tmp_path / "lock"
    lock.acquire("GPU 0", str(path)).release()
    looking = living.python(
        "from lamplighter.node.system import lock\nprint('looking')\nwhile True: lock.holder_of(sys.argv[1])", str(path)
    )
    assert looking.first_line == "looking"
    for _ in range(500):
        lock.acquire("GPU 0", str(path)).release()


def test_who_is_paused_while_looking_is_waited_for_and_not_taken_for_a_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock.acquire("GPU 0", str(path)).release()
    looks = []

    def look_elsewhere() -> None:
        looks.append(time.monotonic())
        if len(looks) == 50:
            os.close(looking)

    looking = os.open(path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    lock.acquire("GPU 0", str(path), heed=look_elsewhere).release()
    assert len(looks) >= 50


def test_who_never_ends_looking_keeps_everybody_out_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE", 0.2)
    path = tmp_path / "lock"
    lock.acquire("GPU 0", str(path)).release()
    with path.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert_locked(path, {}, is_held=False)
    lock.acquire("GPU 0", str(path)).release()


# ------------------------------------------------------------------------------------------- nobody else inherits it


def test_a_tool_that_the_holder_started_does_not_hold_it(tmp_path: Path, living: Living) -> None:
    code = HOLD.replace(
        'print("held")', "import subprocess; print(subprocess.Popen(['sleep', '600'], close_fds=False).pid)"
    )
    holder = living.python(code, str(tmp_path / "lock"))
    tool = living.keep(int(holder.first_line))
    assert_locked(tmp_path / "lock", NOTE)
    holder.kill()
    lock.acquire("GPU 0", str(tmp_path / "lock"), wait=60).release()
    assert is_running(tool.pid)


def test_the_server_that_the_holder_launched_does_not_hold_it(tmp_path: Path, living: Living, runner_home: str) -> None:
    code = """
import time
from lamplighter.node.keeper import launcher; from lamplighter.node.system import lock
from lamplighter.node.layout import RunDirectory
held = lock.acquire("GPU 0", sys.argv[1])
launch = RunDirectory(sys.argv[2]).launch("new")
launched = launcher.launch_detached(["/bin/sleep", "600"], "/", launch, sys.argv[3], "lamplighter-test-lock")
print(launched.main.pid, launched.supervisor.pid)
time.sleep(600)
"""
    run = RunDirectory(str(tmp_path))
    holder = living.python(code, str(tmp_path / "lock"), run.path, runner_home)
    server, supervisor = (living.keep(int(word)) for word in holder.first_line.split())
    assert_locked(tmp_path / "lock", {})
    holder.kill()
    lock.acquire("GPU 0", str(tmp_path / "lock"), wait=60).release()
    assert is_running(server.pid)
    assert is_running(supervisor.pid)
    kill(server.identity)
    assert until(lambda: not is_running(supervisor.pid))


# ------------------------------------------------------------------------------------------------ users among others


@pytest.fixture
def places(open_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one like /run/lock and one like /tmp in it."""
    for name in ("run", "tmp"):
        (open_dir / name).mkdir()
        (open_dir / name).chmod(0o1777)
    directories = (str(open_dir / "run" / "lamplighter"), str(open_dir / "tmp" / "lamplighter.lock"))
    monkeypatch.setattr(lock, "SHARED_DIRECTORIES", directories)
    return open_dir


@pytest.mark.parametrize("left", [None, 0o700])
def test_the_shared_directory_is_everybodys_whatever_the_umask(places: Path, left: int | None) -> None:
    """Also after one was killed who had made it and not yet opened it."""
    directory = places / "run" / "lamplighter"
    if left is not None:
        directory.mkdir(left)
    before = os.umask(0o077)
    try:
        path = lock.shared_path("gpu-0")
        lock.acquire("GPU 0", path).release()
    finally:
        os.umask(before)
    assert path == str(directory / "gpu-0")
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o1777
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o666
    assert lock.shared_path("gpu-1") == str(directory / "gpu-1")


@pytest.mark.parametrize("closed", ["made", "missing"])
def test_where_not_everybody_may_write_root_does_not_lock_either(places: Path, closed: str) -> None:
    """As on RHEL, where /run/lock is root's: a lock of root's there would be seen by no user's run in /tmp."""
    (places / "run").chmod(0o755)
    if closed == "missing":
        (places / "run").rmdir()
    assert lock.shared_path("gpu-0") == str(places / "tmp" / "lamplighter.lock" / "gpu-0")


def test_no_directory_for_locks_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "SHARED_DIRECTORIES", (str(tmp_path / "no" / "way"), str(tmp_path / "private")))
    tmp_path.chmod(0o755)
    with pytest.raises(OSError, match="all users"):
        lock.shared_path("gpu-0")


def test_a_link_in_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        lock.acquire("GPU 0", str(tmp_path / "lock"))
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_file_of_another_user_in_a_sticky_directory_is_opened_without_creating(
    open_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel does with fs.protected_regular: O_CREAT on another user's file in a sticky directory is EACCES."""
    path = open_dir / "lock"
    path.touch()
    real_open = os.open

    def strict_open(name: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and not flags & os.O_EXCL and os.path.exists(name):
            raise PermissionError(13, "Permission denied", name)
        return real_open(name, flags, mode)

    monkeypatch.setattr(os, "open", strict_open)
    lock.acquire("GPU 0", str(path)).release()


@pytest.mark.skipif(not IS_ROOT, reason="only root can be two users")
@pytest.mark.parametrize("first", [0, NOBODY])
def test_two_users_keep_each_other_out(open_dir: Path, living: Living, runner_home: str, first: int) -> None:
    second = NOBODY if first == 0 else 0
    path = open_dir / "lock"

    def as_user(uid: int, code: str) -> subprocess.Popen[str]:
        head = f"import sys; sys.path.insert(0, {runner_home!r})\n"
        words = ["/usr/bin/python3", "-I", "-S", "-u", "-c", head + code, str(path)]
        return living.start(words, stdout=subprocess.PIPE, text=True, user=uid, group=uid, umask=0o077, cwd="/")

    asking = (
        "from lamplighter.node.system import lock\n"
        "try:\n    lock.acquire('GPU 0', sys.argv[1]); print('mine')\n"
        "except lock.Locked as locked: print(locked.holder['by'])\n"
    )
    holder = as_user(first, HOLD)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert os.stat(path).st_uid == process_of(holder.pid).uid == first
    assert as_user(second, asking).communicate(timeout=120)[0] == "ada@desk\n"
    holder.kill()
    holder.wait()
    assert as_user(second, asking).communicate(timeout=120)[0] == "mine\n"


def test_the_way_to_wait_is_one_that_works(tmp_path: Path) -> None:
    """The runs of another root, another user's, cannot be shown by ours."""
    home = server_home(str(tmp_path), "demo")
    ours: Any = SimpleNamespace(home=server_home(str(tmp_path), "other"), request={"host": "gpu1"})
    holder = {"run": "20260101T000000Z-abcdef", "server": "demo"}
    assert "attach" not in locks._how_to_wait(ours, holder)
    os.makedirs(home.run(holder["run"]).path)
    assert "./inv attach --host gpu1 --server demo shows it live" in locks._how_to_wait(ours, holder)
    assert "attach" not in locks._how_to_wait(ours, {})


def test_all_runs_take_the_shared_locks_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two runs whose servers share GPUs would wait for each other."""
    taken: list[str] = []
    monkeypatch.setattr(locks, "_take", lambda run, what, path, until: taken.append(what))
    monkeypatch.setattr(lock, "shared_path", lambda name: name)
    plans: list[Any] = [SimpleNamespace(port=port, gpu_warnings=()) for port in (8000, 9000)]
    for uuids, order in ((("GPU-b", "GPU-a"), plans), (("GPU-a", "GPU-b"), plans[::-1])):
        found = SimpleNamespace(uuids=uuids, error=None)
        monkeypatch.setattr(locks, "_resolve", lambda plan, found=found: found.uuids)
        monkeypatch.setattr(locks.choice, "resolve_gpus", lambda plan, found=found: found)
        monkeypatch.setattr(locks.dataclasses, "replace", lambda plan, **_: plan)
        taken.clear()
        locks._lock_resources(SimpleNamespace(), tuple(order), 0.0)  # type: ignore[arg-type]
        assert taken == ["GPU GPU-a", "GPU GPU-b", "port 8000", "port 9000"]
