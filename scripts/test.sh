#!/usr/bin/env bash
# Sets up .venv, then runs the linters, the type checker and the tests, whose files are distributed over several
# processes, at most four. Arguments are passed to pytest, which then runs in one process:
#     scripts/test.sh tests/settings/test_config.py -k unknown
#     scripts/test.sh -m ''                            the slow tests too
# MEGATRON_TEST_DATA names a folder of real text; without it the tests that read it are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh test
# images often set it; then each of a thousand processes compiles what it imports: 2 s of the package, 15 s of the rest
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if (( $# == 0 )); then
    cores=$(env -u OMP_NUM_THREADS nproc) # nproc would return that
    # One process more than cores, since many tests wait for processes that start or end. The tests of a file share
    # fixtures, so a file stays in one process. Files start in the order of tests/conftest.py.
    set -- -n "$(( cores < 4 ? cores + 1 : 4 ))" --dist loadfile --no-loadscope-reorder
    # what the tests write durably, 2 GB, lies in memory if there is room: a disk takes up to milliseconds an fsync
    if (( $(df --output=avail -k /dev/shm 2> /dev/null | tail -n 1 || true) + 0 > 8 << 20 )); then
        written="$(mktemp -d /dev/shm/megatron-tests.XXXXXX)"
        trap 'rm -rf "$written"' EXIT
        set -- "$@" --basetemp "$written/tests"
    fi
fi
# beside the tests, whose processes do not use every core at first
found="$(mktemp)"
bash scripts/check.sh > "$found" 2>&1 &
checks=$!
status=0
.venv/bin/python -m pytest "$@" || status=$?
wait "$checks" || status=1
cat "$found"
rm "$found"
exit "$status"
