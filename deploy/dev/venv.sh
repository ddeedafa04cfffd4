#!/bin/sh
# Make the virtual environment that every make target uses, from pins with hashes. usage: venv.sh PYTHON VENV REQUIREMENTS
# Says which package to install where python3 is missing, too old, or without venv; as root with apt-get it installs python3-venv
# itself, and changes nothing else outside VENV. Does nothing when VENV already holds these very pins for this very Python; makes
# a half-made one anew.
set -eu
python=$1 venv=$2 pins=$3
cd "$(dirname "$0")/../.."
unset PYTHONHOME PYTHONPATH
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

command -v "$python" >/dev/null 2>&1 || {
  echo "sentinel needs Python 3.11 to 3.13 and found no '$python'. On Debian: apt-get install python3 python3-venv" >&2; exit 1; }
version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3], sys.prefix)') || {
  echo "'$python' does not run; name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
case $version in
  3.11.*|3.12.*|3.13.*) ;;
  *) echo "sentinel needs Python 3.11 to 3.13; '$python' is ${version%% *}. Install a supported one (Debian 12: apt-get install" \
          "python3 python3-venv) or name it: make PYTHON=python3.12 ..." >&2; exit 1 ;;
esac
# Debian's own python3 comes without the means to make an environment that has pip.
if [ "${version#* }" = /usr ] && ! "$python" -c 'import ensurepip' 2>/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing python3-venv" >&2
  { DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 update &&
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 install --no-install-recommends python3-venv
  } >/dev/null 2>&1 </dev/null || true  # what is missing then is said below
fi
for module in ensurepip:python3-venv venv:python3-venv ssl:libpython3-stdlib; do
  "$python" -c "import ${module%%:*}" 2>/dev/null || {
    echo "'$python' (${version%% *}) comes without ${module%%:*}. On Debian: apt-get install ${module#*:}" >&2; exit 1; }
done

# Two makes at once (a demo here, the tests there) must not build the same folder; the lock ends with this script.
if command -v flock >/dev/null 2>&1; then exec 9<pyproject.toml; flock 9; fi

want="$version $(cat "$pins" pyproject.toml | sha256sum | cut -d' ' -f1) $(pwd)"
stamp=$venv/.$(basename "$pins" .txt)
# The test pins contain the run-time ones, so an environment for the tests serves both.
all="$version $(cat requirements/test.txt pyproject.toml | sha256sum | cut -d' ' -f1) $(pwd)"
if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] || [ "$(cat "$venv/.test" 2>/dev/null)" = "$all" ]; then exit 0; fi

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
   [ "$(sed -n 's/^version *= *//p' "$venv/pyvenv.cfg" 2>/dev/null)" != "${version%% *}" ]; then
  echo "setting up $venv with Python ${version%% *} (first use)" >&2
  "$python" -m venv --clear "$venv" || {
    rm -rf "$venv"
    echo "'$python' could not make a virtual environment with pip in it. On Debian: apt-get install python3-venv" >&2; exit 1; }
fi
rm -f "$venv/.run" "$venv/.test"
{ "$venv/bin/python" -m pip install -qq --only-binary :all: --require-hashes -r "$pins" &&
  "$venv/bin/python" -m pip install -qq --no-deps --no-build-isolation --editable . ; } || {
  echo "the pinned packages of $pins could not be installed into $venv (pip says why above); is a package index reachable?" >&2; exit 1; }
echo "$want" >"$stamp"
