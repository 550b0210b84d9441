"""The node below the server: room, limits, memory, clock, and what a logout takes away.

testinfra tells of them all; the node's own program names the places whose room matters, the server's main process, and
how logind is set where its bus does not say.
"""

from __future__ import annotations

import re

import pytest

from lamplighter.run.checks import ask_tool, asked, text_of

GIB = 1 << 30
SHM = "/dev/shm"  # noqa: S108 - a name of the node's


@asked
def room(host, facts):
    """The free bytes, the inodes and the free inodes of each place that a server writes to or reads from."""
    places = [path for path, found in facts["space"].items() if not found["error"]]
    where = [facts["space"][path]["at"] for path in places]
    words = " ".join(["%s"] * len(where))
    told = ask_tool(host, f"stat -f -c '%%a %%S %%c %%d' -- {words}", *where).splitlines() if where else []
    cells = [[int(cell) for cell in line.split()] for line in told]
    return {path: (free * size, inodes, left) for path, (free, size, inodes, left) in zip(places, cells, strict=True)}


@asked
def memory(host):
    """The node's memory, of which the kernel tells in bytes, and its huge pages, in pages."""
    text = text_of(host.file("/proc/meminfo")) or ""
    lines = re.findall(r"^(\w+):\s+(\d+)( kB)?$", text, re.MULTILINE)
    return {name: int(value) * (1024 if unit else 1) for name, value, unit in lines}


@asked
def process_limits(host, server):
    """The soft limits of the server's main process, None for unlimited; {} where they cannot be read."""
    told = text_of(host.file(f"/proc/{server.pid}/limits")) if server.pid else None
    lines = re.findall(r"^Max (.+?)\s{2,}(\S+)\s", told or "", re.MULTILINE)
    return {name: None if value == "unlimited" else float(value) for name, value in lines}


@asked
def lingers(host, facts):
    """Whether systemd keeps what this user runs when nobody is logged in."""
    return host.file(f"/var/lib/systemd/linger/{facts['host']['user']}").exists


@asked
def synchronised(host):
    """What timedatectl says of the clock."""
    return ask_tool(host, "timedatectl show -p NTPSynchronized --value").strip()


def test_shm_has_room(room, facts, limits, evidence):
    """Is there room in /dev/shm?"""
    if SHM not in room:
        pytest.skip(f"it cannot be looked at: {facts['space'][SHM]['error']}")
    free, wanted = room[SHM][0] / GIB, limits["shm_free_gib"]
    assert free >= wanted, f"{free:.1f} GiB free, at least {wanted} are wanted"
    evidence(f"{free:.1f} GiB free")


def test_disks_have_room(room, facts, limits, evidence):
    """Is there room where the model, caches and logs lie?"""
    seen = []
    for path, (size, inodes, left) in room.items():
        if path == SHM:
            continue
        place, free, wanted = facts["space"][path]["at"], size / GIB, limits["disk_free_gib"]
        assert free >= wanted, f"{place}: {free:.1f} GiB free, at least {wanted} are wanted"
        if inodes:
            share, least = 100 * left / inodes, limits["inodes_free_percent"]
            assert share >= least, f"{place}: {share:.1f} % of the inodes free, at least {least} are wanted"
        seen.append(free)
    if not seen:
        pytest.skip("no file system could be looked at")
    evidence(f"{min(seen):.1f} GiB free at least")


@pytest.mark.warning
def test_limits_of_the_server_are_high(process_limits, server, limits, evidence):
    """May the server lock memory and open files as it needs?"""
    found = process_limits
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
def test_memory_is_available(memory, limits, evidence):
    """Is there memory left on the node?"""
    free = memory.get("MemAvailable")
    if free is None:
        pytest.skip("/proc/meminfo does not say")
    wanted = limits["memory_available_gib"]
    assert free / GIB >= wanted, f"{free / GIB:.1f} GiB available, at least {wanted} are wanted"
    evidence(f"{free / GIB:.1f} GiB")


@pytest.mark.warning
def test_hugepages_are_not_set_aside(memory, limits, evidence):
    """Is little memory set aside as huge pages that nobody uses?"""
    free = memory.get("HugePages_Free")
    if free is None:
        pytest.skip("the kernel has no huge pages")
    most = limits["hugepages_unused"]
    assert free <= most, f"{free} huge pages are set aside and unused, at most {most} are wanted"
    evidence(f"{free} unused")


@pytest.mark.warning
def test_clock_is_synchronised(synchronised, evidence):
    """Is the node's clock synchronised?"""
    if synchronised not in ("yes", "no"):
        pytest.skip(f"timedatectl says {synchronised!r}")
    assert synchronised == "yes", "NTPSynchronized is no"
    evidence("NTPSynchronized is yes")


@pytest.mark.warning
def test_logout_takes_nothing_away(lingers, facts, evidence):
    """Do the server and its shared memory survive the logout of their user?"""
    known, uid = facts["logind"], facts["host"]["uid"]
    if not known:
        pytest.skip("no logind: PID 1 is not systemd")
    if uid == 0:
        evidence("root is spared")
        return
    if lingers:
        evidence(f"{facts['host']['user']} lingers")
        return
    if known["RemoveIPC"] is None:
        pytest.skip("logind does not answer")
    on = [name for name in ("RemoveIPC", "KillUserProcesses") if known[name] == "b true"]
    if "RemoveIPC" in on and uid < 1000:  # logind spares the segments of system users
        on.remove("RemoveIPC")
    assert not on, f"{' and '.join(on)} is on and {facts['host']['user']} does not linger: loginctl enable-linger"
    evidence("RemoveIPC and KillUserProcesses are off")
