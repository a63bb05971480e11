"""Run megatron-doctor from a checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.cli import entry

if __name__ == "__main__":
    sys.exit(entry.doctor())
