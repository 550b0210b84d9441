"""The proof in live workers: real processes that carry, changed, wiped or hid their variables; and what NCCL says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node import versions
from lamplighter.node.layout import ReleaseDirectory
from lamplighter.node.system.processes import Process, read_process
from lamplighter.node.variables import live, memory, nccl
from lamplighter.node.variables.live import CARRIES, DIFFERS, INCONCLUSIVE, Expected, prove_live
from tests.node.living import Living, process_of
from tests.unit.test_release import release
from tests.unit.test_release_launch import place

PROJECT = Path(__file__).parents[2]
RECORDINGS = PROJECT / "tests/recordings/h200/nccl"
PLAN: dict[str, Any] = {"NCCL_PROTO": "LL", "NCCL_P2P_LEVEL": {"value": "SYS", "mode": "force"}}
ENGINE = {
    "name": "sglang",
    "processes": {"titles": ["^sglang::"], "entry_points": []},
    "overwrites": [
        {"name": "NCCL_PROTO", "effect": "always Simple", "versions": "<0.5.3"},
        {"name": "NCCL_PROTO", "effect": "Simple if asked", "versions": ">=0.5.3"},
    ],
}
TALK = "import os, sys; exec(sys.argv[1]); sys.stdout.write('ready\\n'); sys.stdout.flush(); sys.stdin.read()"


@pytest.fixture
def living() -> Iterator[Living]:
    life = Living()
    yield life
    life.end()


@pytest.fixture
def launch(tmp_path: Path) -> Path:
    built = release(env=PLAN, secrets={})
    script = place(built, tmp_path / built.digest)
    (script.parent / "plan.json").write_text(json.dumps({"server": built.manifest["server"], "engine": ENGINE}))
    (script.parent / "env").write_text("export CUDA_VISIBLE_DEVICES='GPU-a,GPU-b'\n")
    (tmp_path / "records").mkdir()
    return script


def worker(living: Living, launch: Path, code: str = "pass", python: str = sys.executable) -> Process:
    """A Python that the launch script started, and that has run ``code``."""
    child = living.start(
        [str(launch), python, "-c", TALK, code],
        env={"PATH": "/usr/bin:/bin", "LAMPLIGHTER_RECORDS": str(launch.parent.parent / "records")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return process_of(child.pid)


def expected_of(launch: Path) -> Expected:
    return live.expected_of(ReleaseDirectory(str(launch.parent)))


def prove(launch: Path, *workers: Process, version: str | None = "0.5.16", **options: Any) -> live.LiveProof:
    records = str(launch.parent.parent / "records")
    return prove_live(workers, expected_of(launch), records, ENGINE, lambda: version, **options)


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Yama has it for an ordinary user on Ubuntu."""

    def refuse(_: Process) -> Mapping[str, str]:
        raise memory.Unreadable("Yama forbids it: kernel.yama.ptrace_scope is 1")

    monkeypatch.setattr(memory, "live_environment", refuse)
    monkeypatch.setattr(live, "SETTLED_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SETTLED_SECONDS", 0.0)


WIPED = "import setproctitle; setproctitle.setproctitle('sglang::scheduler_TP0')"
UNSPARED = f"del os.environ['SPT_NOENV']; {WIPED}"


def test_all_workers_carry_all_variables(living: Living, launch: Path) -> None:
    proof = prove(launch, *(worker(living, launch) for _ in range(3)))
    assert proof.message == "3/3 workers carry 3/3 variables"
    assert proof.is_proven
    assert {each.witness for each in proof.workers} == {"memory"}


def test_a_title_without_spt_noenv_changes_nothing(living: Living, launch: Path) -> None:
    """facts: setproctitle erases what /proc/PID/environ shows."""
    process = worker(living, launch, UNSPARED)
    assert process.title.startswith("sglang::")
    assert prove(launch, process).message == "1/1 workers carry 3/3 variables"


def test_a_change_by_the_server_is_told_with_both_values_and_who(living: Living, launch: Path) -> None:
    process = worker(living, launch, "os.environ['NCCL_PROTO'] = 'Simple'; del os.environ['NCCL_P2P_LEVEL']")
    proof = prove(launch, process, worker(living, launch))
    one, two = proof.differences
    assert (one.name, one.expected, one.found) == ("NCCL_P2P_LEVEL", "SYS", None)
    assert one.by == "changed by the server after its start"
    assert (two.name, two.expected, two.found) == ("NCCL_PROTO", "LL", "Simple")
    assert two.by == "sglang writes it itself (Simple if asked), changed by the server after its start"
    assert proof.message.startswith("1/2 workers carry 3/3 variables; ")
    assert "NCCL_PROTO is 'Simple', not 'LL'" in proof.message
    assert proof.to_json()["state"] == DIFFERS


def test_what_all_workers_have_in_common_is_said_once(living: Living, launch: Path) -> None:
    workers = [worker(living, launch, "os.environ['NCCL_PROTO'] = 'Simple'") for _ in range(3)]
    proof = prove(launch, *workers)
    pids = ", ".join(str(each.pid) for each in workers)
    assert proof.message == (
        f"0/3 workers carry 3/3 variables; NCCL_PROTO is 'Simple', not 'LL', in 3 workers (pid {pids}): "
        "sglang writes it itself (Simple if asked), changed by the server after its start"
    )
    assert len(proof.differences) == 3


def test_what_to_do_depends_on_what_the_inventory_says_already(living: Living, launch: Path) -> None:
    def advice(code: str) -> str:
        return prove(launch, worker(living, launch, code)).advice

    assert advice("pass") == ""
    assert advice("os.environ['NCCL_PROTO'] = 'Simple'").startswith("give NCCL_PROTO mode: force, which wins")
    assert advice("os.environ['NCCL_P2P_LEVEL'] = 'PHB'").startswith("NCCL_P2P_LEVEL is forced already: ")
    assert advice("os.environ['CUDA_VISIBLE_DEVICES'] = 'GPU-c'").startswith("CUDA_VISIBLE_DEVICES reaches workers by")
    both = advice("os.environ['NCCL_PROTO'] = os.environ['NCCL_P2P_LEVEL'] = 'x'")
    assert both.count("; ") == 2


def test_a_worker_that_never_ran_our_file_is_told_apart(living: Living, launch: Path) -> None:
    code = (
        "import subprocess\n"
        "words = [sys.executable, '-I', '-c', 'import time; print(flush=True); time.sleep(600)']\n"
        "child = subprocess.Popen(words, env={**os.environ, 'NCCL_PROTO': 'Tree'}, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\nsys.stdout.write('%d\\n' % child.pid)"
    )
    child = living.start(
        [str(launch), sys.executable, "-c", TALK, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    process = living.keep(int(child.stdout.readline()))
    (difference,) = prove(launch, process).differences
    assert (difference.name, difference.found) == ("NCCL_PROTO", "Tree")
    assert "after its start" not in difference.by


def test_a_worker_may_have_some_of_the_gpus(living: Living, launch: Path) -> None:
    some = worker(living, launch, "os.environ['CUDA_VISIBLE_DEVICES'] = 'GPU-b'")
    other = worker(living, launch, "os.environ['CUDA_VISIBLE_DEVICES'] = 'GPU-c'")
    assert prove(launch, some).is_proven
    assert [each.name for each in prove(launch, other).differences] == ["CUDA_VISIBLE_DEVICES"]


def test_a_secret_is_compared_and_never_shown(living: Living, launch: Path) -> None:
    plan = json.loads((launch.parent / "plan.json").read_text())
    plan["server"]["secrets"] = ["HF_TOKEN", "API_KEY"]
    (launch.parent / "plan.json").write_text(json.dumps(plan))
    (launch.parent / "env").write_text("export API_KEY='sk it'\"'\"'s'\nexport HF_TOKEN=hf_right\n")
    assert prove(launch, worker(living, launch)).message == "1/1 workers carry 4/4 variables"
    proof = prove(launch, worker(living, launch, "os.environ['HF_TOKEN'] = 'hf_wrong'"))
    assert "HF_TOKEN is (secret, another one), not (secret)" in proof.message
    assert "hf_" not in repr(proof)


# -- other witnesses


@pytest.mark.usefixtures("unreadable")
def test_the_record_speaks_where_memory_is_closed(living: Living, launch: Path) -> None:
    proof = prove(launch, worker(living, launch))
    assert proof.message == "1/1 workers carry 3/3 variables"
    assert proof.workers[0].witness == "record"


@pytest.mark.usefixtures("unreadable")
def test_the_record_of_a_wiped_worker_still_counts_and_says_what_it_does_not_know(living: Living, launch: Path) -> None:
    proof = prove(launch, worker(living, launch, UNSPARED))
    assert proof.workers[0].verdict == CARRIES
    assert proof.workers[0].witness == "record"


@pytest.mark.usefixtures("unreadable")
def test_a_record_says_that_a_variable_differed_at_the_start(living: Living, launch: Path, tmp_path: Path) -> None:
    (tmp_path / "next").mkdir()
    (tmp_path / "next/sitecustomize.py").write_text("import os; os.environ['NCCL_PROTO'] = 'Tree'")
    script = launch.read_text().replace("export SPT_NOENV=1", f"export SPT_NOENV=1 PYTHONPATH='{tmp_path}/next'")
    launch.write_text(script)
    proof = prove(launch, worker(living, launch))
    assert [each.name for each in proof.differences] == ["NCCL_PROTO"]


@pytest.mark.usefixtures("unreadable")
def test_a_record_of_another_process_or_release_is_none(living: Living, launch: Path) -> None:
    process = worker(living, launch)
    record = launch.parent.parent / f"records/{process.pid}.json"
    told = json.loads(record.read_text())
    for change in ({"start": told["start"] - 1}, {"digest": "0" * 12}):
        record.write_text(json.dumps({**told, **change}))
        assert prove(launch, process).workers[0].witness != "record"
    record.write_text("{ half")
    assert prove(launch, process).workers[0].witness == "exec"


@pytest.mark.usefixtures("unreadable")
def test_what_nobody_can_see_is_inconclusive_and_says_what_forbids_it(living: Living, launch: Path) -> None:
    process = worker(living, launch, UNSPARED)
    (launch.parent.parent / f"records/{process.pid}.json").unlink()
    proof = prove(launch, process)
    assert proof.workers[0].verdict == INCONCLUSIVE
    assert not proof.differences
    assert not proof.is_proven
    assert "inconclusive" in proof.message
    assert "kernel.yama.ptrace_scope is 1" in proof.message
    assert proof.to_json()["state"] == INCONCLUSIVE


@pytest.mark.usefixtures("unreadable")
def test_a_forced_value_of_exec_time_accuses_nobody(living: Living, launch: Path) -> None:
    """The server may have changed it before it spawned the worker; sitecustomize then set it right, or not."""
    child = living.start(
        [sys.executable, "-S", "-c", TALK, "pass"],
        env={"NCCL_PROTO": "LL", "NCCL_P2P_LEVEL": "PHB", "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    proof = prove(launch, process_of(child.pid))
    assert proof.workers[0].verdict == INCONCLUSIVE
    assert proof.workers[0].reason.startswith("NCCL_P2P_LEVEL not seen: ")


def test_who_has_ended_meanwhile_is_left_out(living: Living, launch: Path) -> None:
    process, other = worker(living, launch), worker(living, launch)
    os.kill(process.pid, 9)
    living.exit_code(process.pid)
    assert prove(launch, process, other).message == "1/1 workers carry 3/3 variables"
    assert prove(launch, process).message == "no worker was found to look at"


# -- who is a worker


def test_tools_are_no_workers_but_who_holds_a_gpu_is(living: Living, launch: Path) -> None:
    main, tool = worker(living, launch), living.titled("cc1plus")
    tracker = worker(living, launch)
    titled = living.titled("sglang::scheduler_TP0")
    fields = {**vars(tracker), "argv": ("python", "-c", "from multiprocessing.resource_tracker import main;main(5)")}
    tracker = Process(**fields)
    members = [main, tool, tracker, titled]
    assert live.workers_of(members, set(), ENGINE) == sorted([main, titled], key=lambda one: one.pid)
    assert live.workers_of(members, {tool.pid}, ENGINE) == [tool]


def test_the_main_process_counts_only_where_it_is_alone(living: Living, launch: Path) -> None:
    main, other = worker(living, launch), worker(living, launch)
    assert live.workers_of([main, other], set(), ENGINE, main.pid) == [other]
    assert live.workers_of([main], set(), ENGINE, main.pid) == [main]


def test_a_server_that_is_no_python_is_looked_at_itself(living: Living) -> None:
    program, tool = (read_process(living.start(["/bin/sleep", "600"]).pid) for _ in range(2))
    assert program is not None
    assert tool is not None
    assert live.workers_of([program, tool], set(), {}, program.pid) == [program]
    assert live.workers_of([program, tool], {tool.pid}, {}, program.pid) == [tool]


@pytest.mark.parametrize(
    ("version", "wanted", "is_in"),
    [
        ("0.5.2", "<0.5.3", True),
        ("0.5.3", "<0.5.3", False),
        ("0.5.10", ">=0.5.5,<0.5.18", True),
        ("0.5.3.post1", "<=0.5.3", True),
        ("0.5", "==0.5.0", True),
        ("0.33.0+cu128", ">=0.33", True),
        ("1.0rc1", ">0.9", True),
        (None, "<0.1", True),
        ("7", "*", True),
    ],
)
def test_version_ranges(version: str | None, wanted: str, is_in: bool) -> None:
    assert versions.is_version_in(version, wanted) == is_in


# -- what NCCL says


def test_nccls_own_words_by_worker() -> None:
    with (RECORDINGS / "sitecustomize.log").open() as log:
        said = nccl.variables(log)
    assert len(said) == 2
    for of_one in said.values():
        assert (of_one["NCCL_PROTO"], of_one["NCCL_ALGO"], of_one["NCCL_P2P_LEVEL"]) == ("LL", "Ring", "SYS")
        assert nccl.is_same("0", of_one["NCCL_NVLS_ENABLE"])


def test_an_engines_prefix_and_a_warning_stamp_do_not_hide_them() -> None:
    lines = [
        "(EngineCore pid=7) gpu1:41:41 [0] NCCL INFO NCCL_PROTO set by environment to LL\n",
        "[2026-01-01 10:00:00] gpu-1.lan:42:99 [1] NCCL INFO NCCL_SOCKET_IFNAME set to eth0\r\n",
        "gpu1:43:43 [0] NCCL INFO cudaDriverVersion 13000\n",
    ]
    assert nccl.variables(lines) == {41: {"NCCL_PROTO": "LL"}, 42: {"NCCL_SOCKET_IFNAME": "eth0"}}


@pytest.mark.parametrize(
    ("given", "logged", "same"),
    [("LL", "LL", True), ("0x10", "16.", True), ("010", "8.", True), (" 1 ", "1.", True), ("true", "0.", False),
     ("1", "0.", False), ("Ring", "Tree", False), ("4194304", "4194304.", True)],
)  # fmt: skip
def test_numbers_are_read_as_c_does(given: str, logged: str, same: bool) -> None:
    assert nccl.is_same(given, logged) == same


def test_delivery_and_use_are_two_statements(living: Living, launch: Path, tmp_path: Path) -> None:
    process, log = worker(living, launch), tmp_path / "server.log"
    said = f"gpu1:{process.pid}:{process.pid} [0] NCCL INFO NCCL_P2P_LEVEL set by environment to "
    log.write_text("nothing of it\n")
    proof = prove(launch, process, nccl_log=str(log))
    assert (proof.is_proven, proof.use) == (
        True,
        "NCCL has said nothing about variables in the log: delivery is proven above, use is not",
    )
    log.write_text(f"{said}SYS\n")
    proof = prove(launch, process, nccl_log=str(log))
    assert proof.is_proven
    assert proof.use.startswith("NCCL itself names NCCL_P2P_LEVEL in 1 workers; not in all: NCCL_PROTO (with one rank")
    log.write_text(f"{said}PHB\n")
    proof = prove(launch, process, nccl_log=str(log))
    (difference,) = proof.differences
    assert (difference.found, difference.by) == ("PHB", "NCCL says that it uses another value")
    assert proof.advice.startswith("NCCL reads NCCL_P2P_LEVEL in another way")
