"""Options of a plan about time to train, failures and cost."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

from megatron.options.config import ConfigError
from megatron.options.flags import flag

MOST_SURE = 0.999_999
Rule = tuple[str, Callable[[float], bool]]
POSITIVE: Rule = ("a number above 0", lambda value: value > 0)
NOT_NEGATIVE: Rule = ("a number, 0 or above", lambda value: value >= 0)
PROBABILITY: Rule = (f"a probability above 0, at most {MOST_SURE}", lambda value: 0 < value <= MOST_SURE)
OPTIONS: Mapping[str, tuple[Rule, str]] = {
    "step_seconds": (POSITIVE, "time of a training step, as measured; without it the time that --rates predict"),
    "save_seconds": (POSITIVE, "time of a save until it is whole, as the log gives it"),
    "save_wait_seconds": (
        NOT_NEGATIVE,
        "async_save: the part of it that training waits for, the timer save-checkpoint; without it that of a copy to "
        "the host by --rates",
    ),
    "disk_gb_per_second": (
        POSITIVE,
        "rate at which all ranks together write a checkpoint, in place of --save-seconds; without it that of --rates",
    ),
    "device_mtbf_hours": (POSITIVE, "mean time between failures of one device: plan with failures"),
    "restart_minutes": (NOT_NEGATIVE, "time from a failure to the next step of training; default: 10"),
    "repair_hours": (POSITIVE, "time until a node that has failed is back; default: 24"),
    "spare_probability": (PROBABILITY, "probability with which the spare nodes are enough; default: 0.95"),
    "device_hour_price": (POSITIVE, "price of a device for an hour, in your currency"),
}
"""Each option with the rule for its value, and its help."""
NEED_FAILURES = ("restart_minutes", "repair_hours", "spare_probability")


@dataclass(frozen=True)
class Question:
    """Options as given, in their own units; None: not given."""

    step_seconds: float | None = None
    save_seconds: float | None = None
    save_wait_seconds: float | None = None
    disk_gb_per_second: float | None = None
    device_mtbf_hours: float | None = None
    restart_minutes: float | None = None
    repair_hours: float | None = None
    spare_probability: float | None = None
    device_hour_price: float | None = None

    @classmethod
    def add_options(cls, group: argparse._ArgumentGroup) -> None:
        for name, (_, text) in OPTIONS.items():
            # read by `from_arguments`, which reports all faults at once
            group.add_argument(flag(name), metavar="X", help=text)

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Question:
        """Return the question of a parsed command line. Raises ConfigError with every fault."""
        given = {name: getattr(arguments, name) for name in OPTIONS if getattr(arguments, name) is not None}
        faults = [fault for name, text in given.items() for fault in _value_faults(name, text)]
        if not faults:
            question = cls(**{name: float(text) for name, text in given.items()})
            faults = list(question._faults())
        if faults:
            raise ConfigError(faults)
        return question

    @property
    def is_given(self) -> bool:
        return self != Question()

    @property
    def restart_s(self) -> float:
        return 60.0 * _or_default(self.restart_minutes, 10.0)

    @property
    def repair_h(self) -> float:
        return _or_default(self.repair_hours, 24.0)

    @property
    def sureness(self) -> float:
        """Probability with which the spares are to be enough."""
        return _or_default(self.spare_probability, 0.95)

    def _faults(self) -> Iterator[str]:
        for name in NEED_FAILURES:
            if self.device_mtbf_hours is None and getattr(self, name) is not None:
                yield f"{flag(name)} has no effect without failures; give --device-mtbf-hours too"
        if self.save_seconds is not None and self.disk_gb_per_second is not None:
            yield "--save-seconds and --disk-gb-per-second both say how long a save takes; give one"
        wait_s, save_s = self.save_wait_seconds, self.save_seconds
        if wait_s is not None and save_s is not None and wait_s > save_s:
            yield f"--save-wait-seconds={wait_s:g} is a part of --save-seconds={save_s:g}, and cannot be longer"


assert list(OPTIONS) == [field.name for field in fields(Question)]


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def _value_faults(name: str, text: str) -> Iterator[str]:
    (title, is_right), _ = OPTIONS[name]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not is_right(value):
        yield f"{flag(name)}={text} must be {title}"
