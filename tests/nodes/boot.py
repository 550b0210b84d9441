"""Becomes PID 1 of a node: builds the node's root, enters it, then runs sshd and reaps, or becomes systemd.

Started in fresh mount, PID, UTS, IPC and network namespaces (tests/nodes/park.py) as ``python -I -S boot.py``, with the
JSON of `park.BootSpec` on stdin: what PID 1 has in its argv, every process listing on the node shows. The root is an
overlay of this machine's ``/`` on the node's disk, a tmpfs that the park keeps so that a reboot finds what was written.
/proc /dev /dev/shm /run /tmp are the node's own and new at each boot; /root and /home are its own and on the disk.

facts: /proc/sys must be read-only in a node, else systemd-sysctl sets this machine's; a boot id is the kernel's, not
the namespace's, so each boot brings its own file over it; systemd asks questions on the console without a machine id.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import signal
import socket
import sys
import uuid

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
CLONE_NEWCGROUP = 0x02000000
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OPS = 1001
SSHD = "/usr/sbin/sshd"
SSHD_CONFIG = "/etc/node/sshd_config"
HOST_KEY = "/etc/node/host_ed25519"
# Of the host's own services nothing runs in a node; these are pulled in by basic.target and would touch the host.
MASKED = [
    *("systemd-resolved", "systemd-networkd", "systemd-networkd-wait-online", "systemd-timesyncd", "systemd-sysctl"),
    *("systemd-modules-load", "systemd-udevd", "systemd-udev-trigger", "systemd-binfmt", "systemd-update-utmp"),
    *("systemd-firstboot", "getty@tty1", "console-getty", "e2scrub_reap"),
]

libc = ctypes.CDLL(None, use_errno=True)


def main(spec: dict) -> None:
    os.umask(0o022)  # a machine's own, whatever the tests run under
    root = build_root(spec)
    write_identity(root, spec)
    write_login(root, spec)
    if spec["systemd"]:
        write_units(root)
        enter_cgroup(spec["cgroup"])
    enter(root)
    if spec["systemd"]:
        become_systemd(spec)
    else:
        serve()


# -- the root


def build_root(spec: dict) -> str:
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    disk, root = spec["disk"], f"{spec['disk']}/root"
    for folder in ("upper", "work", "root", "home-root", "home"):
        os.makedirs(f"{disk}/{folder}", exist_ok=True)
    mount("lamplighter-node", root, "overlay", 0, f"lowerdir=/,upperdir={disk}/upper,workdir={disk}/work")
    mount_kernel(root, spec)
    mount_dev(root)
    for folder, mode in (("run", "0755"), ("tmp", "1777")):
        mount("lamplighter-node", f"{root}/{folder}", "tmpfs", 0, f"mode={mode}")
    # 0711, not 0700: the interpreter that the tests run with may lie under /root, and ops must be able to use it
    for source, folder, mode in ((f"{disk}/home-root", "root", 0o711), (f"{disk}/home", "home", 0o755)):
        os.chmod(source, mode)
        mount(source, f"{root}/{folder}", None, MS_BIND)
    for path in spec["visible"]:
        bind_read_only(path, root + path)
    return root


def mount_kernel(root: str, spec: dict) -> None:
    mount("proc", f"{root}/proc", "proc", 0)
    mount(f"{root}/proc/sys", f"{root}/proc/sys", None, MS_BIND)
    mount(None, f"{root}/proc/sys", None, MS_REMOUNT | MS_BIND | MS_RDONLY)
    write(f"{spec['disk']}/boot_id", f"{uuid.uuid4()}\n")
    mount(f"{spec['disk']}/boot_id", f"{root}/proc/sys/kernel/random/boot_id", None, MS_BIND)
    if os.path.exists(f"{root}/proc/sysrq-trigger"):
        mount("/dev/null", f"{root}/proc/sysrq-trigger", None, MS_BIND)
    mount("sysfs", f"{root}/sys", "sysfs", MS_RDONLY)


def mount_dev(root: str) -> None:
    mount("lamplighter-node", f"{root}/dev", "tmpfs", 0, "mode=0755")
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        write(f"{root}/dev/{name}", "")
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, MS_BIND)
    write(f"{root}/dev/console", "")
    mount("/dev/null", f"{root}/dev/console", None, MS_BIND)
    os.mkdir(f"{root}/dev/pts")
    mount("devpts", f"{root}/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=620")
    os.mkdir(f"{root}/dev/shm")
    mount("lamplighter-node", f"{root}/dev/shm", "tmpfs", 0, "mode=1777,size=64m")
    for name, target in {"ptmx": "pts/ptmx", "fd": "/proc/self/fd"}.items():
        os.symlink(target, f"{root}/dev/{name}")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")


def bind_read_only(source: str, target: str) -> None:
    os.makedirs(target, exist_ok=True)
    mount(source, target, None, MS_BIND)
    mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY)


# -- what makes it this node


def write_identity(root: str, spec: dict) -> None:
    name = spec["name"]
    socket.sethostname(name)
    write(f"{root}/etc/hostname", f"{name}\n")
    write(f"{root}/etc/hosts", f"127.0.0.1 localhost {name}\n::1 localhost\n{spec['hosts']}")
    write(f"{root}/etc/resolv.conf", "")
    write(f"{root}/etc/fstab", "")
    if not os.path.exists(f"{spec['disk']}/born"):
        write(f"{root}/etc/machine-id", f"{uuid.uuid4().hex}\n")
        # of this machine's own services none may start in a node; what the node's own tests enable lies there too
        for leftover in ("var/lib/lamplighter", "var/log/journal", "etc/systemd/system/multi-user.target.wants"):
            shutil.rmtree(f"{root}/{leftover}", ignore_errors=True)
        write(f"{spec['disk']}/born", "")
    for path, text in spec["files"].items():
        write(root + path, text, 0o755)
    for path in spec["shared"]:
        os.makedirs(root + path, exist_ok=True)
        os.chmod(root + path, 0o1777)


def write_login(root: str, spec: dict) -> None:
    drop_uid(f"{root}/etc/passwd", OPS)  # this machine may have a user of that number, whose home systemd would take
    add_line(f"{root}/etc/passwd", "ops", f"ops:x:{OPS}:{OPS}:node operator:/home/ops:/bin/bash")
    add_line(f"{root}/etc/group", "ops", f"ops:x:{OPS}:")
    add_line(f"{root}/etc/shadow", "ops", "ops:*:19000:0:99999:7:::")
    for home, uid in (("/root", 0), ("/home/ops", OPS)):
        os.makedirs(f"{root}{home}/.ssh", 0o700, exist_ok=True)
        write(f"{root}{home}/.ssh/authorized_keys", spec["authorized_key"], 0o600)
        for path in (home, f"{home}/.ssh", f"{home}/.ssh/authorized_keys"):
            os.chown(root + path, uid, uid)
    write(root + HOST_KEY, spec["host_key"], 0o600)
    pam = "yes" if spec["systemd"] else "no"  # logind hears of a session through PAM only
    write(root + SSHD_CONFIG, SSHD_LINES.format(host_key=HOST_KEY, pam=pam))


SSHD_LINES = """Port 22
HostKey {host_key}
UsePAM {pam}
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
PrintMotd no
PrintLastLog no
UseDNS no
AcceptEnv LANG LC_*
PidFile /run/sshd.pid
MaxSessions 50
MaxStartups 100
Subsystem sftp internal-sftp
"""


def write_units(root: str) -> None:
    units = f"{root}/etc/systemd/system"
    write(
        f"{units}/node.target",
        "[Unit]\nDescription=test node\nRequires=basic.target\n"
        "Wants=ssh.service systemd-user-sessions.service dbus.service systemd-logind.service multi-user.target\n"
        "After=basic.target ssh.service\nAllowIsolate=yes\n",
    )
    write(  # without the services that this machine's own one pulls in
        f"{units}/multi-user.target",
        "[Unit]\nDescription=test node, services\nRequires=basic.target\nAfter=basic.target\nAllowIsolate=yes\n",
    )
    write(
        f"{units}/ssh.service.d/node.conf",
        f"[Service]\nExecStartPre=\nExecStart=\nExecStart={SSHD} -D -f {SSHD_CONFIG}\nType=simple\n",
    )
    write(f"{root}/etc/systemd/journald.conf.d/node.conf", "[Journal]\nStorage=volatile\n")
    for name in MASKED:
        unit = f"{units}/{name}.service"
        if not os.path.islink(unit):
            os.symlink("/dev/null", unit)


def drop_uid(path: str, uid: int) -> None:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        kept = [line for line in file.read().splitlines() if line.split(":")[2:3] != [str(uid)]]
    write(path, "\n".join(kept) + "\n", mode=None)


def add_line(path: str, name: str, line: str) -> None:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        kept = [old for old in file.read().splitlines() if not old.startswith(f"{name}:")]
    write(path, "\n".join([*kept, line]) + "\n", mode=None)


# -- entering it


def enter_cgroup(directory: str) -> None:
    """A cgroup of its own, then a cgroup namespace in which it is the root: what systemd takes for the whole tree."""
    write(f"{directory}/cgroup.procs", "0", mode=None)
    check(libc.unshare(CLONE_NEWCGROUP), "unshare cgroup")


def enter(root: str) -> None:
    os.chdir(root)
    os.makedirs("run/old", exist_ok=True)
    check(libc.syscall(PIVOT_ROOT[platform.machine()], b".", b"run/old"), "pivot_root")
    os.chdir("/")
    check(libc.umount2(b"/run/old", MNT_DETACH), "umount /run/old")
    os.rmdir("/run/old")
    devnull = os.open("/dev/null", os.O_RDWR)
    os.dup2(devnull, 0)


def become_systemd(spec: dict) -> None:
    mount("cgroup2", "/sys/fs/cgroup", "cgroup2", 0)
    systemd = "/lib/systemd/systemd"
    environment = {"container": "lamplighter", "PATH": PATH, **spec["environment"]}
    words = [systemd, "--log-target=journal", "--show-status=0", "--unit=node.target"]
    os.execve(systemd, words, environment)


def serve() -> None:
    """sshd, started once; PID 1 then only reaps. Whoever stops sshd for a test starts it again."""
    os.makedirs("/run/sshd", exist_ok=True)
    os.makedirs("/run/lock", exist_ok=True)
    os.chmod("/run/lock", 0o1777)
    signals = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    environment = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": PATH}
    os.posix_spawn(SSHD, [SSHD, "-f", SSHD_CONFIG, "-E", "/run/sshd.log"], environment, setsigmask=[])
    while signal.sigwait(signals) == signal.SIGCHLD:
        reap()


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


# -- atoms


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    data = None if options is None else options.encode()
    check(libc.mount(*words, ctypes.c_ulong(flags), data), f"mount {source} on {target}")


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def write(path: str, text: str, mode: int | None = 0o644) -> None:
    if os.path.islink(path):  # /etc/resolv.conf may point out of /etc, and the write must stay here
        os.unlink(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
    if mode is not None:
        os.chmod(path, mode)


if __name__ == "__main__":
    main(json.load(sys.stdin))
