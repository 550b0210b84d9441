"""Scopes pth and interpreter: files outside our root that come, work for one Python alone, and go without a trace."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.layout import ServerHome, server_home
from lamplighter.node.start import startup
from lamplighter.node.variables import interpreter
from tests.nodes.park import Node
from tests.unit.test_release import release
from tests.unit.test_release_launch import place

PROJECT = Path(__file__).parents[2]
DEBIAN = "# install the apport exception handler if available\ntry:\n    import apport_python_hook\nexcept ImportError:\n    pass\n"  # noqa: E501
ORIGINALS = {
    "as Debian has it": DEBIAN,
    "empty": "",
    "without a last newline": "x = 1",
    "with a coding line": '# -*- coding: utf-8 -*-\n"""Doc."""\nfrom __future__ import annotations\nname = "größe"\n',
    "with odd line ends": "x = 1\r\ny = 2\r\n\n\n",
}


@pytest.fixture
def home(tmp_path: Path) -> ServerHome:
    return server_home(str(tmp_path / "root"), "kimi")


def told(tmp_path: Path, text: str | None = DEBIAN, mode: int = 0o644) -> startup.Startup:
    """An interpreter of which sitecustomize.py lies behind a link, as Debian's does; None: it has none."""
    packages = tmp_path / "site-packages"
    packages.mkdir(exist_ok=True)
    runs = None
    if text is not None:
        (tmp_path / "etc").mkdir(exist_ok=True)
        (tmp_path / "etc/sitecustomize.py").write_text(text, encoding="utf-8", newline="")
        (tmp_path / "etc/sitecustomize.py").chmod(mode)
        (tmp_path / "sitecustomize.py").unlink(missing_ok=True)
        (tmp_path / "sitecustomize.py").symlink_to(tmp_path / "etc/sitecustomize.py")
        runs = str(tmp_path / "sitecustomize.py")
    found = (runs,) if runs else ()
    return startup.Startup((3, 11, 2), "/opt/venv", "/usr", (), runs, found, str(packages))


def tree(directory: Path) -> dict[str, tuple[bytes, int, int]]:
    """Every file outside our root: bytes, mode, owner."""
    return {
        str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mode, path.stat().st_uid)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and "root" not in path.relative_to(directory).parts and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("scope", interpreter.SCOPES)
@pytest.mark.parametrize("original", ORIGINALS)
@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_what_was_there_comes_back_byte_for_byte(
    tmp_path: Path, home: ServerHome, scope: str, original: str, mode: int
) -> None:
    python = told(tmp_path, ORIGINALS[original], mode)
    before = tree(tmp_path)
    assert interpreter.install(scope, python, home)
    assert tree(tmp_path) != before
    assert (tmp_path / "sitecustomize.py").is_symlink()
    assert (tmp_path / "etc/sitecustomize.py").stat().st_mode & 0o777 == mode
    assert interpreter.install(scope, python, home) == ()
    assert interpreter.remove(home)
    assert tree(tmp_path) == before
    assert interpreter.remove(home) == ()


@pytest.mark.parametrize("scope", interpreter.SCOPES)
def test_only_what_is_not_there_yet_is_missing(tmp_path: Path, home: ServerHome, scope: str) -> None:
    python = told(tmp_path)
    everything = interpreter.places_of(scope, python, home)
    assert interpreter.missing(scope, python, home) == everything
    interpreter.install(scope, python, home)
    assert interpreter.missing(scope, python, home) == ()
    Path(everything[-1].path).write_text("")
    if scope == "pth":  # an empty file is none of ours
        with pytest.raises(interpreter.Refused):
            interpreter.missing(scope, python, home)
    else:
        assert interpreter.missing(scope, python, home) == everything


def test_where_no_sitecustomize_runs_there_is_none_afterwards(tmp_path: Path, home: ServerHome) -> None:
    python = told(tmp_path, None)
    (path,) = interpreter.install("interpreter", python, home)
    assert path == str(tmp_path / "site-packages/sitecustomize.py")
    assert os.stat(path).st_mode & 0o777 == 0o644
    interpreter.remove(home)
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("original", ["as Debian has it", "empty", "without a last newline", None])
def test_servers_of_one_interpreter_come_and_go_in_any_order(
    tmp_path: Path, original: str | None, order: tuple[int, ...]
) -> None:
    python = told(tmp_path, ORIGINALS[original] if original else None)
    before = tree(tmp_path)
    homes = [server_home(str(tmp_path / root), "kimi") for root in ("root", "root/of another")]
    homes.append(server_home(str(tmp_path / "root"), "kimi-2"))
    for home in homes:
        assert interpreter.install("interpreter", python, home)
        python = replace(python, sitecustomize=interpreter.places_of("interpreter", python, home)[0].path)
    assert [interpreter.install("interpreter", python, home) for home in homes] == [(), (), ()]
    for number in order:
        assert interpreter.remove(homes[number])
    assert tree(tmp_path) == before


def test_servers_of_one_interpreter_come_and_go_with_files_of_their_own(tmp_path: Path) -> None:
    python, before = told(tmp_path), tree(tmp_path)
    homes = [server_home(str(tmp_path / "root"), name) for name in ("kimi", "kimi-2", "qwen.x")]
    for home in homes:
        assert interpreter.install("pth", python, home)
    for home in (homes[1], homes[0], homes[2]):
        assert interpreter.remove(home)
    assert tree(tmp_path) == before


def test_a_move_to_another_venv_leaves_the_old_one_its_block_until_it_is_given_back(
    tmp_path: Path, home: ServerHome
) -> None:
    """On Debian all venves share one file: a deploy that fails must leave the old server what it starts with."""
    old = told(tmp_path)
    new, before = replace(old, prefix="/opt/new"), tree(tmp_path)
    interpreter.install("interpreter", old, home)
    with_old, places = tree(tmp_path), interpreter.present(home)
    assert interpreter.install("interpreter", new, home)
    text = (tmp_path / "etc/sitecustomize.py").read_text()
    assert (text.count("'/opt/venv', "), text.count("'/opt/new', ")) == (1, 1)
    assert interpreter.remove(home, keep=places)
    assert tree(tmp_path) == with_old
    interpreter.install("interpreter", new, home)
    interpreter.remove(home, keep=interpreter.places_of("interpreter", new, home))
    text = (tmp_path / "etc/sitecustomize.py").read_text()
    assert (text.count("'/opt/venv', "), text.count("'/opt/new', ")) == (0, 1)
    interpreter.remove(home)
    assert tree(tmp_path) == before
    assert interpreter.present(home) == ()


@pytest.mark.parametrize("damage", ["no end", "no begin", "half a block, and a whole one"])
def test_a_block_that_somebody_has_torn_is_left_to_a_person(tmp_path: Path, home: ServerHome, damage: str) -> None:
    python = told(tmp_path)
    interpreter.install("interpreter", python, home)
    path = tmp_path / "etc/sitecustomize.py"
    lines = path.read_text().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if line.startswith("# >>>"))
    torn = {"no end": lines[:-1], "no begin": [*lines[:at], *lines[at + 1 :]]}
    text = "".join(torn.get(damage, [*lines[: at + 3], "theirs = 1\n", *lines[at:]]))
    path.write_text(text)
    (outside,) = interpreter.recorded(home)
    with pytest.raises(interpreter.Refused, match=f"not whole: .* the original is {outside.backup}"):
        interpreter.remove(home)
    with pytest.raises(interpreter.Refused, match="not whole"):
        interpreter.install("interpreter", python, home)
    assert path.read_text() == text
    assert Path(outside.backup or "").read_text() == DEBIAN
    path.write_text(DEBIAN)
    assert interpreter.remove(home) == ()
    assert interpreter.recorded(home) == ()


@pytest.mark.parametrize("original", [DEBIAN, "x = 1", "", None])
@pytest.mark.parametrize("end", ["\n", ""])
def test_what_others_wrote_meanwhile_stays(tmp_path: Path, home: ServerHome, original: str | None, end: str) -> None:
    (path,) = map(Path, interpreter.install("interpreter", told(tmp_path, original), home))
    path.write_text("first = 1\n" + path.read_text() + f"last = 1{end}")
    interpreter.remove(home)
    assert path.read_text().splitlines() == ["first = 1", *(original or "").splitlines(), "last = 1"]


def test_an_editor_that_took_the_last_line_end_does_not_hide_the_block(tmp_path: Path, home: ServerHome) -> None:
    interpreter.install("interpreter", told(tmp_path), home)
    path = tmp_path / "etc/sitecustomize.py"
    path.write_text(path.read_text().rstrip("\n"))
    assert interpreter.remove(home)
    assert path.read_text() == DEBIAN


def test_a_package_that_put_its_own_file_back_is_left_alone(tmp_path: Path, home: ServerHome) -> None:
    interpreter.install("interpreter", told(tmp_path), home)
    (tmp_path / "etc/sitecustomize.py").write_text("version = 2\n")
    assert interpreter.remove(home) == ()
    assert (tmp_path / "etc/sitecustomize.py").read_text() == "version = 2\n"


def test_a_file_of_somebody_else_is_refused(tmp_path: Path, home: ServerHome) -> None:
    python = told(tmp_path)
    last = interpreter.places_of("pth", python, home)[-1].path
    Path(last).write_text("import theirs\n")
    with pytest.raises(interpreter.Refused, match="not lamplighter's"):
        interpreter.install("pth", python, home)
    interpreter.remove(home)
    assert Path(last).read_text() == "import theirs\n"
    assert list((tmp_path / "site-packages").iterdir()) == [Path(last)]


def test_a_compiled_file_is_refused(tmp_path: Path, home: ServerHome) -> None:
    python = replace(told(tmp_path), sitecustomize=str(tmp_path / "sitecustomize.pyc"))
    with pytest.raises(interpreter.Refused, match="compiled"):
        interpreter.install("interpreter", python, home)


@pytest.mark.parametrize("scope", interpreter.SCOPES)
def test_a_python_that_runs_no_start_up_file_is_refused(tmp_path: Path, home: ServerHome, scope: str) -> None:
    python = replace(told(tmp_path), flags=("-S",), sitecustomize=None)
    before = tree(tmp_path)
    with pytest.raises(interpreter.Refused, match="/opt/venv: it runs with -S"):
        interpreter.install(scope, python, home)
    assert tree(tmp_path) == before


#: Dies by KILL at the n-th call that changes the disk, in a fork, for n = 1, 2, ...; prints how far it came each time.
KILL_EVERYWHERE = """
import itertools, json, os, signal, sys
sys.path.insert(0, sys.argv[1])
from lamplighter.node.variables import interpreter
from lamplighter.node.layout import server_home
from lamplighter.node.start.startup import Startup
fields, scope, home = json.loads(sys.argv[2]), sys.argv[3], server_home(sys.argv[4], "kimi")
python = Startup(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
real = {name: getattr(os, name) for name in ("rename", "fsync", "unlink", "mkdir", "fchmod", "open", "symlink")}
real_write = os.fdopen
def look():
    found = {}
    for base, _, names in os.walk(sys.argv[5]):
        if not base.startswith(sys.argv[4]) and "__pycache__" not in base:
            for name in names:
                with open(os.path.join(base, name), "rb") as file:
                    found[os.path.join(base, name)] = (file.read(), os.stat(file.fileno()).st_mode)
    return found
def attempt(action, at):
    pid = os.fork()
    if pid == 0:
        calls = itertools.count(1)
        def wrap(function):
            def call(*arguments, **options):
                if next(calls) == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)
            return call
        for name, function in real.items():
            setattr(os, name, wrap(function))
        action()
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0
before, deaths = look(), 0
for at in itertools.count(1):
    done = attempt(lambda: interpreter.install(scope, python, home), at)
    interpreter.remove(home)
    assert look() == before, (at, look().keys() ^ before.keys())
    deaths += not done
    if done:
        break
for at in itertools.count(1):
    interpreter.install(scope, python, home)
    done = attempt(lambda: interpreter.remove(home), at)
    interpreter.remove(home)
    assert look() == before, (at, look().keys() ^ before.keys())
    deaths += not done
    if done:
        break
print(deaths)
"""


@pytest.mark.parametrize(("scope", "text"), [("interpreter", DEBIAN), ("interpreter", None), ("pth", DEBIAN)])
def test_killed_at_any_step_undeploy_still_gives_everything_back(
    tmp_path: Path, home: ServerHome, scope: str, text: str | None
) -> None:
    python = told(tmp_path, text)
    words = [sys.executable, "-I", "-S", "-c", KILL_EVERYWHERE, PROJECT, json.dumps(vars(python)), scope]
    done = subprocess.run(
        [*words, tmp_path / "root", tmp_path], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


# -- in real interpreters

#: A server: writes the variable itself, as SGLang does, and asks a spawn child what it has.
SERVER = """
import multiprocessing, os
def work(queue):
    queue.put(os.environ.get("NCCL_PROTO"))
if __name__ == "__main__":
    os.environ["NCCL_PROTO"] = "of the server"
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
"""
PLAN: dict[str, Any] = {"NCCL_PROTO": {"value": "LL", "mode": "force"}}


def deploy(root: Path, scope: str) -> Path:
    """A release where a deploy would put it, and ``current`` pointing to it; return its launch script."""
    state = root / "servers/kimi"
    launch = place(release(env=PLAN, sitecustomize={"scope": scope}), state / "releases/0123456789ab")
    (state / "current").symlink_to("releases/0123456789ab")
    return launch


def reaches(launch: Path | None, python: Path | str, *flags: str, directory: Path) -> str:
    """What a spawn worker of a server has, started by ``launch`` or by hand."""
    (directory / "server.py").write_text(SERVER)
    words = [*([launch] if launch else []), python, *flags, directory / "server.py"]
    done = subprocess.run(
        list(map(str, words)), env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def make_venv(directory: Path, base: str = sys.executable) -> Path:
    base = os.path.realpath(base)
    subprocess.run([base, "-m", "venv", "--without-pip", directory], check=True, capture_output=True)
    return directory / "bin/python"


@pytest.mark.parametrize("flag", [[], ["-E"], ["-I"], ["-s"]])
@pytest.mark.parametrize("scope", ["server", *interpreter.SCOPES, "none"])
def test_which_scope_reaches_a_spawn_worker_under_which_flags(tmp_path: Path, scope: str, flag: list[str]) -> None:
    """facts: -E and -I lose what comes by PYTHONPATH, in every worker too."""
    home = server_home(str(tmp_path / "root"), "kimi")
    launch, python = deploy(tmp_path / "root", scope), make_venv(tmp_path / "venv")
    asked = startup.ask([str(python), *flag], {"PATH": "/usr/bin:/bin"})
    if scope in interpreter.SCOPES:
        assert interpreter.install(scope, asked, home)
    arrives = scope in interpreter.SCOPES or (scope == "server" and flag in ([], ["-s"]))
    assert reaches(launch, python, *flag, directory=tmp_path) == ("LL" if arrives else "of the server")
    if scope != "none":
        assert (startup.needed_scope(asked).scope == "server") == (flag in ([], ["-s"]))


@pytest.mark.parametrize("scope", interpreter.SCOPES)
def test_the_venvs_own_python_has_the_current_release_even_by_hand(tmp_path: Path, scope: str) -> None:
    home = server_home(str(tmp_path / "root"), "kimi")
    deploy(tmp_path / "root", scope)
    python, other = make_venv(tmp_path / "venv"), make_venv(tmp_path / "other")
    interpreter.install(scope, startup.ask([str(python)], {"PATH": "/usr/bin:/bin"}), home)
    assert reaches(None, python, directory=tmp_path) == "LL"
    assert reaches(None, other, directory=tmp_path) == "of the server"
    interpreter.remove(home)
    assert reaches(None, python, directory=tmp_path) == "of the server"


def test_a_file_that_two_venves_share_gives_to_one_alone(tmp_path: Path) -> None:
    """As on Debian, where one file is run by every venv and by the system's own tools."""
    home = server_home(str(tmp_path / "root"), "kimi")
    deploy(tmp_path / "root", "interpreter")
    python, other = make_venv(tmp_path / "venv"), make_venv(tmp_path / "other")
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "sitecustomize.py").write_text("import os\nos.environ['THEIRS'] = '1'\n")
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(shared)}
    interpreter.install("interpreter", startup.ask([str(python)], environ), home)
    code = "import os; print(os.environ.get('NCCL_PROTO'), os.environ['THEIRS'])"
    for each, says in ((python, "LL 1\n"), (other, "None 1\n"), (Path(sys.executable), "None 1\n")):
        done = subprocess.run([each, "-c", code], env=environ, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == (says, ""), each


@pytest.mark.parametrize("scope", interpreter.SCOPES)
@pytest.mark.parametrize("damage", ["gone", "broken", "raises"])
def test_a_payload_that_is_gone_or_broken_harms_nobody(tmp_path: Path, scope: str, damage: str) -> None:
    home = server_home(str(tmp_path / "root"), "kimi")
    launch, python = deploy(tmp_path / "root", scope), make_venv(tmp_path / "venv")
    interpreter.install(scope, startup.ask([str(python)], {"PATH": "/usr/bin:/bin"}), home)
    payload = launch.parent / "pysite/sitecustomize.py"
    if damage == "gone":
        payload.unlink()
    else:
        payload.write_text("def half(:" if damage == "broken" else "1/0")
    assert reaches(None, python, directory=tmp_path) == "of the server"


def test_the_start_file_names_what_python_3_15_calls(tmp_path: Path, home: ServerHome) -> None:
    """PEP 829: a line that is no comment is the name of a callable, as pkgutil.resolve_name takes it; UTF-8, no import.

    Run so on Debian's Python 3.15.2, with and without the .pth file beside it; here its rule is applied to the file.
    """
    launch, python = deploy(tmp_path / "root", "pth"), make_venv(tmp_path / "venv")
    files = interpreter.install("pth", startup.ask([str(python)], {"PATH": "/usr/bin:/bin"}), home)
    (start,) = (Path(file) for file in files if file.endswith(".start"))
    (pth,) = (Path(file) for file in files if file.endswith(".pth"))
    assert start.stem == pth.stem
    (name,) = [line for line in start.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    pth.unlink()
    code = "import os, pkgutil, sys; pkgutil.resolve_name(sys.argv[1])(); print(os.environ['NCCL_PROTO'])"
    environ = {"PATH": "/usr/bin:/bin", "LAMPLIGHTER_PYSITE": str(launch.parent / "pysite")}
    words = [python, "-I", "-c", code, name]
    done = subprocess.run(list(map(str, words)), env=environ, capture_output=True, text=True, check=False)
    assert done.stdout == "LL\n", done.stderr


def test_a_worker_is_recorded_once_though_pth_files_run_twice(tmp_path: Path) -> None:
    home = server_home(str(tmp_path / "root"), "kimi")
    launch, python = deploy(tmp_path / "root", "pth"), make_venv(tmp_path / "venv")
    interpreter.install("pth", startup.ask([str(python)], {"PATH": "/usr/bin:/bin"}), home)
    code = "import os, sys; print(os.environ['NCCL_PROTO'], len(sys._lamplighter_sitecustomize))"
    words = [launch, python, "-c", code]
    done = subprocess.run(words, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert done.stdout == "LL 2\n", done.stderr


# -- the incident's table, on Debian's own Python, in a node with its own /etc

SYSTEM = "/etc/python3.11/sitecustomize.py"


def on_node(node: Node, code: str, *arguments: str) -> Any:
    """Run ``code`` on the node as the runner would; it may use ``home`` and leaves its answer in ``answer``."""
    head = (
        f"import sys, json; sys.path.insert(0, {str(PROJECT)!r})\n"
        "from lamplighter.node.variables import interpreter\n"
        "from lamplighter.node.layout import server_home\n"
        "from lamplighter.node.start import startup\n"
        "home = server_home('/var/lib/lamplighter', 'kimi')\n"
        "def ask(*words): return startup.ask(words, {'PATH': '/usr/bin:/bin'})\n"
    )
    words = ["/usr/bin/python3", "-I", "-S", "-c", f"{head}{code}\nprint(json.dumps(answer))", *arguments]
    return json.loads(node.exec(words).stdout)


@pytest.fixture
def debian(node: Node) -> Node:
    """A node with venves of Debian's Python, a release of each scope, and the server of above."""
    node.exec(["/usr/bin/python3", "-m", "venv", "--without-pip", "/opt/venv"])
    node.exec(["/usr/bin/python3", "-m", "venv", "--without-pip", "/opt/other"])
    for scope in ("server", *interpreter.SCOPES):
        for name, file in release(env=PLAN, sitecustomize={"scope": scope}).files.items():
            node.write(f"/var/lib/lamplighter/servers/kimi/releases/{scope}/{name}", file.text, f"{file.mode:o}")
    node.write("/srv/server.py", SERVER)
    return node


def worker_has(node: Node, scope: str | None, *python: str) -> str:
    launch = [f"/var/lib/lamplighter/servers/kimi/releases/{scope}/launch.sh"] if scope else []
    return node.exec([*launch, *python, "/srv/server.py"]).stdout.strip()


def test_a_venvs_own_sitecustomize_is_shadowed_on_debian_and_check_names_by_whom(debian: Node) -> None:
    own = "/opt/venv/lib/python3.11/site-packages/sitecustomize.py"
    debian.write(own, "import os\nos.environ['NCCL_PROTO'] = 'LL'\n")
    assert worker_has(debian, None, "/opt/venv/bin/python") == "of the server"
    scope, why = on_node(
        debian, "need = startup.needed_scope(ask('/opt/venv/bin/python')); answer = [need.scope, need.why]"
    )
    assert scope == "server"
    assert f"runs /usr/lib/python3.11/sitecustomize.py ({SYSTEM}), which shadows {own}" in why


def test_the_incidents_table(debian: Node) -> None:
    """facts: four ways were tried by hand, and three of them did nothing."""
    system = debian.sh(f"stat -c '%a %U %G' {SYSTEM}; cat {SYSTEM}; ls -A /etc/python3.11")
    assert worker_has(debian, "server", "/opt/venv/bin/python") == "LL"
    assert worker_has(debian, "server", "/opt/venv/bin/python", "-I") == "of the server"
    answer = on_node(debian, "answer = interpreter.install('interpreter', ask('/opt/venv/bin/python', '-I'), home)")
    assert answer == [SYSTEM]
    assert debian.sh("readlink /usr/lib/python3.11/sitecustomize.py").strip() == SYSTEM
    assert worker_has(debian, "interpreter", "/opt/venv/bin/python") == "LL"
    assert worker_has(debian, "interpreter", "/opt/venv/bin/python", "-I") == "LL"
    for python in ("/opt/other/bin/python", "/usr/bin/python3"):
        assert worker_has(debian, "interpreter", python) == "of the server"
    on_node(debian, "answer = interpreter.remove(home)")
    assert debian.sh(f"stat -c '%a %U %G' {SYSTEM}; cat {SYSTEM}; ls -A /etc/python3.11") == system
    assert worker_has(debian, "interpreter", "/opt/venv/bin/python") == "of the server"


def test_the_pth_scope_on_debian(debian: Node) -> None:
    files = on_node(debian, "answer = interpreter.install('pth', ask('/opt/venv/bin/python'), home)")
    assert {os.path.splitext(file)[1] for file in files} == {".py", ".start", ".pth"}
    assert all(file.startswith("/opt/venv/lib/python3.11/site-packages/") for file in files)
    assert worker_has(debian, "pth", "/opt/venv/bin/python", "-I") == "LL"
    assert worker_has(debian, "pth", "/opt/other/bin/python") == "of the server"
    on_node(debian, "answer = interpreter.remove(home)")
    assert debian.sh("ls -A /opt/venv/lib/python3.11/site-packages").strip() == ""


def test_debians_base_python_gets_it_only_from_the_launch_script(debian: Node) -> None:
    """Without a venv the prefix is that of all the system's tools: the current release must not get into apt."""
    debian.sh("ln -s releases/interpreter /var/lib/lamplighter/servers/kimi/current")
    on_node(debian, "answer = interpreter.install('interpreter', ask('/usr/bin/python3'), home)")
    assert worker_has(debian, "interpreter", "/usr/bin/python3") == "LL"
    assert worker_has(debian, None, "/usr/bin/python3") == "of the server"
    assert worker_has(debian, "interpreter", "/opt/venv/bin/python") == "of the server"
