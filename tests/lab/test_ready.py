"""What a deploy says of a start that fails: every failure the lab can inject, on one node in a box."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import arguments
from lab import node as lab_node
from lamplighter.node.events import Exit
from tests.driver import Driver, free_port
from tests.lab.conftest import Box

CRASHED, LATE = Exit.CRASHED, Exit.NOT_READY

#: What is injected, how the deploy ends, the cause, and the phase (None: whichever it got to).
#: The first request of all may be ours: then the log does not speak of a warm-up yet.
FAILURES: list[tuple[str, Exit, str, str | None]] = [
    ("die:boot", CRASHED, "crashed", "boot"),
    ("die:distributed", CRASHED, "crashed", "distributed"),
    ("die:graphs", CRASHED, "crashed", "graphs"),
    ("die:http", CRASHED, "crashed", None),
    ("die:warmup", CRASHED, "crashed", "http or warmup"),
    ("kill:boot", CRASHED, "killed", "boot"),
    ("kill:weights", CRASHED, "host_oom", "weights"),
    ("kill:warmup", CRASHED, "host_oom", "http or warmup"),
    ("hang:boot", LATE, "stalled", "boot"),
    ("hang:weights", LATE, "stalled", "weights"),
    ("hang:graphs", LATE, "stalled", "graphs"),
    ("hang:http", LATE, "stalled", None),
    ("hang:warmup", LATE, "stalled", None),
    ("mute", LATE, "stalled", None),
    ("vanish:weights", CRASHED, "killed", "weights"),
    ("orphans", CRASHED, "killed", "boot"),
    ("oom", CRASHED, "gpu_oom", None),
    ("oom:graphs", CRASHED, "gpu_oom", "graphs"),
    ("nccl", CRASHED, "nccl_config", "distributed"),
    ("port-in-use", CRASHED, "port_in_use", None),
    ("wrong-model", LATE, "wrong_model", None),
    ("forbid", LATE, "forbidden", None),
    ("reject", LATE, "rejected", None),
    ("bind-v6", LATE, "bound_elsewhere", None),
    ("fork", CRASHED, "launcher_left", "boot"),
]
#: Switches that keep nothing from becoming ready.
HARMLESS = {"slow", "ignore-term", "slow-release", "bind-early", "silent", "wedge"}


def test_every_switch_of_the_lab_is_tried() -> None:
    assert {fault.partition(":")[0] for fault, *_ in FAILURES} | HARMLESS == set(arguments.KINDS)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """One node for all of them: a failed first deploy leaves it as it was."""
    place = tmp_path_factory.mktemp("ready")
    (place / "nodes").mkdir()
    endpoint = lab_node.ensure_up("box", place / "nodes")
    try:
        yield Box(Driver(place / "inventory"), place / "nodes", endpoint, free_port())
    finally:
        lab_node.down("box", place / "nodes")


def failed(box: Box, fault: str, **server: Any) -> tuple[Any, dict[str, Any]]:
    """Deploy with something injected; the finished command and its failure event."""
    box.configure(args={"lab-fail": fault, "tp": 2}, gpus=[0, 1], **server)
    done = box.deploy()
    events = [event for event in done.events if event["event"] == "failure"]
    assert events, done
    return done, events[0]


@pytest.mark.parametrize(("fault", "code", "cause", "phase"), FAILURES, ids=[fault for fault, *_ in FAILURES])
def test_a_failed_start_is_given_its_cause(node: Box, fault: str, code: Exit, cause: str, phase: str | None) -> None:
    # A start that is to die may be silent for long before that, on a machine that many tests share.
    done, failure = failed(node, fault, timeouts={"stall": 12 if cause == "stalled" else 100, "ready": 120})
    assert failure["stage"] == "ready", done
    assert failure["cause"] == cause, failure
    assert phase is None or failure["phase"] in phase.split(" or "), failure
    assert done.code == code, done
    assert failure["hint"], failure
    assert failure["message"], failure
    if cause != "stalled":
        assert failure["evidence"], failure
    else:
        assert "last sign of life" in failure["message"]


def test_a_slow_start_is_no_stall(node: Box) -> None:
    # 20 s of weights with a bar that moves all the time: more than the stall clock allows for silence.
    node.configure(
        args={"lab-fail": "slow:weights", "tp": 2}, gpus=[0, 1], timeouts={"stall": 10}, env={"LAB_SPEED": "2"}
    )
    done = node.deploy()
    assert done.code == Exit.OK, [event for event in done.events if event["event"] == "failure"] or done
    moving = [event for event in done.events if event.get("phase") == "weights" and event.get("percent") is not None]
    assert len({event["percent"] for event in moving}) > 5
    assert any(event.get("gpus") for event in done.events)
    node.configure()
    assert node.run("stop", "--json").code == Exit.OK


def test_the_last_run_is_diagnosed_on_the_node(node: Box) -> None:
    failed(node, "oom")
    found = json.loads(node.run("diagnose", "--json").stdout)["diagnose"]["hosts"]["box"]["servers"]["demo"]
    assert (found["outcome"], found["cause"]) == ("failed", "gpu_oom")
    assert "servers.demo.args.mem-fraction-static" in found["hint"]
    assert found["phases"]
    failed(node, "hang:weights", timeouts={"stall": 12})
    found = json.loads(node.run("diagnose", "--json").stdout)["diagnose"]["hosts"]["box"]["servers"]["demo"]
    assert (found["outcome"], found["phase"], found["cause"]) == ("failed", "weights", "stalled")
    assert "cause: stalled" in node.run("diagnose").stdout


def test_an_api_key_opens_the_server_and_is_in_no_event(node: Box) -> None:
    key = "sk-lamp-4f1c9e77"
    node.configure(args={"api-key": key})
    done = node.deploy()
    assert done.code == Exit.OK, [event for event in done.events if event["event"] == "failure"] or done
    told = json.dumps([event for event in done.events if event["event"] in ("progress", "failure", "warning")])
    assert key not in told
    assert node.run("stop", "--json").code == Exit.OK


@pytest.mark.parametrize("address", ["0.0.0.0", "::1", "::"])
def test_any_address_to_listen_on(node: Box, address: str) -> None:
    if ":" in address and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    listening = {"engine": "demo", "model": "demo-model", "port": node.port, "gpus": "all", "env": {"LAB_SPEED": "25"}}
    node.configure(host={"servers": {"demo": {**listening, "host": address}}})
    done = node.deploy()
    assert done.code == Exit.OK, [event for event in done.events if event["event"] == "failure"] or done
    assert node.run("stop", "--json").code == Exit.OK


def test_a_shrunk_kv_pool_is_said_of_a_ready_server(node: Box) -> None:
    node.configure()
    assert node.deploy().code == Exit.OK
    assert node.run("stop", "--json").code == Exit.OK
    good = [path for path in (node.state / "runs").glob("*/events.jsonl") if '"measures"' in path.read_text()]
    assert good
    for path in good:  # as if the pool had been ten times as large
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            for name in line.get("measures") or {}:
                line["measures"][name] *= 10
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = node.deploy()
    assert done.code == Exit.OK, [event for event in done.events if event["event"] == "failure"] or done
    said = [event["message"] for event in done.events if event["event"] == "warning"]
    assert any("kv_tokens is" in each for each in said), said
    estimates = [event["eta"] for event in done.events if event.get("eta")]
    assert estimates
    assert node.run("stop", "--json").code == Exit.OK
