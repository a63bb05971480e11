# shellcheck shell=bash
# Read by the scripts that start ranks: sets `python` and `start`, and activates what HL_QNPU_DIR names.
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [[ -n ${HL_QNPU_DIR:-} && -r $HL_QNPU_DIR/activate ]]; then
    set +u # not our code
    # shellcheck source=/dev/null
    source "$HL_QNPU_DIR/activate"
    set -u
fi

python=${PYTHON:-$repository/.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3

# Export the first --config of the arguments as HL_CONFIG, which it overrides: a script's defaults go by that.
select_preset() {
    while (( $# )); do
        case $1 in
            --config=*) export HL_CONFIG="${1#--config=}"; return ;;
            --config)   export HL_CONFIG="${2:-}"; return ;;
        esac
        shift
    done
}

# start COMMAND FLAGS: the command of this checkout, or, where these files lie without one, of the installed package
start() {
    local command=("$repository/tools/$1.py")
    [[ -f ${command[0]} ]] || command=(-m megatron.cli.entry "$1")
    exec "$python" "${command[@]}" "${@:2}"
}
