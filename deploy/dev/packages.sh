#!/bin/sh
# Make sure that the programs named in packages.txt are here. As root with apt-get it installs what is missing and starts no
# service, now or at the next boot; anywhere else it says what is missing and which package to install. Quick when all is there.
# Ends with 0 unless something is missing and CI=true.
set -eu
list=$(dirname "$0")/packages.txt
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin  # an ordinary user's PATH leaves out the daemons

missing() {  # one "program package" a line
  while read -r program package; do
    case $program in ''|'#'*) continue ;; esac
    command -v "$program" >/dev/null 2>&1 || echo "$program $package"
  done <"$list"
}

units_of() {  # the services that these packages brought
  dpkg -L "$@" 2>/dev/null | grep -E '/systemd/system/[^/@]+\.(service|timer|socket)$' | sed 's|.*/||' | sort -u
}

lacking=$(missing)
[ -n "$lacking" ] || exit 0
packages=$(echo "$lacking" | cut -d' ' -f2 | sort -u | tr '\n' ' ')

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing for the tests: $packages" >&2
  # Debian starts a daemon that it installs unless policy-rc.d says 101. One that is already here is the machine's own: kept.
  policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 130' INT TERM HUP
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
  fi
  log=$(mktemp)
  # shellcheck disable=SC2086  # a list of package names
  if ! { DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 update &&
         DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 install --no-install-recommends $packages
       } >"$log" 2>&1 </dev/null; then
    tail -n 5 "$log" >&2
    echo "apt-get could not install them all" >&2
  fi
  rm -f "$log"
  # shellcheck disable=SC2046,SC2086
  if command -v systemctl >/dev/null 2>&1; then systemctl disable --quiet $(units_of ${packages}) >/dev/null 2>&1 || true; fi
fi

lacking=$(missing)
[ -n "$lacking" ] || exit 0
echo "$lacking" | while read -r program package; do
  echo "not on this machine: $program (apt-get install $package); the tests that need it are left out" >&2
done
case ${CI:-} in 1|true|yes) echo "CI=true: nothing may be left out" >&2; exit 1 ;; esac
