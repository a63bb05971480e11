# shellcheck shell=bash
# Read by the scripts that start ranks: sets `repository` and `python`, and activates what HL_QNPU_DIR names.
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [[ -n ${HL_QNPU_DIR:-} && -r $HL_QNPU_DIR/activate ]]; then
    set +u # not our code
    # shellcheck source=/dev/null
    source "$HL_QNPU_DIR/activate"
    set -u
fi

python=${PYTHON:-$repository/.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3
