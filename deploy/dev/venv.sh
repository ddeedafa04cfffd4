#!/bin/sh
# Make the virtual environment that every make target uses, from pins with hashes. usage: venv.sh PYTHON VENV REQUIREMENTS
# Says which package to install where python3 is missing, too old, or without venv; changes nothing outside VENV.
set -eu
python=$1 venv=$2 pins=$3

command -v "$python" >/dev/null 2>&1 || {
  echo "sentinel needs Python 3.11 to 3.13 and found no '$python'. On Debian: apt-get install python3 python3-venv" >&2; exit 1; }
"$python" - <<'PY' || exit 1
import sys
if not (3, 11) <= sys.version_info[:2] < (3, 14):
    sys.exit(f"sentinel needs Python 3.11 to 3.13; {sys.executable} is {sys.version.split()[0]}. "
             "Install a supported one (Debian 12: apt-get install python3 python3-venv) or name it: make PYTHON=python3.12 ...")
try:
    import ensurepip, venv
except ImportError:
    sys.exit(f"{sys.executable} comes without venv. On Debian: apt-get install python3-venv")
PY
[ -x "$venv/bin/python" ] || { echo "setting up $venv (first use)" >&2; "$python" -m venv "$venv"; }
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --require-hashes -r "$pins"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
