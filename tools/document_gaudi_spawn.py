"""Print docs/reference/gaudi_spawn_flags.md from the tables of the flags of optimum-habana's scripts.

python tools/document_gaudi_spawn.py > docs/reference/gaudi_spawn_flags.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.cli.gaudi_spawn import FLAGS, OWN
from megatron.launch.dialects.spawn_flags import FINETUNE, MERGING
from megatron.options.dialect import Entry

HEADER = """# Flags of optimum-habana's scripts

<!-- Written by tools/document_gaudi_spawn.py from the tables of megatron/: change those, not this page. -->

What becomes of each flag in `python -m megatron.gaudi_spawn`; the [guide](../guides/optimum_habana.md) has commands. A
flag **sets** [variables](variables.md), or flags of [training](configuration.md) or generation; is **honoured**, since
what it requests always holds here; has **no effect**, with a note; or is **refused**, with the remedy. A default is
the script's own, which counts here too where the flag is left out. Any other flag is refused, with the nearest name.
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of flags; the last cell is the default. Flags without one share a row if all else is equal."""
    shared: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in rows:
        key = (*rest, name) if rest[-1] else tuple(rest)
        shared.setdefault(key, []).append(f"`{name}`")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join([' '.join(names), *key[: len(head) - 1]])} |" for key, names in shared.items()]
    return "\n".join(lines)


def training_rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield name, scripts, outcome, text and defaults of each flag of sft.py and dpo.py; two rows if texts differ."""
    sft, dpo = ({entry.name: entry for entry in FLAGS[script]} for script in ("sft", "dpo"))
    for name in {**sft, **dpo}:
        ours, theirs = sft.get(name), dpo.get(name)
        if ours and theirs and _are_alike(ours, theirs):
            defaults = [
                f"{script} `{entry.default}`" for script, entry in (("sft", ours), ("dpo", theirs)) if entry.default
            ]
            if len(defaults) == 2 and ours.default == theirs.default:
                defaults = [_default(ours.default)]
            yield name, "sft, dpo", theirs.outcome, theirs.text, ", ".join(defaults)
            continue
        for script, entry in (("sft", ours), ("dpo", theirs)):
            if entry:
                yield name, script, entry.outcome, entry.text, _default(entry.default)


def _are_alike(ours: Entry, theirs: Entry) -> bool:
    """Return True if the text of dpo.py's flag is that of sft.py's, but for what it says of dpo.py."""
    more = theirs.text.removeprefix(ours.text)
    return ours.outcome == theirs.outcome and (not more or (more != theirs.text and "dpo.py" in more))


def _default(default: str | None) -> str:
    return f"`{default}`" if default else ""


def cells(rows: Iterable[Entry]) -> list[tuple[str, str, str, str]]:
    return [(row.name, row.outcome, row.text, _default(row.default)) for row in rows]


def document() -> str:
    """Return the whole page."""
    own = [
        (f"{name} {value}".rstrip(), "sets" if value else "honoured", text, "") for name, (value, text) in OWN.items()
    ]
    parts = [HEADER]
    head = ("flag", "outcome", "here", "default")
    parts += ["## gaudi_spawn.py", "", table(head, own), ""]
    parts += ["## sft.py and dpo.py", "", table(("flag", "of", *head[1:]), training_rows()), ""]
    parts += ["## run_generation.py", "", table(head, cells(FLAGS["run_generation"])), ""]
    parts += ["## merge_peft_adapter.py and finetune.py", "", table(head, cells([*MERGING, *FINETUNE])), ""]
    parts += ["Keys of the file: [finetune_lora.yaml](../guides/optimum_habana.md#run-a-finetune_lorayaml)."]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
