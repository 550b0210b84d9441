"""Facts of the node and drift of a server: parsers on recorded text, engine files on a real directory."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.gpu import driver, gpus, holders
from lamplighter.node.health import differences, drift, facts
from lamplighter.node.layout import server_home
from lamplighter.node.system import disks, distributions, memory, processes
from tests.node.living import SLEEP, Living

# ---------------------------------------------------------------------------------------------------------- parsers


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Wed Jul  2\nGCC version: 12\n", "580.159.04"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.44.01  Release Build  (root@h)\n", "590.44.01"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54  Tue\n", "535.54"),
        ("something else", None),
        (None, None),
    ],
)  # fmt: skip
def test_the_version_of_the_loaded_driver(text: str | None, version: str | None) -> None:
    assert driver.read_driver(text) == version


def test_meminfo_and_mounts() -> None:
    text = (
        "MemTotal:       24683656 kB\nMemAvailable:   100 kB\nHugePages_Free:        7\nHugepagesize:       2048 kB\n"
    )
    kib = {"MemTotal": 24683656, "MemAvailable": 100, "Hugepagesize": 2048}
    assert memory.read_meminfo(text) == {"HugePages_Free": 7, **{name: size * 1024 for name, size in kib.items()}}
    mounts = "proc /proc proc rw 0 0\n/dev/sdb1 /models\\040big ext4 ro,noatime 0 0\nbroken\n"
    assert disks.read_mounts(mounts) == [
        {"device": "/dev/sdb1", "point": "/models big", "type": "ext4", "options": "ro,noatime"}
    ]


def test_space_of_a_path_that_is_not_there_yet(tmp_path: Path) -> None:
    found = disks.space(str(tmp_path / "a" / "b"))
    assert found["at"] == str(tmp_path)
    assert 0 < found["free"] <= found["total"]


def test_details_of_gpus_by_uuid_and_a_field_that_the_driver_does_not_know() -> None:
    uuid = "GPU-2bf2fdb3-338d-5b84-9c49-5078d63e0f56"
    good = gpus.Answer(0, f"{uuid}, Enabled, [N/A]\r\nUnable to determine the device handle\n", "")
    assert gpus.read_details(["a", "b"], good) == {uuid: {"a": "Enabled", "b": "[N/A]"}}
    assert gpus.read_details(["a"], gpus.Answer(2, 'Field "a" is not a valid field to query.', "")) is None


def test_facts_of_this_machine_are_json_and_name_ourselves() -> None:
    found = json.loads(json.dumps(facts.node_facts([], ["/nonexistent/place"])))
    assert found["host"]["uid"] == os.geteuid()
    assert found["memory"]["MemTotal"] > 0
    assert found["space"]["/nonexistent/place"]["at"] == "/"
    me = processes.read_process(os.getpid())
    assert me is not None
    assert facts.describe(me)["argv"][0] == me.argv[0]


# ------------------------------------------------------------------------------------------------------ engine files


def install(site: Path, version: str, files: dict[str, str], name: str = "sg_lang") -> Path:
    """Lay a distribution down as pip does."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    rows = []
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f'"{path}",sha256={digest},{len(text.encode())}')
    rows += ["sglang/__pycache__/a.cpython-311.pyc,,", f"{info.name}/RECORD,,"]
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return info


FILES = {"sglang/srt/server.py": "a = 1\n", "sglang/with, comma.py": "b = 2\n", "sglang/c.py": "c = 3\n"}


def test_an_installed_engine_is_compared_with_its_record(tmp_path: Path) -> None:
    info = install(tmp_path, "0.5.16", FILES)
    found = distributions.engine_files(str(info))
    assert (found["version"], found["files"], found["changed"], found["missing"]) == ("0.5.16", 3, {}, [])
    assert distributions.find_distribution(["/nonexistent", str(tmp_path)], "SG.Lang") == str(info)

    (tmp_path / "sglang/srt/server.py").write_text("a = 2\n")  # the same size
    (tmp_path / "sglang/c.py").unlink()
    now = distributions.engine_files(str(info), found)
    assert list(now["changed"]) == ["sglang/srt/server.py"]
    assert now["missing"] == ["sglang/c.py"]
    assert now["changed"]["sglang/srt/server.py"].startswith("sha256=")


def test_a_file_that_nobody_touched_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = install(tmp_path, "0.5.16", FILES)
    (tmp_path / "sglang/c.py").write_text("patched long ago\n")
    known = distributions.engine_files(str(info))
    monkeypatch.setattr(distributions, "_digest", lambda path, like: pytest.fail(f"read {path}"))
    assert distributions.engine_files(str(info), known)["changed"] == known["changed"]


def test_without_a_record_nothing_is_claimed(tmp_path: Path) -> None:
    info = install(tmp_path, "0.5.16", FILES)
    (info / "RECORD").unlink()
    assert "no RECORD" in distributions.engine_files(str(info))["error"]
    (info / "RECORD").write_text(f"sglang/c.py,,\n{info.name}/RECORD,,\n")
    assert "without digests" in distributions.engine_files(str(info))["error"]
    (info / "direct_url.json").write_text('{"url": "file:///src", "dir_info": {"editable": true}}')
    assert "editable" in distributions.engine_files(str(info))["error"]
    for text in ("", "[]", '{"dir_info": {}}', '{"url": "file:///a.whl", "archive_info": {"hash": "x"}}'):
        (info / "direct_url.json").write_text(text)
        assert "without digests" in distributions.engine_files(str(info))["error"]


# ------------------------------------------------------------------------------------------------------------- drift


def named(found: Any) -> dict[str, tuple[str | None, str | None]]:
    return {each.name: (each.wanted, each.found) for each in found}


def test_command_lines_are_compared_flag_by_flag_and_keys_stay_hidden() -> None:
    was = [
        "python",
        "-m",
        "sglang.launch_server",
        "--tp",
        "8",
        "--trust-remote-code",
        "--api-key",
        "a",
        "--lora",
        "x",
        "y",
    ]
    now = ["python", "-m", "sglang.launch_server", "--tp=4", "--api-key", "b", "--lora", "x", "z", "--port", "1"]
    assert named(differences.of_words(differences.ARGV, "argv", was, now)) == {
        "argv --tp": ("8", "4"),
        "argv --trust-remote-code": ("(set)", None),
        "argv --api-key": ("(hidden)", "(hidden)"),
        "argv --lora": ("x y", "x z"),
        "argv --port": (None, "1"),
    }
    assert differences.of_words(differences.ARGV, "argv", was, was) == []
    assert [
        each.name for each in differences.of_words(differences.ARGV, "argv", ["a", "--x", "--y"], ["a", "--y", "--x"])
    ] == ["argv order of arguments"]


def test_an_edited_inventory_is_told_by_variable() -> None:
    was = {"argv": ["s", "--tp", "8"], "env": {"A": {"value": "1", "mode": "default"}}, "gpus": [0, 1], "port": 8000}
    wanted = {
        "argv": ["s", "--tp", "4"],
        "env": {"A": {"value": "2", "mode": "force"}, "B": {"value": "x", "mode": "default"}},
        "gpus": [0, 1],
        "port": 8001,
    }
    assert named(differences.of_plans(wanted, was)) == {
        "args --tp": ("4", "8"),
        "env.A": ("2 (forced)", "1"),
        "env.B": ("x", None),
        "port": ("8001", "8000"),
    }


def test_an_edited_unit_is_told_by_setting() -> None:
    was = "[Service]\n# why\nRestart=on-failure\nExecStart=/a\n"
    assert differences.of_units(was, was.replace("# why", "# because"), "u") == []
    now = was.replace("on-failure", "no") + "Nice=5\n"
    assert named(differences.of_units(was, now, "u")) == {"u Restart": ("on-failure", "no"), "u Nice": (None, "5")}
    assert named(differences.of_units(was, None, "u")) == {"u": ("(as committed)", None)}
    assert named(differences.of_drop_in(None, "[Service]\nNice=5\n", "u.d/a")) == {"u.d/a Nice": (None, "5")}
    assert named(differences.of_drop_in("Nice=5", "Nice=6", "u.d/a")) == {"u.d/a Nice": ("5", "6")}
    assert named(differences.of_drop_in("# one", None, "u.d/a")) == {"u.d/a": ("# one", None)}
    assert differences.of_drop_in("Nice=5", "# same\nNice=5", "u.d/a") == []


@pytest.fixture
def engine(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """What was written down of an installed engine, and its site-packages."""
    info = install(tmp_path, "0.5.16", FILES, name="sglang")
    return {
        "engine": {"distribution": "sglang", "dist_info": str(info), **distributions.engine_files(str(info))}
    }, tmp_path


def test_no_drift_of_an_engine_that_nobody_touched(engine: tuple[dict[str, Any], Path]) -> None:
    unknown: list[str] = []
    assert drift._in_engine(engine[0], unknown) == []
    assert unknown == []


def test_a_patched_engine_file_is_drift(engine: tuple[dict[str, Any], Path]) -> None:
    deployed, site = engine
    (site / "sglang/srt/server.py").write_text("import os\na = 1\n")
    (site / "sglang/c.py").unlink()
    found = named(drift._in_engine(deployed, []))
    assert set(found) == {"sglang/srt/server.py", "sglang/c.py"}
    assert found["sglang/c.py"] == ("(as in RECORD)", None)
    wanted, now = found["sglang/srt/server.py"]
    assert wanted == "(as in RECORD)"
    assert len(now or "") == 12


def test_an_upgraded_package_is_drift(engine: tuple[dict[str, Any], Path]) -> None:
    deployed, site = engine
    (site / "sglang-0.5.16.dist-info").rename(site / "sglang-0.5.17.dist-info")
    (site / "sglang-0.5.17.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.17\n")
    assert named(drift._in_engine(deployed, [])) == {"sglang version": ("0.5.16", "0.5.17")}


def test_an_engine_that_became_editable_is_drift(engine: tuple[dict[str, Any], Path]) -> None:
    deployed, site = engine
    info = site / "sglang-0.5.16.dist-info"
    (info / "direct_url.json").write_text('{"url": "file:///src", "dir_info": {"editable": true}}')
    [found] = drift._in_engine(deployed, [])
    assert (found.name, found.wanted) == ("sglang installation", "(files as in RECORD)")
    assert "is an editable install" in (found.found or "")


def test_a_removed_package_is_drift(engine: tuple[dict[str, Any], Path]) -> None:
    deployed, site = engine
    (site / "sglang-0.5.16.dist-info").rename(site / "gone")
    assert named(drift._in_engine(deployed, [])) == {"sglang version": ("0.5.16", None)}


def test_another_driver_than_the_recorded_one_is_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    was = {"driver": {"module": "580.159.04", "library": "580.159.04"}}
    now = {"module": "590.44.01", "library": "590.44.01"}
    monkeypatch.setattr(driver, "versions", lambda: now)
    assert named(drift._in_driver(was, [])) == {
        "driver (kernel module)": ("580.159.04", "590.44.01"),
        "driver (nvidia-smi)": ("580.159.04", "590.44.01"),
    }
    assert drift._in_driver({"driver": now}, []) == []


def test_an_nvidia_smi_that_does_not_answer_is_no_other_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "versions", lambda: {"module": None, "library": None})
    unknown: list[str] = []
    assert drift._in_driver({"driver": {"module": None, "library": "580.159.04"}}, unknown) == []
    assert unknown == ["driver: nvidia-smi does not tell its version"]


def test_nothing_deployed_has_no_drift(tmp_path: Path) -> None:
    assert drift.find_drift(server_home(str(tmp_path), "kimi"), None) == drift.Drift()


def test_a_process_that_waits_for_a_moment_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    me = processes.read_process(os.getpid())
    assert me is not None
    waiting = dataclasses.replace(me, state="D")
    monkeypatch.setattr(facts, "STUCK_SECONDS", 0.01)
    assert facts.stuck({me.pid: waiting}) == []  # the next look finds it at work
    monkeypatch.setattr(facts.processes, "read_process", lambda pid: waiting)
    assert facts.stuck({me.pid: waiting}) == []  # it read something: a disk that is slow
    still = processes.Activity(7, 7)
    monkeypatch.setattr(facts.processes, "activity", lambda pid: still)
    assert [each["pid"] for each in facts.stuck({me.pid: waiting})] == [me.pid]


UUID = "GPU-11111111-2222-3333-4444-555555555555"


class Looks:
    """Stands for nvidia-smi: each look has the next list of holders (pid: MiB), and the last one stays."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *lists: dict[int, int], used: int | None = None) -> None:
        self.taken = 0
        self._lists = lists
        self._used = used
        monkeypatch.setattr(gpus, "take_sample", self._take)
        monkeypatch.setattr(gpus, "device_holders", lambda: gpus.DeviceHolders({}, complete=True))
        monkeypatch.setattr(gpus, "SAMPLE_SECONDS", 0.01)
        monkeypatch.setattr(holders, "APART_SECONDS", 0.01)

    def _take(self, _: float) -> gpus.Sample:
        held = self._lists[min(self.taken, len(self._lists) - 1)]
        self.taken += 1
        used = sum(held.values()) if self._used is None else self._used
        rows = f"0, {UUID}, NVIDIA H200, 143771, {used}, 616, 40, P0\n"
        apps = "".join(f"{UUID}, {pid}, python, {mib}\n" for pid, mib in held.items())
        return gpus.Sample(gpus.Answer(0, rows, ""), gpus.Answer(0, apps, ""))


@pytest.fixture
def pids(living: Living) -> list[int]:
    return [living.start([SLEEP, "600"]).pid for _ in range(3)]


def told(found: dict[str, Any]) -> list[tuple[int, bool]]:
    return [(each["pid"], each["is_ours"]) for each in found["holders"]]


def test_a_process_that_the_server_starts_during_the_look_is_its_own(
    monkeypatch: pytest.MonkeyPatch, pids: list[int]
) -> None:
    look = Looks(monkeypatch, dict.fromkeys(pids[:2], 2000))
    found = facts.holder_facts([UUID], {}, lambda: pids[:1] if look.taken >= holders.LOOKS else [], ())
    assert told(found) == [(pids[0], True), (pids[1], False)]


def test_a_stranger_counts_when_it_stays(monkeypatch: pytest.MonkeyPatch, pids: list[int]) -> None:
    ours, stranger, late = pids
    look = Looks(monkeypatch, {ours: 9000}, {ours: 9000, stranger: 2000})
    assert told(facts.holder_facts([UUID], {}, lambda: [ours], ())) == [(ours, True)]
    assert look.taken == 1  # nobody else is there: nothing to look at again
    found = facts.holder_facts([UUID], {}, lambda: [ours], ())
    assert told(found) == sorted([(ours, True), (stranger, False)])
    assert look.taken == 1 + holders.LOOKS
    assert str(stranger) in found["reason"]

    Looks(monkeypatch, {ours: 9000, stranger: 2000}, {ours: 9000, late: 2000}, {ours: 9000})
    found = facts.holder_facts([UUID], {}, lambda: [ours], ())
    assert told(found) == [(ours, True)]
    assert (found["word"], found["reason"]) == (gpus.HELD, f"held by pid {ours} (python)")


def test_a_stranger_that_ends_when_it_was_seen_is_nobody(monkeypatch: pytest.MonkeyPatch, pids: list[int]) -> None:
    ours, stranger, _ = pids
    Looks(monkeypatch, *[{ours: 9000, stranger: 2000}] * holders.LOOKS, {ours: 9000})
    seen = processes.is_pid_alive
    answers = iter([True] * 2 * (holders.LOOKS - 1) + [True])  # judged and described, and when last described gone
    monkeypatch.setattr(processes, "is_pid_alive", lambda pid: next(answers, False) if pid == stranger else seen(pid))
    found = facts.holder_facts([UUID], {}, lambda: [ours], ())
    assert told(found) == [(ours, True)]
    assert str(stranger) not in found["reason"]


def test_strangers_of_whom_one_is_always_there_count(monkeypatch: pytest.MonkeyPatch, pids: list[int]) -> None:
    monkeypatch.setattr(gpus, "TEARDOWN_SECONDS", 0.1)
    Looks(monkeypatch, *[{pid: 2000} for pid in pids] * 100)
    [(pid, is_ours)] = told(facts.holder_facts([UUID], {}, list, ()))
    assert pid in pids
    assert not is_ours


def test_a_stranger_that_this_user_may_not_see_bears_the_name_that_nvidia_smi_gives(
    monkeypatch: pytest.MonkeyPatch, pids: list[int]
) -> None:
    Looks(monkeypatch, {pids[0]: 2000})
    monkeypatch.setattr(processes, "read_process", lambda pid: None)  # hidepid
    [found] = facts.holder_facts([UUID], {}, list, ())["holders"]
    assert found == {"pid": pids[0], "title": "python", "user": "", "is_ours": False}


def test_memory_beside_the_holders_is_told_when_it_stays(monkeypatch: pytest.MonkeyPatch, pids: list[int]) -> None:
    ours = pids[0]
    Looks(monkeypatch, {ours: 9000}, used=9016)
    assert facts.holder_facts([UUID], {}, lambda: [ours], ())["unaccounted"] == ""
    monkeypatch.setattr(gpus, "TEARDOWN_SECONDS", 0.1)
    look = Looks(monkeypatch, {ours: 9000}, used=80000)
    found = facts.holder_facts([UUID], {}, lambda: [ours], ())
    assert found["unaccounted"] == "GPU 0 uses 80000 MiB, of which its processes hold 9000"
    assert look.taken > 1
