"""The GPUs of the server: all there, whole, ours, unthrottled, and connected. Skipped where a server uses none.

testinfra tells of the bus, the driver, the kernel's log and the links. Of each GPU the node's own program alone tells:
one call of nvidia-smi, which may take seconds, answers for all checks; and whose a process on a GPU is, or whether one
hangs in the kernel, takes several looks.
"""

from __future__ import annotations

import re

import pytest

from lamplighter.run.checks import ask_tool, asked, text_of, together

#: Prints the kernel's messages about GPU errors; 3: there is no message at all, so that nothing can be told.
KERNEL_LOG = (
    'l=$(journalctl -k -b -q --no-pager -o short-iso 2>/dev/null); [ -n "$l" ] || l=$(dmesg 2>/dev/null); '
    '[ -n "$l" ] || exit 3; printf "%s\n" "$l" | grep "NVRM: Xid"; exit 0'
)
ABSENT = ("n/a", "not supported", "")
#: HW slowdown, SW and HW thermal slowdown, power brake: bits of clocks_event_reasons.active.
THROTTLED = {0x8: "HW slowdown", 0x20: "SW thermal", 0x40: "HW thermal", 0x80: "power brake"}


#: facts: ``... Kernel Module  580.159.04  Wed ...``, or ``... Open Kernel Module for x86_64  590.44.01  Release ...``.
DRIVER = re.compile(r"^NVRM version:.*?\s{2,}(\d+(?:\.\d+)+)\s", re.MULTILINE)


def needs_gpus(server):
    """Skip the check of a server that uses none."""
    if not server.gpus:
        pytest.skip("the server uses no GPU")


def uses_several(server):
    """Tell whether there are GPUs between which something can be amiss; skip the check of a server that has one."""
    needs_gpus(server)
    if server.gpu_count == 1:
        pytest.skip("one GPU")
    return server.gpu_count > 1  # none: which they are cannot be told, and `ours` says why


@asked
def on_bus(host, server):
    """How many NVIDIA GPUs the bus has."""
    needs_gpus(server)
    return len(re.findall(r"\[030[02]\]", ask_tool(host, "lspci -Dnnd 10de:")))


@asked
def kernel_module(host, server):
    """The version of the driver that the kernel has loaded; None where it does not say."""
    needs_gpus(server)
    found = DRIVER.search(text_of(host.file("/proc/driver/nvidia/version")) or "")
    return found.group(1) if found else None


@asked
def fabric_manager(host, server, facts):
    """Whether the service of the NVSwitch fabric runs; None without a fabric, or without systemd."""
    needs_gpus(server)
    has_fabric = any(not is_absent(gpu["details"].get("fabric.state", "").strip("[] ")) for gpu in facts["gpus"])
    if not has_fabric or not host.file("/run/systemd/system").is_directory:
        return None
    return host.service("nvidia-fabricmanager").is_running


@asked
def kernel_log(host, server):
    """The kernel's messages about GPU errors; None where there is no message at all."""
    needs_gpus(server)
    done = host.run(KERNEL_LOG)
    return None if done.rc == 3 else done.stdout


@asked
def links(host, server):
    """What nvidia-smi says of the NVLinks."""
    return ask_tool(host, "nvidia-smi nvlink -s") if uses_several(server) else ""


@asked
def peers(host, server):
    """Which GPUs can read each other's memory."""
    return ask_tool(host, "nvidia-smi topo -p2p r") if uses_several(server) else ""


@asked
def iommu(host, server):
    """How many groups the IOMMU has, and how the kernel was booted."""
    if not uses_several(server):
        return 0, ""
    return together(lambda: groups_of(host), lambda: text_of(host.file("/proc/cmdline")) or "")


def groups_of(host):
    groups = host.file("/sys/kernel/iommu_groups")
    return len(groups.listdir()) if groups.exists else 0


@asked
def access_control(host, server):
    """The access control of each port of the bus, as lspci shows it."""
    return re.findall(r"ACSCtl:\s*(.*)", ask_tool(host, "lspci -vvv") if uses_several(server) else "")


@pytest.fixture
def ours(server, facts, request):
    """The GPUs that the server uses. Where they cannot be told, one check of those that are run says why."""
    if not server.gpus:
        pytest.skip("the server uses no GPU")
    uuids, error = facts["wanted"]["uuids"], facts["wanted"]["error"]
    if not uuids:
        if error and any(item.name == test_gpus_are_all_there.__name__ for item in request.session.items):
            pytest.skip("the GPUs of the server cannot be told: see gpus_are_all_there")
        pytest.fail(f"the GPUs of the server cannot be told: {error}")
    return [gpu for gpu in facts["gpus"] if gpu["uuid"] in uuids]


def cells(gpus, field):
    """The cells of one field by GPU; skips where the driver does not know it."""
    found = {gpu["index"]: gpu["details"][field] for gpu in gpus if field in gpu["details"]}
    if not found:
        pytest.skip(f"the driver does not know {field}")
    assert len(found) == len(gpus), f"{field} is not told for every GPU"
    return {index: cell.strip().strip("[]") for index, cell in found.items()}


def is_absent(cell):
    return cell.lower() in ABSENT


def test_gpus_are_all_there(server, facts, evidence):
    """Are all GPUs of the server there?"""
    if not server.gpus:
        pytest.skip("the server uses no GPU")
    assert facts["smi"]["error"] is None, facts["smi"]["error"]
    assert facts["wanted"]["error"] is None, facts["wanted"]["error"]
    recorded, now = facts["release"].get("gpus"), facts["wanted"]["uuids"]
    if recorded is not None:
        gone, new = sorted(set(recorded) - set(now)), sorted(set(now) - set(recorded))
        assert not gone, f"it was started on {len(recorded)} GPUs, and {', '.join(gone)} is gone"
        assert not new, f"it was started on {len(recorded)} GPUs, and {', '.join(new)} is new"
    evidence(f"{len(now)} GPUs")


def test_pci_bus_and_driver_agree(on_bus, facts, evidence):
    """Does the driver see every GPU that is on the bus?"""
    if not on_bus:
        pytest.skip("lspci shows no NVIDIA GPU: a virtual machine or a container that hides the bus")
    assert on_bus == len(facts["gpus"]), f"{on_bus} GPUs on the bus, {len(facts['gpus'])} known to the driver"
    evidence(f"{on_bus} GPUs on the bus")


def test_driver_is_whole(kernel_module, facts, evidence):
    """Are the driver's kernel module and its library of one version?"""
    error = facts["smi"]["error"] or ""
    assert "mismatch" not in error, error
    if kernel_module is None:
        pytest.skip("/proc/driver/nvidia/version is not there")
    libraries = {gpu["details"].get("driver_version", kernel_module) for gpu in facts["gpus"]}
    assert libraries <= {kernel_module}, f"kernel module {kernel_module}, library {', '.join(sorted(libraries))}"
    evidence(f"driver {kernel_module}")


def test_gpus_need_no_recovery(ours, evidence):
    """Does no GPU ask for a reset or a reboot?"""
    found = cells(ours, "gpu_recovery_action")
    wrong = {index: cell for index, cell in found.items() if cell.lower() != "none" and not is_absent(cell)}
    assert not wrong, "; ".join(f"GPU {index} wants {cell}" for index, cell in wrong.items())
    evidence(f"{len(found)} GPUs: None")


def test_gpu_memory_is_accounted_for(ours, facts, evidence):
    """Is all memory used on the GPUs held by processes that are seen?"""
    found = facts["holders"]
    assert found["word"] != "UNKNOWN", f"nvidia-smi is not to be believed: {found['reason']}"
    assert found["word"] != "HELD" or found["holders"], f"memory is held, and no process is seen: {found['reason']}"
    assert not found["unaccounted"], f"some is held by no process that is seen: {found['unaccounted']}"
    used = sum(gpu["used_mib"] or 0 for gpu in ours)
    untold = "" if found["unaccounted"] is not None else "; how much each holds cannot be told"
    evidence(f"{found['word']}: {used} MiB, {len(found['holders'])} holders{untold}")


def test_no_foreign_holder(ours, facts, evidence):
    """Does nobody else use the server's GPUs?"""
    found = facts["holders"]
    strangers = [each for each in [*found["holders"], *found["open"]] if not each["is_ours"]]
    said = dict.fromkeys(f"pid {each['pid']} ({each['user'] or '?'}, {each['title'] or '?'})" for each in strangers)
    assert not strangers, "; ".join(said)
    evidence("all processes seen" if found["complete"] else "as far as this user may look")


def test_fabric_is_ready(ours, fabric_manager, evidence):
    """Is the NVSwitch fabric up?"""
    states, statuses = cells(ours, "fabric.state"), cells(ours, "fabric.status")
    if all(map(is_absent, states.values())):
        pytest.skip("no NVSwitch fabric")
    for index, state in states.items():
        said = f"{state}, {statuses.get(index, '?')}"
        assert said == "Completed, Success", f"GPU {index}: fabric {said}"
    assert fabric_manager is not False, "nvidia-fabricmanager does not run"
    evidence("Completed, Success")


def test_no_remapped_rows(ours, evidence):
    """Is no row of GPU memory waiting to be remapped?"""
    for field, word in (("remapped_rows.failure", "failed"), ("remapped_rows.pending", "pending: reset the GPU")):
        for index, cell in cells(ours, field).items():
            assert cell == "No" or is_absent(cell), f"GPU {index}: row remapping {word} ({cell})"
    evidence(f"{len(ours)} GPUs")


def test_no_uncorrected_memory_errors(ours, evidence):
    """Has no GPU had an uncorrected memory error since its driver was loaded?"""
    for index, cell in cells(ours, "ecc.errors.uncorrected.volatile.total").items():
        assert cell == "0" or is_absent(cell), f"GPU {index}: {cell} uncorrected errors"
    evidence(f"{len(ours)} GPUs: 0")


def test_no_xid(kernel_log, facts, evidence):
    """Has the kernel told of no fatal GPU error since boot?"""
    if kernel_log is None:
        pytest.skip("the kernel's log is empty, or this user may not read it")
    told = [(re.search(r"NVRM: Xid \(.*?\): (\d+)", line), line.strip()) for line in kernel_log.splitlines()]
    fatal = [(facts["fatal_xids"][xid[1]], line) for xid, line in told if xid and xid[1] in facts["fatal_xids"]]
    assert not fatal, f"{len(fatal)} in all, the last ({fatal[-1][0]}): {fatal[-1][1]}"
    evidence("none")


def test_nvidia_smi_is_quick(server, facts, limits, evidence):
    """Does nvidia-smi answer in time?"""
    if not server.gpus:
        pytest.skip("the server uses no GPU")
    took = facts["smi"]["seconds"]
    assert took < limits["nvidia_smi_seconds"], f"two calls took {took:.1f} s"
    evidence(f"{took:.2f} s for two calls")


def test_no_process_is_stuck(facts, evidence):
    """Does no GPU process hang in the kernel?"""
    ours = {each["pid"] for each in facts["processes"]}
    stuck = [each for each in facts["stuck"] if each["pid"] in ours or is_of_driver(each)]
    said = [f"pid {each['pid']} ({each['comm']}) in {each['wchan'] or 'an unknown place'}" for each in stuck]
    assert not stuck, "; ".join(said)
    evidence("none in uninterruptible sleep")


def is_of_driver(process):
    words = f"{process['comm']} {process['title']} {process['wchan']}".lower()
    return any(word in words for word in ("nvidia", "nv_", "uvm_"))


@pytest.mark.warning
def test_persistence_mode_is_on(ours, evidence):
    """Does the driver stay loaded when nobody uses the GPUs?"""
    for index, cell in cells(ours, "persistence_mode").items():
        assert cell == "Enabled" or is_absent(cell), f"GPU {index}: persistence mode {cell}"
    evidence("Enabled")


@pytest.mark.warning
def test_clocks_are_not_throttled(ours, evidence):
    """Does nothing slow the GPUs down?"""
    for index, cell in cells(ours, "clocks_event_reasons.active").items():
        if is_absent(cell):
            continue
        bits = int(cell, 16)
        found = [name for bit, name in THROTTLED.items() if bits & bit]
        assert not found, f"GPU {index}: {', '.join(found)} ({cell})"
    evidence("no slowdown")


@pytest.mark.warning
def test_pcie_width_is_full(ours, evidence):
    """Does every GPU have all its PCIe lanes?"""
    now, most = cells(ours, "pcie.link.width.current"), cells(ours, "pcie.link.width.max")
    for index, cell in now.items():
        assert is_absent(cell) or cell == most.get(index), f"GPU {index}: {cell} of {most.get(index)} lanes"
    evidence(f"x{', x'.join(sorted(set(now.values())))}")


def test_nvlink_is_whole(ours, links, evidence):
    """Are all NVLinks up?"""
    known = re.findall(r"^\s*Link \d+: (.*)$", links, re.MULTILINE)
    down = re.findall(r"^\s*Link (\d+): .*inactive", links, re.MULTILINE | re.IGNORECASE)
    if not known or "all links are inactive" in links.lower():
        pytest.skip("the GPUs have no NVLink")
    assert not down, f"{len(down)} of {len(known)} links are inactive: {', '.join(sorted(set(down), key=int))}"
    evidence(f"{len(known)} links")


def test_gpus_reach_each_other(ours, peers, evidence):
    """Can the server's GPUs read each other's memory?"""
    rows = matrix(peers)
    if not rows:
        pytest.skip("nvidia-smi topo prints no matrix")
    indices = [gpu["index"] for gpu in ours]
    wrong = [
        f"GPU{one}-GPU{two}: {rows[one][two]}"
        for one in indices
        for two in indices
        if one < two and rows.get(one, {}).get(two, "?") != "OK"
    ]
    assert not wrong, "; ".join(wrong[:6])
    evidence(f"{len(indices)} GPUs: OK")


def matrix(text):
    """The table of ``nvidia-smi topo -p2p r``: {row: {column: word}}. facts: colours, tabs and blanks in the cells."""
    rows = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        words = line.split()
        if words and re.fullmatch(r"GPU\d+", words[0]) and not re.fullmatch(r"GPU\d+", (words[1:] or ["GPU0"])[0]):
            rows[int(words[0][3:])] = dict(enumerate(words[1:]))
    return rows


@pytest.mark.warning
def test_acs_is_off(ours, iommu, access_control, evidence):
    """Does PCIe traffic between GPUs take the short way (ACS off, no IOMMU between)?"""
    groups, cmdline = iommu
    assert not groups or "iommu=pt" in cmdline, (
        f"the IOMMU translates for {groups} groups: boot with iommu=pt, or without"
    )
    controls = access_control
    if not controls:
        pytest.skip("lspci shows no ACS control: no root, or a virtual machine")
    on = [control for control in controls if re.search(r"(SrcValid|ReqRedir|CmpltRedir)\+", control)]
    assert not on, f"ACS is on at {len(on)} of {len(controls)} ports"
    evidence(f"off at {len(controls)} ports")


@pytest.mark.warning
def test_gpu_modes_are_as_wanted(server, ours, evidence):
    """Are MIG and compute mode as the server needs them?"""
    uses_mig = any(str(gpu).startswith("MIG-") for gpu in server.gpus) if server.gpus != "all" else False
    for index, cell in cells(ours, "mig.mode.current").items():
        wanted = "Enabled" if uses_mig else "Disabled"
        assert is_absent(cell) or cell == wanted, f"GPU {index}: MIG is {cell}"
    for index, cell in cells(ours, "compute_mode").items():
        assert cell == "Default" or is_absent(cell), f"GPU {index}: compute mode {cell}"
    evidence("MIG as wanted, compute mode Default")
