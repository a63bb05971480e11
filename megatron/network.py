"""Addresses and interfaces of this machine: on which of them a run listens, and nowhere else."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

LOOPBACK = "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Return True for an address, or localhost, by which a machine reaches itself."""
    return address.startswith("127.") or address in ("::1", "localhost")


def resolve(host: str) -> str:
    """Return the first address of a host. Raises OSError."""
    return str(socket.getaddrinfo(host, 9, type=socket.SOCK_STREAM)[0][4][0])


def address_towards(address: str) -> str | None:
    """Return this machine's own address from which `address` is reached; None if unknown."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # sends nothing
            own: str = probe.getsockname()[0]
    except OSError:
        return None
    return own


def interface_towards(address: str) -> str | None:
    """Return the network interface of this machine from which `address` is reached; None if unknown.

    By default gloo takes the address that the machine's own name resolves to, on Debian and Ubuntu 127.0.1.1.
    """
    own = address_towards(address)
    return next((name for name, known in _interfaces() if known == own), None)


def listen_address(host: str) -> str:
    """Return the address of this machine, the `host` that others connect to, on which to listen for them.

    It is what the name resolves to here, or the address of the interface in GLOO_SOCKET_IFNAME where that is a loopback
    address, as a machine's own name is on Debian and Ubuntu. Raises OSError.
    """
    address = resolve(host)
    if is_loopback(host) or not is_loopback(address):
        return address
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    found = next((known for name, known in _interfaces() if name == interface), None)
    if found is None:
        raise OSError(
            f"{host} is {address} on this machine, which other machines cannot reach; give its address instead of the "
            "name, or set GLOO_SOCKET_IFNAME to the network interface between the machines"
        )
    return found


def listening_socket(address: str, port: int) -> socket.socket:
    """Return a socket that listens on this address alone; port 0: a free one. Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {address}, port {port}: {error.strerror}") from None
    return listener


def free_port(address: str) -> int:
    """Return a port that is free on the interface with this address."""
    with listening_socket(address, 0) as listener:
        port: int = listener.getsockname()[1]
        return port


def _interfaces() -> Iterator[tuple[str, str]]:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                yield name, entry.address
