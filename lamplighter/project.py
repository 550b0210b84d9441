"""Where that lies which comes with the program and is no part of the package: roles/, templates/, inventory/, lab/."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
