"""How `./inv` and `lamplighter` begin, and how `./inv` ends: soon, and without losing a word.

Measured on `status`: what Invoke imports for its own tests' sake is a tenth of the CPU time, taking the interpreter
down piece by piece another tenth; without byte code on the disk all of it takes twice as long.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from invoke.program import Program

#: Objects that are made between two looks for circles of them that nobody needs: an import makes many, and no circle.
COLLECT_EVERY = 50_000


def main() -> NoReturn:
    """Run the task of the command line, whose first word is where tasks.py lies; never returns."""
    keep_streams()
    let_interrupts_end()
    gc.set_threshold(COLLECT_EVERY)
    root, *words = sys.argv[1:]
    sys.argv[:] = ["inv", *words]
    # Invoke turns byte code off by itself, and each command would compile the whole project again
    keep = [] if sys.dont_write_bytecode else ["--write-pyc"]
    program = imported_program()
    try:
        program.run(["inv", *keep, "--search-root", root, *words])
    except BrokenPipeError:  # who reads no further (`./inv --list | head -1`) sees no traceback
        os._exit(141)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            leave(end.code or 0)
        raise
    leave(0)


def program() -> None:
    """Run the command line of the program ``lamplighter``."""
    keep_streams()
    let_interrupts_end()
    importlib.import_module("lamplighter.tasks.program").main()


def let_interrupts_end() -> None:
    """Until a task takes signals itself, Ctrl-C ends the process with 130 and without a traceback."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def keep_streams() -> None:
    """Leave none of the standard streams closed: a socket that got its number would be taken for the stream."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def imported_program() -> Program:
    """Invoke, without unittest.mock, and with that asyncio, which it imports for a class that tests alone use.

    PyYAML, which the inventory needs, stands for the copy of it that Invoke has: it takes either.
    """
    sys.modules.setdefault("invoke.vendor.yaml", importlib.import_module("yaml"))
    absent = {name: ModuleType(name) for name in ("unittest", "unittest.mock") if name not in sys.modules}
    for module in absent.values():
        vars(module)["Mock"] = object
    sys.modules.update(absent)
    try:
        program: Program = importlib.import_module("invoke.main").program
    finally:
        for name in absent:  # whoever wants them later gets the real ones
            del sys.modules[name]
    return program


def leave(code: int) -> NoReturn:
    """End the process with all that is said written and all that asked for it called, but for tidying up memory."""
    if any(not each.daemon for each in threading.enumerate() if each is not threading.main_thread()):
        sys.exit(code)  # which waits for them
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            sys.exit(code)  # which knows what to say of it
    os._exit(code & 0xFF)
