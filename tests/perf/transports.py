"""How long ``status`` takes by each transport, and in another checkout: ``python -m tests.perf.transports [CHECKOUT]``.

Turns about, RUNS times each, against one sshd on a loopback port; prints medians and their ratios to the first row. A
benchmark, not a test: its numbers are those of the machine and its load (printed).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from tests.ssh.sshd import Sshd, make_key

PROJECT = Path(__file__).resolve().parents[2]
RUNS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", nargs="?", type=Path, help="another one to compare with, which knows no transports")
    other = parser.parse_args().checkout
    rows: list[tuple[str, Path, dict[str, str]]] = [("other checkout", other, {})] if other else []
    rows += [(transport, PROJECT, {"transport": transport}) for transport in ("auto", "fabric", "openssh")]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        key = make_key(directory / "key")
        server = Sshd(directory / "node", key)
        try:
            seconds = measured(rows, directory, key, server)
        finally:
            server.stop()
    first = statistics.median(next(iter(seconds.values())))
    print(f"status, {RUNS} runs each, load {os.getloadavg()[0]:.1f}")
    for label, took in seconds.items():
        middle = statistics.median(took)
        print(f"  {label:15} median {middle:.3f} s  least {min(took):.3f} s  ratio {middle / first:.2f}")


def measured(
    rows: list[tuple[str, Path, dict[str, str]]], directory: Path, key: Path, server: Sshd
) -> dict[str, list[float]]:
    (directory / "known").write_text(server.known_line())
    host = {
        "ansible_host": server.host, "ansible_port": server.port, "ansible_user": server.user,
        "ansible_ssh_private_key_file": str(key), "known_hosts": str(directory / "known"),
        "root": str(directory / "root"), "servers": {"demo": {"engine": "demo", "model": "/m", "gpus": []}},
    }  # fmt: skip
    seconds: dict[str, list[float]] = {label: [] for label, _, _ in rows}
    for run in range(RUNS + 1):
        for label, checkout, more in rows:
            inventory = directory / label
            inventory.mkdir(exist_ok=True)
            (inventory / "hosts.yml").write_text(json.dumps({"all": {"hosts": {"gpu1": {**host, **more}}}}))
            words = [checkout / ".venv/bin/python", "-m", "invoke", "--search-root", checkout, "status"]
            began = time.monotonic()
            subprocess.run(
                [*words, "--host", "gpu1"], cwd=checkout, env={**os.environ, "LAMPLIGHTER_INVENTORY": str(inventory)},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True,
            )  # fmt: skip
            if run:  # the first one fills the node's cache
                seconds[label].append(time.monotonic() - began)
    return seconds


if __name__ == "__main__":
    main()
