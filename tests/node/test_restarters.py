"""Who would bring a killed process back, and who of them may be stopped: fake cgroups, a stand-in for docker."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import yaml

from lamplighter.node.keeper import restarters, systemd
from lamplighter.node.keeper.ownership import FOREIGN, LISTED, OURS, STALE, Claim
from lamplighter.node.keeper.parents import Programs
from lamplighter.node.keeper.restarters import Restarter
from lamplighter.node.system import processes
from lamplighter.node.system.processes import Container, Identity, Process, Unit
from tests.node.living import PROJECT, Living

PROGRAMS = Programs.of({"programs": yaml.safe_load((PROJECT / "roles/node/programs.yml").read_text())})

ID = "4b7c0f5ab3d0a1d5f6c1f7f5b3a0c1d2e3f405162738495a6b7c8d9eafb0c1d2"
DOCKER = f"0::/system.slice/docker-{ID}.scope\n"
CGROUPFS = f"0::/docker/{ID}\n"
PODMAN = f"0::/machine.slice/libpod-{ID}.scope/container\n"
QUADLET = f"0::/system.slice/llm.service/libpod-payload-{ID}\n"
ROOTLESS = f"0::/user.slice/user-1001.slice/user@1001.service/user.slice/libpod-{ID}.scope/container\n"
DOCKERS, ROOTLESS_DOCKER = Container(ID, "docker"), Container(ID, "docker", uid=1001)
CONMON = None  # podman's watcher of a container is outside of it, and its scope restarts nothing
POD = f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-{ID}.scope\n"

#: What docker and podman print; every call is written down, with where its runtime is to be found.
STAND_IN = """#!/bin/sh
echo "${{XDG_RUNTIME_DIR-}} $@" >>{calls}
case $1 in
    inspect)
        case ${{0##*/}} in
            docker) echo "10 always /kimi" ;;
            podman) echo "10  kimi" ;;
        esac ;;
    stop | start)
        [ -e {broken} ] && {{ echo "Error response from daemon: cannot stop container" >&2; exit 1; }}
        echo "$2" ;;
esac
"""


def process(
    pid: int, cgroup: str, *, ppid: int = 1, comm: str = "python3", title: str = "", exe: str | None = None
) -> Process:
    identity = Identity(processes.boot_id(), pid, 1000 + pid)
    return Process(identity, ppid, pid, pid, "S", os.geteuid(), comm, (title or comm,), cgroup, exe)


def claims(*found: Process, kind: str = STALE) -> list[Claim]:
    return [Claim(each, kind, "holds one of our GPUs") for each in found]


def find(stoppable: list[Claim], *others: Process, listed: tuple[str, ...] = ()) -> list[Restarter]:
    table = {each.pid: each for each in (*(claim.process for claim in stoppable), *others)}
    return restarters.find(stoppable, table, [Unit("lamplighter-kimi.service", None)], listed, PROGRAMS)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with `docker` and `podman`; their calls are in the file `calls`, and `broken` makes them fail."""
    for name in ("docker", "podman"):
        program = tmp_path / name
        program.write_text(STAND_IN.format(calls=tmp_path / "calls", broken=tmp_path / "broken"))
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """What systemd says of its units."""
    known: dict[str, dict[str, str]] = {}
    monkeypatch.setattr(systemd.Manager, "show", lambda self, unit, *names: known.get(unit, {}))
    monkeypatch.setattr(systemd.Manager, "may_be_asked", lambda self: self.uid is None)
    return known


def no_word(_: str) -> None:
    pass


# ------------------------------------------------------------------------------------------------------------ places


@pytest.mark.parametrize(
    ("cgroup", "place"),
    [
        (DOCKER, Container(ID, "docker")),
        (CGROUPFS, Container(ID, "docker")),
        (PODMAN, Container(ID, "podman")),
        (QUADLET, Unit("llm.service", None)),  # the unit starts the container again
        (POD, Container(ID, "containerd", is_pod=True)),
        (f"0::/kubepods/besteffort/pod1/{ID}\n", Container(ID, "", is_pod=True)),
        (f"0::/docker/{ID}/kubelet/kubepods/pod1/{ID}\n", Container(ID, "", is_pod=True)),
        (f"0::/kubepods.slice/kubepods-pod1.slice/docker-{ID}.scope\n", Container(ID, "docker", is_pod=True)),
        (f"12:devices:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/system.slice/containerd.service\n", DOCKERS),
        (f"0::/user.slice/user-1001.slice/session-3.scope/user.slice/docker-{ID}.scope\n", ROOTLESS_DOCKER),
        (ROOTLESS, Container(ID, "podman", uid=1001)),
        (f"0::/user.slice/user-1001.slice/user@1001.service/user.slice/libpod-conmon-{ID}.scope\n", CONMON),
        ("0::/kubepods.slice/kubepods-pod1.slice\n", None),
        (f"0::/system.slice/k3s.service/kubepods/pod1/{ID}\n", Container(ID, "", is_pod=True)),
        ("0::/system.slice/docker.service\n", None),  # its own processes are no container's
        ("0::/system.slice/llm.service\n", Unit("llm.service", None)),
        (
            "0::/user.slice/user-1001.slice/user@1001.service/app.slice/llm.service\n",
            Unit("llm.service", 1001),
        ),
        ("0::/user.slice/user-0.slice/session-7.scope\n", None),
        ("0::/system.slice/lamplighter-kimi-20260101T000000Z-abcdef-new.scope\n", None),
        ("0::/\n", None),
    ],
)
def test_places(cgroup: str, place: Unit | Container | None) -> None:
    assert restarters.place_of(process(10, cgroup)) == place


# ------------------------------------------------------------------------------------------------------------- units


def test_a_unit_whose_main_process_will_be_stopped_is_stopped(units: dict[str, dict[str, str]]) -> None:
    units["llm.service"] = {"MainPID": "10", "UnitFileState": "enabled"}
    cgroup = "0::/system.slice/llm.service\n"
    (found,) = find(claims(process(10, cgroup), process(11, cgroup, ppid=10)))
    assert found.may_be_stopped
    assert found.is_enabled
    assert found.pids == (10, 11)


def test_our_own_unit_is_no_restarter(units: dict[str, dict[str, str]]) -> None:
    assert find(claims(process(10, "0::/system.slice/lamplighter-kimi.service\n"), kind=OURS)) == []


def test_a_wrapper_stands_for_the_server(units: dict[str, dict[str, str]]) -> None:
    units["llm.service"] = {"MainPID": "10"}
    cgroup = "0::/system.slice/llm.service\n"
    shell, server = process(10, cgroup, comm="bash"), process(11, cgroup, ppid=10)
    (found,) = find(claims(server), shell)
    assert found.may_be_stopped
    (found,) = find(claims(server), shell, process(12, cgroup, ppid=10, comm="trainer"))
    assert not found.may_be_stopped  # the wrapper has other work too
    (found,) = find(claims(server), shell, process(12, cgroup, ppid=10, comm="tee"))
    assert found.may_be_stopped


def test_a_script_without_exec_stands_for_the_server_it_runs(units: dict[str, dict[str, str]]) -> None:
    """The kernel names a script's process after the script."""
    units["llm.service"] = {"MainPID": "10"}
    cgroup = "0::/system.slice/llm.service\n"
    script = process(10, cgroup, comm="start-llm.sh", exe="/usr/bin/bash")
    server, monitor = process(11, cgroup, ppid=10), process(12, cgroup, ppid=10, comm="watch.sh", exe="/usr/bin/bash")
    (found,) = find(claims(server), script)
    assert found.may_be_stopped
    (found,) = find(claims(server), script, monitor)
    assert not found.may_be_stopped


@pytest.mark.parametrize(("comm", "name"), [("cron", "cron.service"), ("jupyter-lab", "notebook.service")])
def test_a_daemon_that_only_started_it_is_left_unless_it_is_listed(
    units: dict[str, dict[str, str]], comm: str, name: str
) -> None:
    units[name] = {"MainPID": "10"}
    cgroup = f"0::/system.slice/{name}\n"
    daemon, server = process(10, cgroup, comm=comm), process(11, cgroup, ppid=10)
    (found,) = find(claims(server), daemon)
    assert not found.may_be_stopped
    assert f"main process is '{comm}' (pid 10)" in str(found)
    assert name.partition(".")[0] in found.hint
    (found,) = find(claims(server), daemon, listed=(name,))
    assert found.may_be_stopped


def test_what_only_root_may_stop_is_named(units: dict[str, dict[str, str]]) -> None:
    units["llm.service"] = {"MainPID": "10"}
    cgroup = "0::/user.slice/user-1001.slice/user@1001.service/app.slice/llm.service\n"
    (found,) = find(claims(process(10, cgroup)))
    assert found.obstacle == "only root may stop it"
    assert found.hint


def test_a_unit_that_this_very_run_lives_in_is_left(units: dict[str, dict[str, str]]) -> None:
    units["llm.service"] = {"MainPID": "10"}
    cgroup = "0::/system.slice/llm.service\n"
    (found,) = find(claims(process(10, cgroup)), process(os.getpid(), cgroup), listed=("llm",))
    assert found.obstacle == "this very run lives in it"


def test_a_foreign_process_brings_no_unit_into_danger(units: dict[str, dict[str, str]]) -> None:
    assert find(claims(process(10, "0::/system.slice/llm.service\n"), kind=FOREIGN)) == []


# -------------------------------------------------------------------------------------------------------- containers


@pytest.mark.parametrize(("cgroup", "tool"), [(DOCKER, "docker"), (PODMAN, "podman")])
def test_a_container_is_stopped_by_its_runtime(docker: Path, cgroup: str, tool: str) -> None:
    init, server = process(10, cgroup, ppid=5, comm="tini"), process(11, cgroup, ppid=10)
    (found,) = find(claims(server), init)
    assert found.may_be_stopped
    assert found.name == f"{tool} container kimi"
    assert restarters.stop(found, 30, no_word) == ""
    assert restarters.start(found) == ""
    assert found.is_enabled == (tool == "docker")  # its policy says always
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    asked = "{{.State.Pid}} {{.HostConfig.RestartPolicy.Name}} {{.Name}}"
    calls = (docker / "calls").read_text().splitlines()
    assert calls == [f"{runtime} {call} {ID}" for call in (f"inspect --format {asked}", "stop -t 30", "start")]
    assert restarters.how_to_disable(found.place) == f"{tool} update --restart=no {ID[:12]}"


def test_a_rootless_container_is_its_users_alone(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = find(claims(process(10, ROOTLESS)))
    assert found.obstacle == f"it is rootless, and known to {processes.user_name(1001)}'s podman alone"
    assert not (docker / "calls").exists()
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    (found,) = find(claims(process(10, ROOTLESS)))
    assert found.may_be_stopped
    assert restarters.stop(found, 30, no_word) == ""
    calls = (docker / "calls").read_text().splitlines()
    assert [call.partition(" ")[0] for call in calls] == ["/run/user/1001"] * 2


def test_a_container_of_kubernetes_is_only_named_though_docker_knows_it(docker: Path) -> None:
    pod = POD.replace("cri-containerd", "docker")
    for listed in ((), (ID[:12],)):
        (found,) = find(claims(process(10, pod)), listed=listed)
        assert not found.may_be_stopped
        assert "Kubernetes" in found.obstacle
    assert not (docker / "calls").exists()


@pytest.mark.parametrize("is_mute", [False, True])
@pytest.mark.parametrize(("cgroup", "tool"), [(DOCKER, "docker"), (PODMAN, "podman")])
def test_a_container_that_may_not_be_asked_about_is_an_obstacle(
    docker: Path, cgroup: str, tool: str, is_mute: bool
) -> None:
    """Whether it starts the server again, nobody tells: refused by the socket, or an answer that is none."""
    refuses = "echo permission denied while trying to connect >&2; exit 1"
    (docker / tool).write_text(f"#!/bin/sh\n{'exit 0' if is_mute else refuses}\n")
    (found,) = find(claims(process(10, cgroup)))
    assert not found.may_be_stopped
    assert f"{tool} may not be asked about it: " in found.obstacle
    assert ("it said ''" in found.obstacle) == is_mute
    assert f"use {tool}, or use become: true" in found.hint


def test_a_container_that_does_not_stop_is_said(docker: Path) -> None:
    (found,) = find(claims(process(10, DOCKER)))
    (docker / "broken").touch()
    assert "cannot stop container" in restarters.stop(found, 1, no_word)


def test_a_server_that_was_started_inside_a_container_of_something_else(docker: Path) -> None:
    """As with `docker exec` into a container whose own process is a notebook; pids begin again at some time."""
    notebook, server = process(10, DOCKER, ppid=5, comm="jupyter-lab"), process(9, DOCKER, ppid=6)
    (found,) = find(claims(server), notebook)
    assert not found.may_be_stopped
    assert " stop " not in (docker / "calls").read_text()


def test_a_pod_comes_back_whatever_we_do(docker: Path) -> None:
    (found,) = find(claims(process(10, POD)))
    assert not found.may_be_stopped
    assert "Kubernetes" in found.obstacle


def test_without_the_runtimes_command_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("docker") is None
    (found,) = find(claims(process(10, DOCKER)))
    assert found.obstacle == "there is no docker command here"
    assert found.name == f"docker container {ID[:12]}"


@pytest.mark.parametrize("listed", ["kimi", ID, ID[:12]])
def test_a_listed_container_makes_its_processes_listed(docker: Path, listed: str) -> None:
    (claim,) = restarters.list_by_place(claims(process(10, DOCKER), kind=FOREIGN), [listed])
    assert claim.kind == LISTED
    assert "listed in stale.kill" in claim.why
    for pid, name in ((10, "other"), (os.getpid(), listed), (os.getppid(), listed)):
        (claim,) = restarters.list_by_place(claims(process(pid, DOCKER), kind=FOREIGN), [name])
        assert claim.kind == FOREIGN


# --------------------------------------------------------------------------------------------------------- newcomers


def test_who_holds_a_gpu_after_the_stop_and_did_not_before(living: Living) -> None:
    old = living.titled("sglang::scheduler")
    importer = living.titled("exporter")
    (stopped,) = claims(dataclasses.replace(process(1, ""), argv=("sglang::scheduler",)))
    assert restarters.newcomers(claims(old), claims(old)) == []
    (found,) = restarters.newcomers(claims(old), claims(old, importer, kind=FOREIGN))
    assert found.process == importer
    assert "CUDA IPC" in restarters.describe_newcomer(found, [stopped], since=-1.0)
    assert "started after the stop" in restarters.describe_newcomer(found, [stopped], since=100.0)
    again = Claim(dataclasses.replace(old, cgroup="0::/system.slice/llm.service\n"), STALE, "holds one of our GPUs")
    said = restarters.describe_newcomer(again, [stopped], since=100.0)
    assert "started again by unit llm.service after the stop" in said
