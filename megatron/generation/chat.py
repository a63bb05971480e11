"""A chat in the terminal: rank 0 reads what the user writes, all ranks generate the answer, rank 0 prints it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import IO, Any

from megatron.data.index.indexed import DataError
from megatron.generation.jsonl import INPUT_OF_LAUNCHER
from megatron.generation.passes import KeptText
from megatron.generation.requests import Request
from megatron.generation.session import Session
from megatron.options.config import ConfigError
from megatron.resilience.errors import raise_on_all_ranks

YOU = "you: "
HELP = """\
/clear      begin a new chat
/system T   begin a new chat with the system message T
/exit       end; Ctrl-D does too
Ctrl-C      stop an answer
"""


class TerminalChat:
    """A chat with a model. Raises DataError where the model has no chat template."""

    def __init__(self, session: Session):
        self._session, self._ctx = session, session.model.ctx
        self._messages: list[dict[str, Any]] = []
        self._num_answers = 0
        self._kept = KeptText()
        # a template that is missing or wrong is an error before the first line is typed, not after it
        raise_on_all_ranks(self._ctx, lambda: session.encoder.template)
        if self._ctx.num_batch_ranks > 1:
            raise ConfigError([f"a chat uses one copy of the model, and there are {self._ctx.num_batch_ranks}; start "
                               "as many ranks as tensor x pipeline"])  # fmt: skip
        self._input: IO[str] | None = None

    def run(self) -> None:
        """Answer until the user leaves. Collective."""
        if self._ctx.rank == 0:
            self._open_input()
            print("/help lists the commands; Ctrl-D ends.", flush=True)
        with self._interrupts():
            while True:
                request = self._ctx.broadcast_object(self._next_request() if self._ctx.rank == 0 else None)
                if request is None:
                    break
                # on every rank: Ctrl-C may have reached them between two answers
                self._session.is_interrupted = False
                self._answer(request)
        line = self._session.summary()
        if line and self._num_answers:
            print(line, file=sys.stderr)

    def _open_input(self) -> None:
        path = os.environ.get(INPUT_OF_LAUNCHER)
        if path is not None:
            # it must not become the terminal that controls this process
            self._input = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOCTTY), encoding="utf-8", errors="replace")
        elif sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  edits lines of input()

    def _next_request(self) -> Request | None:
        """Read lines until one is to be answered; return its request, None at the end."""
        while True:
            line = self._read_line()
            if line is None or line.strip() == "/exit":
                return None
            text = line.strip()
            if text == "/help":
                print(HELP, end="", flush=True)
            elif text == "/clear":
                self._messages.clear()
            elif text == "/system":
                print("give the system message behind /system", flush=True)
            elif text.startswith("/system "):
                self._messages[:] = [{"role": "system", "content": text.removeprefix("/system ").strip()}]
            elif text.startswith("/"):
                print(f"{text.split()[0]} is not a command; /help lists them", flush=True)
            elif text:
                self._messages.append({"role": "user", "content": text})
                if (request := self._request()) is not None:
                    return request
                # what cannot be answered must not stand before the next question
                self._messages.pop()

    def _read_line(self) -> str | None:
        """Return a line, None at the end of the input."""
        while True:
            try:
                if self._input is None:
                    return input(YOU)
                # no input(): that would edit lines of this process's own stdin, which a rank does not have
                print(YOU, end="", flush=True)
                return self._input.readline() or None
            except EOFError:
                print(flush=True)
                return None
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit ends)", flush=True)

    def _request(self) -> Request | None:
        """Return the request of the messages; None after a message why the model cannot take it."""
        try:
            ids = self._session.encoder.chat(self._messages)
            # its number decides what is drawn, so the same question again gets another answer
            request = Request(self._num_answers, ids, is_chat=True)
        except DataError as error:
            print(error, flush=True)
            return None
        if faults := self._session.faults(request):
            print(f"this chat {faults[0]}, or /clear", flush=True)
            return None
        return request

    def _answer(self, request: Request) -> None:
        done = self._session.show(request, _print, self._kept)
        self._num_answers += 1
        if self._ctx.rank == 0:
            completion = done[0]
            reason = {"interrupted": " [stopped]", "length": " [max_new_tokens]"}.get(completion.reason, "")
            if self._session.is_out_of_positions(completion):
                positions = self._session.model.max_positions
                reason = f" [the model's {positions:,} positions are full; /clear starts a new chat]"
            print(reason, flush=True)
            self._messages.append({"role": "assistant", "content": self._session.text_of(request, completion)})

    @contextlib.contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Let Ctrl-C stop the answer under way, or leave the line that is being written."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            # an exception anywhere else would leave the other ranks waiting in a collective; an answer ends after its
            # next token
            is_reading = self._is_reading(frame)
            self._session.is_interrupted = True
            if is_reading:
                raise KeyboardInterrupt

        previous = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    @staticmethod
    def _is_reading(frame: FrameType | None) -> bool:
        # the handler runs in the frame that was interrupted: that of _read_line, or one that it has called
        while frame is not None:
            if frame.f_code is TerminalChat._read_line.__code__:
                return True
            frame = frame.f_back
        return False


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
