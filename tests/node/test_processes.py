"""The process table on real processes; cgroup texts and kernel stacks as real nodes show them."""

from __future__ import annotations

import dataclasses
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from lamplighter.node.system import processes
from lamplighter.node.system.processes import Container, Handle, Identity, Process, Unit
from tests.node.living import group_members, process_of, session_members, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROJECT = Path(__file__).resolve().parents[2]
ADVICE = yaml.safe_load((PROJECT / "roles/node/faults.yml").read_text())["stuck"]


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a Python child and wait for its first line; each is ended by its own pid."""
    children: list[subprocess.Popen[str]] = []

    def begin(code: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
        child = subprocess.Popen(  # type: ignore[call-overload]
            [sys.executable, "-u", "-c", code, *arguments], stdout=subprocess.PIPE, text=True, **options
        )
        children.append(child)
        child.first_line = child.stdout.readline().strip()
        return child  # type: ignore[no-any-return]

    yield begin
    for child in children:
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()


SLEEP = "import time; print('up'); time.sleep(60)"


def identity_of(pid: int) -> Identity:
    return process_of(pid).identity


def kill_and_wait(pid: int) -> None:
    with Handle.open(identity_of(pid)) as handle:  # type: ignore[union-attr]
        handle.signal(signal.SIGKILL)
        assert handle.wait(60)


# ---------------------------------------------------------------------------------------------------- one process


def test_a_process_is_described_as_the_kernel_knows_it(start) -> None:
    child = start(SLEEP, "--flag", "", "last")
    process = processes.read_process(child.pid)
    assert process is not None
    assert (process.pid, process.ppid, process.pgid, process.sid) == (
        child.pid,
        os.getpid(),
        os.getpgid(child.pid),
        os.getsid(child.pid),
    )
    assert process.uid == os.getuid()
    assert process.argv == (sys.executable, "-u", "-c", SLEEP, "--flag", "", "last")
    assert process.title == sys.executable
    assert process.exe == os.path.realpath(sys.executable)
    assert process.identity.boot_id == processes.boot_id() != "unknown"
    assert process.cgroup == Path(f"/proc/{child.pid}/cgroup").read_text()
    assert 0 <= processes.age_seconds(process) < 60


def test_a_name_with_brackets_and_numbers_does_not_shift_the_fields(start) -> None:
    code = "open('/proc/self/comm','w').write('a b) R 1 1 ('); import time; print('up'); time.sleep(60)"
    process = processes.read_process(start(code).pid)
    assert process is not None
    assert process.comm == "a b) R 1 1 ("
    assert process.ppid == os.getpid()
    assert process.uid == os.getuid()


def test_a_title_written_over_the_arguments_is_the_title(start) -> None:
    code = "import setproctitle, time; setproctitle.setproctitle('sglang::scheduler_TP0'); print('up'); time.sleep(60)"
    process = processes.read_process(start(code, "x" * 40).pid)
    assert process is not None
    assert process.title == process.command == "sglang::scheduler_TP0"
    assert process.comm == "sglang::schedul"


def test_a_thread_is_not_a_process(start) -> None:
    code = (
        "import threading, time; t = threading.Thread(target=time.sleep, args=(60,), daemon=True); t.start();"
        "print(t.native_id); time.sleep(60)"
    )
    tid = int(start(code).first_line)
    assert Path(f"/proc/{tid}").exists()
    assert processes.read_process(tid) is None
    assert not processes.is_pid_alive(tid)
    assert tid not in processes.processes()


@pytest.mark.parametrize("pid", [0, -1, 1 << 31, 1 << 70])
def test_a_number_that_is_no_pid_is_not_alive(pid: int) -> None:
    assert not processes.is_pid_alive(pid)
    assert processes.read_process(pid) is None
    assert processes.environ(pid) is None
    assert processes.activity(pid) is None
    assert not processes.open_files(pid)
    assert Handle.open(Identity(processes.boot_id(), pid, 1)) is None


# ---------------------------------------------------------------------------------------------------- alive or dead


def test_alive_needs_the_same_start_and_the_same_boot(start) -> None:
    identity = identity_of(start(SLEEP).pid)
    assert processes.is_alive(identity)
    assert not processes.is_alive(dataclasses.replace(identity, start=identity.start + 1))
    assert not processes.is_alive(dataclasses.replace(identity, boot_id="another boot"))


def test_a_zombie_is_dead_though_it_still_has_a_pid(start) -> None:
    child = start("print('up')")
    identity = Identity(processes.boot_id(), child.pid, 0)
    assert until(lambda: (found := processes.read_process(child.pid)) and found.is_dead)
    process = processes.read_process(child.pid)
    assert process is not None
    identity = process.identity
    os.kill(child.pid, 0)  # the naive question is answered wrongly
    assert process.state == "Z"
    assert not processes.is_alive(identity)
    assert not processes.is_pid_alive(child.pid)
    assert child.pid in processes.processes()
    assert child.pid not in [member.pid for member in group_members(process.pgid)]
    child.wait()
    assert processes.read_process(child.pid) is None
    assert not processes.is_alive(identity)


EXIT_OF_ONE_THREAD = {"x86_64": 60, "aarch64": 93}


@pytest.mark.skipif(
    platform.machine() not in EXIT_OF_ONE_THREAD, reason="the number of the exit call is not known here"
)
def test_a_leader_that_ended_before_its_threads_is_not_dead(start) -> None:
    code = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print('up');"
        f"ctypes.CDLL(None).syscall({EXIT_OF_ONE_THREAD.get(platform.machine())}, 0)"
    )
    child = start(code)
    identity = identity_of(child.pid)
    assert until(lambda: (found := processes.read_process(child.pid)) and found.state == "Z")
    process = processes.read_process(child.pid)
    assert process is not None
    assert not process.is_dead
    assert processes.is_alive(identity)
    assert processes.is_pid_alive(child.pid)
    with Handle.open(identity) as handle:  # type: ignore[union-attr]
        assert not handle.exited()
        assert handle.signal(signal.SIGKILL)
        assert handle.wait(60)
    assert not processes.is_alive(identity)


HIDDEN = """
import ctypes, os, sys
sys.path.insert(0, sys.argv[1])
import time
from lamplighter.node.system import processes
other = processes.read_process(int(sys.argv[2]))
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 1 << 14 | 1 << 18, None) or \\
        libc.mount(b"proc", b"/proc", b"proc", 0, b"hidepid=2"):
    print("cannot"); sys.exit()
os.setgroups([]); os.setgid(65534); os.setuid(65534)
ready, told = os.pipe()
secretive = os.fork()  # one's own, and not to be traced: hidepid hides it as well
if not secretive:
    os.close(1); os.close(2); os.close(0)
    libc.prctl(4, 0, 0, 0, 0); os.write(told, b"x"); time.sleep(60); os._exit(0)
os.read(ready, 1)
assert processes.is_pid_alive(secretive)
assert processes.hidden_by() in ("hidepid=2", "hidepid=invisible"), processes.hidden_by()
said = processes.describe_pids([other.pid, 4194300])
assert processes.hidden_by() in said and "(gone)" in said.split(", ")[-1], said
os.kill(secretive, 9); os.waitpid(secretive, 0)
assert not processes.is_pid_alive(secretive)
seen = processes.processes()
assert os.getpid() in seen and other.pid not in seen, sorted(seen)
assert processes.read_process(other.pid) is None and processes.environ(other.pid) is None
assert processes.is_alive(other.identity) and processes.is_pid_alive(other.pid)
assert not processes.is_pid_alive(4194300)
assert processes.activity(other.pid) is None
handle = processes.Handle.open(other.identity)
assert handle is None, "what cannot be verified cannot be held"
print("fine")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a /proc of one's own needs root")
def test_a_process_that_hidepid_hides_is_never_called_dead(start) -> None:
    other = start(SLEEP)
    done = subprocess.run(
        [sys.executable, "-I", "-c", HIDDEN, str(PROJECT), str(other.pid)], capture_output=True, text=True, check=False
    )
    if done.stdout.strip() == "cannot":
        pytest.skip("no mount namespace here")
    assert done.stdout.strip() == "fine", done.stderr


def test_the_table_survives_processes_that_come_and_go() -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            subprocess.run(["/bin/true"], check=True)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(10):
            assert os.getpid() in processes.processes()
            for pid in processes.pids():
                processes.open_files(pid)
                processes.environ(pid)
    finally:
        stop.set()
        thread.join()


# ------------------------------------------------------------------------------------------------------- families


def test_a_group_is_found_after_its_parents_have_gone(start) -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(os.getpid(), inner.pid); time.sleep(60)"
    )
    child = start(code, start_new_session=True)
    leader, orphan = map(int, child.first_line.split())
    assert [process.pid for process in processes.descendants([os.getpid()]) if process.pgid == leader] == sorted(
        [leader, orphan]
    )
    child.kill()
    child.wait()
    try:
        assert [process.pid for process in group_members(leader)] == [orphan]
        assert [process.pid for process in session_members(leader)] == [orphan]
        assert orphan not in [process.pid for process in processes.descendants([leader])]
    finally:
        kill_and_wait(orphan)


def test_a_session_is_followed_without_reading_everybody_again(start, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os, subprocess, sys\n"
        "print(os.getpid(), flush=True)\n"
        "for line in sys.stdin:\n"
        "    inner = subprocess.Popen(['sleep', '60'])\n"
        "    print(inner.pid, flush=True)"
    )
    child = start(code, start_new_session=True, stdin=subprocess.PIPE)
    leader = int(child.first_line)
    monkeypatch.setattr(processes, "FULL_SCAN_SECONDS", 3600.0)
    scan = processes.SessionScan(leader)
    assert scan.look() == (leader,)
    read: list[int] = []
    stat = processes._stat
    monkeypatch.setattr(processes, "_stat", lambda pid: (read.append(pid), stat(pid))[1])
    child.stdin.write("\n")
    child.stdin.flush()
    born = int(child.stdout.readline())
    assert scan.look() == tuple(sorted((leader, born)))
    assert os.getpid() not in read, "who was no member is read again"
    kill_and_wait(born)
    assert scan.look() == (leader,)
    monkeypatch.setattr(processes, "FULL_SCAN_SECONDS", 0.0)
    assert scan.look() == (leader,)
    assert os.getpid() in read
    child.stdin.close()


def made(pid: int, ppid: int, start: int) -> Process:
    return Process(Identity("boot", pid, start), ppid, pid, pid, "S", 0, "x", ("x",), "", None)


def test_descendants_leave_out_a_child_older_than_its_parent_and_end_on_a_circle() -> None:
    table = {p.pid: p for p in (made(10, 1, 50), made(11, 10, 60), made(12, 10, 40), made(13, 11, 60), made(20, 20, 5))}
    assert [process.pid for process in processes.descendants([10], table)] == [11, 13]
    assert processes.descendants([20], table) == ()
    circle = {p.pid: p for p in (made(30, 31, 5), made(31, 30, 5))}
    assert [process.pid for process in processes.descendants([30], circle)] == [31]


# --------------------------------------------------------------------------------------------------------- handles


def test_a_handle_signals_its_process_and_notices_its_end_at_once(start) -> None:
    child = start(SLEEP)
    with Handle.open(identity_of(child.pid)) as handle:  # type: ignore[union-attr]
        assert not handle.exited()
        assert not handle.wait(0.01)
        assert handle.signal(signal.SIGTERM)
        assert handle.wait(60)
        assert child.wait() == -signal.SIGTERM
        assert handle.exited()
        assert handle.signal(signal.SIGKILL) is False
        assert handle.refused is None


def test_a_handle_is_not_given_for_another_process_with_the_same_pid(start) -> None:
    identity = identity_of(start(SLEEP).pid)
    assert Handle.open(dataclasses.replace(identity, start=identity.start - 1)) is None
    assert Handle.open(dataclasses.replace(identity, boot_id="another boot")) is None
    assert processes.is_alive(identity)


def test_a_handle_does_not_signal_when_the_start_differs_at_the_moment_of_the_signal(start) -> None:
    child = start(SLEEP)
    with Handle.open(identity_of(child.pid)) as handle:  # type: ignore[union-attr]
        handle.identity = dataclasses.replace(handle.identity, start=handle.identity.start + 1)
        assert handle.signal(signal.SIGKILL) is False
    assert child.poll() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change its user")
def test_a_handle_does_not_signal_a_process_that_changed_its_user(start) -> None:
    code = "import os, sys, time; print('up'); sys.stdin.readline(); os.setuid(65534); print('now'); time.sleep(60)"
    child = start(code, stdin=subprocess.PIPE)
    with Handle.open(identity_of(child.pid)) as handle:  # type: ignore[union-attr]
        child.stdin.write("\n")
        child.stdin.close()
        assert child.stdout.readline().strip() == "now"
        assert handle.signal(signal.SIGKILL) is False
        assert "changed its user" in (handle.refused or "")
    assert child.poll() is None


def test_a_handle_refuses_init_and_ourselves() -> None:
    for pid in (1, os.getpid()):
        handle = Handle.open(identity_of(pid))
        assert handle is not None
        with handle:
            assert handle.signal(signal.SIGTERM) is False
            assert handle.refused


@pytest.mark.skipif(os.getuid() == 0, reason="root may signal everybody")
def test_a_handle_says_that_another_users_process_is_not_ours() -> None:
    other = next(p for p in processes.processes().values() if p.uid != os.getuid() and p.pid != 1)
    with Handle.open(other.identity) as handle:  # type: ignore[union-attr]
        assert handle.signal(signal.SIGTERM) is False
        assert processes.user_name(other.uid) in (handle.refused or "")


# --------------------------------------------------------------------------------------------------- a look inside


def test_the_environment_is_that_of_the_exec(start) -> None:
    code = "import os, time; os.environ['LATE'] = '1'; print('up'); time.sleep(60)"
    child = start(code, env={"NCCL_PROTO": "LL", "EMPTY": "", "EQUALS": "a=b\nc", "PATH": "/bin"})
    found = processes.environ(child.pid)
    assert found is not None
    assert {name: found[name] for name in ("NCCL_PROTO", "EMPTY", "EQUALS")} == {
        "NCCL_PROTO": "LL",
        "EMPTY": "",
        "EQUALS": "a=b\nc",
    }
    assert "LATE" not in found
    child.kill()
    child.wait()
    assert processes.environ(child.pid) is None


def test_work_moves_the_counters(start) -> None:
    code = "print('up')\nwhile True:\n with open('/proc/self/stat') as f: f.read()"
    child = start(code)
    first = processes.activity(child.pid)
    assert first is not None
    assert until(lambda: (now := processes.activity(child.pid)) and now.cpu_ticks > first.cpu_ticks)
    assert until(lambda: (now := processes.activity(child.pid)) and now.read_bytes > first.read_bytes)


def test_open_files_lead_to_their_targets(start, tmp_path: Path) -> None:
    path = tmp_path / "held"
    child = start(f"import time; f = open({str(path)!r}, 'w'); print('up'); time.sleep(60)")
    assert str(path) in (processes.open_files(child.pid) or {}).values()


def test_a_process_is_found_by_a_whole_argument_only(start) -> None:
    word = f"--lamplighter-test-{os.getpid()}"
    child = start(SLEEP, word)
    start(SLEEP, word + "-longer")
    assert processes.find_by_argument(word) == (child.pid,)


def test_user_names() -> None:
    assert processes.user_name(0) == "root"
    assert processes.user_name(3999999999) == "3999999999"


def test_nothing_speaks_against_killing_a_sleeping_process(start) -> None:
    process = processes.read_process(start(SLEEP).pid)
    assert process is not None
    assert processes.why_unkillable(process, ADVICE) is None


UVM_SPIN = "[<0>] uvm_spin_loop+0xb4/0x140 [nvidia_uvm]\n[<0>] uvm_push_wait+0x20/0x30 [nvidia_uvm]\n"
UNPIN = "[<0>] __cond_resched+0x1/0x2\n[<0>] unpin_user_pages+0x31/0x90\n[<0>] os_unlock_user_pages+0x1/0x2 [nvidia]\n"


@pytest.mark.parametrize(
    ("state", "wchan", "stack", "says"),
    [
        ("S", "futex_wait_queue", "", None),
        ("T", "do_signal_stop", "", None),
        ("R", "0", "", None),
        ("R", "0", UVM_SPIN, "spins inside the GPU driver (R, uvm_spin_loop); only a reboot"),
        ("R", "uvm_spin_loop", "", "only a reboot"),
        ("D", "uvm_spin_loop", "", "the GPU driver does not let go"),
        ("D", "0", UVM_SPIN, "D, in uvm_spin_loop"),
        ("D", "nfs4_wait_bit_killable", "", "storage is back"),
        ("D", "rpc_wait_bit_killable", "", "storage is back"),
        ("D", "folio_wait_bit_common", "", "a disk does not answer"),
        ("D", "0", UNPIN, "tens of seconds: wait"),
        ("D", "something_new", "", "D, in something_new): it ends when"),
        ("D", "0", "", "an unknown place"),
    ],
)
def test_the_advice_fits_the_place_in_the_kernel(state: str, wchan: str, stack: str, says: str | None) -> None:
    found = processes.explain_stuck(state, wchan, stack, ADVICE)
    assert found is None if says is None else found is not None and says in found


def test_a_file_that_needs_the_memory_map_of_a_stuck_process_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(processes, "_read", lambda path: b"late" if released.wait(600) else None)
    monkeypatch.setattr(processes, "_STUCK_READ_SECONDS", 0.05)
    began = time.monotonic()
    assert processes._read_of_memory(1, "cmdline", "D") is None
    assert time.monotonic() - began < 60
    released.set()
    monkeypatch.setattr(processes, "_STUCK_READ_SECONDS", 60.0)  # its thread may begin late
    assert processes._read_of_memory(1, "cmdline", "D") == b"late"


# ---------------------------------------------------------------------------------------------- units, containers

ID = "3f" * 32
SYSTEM = Unit("kimi.service", None)
NSPAWN = Unit("systemd-nspawn@box.service", None)


@pytest.mark.parametrize(
    ("cgroup", "unit", "container"),
    [
        ("0::/\n", None, None),
        ("", None, None),
        ("0::/system.slice/kimi.service\n", SYSTEM, None),
        ("0::/system.slice/kimi.service/worker\n", SYSTEM, None),
        ("0::/system.slice/kimi.service (deleted)\n", SYSTEM, None),
        ("0::/system.slice/system-vllm.slice/vllm@a\\x2db.service\n", Unit("vllm@a\\x2db.service", None), None),
        ("0::/system.slice/_cpu.service\n", Unit("cpu.service", None), None),
        ("0::/lamplighter.slice/lamplighter-kimi-1.scope\n", Unit("lamplighter-kimi-1.scope", None), None),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", None, None),
        ("0::/user.slice/user-1000.slice/session-c1.scope\n", None, None),
        ("0::/user.slice/user-1000.slice/user@1000.service/init.scope\n", None, None),
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/kimi.service\n",
            Unit("kimi.service", 1000),
            None,
        ),
        ("0::/init.scope\n", None, None),
        # v1: systemd's own hierarchy decides; the others may lag behind or be somebody else's
        (
            "12:memory:/other.service\n1:name=systemd:/system.slice/kimi.service\n0::/system.slice/x.service\n",
            SYSTEM,
            None,
        ),
        ("9:name=systemd:/\n4:memory:/\n0::/\n", None, None),
        # containers
        (f"0::/system.slice/docker-{ID}.scope\n", None, Container(ID, "docker")),
        (f"12:pids:/docker/{ID}\n1:name=systemd:/docker/{ID}\n", None, Container(ID, "docker")),
        (f"0::/docker/{ID}\n", None, Container(ID, "docker")),
        (f"0::/machine.slice/libpod-{ID}.scope/container\n", None, Container(ID, "podman")),
        (f"0::/machine.slice/libpod-conmon-{ID}.scope\n", Unit(f"libpod-conmon-{ID}.scope", None), None),
        (f"0::/system.slice/kimi.service/libpod-payload-{ID}\n", SYSTEM, Container(ID, "podman")),
        (
            f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container\n",
            None,
            Container(ID, "podman", uid=1000),
        ),
        (
            f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a.slice/cri-containerd-{ID}.scope\n",
            None,
            Container(ID, "containerd", is_pod=True),
        ),
        (f"0::/kubepods.slice/kubepods-pod0a.slice/crio-{ID}.scope\n", None, Container(ID, "cri-o", is_pod=True)),
        (f"11:cpu,cpuacct:/kubepods/burstable/pod0a-1/{ID}\n", None, Container(ID, "", is_pod=True)),
        (f"0::/default/{ID}\n", None, Container(ID, "containerd")),
        # units of a systemd in a container, which may have our names
        (f"0::/system.slice/docker-{ID}.scope/system.slice/kimi.service\n", None, Container(ID, "docker")),
        (f"0::/docker/{ID}/system.slice/kimi.service\n", None, Container(ID, "docker")),
        ("0::/lxc.payload.box/system.slice/kimi.service\n", None, None),
        ("0::/machine.slice/systemd-nspawn@box.service/payload/system.slice/kimi.service\n", NSPAWN, None),
        (f"0::/system.slice/nerdctl-{ID}.scope\n", None, Container(ID, "containerd")),
    ],
)
def test_the_supervisor_is_read_from_the_cgroup(cgroup: str, unit: Unit | None, container: Container | None) -> None:
    process = dataclasses.replace(made(5, 1, 1), cgroup=cgroup)
    assert processes.unit_of(process) == unit
    assert processes.container_of(process) == container


def test_in_a_container_whose_systemd_has_no_view_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_place_of_systemd", lambda: ["docker", ID])
    assert processes.unit_in(f"0::/docker/{ID}/system.slice/kimi.service\n") == SYSTEM
    assert processes.unit_in("0::/docker/other/system.slice/kimi.service\n") is None
