"""The reading verbs' answers as text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamplighter.report.tables import check_text, config_text, plan_text, status_text, verify_text


def test_status() -> None:
    kimi = {
        "name": "kimi",
        "state": "serving",
        "release": "3f2a9c81d0aa",
        "pid": 4242,
        "port": 8000,
        "model": "kimi-k2.5-int4",
        "since": 1767323351.0,
        "run": {"id": "r7", "verb": "deploy", "by": "ann@desk", "stage": "prove", "since": 1767326951.0},
        "message": "",
    }
    draft = {"name": "draft", "state": "stopped", "run": None, "message": "never\x1b[2J deployed"}
    text = status_text({"gpu1": {"kimi": kimi, "draft": draft}, "gpu2": {}})
    assert text.splitlines() == [
        "  server      state    model           port  pid   release       since",
        "  gpu1/kimi   serving  kimi-k2.5-int4  8000  4242  3f2a9c81d0aa  2026-01-02 03:09:11 UTC",
        "      deploy at work, at prove, since 2026-01-02 04:09:11 UTC, asked for by ann@desk, run r7",
        "  gpu1/draft  stopped  -               -     -     -             -",
        "      never deployed",
        "  gpu2: no servers",
    ]


def test_check() -> None:
    findings = [
        {"id": "python", "level": "ok", "message": "Python 3.12.3", "evidence": "/opt/sglang/bin/python", "hint": ""},
        {
            "id": "disk",
            "level": "warning",
            "message": "little room",
            "evidence": "3 GiB free",
            "hint": "prune some",
        },
        {"id": "gpus", "level": "error", "message": "GPU 3 is held", "evidence": "pid 77 of bob", "hint": ""},
    ]
    would_stop = [
        {"pid": 4242, "user": "llm", "title": "sglang::scheduler", "why": "recorded by release 3f2a", "action": "stop"},
        {"pid": 77, "user": "bob", "title": "python train.py", "why": "not ours", "action": "leave"},
    ]
    text = check_text({"gpu1": {"kimi": {"findings": findings, "would_stop": would_stop}}})
    assert text.splitlines() == [
        "gpu1/kimi:",
        "  question  answer",
        '  python    ok       Python 3.12.3: "/opt/sglang/bin/python"',
        '  disk      WARNING  little room: "3 GiB free"',
        '  gpus      ERROR    GPU 3 is held: "pid 77 of bob"',
        "  next (disk): prune some",
        "",
        "  process       pid  user  title              why",
        "  would stop   4242  llm   sglang::scheduler  recorded by release 3f2a",
        "  would leave    77  bob   python train.py    not ours",
        "",
        "  1 ok, 1 warning, 1 error",
    ]


def test_verify() -> None:
    checks = [
        {"name": "port is local", "outcome": "passed", "evidence": "", "seconds": 0.2},
        {
            "name": "worker_carries_it",
            "question": "Is it there?",
            "outcome": "failed",
            "evidence": "NCCL_ALGO unset\nin pid 7",
            "seconds": 1.25,
        },
        {"name": "driver", "outcome": "skipped", "evidence": "no GPU", "seconds": None},
    ]
    assert verify_text({"gpu1": {"kimi": {"checks": checks}, "draft": {}}}).splitlines() == [
        "gpu1/kimi:",
        "  question       answer    took  evidence",
        "  port is local  yes      0.2 s",
        "  Is it there?   NO       1.2 s  NCCL_ALGO unset in pid 7 [worker_carries_it]",
        "  driver         skipped         no GPU",
        "",
        "  1 passed, 1 failed, 1 skipped",
        "",
        "gpu1/draft:",
        "  nothing was checked",
        "",
        "  nothing",
    ]


def test_plan_wraps_the_names_of_its_checks() -> None:
    names = [f"test_{word}_as_wanted" for word in ("server", "model", "memory", "ports", "variables", "files", "owner")]
    plan = {"release": "b", "serving": "a", "is_pending": True, "changes": {"restarts": True}, "checks": names}
    lines = plan_text({"gpu1": {"kimi": plan}}).splitlines()
    heading = lines.index("  then 7 checks:")
    assert ", ".join(lines[heading + 1 :]).replace(",,", ",").replace("    ", "") == ", ".join(names)
    assert len(lines) == heading + 3
    assert max(map(len, lines)) <= 100


def test_config() -> None:
    data = {
        "host": "gpu1",
        "root": None,
        "servers": {"kimi": {"port": 8000, "env": {"NCCL_PROTO": {"value": "LL", "mode": "default"}}, "args": {}}},
        "origins": {
            "servers.kimi.port": "inventory/host_vars/gpu1.yml:4",
            "servers.kimi.env.NCCL_PROTO": "inventory/group_vars/pcie_8x.yml:12",
            "servers.kimi": "inventory/group_vars/all.yml:1",
        },
        "lint": [
            {"id": "L1", "level": "warning", "variable": "NCCL_PROTO", "message": "slow", "origin": "a.yml:3"},
        ],
    }
    assert config_text({"gpu1": data}).splitlines() == [
        "gpu1:",
        "  variable                           value    set at",
        "  root                               null",
        "  servers.kimi.port                  8000     inventory/host_vars/gpu1.yml:4",
        "  servers.kimi.env.NCCL_PROTO.value  LL       inventory/group_vars/pcie_8x.yml:12",
        "  servers.kimi.env.NCCL_PROTO.mode   default  inventory/group_vars/pcie_8x.yml:12",
        "  servers.kimi.args                  {}       inventory/group_vars/all.yml:1",
        "  warning: a.yml:3: NCCL_PROTO: slow",
    ]


@pytest.mark.parametrize("view", [status_text, check_text, verify_text, config_text])
def test_no_hosts_is_said(view: Any) -> None:
    assert view({}) == "no hosts"


_odd = st.sampled_from(
    [None, True, 0, 7.5, float("nan"), 10**400, "x\x1b[2J\r\ny", [], {}, [1, {"level": []}], {"id": {}}]
)
_keys = st.sampled_from(
    [
        *("state", "pid", "since", "run", "message", "findings", "would_stop"),
        *("checks", "evidence", "seconds", "origins", "lint"),
    ]
)


@given(st.dictionaries(st.sampled_from(["kimi", "\x1b[2J"]), st.dictionaries(_keys, _odd)))
def test_odd_data_never_raises_nor_reaches_the_terminal(servers: dict[str, dict[str, Any]]) -> None:
    for view in (status_text, check_text, verify_text, config_text):
        text = view({"gpu1": servers})
        assert all(line.isprintable() for line in text.splitlines())
        assert text
