"""Pickles read as data: lists, dicts and records of the names that they give, nothing of which is imported or called.

A pickle is a program for a stack machine, of which REDUCE, NEWOBJ and BUILD call what GLOBAL has imported. Here GLOBAL
gives a `Name`, a call gives a `Record` of its arguments, and a name that is not expected ends the reading.

Source: PEP 307, 574 and 3154; CPython's Lib/pickletools.py
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from typing import Any


class PickleFault(Exception):
    """The pickle is damaged, or names something that is not expected. Says what."""


class Name(str):
    """A global that the pickle names, as `module.name`."""

    __slots__ = ()


class Record:
    """An object of the pickle: the name of its class or function, the arguments, and the state that was set."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None

    def __getitem__(self, field: str) -> Any:
        """Return a field of the state. Raises PickleFault if there is none."""
        if not isinstance(self.state, dict) or field not in self.state:
            raise PickleFault(f"{self.name} has no {field}")
        return self.state[field]

    def get(self, field: str) -> Any:
        return self.state.get(field) if isinstance(self.state, dict) else None


class _Mark:
    """The stack's mark."""


_MARK = _Mark()
_VALUES = frozenset(
    "BININT BININT1 BININT2 INT LONG LONG1 LONG4 FLOAT BINFLOAT UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8".split()
)
"""Operations that push their argument."""
_NEW: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "MARK": lambda: _MARK,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
"""Operations that push a value of their own."""


def read_pickle(content: bytes, names: Collection[str], persistent: Callable[[Any], Any] | None = None) -> Any:
    """Return the object of a pickle, with a Record for each object of a class, and a Name for each class.

    Args:
        names: Globals that it may name.
        persistent: Object of a persistent id, as torch's tensors have for their storages.

    Raises PickleFault.
    """
    try:
        return _Machine(names, persistent).run(content)
    except PickleFault:
        raise
    except (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError, AttributeError) as error:
        raise PickleFault(f"it is not a whole pickle ({type(error).__name__}: {str(error)[:200]})") from None


class _Machine:
    """The stack and the memory of one reading."""

    def __init__(self, names: Collection[str], persistent: Callable[[Any], Any] | None) -> None:
        self._names, self._persistent = names, persistent
        self._stack: list[Any] = []
        self._memory: dict[Any, Any] = {}

    def run(self, content: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(content):
            name = opcode.name
            # the most frequent first: metadata of a large model has millions
            if name in _VALUES:
                self._stack.append(argument)
            elif name in _NEW:
                self._stack.append(_NEW[name]())
            elif name in _OPERATIONS:
                _OPERATIONS[name](self, argument)
            elif name == "STOP":
                return self._last()
            elif name not in ("PROTO", "FRAME"):
                raise PickleFault(f"its pickle has the operation {name}, which plain values do not need")
        raise PickleFault("it ends within its pickle")

    def _last(self) -> Any:
        value = self._stack.pop()
        # one object is left of a whole pickle
        if self._stack or value is _MARK:
            raise PickleFault("it ends within an object of its pickle")
        return value

    def _since_mark(self) -> list[Any]:
        """Remove the mark and what lies above it, and return that."""
        stack = self._stack
        at = len(stack) - 1
        while at >= 0 and stack[at] is not _MARK:
            at -= 1
        if at < 0:
            raise PickleFault("its pickle ends a list that it does not begin")
        values = stack[at + 1 :]
        del stack[at:]
        return values

    def _memoize(self, _: Any) -> None:
        self._memory[len(self._memory)] = self._stack[-1]

    def _put(self, number: Any) -> None:
        self._memory[number] = self._stack[-1]

    def _get(self, number: Any) -> None:
        self._stack.append(self._memory[number])

    def _tuple_of(self, count: int) -> None:
        if len(self._stack) < count:
            raise PickleFault("its pickle makes a tuple of values that it does not have")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _dict(self, _: Any) -> None:
        values = self._since_mark()
        self._stack.append(dict(zip(values[::2], values[1::2], strict=True)))

    def _append(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise PickleFault(f"its pickle appends to a {type(target).__name__}")
        target.extend(values)

    def _add(self, _: Any) -> None:
        values, target = self._since_mark(), self._stack[-1]
        if not isinstance(target, set):
            raise PickleFault(f"its pickle adds to a {type(target).__name__}")
        target.update(values)

    def _set_items(self, values: list[Any]) -> None:
        """Set keys and values of a dict; an OrderedDict's record keeps them in its state."""
        target = self._stack[-1]
        if isinstance(target, Record):
            target.state = {} if target.state is None else target.state
            target = target.state
        if not isinstance(target, dict):
            raise PickleFault(f"its pickle sets items of a {type(target).__name__}")
        target.update(zip(values[::2], values[1::2], strict=True))

    def _item(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def _global(self, argument: str) -> None:
        self._name(*argument.split(" ", 1))

    def _stack_global(self, _: Any) -> None:
        qualified, module = self._stack.pop(), self._stack.pop()
        self._name(module, qualified)

    def _name(self, module: Any, qualified: Any) -> None:
        # compared as text; nothing is looked up
        name = f"{module}.{qualified}"
        if name not in self._names:
            raise PickleFault(
                f"it names {name}, and opening a pickle that names code may run it; only tensors and plain values are "
                "read"
            )
        self._stack.append(Name(name))

    def _call(self, _: Any) -> None:
        # a record of the call in place of its result
        arguments, made = self._stack.pop(), self._stack.pop()
        if not isinstance(made, Name) or not isinstance(arguments, tuple):
            raise PickleFault(f"its pickle calls a {type(made).__name__}")
        self._stack.append(Record(made, arguments))

    def _call_by_keyword(self, _: Any) -> None:
        if self._stack.pop():
            raise PickleFault("its pickle makes an object with keywords")
        self._call(None)

    def _build(self, _: Any) -> None:
        state = self._stack.pop()
        if not isinstance(self._stack[-1], Record):
            raise PickleFault(f"its pickle sets the state of a {type(self._stack[-1]).__name__}")
        self._stack[-1].state = state

    def _persist(self, _: Any) -> None:
        if self._persistent is None:
            raise PickleFault("its pickle refers to something beside it")
        self._stack.append(self._persistent(self._stack.pop()))


_OPERATIONS: dict[str, Callable[[_Machine, Any], Any]] = {
    "MEMOIZE": _Machine._memoize,
    **dict.fromkeys(("BINGET", "LONG_BINGET", "GET"), _Machine._get),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "PUT"), _Machine._put),
    "TUPLE1": lambda machine, _: machine._tuple_of(1),
    "TUPLE2": lambda machine, _: machine._tuple_of(2),
    "TUPLE3": lambda machine, _: machine._tuple_of(3),
    "TUPLE": lambda machine, _: machine._stack.append(tuple(machine._since_mark())),
    "LIST": lambda machine, _: machine._stack.append(machine._since_mark()),
    "FROZENSET": lambda machine, _: machine._stack.append(frozenset(machine._since_mark())),
    "DICT": _Machine._dict,
    "APPEND": lambda machine, _: machine._append([machine._stack.pop()]),
    "APPENDS": lambda machine, _: machine._append(machine._since_mark()),
    "ADDITEMS": _Machine._add,
    "SETITEM": _Machine._item,
    "SETITEMS": lambda machine, _: machine._set_items(machine._since_mark()),
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._call,
    "NEWOBJ": _Machine._call,
    "NEWOBJ_EX": _Machine._call_by_keyword,
    "BUILD": _Machine._build,
    "BINPERSID": _Machine._persist,
    "POP": lambda machine, _: machine._stack.pop(),
    "POP_MARK": lambda machine, _: machine._since_mark(),
}
"""All others that plain values, tensors and records need."""
