"""The user interface: `./inv --list` shows the tasks, `./inv --help TASK` one of them.

Each task is flags -> library -> report -> exit code. Imports are made inside tasks, so that `--list`
and shell completion need none.
"""

from __future__ import annotations

from pathlib import Path

from invoke.collection import Collection

from lamplighter.tasks import box, local, reading, serving


def collection(tasks_file: str | None = None) -> Collection:
    """All tasks, with the settings that they start from: the namespace of a ``tasks_file`` (its ``__file__``).

    ``inventory/`` lies beside that file; without one, in the working directory.
    """
    found = Collection(
        serving.deploy,
        serving.rollback,
        reading.releases,
        serving.stop,
        serving.start,
        serving.restart,
        serving.undeploy,
        serving.hold,
        serving.attach,
        serving.cancel,
        reading.history,
        reading.plan,
        reading.check,
        reading.env,
        reading.status,
        reading.verify,
        reading.logs,
        reading.diagnose,
        local.init,
        local.config,
        local.lint,
        local.render,
    )
    found.add_collection(Collection("lab", box.up, box.down))
    found.configure(
        {
            "lamplighter": {
                "root": str(Path(tasks_file).resolve().parent) if tasks_file else "",
                "inventory": "inventory",
                "debug": False,
                "vault_password_file": [],
                "vault_id": [],
                "box": box.bring_up,
            }
        }
    )
    return found
