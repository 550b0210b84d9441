"""What would be sent to a node for one server: a few files, known by a digest of what they make run.

Pure: reads the project's templates, writes nothing. No secret, no time and no path of the control machine gets in, so
the same inventory gives the same digest on every machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lamplighter
from lamplighter.errors import InventoryError
from lamplighter.inventory.schema import TOLD, TREATMENT
from lamplighter.inventory.secrets import SecretWord
from lamplighter.kept import kept
from lamplighter.project import Project

if TYPE_CHECKING:
    from lamplighter.inventory import Host, Server
    from lamplighter.release.engine import Engine
    from lamplighter.release.render import Templates

#: Behind the server's own bin directory. A login over SSH has no more than the first six, and no CUDA.
STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/cuda/bin"

#: What makes NCCL name the variables that it reads, for ``nccl_proof``; the inventory's own values win.
NCCL_TALK = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV"}

#: Set by the launch script itself, from what it finds on the node; a sitecustomize that set it would cut itself off.
COMPOSED = ("PYTHONPATH",)

#: MAX_ARG_STRLEN of the kernel: ``NAME=value`` and the NUL behind it.
LONGEST_VARIABLE = 131072

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NO_DIGEST = "0" * 12


@dataclasses.dataclass(frozen=True)
class ReleaseFile:
    """One file of a release: ``text`` goes to disk as UTF-8, ``mode`` are its permission bits."""

    text: str
    mode: int


@dataclasses.dataclass(frozen=True)
class Release:
    """The files of one release, by their path in its directory, and all that is known of it.

    ``manifest`` has digest, server (the whole plan), engine, lamplighter (our version) and files. ``release.json`` has
    of these what the digest covers: equal digests mean equal bytes, so a release on the node need never be rewritten.
    """

    digest: str
    files: Mapping[str, ReleaseFile]
    manifest: dict[str, Any]


def build_release(host: Host, server: Server, engine: Engine, project: Path | Project) -> Release:
    """Return the release of ``server`` on ``host``, rendered from the templates of ``project``.

    The digest covers the files and the plan but for TREATMENT: equal digests mean that the same thing would run, so a
    longer timeout, a better failure table or a new version of ours restarts nothing. The files name their own release,
    so the digest is taken of them with zeros in its place.

    Raises InventoryError: a variable, argument or path that cannot be given to a process, a faulty template.
    """
    plan = server_plan(host, server, engine)
    roles = [engine.name, *engine.compiled.get("ancestors", ())]
    what_runs = {key: value for key, value in plan.items() if key not in TREATMENT}
    with _located(host):
        digest, rendered = kept(
            "release", [plan, roles], _templates(project), lambda: _rendered(plan, what_runs, project, roles)
        )
    files = {name: ReleaseFile(text, mode) for name, (text, mode) in rendered.items()}
    content = {
        "digest": digest,
        "server": what_runs,
        "files": {name: {"sha256": _sha256(file.text), "mode": f"{file.mode:04o}"} for name, file in files.items()},
    }
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    manifest = {**content, "server": plan, "engine": engine.compiled, "lamplighter": lamplighter.__version__}
    return Release(digest, {**files, "release.json": ReleaseFile(text, 0o644)}, manifest)


def _templates(project: Path | Project) -> list[Path]:
    """All that may have a say in how a plan is rendered, our own code included."""
    ours = [Path(__file__), Path(__file__).with_name("render.py")]
    found = [*(project / "templates").glob("**/*"), *(project / "roles").glob("*/templates/**/*")]
    return sorted([*(path for path in found if not path.is_dir()), *ours])


def _rendered(
    plan: dict[str, Any], what_runs: dict[str, Any], project: Path | Project, roles: list[str]
) -> tuple[str, dict[str, tuple[str, int]]]:
    """The digest, and text and mode of each file that a template makes."""
    from lamplighter.release.render import Templates

    templates = Templates(project, roles)
    digest = _digest(what_runs, _render(plan, _NO_DIGEST, templates))
    files = _render(plan, digest, templates)
    return digest, {name: (file.text, file.mode) for name, file in files.items()}


def server_plan(host: Host, server: Server, engine: Engine) -> dict[str, Any]:
    """Return what the node is told about ``server``: JSON-safe; of a secret only its name.

    Nothing of ``host`` gets in so far: nodes that are to serve alike get the same release, under the same digest.
    """
    said = server.to_json()
    talk = {name: {"value": value, "mode": "default"} for name, value in NCCL_TALK.items() if server.nccl_proof}
    with _located(host):
        argv = engine.argv(server)
    secret = {word.variable: place for place, word in enumerate(argv) if isinstance(word, SecretWord)}
    unlike_python = {} if engine.is_python else {"python": "", "sitecustomize": {"scope": "none"}}
    return {
        **{key: said[key] for key in TOLD},
        **unlike_python,
        "env": {**talk, **said["env"]},
        "served_name": engine.served_name(server),
        "argv": [str.__str__(word) for word in argv],
        **({"argv_secrets": secret} if secret else {}),
        "secrets": sorted(server.secrets),
    }


@contextlib.contextmanager
def _located(host: Host) -> Iterator[None]:
    """Give an error that begins with the path of a setting (``servers.NAME.env.X: ...``) its file and line."""
    try:
        yield
    except InventoryError as error:
        if error.what.startswith("servers."):
            error.origin = error.origin or host.origin(error.what.partition(":")[0])
        raise


def _render(plan: dict[str, Any], digest: str, templates: Templates) -> dict[str, ReleaseFile]:
    values = {
        "name": plan["name"],
        "digest": digest,
        "argv": _words(plan),
        "secret_words": sorted(plan.get("argv_secrets", ())),
        "env": _variables(plan),
        "scope": plan["sitecustomize"]["scope"],
        "path": _path(plan["python"] or plan["argv"][0]),
        "standard_path": STANDARD_PATH,
    }
    files = {"launch.sh": ReleaseFile(templates.render("launch.sh.j2", values), 0o755)}
    if values["scope"] != "none":
        text = templates.render("sitecustomize.py.j2", values)
        files["pysite/sitecustomize.py"] = ReleaseFile(text, 0o644)
    if plan["launcher"] != "detached":
        files["server.service"] = ReleaseFile(templates.render("server.service.j2", values), 0o644)
    return files


def _words(plan: dict[str, Any]) -> list[str]:
    """The command line for the launch script, which takes its secret words from variables."""
    from lamplighter.release.render import FromVariable

    variables = {place: name for name, place in plan.get("argv_secrets", {}).items()}
    words: list[str] = plan["argv"]
    return [FromVariable(variables[place]) if place in variables else word for place, word in enumerate(words)]


def _variables(plan: dict[str, Any]) -> list[dict[str, Any]]:
    setting = f"servers.{plan['name']}.env"
    for name, entry in plan["env"].items():
        if not _NAME.fullmatch(name):  # it stands unquoted in the launch script
            raise InventoryError(
                f"{setting}.{name}: cannot be the name of a variable",
                why="names are letters, digits and underscores, and begin with no digit",
                next_step=f"rename or remove it under {setting}",
            )
        size = len(name) + 2 + len(entry["value"].encode("utf-8", "surrogateescape"))
        if size > LONGEST_VARIABLE:
            raise InventoryError(
                f"{setting}.{name}: no process can be given a variable of {size} bytes",
                why=f"Linux passes at most {LONGEST_VARIABLE}, name and value together",
                next_step="put the content into a file on the node and its path into the variable",
            )
        if name == "CUDA_VISIBLE_DEVICES" and plan["gpus"] != "all" and (plan["gpus"] or entry["value"]):
            raise InventoryError(
                f"{setting}.{name}: would be lost, or make the server use other GPUs than are locked and freed for it",
                why="the node sets this variable, from gpus",
                next_step=f"name the GPUs under servers.{plan['name']}.gpus alone",
            )
    return [
        {"name": name, "value": entry["value"], "mode": entry["mode"], "managed": name not in COMPOSED}
        for name, entry in sorted(plan["env"].items())
    ]


def _path(program: str) -> str | None:
    """Return the PATH of a server whose program has a directory; None for one that is itself looked up on PATH."""
    if not posixpath.isabs(program):
        return None
    directory = posixpath.dirname(program)
    if ":" in directory:
        raise InventoryError(
            f"{program}: {directory} cannot be on PATH",
            why="PATH separates directories by colons, and this name holds one",
            next_step="move the environment, or link to it by a name without a colon",
        )
    return f"{directory}:{STANDARD_PATH}"


def _digest(what_runs: dict[str, Any], files: Mapping[str, ReleaseFile]) -> str:
    content = {"server": what_runs, "files": {name: [file.mode, file.text] for name, file in files.items()}}
    return _sha256(json.dumps(content, sort_keys=True, separators=(",", ":")))[:12]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
