#!/usr/bin/env bash
# Sets up .venv, then runs the linters, the type checker and the tests, whose files are distributed over one process a
# core, at most four. Arguments are passed to pytest, which then runs in one process:
#     scripts/test.sh tests/config/test_config.py -k unknown
#     scripts/test.sh -m ''                            the slow tests too
# MEGATRON_TEST_DATA names a folder of real text; without it the tests that read it are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh test
checks=0
bash scripts/check.sh || checks=$?
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if (( $# == 0 )); then
    cores=$(env -u OMP_NUM_THREADS nproc) # nproc would return that
    # the tests of a file share fixtures, so a file stays in one process
    set -- -n "$(( cores < 4 ? cores : 4 ))" --dist loadfile
fi
.venv/bin/python -m pytest "$@"
exit "$checks"
