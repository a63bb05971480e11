#!/usr/bin/env bash
# Lints and type-checks the whole tree. All checks run; the exit status is 1 if one fails.
# Needs `scripts/setup.sh test`.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

failed=()
check() {
    "$@" || failed+=("$*")
}
check .venv/bin/python -m ruff check --quiet .
check .venv/bin/python -m ruff format --quiet --check .
check .venv/bin/shellcheck .ci/run scripts/*.sh scripts/*.sbatch benchmarks/*.sh
check .venv/bin/python -m mypy --no-error-summary

if (( ${#failed[@]} )); then
    printf 'check: failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "check: ruff, shellcheck and mypy found nothing"
