"""A prompt to continue, and what was generated for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True)
class Request:
    """A prompt as ids."""

    number: int
    """Place among all prompts of a run, a resumed one too: what is drawn depends on it."""
    prompt: tuple[int, ...]
    is_chat: bool = False
    """The text is an answer, which ends where the chat template ends a turn."""


@dataclass(frozen=True)
class Completion:
    """A text that was generated, as ids."""

    request: int
    """Number of its request."""
    sample: int
    """Place among the texts of its request."""
    ids: tuple[int, ...]
    """The generated ids, with the one that ended the text."""
    reason: Reason
    """stop: an end-of-text token, a stop token or a stop string; length: max_new_tokens, or the model's positions."""
    score: float | None = None
    """Score of a beam search."""
    logprobs: tuple[float, ...] | None = None
    """Log-probability of each id, where the options request it."""
    alternatives: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """For each id the most probable ones in its place, with their log-probabilities."""
