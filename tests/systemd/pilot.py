"""Calls the launcher on a node, one step a process, as runs do that may be killed in between: `pilot.py ROOT STEP ...`.

The servers of its releases only sleep. Prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from lamplighter.node.keeper import launcher, systemd
from lamplighter.node.keeper.launched import Launched, Order, read_launched
from lamplighter.node.layout import ServerHome
from lamplighter.node.system import files, processes
from lamplighter.node.system.processes import Unit

TEMPLATE = Path(__file__).parents[1] / "unit/golden/kimi-server.service"


def run_id(number: str) -> str:
    return f"20260101T00000{number}Z-abcdef"


class Pilot:
    """The steps; ``number`` names a run and the release that it brings."""

    def __init__(self, root: str) -> None:
        self.home = ServerHome(f"{root}/servers/x")

    def order(self, number: str, gate: str = "") -> Order:
        run, release = self.home.run(run_id(number)), self.home.release(f"release{number}")
        for directory in (release.path, run.records):
            os.makedirs(directory, exist_ok=True)
        Path(release.launch_script).write_text(f"exec sleep 100{number}\n")
        Path(release.unit).write_text(TEMPLATE.read_text().replace("RestartSec=10", "RestartSec=0.2"))
        return Order("x", release, run.launch("new"), run.records, "", run.run_id, "TERM", 5.0, gate or None)

    def launched(self, number: str) -> Launched:
        found = read_launched(self.home.run(run_id(number)).launch("new"))
        assert found is not None
        return found

    def unit(self, number: str) -> Unit | None:
        return self.launched(number).unit if number else None

    def launch(self, number: str, gate: str = "") -> int:
        return launcher.launch("systemd", self.order(number, gate), self.home).main.pid

    def stop(self, sparing: str = "") -> bool:
        return launcher.stop_unit(self.home, 10, print_nothing, self.unit(sparing))

    def withdraw(self, number: str) -> bool:
        unit = self.unit(number)
        assert unit is not None
        return launcher.withdraw(self.home, unit, 10, print_nothing)

    def commit(self, number: str) -> str:
        try:
            launcher.commit(self.order(number), self.home, self.launched(number))
        except launcher.LaunchFailed as error:
            return str(error)
        return ""

    def commit_until(self, number: str, step: str) -> str:
        """Commit, and be killed before the step of that number; "" if there were fewer."""
        left = int(step)

        def counted(name: str, call: Any) -> Any:
            def count(*words: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    print(json.dumps(f"{name} {words[-1] if name != 'write_file' else words[0]}"), flush=True)
                    os._exit(0)
                return call(*words)

            return count

        for place, name in (
            (files, "write_file"), (files, "point"), (os, "rename"), (os, "unlink"), (systemd.Manager, "do"),
        ):  # fmt: skip
            setattr(place, name, counted(name, getattr(place, name)))
        return self.commit(number)

    def clear(self) -> None:
        launcher.clear(self.home)

    def forget(self) -> None:
        systemd.forget(self.home)

    def look(self, number: str = "", sparing: str = "") -> dict[str, Any]:
        """What is told of the server: pids of all of ours, and of a launch; which release is committed."""
        table = processes.processes()
        record = {"boot_id": processes.boot_id(), "pid": 0, "start": 0, "unit": "lamplighter-x.service"}
        record["manager_uid"] = systemd.our_manager().uid
        if number:
            main, unit = self.launched(number).main, self.unit(number)
            assert unit is not None
            record = {**main.__dict__, "unit": unit.name, "manager_uid": unit.manager_uid}
        now = launcher.present(record)
        return {
            "ours": [each.main.pid for each in launcher.recorded_in_unit(self.home, table, self.unit(sparing))],
            "main": now.main.pid if now.main else None,
            "members": [each.pid for each in launcher.members_of(record, now.main)] if now.main else [],
            "committed": (systemd.committed(self.home) or {}).get("release"),
            "units": [unit.name for unit in systemd.units(self.home)],
            "edited": systemd.edited_by_hand(self.home),
            "is_up": systemd.is_up(self.home),
        }


def print_nothing(_: str) -> None:
    return


if __name__ == "__main__":
    print(json.dumps(getattr(Pilot(sys.argv[1]), sys.argv[2])(*sys.argv[3:])))
