"""Print docs/reference/configuration.md from the dataclasses of megatron/config.

python tools/document_config.py > docs/reference/configuration.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.options.config import option_doc, sections
from megatron.options.flags import flag, shown

HEADER = """# Configuration

<!-- Written by tools/document_config.py from megatron/options/: change the dataclasses, not this page. -->

```
python -m megatron.train --config bloom_13b --num-layers 40 --rampup-batch-size 16 16 5000000
```

In a [preset](families.md), a YAML file, options are grouped by the sections below: `training: {seq_length: 128}`.

- The command line overrides the presets, and these the defaults. `--config` takes names or paths; with several, a later
  one overrides an earlier one, option by option: `--config llama32_1b --config sft_llama`.
- Dashes and underscores are equivalent. A boolean flag alone means true, `--no-FLAG` false. `none` unsets an option.
- `--print-config` prints the resolved config; a run saves it as `config.yaml`. All errors are reported together.
- The data-parallel size is the number of ranks / (tensor x context x pipeline).
"""

BOUNDS = {"gt": "> {}", "ge": "≥ {}", "lt": "< {}", "le": "≤ {}"}


def type_text(hint: Any) -> str:
    """Describe a type for the table: `int > 0`, `fp32 \\| bf16`, `3 x int > 0`."""
    if hasattr(hint, "__metadata__"):
        plain, *notes = get_args(hint)
        found = [part for note in notes for part in getattr(note, "metadata", [note])]
        bounds = [
            form.format(getattr(part, name)) for part in found for name, form in BOUNDS.items() if hasattr(part, name)
        ]
        return " ".join([plain.__name__, " and ".join(bounds)]).strip()
    if get_origin(hint) is Literal:
        return " \\| ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        return f"{type_text(parts[0])} ..." if parts[-1] is Ellipsis else f"{len(parts)} x {type_text(parts[0])}"
    members = [member for member in get_args(hint) if member is not type(None)]
    return " \\| ".join(type_text(member) for member in members) if members else str(hint.__name__)


def section_table(section: str, cls: type) -> str:
    """Return the heading and the table of one section."""
    rows = [f"## {section}", "", "| flag | type | default | meaning |", "|---|---|---|---|"]
    for name, hint in get_type_hints(cls, include_extras=True).items():
        doc = option_doc(section, name).replace("|", "\\|")
        rows.append(f"| `{flag(name)}` | {type_text(hint)} | {shown(getattr(cls, name))} | {doc} |")
    return "\n".join(rows)


def document() -> str:
    """Return the whole page."""
    tables = [section_table(section, cls) for section, cls in sections().items()]
    return "\n".join([HEADER, "\n\n".join(tables)]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
