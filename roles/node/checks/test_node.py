"""The node below the server: room, limits, memory, clock, and what a logout takes away."""

from __future__ import annotations

import pytest

from lamplighter.run.checks import ask_tool

GIB = 1 << 30


def test_shm_has_room(facts, limits, evidence):
    """Is there room in /dev/shm?"""
    shm = facts["space"]["/dev/shm"]  # noqa: S108 - a name of the node's
    if shm["error"]:
        pytest.skip(f"it cannot be looked at: {shm['error']}")
    free, wanted = shm["free"] / GIB, limits["shm_free_gib"]
    assert free >= wanted, f"{free:.1f} GiB free, at least {wanted} are wanted"
    evidence(f"{free:.1f} GiB free")


def test_disks_have_room(facts, limits, evidence):
    """Is there room where the model, caches and logs lie?"""
    seen = []
    for path, found in facts["space"].items():
        if path == "/dev/shm" or found["error"]:  # noqa: S108
            continue
        free, wanted = found["free"] / GIB, limits["disk_free_gib"]
        assert free >= wanted, f"{found['at']}: {free:.1f} GiB free, at least {wanted} are wanted"
        if found["inodes"]:
            share = 100 * found["free_inodes"] / found["inodes"]
            least = limits["inodes_free_percent"]
            assert share >= least, f"{found['at']}: {share:.1f} % of the inodes free, at least {least} are wanted"
        seen.append(free)
    if not seen:
        pytest.skip("no file system could be looked at")
    evidence(f"{min(seen):.1f} GiB free at least")


@pytest.mark.warning
def test_limits_of_the_server_are_high(server, facts, limits, evidence):
    """May the server lock memory and open files as it needs?"""
    found = facts["limits"]
    if not found:
        pytest.skip("the server does not run, or its limits may not be read")
    memory, opened = found.get("locked memory"), found.get("open files")
    if server.gpus:  # without any, nothing is pinned for a device
        wanted = limits["locked_memory_gib"]
        said = "" if memory is None else f"locked memory is limited to {memory / 1024:.0f} KiB"
        assert memory is None or memory >= wanted * GIB, f"{said}, unlimited (at least {wanted} GiB) is wanted"
    wanted = limits["open_files"]
    assert opened is None or opened >= wanted, f"{opened:.0f} open files, at least {wanted} are wanted"
    shown = ["unlimited" if value is None else f"{value:.0f}" for value in (memory, opened)]
    evidence(f"locked memory {shown[0]}, open files {shown[1]}")


@pytest.mark.warning
def test_memory_is_available(facts, limits, evidence):
    """Is there memory left on the node?"""
    free = facts["memory"].get("MemAvailable")
    if free is None:
        pytest.skip("/proc/meminfo does not say")
    wanted = limits["memory_available_gib"]
    assert free / GIB >= wanted, f"{free / GIB:.1f} GiB available, at least {wanted} are wanted"
    evidence(f"{free / GIB:.1f} GiB")


@pytest.mark.warning
def test_hugepages_are_not_set_aside(facts, limits, evidence):
    """Is little memory set aside as huge pages that nobody uses?"""
    free = facts["memory"].get("HugePages_Free")
    if free is None:
        pytest.skip("the kernel has no huge pages")
    most = limits["hugepages_unused"]
    assert free <= most, f"{free} huge pages are set aside and unused, at most {most} are wanted"
    evidence(f"{free} unused")


@pytest.mark.warning
def test_clock_is_synchronised(host, evidence):
    """Is the node's clock synchronised?"""
    said = ask_tool(host, "timedatectl show -p NTPSynchronized --value").strip()
    if said not in ("yes", "no"):
        pytest.skip(f"timedatectl says {said!r}")
    assert said == "yes", "NTPSynchronized is no"
    evidence("NTPSynchronized is yes")


@pytest.mark.warning
def test_logout_takes_nothing_away(facts, evidence):
    """Do the server and its shared memory survive the logout of their user?"""
    known, uid = facts["logind"], facts["host"]["uid"]
    if not known:
        pytest.skip("no logind: PID 1 is not systemd")
    if uid == 0:
        evidence("root is spared")
        return
    if known["lingering"]:
        evidence(f"{facts['host']['user']} lingers")
        return
    if known["RemoveIPC"] is None:
        pytest.skip("logind does not answer")
    on = [name for name in ("RemoveIPC", "KillUserProcesses") if known[name] == "b true"]
    if "RemoveIPC" in on and uid < 1000:  # logind spares the segments of system users
        on.remove("RemoveIPC")
    assert not on, f"{' and '.join(on)} is on and {facts['host']['user']} does not linger: loginctl enable-linger"
    evidence("RemoveIPC and KillUserProcesses are off")
