"""TRL's and InstructLab's side of the comparisons of packing: requests and answers, one JSON line each.

Runs in an interpreter with both in it and without this project (see benchmarks/alternating.py), so it imports nothing
of ours. The functions of REQUESTS take what their request names; processor times are taken here, around the work alone.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow  # type: ignore[import-untyped]


def versions() -> str:
    return f"trl {version('trl')}, instructlab-training {version('instructlab-training')}, numpy {np.__version__}"


def pack_dataset(lengths: str, capacity: int) -> dict[str, Any]:
    """TRL's strategy "bfd" over the whole table at once, as `trl.pack_dataset` has `datasets` call it for each chunk.

    The tokens are one byte each: what is measured is the packing, and copying real ones would only add to it.
    """
    from trl.data_utils import _pack_bfd  # type: ignore[import-not-found]

    sizes = np.load(lengths)
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    tokens = pyarrow.array(np.zeros(offsets[-1], dtype=np.int8))
    table = pyarrow.table({"input_ids": pyarrow.LargeListArray.from_arrays(offsets, tokens)})
    began_s = time.process_time()
    packed = _pack_bfd(table, capacity)
    return {"seconds": time.process_time() - began_s, "packs": len(packed)}


def pack_steps(lengths: str, max_tokens: int, num_ranks: int) -> dict[str, Any]:
    """InstructLab's packer over several batches, [batch, sample], for one rank: what each rank works out for itself.

    Seconds and microbatches of each batch.
    """
    # numba compiles it at the first call
    from instructlab.training.batch_packer import (  # type: ignore[import-not-found]
        batch_lengths_to_minibatches_lpt,
    )

    batches = np.load(lengths).tolist()
    batch_lengths_to_minibatches_lpt(batches[0], max_tokens, num_ranks, 0)
    seconds, microbatches = [], []
    for batch in batches:
        began_s = time.process_time()
        packed = batch_lengths_to_minibatches_lpt(batch, max_tokens, num_ranks, 0)
        seconds.append(time.process_time() - began_s)
        microbatches.append(len(packed))
    return {"seconds": seconds, "microbatches": microbatches}


REQUESTS = {function.__name__: function for function in (versions, pack_dataset, pack_steps)}


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints must not mix with the answers
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"answer": REQUESTS[request["request"]](**request["arguments"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
