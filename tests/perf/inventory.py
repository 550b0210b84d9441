"""An inventory of 5,000 hosts in 200 groups, read by us and by ansible-inventory: ``python -m tests.perf.inventory``.

Each command is measured whole, its start included, several times in turn; what counts is the least of each. Seconds are
those of the processor: other work on this machine does not count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.engines.place import ANSIBLE, made

PROJECT = Path(__file__).resolve().parents[2]
HOSTS, GROUPS, ROUNDS = 5_000, 200, 2
ONE = "gpu2500"


@dataclass(frozen=True)
class Cost:
    """Seconds of the processor, and the most memory in MiB."""

    seconds: float
    mebibytes: float


def main() -> None:
    """Measure, and print the ratios."""
    ansible = str(made(ANSIBLE) / "bin/ansible-inventory")
    ours = [sys.executable, "-m", "invoke", "--search-root", str(PROJECT), "config", "--json", "--host"]
    with tempfile.TemporaryDirectory() as scratch:
        inventory = Path(scratch) / "inventory"
        write(inventory)
        commands = {
            "ours, one host": [*ours, ONE],
            "ansible-inventory --host": [ansible, "-i", str(inventory), "--host", ONE],
            "ours, all hosts": [*ours, "all"],
            "ansible-inventory --list": [ansible, "-i", str(inventory), "--list"],
        }
        costs: dict[str, Cost] = {}
        for _ in range(ROUNDS):
            for name, words in commands.items():
                cost = measure(words, inventory)
                best = costs.get(name, cost)
                costs[name] = Cost(min(best.seconds, cost.seconds), min(best.mebibytes, cost.mebibytes))
    for name, cost in costs.items():
        print(f"{name:26} {cost.seconds:7.2f} s {cost.mebibytes:7.0f} MiB")
    one, host, all_, list_ = costs.values()
    print(f"one host: {one.seconds / host.seconds:.2f} of ansible-inventory --host (wanted: below 0.33)")
    print(f"all hosts: {all_.seconds / list_.seconds:.2f} of ansible-inventory --list (wanted: 1 at most)")
    print(f"memory of all: {all_.mebibytes / list_.mebibytes:.2f} of --list (wanted: 0.5 at most)")


def write(inventory: Path) -> None:
    """Write hosts of 25 to a group, with variables of their own, of their groups and of all."""
    (inventory / "group_vars").mkdir(parents=True)
    (inventory / "host_vars").mkdir()
    size = HOSTS // GROUPS
    lines = ["all:", "  children:"]
    for group in range(GROUPS):
        lines += [f"    rack{group}:", f"      vars: {{ansible_port: {2200 + group}, rack: {group}}}", "      hosts:"]
        for number in range(group * size, (group + 1) * size):
            lines += [
                f"        gpu{number}:",
                f"          ansible_host: 10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
                f"          asset: S{number:06}",
            ]
        (inventory / "group_vars" / f"rack{group}.yml").write_text(f"ansible_user: ops{group % 7}\nsite: {group % 9}\n")
    (inventory / "hosts.yml").write_text("\n".join(lines) + "\n")
    (inventory / "group_vars" / "all.yml").write_text("ansible_become: true\nntp: [192.0.2.1, 192.0.2.2]\n")
    for number in range(0, HOSTS, 10):
        (inventory / "host_vars" / f"gpu{number}.yml").write_text(
            f"mac: 02:00:00:00:{number >> 8:02x}:{number & 255:02x}\n"
        )


def measure(words: Sequence[str], inventory: Path) -> Cost:
    """Run a command to its end, and see what it took."""
    environ = {**os.environ, "LAMPLIGHTER_INVENTORY": str(inventory)}
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ) as child:
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{words} ended with {child.returncode}")
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


if __name__ == "__main__":
    main()
