#!/usr/bin/env bash
# Sets up .venv for this checkout: the package, its pinned dependencies and the C++ extension.
# Usage: scripts/setup.sh [convert | test]     `convert` adds transformers, to verify conversions; `test` adds what the
# tests and the linters need.
# Returns at once if nothing it depends on has changed. PYTHON picks the interpreter that creates .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra="${1:-run}"
case "$extra" in
    run) package="." ;;
    convert | test) package=".[$extra]" ;;
    *) echo "usage: scripts/setup.sh [convert | test]" >&2; exit 2 ;;
esac
python="${PYTHON:-python3}"

# Digest of all that the installation depends on, also of the folder, which an editable installation points at.
fingerprint() {
    { echo "$PWD"; cat constraints.txt requirements.txt setup.py pyproject.toml megatron/*/native/*; } | sha256sum | cut -d " " -f 1
}

is_current() {
    local stamp
    for stamp in ".venv/setup-$extra" .venv/setup-test; do
        [[ -f $stamp && $(<"$stamp") == "$1" ]] && compgen -G "megatron/data/helpers.*.so" > /dev/null \
            && compgen -G "megatron/parallel/token_operators.*.so" > /dev/null && return
    done
    return 1
}

check_python() {
    local found
    if ! found="$("$python" -c 'import sys; print(*sys.version_info[:2])')"; then
        echo "setup: $python does not run; install Python 3.11 or newer, or name another: PYTHON=/path/to/python3" >&2
        exit 1
    fi
    read -r major minor <<< "$found"
    if (( major != 3 || minor < 11 )); then
        echo "setup: $python is Python $major.$minor, but the pinned versions need 3.11 or newer; name another with PYTHON" >&2
        exit 1
    fi
    if ! "$python" -c "import ensurepip" 2> /dev/null; then
        echo "setup: $python cannot create virtual environments; install its venv package (Debian: python3-venv)" >&2
        exit 1
    fi
}

wanted="$(fingerprint)"
is_current "$wanted" && exit 0

if [[ ! -x .venv/bin/python ]]; then
    check_python
    echo "setup: creating .venv with $("$python" --version)"
    "$python" -m venv .venv
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check -qq)
rm -f .venv/setup-*
trap 'echo "setup: pip failed; if an earlier setup was interrupted, remove .venv, and run this again" >&2' ERR
# torch first: the build of deepspeed imports it
echo "setup: installing torch"
"${pip[@]}" install -c constraints.txt torch
echo "setup: installing the package${1:+ and what \"$1\" adds}, and building the extension"
"${pip[@]}" install -c constraints.txt -e "$package"
echo "$wanted" > ".venv/setup-$extra"
