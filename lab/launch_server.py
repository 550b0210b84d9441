"""The demo server's entry point, started by its path: puts the project on sys.path, nothing else.

A file of its own because every worker imports the main module again: what they run must live in modules.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

if __name__ == "__main__":
    from lab.server import main

    sys.exit(main(sys.argv[1:]))
