"""Types that the option sections share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from megatron.runtime.devices import device_fault


def _no_switch(value: Any) -> Any:
    """Return the value. True is an int to pydantic, so that `num_layers: yes` of a preset would mean one layer."""
    if isinstance(value, bool):
        raise PydanticCustomError("switch", "must be a number, not {value}", {"value": str(value).lower()})
    return value


Whole = Annotated[int, BeforeValidator(_no_switch)]
Number = Annotated[float, BeforeValidator(_no_switch)]
Positive = Annotated[Whole, Field(gt=0)]
NonNegative = Annotated[Whole, Field(ge=0)]
PositiveFloat = Annotated[Number, Field(gt=0)]
NonNegativeFloat = Annotated[Number, Field(ge=0)]
# below 1: dropout scales what is left by 1 / (1 - p)
Probability = Annotated[Number, Field(ge=0, lt=1)]


def _known_device(name: str) -> str:
    """Return the name. An unknown device is a value that cannot be read, so that no rule reads a record of it."""
    fault = device_fault(name)
    if fault:
        raise PydanticCustomError("unknown_device", "{fault}", {"fault": fault})
    return name


DeviceName = Annotated[str, AfterValidator(_known_device)]
TokenizerType = Literal[
    "GPT2BPETokenizer",
    "HFTokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "NullTokenizer",
]

TrainOn = Literal["assistant", "all_but_system", "all"]
"""Tokens of chats that are trained."""
TooLong = Literal["drop", "truncate", "split"]
"""Treatments of chats that are longer than a sample."""

# a preset may give a number where a string is expected: `split: 100`, `data_path: [0.3, a, 0.7, b]`
STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, coerce_numbers_to_str=True)
