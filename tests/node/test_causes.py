"""What the node adds to a log's cause: kernel messages, what signal 9 means, proxies without passwords."""

# ruff: noqa: E501 (a line of a log stays one line)

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path

import pytest

from lamplighter.node.log import causes
from lamplighter.node.log.causes import Failed, KernelNote, explain, kernel_notes, read_kernel_notes
from lamplighter.node.log.verdict import Diagnosis
from lamplighter.release.engine import load_engine

PROJECT = Path(__file__).resolve().parents[2]

# As the kernel and its drivers write them: 5.15 to 6.8, NVIDIA 535 to 580; names and addresses replaced.
SAMPLE = """\
[    0.000000] Linux version 6.8.0-45-generic (buildd@x) #45-Ubuntu SMP
[  100.500000] NVRM: Xid (PCI:0000:65:00): 31, pid=1111, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS
[ 5021.113370] NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 5022.000001] NVRM: Xid (PCI:0000:17:00): 94, pid=4242, name=sglang::schedul, Contained: SM (0x1). RST: No, D-RST: No
[ 5040.100000] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/x,task_memcg=/x,task=python,pid=4243,uid=1000
[ 5040.100200] Memory cgroup out of memory: Killed process 4243 (sglang::schedul) total-vm:91GB, anon-rss:60GB, file-rss:0kB
<6>[ 5050.000000][ T123] Out of memory: Killed process 77 (java) total-vm:1kB
[ 5060.000000] w-gpu1 (unregistering): left promiscuous mode
no stamp: Out of memory: Killed process 78 (x)
"""


def test_the_lines_of_the_time_are_found() -> None:
    found = read_kernel_notes(SAMPLE, since=5000)
    assert [(note.kind, note.code, note.pid) for note in found] == [
        ("xid", 79, None),
        ("xid", 94, 4242),
        ("oom", None, 4243),
        ("oom", None, 77),
    ]
    assert found[0].text.startswith("NVRM: Xid (PCI:0000:65:00): 79")
    assert len(read_kernel_notes(SAMPLE)) == 5
    assert read_kernel_notes("") == ()


ENGINE = load_engine("demo", PROJECT / "roles").compiled
FOUND = Diagnosis("sglang", "0.5.16", "failed", "weights", "crashed", "", None, None, "")


def failed(**given: object) -> Failed:
    said = {"port": 1, "since": 5000.0, "signal": None, "pids": {4242, 4243}, "uuids": (), "environment": {}}
    return Failed(**{**said, "directory": "/", **given})  # type: ignore[arg-type]


def note(kind: str, pid: int | None = None, code: int | None = None) -> KernelNote:
    return KernelNote(kind, 5001.0, pid, code, f"{kind} {code or pid}")


def test_a_broken_gpu_explains_a_hang_and_a_programs_own_fault_does_not() -> None:
    stalled = dataclasses.replace(FOUND, cause="stalled")
    told = explain(stalled, failed(), ENGINE, [note("xid", code=79)])
    assert (told.diagnosis.cause, told.diagnosis.evidence) == ("gpu_hardware", "xid 79")
    assert "servers.{server}.gpus" in told.diagnosis.hint
    told = explain(stalled, failed(), ENGINE, [note("xid", code=31)])
    assert told.diagnosis.cause == "stalled"
    assert told.notes == ("kernel: xid 31",)
    oom = dataclasses.replace(FOUND, cause="gpu_oom", evidence="CUDA out of memory")
    assert explain(oom, failed(), ENGINE, [note("xid", code=79)]).diagnosis.cause == "gpu_oom"


def test_an_oom_kill_counts_when_it_was_one_of_ours() -> None:
    told = explain(FOUND, failed(signal=9), ENGINE, [note("oom", pid=4243)])
    assert told.diagnosis.cause == "host_oom"
    assert told.diagnosis.evidence == "oom 4243"
    assert explain(FOUND, failed(signal=9), ENGINE, [note("oom", pid=77)]).diagnosis.cause == "killed"


def test_what_signal_nine_means() -> None:
    itself = {"processes": {"kills_itself": True}}
    found = dataclasses.replace(FOUND, evidence="RuntimeError: x")
    assert "was the server's own" in explain(found, failed(signal=9), itself, []).notes[0]
    assert "was not the kernel's OOM killer" in explain(found, failed(signal=9), {}, []).notes[0]
    assert "may not be read" in explain(found, failed(signal=9), itself, None).notes[0]
    assert explain(found, failed(), itself, []).notes == ()
    rank = dataclasses.replace(FOUND, cause="host_oom", evidence="exit code: -9")
    assert explain(rank, failed(), itself, []).diagnosis.cause == "host_oom"
    assert "no oom-kill" in explain(rank, failed(), itself, []).notes[0]


@pytest.mark.parametrize(
    ("evidence", "rank", "signal", "itself", "oom", "said"),
    [
        ("Rank 6 scheduler died during initialization (exit code: -11).", 6, 9, True, None, "rank 6 was killed by SIGSEGV first, in phase weights; the server then ended its own processes"),
        ("Rank 6 scheduler died during initialization (exit code: 255).", 6, 9, True, None, "rank 6 ended with exit status 255 first"),
        ("RuntimeError: zebra stripes", 2, 9, True, None, "rank 2 failed first, in phase weights; the server then"),
        ("Failed core proc(s): {'EngineCore_DP1': -6}", None, 15, False, None, "one of its processes was killed by SIGABRT first"),
        ("Worker proc VllmWorker-3 died unexpectedly (exit code: -9)", 3, 9, False, 4243, "pid 4243 of the server was killed by the kernel because memory ran out"),
        ("", None, 9, True, None, "the server died in phase weights (killed by SIGKILL)"),
        ("RuntimeError: zebra stripes", None, 9, False, None, "the server died in phase weights (killed by SIGKILL)"),
        ("RuntimeError: zebra stripes", None, None, True, None, "the server died"),
    ],
)  # fmt: skip
def test_the_headline_names_who_died_first(
    evidence: str, rank: int | None, signal: int | None, itself: bool, oom: int | None, said: str
) -> None:
    found = dataclasses.replace(FOUND, evidence=evidence, rank=rank)
    kernel = [note("oom", pid=oom)] if oom else []
    engine = {"processes": {"kills_itself": itself}}
    message = "the server died in phase weights (killed by SIGKILL)"
    told = explain(found, failed(signal=signal), engine, kernel, message)
    assert told.message.startswith(said)


def test_a_child_is_named_where_the_server_ended_by_itself() -> None:
    died = dataclasses.replace(FOUND, evidence="Worker proc VllmWorker-3 died unexpectedly (exit code: -9)", rank=3)
    assert explain(died, failed(has_ended=True), {}, [], "exit status 1").message.startswith(
        "rank 3 was killed by SIGKILL"
    )
    assert explain(died, failed(), {}, [], "stalled in weights").message == "stalled in weights"
    other = dataclasses.replace(FOUND, evidence="RuntimeError: zebra stripes", rank=3)
    assert explain(other, failed(has_ended=True), {}, [], "exit status 1").message == "exit status 1"


def test_proxies_are_named_without_their_password() -> None:
    found = dataclasses.replace(FOUND, cause="proxy")
    environment = {"http_proxy": "http://me:secret@proxy:3128", "NO_PROXY": "localhost", "PATH": "/bin"}
    (told,) = explain(found, failed(environment=environment), {}, []).notes
    assert "http_proxy=http://***@proxy:3128" in told
    assert "NO_PROXY=localhost" in told
    assert "secret" not in told


@pytest.mark.parametrize(
    ("cause", "said"), [("disk_full", "MiB free"), ("shm_full", "/dev/shm"), ("host_oom", "host memory")]
)
def test_space_is_measured_where_it_ran_out(cause: str, said: str, tmp_path: Path) -> None:
    found = explain(dataclasses.replace(FOUND, cause=cause), failed(directory=str(tmp_path)), {}, [])
    assert any(said in each for each in found.notes), found.notes


def test_the_kernels_log_is_read_where_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "KERNEL_SECONDS", 60.0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "dmesg").write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
    words = "[ 5040.100200] host kernel: Out of memory: Killed process 4243 (x) total-vm:1kB"
    (tmp_path / "journalctl").write_text(f"#!/bin/sh\necho '{words}'\n")
    for name in ("dmesg", "journalctl"):
        (tmp_path / name).chmod(0o755)
    found = kernel_notes(5000.0)
    assert found is not None
    assert [each.pid for each in found] == [4243]
    assert kernel_notes(6000.0) == ()
    (tmp_path / "journalctl").write_text("#!/bin/sh\nexit 1\n")
    assert kernel_notes(0.0) is None
    monkeypatch.setattr(causes, "KERNEL_SECONDS", 0.2)
    (tmp_path / "dmesg").write_text("#!/bin/sh\nexec sleep 600\n")
    assert kernel_notes(0.0) is None


@pytest.mark.parametrize("is_named", [True, False])
def test_a_derived_port_is_named_with_its_holder(is_named: bool) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        line = (
            f"ValueError: rpc_port at {port} is not available in 30 seconds."
            if is_named
            else "ZMQError: Address already in use"
        )
        found = dataclasses.replace(FOUND, cause="derived_port_in_use", evidence=line)
        derived = {} if is_named else {port: "RPC"}
        told = explain(found, failed(derived=derived), {}, [])
        who = f"port {port}{'' if is_named else ' (RPC)'} is held by pid {os.getpid()} ("
        assert who in told.diagnosis.evidence
        assert line in told.diagnosis.evidence
        assert any(who in each for each in told.notes)
        own = explain(found, failed(derived=derived, pids={os.getpid()}), {}, [])
        assert own.diagnosis.evidence == line


def test_a_socket_file_of_zmq_is_named_with_its_holder(tmp_path: Path) -> None:
    path = str(tmp_path / "zmq")
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(path)
        found = dataclasses.replace(
            FOUND,
            cause="derived_port_in_use",
            evidence=f"zmq.error.ZMQError: Address already in use (addr='ipc://{path}')",
        )
        assert f"{path} is held by pid {os.getpid()} (" in explain(found, failed(), {}, []).diagnosis.evidence
