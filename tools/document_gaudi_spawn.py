"""Print docs/reference/gaudi_spawn_flags.md from the tables of the flags of optimum-habana's scripts.

python tools/document_gaudi_spawn.py > docs/reference/gaudi_spawn_flags.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.cli.gaudi_spawn import FLAGS, OWN

HEADER = """# Flags of optimum-habana's scripts

<!-- Written by tools/document_gaudi_spawn.py from the tables of megatron/: change those, not this page. -->

What becomes of each flag in `python -m megatron.gaudi_spawn`; [from optimum-habana to
here](../guides/optimum_habana.md) begins with the commands.

| outcome | meaning |
|---|---|
| sets | [variables](../guides/launching.md), flags of [training](configuration.md) or [generation][generation] |
| honoured | what it requests always holds here |
| no effect | it is accepted, and a note gives the reason |
| refused | the command ends before anything starts, with the remedy |

A default is the script's own, which counts here too where the flag is left out. Any other flag is refused, with the
nearest name. `SCRIPT --help` prints the same in a terminal.

[generation]: ../guides/generation.md
"""


def table(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """Return a table of flags, outcomes, texts and defaults."""
    lines = ["| flag | outcome | here | default |", "|---|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| `{name}` | {outcome} | {text} | {default} |" for name, outcome, text, default in rows)]
    )


def document() -> str:
    """Return the whole page."""
    own = [
        (f"{name} {value}".rstrip(), "sets" if value else "honoured", text, "") for name, (value, text) in OWN.items()
    ]
    parts = [HEADER, "## gaudi_spawn.py", "", table(own), ""]
    for script, flags in FLAGS.items():
        rows = [(flag.name, flag.outcome, flag.text, f"`{flag.default}`" if flag.default else "") for flag in flags]
        parts += [f"## {script}.py", "", table(rows), ""]
    merging = [
        ("--base_model_name", "sets", "folder of the Hugging Face model", ""),
        ("--adapter_model_name", "sets", "folder of the adapter, or of a run, whose newest export is taken", ""),
        ("--output_name", "sets", "folder to write, new or empty; nothing is uploaded", ""),
    ]
    parts += ["## merge_peft_adapter.py", "", table(merging), ""]
    hydra = [
        ("--config-name", "sets", "the YAML file, in the folder config beside the script, or beside it", ""),
        ("--config-path", "sets", "another folder than config, from the script's own", ""),
        ("--config-dir", "sets", "another folder, from the current one", ""),
        ("key=value", "refused", "write it into the file", ""),
    ]
    parts += ["## finetune.py", "", table(hydra), ""]
    parts += ["Keys of the file: [fine-tuning](../guides/finetuning.md#run-a-finetune_lorayaml)."]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
