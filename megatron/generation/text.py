"""Text of ids as they arrive: whole characters, and the stop strings that end it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from megatron.data.index.indexed import DataError
from megatron.data.tokenizers.base import Tokenizer
from megatron.generation.options import GenerationOptions
from megatron.generation.requests import Reason

REPLACEMENT = "\ufffd"
"""Written by decoders for bytes that are not a character, or not yet."""
CONTEXT = 6
"""Ids before the new ones that are decoded with them: decoders leave out a space at the start."""
LONGEST_WINDOW = 32
"""Ids that are decoded together, unless they hold no whole character."""


class TextDecoder:
    """Decoder of one id after the other. The strings that `add` and `finish` return make up the text.

    Args:
        prompt: the ids before the first one.
        keep_special: special tokens are written as text, too.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, keep_special: bool = False):
        self._tokenizer = tokenizer
        self._hidden = frozenset[int]() if keep_special else tokenizer.special_ids
        # begins with the prompt's last ids: SentencePiece leaves out the space before the first word of what it
        # decodes, which would be missing between prompt and text
        self._window = [token for token in prompt if self._is_shown(token)][-CONTEXT:]
        while tokenizer.decode(self._window).startswith(REPLACEMENT):  # it begins within a character
            del self._window[0]
        self._num_written = len(tokenizer.decode(self._window))  # characters of the window's text
        self._whole = [len(self._window)]  # sizes of the window at which it ended with a whole character

    def add(self, token: int) -> str:
        """Return the text that this id completes; "" while a character lacks bytes."""
        if not self._is_shown(token):
            return ""
        try:
            text = self._tokenizer.decode([*self._window, token])
        except DataError:  # a gap in the vocabulary
            return ""
        self._window.append(token)
        is_whole = not text.endswith(REPLACEMENT)
        # the end may be the first bytes of a character; it is written once an id completes it
        certain = text if is_whole else text.rstrip(REPLACEMENT)
        new = certain[self._num_written :]
        self._num_written = max(self._num_written, len(certain))
        if is_whole:
            self._whole.append(len(self._window))
        if len(self._window) > LONGEST_WINDOW:
            self._shorten()
        return new

    def finish(self) -> str:
        """Return what is left: the replacement of a character that was not completed."""
        return self._tokenizer.decode(self._window)[self._num_written :]

    def branch(self) -> TextDecoder:
        """Return a decoder that goes on from here on its own."""
        other = copy.copy(self)
        other._window, other._whole = list(self._window), list(self._whole)
        return other

    def _shorten(self) -> None:
        """Forget the ids before a whole character, as decoders need a few of the last ones only."""
        # cut only between characters: half of one would decode to a replacement that was never in the text
        starts = [size for size in self._whole if size <= len(self._window) - CONTEXT]
        if starts and self._whole[-1] == len(self._window):
            self._window = self._window[starts[-1] :]
            self._whole = [len(self._window)]
            self._num_written = len(self._tokenizer.decode(self._window))

    def _is_shown(self, token: int) -> bool:
        return token not in self._hidden and token < self._tokenizer.vocab_size


class GeneratedText:
    """Text of one sequence, up to a stop string.

    `add` and `finish` return the text to print next, which is never taken back: what may be the beginning of a stop
    string is kept until that is known.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], options: GenerationOptions, *, keep_special: bool = False
    ):
        self._decoder = TextDecoder(tokenizer, prompt, keep_special=keep_special)
        self._stop = options.stop
        self._num_before_stop = options.min_new_tokens
        self._kept = ""  # decoded, not yet returned
        self._num_tokens = 0
        self.is_stopped = False
        """A stop string was found."""

    def add(self, token: int) -> str:
        """Return the text that this id makes certain."""
        if self.is_stopped:
            return ""
        self._num_tokens += 1
        return self._released(self._decoder.add(token))

    def finish(self) -> str:
        """Return the rest of a text that ends here."""
        if self.is_stopped:
            return ""
        text = self._released(self._decoder.finish())
        rest, self._kept = self._kept, ""
        return text + rest

    def branch(self) -> GeneratedText:
        """Return a text that goes on from here on its own."""
        other = copy.copy(self)
        other._decoder = self._decoder.branch()
        return other

    def _released(self, new: str) -> str:
        """Return what is certain of the kept text and the new one: all but what may begin a stop string."""
        text, num_kept = self._kept + new, len(self._kept)
        # one that has ended before min_new_tokens does not count, but one that has only begun by then does
        if self._num_tokens >= self._num_before_stop:
            ends_in_new = (text.find(stop, max(0, num_kept + 1 - len(stop))) for stop in self._stop)
            # the earliest stop string ends the text, whichever of them it is
            places = [place for place in ends_in_new if place >= 0]
            if places:
                self.is_stopped = True
                self._kept = ""
                return text[: min(places)]
        # the longest end of the text with which a stop string begins: it may be completed by the next id
        longest = max(map(len, self._stop), default=1) - 1
        held = min(longest, len(text))
        while held and not any(len(stop) > held and stop.startswith(text[-held:]) for stop in self._stop):
            held -= 1
        self._kept = text[len(text) - held :]
        return text[: len(text) - held]


class GrowingTexts:
    """Texts of a batch as their ids arrive, and whether a stop string has ended them.

    Args:
        stop: the stop strings; without any, no text is decoded.
        begin: returns the empty text of a request, by its number.
        of_beams: texts branch, so that one is known by its ids; else by its sample.
    """

    def __init__(self, stop: Sequence[str], begin: Callable[[int], GeneratedText], *, of_beams: bool = False):
        self._stop, self._begin, self._of_beams = stop, begin, of_beams
        self._samples: dict[tuple[int, int], tuple[GeneratedText, int]] = {}
        self._beams: dict[int, list[dict[tuple[int, ...], GeneratedText]]] = {}
        """By number of the request: the texts of the step before, and of this one."""

    def reason(self, number: int, sample: int, ids: Sequence[int]) -> Reason | None:
        """Return "stop" if a stop string ends a text. Its ids begin with those of an earlier call; of beams, one less.

        Of beams the earlier call may be that of another sample.
        """
        if not self._stop:
            return None
        if self._of_beams:
            text = self._beam(number, tuple(ids))
        else:
            text = self._sample(number, sample, ids)
        return "stop" if text.is_stopped else None

    def _sample(self, number: int, sample: int, ids: Sequence[int]) -> GeneratedText:
        text, num_seen = self._samples.get((number, sample)) or (self._begin(number), 0)
        # only new ids are decoded: a text of n tokens costs n steps, not n squared
        for token in ids[num_seen:]:
            text.add(token)
        self._samples[number, sample] = text, len(ids)
        return text

    def _beam(self, number: int, ids: tuple[int, ...]) -> GeneratedText:
        steps = self._beams.setdefault(number, [{(): self._begin(number)}, {}])
        # two steps are enough: beams of one request are all of one length, and each continues one of the step before
        if ids[:-1] not in steps[0]:  # all beams have got one more token
            steps[:] = steps[1], {}
        # a copy: several beams may continue the same one
        text = steps[0][ids[:-1]].branch()
        text.add(ids[-1])
        steps[1][ids] = text
        return text
