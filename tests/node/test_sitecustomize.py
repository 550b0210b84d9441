"""Our sitecustomize.py in every interpreter of this machine: it delivers, chains, records, and costs no import."""

from __future__ import annotations

import ast
import glob
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lamplighter.release.render import Templates

PROJECT = Path(__file__).parents[2]
PATTERNS = (
    "/opt/*/bin/python3.[0-9]*", "/usr/local/bin/python3.[0-9]*", "/usr/bin/python3.[0-9]*", "/usr/bin/python3",
    "/root/.pyenv/versions/*/bin/python", os.path.expanduser("~/.pyenv/versions/*/bin/python"),
)  # fmt: skip
FOUND = {
    os.path.realpath(path): path
    for pattern in PATTERNS
    for path in glob.glob(pattern)
    if re.search(r"python(3(\.\d+)?)?$", path) and os.access(path, os.X_OK)
}
PYTHONS = sorted({*FOUND.values(), sys.executable})
NAMES = ["2.7" if "/2.7" in path else Path(path).parts[-3] for path in PYTHONS]
PYTHON3 = [path for path, name in zip(PYTHONS, NAMES, strict=True) if not name.startswith("2")]
every = pytest.mark.parametrize("python", PYTHONS, ids=NAMES)
#: What is about other files than ours: the oldest, the newest, and the one with the distribution's own sitecustomize.
BUILT = sorted(
    (path for path in PYTHON3 if "/.pyenv/" in path), key=lambda path: [int(n) for n in re.findall(r"\d+", path)]
)
FEW = [*BUILT[:1], *BUILT[1:][-1:], *(path for path in PYTHON3 if path not in BUILT)]
every3 = pytest.mark.parametrize("python", FEW)

SHOW = (
    "import os, sys\n"
    "live = getattr(os, 'environb', os.environ)\n"
    "print(repr((sorted((k, v) for k, v in live.items() if k.startswith(b'V_')), list(sys.path), "
    "getattr(sys.modules.get('sitecustomize'), '__file__', None))))"
)


def pysite(directory: Path, variables: Mapping[str, tuple[str, str]], digest: str = "0123456789ab") -> Path:
    """A directory with our file for ``variables`` {name: (value, mode)}."""
    env = [{"name": n, "value": v, "mode": m, "managed": True} for n, (v, m) in variables.items()]
    values = {"env": env, "digest": digest, "scope": "server"}
    text = Templates(PROJECT, ["sglang"]).render("sitecustomize.py.j2", values)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text(text)
    return directory


def shadowed(directory: Path, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text(text)
    return directory


def python_runs(
    python: str, path: Sequence[Path], code: str = SHOW, flags: Sequence[str] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    environ = {"PYTHONPATH": ":".join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8", **env}
    return subprocess.run(
        [python, *flags, "-c", code], env=environ, capture_output=True, encoding="utf-8", check=False, cwd="/"
    )


def shown(done: subprocess.CompletedProcess[str]) -> tuple[dict[bytes, bytes], list[str], str | None]:
    """Variables V_*, sys.path and the loaded sitecustomize, with nothing else said. Python 2 prints bytes as text."""
    assert (done.returncode, done.stderr) == (0, "")
    variables, path, file = ast.literal_eval(done.stdout)

    def raw(value: Any) -> bytes:
        return value if isinstance(value, bytes) else value.encode("latin-1")

    return {raw(name): raw(value) for name, value in variables}, path, file


VALUES = {
    "V_PLAIN": "LL",
    "V_EMPTY": "",
    "V_UNICODE": "größe 模型 😀",
    "V_QUOTES": "'a' \"b\" \\ \\n {{ x }} %s",
    "V_LINES": "one\ntwo\r\t\x01\x7f\x80",
}


VALUES_BY_MODE = {name: (value, "force") for name, value in VALUES.items()}


@every
@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX"])
def test_values_arrive_byte_for_byte_in_any_locale(tmp_path: Path, python: str, locale: str) -> None:
    ours = pysite(tmp_path / "größe", {name: (value, "default") for name, value in VALUES.items()})
    variables, _, _ = shown(python_runs(python, [ours], LC_ALL=locale))
    assert variables == {name.encode(): value.encode() for name, value in VALUES.items()}


@every
def test_default_yields_to_what_is_set_and_force_does_not(tmp_path: Path, python: str) -> None:
    ours = pysite(tmp_path, {"V_D": ("ours", "default"), "V_E": ("ours", "default"), "V_F": ("ours", "force")})
    variables, _, _ = shown(python_runs(python, [ours], V_D="theirs", V_E="", V_F="theirs"))
    assert variables == {b"V_D": b"theirs", b"V_E": b"", b"V_F": b"ours"}


@every
def test_children_of_any_kind_inherit_what_was_assigned(tmp_path: Path, python: str) -> None:
    ours = pysite(tmp_path, {"V_F": ("ours", "force")})
    code = "import os; os.system('printf %s \"$V_F\"')"
    assert python_runs(python, [ours], code, V_F="theirs").stdout == "ours"


@every
def test_imports_nothing_that_start_up_has_not_imported(tmp_path: Path, python: str) -> None:
    records = tmp_path / "records"
    records.mkdir()
    code = "import sys; print(sorted(sys.modules))"
    ours = pysite(tmp_path / "ours", {"V_A": ("1", "force"), "V_B": ("é", "default")})
    empty = shadowed(tmp_path / "empty", "")
    theirs = python_runs(python, [empty], code)
    done = python_runs(python, [ours], code, LAMPLIGHTER_RECORDS=str(records))
    assert ast.literal_eval(done.stdout) == ast.literal_eval(theirs.stdout)
    assert len(list(records.iterdir())) == 1


@pytest.mark.parametrize("python", [path for path in PYTHON3 if "/3.6" not in path])
def test_importtime_shows_no_import_below_ours(tmp_path: Path, python: str) -> None:
    def imported(*path: Path) -> set[str]:
        done = python_runs(python, path, "", ["-X", "importtime"], LAMPLIGHTER_RECORDS=str(tmp_path))
        return {line.split("|")[-1].strip() for line in done.stderr.splitlines()}

    assert imported(pysite(tmp_path / "ours", {"V_A": ("1", "force")})) - imported() <= {"sitecustomize"}
    assert len(list(tmp_path.glob("*.json"))) == 1


@every
def test_leaves_a_record_without_values(tmp_path: Path, python: str) -> None:
    ours = pysite(tmp_path / "ours", {"V_D": ("hidden-1", "default"), "V_F": ("hidden-2", "force")})
    records = tmp_path / "records"
    records.mkdir()
    code = "import sys; sys.stdout.write(open('/proc/self/stat').read())  # '\"\\ é 😀"
    done = python_runs(python, [ours], code, LAMPLIGHTER_RECORDS=str(records), V_D="of the server")
    assert done.stderr == ""
    stat = done.stdout.rsplit(")", 1)[1].split()
    (file,) = records.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    record = json.loads(file.read_text())
    assert file.name == f"{record['pid']}.json"
    assert record["pid"] == int(done.stdout.split()[0])
    assert record["ppid"] == int(stat[1]) == os.getpid()
    assert record["start"] == int(stat[19])
    assert record["argv"] == [python, "-c", code]  # and nothing of the arguments behind it
    assert record["digest"] == "0123456789ab"
    assert record["names"] == ["V_D", "V_F"]
    assert record["differ"] == ["V_D"]
    assert "hidden" not in file.read_text()


@every
def test_a_record_that_cannot_be_written_harms_nobody(tmp_path: Path, python: str) -> None:
    ours = pysite(tmp_path / "ours", {"V_F": ("ours", "force")})
    for directory in (tmp_path / "missing", ours / "sitecustomize.py", ""):
        variables, _, _ = shown(python_runs(python, [ours], LAMPLIGHTER_RECORDS=str(directory)))
        assert variables == {b"V_F": b"ours"}
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["ours", "sitecustomize.py"]


@every3
@pytest.mark.parametrize(
    "words", [["-c", "pass", "hidden"], ["-m", "this", "--api-key", "hidden"], ["-c", "pass", "-k=hidden"]]
)
def test_a_record_holds_no_argument_of_the_program(tmp_path: Path, python: str, words: list[str]) -> None:
    ours = pysite(tmp_path / "ours", {})
    environ = {"PYTHONPATH": str(ours), "LAMPLIGHTER_RECORDS": str(tmp_path)}
    subprocess.run([python, *words], env=environ, capture_output=True, check=True)
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert record["argv"] == [python, *words[:2]]


@every
@pytest.mark.parametrize("blocks", [0, 1])  # no room at all, and room for a part of it
def test_a_record_for_which_there_is_no_room_leaves_nothing(tmp_path: Path, python: str, blocks: int) -> None:
    ours = pysite(tmp_path / "ours", {"V_F": ("ours", "force"), "L" * 2000: ("names make it long", "default")})
    records = tmp_path / "records"
    records.mkdir()
    limited = ["sh", "-c", f'ulimit -f {blocks}; exec "$@"', "sh", python, "-c", SHOW]
    environ = {"PYTHONPATH": str(ours), "LAMPLIGHTER_RECORDS": str(records), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(limited, env=environ, capture_output=True, encoding="utf-8", check=False, cwd="/")
    assert shown(done)[0] == {b"V_F": b"ours"}
    assert list(records.iterdir()) == []


@pytest.mark.parametrize("python", [path for path in PYTHONS if "/2.7" in path])
def test_python_2_gets_the_variables_without_chaining(tmp_path: Path, python: str) -> None:
    next_one = shadowed(tmp_path / "next", "import os; os.environ['V_NEXT'] = '1'")
    variables, _, _ = shown(python_runs(python, [pysite(tmp_path / "ours", {"V_F": ("1", "force")}), next_one]))
    assert variables == {b"V_F": b"1"}


def test_uses_no_syntax_that_python_2_7_lacks(tmp_path: Path) -> None:
    """What a machine without Python 2.7 can show: none of the younger constructs; one that has it runs the file."""
    data = (pysite(tmp_path, VALUES_BY_MODE) / "sitecustomize.py").read_bytes()
    assert data.isascii()
    younger = (
        ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Nonlocal, ast.Starred, ast.YieldFrom, ast.Await,
        ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.MatMult,
    )  # fmt: skip
    for node in ast.walk(ast.parse(data)):
        assert not isinstance(node, younger), ast.dump(node)
        if isinstance(node, ast.FunctionDef):
            assert [*node.args.kwonlyargs, *node.args.posonlyargs] == [], node.name
            assert {node.returns, *(each.annotation for each in node.args.args)} == {None}, node.name
        if isinstance(node, ast.Raise):
            assert node.cause is None
        if isinstance(node, ast.ClassDef):
            assert node.keywords == []
        if isinstance(node, ast.Call):
            assert getattr(node.func, "id", None) not in ("print", "super", "exec"), ast.dump(node)


# -- the sitecustomize that ours shadows


@every3
def test_runs_the_next_one_once_after_applying(tmp_path: Path, python: str) -> None:
    next_one = shadowed(
        tmp_path / "next",
        "import os, sys\n"
        "os.environ['V_SAW'] = os.environ['V_F'] + __name__ + os.path.basename(os.path.dirname(__file__))\n"
        "os.environ['V_COUNT'] = os.environ.get('V_COUNT', '') + 'x'\n"
        "os.environ['V_SELF'] = str(sys.modules['sitecustomize'].__file__ == __file__)\n",
    )
    last = shadowed(tmp_path / "last", "import os; os.environ['V_LAST'] = '1'")
    ours = pysite(tmp_path / "ours", {"V_F": ("ours", "force")})
    variables, path, file = shown(python_runs(python, [ours, next_one, last]))
    assert variables == {b"V_F": b"ours", b"V_SAW": b"ourssitecustomizenext", b"V_COUNT": b"x", b"V_SELF": b"True"}
    assert file == str(ours / "sitecustomize.py")
    assert path[1:4] == [str(ours), str(next_one), str(last)]


@every3
def test_a_package_is_a_next_one_and_a_bare_directory_is_none(tmp_path: Path, python: str) -> None:
    (tmp_path / "bare" / "sitecustomize").mkdir(parents=True)
    package = shadowed(tmp_path / "package", "")
    (package / "sitecustomize.py").unlink()
    (package / "sitecustomize").mkdir()
    (package / "sitecustomize" / "__init__.py").write_text("import os\nfrom . import more\nos.environ['V_P'] = more.x")
    (package / "sitecustomize" / "more.py").write_text("x = '1'")
    ours = pysite(tmp_path / "ours", {})
    variables, _, _ = shown(python_runs(python, [ours, tmp_path / "bare", package]))
    assert variables == {b"V_P": b"1"}


@every3
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1/0", "ZeroDivisionError: division by zero"),
        ("def broken(:", "SyntaxError: invalid syntax"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("class E(Exception):\n    def __str__(self): 1/0\nraise E", None),
        ("raise Exception('two\\nlines')", "Exception: two lines"),
    ],
)
def test_a_failing_next_one_leaves_our_variables_and_one_line(
    tmp_path: Path, python: str, text: str, says: str | None
) -> None:
    next_one = shadowed(tmp_path / "next", text)
    ours = pysite(tmp_path / "ours", {"V_F": ("ours", "force")})
    done = python_runs(python, [ours, next_one])
    assert done.returncode == 0
    variables, path, file = ast.literal_eval(done.stdout)
    assert (variables, file) == ([(b"V_F", b"ours")], str(ours / "sitecustomize.py"))
    assert str(ours) in path
    lines = done.stderr.splitlines()
    if says is None:
        assert lines == []
    else:
        assert len(lines) == 1
        assert lines[0].startswith(f"lamplighter sitecustomize: {next_one}/sitecustomize.py failed: ")
        assert says in lines[0]


@every3
def test_no_stderr_is_no_trouble(tmp_path: Path, python: str) -> None:
    ours, next_one = pysite(tmp_path / "ours", {"V_F": ("ours", "force")}), shadowed(tmp_path / "next", "1/0")
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" -c "$1" 2>&-', python, SHOW],
        env={"PYTHONPATH": f"{ours}:{next_one}", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "b'V_F', b'ours'" in done.stdout


@every3
def test_two_deployments_and_their_links_do_not_loop(tmp_path: Path, python: str) -> None:
    one = pysite(tmp_path / "one", {"V_ONE": ("1", "default"), "V_BOTH": ("1", "default")})
    two = pysite(tmp_path / "two", {"V_TWO": ("2", "default"), "V_BOTH": ("2", "default")})
    link = tmp_path / "link"
    link.symlink_to(one)
    last = shadowed(tmp_path / "last", "import os; os.environ['V_LAST'] = os.environ.get('V_LAST', '') + 'x'")
    variables, _, file = shown(python_runs(python, [one, link, two, two, one, last]))
    assert variables == {b"V_ONE": b"1", b"V_BOTH": b"1", b"V_TWO": b"2", b"V_LAST": b"x"}
    assert file == str(one / "sitecustomize.py")


# ddtrace's way: take its directory off sys.path, import the next sitecustomize, put the directory back.
CHAINS_BY_IMPORT = """
import os, sys
os.environ["V_DD"] = os.environ.get("V_DD", "") + "x"
here = os.path.dirname(__file__)
index = sys.path.index(here)
del sys.path[index]
mine = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = mine
finally:
    sys.path.insert(index, here)
"""


@every3
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_meets_another_chaining_file_in_both_orders(tmp_path: Path, python: str, first: str) -> None:
    theirs = shadowed(tmp_path / "theirs", CHAINS_BY_IMPORT)
    ours = pysite(tmp_path / "ours", {"V_F": ("ours", "force")})
    last = shadowed(tmp_path / "last", "import os; os.environ['V_LAST'] = os.environ.get('V_LAST', '') + 'x'")
    order = [ours, theirs] if first == "ours" else [theirs, ours]
    variables, path, _ = shown(python_runs(python, [*order, last]))
    assert variables == {b"V_F": b"ours", b"V_DD": b"x", b"V_LAST": b"x"}
    assert path[1:4] == [*map(str, order), str(last)]


@every3
def test_what_the_next_one_adds_to_the_path_stays_and_our_place_is_kept(tmp_path: Path, python: str) -> None:
    ours = pysite(tmp_path / "ours", {})
    next_one = shadowed(tmp_path / "next", f"import sys; sys.path.remove({str(ours)!r}); sys.path.append('/added')")
    _, path, _ = shown(python_runs(python, [ours, next_one]))
    assert path[1:3] == [str(ours), str(next_one)]
    assert path[-1] == "/added"


@every3
def test_odd_entries_on_the_path_are_passed_over(tmp_path: Path, python: str) -> None:
    archive = tmp_path / "not-a.zip"
    archive.write_bytes(b"PK")
    ours = pysite(tmp_path / "ours", {"V_F": ("1", "force")})
    last = shadowed(tmp_path / "last", "import os; os.environ['V_LAST'] = '1'")
    variables, _, _ = shown(python_runs(python, [ours, archive, tmp_path / "missing", Path("/dev/null"), last]))
    assert variables == {b"V_F": b"1", b"V_LAST": b"1"}


# -- workers

WORKER = """
import multiprocessing, os
def work(queue):
    queue.put({name: value for name, value in os.environ.items() if name.startswith("V_")})
if __name__ == "__main__":
    os.environ["V_D"] = os.environ["V_F"] = "server"
    context = multiprocessing.get_context(os.environ["METHOD"])
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(sorted(queue.get().items()))
    process.join()
"""


@every3
@pytest.mark.parametrize(("method", "forced"), [("spawn", "ours"), ("forkserver", "ours"), ("fork", "server")])
def test_force_wins_over_the_server_in_spawned_workers(tmp_path: Path, python: str, method: str, forced: str) -> None:
    """facts: with fork no sitecustomize runs again, so the server's own value stays."""
    ours = pysite(tmp_path / "ours", {"V_D": ("ours", "default"), "V_F": ("ours", "force")})
    (tmp_path / "server.py").write_text(WORKER)
    environ = {"PYTHONPATH": str(ours), "METHOD": method, "LAMPLIGHTER_RECORDS": str(tmp_path)}
    done = subprocess.run(
        [python, tmp_path / "server.py"], env=environ, capture_output=True, text=True, check=False, cwd="/"
    )
    if method == "forkserver":  # it starts before the server's assignment could matter, and forks from there
        assert ast.literal_eval(done.stdout) in (
            [("V_D", "server"), ("V_F", "ours")],
            [("V_D", "ours"), ("V_F", "ours")],
        )
    else:
        assert ast.literal_eval(done.stdout) == [("V_D", "server"), ("V_F", forced)]
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    workers = [each for each in records if "spawn_main" in str(each["argv"])]
    assert len(workers) == (method == "spawn")
    assert all(each["differ"] == ["V_D"] for each in workers)
