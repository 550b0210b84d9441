# Gives the variables of one LLM server to every Python that is started below it. Rendered by lamplighter.
#
# Python imports this file at its start, because the launch script puts its directory first on PYTHONPATH. It runs in
# every process of the server and in every tool below, on whatever Python that is. Hence: nothing on stdout, no import
# of a module that start-up has not imported already, no exception and no exit that would be ours.
import os
import sys

# Release that this file belongs to.
DIGEST = "DIGEST"

# (name, value, force). Forced: assigned in every process, so it wins over what the server wrote into the environment of
# its workers. Else: only where the name is missing.
VARIABLES = (
    (b'NCCL_ALGO', b'Ring', False),
    (b'NCCL_P2P_LEVEL', b'SYS', True),
    (b'NCCL_PROTO', b'LL', False),
)


def environment():
    # Bytes, so that the locale of the process changes nothing. Python 2 has bytes there anyway.
    return getattr(os, "environb", os.environ)


def apply_variables():
    live = environment()
    for name, value, force in VARIABLES:
        if force or name not in live:
            live[name] = value


def run_next(seen):
    """Run the sitecustomize that this one shadows: the first on sys.path that has not run in this process."""
    machinery = sys.modules.get("_frozen_importlib")
    external = sys.modules.get("_frozen_importlib_external")
    if machinery is None or external is None:
        return  # Python 2
    ours, before = sys.modules.get("sitecustomize"), list(sys.path)
    for entry in before:
        spec = external.PathFinder.find_spec("sitecustomize", [entry])
        if spec is None or not spec.has_location or os.path.realpath(spec.origin) in seen:
            continue
        seen.add(os.path.realpath(spec.origin))
        module = machinery.module_from_spec(spec)
        try:
            sys.modules["sitecustomize"] = module
            spec.loader.exec_module(module)
        except BaseException as error:  # SystemExit would end the server, without a word of its own
            complain(spec.origin, error)
        finally:
            sys.modules["sitecustomize"] = ours
            # What it did to sys.path stays, as it would without us; but our own entry goes back where it was.
            for index, path in enumerate(before):
                if path not in sys.path and os.path.realpath(path) == os.path.dirname(os.path.realpath(__file__)):
                    sys.path.insert(index, path)
        return


def complain(what, error):
    try:
        text = "%s failed: %s: %s" % (what, type(error).__name__, error)
        sys.stderr.write("lamplighter sitecustomize: %s\n" % " ".join(text.split()))
    except Exception:
        pass  # no stderr, or an error that cannot be printed


def leave_record():
    """Write <LAMPLIGHTER_RECORDS>/<pid>.json: the proof that the variables arrived in this process. Never a value."""
    directory = os.environ.get("LAMPLIGHTER_RECORDS")
    if not directory:
        return
    live = environment()
    stat = read("/proc/self/stat")
    fields = (
        ("pid", "%d" % os.getpid()),
        ("ppid", "%d" % os.getppid()),
        # Field 22, clock ticks since boot; the name in field 2 may hold blanks and brackets.
        ("start", text_of(stat[stat.rindex(b")") + 2 :].split()[19])),
        ("digest", quoted(DIGEST)),
        ("python", quoted("%d.%d.%d" % sys.version_info[:3])),
        ("argv", list_of(program(read("/proc/self/cmdline").split(b"\0")[:-1]))),
        ("names", list_of([name for name, _, _ in VARIABLES])),
        ("differ", list_of([name for name, value, _ in VARIABLES if live.get(name) != value])),
    )
    record = "{" + ", ".join(['"%s": %s' % field for field in fields]) + "}\n"
    temporary = os.path.join(directory, ".tmp-%d" % os.getpid())
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 384)  # rw for the owner
    try:
        if os.write(fd, record if str is bytes else record.encode("ascii")) < len(record):  # as above
            raise OSError("no room for all of it")
        os.rename(temporary, os.path.join(directory, "%d.json" % os.getpid()))
    except Exception:
        os.unlink(temporary)
        raise
    finally:
        os.close(fd)


def program(words):
    """What runs: the words before the first long flag, three at most. Behind it there may be a key."""
    for index, word in enumerate(words):
        if word.startswith(b"--"):
            return words[: min(index, 3)]
    return words[:3]


def read(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 65536)
    finally:
        os.close(fd)


def text_of(data):
    return type(u"")(data, "utf-8", "replace")  # decode() imports a codec on Python 2


def list_of(items):
    return "[%s]" % ", ".join([quoted(text_of(item)) for item in items])


def quoted(text):
    """JSON by hand: importing json costs every process of the server several milliseconds."""
    parts = []
    for character in text:
        code = ord(character)
        if code > 0xFFFF:
            code -= 0x10000
            parts.append("\\u%04x\\u%04x" % (0xD800 + (code >> 10), 0xDC00 + (code & 0x3FF)))
        elif code < 0x20 or code > 0x7E or character in '"\\':
            parts.append("\\u%04x" % code)
        else:
            parts.append(character)
    return '"%s"' % "".join(parts)


def wait_at_gate():
    """In a launcher that was started early: import what it will need, then wait until its GPUs are free.

    LAMPLIGHTER_GATE is a file with the names of the modules, which the run keeps locked. The lock goes when the run
    opens the gate, having written "go" there, or when it has ended: what was started for it then ends as well, before
    it has touched anything.
    """
    path = os.environ.pop("LAMPLIGHTER_GATE", None)  # no child of it has a gate, not even of an import
    if not path:
        return
    import fcntl

    badness = adjust_badness(b"1000")  # where memory runs out, this one goes, and not the server that serves
    missing = []
    for name in text_of(read(path)).split():
        try:
            __import__(name)
        except BaseException as error:  # the launcher will say so itself, if it needs it
            missing.append("%s: %s: %s" % (name, type(error).__name__, error))
    mark = os.open(path + ".reached", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 384)
    os.write(mark, ("[%s]\n" % ", ".join([quoted(each) for each in missing])).encode("ascii"))
    os.close(mark)
    gate = os.open(path, os.O_RDONLY)
    fcntl.flock(gate, fcntl.LOCK_SH)
    os.close(gate)
    if text_of(read(path)).split()[-1:] != ["go"]:
        os._exit(75)
    if badness:
        adjust_badness(badness)


def adjust_badness(value):
    """Set what the kernel picks its victim by when memory runs out; return what it was, None where it stays."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_RDWR)
        try:
            before = os.read(fd, 16).strip()
            os.lseek(fd, 0, os.SEEK_SET)
            os.write(fd, value)
            return before
        finally:
            os.close(fd)
    except OSError:
        return None


def start():
    seen = getattr(sys, "_lamplighter_sitecustomize", None)
    if seen is None:
        seen = sys._lamplighter_sitecustomize = set()
    seen.add(os.path.realpath(__file__))
    try:
        apply_variables()
    except Exception as error:
        complain("assigning the variables", error)
    if __name__ == "sitecustomize":  # else a hook runs us, which shadows nothing
        try:
            run_next(seen)
        except Exception as error:
            complain("the search for the next sitecustomize", error)
    try:
        leave_record()
    except Exception:
        pass  # a full disk or a directory of another user must not be a server's problem
    try:
        wait_at_gate()
    except Exception as error:
        complain("waiting for the GPUs", error)
        os._exit(75)  # what cannot wait must not begin


start()
