"""Expected time of a run whose devices fail, the best interval between its saves, and the spares that it needs.

Devices fail independently of each other and at a constant rate, so n of them fail n times as often as one. After a
failure the run restarts from the newest whole checkpoint; a failure during a restart begins that again.

Between two restarts a run lives for an exponential time of mean M, in which it trains segments: an interval tau of
training, and a wait w for the save. A save that goes on in the background is whole only h later, which loses what
fails meanwhile; the next one waits for it, so that saves follow each other by s = max(tau, h) + w. The segments that a
life leaves behind are those that are whole before its end, in the mean

    sum over j >= 0 of P(life > tau + w + h + j s) = e^(-(tau + w + h) / M) / (1 - e^(-s / M))

and a life with its restart of R takes M e^(R / M). The quotient is the time a segment, for h = 0 that of Daly:

    M e^(R / M) e^((tau + w + h) / M) (1 - e^(-s / M)) = M e^(R / M) (e^((tau + w) / M) - 1)

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974); J. T. Daly, A
higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LONGEST = 100.0
"""Largest exponent: what takes e^100 times as long does not end."""
UNITS = (("ms", 1e-3, 1.0), ("s", 1.0, 120.0), ("min", 60.0, 7_200.0), ("h", 3_600.0, 172_800.0))
"""Units of a time: their name, their seconds, and from which seconds on the next one is better."""


@dataclass(frozen=True)
class Save:
    """Time of a save."""

    wait_s: float
    """Time that training waits."""
    hidden_s: float = 0.0
    """Time after that until the checkpoint is whole, while training goes on."""

    @property
    def total_s(self) -> float:
        return self.wait_s + self.hidden_s


@dataclass(frozen=True)
class Failures:
    """Failures of a job, of whichever of its devices."""

    mean_s: float
    """Mean time between two of them; infinity: there are none."""
    restart_s: float
    """Time from a failure to the next step of training, without the steps that are trained again."""

    @classmethod
    def of_devices(cls, number: int, device_mean_s: float, restart_s: float) -> Failures:
        return cls(device_mean_s / number, restart_s)

    def hinder(self, save: Save) -> str | None:
        """Return the reason why no time is worth a figure; None: there is none."""
        for seconds, what in ((save.total_s, "a save is written"), (self.restart_s, "a restart has ended")):
            if self.mean_s <= seconds:
                return (
                    f"a failure comes every {duration(self.mean_s)}, sooner than {what} ({duration(seconds)}): the "
                    "run hardly goes on"
                )
        return None


@dataclass(frozen=True)
class ExpectedTime:
    """Expected time of a run and its parts, in seconds."""

    training_s: float
    """Time of its steps, each counted once."""
    saving_s: float
    """Waits for the saves of these."""
    lost_s: float
    """Training, and saves, after the checkpoint that a restart begins from."""
    restarting_s: float
    failures: float

    @property
    def total_s(self) -> float:
        return self.training_s + self.saving_s + self.lost_s + self.restarting_s

    @property
    def effective(self) -> float:
        """Share of the time in which the run makes progress."""
        return self.training_s / self.total_s


def expected(training_s: float, interval_s: float, save: Save, failures: Failures) -> ExpectedTime | None:
    """Return the expected time of so much training, saved after each `interval_s` of it; None: it does not end."""
    # a save waits for the one before it
    segment_s = max(interval_s, save.hidden_s) + save.wait_s
    num_segments = training_s / interval_s
    saving_s = num_segments * (segment_s - interval_s)
    mean_s = failures.mean_s
    if math.isinf(mean_s):
        return ExpectedTime(training_s, saving_s, 0.0, 0.0, 0.0)
    whole_s = interval_s + save.total_s
    if (whole_s + failures.restart_s) / mean_s > LONGEST:
        return None
    running_s = num_segments * mean_s * math.exp(whole_s / mean_s) * -math.expm1(-segment_s / mean_s)
    restarting_s = running_s * math.expm1(failures.restart_s / mean_s)
    total_s = running_s + restarting_s
    return ExpectedTime(training_s, saving_s, running_s - training_s - saving_s, restarting_s, total_s / mean_s)


def young_interval(wait_s: float, mean_s: float) -> float:
    """Return Young's interval: a first order, for waits that are short against the time between failures."""
    return math.sqrt(2 * wait_s * mean_s)


def daly_interval(wait_s: float, mean_s: float) -> float:
    """Return Daly's interval of a higher order."""
    if wait_s >= 2 * mean_s:
        return mean_s
    ratio = wait_s / (2 * mean_s)
    return math.sqrt(2 * wait_s * mean_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - wait_s


def best_interval(save: Save, failures: Failures) -> float:
    """Return the training between two saves for which the run is expected to end soonest; infinity: never save.

    Its x = tau / M solves (1 - x) e^(x + w / M) = 1, where the time a segment over tau is least.
    """
    if math.isinf(failures.mean_s):
        return math.inf
    wait = save.wait_s / failures.mean_s
    low, high = 0.0, 1.0
    # by halves, to the last digit: the left side falls all the way
    while low < (middle := (low + high) / 2) < high:
        if -math.expm1(-(middle + wait)) > middle:
            low = middle
        else:
            high = middle
    # a save does not begin before the one before it has ended
    return max(low * failures.mean_s, save.hidden_s)


def spares(mean_number: float, probability: float) -> int:
    """Return how many spares are enough, with this probability, for a Poisson number of what is in repair."""
    number, total = 0, math.exp(-mean_number)
    while total < probability:
        number += 1
        # by logarithms: of a large mean the first terms underflow, and a product would stay 0
        total += math.exp(number * math.log(mean_number) - mean_number - math.lgamma(number + 1))
    return number


def duration(seconds: float) -> str:
    """Return a time in the unit that shows it best: 412 ms, 6.9 min, 31 h, 54 days."""
    for unit, size, most in UNITS:
        # below it by more than the rounding
        if seconds < 0.9995 * most:
            return f"{seconds / size:.3g} {unit}"
    days = seconds / 86_400
    if days < 999.5:
        return f"{days:.3g} days"
    return f"{days:,.0f} days"
