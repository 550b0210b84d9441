#!/bin/sh
# For CI: says what is wrong with the inventory before a night does. Opens no connection and needs no secret.
# Any CI that has Python >= 3.10 can run it; $LAMPLIGHTER is what pip shall install: a wheel, a directory or a URL.
set -eu
cd "$(dirname "$0")/.."
python3 -m venv .venv
.venv/bin/python -m pip install --quiet "${LAMPLIGHTER:?say what to install: a wheel, a directory or a URL}"
.venv/bin/lamplighter lint
