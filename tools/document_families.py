"""Print docs/reference/families.md from the records of megatron/models/families/ and the presets.

python tools/document_families.py > docs/reference/families.md
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.models.family import HuggingFaceForm
from megatron.models.registry import FAMILIES
from megatron.options.model import PARTICULAR
from megatron.options.stored import PRESETS_DIR, from_dict, read_preset
from megatron.options.training import ParallelConfig
from megatron.plan.flops import count_parameters

HEADER = """# Model families

<!-- Written by tools/document_families.py from megatron/models/families/: change the records, not this page. -->

A family is a record, chosen by `--architecture` or by the `model_type` of a loaded folder;
[extending](../internals/extending.md#add-a-model-family) says how to add one. Parameters of presets are counted with
the vocabulary padded for one tensor-parallel rank. Recipes (`sft_llama`, `lora_llama`, `dpo_llama`) have no model
section and are combined with a preset that has one.

"""

FIELDS = """
Every field of config.json is honoured, changes nothing, or is refused by name, since a number that is a little wrong
looks like a model that trains a little worse. These are honoured wherever transformers' class has them: COMMON.

The table has the other fields of a class; those with one value, of which any other has no counterpart here; and those
of our options that few classes have and this one expresses: an export refuses the others. A field in no column is
refused unless it is off (null, false, 0, a factor of 1) or concerns no computation; so are `quantization_config`, and
an `auto_map` to any code but that which became transformers' class.

"""

SIZE = 8
"""Stands for every size that a config.json must have."""
NO_SUCH = {"rope_type": "?"}
STIMULI: tuple[Mapping[str, Any], ...] = (
    {"use_sliding_window": True},
    # a form of the positions that no class has: a family refuses it with those that it has
    {"rope_parameters": {**NO_SUCH, "full_attention": NO_SUCH}},
)
"""Fields on which others depend."""


class Reading:
    """A config.json of `values` alone: notes which fields a family reads, and which must have a value.

    It is a ConfigFields of megatron/models/family.py. `shift` is added to every number that the file lacks.
    """

    where: Path | str = "config.json"

    def __init__(self, values: Mapping[str, Any], shift: int, outer: Reading | None = None, name: str = "") -> None:
        self.values, self._shift, self._outer, self._name = values, shift, outer, name
        self.read: dict[str, None] = {}
        self.fixed: dict[str, str] = {}

    def take(self, *names: str, default: Any = ..., kind: type | None = None) -> Any:
        self.read[names[0]] = None
        for name in names:
            if name in self.values:
                return self.values[name]
        if default is ...:
            default = SIZE
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        return default + self._shift if is_number else default

    def has(self, name: str) -> bool:
        return name in self.values

    def texts(self, name: str) -> list[str]:
        self.read[name] = None
        return []

    def integers(self, name: str) -> list[int]:
        self.read[name] = None
        return []

    def numbers(self, name: str) -> list[float]:
        self.read[name] = None
        return []

    def demand(self, name: str, *allowed: Any) -> None:
        texts = ["null" if value is None else str(value).lower() for value in allowed]
        self._fix(name, " or ".join(texts))

    def nested(self, *names: str, apart_from: str = "") -> Reading:
        self.read[names[0]] = None
        return Reading(self.values.get(names[0], {}), self._shift, self, names[0])

    def refuse(self, fault: str) -> None:
        if refused := re.fullmatch(r"(\w+)='\?' \(supported: (.*)\)", fault):
            self._fix(refused[1], refused[2].replace("'", ""))

    def finish(self) -> None:
        pass

    def _fix(self, name: str, values: str) -> None:
        self.fixed[name] = values
        if self._outer is not None:
            self._outer._fix(f"{self._name}.{name}", values)


def presets() -> dict[str, str]:
    """Return the cell of each family's presets, smallest model first."""
    found: dict[str, list[tuple[int, str]]] = {}
    for path in PRESETS_DIR.glob("*.yaml"):
        tree = read_preset(path.stem)
        if "model" not in tree:
            continue  # a recipe
        config = from_dict(tree)
        parameters = count_parameters(dataclasses.replace(config, parallel=ParallelConfig()))
        cell = f"[`{path.stem}`](../../megatron/presets/{path.name}) {parameters:,}"
        found.setdefault(config.model.architecture, []).append((parameters, cell))
    return {family: "; ".join(cell for _, cell in sorted(cells)) for family, cells in found.items()}


def families_table() -> list[str]:
    """Return a row for each family: its block in words, transformers' classes, the presets."""
    cells = presets()
    lines = ["| family | block | transformers' classes | presets and their parameters |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        module = importlib.import_module(f"megatron.models.families.{name}")
        block = str(module.__doc__).partition("\n\n")[0].partition(": ")[2].replace("\n", " ").rstrip(".")
        classes = ", ".join(form.class_name for form in family.huggingface.values())
        lines.append(f"| `{name}` | {block} | {classes} | {cells.get(name, '—')} |")
    return lines


def reading_of(form: HuggingFaceForm, shift: int = 0) -> Reading:
    """Return which fields a class reads, and which must have a value."""
    whole = Reading({}, shift)
    for values in STIMULI:
        reading = Reading(values, shift)
        form.options(reading)
        whole.read |= reading.read
        whole.fixed |= reading.fixed
    return whole


def fixed_values(form: HuggingFaceForm) -> dict[str, str]:
    """Return the fields that must have a value, and it; of one that follows from other fields, that it does."""
    fixed, shifted = reading_of(form).fixed, reading_of(form, shift=1).fixed
    return {name: value if shifted[name] == value else "as others say" for name, value in fixed.items()}


def fields_tables() -> Iterator[str]:
    """Yield the text about fields, and a row for each of transformers' classes."""
    forms = [form for family in FAMILIES.values() for form in family.huggingface.values()]
    llama = FAMILIES["llama"].huggingface[""]
    common = list(reading_of(llama).read)
    yield FIELDS.replace("COMMON", _codes(common))
    yield "| model_type | further fields | fields with one value | options of few classes |\n|---|---|---|---|\n"
    for form in forms:
        own = [name for name in reading_of(form).read if name not in common]
        fixed = [f"`{name}` {values}" for name, values in fixed_values(form).items()]
        options = [name for name in PARTICULAR if name in form.expresses]
        cells = (_codes(own), "; ".join(fixed), _codes(options))
        yield f"| `{form.model_type}` | {' | '.join(cell or '—' for cell in cells)} |\n"


def _codes(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def document() -> str:
    """Return the whole page."""
    return HEADER + "\n".join(families_table()) + "\n" + "".join(fields_tables())


if __name__ == "__main__":
    sys.stdout.write(document())
