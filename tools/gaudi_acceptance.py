"""Run megatron-gaudi-acceptance from a checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli.gaudi_acceptance import main

if __name__ == "__main__":
    sys.exit(main())
