# Stage 2: streamed to the node's python3 on stdin, before anything of ours is there. Never imported, always exec'd with
# NONCE defined. Reads one request frame, makes sure that the runner of the wanted digest is unpacked below the root
# directory, and hands over to lamplighter.node.__main__. Its first lines must parse on any Python that accepts -I.
import sys

if sys.version_info < (3, 9):
    sys.stdout.write("\n@@lamplighter %s python %s\n" % (NONCE, sys.version.split()[0]))  # noqa: F821
    sys.exit(3)
import contextlib
import hashlib
import json
import os
import shutil
import stat

os.umask(0o077)
source = sys.stdin.buffer


def say(word, detail=""):
    sys.stdout.write("\n@@lamplighter %s %s %s\n" % (NONCE, word, detail))  # noqa: F821
    sys.stdout.flush()


def refuse(detail):
    say("refused", detail)
    sys.exit(3)


def frame():
    length = source.readline(20)
    if not length.strip().isdigit():
        miss()
    data = source.read(int(length))
    if len(data) != int(length):
        miss()
    return data


def asked():
    try:
        return json.loads(frame())
    except ValueError:
        miss()


def miss():
    sys.exit(97)  # somebody else read some of our input, or the wire broke; a traceback would quote what did arrive


def choose_root(wanted):
    if wanted:
        return os.path.abspath(os.path.expanduser(wanted))
    if os.geteuid() == 0:
        return "/var/lib/lamplighter"
    try:
        with open("/etc/machine-id") as file:
            machine = file.read().strip()
    except OSError:
        machine = ""
    # Homes may be on NFS and shared by nodes: the machine id keeps their states apart.
    return os.path.join(os.path.expanduser("~/.local/state/lamplighter"), machine or os.uname().nodename)


def make_private(path):
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        state = os.lstat(path)
    except OSError as error:
        refuse("%s: %s" % (path, error.strerror))
    if not stat.S_ISDIR(state.st_mode):
        refuse("%s is not a directory" % path)
    if state.st_uid != os.geteuid() or state.st_mode & 0o022:
        refuse(
            "%s belongs to uid %d, mode %o: others could replace what we run"
            % (path, state.st_uid, state.st_mode & 0o777)
        )


def digest_of(directory):
    # The digest of an unpacked runner: every .py file, by relative path. Bytecode caches come and go beside them.
    found = []
    for base, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [os.path.relpath(os.path.join(base, name), directory) for name in files]
    total = hashlib.sha256()
    for name in sorted(found):
        with open(os.path.join(directory, name), "rb") as file:
            data = file.read()
        total.update(b"%d %s %d\n" % (len(name.encode()), name.encode(), len(data)) + data)
    return total.hexdigest()


def unpack(data, directory, digest):
    import fcntl
    import io
    import zipfile

    fresh, aside = directory + ".new", directory + ".old"
    with open(os.path.join(os.path.dirname(directory), ".lock"), "w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # of sessions that begin together one unpacks, the others find it done
        if digest_of(directory) == digest:
            return
        try:
            remove(fresh)
            remove(aside)
            zipfile.ZipFile(io.BytesIO(data)).extractall(fresh)
            if digest_of(fresh) != digest:
                refuse("what arrived is not the runner %s that was announced" % digest[:12])
            if os.path.lexists(directory):  # truncated or damaged: moved aside whole, so that nobody sees half of each
                os.rename(directory, aside)
            os.rename(fresh, directory)
        finally:
            remove(fresh)
            remove(aside)


def remove(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


request = asked()
root = choose_root(request.get("root"))
make_private(root)
home = os.path.join(root, "bin", request["runner"])
make_private(os.path.dirname(home))
with contextlib.suppress(OSError):  # not there yet, or a disk that takes no writes: a verb that reads needs none
    os.utime(home)  # in use: those that nobody has used for long are removed
if digest_of(home) == request["runner"]:
    say("have")
else:
    say("need")
    try:
        unpack(frame(), home, request["runner"])
    except OSError as error:
        refuse("%s: %s" % (home, error.strerror))
sys.path.insert(0, home)
from lamplighter.node.__main__ import serve  # noqa: E402

serve(request, root, home)
