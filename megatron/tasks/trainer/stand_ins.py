"""Stand-ins for a user's trainer, its model and outputs: they have what every layout can give, and refuse the rest.

N samples, of at most L + 1 tokens; V tokens of the vocabulary.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.tasks.loss_result import LossError
from megatron.tasks.trainer.user_class import GIVEN, GUIDE, UserTrainer

if TYPE_CHECKING:
    from torch import Tensor

REMEDY = f"compute_loss has model, inputs and the loss alone: use these, or write a loss function ({GUIDE})"


@dataclass
class LossCall:
    """One call of compute_loss: what it is given, and what it has used."""

    trainer: UserTrainer
    inputs: Mapping[str, Tensor]
    """input_ids, attention_mask and labels, [N, L + 1] int64, as transformers' collator makes them."""
    count: Tensor
    """Labels in the loss."""
    vocab_size: int
    logits: Callable[[], Tensor]
    """Return the logits, [N, L + 1, V]."""
    loss: Callable[[], Tensor] | None = None
    """Return the mean cross-entropy of the labels; None: it is computed from the logits."""
    used: set[str] = field(default_factory=set)
    """`loss`, `logits` or both."""
    refused: LossError | None = None
    is_run: bool = False
    """The model has been called."""

    def __post_init__(self) -> None:
        self._versions = {name: tensor._version for name, tensor in self.inputs.items()}

    def refuse(self, what: str, remedy: str = REMEDY) -> LossError:
        """Return the error for the use of something that is not there; kept, since the user's code may catch it."""
        error = LossError(f"trainer={self.trainer.name} uses {what}{self._line()}; {remedy}")
        self.refused = self.refused or error
        return error

    def _line(self) -> str:
        """Return the line of the user's file that is being run."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self.trainer.file:
                return f" (line {frame.f_lineno})"
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    def is_given(self, name: str, tensor: Any) -> bool:
        """Return whether a tensor is one of the inputs, unchanged."""
        import torch

        given = self.inputs[name]
        if given._version != self._versions[name] or not isinstance(tensor, torch.Tensor):
            return False
        return tensor is given or torch.equal(tensor, given)

    def own_loss(self, labels: Tensor) -> Tensor:
        """Return the loss of a model of transformers for labels: the mean cross-entropy of those that are not -100."""
        import torch.nn.functional as F

        if self.loss is not None and self.is_given("labels", labels):
            self.used.add("loss")
            return self.loss()
        self.used.add("logits")
        logits = self.logits()[:, :-1].float()
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1).to(logits.device))


class _Inputs(dict[str, Any]):
    """The inputs by their names; another name is refused, also where the user's code has a default for it."""

    call: LossCall

    def _check(self, name: Any) -> None:
        if name not in GIVEN:
            raise self.call.refuse(
                f"inputs[{name!r}]",
                f"its inputs are {', '.join(GIVEN)}; a loss function knows "
                f"more of each label, such as its dataset ({GUIDE})",
            )

    def __missing__(self, name: Any) -> Any:
        self._check(name)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        self._check(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._check(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self._check(name)
        return super().pop(name, *default)


class _Config:
    """The part of a model's configuration that a loss may read."""

    def __init__(self, call: LossCall) -> None:
        self.__dict__.update(_call=call, vocab_size=call.vocab_size)

    def __getattr__(self, name: str) -> Any:
        raise self._call.refuse(f"model.config.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._call.refuse(f"model.config.{name}")


class _Model:
    """The model: it can be called once, with its inputs."""

    def __init__(self, call: LossCall) -> None:
        self.__dict__.update(_call=call, config=_Config(call))

    @property
    def module(self) -> _Model:
        """The model within a wrapper, which is another object in DeepSpeed and DDP."""
        return self

    def __getattr__(self, name: str) -> Any:
        remedy = REMEDY
        if name in ("disable_adapter", "disable_adapter_layers"):
            remedy = f"the model without its adapters is the `reference` of a loss function ({GUIDE})"
        raise self._call.refuse(f"model.{name}", remedy)

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._call.refuse(f"model.{name}")

    def __call__(self, *arguments: Any, **named: Any) -> _Outputs:
        call: LossCall = self._call
        if len(arguments) > 2:
            raise call.refuse("a third argument of the model", "name its arguments")
        named |= dict(zip(GIVEN, arguments, strict=False))
        if call.is_run:
            raise call.refuse(
                "a second forward pass",
                f"a step has one: the model at the start is the `reference` of a loss function, and other data a "
                f"dataset of --data-path ({GUIDE})",
            )
        call.is_run = True
        for name, value in named.items():
            self._check(name, value)
        labels = named.get("labels")
        return _Outputs(call, labels)

    def _check(self, name: str, value: Any) -> None:
        """Raise LossError for an argument that changes what the model computes."""
        call: LossCall = self._call
        if name == "labels" or value is None:
            return
        if name in ("input_ids", "attention_mask"):
            if not call.is_given(name, value):
                raise call.refuse(f"another {name} than the one in inputs", "give the model its inputs as they are")
        elif name == "num_items_in_batch":
            if value is not call.count:
                raise call.refuse("another num_items_in_batch than the one that it is given", "pass that on")
        elif name == "return_dict":
            return
        elif name not in ("use_cache", "output_hidden_states", "output_attentions") or value is not False:
            raise call.refuse(f"model({name}=...)")


class _Outputs:
    """The outputs of the model, computed where they are read."""

    def __init__(self, call: LossCall, labels: Tensor | None) -> None:
        self._call, self._labels = call, labels

    @functools.cached_property
    def loss(self) -> Tensor | None:
        return None if self._labels is None else self._call.own_loss(self._labels)

    @functools.cached_property
    def logits(self) -> Tensor:
        self._call.used.add("logits")
        return self._call.logits()

    def __getattr__(self, name: str) -> Any:
        remedy = REMEDY
        if name in ("hidden_states", "last_hidden_state"):
            remedy = f"write a loss function of `hidden` ({GUIDE})"
        raise self._call.refuse(f"outputs.{name}", remedy)

    def _names(self) -> list[str]:
        return ["logits"] if self._labels is None else ["loss", "logits"]

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, int) and key in range(len(self._names())):
            key = self._names()[key]
        if key not in ("loss", "logits"):
            raise self._call.refuse(f"outputs[{key!r}]")
        return getattr(self, str(key))

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self._names():
            return default
        return self[name]

    def keys(self) -> list[str]:
        return self._names()


@functools.cache
def _stand_in_class(trainer: UserTrainer) -> type:
    """Return a class of the trainer's name that has the user's attributes alone, and whose super() has the plain loss.

    Its objects have `call` and `model` in their __dict__.
    """
    own = trainer.own_classes

    def compute_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not isinstance(inputs, dict):
            raise self.__dict__["call"].refuse("super().compute_loss with other inputs than a dict", "call the model")
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def get(self: Any, name: str) -> Any:
        if name.startswith("__") or any(name in vars(each) for each in own):
            return object.__getattribute__(self, name)
        if name == "model":
            return self.__dict__["model"]
        raise self.__dict__["call"].refuse(f"self.{name}")

    def refuse_to_set(self: Any, name: str, value: Any) -> None:
        call: LossCall = self.__dict__["call"]
        raise call.refuse(f"self.{name} as a place to keep something", "compute the loss from the arguments alone")

    # behind the user's classes and before the library's, so that their super() finds this one
    between = type(trainer.base.__name__, (trainer.base,), {"compute_loss": compute_loss})
    methods = {"__getattribute__": get, "__setattr__": refuse_to_set}
    return type(trainer.owner.__name__, (trainer.owner, between), methods)


def computed_loss(call: LossCall) -> Tensor:
    """Return what compute_loss returns, a scalar. Raises LossError for what it may not use or return."""
    import torch

    trainer, model = call.trainer, _Model(call)
    inputs: Any = _Inputs(call.inputs)
    inputs.call = call
    if trainer.unpacked:
        inputs = tuple(call.inputs.get(name) for name in trainer.unpacked)
    named = {"num_items_in_batch": call.count} if trainer.takes_count else {}
    # its __init__ would build a trainer
    stand_in: Any = object.__new__(_stand_in_class(trainer))
    stand_in.__dict__.update(call=call, model=model)
    try:
        returned = stand_in.compute_loss(model, inputs, **named)
    except Exception as error:
        # what the stand-ins refused is the cause of whatever the user's code made of it
        if call.refused is None:
            raise
        raise call.refused from error
    if call.refused is not None:
        raise call.refused
    label = f"trainer={trainer.name}"
    if not isinstance(returned, torch.Tensor):
        raise LossError(f"{label} returned a {type(returned).__name__}; return the loss, a tensor of one number")
    if returned.dim() or not returned.is_floating_point():
        raise LossError(
            f"{label} returned {returned.dtype} {list(returned.shape)}; return one number, the mean over the labels or "
            "over the samples"
        )
    return returned
