"""Names of our parameters in DeepSpeed's own files, which count the layers of the pipeline: `2.attention.qkv.weight`.

The layers are 0 the word embedding, 1 what follows it, then the transformer layers, the final norm and the output
projection; a tied word embedding is in `tied_modules`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

WORD_EMBEDDING, OUTPUT = "embedding.word.weight", "output.weight"
TIED = "tied_modules.embedding_word.weight"


def pipeline_names(ours: Iterable[str]) -> dict[str, str]:
    """Return DeepSpeed's name of every parameter of a whole model, by our name."""
    ours = list(ours)
    numbers = [int(name.split(".")[1]) for name in ours if name.startswith("layers.")]
    end = 3 + max(numbers, default=-1)
    heads = {"embedding": "1", "final_norm": str(end), "output": str(end + 1)}
    found = {}
    for name in ours:
        head, _, rest = name.partition(".")
        if name == WORD_EMBEDDING:
            found[name] = "0.weight" if OUTPUT in ours else TIED
        elif head == "layers":
            number, _, rest = rest.partition(".")
            found[name] = f"{int(number) + 2}.{rest}"
        else:
            found[name] = f"{heads.get(head, head)}.{rest}"
    return found


def our_names(theirs: Iterable[str]) -> dict[str, str]:
    """Return our name of every parameter of a whole model, by DeepSpeed's; the inverse of `pipeline_names`."""
    theirs = list(theirs)
    # a transformer layer's parameters are in its submodules, those of the last two layers in the layers themselves
    inner = [int(match[1]) for name in theirs if (match := re.match(r"(\d+)\..+\.", name)) and int(match[1]) > 1]
    end = 1 + max(inner, default=1)
    heads = {"1": "embedding", str(end): "final_norm", str(end + 1): "output"}
    found = {}
    for name in theirs:
        head, _, rest = name.partition(".")
        if name in ("0.weight", TIED):
            found[name] = WORD_EMBEDDING
        elif head.isdigit() and 2 <= int(head) < end:
            found[name] = f"layers.{int(head) - 2}.{rest}"
        else:
            found[name] = f"{heads.get(head, head)}.{rest}"
    return found
