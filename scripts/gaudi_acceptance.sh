#!/usr/bin/env bash
# Test this software on Gaudi cards, once, and write a report to send back: about ten minutes.
#
#   scripts/gaudi_acceptance.sh                 all cards of this machine
#   scripts/gaudi_acceptance.sh --devices 2     two of them
#
# --help lists the flags. docs/start/gaudi.md says what is checked, and where to send the report.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

start gaudi_acceptance "$@"
