"""The checks that ship: each fails for its own reason, skips where its tool is missing, and is at its level.

They run by the real machinery, on a node's recorded facts and on commands whose output is given.
"""

# ruff: noqa: E501 - the tables of cases read by their rows
from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import socket
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lamplighter.errors import Unreachable, UsageError
from lamplighter.inventory.schema import LEVELS
from lamplighter.node.events import Exit
from lamplighter.node.gpu import xids
from lamplighter.node.log import causes
from lamplighter.node.log.verdict import Diagnosis
from lamplighter.release.engine import load_engine
from lamplighter.run import inspection, verify
from lamplighter.run.checks import Order, run_checks
from lamplighter.run.inspection import Inspectors, inspect
from lamplighter.run.outcome import CheckResult
from lamplighter.run.verify import Results, junit_text

PROJECT = Path(__file__).resolve().parent.parent.parent
CHECKS = PROJECT / "roles" / "node" / "checks"
RECORDED = json.loads((PROJECT / "tests" / "recordings" / "facts" / "demo.json").read_text())
DEMO = load_engine("demo", PROJECT / "roles").compiled
THRESHOLDS = yaml.safe_load((PROJECT / "roles" / "node" / "defaults.yml").read_text())["server"]["checks"]
UUIDS = RECORDED["wanted"]["uuids"]


@dataclasses.dataclass(frozen=True)
class Done:
    rc: int = 0
    out: str = ""
    err: str = ""

    exit_status = property(lambda self: self.rc)
    stdout = property(lambda self: self.out.encode())
    stderr = property(lambda self: self.err.encode())


SMI = (PROJECT / "tests" / "recordings" / "h200" / "nvidia-smi" / "two-gpus.txt").read_text()


def recorded(command: str) -> str:
    """What the command printed on two H200."""
    return SMI.partition(f"$ {command}\n")[2].partition("[rc=0")[0]


GOOD_LSPCI = (
    "0000:18:00.0 3D controller [0302]: NVIDIA [10de:2335]\n0000:2a:00.0 3D controller [0302]: NVIDIA [10de:2335]\n"
)
GOOD_NVLINK = recorded("nvidia-smi nvlink -s")
GOOD_P2P = recorded("nvidia-smi topo -p2p r")
GOOD_ACS = "\t\tACSCtl:\tSrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-\n"
LINES = "State Recv-Q Send-Q Local Address:Port Peer Address:Port\nLISTEN 0 128 127.0.0.1:8000 0.0.0.0:*\n"
UNIT = "ActiveState=active\nUnitFileState=enabled\nNeedDaemonReload=no\n"
NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@gpu1)\n"
LISTED = {
    "files": {
        "launch.sh": {"sha256": "aa", "mode": "0755"},
        "pysite/sitecustomize.py": {"sha256": "aa", "mode": "0755"},
    }
}
GONE = Done(1, "", "No such file or directory")


def answers_of(facts: dict[str, Any]) -> dict[str, Done]:
    """What a node of which ``facts`` are true says to the commands of the checks, by a word of theirs."""
    space = [each for each in facts["space"].values() if not each["error"]]
    limits = {"locked memory": "bytes", "open files": "files", **dict.fromkeys(facts["limits"], "us")}
    limited = [f"Max {name:26}{_limit(facts['limits'].get(name)):21}hard {unit}\n" for name, unit in limits.items()]
    return {
        "uname -s": Done(out="Linux\n"),
        "cat /etc/os-release": Done(out="ID=debian\n"),
        "uname -m": Done(out="x86_64\n"),
        "command -v command": Done(out="command\n"),
        "command -v ss": Done(out="/usr/bin/ss\n"),
        "test -d /run/systemd/system": Done(),
        "lspci -Dnnd": Done(out=GOOD_LSPCI),
        "lspci -vvv": Done(out=GOOD_ACS),
        "NVRM": Done(),
        "nvlink": Done(out=GOOD_NVLINK),
        "topo": Done(out=GOOD_P2P),
        "timedatectl": Done(out="yes\n"),
        "is-active nvidia-fabricmanager": Done(out="active\n"),
        "stat -f": Done(out="".join(f"{at['free']} 1 {at['inodes']} {at['free_inodes']}\n" for at in space)),
        "/proc/meminfo": Done(
            out="".join(
                f"{name}: {value // 1024} kB\n" if value > 9999 else f"{name}: {value}\n"
                for name, value in facts["memory"].items()
            )
        ),
        "/limits": Done(out="".join(limited)),
        "/stat": Done(out=f"{facts['server']['pid']} (python3 -m x) S 1 2 3\n"),
        "/var/lib/systemd/linger": GONE,
        "/proc/driver/nvidia/version": Done(out=NVRM),
        "iommu_groups": Done(),
        "/proc/cmdline": Done(out="quiet\n"),
        "realpath": Done(out=f"{facts['directory']}/releases/{facts['release']['current']}\n"),
        "/release.json": Done(out=json.dumps(LISTED)),
        "sha256sum": Done(out="aa\n"),
        "/current/env": Done(out="600\n"),
        "stat -Lc %a": Done(out="755\n"),
        "/usr/bin/ss": Done(out=LINES),
        "systemctl show": Done(out=UNIT),
        "env -0": Done(out="HOME=/root\0"),
        "nccl.conf": GONE,
    }


def _limit(value: float | None) -> str:
    return "unlimited" if value is None else f"{value:.0f}"


class Node:
    """Stands for the node: answers by the first word that a command contains. ``trips`` are the commands of each."""

    def __init__(self, answers: dict[str, Done], facts: dict[str, Any]) -> None:
        self.answers = answers
        self._facts = facts
        self.trips: list[list[str]] = []

    def run_all(self, commands: Sequence[str], seconds: float | None = None) -> list[Any]:
        self.trips.append(list(commands))
        return [self._answer(command) for command in commands]

    def _answer(self, line: str) -> Done:
        found = [answer for word, answer in self.answers.items() if word in line]
        assert found, f"the test has no answer to {line}"
        return found[0]

    def connect(self) -> dict[str, Any]:
        return {}

    def facts(self) -> dict[str, Any]:
        return self._facts

    def tell(self, what: str, *said: Any) -> None: ...


def healthy() -> dict[str, Any]:
    """The recorded facts, and a node that has everything a check can ask about."""
    facts = copy.deepcopy(RECORDED)
    facts["fatal_xids"] = xids.fatal(DEMO)
    facts["limits"].update({"locked memory": None, "open files": 1048576})
    facts["driver"]["module"] = "580.159.04"
    facts["unit"] = {
        "name": "lamplighter-demo.service", "ActiveState": "active", "UnitFileState": "enabled", "NRestarts": "0",
        "NeedDaemonReload": "no", "DropInPaths": "", "edited": None, "manager_uid": None,
    }  # fmt: skip
    facts["host"]["has_systemd"] = True
    facts["host"].update(uid=1001, user="ops")
    facts["logind"] = {"RemoveIPC": "b false", "KillUserProcesses": "b false", "lingering": False}
    facts["engine"] = {
        "distribution": "sglang", "version": "0.5.16", "files": 2104, "changed": {}, "missing": [], "error": None,
    }  # fmt: skip
    facts["lost_workers"] = []
    facts["answers"] = {
        "model": {"ok": True, "message": "serves demo-model"}, "token": {"ok": True, "message": "a token in 0.03 s"},
    }  # fmt: skip
    for gpu in facts["gpus"]:
        gpu["details"].update({"fabric.state": "Completed", "fabric.status": "Success"})
    return facts


def order(settings: dict[str, Any], only: str = "", directory: Path = CHECKS, **server: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "name": "demo", "engine": {}, "model": "demo-model", "served_name": "demo-model", "host": "127.0.0.1",
        "port": 8000, "gpus": "all", "argv": [], "env": {},
    }  # fmt: skip
    settings = {"check_seconds": 300, **settings}
    return {
        "server": {**known, **server},
        "directories": (str(directory),),
        "levels": {name: value for name, value in settings.items() if value in LEVELS},
        "limits": {name: value for name, value in settings.items() if value not in LEVELS},
        "thresholds": tuple(THRESHOLDS),
        "only": only,
    }


def check(
    only: str = "",
    facts: dict[str, Any] | None = None,
    answers: dict[str, Done] | None = None,
    settings: dict[str, Any] | None = None,
    directory: Path = CHECKS,
    **server: Any,
) -> dict[str, CheckResult]:
    """Run the checks here, in this process."""
    facts = healthy() if facts is None else facts
    given = answers or {}
    node = Node({**given, **{word: answer for word, answer in answers_of(facts).items() if word not in given}}, facts)
    wanted = order({**THRESHOLDS, **(settings or {})}, only, directory, **server)
    return {result.name: result for result in run_checks(node, Order(**wanted))}  # type: ignore[arg-type]


def inspected(directory: Path, only: str = "", **settings: Any) -> dict[str, CheckResult]:
    """Run the checks of ``directory`` as they are run: in a process of their own."""
    with contextlib.closing(Inspectors()) as inspectors:
        found = inspect(Node({}, healthy()), order({**THRESHOLDS, **settings}, only, directory), inspectors)  # type: ignore[arg-type]
    return {result.name: result for result in found}


def test_a_healthy_node_passes_every_check_with_evidence() -> None:
    found = check()
    assert {result.outcome for result in found.values()} == {"passed"}, found
    assert {name for name, result in found.items() if result.is_of_serving} == {
        "process_is_alive", "port_is_held_by_the_server", "served_model_is_the_one_wanted", "model_answers",
    }  # fmt: skip
    assert [name for name, result in found.items() if not result.evidence] == []
    assert [name for name, result in found.items() if not result.question.endswith("?")] == []
    assert verify.judge_checks({"checks": [dataclasses.asdict(each) for each in found.values()]}) == Exit.OK


#: What the node's own program alone can tell; the docstrings of the check files say why.
OF_THE_PROGRAM = {
    "gpus_are_all_there", "gpus_need_no_recovery", "gpu_memory_is_accounted_for", "no_foreign_holder",
    "no_remapped_rows", "no_uncorrected_memory_errors", "nvidia_smi_is_quick", "no_process_is_stuck",
    "persistence_mode_is_on", "clocks_are_not_throttled", "pcie_width_is_full", "gpu_modes_are_as_wanted",
    "workers_carry_the_variables", "sitecustomize_is_in_force", "engine_files_are_as_installed",
    "served_model_is_the_one_wanted", "model_answers", "workers_are_alive", "nothing_has_drifted",
}  # fmt: skip


def test_what_testinfra_can_ask_it_is_asked_in_three_round_trips() -> None:
    facts = healthy()
    node = Node(answers_of(facts), facts)
    found = run_checks(node, Order(**order(THRESHOLDS)))
    assert {each.name for each in found if each.witness == "node program"} == OF_THE_PROGRAM
    assert {each.name for each in found if each.witness == "host"} == {each.name for each in found} - OF_THE_PROGRAM
    assert len(node.trips) == 3, node.trips
    assert {"systemctl show lamplighter-demo.service", "/usr/bin/ss --numeric --listening --tcp"} <= set(node.trips[1])


def test_a_question_without_end_is_told_of_the_check_that_asks_it(tmp_path: Path) -> None:
    text = (
        "from lamplighter.run.checks import asked\n"
        "@asked\ndef endless(host):\n    return [host.run(f'echo {number}') for number in range(10**9)]\n"
        "@asked\ndef known(host):\n    return host.run('echo').stdout\n"
        "def test_endless(endless):\n    pass\ndef test_known(known):\n    assert known == 'x'\n"
    )
    found = check(directory=write(tmp_path, text), answers={"echo": Done(out="x")})
    assert found["known"].outcome == "passed"
    assert (found["endless"].outcome, found["endless"].evidence) == (
        "error", "NoAnswer: more than 30 commands, one after another: no question asks so much",
    )  # fmt: skip


def gpu(field: str, cell: str, index: int = 1) -> Callable[[dict[str, Any]], None]:
    return lambda facts: facts["gpus"][index]["details"].update({field: cell})


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Change one fact; the path's steps are separated by blanks, as names have dots."""

    def change(facts: dict[str, Any]) -> None:
        *above, last = path.split(" > ")
        place: Any = facts
        for step in above:
            place = place[int(step)] if isinstance(place, list) else place[step]
        place[last] = value

    return change


STRANGER = {"pid": 77, "title": "/usr/bin/trainer", "user": "ann", "is_ours": False}
XID = "2026-11-29T03:00:01 gpu1 kernel: NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.\n"
XID_OF_APPLICATION = "2026-11-29T03:00:01 gpu1 kernel: NVRM: Xid (PCI:0000:18:00): 31, pid=1, MMU Fault\n"
PATCHED = {"sglang/srt/server.py": "sha256=x"}
DIFFERENCE = {
    "pid": 6971, "title": "sglang::scheduler_TP0", "name": "NCCL_PROTO", "expected": "LL", "found": "Simple",
    "by": "sglang 0.5.16 sets it",
}  # fmt: skip

#: (check, level, what is wrong with the facts, what commands say, words of the evidence)
CASES: list[tuple[str, str, Any, dict[str, Done], str]] = [
    ("gpus_are_all_there", "blocker", put("smi > error", "nvidia-smi failed with rc 15: GPU is lost"), {}, "GPU is lost"),
    ("gpus_are_all_there", "blocker", put("wanted > error", "no GPU 7: this node has GPU 0"), {}, "no GPU 7"),
    ("gpus_are_all_there", "blocker", put("wanted > uuids", UUIDS[:1]), {}, f"{UUIDS[1]} is gone"),
    ("pci_bus_and_driver_agree", "blocker", None, {"lspci -Dnnd": Done(out=GOOD_LSPCI * 4)}, "8 GPUs on the bus, 2 known"),
    ("driver_is_whole", "blocker", None, {"/proc/driver/nvidia": Done(out=NVRM.replace("580.159.04", "570.1"))}, "kernel module 570.1, library 580.159.04"),
    ("driver_is_whole", "blocker", put("smi > error", "Failed to initialize NVML: Driver/library version mismatch"), {}, "mismatch"),
    ("gpus_need_no_recovery", "blocker", gpu("gpu_recovery_action", "Drain and Reset"), {}, "GPU 1 wants Drain and Reset"),
    ("gpu_memory_is_accounted_for", "blocker", put("holders", {"word": "UNKNOWN", "reason": "GPU requires reset", "holders": [], "open": [], "complete": True}), {}, "requires reset"),
    ("gpu_memory_is_accounted_for", "blocker", put("holders", {"word": "HELD", "reason": "GPU 0 uses 71000 MiB", "holders": [], "open": [], "complete": True}), {}, "no process is seen: GPU 0 uses 71000"),
    ("gpu_memory_is_accounted_for", "blocker", put("holders > unaccounted", "GPU 1 uses 71000 MiB, of which its processes hold 9000"), {}, "by no process that is seen: GPU 1 uses 71000"),
    ("no_foreign_holder", "blocker", put("holders > holders", [{**STRANGER, "user": "", "title": ""}]), {}, "pid 77 (?, ?)"),
    ("no_foreign_holder", "blocker", put("holders > holders", [STRANGER]), {}, "pid 77 (ann, /usr/bin/trainer)"),
    ("no_foreign_holder", "blocker", put("holders > open", [STRANGER]), {}, "pid 77 (ann, /usr/bin/trainer)"),
    ("fabric_is_ready", "blocker", gpu("fabric.state", "In Progress"), {}, "GPU 1: fabric In Progress, Success"),
    ("fabric_is_ready", "blocker", None, {"fabricmanager": Done(3, "failed\n")}, "nvidia-fabricmanager does not run"),
    ("no_remapped_rows", "blocker", gpu("remapped_rows.pending", "Yes"), {}, "GPU 1: row remapping pending"),
    ("no_remapped_rows", "blocker", gpu("remapped_rows.failure", "Yes", 0), {}, "GPU 0: row remapping failed"),
    ("no_uncorrected_memory_errors", "blocker", gpu("ecc.errors.uncorrected.volatile.total", "3"), {}, "GPU 1: 3 uncorrected"),
    ("no_xid", "blocker", None, {"NVRM": Done(out=XID_OF_APPLICATION + XID)}, "1 in all, the last (the GPU has fallen off the bus): 2026-11-29T03:00:01 gpu1 kernel: NVRM: Xid"),
    ("nvidia_smi_is_quick", "blocker", put("smi > seconds", 7.5), {}, "two calls took 7.5 s"),
    ("no_process_is_stuck", "blocker", put("stuck", [{"pid": 9, "comm": "nvidia-smi", "title": "nvidia-smi", "wchan": "os_acquire_mutex"}]), {}, "pid 9 (nvidia-smi) in os_acquire_mutex"),
    ("persistence_mode_is_on", "warning", gpu("persistence_mode", "Disabled"), {}, "GPU 1: persistence mode Disabled"),
    ("clocks_are_not_throttled", "warning", gpu("clocks_event_reasons.active", "0x0000000000000048"), {}, "HW slowdown, HW thermal"),
    ("pcie_width_is_full", "warning", gpu("pcie.link.width.current", "8"), {}, "GPU 1: 8 of 16 lanes"),
    ("nvlink_is_whole", "blocker", None, {"nvlink": Done(out=GOOD_NVLINK + "\t Link 18: <inActive>\n")}, "1 of 37 links are inactive: 18"),
    ("gpus_reach_each_other", "blocker", None, {"topo": Done(out=GOOD_P2P.replace("OK", "CNS"))}, "GPU0-GPU1: CNS"),
    ("acs_is_off", "warning", None, {"lspci -vvv": Done(out=GOOD_ACS + GOOD_ACS.replace("SrcValid-", "SrcValid+"))}, "ACS is on at 1 of 2 ports"),
    ("acs_is_off", "warning", None, {"ls -1": Done(out="0\n1\n2\n")}, "the IOMMU translates for 3 groups"),
    ("gpu_modes_are_as_wanted", "warning", gpu("mig.mode.current", "Enabled"), {}, "GPU 1: MIG is Enabled"),
    ("gpu_modes_are_as_wanted", "warning", gpu("compute_mode", "Exclusive_Process"), {}, "compute mode Exclusive_Process"),
    ("shm_has_room", "blocker", put("space > /dev/shm > free", 64 << 20), {}, "0.1 GiB free, at least 4 are wanted"),
    ("disks_have_room", "blocker", put("space > /tmp > free", 1 << 30), {}, "/tmp: 1.0 GiB free, at least 5"),
    ("disks_have_room", "blocker", put("space > /tmp > free_inodes", 7), {}, "/tmp: 0.0 % of the inodes free"),
    ("limits_of_the_server_are_high", "warning", put("limits > open files", 1024.0), {}, "1024 open files, at least 65536"),
    ("limits_of_the_server_are_high", "warning", put("limits > locked memory", 65536.0), {}, "locked memory is limited to 64 KiB, unlimited (at least 1024 GiB) is wanted"),
    ("memory_is_available", "warning", put("memory > MemAvailable", 1 << 30), {}, "1.0 GiB available"),
    ("hugepages_are_not_set_aside", "warning", put("memory > HugePages_Free", 512), {}, "512 huge pages"),
    ("clock_is_synchronised", "warning", None, {"timedatectl": Done(out="no\n")}, "NTPSynchronized is no"),
    ("logout_takes_nothing_away", "warning", put("logind > RemoveIPC", "b true"), {}, "RemoveIPC is on and ops does not linger"),
    ("logout_takes_nothing_away", "warning", put("logind > KillUserProcesses", "b true"), {}, "KillUserProcesses is on"),
    ("workers_carry_the_variables", "blocker", put("environment > differences", [DIFFERENCE]), {}, "NCCL_PROTO is Simple, not LL: sglang 0.5.16 sets it"),
    ("sitecustomize_is_in_force", "blocker", put("sitecustomize > workers > 6974", "none has run"), {}, "pid 6974: none has run"),
    ("engine_files_are_as_installed", "warning", put("engine > changed", PATCHED), {}, "1 files of sglang 0.5.16 are not as in RECORD: sglang/srt/server.py"),
    ("engine_files_are_as_installed", "warning", put("engine > missing", ["sglang/a.py"]), {}, "sglang/a.py (missing)"),
    ("nccl_takes_nothing_from_files", "warning", None, {"cat -- /etc/nccl.conf": Done(out="# old\nNCCL_PROTO=Simple\n")}, "/etc/nccl.conf says NCCL_PROTO=Simple"),
    ("release_files_are_in_place", "blocker", None, {"stat -Lc": Done(out="644\n")}, "launch.sh has mode 0644, not 0755"),
    ("release_files_are_in_place", "blocker", None, {"sha256sum": Done(out="bb\n")}, "launch.sh is bb, not aa"),
    ("release_files_are_in_place", "blocker", None, {"sha256sum": Done(out="")}, "pysite/sitecustomize.py is gone, not aa"),
    ("environment_file_is_private", "blocker", None, {"stat -Lc": Done(out="644\n")}, "mode 0644: others can read the secrets"),
    ("current_release_is_the_one_that_runs", "blocker", put("server > release", "feed"), {}, "feed runs"),
    ("current_release_is_the_one_that_runs", "blocker", None, {"realpath": Done(out="/var/lib/lamplighter/servers/demo/current\n")}, "there is no current release"),
    ("process_is_alive", "blocker", put("server > pid", None), {}, "no process"),
    ("process_is_alive", "blocker", None, {"/stat": GONE}, "has ended"),
    ("process_is_alive", "blocker", None, {"/stat": Done(out="6970 (python3) Z 1 2\n")}, "has ended"),
    ("port_is_held_by_the_server", "blocker", put("ports", []), {}, "nothing listens on port 8000"),
    ("port_is_held_by_the_server", "blocker", None, {"/usr/bin/ss": Done(out=LINES.replace("8000", "8001"))}, "nothing listens on 127.0.0.1 port 8000"),
    ("port_is_held_by_the_server", "blocker", put("ports > 0 > pids", [77]), {}, "held by pid 77"),
    ("served_model_is_the_one_wanted", "blocker", put("answers > model", {"ok": False, "message": "serves other, not demo-model"}), {}, "serves other, not demo-model"),
    ("model_answers", "blocker", put("answers > token", {"ok": False, "message": "HTTP 503: draining"}), {}, "HTTP 503: draining"),
    ("workers_are_alive", "blocker", put("lost_workers", ["sglang::scheduler_TP3 (pid 7, rank 3) is gone"]), {}, "rank 3) is gone"),
    ("unit_is_enabled", "blocker", None, {"systemctl show": Done(out=UNIT.replace("=enabled", "=disabled"))}, "lamplighter-demo.service is disabled"),
    ("unit_is_as_written", "warning", put("unit > edited", "+Restart=no"), {}, "+Restart=no"),
    ("unit_is_as_written", "warning", None, {"systemctl show": Done(out=UNIT.replace("=no", "=yes"))}, "daemon-reload"),
    ("nothing_has_drifted", "warning", put("drift > differences", [{"kind": "argv", "name": "argv --tp", "wanted": "2", "found": "4", "by": ""}]), {}, "argv --tp: wanted 2, found 4"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "level", "change", "answers", "words"), CASES, ids=[f"{c[0]}-{c[4][:20]}" for c in CASES]
)
def test_a_shipped_check_fails_for_its_own_reason(
    name: str, level: str, change: Any, answers: dict[str, Done], words: str
) -> None:
    facts = healthy()
    if change is not None:
        change(facts)
    result = check(name, facts, answers)[name]
    assert result.outcome == ("failed" if level == "blocker" else "warning"), result
    assert result.level == level
    assert words in result.evidence


def test_a_failed_start_and_the_check_agree_on_which_gpu_errors_are_fatal() -> None:
    crashed = Diagnosis(None, None, "failed", "weights", "crashed")
    failed = causes.Failed(8000, 0.0, None, (), (), {}, "/")
    for code, is_fatal in ((31, False), (63, False), (48, True), (140, True)):  # two were in one list alone
        line = f"[ 1.000000] NVRM: Xid (PCI:0000:18:00): {code}, pid=1, told"
        found = causes.explain(crashed, failed, DEMO, causes.read_kernel_notes(line))
        assert (found.diagnosis.cause == "gpu_hardware") == is_fatal
        outcome = check("no_xid", answers={"NVRM": Done(out=line + "\n")})["no_xid"].outcome
        assert outcome == ("failed" if is_fatal else "passed")


def test_every_shipped_check_has_its_failure() -> None:
    assert {case[0] for case in CASES} == set(check())


MISSING = Done(127, "", "sh: 1: not found")
SKIPS: list[tuple[str, Any, dict[str, Done], str]] = [
    ("pci_bus_and_driver_agree", None, {"lspci": MISSING}, "lspci is not on the node"),
    ("pci_bus_and_driver_agree", None, {"lspci": Done()}, "hides the bus"),
    ("acs_is_off", None, {"lspci": MISSING}, "lspci is not on the node"),
    ("acs_is_off", None, {"lspci": Done(out="\tCapabilities: <access denied>\n")}, "no ACS control"),
    ("clock_is_synchronised", None, {"timedatectl": MISSING}, "timedatectl is not on the node"),
    ("clock_is_synchronised", None, {"timedatectl": Done(1, "", "Failed to connect to bus")}, "Failed to connect to bus"),
    ("no_xid", None, {"NVRM": Done(3)}, "the kernel's log is empty, or this user may not read it"),
    ("nvlink_is_whole", None, {"nvlink": Done(out="GPU 0: NVIDIA L40S\n")}, "no NVLink"),
    ("nvlink_is_whole", None, {"nvlink": Done(6, "No devices were found\n")}, "exit status 6"),
    ("gpus_reach_each_other", None, {"topo": Done()}, "no matrix"),
    ("driver_is_whole", None, {"/proc/driver": GONE}, "/proc/driver/nvidia/version is not there"),
    ("unit_is_enabled", put("unit", None), {}, "no systemd unit"),
    ("logout_takes_nothing_away", put("logind", {}), {}, "no logind"),
    ("limits_of_the_server_are_high", None, {"/limits": GONE}, "may not be read"),
    ("port_is_held_by_the_server", put("ports > 0 > pids", []), {}, "whose port 8000 is can't be seen"),
    ("workers_carry_the_variables", put("environment > state", "inconclusive"), {}, "2/2 workers"),
    ("sitecustomize_is_in_force", put("sitecustomize > scope", "none"), {}, "scope is none"),
    ("engine_files_are_as_installed", put("engine", {"distribution": "x", "error": "no RECORD"}), {}, "no RECORD"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "answers", "words"), SKIPS)
def test_what_a_node_cannot_tell_is_skipped_with_the_reason(
    name: str, change: Any, answers: dict[str, Done], words: str
) -> None:
    facts = healthy()
    if change is not None:
        change(facts)
    result = check(name, facts, answers)[name]
    assert result.outcome == "skipped", result
    assert words in result.evidence


def test_a_server_without_gpus_skips_what_is_about_gpus() -> None:
    found = check("test_gpus.py and not stuck", gpus=())
    assert len(found) > 15
    assert [result for result in found.values() if result.outcome != "skipped"] == []


def test_gpus_that_cannot_be_told_are_told_once_and_nothing_passes_for_them() -> None:
    why = "nvidia-smi failed with rc 9: couldn't communicate with the NVIDIA driver"
    facts = healthy()
    facts.update(gpus=[], smi={"error": why, "seconds": 0.1}, wanted={"uuids": [], "error": why})
    facts["holders"] = {"word": None, "reason": "", "unaccounted": "", "holders": [], "open": [], "complete": True}
    whole = check("test_gpus.py", facts)
    assert [name for name, each in whole.items() if why in each.evidence] == ["gpus_are_all_there"]
    waiting = [each for each in whole.values() if "see gpus_are_all_there" in each.evidence]
    assert len(waiting) > 10
    assert {each.outcome for each in waiting} == {"skipped"}

    settings = {"gpus_are_all_there": "off"}  # not run, or not chosen: each then says so itself
    for chosen in (check("fabric or foreign", facts), check("fabric or there", facts, settings=settings)):
        asked = [each for name, each in chosen.items() if name != "gpus_are_all_there"]
        assert {each.outcome for each in asked} == {"error"}
        assert all(why in each.evidence for each in asked)


def test_memory_whose_share_cannot_be_told_is_not_called_accounted_for_without_a_word() -> None:
    facts = healthy()
    facts["holders"]["unaccounted"] = None
    result = check("accounted", facts)["gpu_memory_is_accounted_for"]
    assert (result.outcome, result.evidence.partition("; ")[2]) == ("passed", "how much each holds cannot be told")


def test_locked_memory_matters_where_gpus_are_used() -> None:
    facts = healthy()
    facts["limits"]["locked memory"] = 8388608.0
    assert check("limits", facts, gpus=())["limits_of_the_server_are_high"].outcome == "passed"
    demo = yaml.safe_load((PROJECT / "roles" / "demo" / "defaults.yml").read_text())["checks"]
    assert check("limits", facts, settings=demo)["limits_of_the_server_are_high"].outcome == "passed"
    assert check("limits", facts)["limits_of_the_server_are_high"].outcome == "warning"


@pytest.mark.parametrize("cell", ["[N/A]", "[Not Supported]"])
def test_a_gpu_that_has_no_such_thing_does_not_fail(cell: str) -> None:
    facts = healthy()
    for each in facts["gpus"]:
        each["details"] = dict.fromkeys(each["details"], cell) | {"driver_version": "580.159.04"}
    found = check("", facts)
    assert [each for each in found.values() if each.outcome not in ("passed", "skipped")] == []


# ------------------------------------------------------------------------------------------------ levels, thresholds


def test_the_inventory_decides_what_blocks_and_where_a_threshold_lies() -> None:
    facts = healthy()
    facts["space"]["/dev/shm"]["free"] = 1 << 30
    gpu("persistence_mode", "Disabled")(facts)
    settings = {"shm_has_room": "warning", "persistence_mode_is_on": "blocker", "no_xid": "off"}
    found = check("", facts, settings=settings)
    assert found["shm_has_room"].outcome == "warning"
    assert found["persistence_mode_is_on"].outcome == "failed"
    assert (found["no_xid"].outcome, found["no_xid"].evidence) == ("skipped", "off in the inventory")
    assert check("shm", facts, settings={"shm_free_gib": 0.5})["shm_has_room"].outcome == "passed"


def test_a_misspelt_name_under_checks_is_an_error_of_its_own() -> None:
    found = check(settings={"shm_has_rom": "off", "shm_fre_gib": 9})
    assert found["shm_has_rom"].outcome == found["shm_fre_gib"].outcome == "error"
    assert "did you mean shm_has_room?" in found["shm_has_rom"].evidence
    assert "did you mean shm_free_gib?" in found["shm_fre_gib"].evidence


def test_a_number_for_a_check_is_no_level() -> None:
    found = check(settings={"no_xid": 5})["no_xid"]
    assert (found.outcome, found.evidence) == ("error", "checks.no_xid: is a check: blocker, warning or off; found 5")


def test_a_threshold_of_an_own_check_that_is_not_set_is_told(tmp_path: Path) -> None:
    own = write(tmp_path, "def test_own(limits):\n    assert limits.get('other', 1)\n    limits['own_number']\n")
    assert check(directory=own)["own"].evidence == "KeyError: 'checks.own_number is not set'"


def test_only_warnings_do_not_fail_and_blockers_do() -> None:
    def judged(*outcomes: str) -> Exit:
        return verify.judge_checks({"checks": [{"outcome": outcome} for outcome in outcomes]})

    assert judged("passed", "warning", "skipped") == Exit.OK
    assert judged("passed", "failed") == Exit.DEGRADED
    assert judged("error") == Exit.DEGRADED


# --------------------------------------------------------------------------------------------------- check files


def write(directory: Path, text: str) -> Path:
    (directory / "test_own.py").write_text(text)
    return directory


def test_the_host_is_never_this_machine(tmp_path: Path) -> None:
    own = write(tmp_path, "def test_host(host):\n    assert host.run('hostname').stdout == 'gpu1'\n")
    found = check("test_host", answers={"hostname": Done(out="gpu1")}, directory=own)
    assert found["host"].outcome == "passed", found
    assert socket.gethostname() != "gpu1"


def test_a_host_fixture_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import pytest\n@pytest.fixture\ndef host():\n    return None\n")
    own = write(tmp_path, "def test_host(host):\n    pass\n")
    assert "it would test another machine" in check("test_host", directory=own)["host"].evidence


def test_options_of_a_pytest_around_are_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    own = write(tmp_path, "def test_it(facts, limits, evidence):\n    evidence(limits['shm_free_gib'])\n")
    assert check("test_it", directory=own)["it"].evidence == "4"
    assert os.environ["PYTEST_ADDOPTS"] == "--no-such-option"


GOOD = "def test_good(facts):\n    pass\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_module_here\n", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("def test_a(host):\n    pass\n\ndef test_b(host:\n", "line 4: SyntaxError: '(' was never closed"),
        ("import pytest\n@pytest.mark.warnin\ndef test_a(): pass\n", "'warnin' not found in `markers`"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_and_the_others_run(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "test_bad.py").write_text(text)
    found = check(directory=write(tmp_path, GOOD))
    assert found["good"].outcome == "passed", found
    bad = found["test_bad.py"]
    assert bad.outcome == "error"
    assert words in bad.evidence
    assert bad.question == f"can {tmp_path}/test_bad.py be read"


def test_a_conftest_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import no_such_module_here\n")
    found = inspected(write(tmp_path, GOOD), "good")  # -k is not to blame
    assert found["checks"].outcome == "error"
    assert "no_such_module_here" in found["checks"].evidence


def test_nothing_is_carried_from_one_server_to_the_next(tmp_path: Path) -> None:
    (tmp_path / "test_half.py").write_text("def test_first():\n    pass\nimport no_such_module_here\n")
    text = "seen = []\ndef test_state(evidence):\n    seen.append(1)\n    evidence(len(seen))\n"
    for _ in range(2):
        found = inspected(write(tmp_path, text))
        assert found["state"].evidence == "1"
        assert found["test_half.py"].outcome == "error"


def test_a_check_that_leaves_loses_no_other_without_a_word(tmp_path: Path) -> None:
    text = "import sys, pytest\ndef test_leaving():\n    sys.exit(0)\n"
    found = check(directory=write(tmp_path, text + GOOD))
    assert (found["leaving"].outcome, found["good"].outcome) == ("failed", "passed")


@pytest.mark.parametrize("leaving", ["pytest.exit('enough')", "request.session.shouldstop = 'enough'"])
def test_a_check_that_ends_the_session_is_an_error_that_names_what_was_not_run(tmp_path: Path, leaving: str) -> None:
    text = f"import pytest\ndef test_leaving(request):\n    {leaving}\n"
    found = check(directory=write(tmp_path, text + GOOD))
    assert "good" not in found
    assert found["checks"].outcome == "error"
    assert "the session was ended: enough; not run: " in found["checks"].evidence
    assert "good" in found["checks"].evidence


@pytest.mark.parametrize(
    ("leaving", "how"),
    [
        ("os._exit(0)", "left with exit status 0"),
        ("os.abort()", "was ended by SIGABRT"),
        ("os.execl('/bin/true', 'true')", "left with exit status 0"),
        ("os.kill(0, signal.SIGKILL)", "was ended by SIGKILL"),
        ("ctypes.string_at(0)", "was ended by SIGSEGV"),
    ],
)
def test_a_check_that_ends_its_process_is_an_error_and_the_others_run(tmp_path: Path, leaving: str, how: str) -> None:
    text = f"import ctypes, os, pytest, signal\n@pytest.fixture\ndef leaver():\n    {leaving}\n"
    text += f"def test_first():\n    pass\n@pytest.mark.warning\ndef test_leaving():\n    {leaving}\n"
    text += "def test_fixture(leaver):\n    pass\n"
    found = inspected(write(tmp_path, text + GOOD), good="blocker")
    outcomes = {name: each.outcome for name, each in found.items()}
    assert outcomes == {"first": "passed", "leaving": "warning", "fixture": "error", "good": "passed"}
    assert found["fixture"].evidence == found["leaving"].evidence == f"the process of the checks {how}"


def test_a_file_that_ends_its_process_is_an_error_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_leaving.py").write_text("import os\nos.write(2, b'no such device\\n')\nos._exit(0)\n")
    (tmp_path / "test_bad.py").write_text("import no_such_module_here\n")
    found = inspected(write(tmp_path, GOOD))
    assert {name: each.outcome for name, each in found.items()} == {
        "test_leaving.py": "error", "test_bad.py": "error", "good": "passed",
    }  # fmt: skip
    assert "left with exit status 0" in found["test_leaving.py"].evidence


def test_a_conftest_that_ends_the_process_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import os\nos._exit(7)\n")
    (found,) = inspected(write(tmp_path, GOOD)).values()
    assert (found.outcome, found.evidence) == ("error", "the process of the checks left with exit status 7")


def test_a_check_that_no_signal_reaches_is_ended_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "GRACE_SECONDS", 15.0)
    text = "import signal\ndef test_deaf():\n    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n    signal.pause()\n"
    found = inspected(write(tmp_path, text + GOOD), check_seconds=0.1)
    assert (found["deaf"].outcome, found["good"].outcome) == ("error", "passed")
    assert found["deaf"].evidence == "the process of the checks hung, and was killed"


def test_what_checks_ask_and_set_is_of_their_process_alone(tmp_path: Path) -> None:
    text = (
        "import os\nfrom lamplighter.run.checks import asked\n"
        "@asked\ndef sizes(host):\n    return host.file('/etc/hosts').size, host.file('/etc/motd').inode\n"
        "def test_asks(host, server, facts, sizes, evidence):\n    os.environ['LEFT'] = 'behind'\n"
        "    evidence(f\"{sizes} {host.run('printf %s', 'a b').stdout} {server.directory} {os.getpid()}\")\n"
    )
    node = Node(
        {
            **answers_of(healthy()),
            "stat -Lc %s": Done(out="12\n"),
            "stat -Lc %i": Done(out="34\n"),
            "printf": Done(out="caf\xe9"),
        },
        healthy(),
    )
    with contextlib.closing(Inspectors()) as inspectors:
        (found,) = inspect(node, order({}, directory=write(tmp_path, text)), inspectors)  # type: ignore[arg-type]
    assert "LEFT" not in os.environ
    told, pid = found.evidence.rsplit(" ", 1)
    assert told == f"(12, 34) caf\xe9 {RECORDED['directory']}"
    assert int(pid) != os.getpid()
    assert found.witness == "host"
    assert [len(trip) for trip in node.trips] == [6, 1, 1, 1]


def test_a_child_of_a_check_may_leave_as_it_likes(tmp_path: Path) -> None:
    text = "import os\ndef test_forks():\n    child = os.fork()\n    if not child:\n        os._exit(3)\n"
    text += "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3\n"
    assert check(directory=write(tmp_path, text))["forks"].outcome == "passed"


@pytest.mark.parametrize("leaving", ["sys.exit(3)", "while True:\n    time.sleep(0.01)"])
def test_a_file_that_leaves_or_hangs_is_an_error_and_the_others_run(tmp_path: Path, leaving: str) -> None:
    (tmp_path / "test_leaving.py").write_text(f"import sys, time\n{leaving}\n")
    found = check(settings={"check_seconds": 3}, directory=write(tmp_path, GOOD))
    assert found["good"].outcome == "passed"
    assert found["test_leaving.py"].outcome == "error"
    words = "test_leaving.py, line 2: SystemExit: 3" if "exit" in leaving else "it did not end within 3 s"
    assert words in found["test_leaving.py"].evidence


@pytest.mark.parametrize("leaving", ["sys.exit(3)", "while True:\n    time.sleep(0.01)"])
def test_a_conftest_that_leaves_or_hangs_is_an_error(tmp_path: Path, leaving: str) -> None:
    (tmp_path / "conftest.py").write_text(f"import sys, time\n{leaving}\n")
    found = check(settings={"check_seconds": 3}, directory=write(tmp_path, GOOD))["checks"]
    assert found.outcome == "error"
    assert f"{tmp_path / 'conftest.py'}, line " in found.evidence


def test_a_pytest_that_breaks_is_an_error_and_no_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*words: object, **plugins: object) -> int:
        raise ValueError("I/O operation on closed file")  # as after a check that closes sys.stdout

    monkeypatch.setattr(pytest, "main", broken)
    found = check(directory=write(tmp_path, GOOD))["checks"]
    assert (found.outcome, found.evidence) == ("error", "ValueError: I/O operation on closed file")


def test_a_skipped_file_is_told(tmp_path: Path) -> None:
    found = check(directory=write(tmp_path, "import pytest\npytest.skip('no', allow_module_level=True)\n" + GOOD))
    assert (found["test_own.py"].outcome, found["test_own.py"].evidence) == ("skipped", "no")


@pytest.mark.parametrize(
    "text",
    [
        "class TestX:\n    def __init__(self):\n        pass\n    def test_x(self):\n        pass\n",
        "def test_x(host):\n    return host is None\n",
        "def test_x(host):\n    assert (host is None, 'a tuple is always true')\n",
    ],
)
def test_a_check_that_would_never_fail_is_an_error(tmp_path: Path, text: str) -> None:
    found = check(directory=write(tmp_path, text))
    assert verify.judge_checks({"checks": [{"outcome": each.outcome} for each in found.values()]}) == Exit.DEGRADED


def test_an_interrupted_command_leaves_no_process_of_checks_behind(tmp_path: Path) -> None:
    class Interrupted(Node):
        def facts(self) -> dict[str, Any]:
            raise KeyboardInterrupt

    begun: list[int] = []
    text = "import os\ndef test_pid(facts):\n    pass\n"
    with contextlib.closing(Inspectors()) as inspectors:
        inspectors.begin()
        begun.append(inspectors._begun._process.pid)  # type: ignore[union-attr]
        with pytest.raises(KeyboardInterrupt):
            inspect(Interrupted({}, {}), order({}, directory=write(tmp_path, text)), inspectors)  # type: ignore[arg-type]
    with pytest.raises(ProcessLookupError):
        os.kill(begun[0], 0)


@pytest.mark.parametrize("place", ["call", "fixture"])
def test_a_check_that_hangs_is_ended_and_the_next_one_runs(tmp_path: Path, place: str) -> None:
    loop = "    while True:\n        try:\n            time.sleep(1)\n        except Exception:\n            pass\n"
    texts = {
        "call": f"import time\ndef test_slow():\n{loop}",
        "fixture": f"import pytest, time\n@pytest.fixture\ndef wait():\n{loop}\ndef test_slow(wait):\n    pass\n",
    }
    found = check(settings={"check_seconds": 3}, directory=write(tmp_path, texts[place] + GOOD))
    assert found["slow"].outcome == ("failed" if place == "call" else "error")
    assert found["slow"].evidence == "it did not end within 3 s (checks.check_seconds)"
    assert found["good"].outcome == "passed"


def test_a_repository_around_the_inventory_has_no_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conftest.py").write_text("raise SystemError('of the tests of that repository')\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "checks" / "deeper").mkdir(parents=True)
    (tmp_path / "checks" / "conftest.py").write_text("import pytest\n@pytest.fixture\ndef mine():\n    return 7\n")
    write(tmp_path / "checks" / "deeper", "def test_it(mine, evidence):\n    evidence(mine)\n")
    monkeypatch.chdir(tmp_path)
    assert check(directory=tmp_path / "checks")["it"].evidence == "7"


def test_plugins_that_happen_to_be_installed_have_no_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site" / "plugin-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[pytest11]\nplugin = no_such_module_of_a_plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "own").mkdir()
    assert check(directory=write(tmp_path / "own", GOOD))["good"].outcome == "passed"


def test_evidence_says_what_pytest_knows(tmp_path: Path) -> None:
    text = (
        "import pytest\n"
        "def test_bare(facts):\n    assert facts['server']['name'] == 'other'\n"
        "def test_told(facts):\n    assert False, 'in words'\n"
        "def test_fixture(no_such_fixture):\n    pass\n"
        "def test_error():\n    raise UnicodeError('no')\n"
        "def test_lines():\n    raise ValueError('\\n\\nlater\\nmore')\n"
        "class Own(Exception):\n    pass\n"
        "def test_class():\n    raise Own('mine')\n"
        "@pytest.mark.xfail(reason='since June')\ndef test_known():\n    assert False\n"
        "@pytest.mark.skip(reason='not now')\ndef test_skip():\n    pass\n"
        "def test_bytes(evidence):\n    evidence(b'caf\\xe9 \\x1b[1m'.decode('utf-8', 'surrogateescape'))\n"
    )
    (directory := tmp_path / "with a-blank").mkdir()
    found = {name: each.evidence for name, each in check(directory=write(directory, text)).items()}
    assert found["bare"].startswith("assert 'demo' == 'other'")
    assert found == {
        **found,
        "told": "in words",
        "fixture": "fixture 'no_such_fixture' not found",
        "error": "UnicodeError: no",
        "lines": "ValueError: later",
        "class": "Own: mine",
        "known": "since June",
        "skip": "not now",
        "bytes": "caf\\udce9 \x1b[1m",
    }


def test_an_expression_that_selects_nothing_or_is_none() -> None:
    for only in ("no_such_check", "-x", "--help"):
        assert check(only)["checks"].evidence == f"no check is chosen by {only}"
    with pytest.raises(UsageError, match="pytest -k"):
        check("and and")


def test_parameters_are_checks_of_one_name(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_many(n):\n    '''Is it one?'''\n    assert n == 1\n"
    own = write(tmp_path, text)
    found = run_checks(Node({}, {}), Order(**order({"many": "warning"}, directory=own)))  # type: ignore[arg-type]
    assert [(result.name, result.question, result.outcome) for result in found] == [
        ("many", "Is it one? [1]", "passed"),
        ("many", "Is it one? [2]", "warning"),
    ]


def test_junit_has_a_suite_a_server_and_every_outcome() -> None:
    rows = [
        {"name": f"c{number}", "question": "q?", "outcome": outcome, "evidence": "e\x1b[2J<&", "seconds": 0.5}
        for number, outcome in enumerate(["passed", "failed", "error", "warning", "skipped"])
    ]
    root = ET.fromstring(junit_text([("gpu1", "kimi", rows), ("gpu2", "kimi", [])]))
    first, second = root.findall("testsuite")
    assert first.attrib == {
        "name": "gpu1/kimi", "time": "2.500", "tests": "5", "failures": "1", "errors": "1", "skipped": "2",
    }  # fmt: skip
    assert second.get("name") == "gpu2/kimi"
    assert [case.find("*").tag for case in first] == ["system-out", "failure", "error", "skipped", "skipped"]
    assert first.find("testcase[@name='c1']/failure").get("message") == "e<&"


def test_junit_has_every_result_of_a_check_under_a_name_of_its_own() -> None:
    checks = [
        dataclasses.asdict(CheckResult("par", "?", "blocker", outcome, "", 0.1)) for outcome in ("passed", "failed")
    ]
    cases = ET.fromstring(junit_text([("gpu1", "demo", checks)])).iter("testcase")
    assert [case.get("name") for case in cases] == ["par", "par (2)"]


def test_junit_is_written_before_anything_is_asked_and_holds_nothing_of_the_last_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.xml"
    path.write_text(junit_text([("gpu1", "old", [])]))
    results = Results(str(path))
    assert [*ET.parse(path).getroot()] == []

    def lost(*_: object) -> None:
        raise Unreachable("gpu1: the wire is cut")

    monkeypatch.setattr(verify, "verify", lost)
    session, server = SimpleNamespace(host=SimpleNamespace(name="gpu1")), SimpleNamespace(name="demo")
    with pytest.raises(Unreachable):
        verify.verify_all(session, [server], tmp_path, "", results)  # type: ignore[arg-type, list-item]
    [suite] = ET.parse(path).getroot()
    assert (suite.get("name"), suite.get("errors")) == ("gpu1/demo", "1")
    assert "the wire is cut" in suite.find("testcase/error").get("message")


@pytest.mark.parametrize("path", ["no/such/directory/report.xml", ".", ""])
def test_a_junit_file_that_cannot_be_written_is_told_at_once(tmp_path: Path, path: str) -> None:
    with pytest.raises(UsageError, match="--junit"):
        Results(str(tmp_path / path) if path else "")


def test_a_junit_file_is_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    results = Results("report.xml")
    os.chdir("elsewhere")  # as a check may
    results.add("gpu1", "demo", [])
    assert "gpu1/demo" in (tmp_path / "report.xml").read_text()
