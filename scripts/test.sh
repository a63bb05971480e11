#!/usr/bin/env bash
# Sets up what is missing, then runs the linters, the type checker and the tests. Further arguments go to pytest:
#     scripts/test.sh tests/test_config.py -k unknown
#     scripts/test.sh -m ''                            the slow tests too
# MEGATRON_TEST_DATA names a folder of real text; the tests that need it are skipped without.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh test
checks=0
bash scripts/check.sh || checks=$?
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
.venv/bin/python -m pytest "$@"
exit "$checks"
