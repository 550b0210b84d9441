"""The park itself: what the tests against nodes rely on is true of the nodes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.leaks import NAMESPACES, link
from tests.nodes.fixtures import MakeNode
from tests.nodes.park import PROJECT, Node, NodePark, NodeTrouble


def test_a_node_is_reached_with_openssh_from_the_hub_only(park: NodePark, node: Node) -> None:
    assert park.ssh(node, "hostname; id -un").stdout == "gpu1\nroot\n"
    assert park.ssh(node, "id -un; pwd", user="ops").stdout == "ops\n/home/ops\n"
    outside = ["ssh", "-F", park.ssh_config, "-o", "ConnectTimeout=1", "gpu1", "true"]
    assert subprocess.run(outside, capture_output=True, check=False).returncode == 255


def test_a_node_has_no_way_out(node: Node) -> None:
    assert node.sh("ip route show default") == ""


def test_each_node_has_its_own_processes_files_and_shared_memory(park: NodePark, make_node: MakeNode) -> None:
    one, two = make_node("gpu1"), make_node("gpu2")
    one.write("/etc/only-here", "1")
    one.write("/dev/shm/only-here", "1")
    one.write("/tmp/only-here", "1")
    assert two.sh("ls /etc/only-here /dev/shm/only-here /tmp/only-here 2>/dev/null; true") == ""
    assert not Path("/etc/only-here").exists()
    assert max(one.processes()) < 100
    assert one.read("/proc/sys/kernel/random/boot_id") != two.read("/proc/sys/kernel/random/boot_id")


def test_a_node_sees_the_checkout_and_cannot_write_to_it(node: Node) -> None:
    assert node.read(f"{PROJECT}/pyproject.toml") == (PROJECT / "pyproject.toml").read_text()
    assert "Read-only file system" in node.exec(["touch", f"{PROJECT}/x"], check=False).stderr
    assert node.exec([sys.executable, "-c", "import paramiko; print(1)"]).stdout == "1\n"


def test_a_node_has_gpus(node: Node) -> None:
    assert node.exec(["nvidia-smi", "-L"]).stdout.count("NVIDIA H200") == 8
    assert "NVIDIA H200" in node.exec(["nvidia-smi", "-L"], user="ops").stdout


def test_a_host_key_that_is_not_the_nodes_is_refused(park: NodePark, node: Node) -> None:
    wrong = node.public_key
    park.forget("gpu1")
    fresh = park.node("gpu1")
    assert fresh.public_key != wrong
    park.known_hosts.write_text(f"gpu1,{fresh.address} {wrong}\n")
    answer = park.ssh(fresh, "true")
    assert (answer.returncode, "IDENTIFICATION HAS CHANGED" in answer.stderr) == (255, True)


def test_a_cut_link_stays_silent_and_a_healed_one_carries_on(park: NodePark, node: Node) -> None:
    words = ["ssh", "-F", park.ssh_config, "gpu1", "read line; echo got $line"]
    session = park.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        wait_until(lambda: "read line" in node.sh("ps -e -o args="))
        node.cut()
        assert session.stdin is not None
        session.stdin.write("through\n")
        session.stdin.flush()
        assert park.ssh(node, "true", options=["-o", "ConnectTimeout=1"]).returncode == 255
        assert session.poll() is None
        node.heal()
        assert session.communicate(timeout=120)[0] == "got through\n"
    finally:
        session.kill()
        session.communicate()


def test_a_delayed_link_takes_its_time_and_keeps_connections(park: NodePark, node: Node) -> None:
    words = ["ssh", "-F", park.ssh_config, "gpu1", "while read line; do echo $line; done"]
    session = park.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert session.stdin is not None
        assert session.stdout is not None

        def round_trip() -> float:
            start = time.monotonic()
            session.stdin.write("x\n")
            session.stdin.flush()
            assert session.stdout.readline() == "x\n"
            return time.monotonic() - start

        round_trip()
        node.delay(50)
        assert min(round_trip() for _ in range(3)) >= 0.1
        wait_until(lambda: round_trip() < 0.2)
        big = park.run(["ssh", "-F", park.ssh_config, "gpu1", "head -c 1000000 /dev/zero"])
        assert len(big.stdout) > 1_000_000 - 1
        node.delay(0)
        wait_until(lambda: round_trip() < 0.1)  # less than the delay allowed
    finally:
        session.stdin.close()
        session.kill()
        session.wait()
        session.stdout.close()


def test_a_reboot_keeps_the_disk_and_loses_the_memory(park: NodePark, node: Node) -> None:
    node.write("/var/lib/kept", "1")
    node.write("/home/ops/kept", "1")
    node.write("/dev/shm/lost", "1")
    park.ssh(node, "nohup sleep 1000 >/dev/null 2>&1 </dev/null &")
    wait_until(lambda: "sleep 1000" in node.processes().values())
    before = node.read("/proc/sys/kernel/random/boot_id")
    node.reboot()
    after = node.read("/proc/sys/kernel/random/boot_id")
    assert before != after
    assert node.sh("cat /var/lib/kept /home/ops/kept; ls /dev/shm") == "11"
    assert "sleep 1000" not in node.processes().values()
    assert park.ssh(node, "true").returncode == 0


def test_pid_1_of_a_node_reaps(node: Node) -> None:
    node.sh("(sleep 0.01 &) ; (true &)")
    wait_until(lambda: "Z" not in node.sh("ps -e -o stat="))


def test_sshd_can_be_stopped_and_started(park: NodePark, node: Node) -> None:
    session = park.popen(["ssh", "-F", park.ssh_config, "gpu1", "exec sleep 1000"], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: "sleep 1000" in node.sh("ps -e -o args="))
        node.stop_sshd()
        assert "Connection refused" in park.ssh(node, "true").stderr
        assert session.poll() is None
        node.kill_sessions()
        assert session.wait(60) == 255
        node.start_sshd()
        assert park.ssh(node, "true").returncode == 0
    finally:
        session.kill()
        session.wait()


def test_a_full_disk_and_a_read_only_root(park: NodePark, make_node: MakeNode) -> None:
    node = make_node(disk_mib=32)
    node.fill_disk()
    answer = park.ssh(node, "head -c 100000 /dev/zero >/var/lib/more")
    assert "No space left on device" in answer.stderr
    assert node.sh("echo 1 >/run/still; echo 2 >/dev/shm/still; echo done") == "done\n"
    node.free_disk()
    assert park.ssh(node, "head -c 100000 /dev/zero >/var/lib/more").returncode == 0
    node.read_only()
    assert "Read-only file system" in park.ssh(node, "touch /var/lib/x").stderr
    node.read_only(False)
    assert park.ssh(node, "touch /var/lib/x").returncode == 0


@pytest.mark.skipif(shutil.which("sudo") is None, reason="needs sudo")
def test_ops_may_use_sudo_when_allowed(park: NodePark, node: Node) -> None:
    assert "a password is required" in park.ssh(node, "sudo -n id -un", user="ops").stderr
    node.allow_sudo()
    assert park.ssh(node, "sudo -n id -un", user="ops").stdout == "root\n"
    node.forbid_sudo()
    assert park.ssh(node, "sudo -n id -un", user="ops").returncode == 1


def test_an_inventory_and_a_home_for_the_control_side(park: NodePark, node: Node, tmp_path: Path) -> None:
    inventory = park.write_inventory(tmp_path / "inventory", {"gpu1": {"become": True}}, {"root": "/srv/x"})
    seen = park.run(
        ["sh", "-c", 'cat "$LAMPLIGHTER_INVENTORY"/hosts.yml; cat "$HOME/.ssh/known_hosts"'], inventory=inventory
    )
    assert f"ansible_host: {node.address}" in seen.stdout
    assert node.public_key in seen.stdout
    assert (inventory / "group_vars/all.yml").read_text() == "root: /srv/x\n"


def test_killing_pid_1_ends_everything_on_the_node(park: NodePark, node: Node) -> None:
    node.sh("exec >/dev/null 2>&1 </dev/null; setsid sleep 1000 & setsid sh -c 'trap \"\" TERM; sleep 1000' &")
    inside = os.readlink(f"/proc/{node.pid}/ns/pid")
    wait_until(lambda: len(processes_in(inside)) >= 4)
    os.kill(node.pid, signal.SIGKILL)
    wait_until(lambda: not processes_in(inside))
    node.reboot()


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_session_that_is_broken_off(
    park: NodePark, tmp_path: Path, signal_number: signal.Signals
) -> None:
    script = textwrap.dedent(
        """
        import os, signal, sys, time
        from pathlib import Path
        from tests.nodes.park import NodePark
        def interrupt(*_): raise KeyboardInterrupt
        signal.signal(signal.SIGTERM, interrupt)
        with NodePark(Path(sys.argv[1])) as park:
            node = park.node("gpu1")
            node.delay(1)
            node.sh("setsid sleep 1000 >/dev/null 2>&1 </dev/null &")
            print(*(os.readlink(f"/proc/{node.pid}/ns/{kind}") for kind in ("pid", "net", "mnt")), flush=True)
            time.sleep(1000)
        """
    )
    (tmp_path / "park").mkdir()
    session = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path / "park"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=PROJECT,
    )
    try:
        assert session.stdout is not None
        spaces = session.stdout.readline().split()
        assert len(spaces) == 3
        assert processes_in(spaces[0])
        session.send_signal(signal_number)
        session.wait(120)
        wait_until(lambda: not any(processes_in(space) for space in spaces))
    finally:
        session.kill()
        session.communicate()
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_a_node_that_does_not_boot_says_why(park: NodePark, tmp_path: Path) -> None:
    (tmp_path / "park").mkdir()
    with (
        NodePark(tmp_path / "park", visible=[Path("/no/such/place")]) as broken,
        pytest.raises(NodeTrouble, match="/no/such/place"),
    ):
        broken.node("gpu1")


@pytest.mark.systemd
def test_a_systemd_node_runs_units_scopes_and_user_sessions(park: NodePark, systemd_node: Node) -> None:
    node = systemd_node
    assert node.read("/proc/1/comm") == "systemd\n"
    assert park.ssh(node, "systemctl is-active ssh.service").stdout == "active\n"
    assert park.ssh(node, "systemctl --failed --plain --no-legend").stdout == ""
    run = park.ssh(node, "systemd-run --quiet --wait --pipe -p Restart=no sh -c 'cat /proc/self/cgroup'")
    assert "/system.slice/run-" in run.stdout
    scope = park.ssh(node, "systemd-run --quiet --scope --collect --unit=x sh -c 'systemctl is-active x.scope'")
    assert scope.stdout == "active\n"
    assert park.ssh(node, "loginctl list-sessions --no-legend | wc -l", user="ops").stdout.strip() != "0"
    park.ssh(node, "loginctl enable-linger", user="ops")
    user = park.ssh(node, "systemctl --user is-system-running --wait", user="ops")
    assert user.stdout == "running\n", user


@pytest.mark.systemd
def test_a_systemd_node_reboots_and_restarts_its_sshd(park: NodePark, systemd_node: Node) -> None:
    node = systemd_node
    node.write(
        "/etc/systemd/system/kept.service", "[Service]\nExecStart=/bin/sleep 1000\n[Install]\nWantedBy=node.target\n"
    )
    node.exec(["systemctl", "enable", "kept.service"])
    node.reboot()
    wait_until(lambda: node.exec(["systemctl", "is-active", "kept.service"], check=False).stdout == "active\n")
    node.stop_sshd(sessions=True)
    node.start_sshd()
    assert park.ssh(node, "true").returncode == 0


def processes_in(namespace: str) -> list[int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if namespace in {link(f"/proc/{pid}/ns/{kind}") for kind in NAMESPACES}]


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
