"""Run commands of optimum-habana's gaudi_spawn.py: python -m megatron.gaudi_spawn --world_size N SCRIPT [FLAGS]."""

import sys

from megatron.cli.gaudi_spawn import main

if __name__ == "__main__":
    sys.exit(main())
