"""What our sitecustomize.py costs each start of Python: ``python -m tests.perf.startup [PYTHON...]``.

Prints, for every interpreter, milliseconds of a bare start (-c pass, with an empty sitecustomize in the same place),
of one with ours (chaining, record and all), and their ratio: at most 1.25 is the aim. Starts alternate, so that a busy
machine slows both alike; the figure is the median of the faster half. No test: it measures, and ends with status 1
where a ratio is above the aim or an import was added.
"""

from __future__ import annotations

import glob
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lamplighter.release.render import Templates

PROJECT = Path(__file__).parents[2]
AIM = 1.25
ROUNDS = 60


def main(pythons: Sequence[str]) -> int:
    found = pythons or [*sorted(glob.glob("/root/.pyenv/versions/*/bin/python")), "/usr/bin/python3"]
    is_fine = True
    print(f"{'interpreter':42} {'bare ms':>8} {'ours ms':>8} {'ratio':>6}  new imports")
    with tempfile.TemporaryDirectory() as scratch:
        empty, ours, records = (Path(scratch, name) for name in ("empty", "ours", "records"))
        for directory in (empty, ours, records):
            directory.mkdir()
        (empty / "sitecustomize.py").write_text("")
        (ours / "sitecustomize.py").write_text(rendered())
        for python in found:
            bare, with_ours = measure(python, empty, ours, records)
            new = imported(python, ours, records) - imported(python, empty, records)
            ratio = with_ours / bare
            is_fine = is_fine and ratio <= AIM and not new
            print(f"{python:42} {bare * 1e3:8.1f} {with_ours * 1e3:8.1f} {ratio:6.2f}  {', '.join(sorted(new)) or '-'}")
    return 0 if is_fine else 1


def rendered() -> str:
    """The file of a server with as many variables as the incident's, half of them forced."""
    names = [f"NCCL_VARIABLE_{number}" for number in range(12)]
    env = [
        {"name": name, "value": "LL", "mode": "force" if number % 2 else "default", "managed": True}
        for number, name in enumerate(names)
    ]
    values = {"env": env, "digest": "0123456789ab", "scope": "server"}
    return Templates(PROJECT, ["sglang"]).render("sitecustomize.py.j2", values)


def measure(python: str, empty: Path, ours: Path, records: Path) -> tuple[float, float]:
    """Seconds of a start without and with ours; the first of each, which writes byte code, is thrown away."""
    times: dict[Path, list[float]] = {empty: [], ours: []}
    for _ in range(ROUNDS + 1):
        for directory, seconds in times.items():
            began = time.perf_counter()
            start(python, directory, records)
            seconds.append(time.perf_counter() - began)
    bare, with_ours = (statistics.median(sorted(seconds[1:])[: ROUNDS // 2]) for seconds in times.values())
    return bare, with_ours


def imported(python: str, directory: Path, records: Path) -> set[str]:
    """Names of the modules that a start has imported when it is done."""
    code = "import sys; sys.stderr.write(' '.join(sys.modules))"
    return set(start(python, directory, records, code=code).decode("ascii").split())


def start(python: str, directory: Path, records: Path, code: str = "pass") -> bytes:
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(directory), "LAMPLIGHTER_RECORDS": str(records)}
    return subprocess.run([python, "-c", code], env=environ, stderr=subprocess.PIPE, check=True).stderr


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
