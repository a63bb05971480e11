"""Reading a file of rates, a user's or one of the machines of the package, with its faults by name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron.options.config import ConfigError
from megatron.options.dialect import nearest, suggestion
from megatron.options.stored import UniqueKeyLoader
from megatron.plan.rates.measured import MeasuredFile, MeasuredRates, file_faults
from megatron.plan.rates.published import PublishedFile, PublishedRates, published_faults
from megatron.plan.rates.rates import Rates
from megatron.runtime.devices import is_device

VERSION = 1
MOST_SHOWN = 60
"""Characters of a wrong value in a message."""
MACHINES = Path(__file__).resolve().parent.parent / "machines"


def machine_names() -> list[str]:
    """Return the names of the machines whose published rates the package has."""
    return sorted(path.stem for path in MACHINES.glob("*.yaml"))


def load_rates(name_or_path: str) -> Rates:
    """Return the rates of a machine of the package by its name, or of a file. Raises ConfigError with every fault."""
    # by the ending alone, as presets are: a folder of the name of a machine must not hide it
    if name_or_path.endswith((".yaml", ".yml")):
        return read_rates(Path(name_or_path))
    if name_or_path.lower() in machine_names():
        return read_rates(MACHINES / f"{name_or_path.lower()}.yaml")
    hint = suggestion(nearest(name_or_path.lower(), machine_names()), "use a .yaml file of your own, or a machine;")
    known = ", ".join(machine_names()) or "none"
    raise ConfigError([f"rates {name_or_path!r} not found; {hint} the machines are {known}"])


def rates_faults(name_or_path: str, device: str) -> list[str]:
    """Return why the rates cannot predict a run on this device; `auto` may turn out to be any."""
    try:
        rates = load_rates(name_or_path)
        if is_device(device):
            rates.check_device(device)
    except ConfigError as error:
        return list(error.faults)
    return []


def read_rates(path: Path) -> Rates:
    """Return the rates of a file. Raises ConfigError with every fault."""
    try:
        tree = UniqueKeyLoader(path.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise ConfigError([f"rates {path} cannot be read: {error.strerror}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"rates {path} are not valid YAML: {' '.join(str(error).split())}"]) from None
    except RecursionError:
        raise ConfigError([f"rates {path} are nested too deeply"]) from None
    # a machine of the package is known by its name
    origin = path.stem if path.parent == MACHINES else str(path)
    return rates_of(tree, origin)


def rates_of(tree: Any, origin: str) -> Rates:
    """Return the rates of a file's values. Raises ConfigError with every fault."""
    if not isinstance(tree, dict):
        raise ConfigError([f"rates {origin} hold a {type(tree).__name__}; they must be a mapping"])
    # before all else: the keys of another version are not faults
    if tree.get("version") != VERSION:
        raise ConfigError(
            [f"rates {origin} have version {tree.get('version')!r}; this release reads {VERSION}: measure again"]
        )
    if tree.get("origin") == "measured":
        measured: MeasuredFile = _validated(MeasuredFile, tree, origin)
        _raise_faults(file_faults(measured), origin)
        return MeasuredRates.of(measured, origin)
    if tree.get("origin") == "published":
        published: PublishedFile = _validated(PublishedFile, tree, origin)
        _raise_faults(published_faults(published), origin)
        return PublishedRates.of(published, origin)
    raise ConfigError([f"rates {origin} have origin {tree.get('origin')!r}; it is `measured` or `published`"])


def _validated(cls: type, tree: dict[str, Any], origin: str) -> Any:
    try:
        return TypeAdapter(cls).validate_python(tree)
    except ValidationError as error:
        _raise_faults((_fault(fault) for fault in error.errors()), origin)


def _fault(fault: Any) -> str:
    """Return the text of a fault of pydantic's, by the keys that lead to it."""
    place = ".".join(map(str, fault["loc"]))
    if fault["type"] == "missing":
        return f"{place} is missing; add it"
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{place} is not a key of this file; remove it"
    shown = repr(fault["input"])
    if len(shown) > MOST_SHOWN:
        shown = shown[:MOST_SHOWN] + "..."
    return f"{place}={shown}: {fault['msg']}"


def _raise_faults(faults: Iterable[str], origin: str) -> None:
    found = [f"rates {origin}: {fault}" for fault in faults]
    if found:
        raise ConfigError(found)
