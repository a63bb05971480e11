"""Run commands of optimum-habana's gaudi_spawn.py: python -m megatron.gaudi_spawn --world_size N SCRIPT [FLAGS]."""

import sys

from megatron.cli import entry

if __name__ == "__main__":
    sys.exit(entry.gaudi_spawn())
