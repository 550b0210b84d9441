"""The live environment of other processes: real ones, in every interpreter of this machine, and files that are odd."""

from __future__ import annotations

import itertools
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.system import processes
from lamplighter.node.variables import memory
from lamplighter.node.variables.memory import Unreadable, live_environment
from tests.node.living import IS_ROOT, NOBODY, SLEEP, Living, process_of, until
from tests.node.test_sitecustomize import NAMES, PYTHONS

every = pytest.mark.parametrize("python", PYTHONS, ids=NAMES)
TALK = "import os, sys; {0}; sys.stdout.write('ready\\n'); sys.stdout.flush(); sys.stdin.read()"


@pytest.fixture
def living() -> Iterator[Living]:
    life = Living()
    yield life
    life.end()


def start(living: Living, python: str, code: str, environ: dict[str, str] | None = None, **options: Any) -> Any:
    """Start ``python`` on ``code``; return once it has run and waits."""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, **options}
    child = living.start([python, "-c", TALK.format(code)], env=environ or {"V_GIVEN": "at exec"}, **options)
    assert child.stdout.readline() == "ready\n"
    return process_of(child.pid)


def sleeps(pid: int) -> bool:
    """Whether it is past its exec and its loader: before that it has no library yet."""
    process = process_of(pid)
    return (process.comm, process.state) == ("sleep", "S")


@every
def test_sees_what_the_process_changed_after_its_start(living: Living, python: str) -> None:
    code = "os.environ['V_GIVEN'] = 'changed'; os.environ['V_NEW'] = 'x' * 9000; os.environ.pop('V_GONE')"
    process = start(living, python, code, {"V_GIVEN": "at exec", "V_GONE": "1", "V_KEPT": "a=b c"})
    live = live_environment(process)
    assert (live["V_GIVEN"], live["V_NEW"], live["V_KEPT"]) == ("changed", "x" * 9000, "a=b c")
    assert "V_GONE" not in live
    assert (processes.environ(process.pid) or {})["V_GIVEN"] == "at exec"


@every
def test_sees_what_only_the_c_library_knows(living: Living, python: str) -> None:
    """facts: NCCL's configuration files arrive by setenv, and Python's os.environ never shows them."""
    process = start(living, python, "import ctypes; ctypes.CDLL(None).setenv(b'V_C', b'by setenv', 1)")
    assert live_environment(process)["V_C"] == "by setenv"


def test_a_program_without_a_copy_of_its_own_is_read_through_its_library(living: Living) -> None:
    child = living.start([SLEEP, "600"], env={"V_A": "1", "V_B": ""})
    assert until(lambda: sleeps(child.pid))
    assert live_environment(process_of(child.pid)) == {"V_A": "1", "V_B": ""}


def test_an_emptied_environment_is_empty_and_not_unreadable(living: Living) -> None:
    process = start(living, sys.executable, "import ctypes; ctypes.CDLL(None).clearenv()")
    assert live_environment(process) == {}


def test_thousands_of_variables_and_bytes_that_are_no_text(living: Living) -> None:
    given = {f"V_{number}": "v" * (number % 50) for number in range(3000)}
    process = start(living, sys.executable, "os.environb[b'V_RAW'] = b'\\xff\\xfe'", given)
    live = live_environment(process)
    assert {name: live[name] for name in given} == given
    assert live["V_RAW"] == "\udcff\udcfe"


@pytest.mark.parametrize("spared", [False, True])
def test_survives_a_process_title_that_wiped_the_area_of_exec(living: Living, spared: bool) -> None:
    """facts: setproctitle takes the area of the environment for the title, unless SPT_NOENV is set."""
    given = {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", **({"SPT_NOENV": "1"} if spared else {})}
    process = start(living, sys.executable, "import setproctitle; setproctitle.setproctitle('sglang::sched')", given)
    assert process.title.startswith("sglang::")
    assert ("NCCL_PROTO" in (processes.environ(process.pid) or {})) == spared
    live = live_environment(process)
    assert (live["NCCL_PROTO"], live["NCCL_ALGO"]) == ("LL", "Ring")


def test_a_stopped_process_is_read_and_stays_stopped(living: Living) -> None:
    process = start(living, sys.executable, "os.environ['V_A'] = '1'")
    os.kill(process.pid, signal.SIGSTOP)
    assert until(lambda: process_of(process.pid).state == "T")
    assert live_environment(process)["V_A"] == "1"
    assert process_of(process.pid).state == "T"


def test_a_reading_during_which_the_array_changed_is_thrown_away(
    living: Living, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(living, sys.executable, "pass", {"V_A": "1", "V_B": "2", "V_C": "3"})
    real, calls = memory._array, itertools.count()
    monkeypatch.setattr(memory, "_array", lambda *where: real(*where)[: next(calls) % 2 + 1])
    with pytest.raises(Unreadable, match="changes faster than it can be read"):
        live_environment(process)
    assert next(calls) == 2 * memory.ATTEMPTS


def test_a_reading_during_which_the_array_moved_is_thrown_away(living: Living, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(living, sys.executable, "pass", {"V_A": "1"})
    real, calls = memory._pointer, itertools.count()
    monkeypatch.setattr(memory, "_pointer", lambda *where: real(*where) + 8 * (next(calls) % 2))
    with pytest.raises(Unreadable, match="changes faster than it can be read"):
        live_environment(process)
    assert next(calls) == 2 * memory.ATTEMPTS


def test_an_executable_that_was_replaced_meanwhile_is_read(living: Living, tmp_path: Path) -> None:
    copy = tmp_path / "sleep"
    copy.write_bytes(Path(SLEEP).read_bytes())
    copy.chmod(0o755)
    child = living.start([str(copy), "600"], env={"V_A": "1"})
    assert until(lambda: sleeps(child.pid))
    copy.unlink()
    assert live_environment(process_of(child.pid)) == {"V_A": "1"}


# -- what cannot be read


def test_an_ended_process_and_one_that_took_its_pid(living: Living) -> None:
    process = start(living, sys.executable, "pass")
    other = processes.Process(
        **{**vars(process), "identity": processes.Identity(process.identity.boot_id, process.pid, process.start - 1)}
    )
    with pytest.raises(Unreadable, match="has ended"):
        live_environment(other)
    os.kill(process.pid, signal.SIGKILL)
    living.exit_code(process.pid)
    with pytest.raises(Unreadable, match="has ended"):
        live_environment(process)


def test_a_zombie_has_no_memory(living: Living) -> None:
    child = living.start(["/bin/true"])
    assert until(lambda: process_of(child.pid).state == "Z")
    with pytest.raises(Unreadable, match="has ended"):
        live_environment(process_of(child.pid))


def read_as_nobody(pid: int, prepare: str = "") -> str:
    """Try in a child that gave up root; return what it said."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "import os\nfrom lamplighter.node.system import processes\nfrom lamplighter.node.variables import memory\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n{prepare}\n"
        f"try:\n    print(memory.live_environment(processes.read_process({pid})))\n"
        "except memory.Unreadable as reason:\n    print('unreadable:', reason)"
    )
    words = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not IS_ROOT, reason="node: only root can become another user")
def test_another_users_process_is_named_so(living: Living) -> None:
    process = start(living, sys.executable, "pass")
    assert "unreadable: it belongs to root, and we are nobody" in read_as_nobody(process.pid)


@pytest.mark.skipif(not IS_ROOT, reason="node: only root can become another user")
@pytest.mark.parametrize(
    ("scope", "says"), [("1", "ptrace_scope is 1, so that only an ancestor"), ("3", "ptrace_scope is 3")]
)
def test_yama_is_named_where_it_forbids(living: Living, scope: str, says: str) -> None:
    """Not every kernel has Yama: a process that is not dumpable is refused alike, and the reason is looked up."""
    code = f"import ctypes; os.setuid({NOBODY}); ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"
    process = start(living, "/usr/bin/python3", code)
    said = read_as_nobody(process.pid, f"memory._yama_scope = lambda: {scope}")
    assert f"unreadable: Yama forbids it: kernel.yama.{says}" in said
    assert "not dumpable" in read_as_nobody(process.pid, "memory._yama_scope = lambda: 0")


def test_files_that_are_no_elf_of_64_bits(tmp_path: Path) -> None:
    for head in (b"", b"#!/bin/sh\n" * 9, b"\x7fELF\x01\x01" + bytes(80), b"\x7fELF\x02\x02" + bytes(80)):
        (tmp_path / "file").write_bytes(head)
        with pytest.raises((ValueError, struct.error)):
            memory._place(str(tmp_path / "file"), (11,))


def test_the_symbol_may_be_the_tail_of_a_longer_name() -> None:
    strings = b"\0__environ\0other_environs\0"
    entry = struct.Struct("<IBxHQ8x")

    def look_up(*symbols: tuple[int, int, int, int]) -> int | None:
        return memory._look_up(b"".join(entry.pack(*each) for each in symbols), strings)

    assert look_up((3, 0x11, 5, 0x100), (1, 0x11, 5, 0x200)) == 0x100
    assert look_up((1, 0x11, 5, 0x200)) == 0x200
    assert look_up((1, 0x11, 0, 0)) is None  # only asked for here, and kept elsewhere
    assert look_up((1, 0x12, 5, 0x200)) is None  # a function
    assert look_up((17, 0x11, 5, 0x300)) is None
