#!/usr/bin/env bash
# Sets up what is missing, then runs the linters, the type checker and the tests, whose files are dealt to as many
# processes as there are cores, four at most. Further arguments go to pytest, in one process:
#     scripts/test.sh tests/test_config.py -k unknown
#     scripts/test.sh -m ''                            the slow tests too
# MEGATRON_TEST_DATA names a folder of real text; the tests that need it are skipped without.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh test
checks=0
bash scripts/check.sh || checks=$?
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if (( $# == 0 )); then
    cores=$(env -u OMP_NUM_THREADS nproc) # it would take that for their number
    # a file's tests share what they build, so it stays in one process
    set -- -n "$(( cores < 4 ? cores : 4 ))" --dist loadfile
fi
.venv/bin/python -m pytest "$@"
exit "$checks"
