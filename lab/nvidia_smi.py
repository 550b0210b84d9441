"""Answers like nvidia-smi of driver 580.159 with H200 GPUs, from the ledger of the lab node.

Promise: for every call recorded in tests/recordings/h200 the same columns, separators, units, texts and exit status,
with the memory and the processes that lab.ledger knows. Reads the node's directory, changes nothing but the ledger's
own notes of deaths. Odd states (lost GPU, hang, stale row ...) come from control.json, see lab.control.

Facts: an unknown field or format prints its message on stdout and exits 2, an unknown flag 255, ids that match nothing
6, ids of which one matches 0; CUDA_VISIBLE_DEVICES is ignored; no --format means CSV with header and units; aliases are
printed under their canonical name (`clocks.sm` as `clocks.current.sm`, `used_memory` as `used_gpu_memory`);
process_name is argv[0].

The calls of this module are short-lived processes on the critical path of a deploy: it imports os, sys and time only.
"""

# pathlib would cost 8 ms:
# ruff: noqa: PTH118, PTH119
from __future__ import annotations

import os
import sys
import time

from lab import ledger

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: What used memory shows beyond the processes' own shares, as soon as there is one (6 to 10 MiB recorded).
CONTEXT_MIB = 10
RESERVED_MIB = 616

#: Canonical field -> (unit, value of an idle H200). None: computed, see Board.cell. Every value is a recorded one.
GPU_FIELDS: dict[str, tuple[str, str | None]] = {
    "timestamp": ("", None),
    "driver_version": ("", None),
    "count": ("", None),
    "name": ("", None),
    "serial": ("", "1650000000000"),
    "uuid": ("", None),
    "pci.bus_id": ("", None),
    "pci.domain": ("", "0x0000"),
    "pci.device_id": ("", "0x233510DE"),
    "pci.sub_device_id": ("", "0x18BF10DE"),
    "pcie.link.gen.current": ("", "5"),
    "pcie.link.gen.gpucurrent": ("", "5"),
    "pcie.link.gen.max": ("", "5"),
    "pcie.link.gen.gpumax": ("", "5"),
    "pcie.link.gen.hostmax": ("", "[N/A]"),
    "pcie.link.width.current": ("", "16"),
    "pcie.link.width.max": ("", "16"),
    "index": ("", None),
    "display_attached": ("", "Yes"),
    "display_active": ("", "Disabled"),
    "persistence_mode": ("", "Enabled"),
    "addressing_mode": ("", "None"),
    "accounting.mode": ("", "Disabled"),
    "accounting.buffer_size": ("", "4000"),
    "vbios_version": ("", "96.00.BC.00.02"),
    "inforom.img": ("", "G520.0282.02.02"),
    "inforom.ecc": ("", "7.16"),
    "gpu_recovery_action": ("", "None"),
    "fan.speed": (" %", "[N/A]"),
    "pstate": ("", "P0"),
    "clocks_event_reasons.supported": ("", "0x00000000000001FF"),
    "clocks_event_reasons.active": ("", None),
    "clocks_event_reasons.gpu_idle": ("", None),
    "clocks_event_reasons.applications_clocks_setting": ("", "Not Active"),
    "clocks_event_reasons.sw_power_cap": ("", "Not Active"),
    "clocks_event_reasons.hw_slowdown": ("", "Not Active"),
    "clocks_event_reasons.hw_thermal_slowdown": ("", "Not Active"),
    "clocks_event_reasons.hw_power_brake_slowdown": ("", "Not Active"),
    "clocks_event_reasons.sw_thermal_slowdown": ("", "Not Active"),
    "clocks_event_reasons.sync_boost": ("", "Not Active"),
    "memory.total": (" MiB", None),
    "memory.reserved": (" MiB", str(RESERVED_MIB)),
    "memory.used": (" MiB", None),
    "memory.free": (" MiB", None),
    "compute_mode": ("", "Default"),
    "compute_cap": ("", "9.0"),
    "utilization.gpu": (" %", "0"),
    "utilization.memory": (" %", "0"),
    "ecc.mode.current": ("", "Enabled"),
    "ecc.mode.pending": ("", "Enabled"),
    "ecc.errors.corrected.volatile.total": ("", "0"),
    "ecc.errors.corrected.aggregate.total": ("", "0"),
    "ecc.errors.uncorrected.volatile.total": ("", "0"),
    "ecc.errors.uncorrected.aggregate.total": ("", "0"),
    "retired_pages.pending": ("", "[N/A]"),
    "remapped_rows.correctable": ("", "0"),
    "remapped_rows.uncorrectable": ("", "0"),
    "remapped_rows.pending": ("", "No"),
    "remapped_rows.failure": ("", "No"),
    "temperature.gpu": ("", None),
    "temperature.gpu.tlimit": ("", "51"),
    "temperature.memory": ("", None),
    "power.management": ("", "Enabled"),
    "power.draw": (" W", None),
    "power.draw.average": (" W", None),
    "power.draw.instant": (" W", None),
    "power.limit": (" W", "700.00"),
    "enforced.power.limit": (" W", "700.00"),
    "power.default_limit": (" W", "700.00"),
    "power.min_limit": (" W", "200.00"),
    "power.max_limit": (" W", "700.00"),
    "clocks.current.graphics": (" MHz", None),
    "clocks.current.sm": (" MHz", None),
    "clocks.current.memory": (" MHz", "3201"),
    "clocks.current.video": (" MHz", "765"),
    "clocks.applications.graphics": (" MHz", "1980"),
    "clocks.applications.memory": (" MHz", "3201"),
    "clocks.max.graphics": (" MHz", "1980"),
    "clocks.max.sm": (" MHz", "1980"),
    "clocks.max.memory": (" MHz", "3201"),
    "mig.mode.current": ("", "Disabled"),
    "mig.mode.pending": ("", "Disabled"),
    "gsp.mode.current": ("", "Enabled"),
    "c2c.mode": ("", "Disabled"),
    "fabric.state": ("", "N/A"),
    "fabric.status": ("", "N/A"),
    "hostname": ("", None),
}
GPU_ALIASES = {
    "gpu_name": "name",
    "gpu_serial": "serial",
    "gpu_uuid": "uuid",
    "gpu_bus_id": "pci.bus_id",
    "inforom.image": "inforom.img",
    "clocks.gr": "clocks.current.graphics",
    "clocks.sm": "clocks.current.sm",
    "clocks.mem": "clocks.current.memory",
    "clocks.video": "clocks.current.video",
    "clocks.applications.gr": "clocks.applications.graphics",
    "clocks.applications.mem": "clocks.applications.memory",
    "clocks.max.gr": "clocks.max.graphics",
    "clocks.max.mem": "clocks.max.memory",
    "gpu.power.draw.average": "power.draw.average",
    "gpu.power.draw.instant": "power.draw.instant",
    "remapped_rows.sbe": "remapped_rows.correctable",
    "remapped_rows.dbe": "remapped_rows.uncorrectable",
}
APP_FIELDS: dict[str, str] = {
    "timestamp": "",
    "gpu_name": "",
    "gpu_bus_id": "",
    "gpu_serial": "",
    "gpu_uuid": "",
    "pid": "",
    "process_name": "",
    "used_gpu_memory": " MiB",
}
APP_ALIASES = {"name": "process_name", "used_memory": "used_gpu_memory"}

LEGEND = """
Legend:

  X    = Self
"""
TOPOLOGY_LEGEND = """\
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
P2P_LEGEND = """\
  OK   = Status Ok
  CNS  = Chipset not supported
  GNS  = GPU not supported
  TNS  = Topology not supported
  NS   = Not supported
  U    = Unknown
"""


class Refusal(Exception):
    """The call cannot be answered: what nvidia-smi prints on stdout, and its exit status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.text = text
        self.status = status


class App:
    """One row of compute-apps."""

    __slots__ = ("mib", "name", "pid")

    def __init__(self, pid: int, name: str, mib: object) -> None:
        self.pid = pid
        self.name = name
        self.mib = str(mib)


class Gpu:
    """One GPU at this moment: its entry of board.json, its processes, its used memory, its injected cells."""

    def __init__(self, entry: dict[str, Any], control: dict[str, Any], held: list[ledger.Allocation]) -> None:
        self.index: int = entry["index"]
        self.uuid: str = entry["uuid"]
        self.name: str = entry["name"]
        self.bus: str = entry["bus"]
        self.total: int = entry["mib"]
        self.temperature: int = entry["temperature"]
        self.memory_temperature: int = entry["memory_temperature"]
        self.idle_watts: float = entry["watts"]
        mine = [allocation for allocation in held if allocation.gpu == self.uuid]
        self.is_busy = any(allocation.is_alive() for allocation in mine)
        self.apps = [app for app in (_app_of(allocation, control) for allocation in mine) if app]
        injected = [row for row in control.get("apps", ()) if self.is_named(row["gpu"])]
        self.apps += [App(row["pid"], row["name"], row["mib"]) for row in injected]
        self.used: int = sum(allocation.mib for allocation in mine) + (CONTEXT_MIB if mine else 0)
        self.cells: dict[str, str] = {}
        for name, cells in control.get("fields", {}).items():
            if self.is_named(name):
                self.cells.update(cells)
        for name, mib in control.get("used", {}).items():
            if self.is_named(name):
                self.used = mib

    def is_named(self, name: object) -> bool:
        return str(name) in ("*", str(self.index), self.uuid, self.bus)

    @property
    def watts(self) -> float:
        return self.idle_watts + (44.2 if self.is_busy else 0.0)

    @property
    def clock(self) -> int:
        return 1980 if self.is_busy else 345


def _app_of(allocation: ledger.Allocation, control: dict[str, Any]) -> App | None:
    name = ledger.argv0_of(allocation.pid) if allocation.is_alive() else ""
    if name:
        return App(allocation.pid, name, allocation.mib)
    if control.get("teardown", "no-data") == "empty":
        return None
    return App(allocation.pid, "[No data]", allocation.mib)


class Board:
    """The node's GPUs at this moment."""

    def __init__(self, gpu_directory: str, control: dict[str, Any]) -> None:
        board = ledger.read_json(os.path.join(gpu_directory, "board.json"))
        if not isinstance(board, dict):
            raise Refusal(
                "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the "
                "latest NVIDIA driver is installed and running.\n\n",
                9,
            )
        self.driver: str = board["driver"]
        self.cuda: str = board["cuda"]
        self.cpus: str = board["cpus"]
        self.now = time.time()
        held = [allocation for allocation in ledger.allocations(gpu_directory) if allocation.gpu]
        self.gpus = [Gpu(entry, control, held) for entry in board["gpus"]]
        missing = control.get("missing", ())
        self.gpus = [gpu for gpu in self.gpus if not any(gpu.is_named(name) for name in missing)]

    def selected(self, ids: str | None) -> list[Gpu]:
        """The GPUs that ``-i`` names; names that match nothing are dropped silently unless nothing is left."""
        gpus = self.gpus
        if ids is not None:
            names = ids.split(",")
            gpus = [gpu for gpu in gpus if any(name != "*" and gpu.is_named(name) for name in names)]
        if not gpus:
            raise Refusal("No devices were found\n", 6)
        return gpus

    def cell(self, gpu: Gpu, field: str) -> str:
        unit, value = GPU_FIELDS[field]
        if field in gpu.cells:
            return gpu.cells[field]
        if value is None:
            value = self.computed(gpu, field)
        return value if value.startswith("[") else value + unit

    def computed(self, gpu: Gpu, field: str) -> str:
        if field == "timestamp":
            return self.timestamp()
        values: dict[str, object] = {
            "driver_version": self.driver,
            "count": len(self.gpus),
            "name": gpu.name,
            "uuid": gpu.uuid,
            "pci.bus_id": gpu.bus,
            "index": gpu.index,
            "clocks_event_reasons.active": "0x0000000000000000" if gpu.is_busy else "0x0000000000000001",
            "clocks_event_reasons.gpu_idle": "Not Active" if gpu.is_busy else "Active",
            "memory.total": gpu.total,
            "memory.used": gpu.used,
            "memory.free": max(0, gpu.total - RESERVED_MIB + 1 - gpu.used),
            "temperature.gpu": gpu.temperature,
            "temperature.memory": gpu.memory_temperature,
            "clocks.current.graphics": gpu.clock,
            "clocks.current.sm": gpu.clock,
            "hostname": os.uname().nodename,
        }
        return f"{gpu.watts:.2f}" if field.startswith("power.draw") else str(values[field])

    def timestamp(self) -> str:
        return time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(self.now)) + f".{int(self.now * 1000) % 1000:03d}"

    def app_cell(self, gpu: Gpu, app: App, field: str) -> str:
        values: dict[str, object] = {
            "timestamp": self.timestamp(),
            "gpu_name": gpu.name,
            "gpu_bus_id": gpu.bus,
            "gpu_serial": GPU_FIELDS["serial"][1],
            "gpu_uuid": gpu.uuid,
            "pid": app.pid,
            "process_name": app.name,
            "used_gpu_memory": app.mib,
        }
        value = str(values[field])
        return value if value.startswith("[") else value + APP_FIELDS[field]


class Options:
    """The command line, understood."""

    def __init__(self, words: list[str]) -> None:
        self.ids: str | None = None
        self.format = "csv"
        self.loop: float | None = None
        self.output: str | None = None
        self.what = "table"
        self.fields = ""
        self.rest: list[str] = []
        if words and words[0] in ("topo", "nvlink", "pmon", "dmon"):
            self.what, self.rest = words[0], words[1:]
            return
        words = list(words)
        while words:
            self.take(words)

    def take(self, words: list[str]) -> None:
        word = words.pop(0)
        flag, has_value, value = word.partition("=")
        if word in ("-L", "--list-gpus"):
            self.what = "list"
        elif word in ("-q", "--query"):
            self.what = "query"
        elif flag in ("--query-gpu", "--query-compute-apps") and has_value:
            self.what, self.fields = flag[2:], value
        elif flag == "--format" and has_value:
            self.format = value
        elif flag in ("-i", "--id"):
            self.ids = value if has_value else _next(words, word)
        elif flag in ("-l", "--loop"):
            self.loop = float(value if has_value else _next(words, word))
        elif flag in ("-lms", "--loop-ms"):
            self.loop = float(value if has_value else _next(words, word)) / 1000
        elif flag in ("-f", "--filename"):
            self.output = value if has_value else _next(words, word)
        elif word == "--version":
            self.what = "version"
        else:
            raise Refusal(f"ERROR: Option {word} is not recognized. Please run 'nvidia-smi -h'.\n\n", 255)


def _next(words: list[str], flag: str) -> str:
    if not words:
        raise Refusal(f"ERROR: Option {flag} requires a value. Please run 'nvidia-smi -h'.\n\n", 255)
    return words.pop(0)


def answer(words: list[str], gpu_directory: str) -> tuple[str, int]:
    """What ``nvidia-smi WORDS`` prints now, and its exit status (injected states aside)."""
    control = ledger.read_json(os.path.join(gpu_directory, "control.json")) or {}
    try:
        options = Options(words)
        board = Board(gpu_directory, control)
        return ANSWERS[options.what](board, options, control), 0
    except Refusal as refusal:
        return refusal.text, refusal.status


def _query_gpu(board: Board, options: Options, control: dict[str, Any]) -> str:
    fields = _fields(options.fields, GPU_FIELDS, GPU_ALIASES)
    header = [name + _header_unit(GPU_FIELDS[name][0]) for name in fields]
    rows = [[board.cell(gpu, field) for field in fields] for gpu in board.selected(options.ids)]
    lines = _csv(options.format, header, rows, [GPU_FIELDS[name][0] for name in fields])
    for line in control.get("extra", ()):
        lines.insert(min(1, len(lines)), line)  # messages of the driver come in the middle of the table
    return "".join(f"{line}\n" for line in lines)


def _query_apps(board: Board, options: Options, _control: dict[str, Any]) -> str:
    fields = _fields(options.fields, APP_FIELDS, APP_ALIASES)
    header = [name + _header_unit(APP_FIELDS[name]) for name in fields]
    gpus = board.selected(options.ids)
    rows = [[board.app_cell(gpu, app, field) for field in fields] for gpu in gpus for app in gpu.apps]
    return "".join(f"{line}\n" for line in _csv(options.format, header, rows, [APP_FIELDS[name] for name in fields]))


def _fields(names: str, known: dict[str, Any], aliases: dict[str, str]) -> list[str]:
    fields = []
    for name in names.split(","):
        wanted = name.strip()
        canonical = aliases.get(wanted, wanted)
        if canonical.startswith("clocks_throttle_reasons."):
            canonical = canonical.replace("throttle", "event", 1)
        if canonical not in known:
            raise Refusal(f'Field "{wanted}" is not a valid field to query.\n\n', 2)
        fields.append(canonical)
    return fields


def _header_unit(unit: str) -> str:
    return f" [{unit.strip()}]" if unit else ""


def _csv(modifiers: str, header: list[str], rows: list[list[str]], units: list[str]) -> list[str]:
    wanted = [word.strip() for word in modifiers.split(",")]
    if any(word not in ("csv", "noheader", "nounits") for word in wanted):
        raise Refusal("Format modifier is not recognized.\n", 2)
    if "nounits" in wanted:
        header = [name.partition(" [")[0] for name in header]
        rows = [
            [cell.removesuffix(unit) if unit else cell for cell, unit in zip(row, units, strict=True)] for row in rows
        ]
    lines = [", ".join(row) for row in rows]
    return lines if "noheader" in wanted else [", ".join(header), *lines]


def _list(board: Board, options: Options, _control: dict[str, Any]) -> str:
    return "".join(f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})\n" for gpu in board.selected(options.ids))


def _table(board: Board, options: Options, _control: dict[str, Any]) -> str:
    gpus = board.selected(options.ids)
    bar = "+" + "-" * 89 + "+\n"
    columns = "+" + "-" * 41 + "+" + "-" * 24 + "+" + "-" * 22 + "+\n"
    out = [
        time.strftime("%a %b %e %H:%M:%S %Y       \n", time.localtime(board.now)),
        bar,
        f"| NVIDIA-SMI {board.driver:<23}Driver Version: {board.driver:<15}CUDA Version: {board.cuda:<9}|\n",
        columns,
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n",
        "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n",
        "|                                         |                        |               MIG M. |\n",
        "|" + "=" * 41 + "+" + "=" * 24 + "+" + "=" * 22 + "|\n",
    ]
    for gpu in gpus:
        out += [
            f"|{gpu.index:>4}  {gpu.name:<31}On  |   {gpu.bus} Off |                    0 |\n",
            (
                f"| N/A{gpu.temperature:>5}C    P0{int(gpu.watts):>15}W /  700W "
                f"|{gpu.used:>8}MiB / {gpu.total:>6}MiB |      0%      Default |\n"
            ),
            "|                                         |                        |             Disabled |\n",
            columns,
        ]
    out += [
        "\n",
        bar,
        "| Processes:                                                                              |\n",
        "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |\n",
        "|        ID   ID                                                               Usage      |\n",
        "|" + "=" * 89 + "|\n",
    ]
    rows = [_process_row(gpu, app) for gpu in gpus for app in gpu.apps]
    out += rows or [f"|  {'No running processes found':<87}|\n"]
    return "".join([*out, bar])


def _process_row(gpu: Gpu, app: App) -> str:
    memory = f"{app.mib}MiB"
    memory = memory if len(memory) <= 8 else f"{memory[:5]}..."
    name = app.name if len(app.name) <= 37 else f"...{app.name[-34:]}"
    return f"|{gpu.index:>5}   N/A  N/A{app.pid:>16}      C   {name:<38}{memory:>8} |\n"


def _query(board: Board, options: Options, _control: dict[str, Any]) -> str:
    def line(indent: int, name: str, value: object) -> str:
        return f"{' ' * indent + name:<55}: {value}\n"

    gpus = board.selected(options.ids)
    out = [
        "\n==============NVSMI LOG==============\n\n",
        line(0, "Timestamp", time.strftime("%a %b %e %H:%M:%S %Y", time.localtime(board.now))),
        line(0, "Driver Version", board.driver),
        line(0, "CUDA Version", board.cuda),
        "\n",
        line(0, "Attached GPUs", len(board.gpus)),
    ]
    for gpu in gpus:
        out += [
            f"GPU {gpu.bus}\n",
            line(4, "Product Name", gpu.name),
            line(4, "Product Brand", "NVIDIA"),
            line(4, "Product Architecture", "Hopper"),
            line(4, "Persistence Mode", "Enabled"),
            line(4, "GPU UUID", gpu.uuid),
            line(4, "Minor Number", gpu.index),
            line(4, "GPU Recovery Action", board.cell(gpu, "gpu_recovery_action")),
            line(4, "Performance State", "P0"),
            "    FB Memory Usage\n",
            line(8, "Total", f"{gpu.total} MiB"),
            line(8, "Reserved", f"{RESERVED_MIB} MiB"),
            line(8, "Used", f"{gpu.used} MiB"),
            line(8, "Free", board.cell(gpu, "memory.free")),
            line(4, "Compute Mode", "Default"),
        ]
        if not gpu.apps:
            out.append(line(4, "Processes", "None"))
        else:
            out.append("    Processes\n")
        for app in gpu.apps:
            out += [
                line(8, "GPU instance ID", "N/A"),
                line(8, "Compute instance ID", "N/A"),
                line(8, "Process ID", app.pid),
                line(12, "Type", "C"),
                line(12, "Name", app.name),
                line(12, "Used GPU Memory", f"{app.mib} MiB"),
            ]
        out.append("\n")
    return "".join(out)


def _topo(board: Board, options: Options, _control: dict[str, Any]) -> str:
    gpus = board.gpus
    names = [f"GPU{gpu.index}" for gpu in gpus]
    if options.rest == ["-m"]:
        head = "\t".join(
            ["", *[f"\x1b[4m{names[0]}", *names[1:]], "CPU Affinity", "NUMA Affinity", "GPU NUMA ID\x1b[0m"]
        )
        out = f"{head}\n"
        for row in gpus:
            cells = [" X " if row is other else "NV18" for other in gpus]
            out += "\t".join([f"GPU{row.index}", *cells, board.cpus, "0", "", "N/A"]) + "\n"
        return out + LEGEND + TOPOLOGY_LEGEND
    if options.rest[:1] == ["-p2p"] and len(options.rest) == 2:
        out = f" \t\x1b[4m{chr(9).join(names)}\t\x1b[0m\n"
        for row in gpus:
            out += f" GPU{row.index}\t" + "".join("X\t" if row is other else "OK\t" for other in gpus) + "\n"
        return out + LEGEND + P2P_LEGEND
    raise Refusal("Invalid combination of input arguments. Please run 'nvidia-smi topo -h' for help.\n\n", 2)


def _nvlink(board: Board, options: Options, _control: dict[str, Any]) -> str:
    if options.rest != ["-s"]:
        raise Refusal("Invalid combination of input arguments. Please run 'nvidia-smi nvlink -h' for help.\n\n", 2)
    if len(board.gpus) < 2:
        return ""
    links = "".join(f"\t Link {link}: 26.562 GB/s\n" for link in range(18))
    return "".join(f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})\n{links}" for gpu in board.gpus)


def _pmon(board: Board, _options: Options, _control: dict[str, Any]) -> str:
    out = [
        "# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command \n",
        "# Idx           #    C/G      %      %      %      %      %      %    name \n",
    ]
    for gpu in board.gpus:
        rows = [(str(app.pid), "C", os.path.basename(app.name)) for app in gpu.apps] or [("-", "-", "-")]
        dashes = "".join(f"{'-':>7}" for _ in range(6))
        out += [f"{gpu.index:>5} {pid:>10} {kind:>5}{dashes}    {name:<15}\n" for pid, kind, name in rows]
    return "".join(out)


def _dmon(board: Board, _options: Options, _control: dict[str, Any]) -> str:
    columns = (
        ("gpu", "Idx"), ("pwr", "W"), ("gtemp", "C"), ("mtemp", "C"), ("sm", "%"), ("mem", "%"), ("enc", "%"),
        ("dec", "%"), ("jpg", "%"), ("ofa", "%"), ("mclk", "MHz"), ("pclk", "MHz"), ("pviol", "%"), ("tviol", "bool"),
        ("fb", "MB"), ("bar1", "MB"), ("ccpm", "MB"), ("sbecc", "errs"), ("dbecc", "errs"), ("pci", "errs"),
        ("rxpci", "MB/s"), ("txpci", "MB/s"),
    )  # fmt: skip
    out = [
        "# " + "".join(f"{column[line]:>{3 if column[0] == 'gpu' else 7}}" for column in columns) + " \n"
        for line in (0, 1)
    ]
    for gpu in board.gpus:
        cells = [int(gpu.watts), gpu.temperature, gpu.memory_temperature, 0, 0, 0, 0, 0, 0, 3201, gpu.clock, 0, 0]
        cells += [gpu.used, 1, 0, 0, 0, 0, 0, 0]
        out.append(f"{gpu.index:>5}" + "".join(f"{cell:>7}" for cell in cells) + " \n")
    return "".join(out)


def _version(board: Board, _options: Options, _control: dict[str, Any]) -> str:
    rows = (
        ("NVIDIA-SMI version", board.driver),
        ("NVML version", board.driver.rpartition(".")[0]),
        ("DRIVER version", board.driver),
        ("CUDA Version", board.cuda),
    )
    return "".join(f"{name:<20}: {value}\n" for name, value in rows)


ANSWERS: dict[str, Callable[[Board, Options, dict[str, Any]], str]] = {
    "query-gpu": _query_gpu,
    "query-compute-apps": _query_apps,
    "list": _list,
    "table": _table,
    "query": _query,
    "topo": _topo,
    "nvlink": _nvlink,
    "pmon": _pmon,
    "dmon": _dmon,
    "version": _version,
}


def main(gpu_directory: str, words: list[str]) -> int:
    """Print the answer, with the injected states of control.json applied. Returns the exit status."""
    control = ledger.read_json(os.path.join(gpu_directory, "control.json")) or {}
    time.sleep(control.get("slow", 0))
    while control.get("hang"):
        time.sleep(3600)
    loop = _loop_seconds(words)
    while True:
        text, status = answer(words, gpu_directory)
        _write(1, control.get("stdout", text))
        _write(2, control.get("stderr", ""))
        if loop is None:
            return int(control.get("rc", status))
        time.sleep(loop)


def _loop_seconds(words: list[str]) -> float | None:
    try:
        return Options(words).loop
    except Refusal:
        return None


def _write(descriptor: int, text: str) -> None:
    data = text.encode("utf-8", "surrogateescape")
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except BrokenPipeError:
        os._exit(141)  # what a shell reports for the real one, which SIGPIPE ends


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
