#!/bin/sh
# The tests that fit in CI, in two halves side by side: most of them wait (for leases, stores that come back, scenarios that play),
# so that two processes on two cores take little more than half of the time. The second half's output follows the first's.
# usage: tests.sh PYTHON [arguments for pytest: then one run with these]
python=$1
shift
[ $# -gt 0 ] && exec "$python" -m pytest -m "not long" "$@"
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
trap 'kill "$other" 2>/dev/null; exit 130' INT TERM
"$python" -m pytest -m "not long" tests/e2e tests/property tests/conformance/test_[a-f]*.py >"$log" 2>&1 &
other=$!
"$python" -m pytest -m "not long" tests/conformance/test_[!a-f]*.py tests/unit
first=$?
wait "$other"
second=$?
cat "$log"
[ "$first" = 0 ] || exit "$first"
exit "$second"
