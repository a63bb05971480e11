"""Addresses and interfaces of this machine: on which of them a run listens, and nowhere else."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

LOOPBACK = "127.0.0.1"
STORE_SOCKET = "MEGATRON_STORE_SOCKET"
"""Descriptor of the socket, bound to MASTER_PORT by the agent, on which rank 0 serves the store."""


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


def bound_socket(address: str, port: int) -> socket.socket:
    """Return a socket that holds a port of this address, for a process that will listen there; port 0: a free one.

    No process can connect yet, and the kernel gives the port to no other socket. Raises OSError.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        if port:  # of a restart, where the connections of the previous ranks have not expired
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, port))
    except OSError as error:
        holder.close()
        raise _cannot_listen(error, address, port) from None
    return holder


def listening_socket(address: str, port: int) -> socket.socket:
    """Return a socket that listens on this address alone; port 0: a free one. Raises OSError."""
    return _listening(bound_socket(address, port))


def store_socket(host: str, port: int) -> socket.socket:
    """Return the listening socket of rank 0: the one that the agent bound, if there is one. Raises OSError."""
    inherited = os.environ.pop(STORE_SOCKET, None)
    if inherited is None:
        return listening_socket(listen_address(host), port)
    return _listening(socket.socket(fileno=int(inherited)))


def _listening(holder: socket.socket) -> socket.socket:
    try:
        holder.listen(socket.SOMAXCONN)
    except OSError as error:  # with SO_REUSEADDR several sockets have one port, until one of them listens
        address, port = holder.getsockname()[:2]
        holder.close()
        raise _cannot_listen(error, address, port) from None
    return holder


def _cannot_listen(error: OSError, address: str, port: int) -> OSError:
    return OSError(error.errno, f"cannot listen on {address}, port {port}: {error.strerror}")


def _interfaces() -> Iterator[tuple[str, str]]:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                yield name, entry.address
