"""Replies of the doctor's agents: lines with an HMAC, and the records in them, checked field by field. Without torch.

A reply travels over the output of ssh, where a login shell may print too. What has no seal is not read as a reply; a
sealed one with a wrong field names its host, since the host and not the network made it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from megatron.runtime.messages import MAC_BYTES, StrangerError, seal, unseal

MARK = b"\x1edoctor "
LARGEST_LINE = 2**20
"""Bytes of a line, and of all that a host prints beside its replies. A reply of 256 cores has 40,000."""
EXACT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

# printed on the user's terminal, which obeys control characters
Text = Annotated[str, Field(max_length=300, pattern=r"^[\x20-\x7e]*$")]
Count = Annotated[int, Field(ge=0, le=2**62)]
Rate = Annotated[float, Field(gt=0, le=1e24)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]
Record = TypeVar("Record")


class DamagedReplyError(ValueError):
    """A host sent a reply that cannot be one."""


@dataclass(frozen=True, config=EXACT)
class Failed:
    """An agent could not carry out a command."""

    error: Text


@dataclass(frozen=True, config=EXACT)
class Facts:
    """Hardware and software of a host, as it states them."""

    hostname: Text
    machine: Text
    """Identity of the machine's present start: agents with the same one share its cores."""
    processor: Text
    cores: Annotated[int, Field(ge=1, le=2**11)]
    """Those that a process may use."""
    device: Text
    """Name of its device: cpu, cuda, hpu or a user's."""
    devices: Count | None
    """Devices of that kind. None: they are not counted; on a CPU any number of ranks may run."""
    chips: Annotated[tuple[Text, ...], Field(max_length=256)]
    """Names of the devices."""
    driver: Text
    packages: Annotated[dict[Text, Text], Field(max_length=64)]
    """Versions by name; `megatron` is a digest of its code."""
    memory_bytes: Count
    memory_free: Count
    disk_bytes: Count
    disk_free: Count
    open_files: Count
    link_bits: Count
    """Stated bits a second of the network interface towards the others. 0: it states none."""


@dataclass(frozen=True, config=EXACT)
class Clock:
    """Seconds since 1970 by a host's clock."""

    time: Annotated[float, Field(ge=0, le=1e12)]


@dataclass(frozen=True, config=EXACT)
class DiskRates:
    """Rates of the tested folder."""

    bytes_per_s: Rate
    sync_s: Seconds
    """A small write and its sync."""


@dataclass(frozen=True, config=EXACT)
class ProductCheck:
    """Products of one core or device."""

    name: Text
    flops: Rate
    repeats: bool
    """All repeats gave the same bits."""
    digest: Text
    """Checksum of a product of random numbers."""
    is_exact: bool
    """A product of whole numbers was right."""


@dataclass(frozen=True, config=EXACT)
class DeviceChecks:
    """All cores, or all devices, of a host."""

    products: Annotated[tuple[ProductCheck, ...], Field(min_length=1, max_length=2**16)]
    memory: Annotated[tuple[Rate, ...], Field(min_length=1, max_length=256)]
    """Bytes a second of copies in the memory of each device, or of the host."""

    @model_validator(mode="after")
    def _check(self) -> DeviceChecks:
        if len(self.memory) not in (1, len(self.products)):
            raise ValueError(f"{len(self.memory)} memories of {len(self.products)} devices")
        return self


@dataclass(frozen=True, config=EXACT)
class Port:
    """Address at which an agent listens for the other end of a link."""

    address: Text
    port: Annotated[int, Field(ge=1, le=65535)]


@dataclass(frozen=True, config=EXACT)
class Received:
    """One end of a link."""

    bytes_per_s: Rate
    """That this end received."""
    round_trip_s: Seconds


@dataclass(frozen=True, config=EXACT)
class GroupTime:
    """Median of an exchange in one group of ranks."""

    kind: Text
    """Kind of the group in the layout: tensor, data, ..."""
    operation: Text
    ranks: Annotated[tuple[Count, ...], Field(min_length=2)]
    size: Annotated[int, Field(gt=0, le=2**62)]
    seconds: Annotated[float, Field(gt=0, le=1e6)]


@dataclass(frozen=True, config=EXACT)
class GroupTimes:
    """All groups, as the first host's agent has them of rank 0; those of other hosts have none."""

    groups: Annotated[tuple[GroupTime, ...], Field(max_length=2**16)]


def sealed_line(key: bytes, number: int, message: dict[str, Any]) -> bytes:
    """Return the line of an agent's reply of this number."""
    content = seal(key, b"doctor %d" % number, message)
    # a line of its own, whatever was printed before it
    return b"\n" + MARK + content[:MAC_BYTES].hex().encode() + b" " + content[MAC_BYTES:] + b"\n"


def unsealed(key: bytes, number: int, line: bytes) -> dict[str, Any] | None:
    """Return the message in a line; None: it is something else. Raises DamagedReplyError."""
    if not line.startswith(MARK):
        return None
    mac, _, body = line.removeprefix(MARK).partition(b" ")
    try:
        content = bytes.fromhex(mac.decode("ascii")) + body.rstrip(b"\n")
        return unseal(key, b"doctor %d" % number, content, LARGEST_LINE)
    except (StrangerError, ValueError, RecursionError):
        raise DamagedReplyError("sent a reply whose seal does not fit it") from None


def record_of(message: dict[str, Any], kind: type[Record]) -> Record | Failed:
    """Return the record in a message. Raises DamagedReplyError."""
    # as JSON, in which strict records and tuples are objects and lists
    content = json.dumps(message)
    try:
        if "error" in message:
            return TypeAdapter(Failed).validate_json(content)
        return TypeAdapter(kind).validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))[:80]
        raise DamagedReplyError(f"sent a reply whose {where or 'form'} is wrong: {first['msg'][:120]}") from None
