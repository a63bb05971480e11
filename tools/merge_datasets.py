"""Command line of megatron/cli/merge_datasets.py, runnable from a checkout without installing the package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.cli.merge_datasets import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
