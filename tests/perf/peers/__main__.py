"""A deploy beside its peers: ``python -m tests.perf.peers [--rtt 0 50] [--hosts 1] [--runs 5] [--write FILE]``.

All do the same small job on the same nodes (tests/nodes/park.py), in turn: two rendered files, the server before
stopped by its pid, GPU memory looked at, a server started that listens after SERVER_SECONDS, and waited for. `first` is
a node that has nothing but a server of somebody's, `redeploy` the same job for another model, `no change` once more.
No login is warm. Ours does what it always does: checks beforehand, proofs, FREED, a token, 32 checks afterwards.

Prints, as Markdown, medians of seconds less the server's own, ratios to ours, and CPU seconds of the controlling
command with what it started. Needs root; the peers' environment is made on first use (tests/engines/place.py). A
benchmark, no test: its numbers are those of the machine and its load, which is printed. What counts are the ratios.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.engines.place import PEERS, made
from tests.nodes.fixtures import gpu_furniture
from tests.nodes.park import PROJECT, Furniture, NodePark, why_no_nodes

HERE = Path(__file__).parent
SERVER_SECONDS = 3.0
OURS = "lamplighter"
JOBS = ("first", "redeploy", "no change")

#: From whatever was there to what `first` begins with: no files, and somebody's server with its pid in a file.
RESET = """
pkill -9 -x llama-server; pkill -9 -f [/]llama-server
rm -rf /opt/llm /root/.ansible /var/lib/lamplighter/servers
mkdir -p /opt/llm
STUB_SECONDS=0 setsid llama-server --model /opt/models/tiny.gguf --alias old --port 8000 </dev/null >/dev/null 2>&1 &
echo $! >/opt/llm/pid
for i in $(seq 300); do curl -sf -m 2 localhost:8000/v1/models >/dev/null && exit 0; sleep 0.1; done; exit 1
"""
#: The machine that nodes pretend to be is small.
CHECKS = {"shm_free_gib": 0.01, "disk_free_gib": 0.01, "inodes_free_percent": 1, "open_files": 256}

Words = tuple[list[str], dict[str, str]]


class Ground:
    """The nodes, and how each tool is called for some of them."""

    def __init__(self, park: NodePark, scratch: Path) -> None:
        self.park = park
        self.masters = scratch / "masters"
        self.masters.mkdir()
        self.inventory = scratch / "inventory"
        self.hosts_file = scratch / "ansible.yml"
        self.bin = made(PEERS) / "bin"
        self.tools: dict[str, Callable[[str, list[str]], Words]] = {
            OURS: self._ours,
            "bash, one ssh": self._bash,
            "Fabric, by hand": self._fabric,
            "pyinfra": self._pyinfra,
            "Ansible + mitogen": self._mitogen,
            "Ansible, pipelining": self._ansible,
        }

    def _ours(self, model: str, names: list[str]) -> Words:
        server = {
            "engine": "llama_cpp", "program": "/usr/local/bin/llama-server", "model": "/opt/models/tiny.gguf",
            "served_name": model, "port": 8000, "gpus": [0, 1], "checks": CHECKS,
        }  # fmt: skip
        self.park.write_inventory(self.inventory, {name: {"servers": {"llm": server}} for name in names})
        hosts = list(itertools.chain.from_iterable(("--host", name) for name in names))
        return [str(PROJECT / "inv"), "deploy", "--if-changed", *hosts], {"LAMPLIGHTER_INVENTORY": str(self.inventory)}

    def _bash(self, model: str, names: list[str]) -> Words:
        return [str(HERE / "bash_job.sh"), model, "/usr/bin/python3", str(self.park.ssh_config), *names], {}

    def _fabric(self, model: str, names: list[str]) -> Words:
        hosts = [f"{name}={self.park.nodes[name].address}" for name in names]
        return [sys.executable, str(HERE / "fabric_job.py"), model, *hosts, str(self.park.key)], {}

    def _pyinfra(self, model: str, names: list[str]) -> Words:
        options = {
            "ssh_user": "root", "ssh_key": str(self.park.key), "ssh_look_for_keys": False, "ssh_allow_agent": False,
            "ssh_known_hosts_file": str(self.park.known_hosts),
        }  # fmt: skip
        hosts = [(name, {"ssh_hostname": self.park.nodes[name].address, **options}) for name in names]
        inventory = self.inventory.with_name("pyinfra_hosts.py")
        inventory.write_text(f"gpus = {hosts!r}\n")
        return [str(self.bin / "pyinfra"), "-y", str(inventory), "pyinfra_job.py"], {"MODEL": model}

    def _ansible(self, model: str, names: list[str]) -> Words:
        self.hosts_file.write_text("gpus:\n  hosts:\n" + "".join(f"    {name}:\n" for name in names))
        masters = "-o ControlMaster=auto -o ControlPersist=60s -o PreferredAuthentications=publickey"
        words = ["-i", str(self.hosts_file), "-e", f"model={model}", "play.yml"]
        return [str(self.bin / "ansible-playbook"), *words], {
            "ANSIBLE_PIPELINING": "True",
            "ANSIBLE_FORKS": "10",
            "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3",
            "ANSIBLE_SSH_ARGS": f"-F {self.park.ssh_config} {masters}",
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.masters),
        }

    def _mitogen(self, model: str, names: list[str]) -> Words:
        words, environment = self._ansible(model, names)
        plugins = next((self.bin.parent / "lib").glob("python*/site-packages/ansible_mitogen/plugins/strategy"))
        more = {"ANSIBLE_STRATEGY_PLUGINS": str(plugins), "ANSIBLE_STRATEGY": "mitogen_linear"}
        return words, {**environment, **more, "ANSIBLE_SSH_ARGS": f"-F {self.park.ssh_config}"}

    def take(self, tool: str, model: str, names: list[str]) -> tuple[float, float]:
        """Wall and CPU seconds of one job by one tool. Raises where it failed, or the model does not serve."""
        words, environment = self.tools[tool](model, names)
        before, began = _cpu_of_children(), time.monotonic()
        done = self.park.run(words, env=environment, cwd=HERE, timeout=300)
        wall, cpu = time.monotonic() - began, _cpu_of_children() - before
        if done.returncode:
            raise SystemExit(f"{tool}: exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        for socket in self.masters.iterdir():
            self.park.run(["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "none"])
        for name in names:
            said = self.park.nodes[name].exec(["curl", "-sf", "localhost:8000/v1/models"]).stdout
            assert f'"{model}"' in said, f"{tool} left {said} on {name}"
        return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rtt", type=float, nargs="+", default=[0.0, 50.0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tools", nargs="+", help="only these beside ours")
    parser.add_argument("--write", type=Path, help="write the tables to this file, too")
    given = parser.parse_args()
    if why_no_nodes():
        sys.exit(f"cannot measure here: {why_no_nodes()}")
    text = [_head()]
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        (scratch / "park").mkdir()
        with NodePark(scratch / "park", furniture=_furniture) as park:
            ground = Ground(park, scratch)
            names = [f"gpu{number}" for number in range(1, max(given.hosts) + 1)]
            for name in names:
                park.node(name)
            tools = [tool for tool in ground.tools if tool == OURS or not given.tools or tool in given.tools]
            for rtt, count in itertools.product(given.rtt, given.hosts):
                for name in names[:count]:
                    park.nodes[name].delay(rtt / 2)
                text.append(_table(rtt, count, _measured(ground, tools, names[:count], given.runs)))
                print(text[-1], flush=True)
    if given.write is not None:
        given.write.write_text("\n".join(text))


def _measured(
    ground: Ground, tools: Sequence[str], names: list[str], runs: int
) -> Mapping[tuple[str, str], list[tuple[float, float]]]:
    """Seconds by tool and job; the tools take turns, and the first turn, which fills caches, does not count."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for run in range(runs + 1):
        for tool in tools:
            for name in names:
                ground.park.nodes[name].sh(RESET)
            for job, model in zip(JOBS, (f"one{run}", f"two{run}", f"two{run}"), strict=True):
                wall, cpu = ground.take(tool, model, names)
                if run:
                    found[tool, job].append((wall - (SERVER_SECONDS if job != "no change" else 0.0), cpu))
    return found


def _table(rtt: float, count: int, found: Mapping[tuple[str, str], list[tuple[float, float]]]) -> str:
    rows = {}
    for tool in dict.fromkeys(tool for tool, _ in found):
        rows[tool] = [statistics.median(wall for wall, _ in found[tool, job]) for job in JOBS]
    lines = [
        f"### {rtt:g} ms, {count} host{'s' if count > 1 else ''} (load {os.getloadavg()[0]:.1f})\n",
        f"| | {' | '.join(JOBS)} | ratios to ours | CPU, redeploy | CPU, no change |",
        "|---|---|---|---|---|---|---|",
    ]
    for tool, walls in rows.items():
        ratios = " / ".join(f"{wall / ours:.2f}" for wall, ours in zip(walls, rows[OURS], strict=True))
        cpu = [statistics.median(used for _, used in found[tool, job]) for job in JOBS[1:]]
        figures = [*(f"{wall:.2f}" for wall in walls), ratios, *(f"{used:.2f}" for used in cpu)]
        lines.append(f"| {tool} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def _head() -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout.strip()
    words = " ".join(["python", "-m", "tests.perf.peers", *sys.argv[1:]])
    return (
        "# How fast\n\nMade by `"
        + words
        + f"` at commit {commit}, on {os.cpu_count()} cores. Medians of seconds, less "
        f"the {SERVER_SECONDS:g} that the server needs by itself; a ratio above 1 is slower than ours. "
        "tests/perf/peers says what is done.\n"
    )


def _furniture(name: str) -> Furniture:
    gpus = gpu_furniture(name)
    server = f'#!/bin/sh\nexec /usr/bin/python3 -SEs {HERE / "llama-server"} "$@"\n'
    more = {"/usr/local/bin/llama-server": server, "/opt/models/tiny.gguf": "GGUF\x03\x00\x00\x00"}
    return Furniture({**gpus.files, **more}, gpus.shared)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
