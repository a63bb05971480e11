"""torchrun, with the exit status of the first rank that failed: torch's own always ends with 1.

python -m megatron.instructlab.torchrun FLAGS OF TORCHRUN -m megatron.train FLAGS OF MEGATRON.TRAIN
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """As torchrun does; 128 + n where signal n ended the rank, or this process."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main(list(arguments))
    except ChildFailedError as error:
        exitcode: int = error.get_first_failure()[1].exitcode
        return exitcode if exitcode >= 0 else 128 - exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
