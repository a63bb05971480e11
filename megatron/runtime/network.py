"""Addresses and interfaces of this machine: on which of them a run listens, and nowhere else."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from megatron.options.config import ConfigError

Ends = tuple[str, str]
"""Addresses and ports of a connection, here and there, as the kernel writes them."""
LOOPBACK = "127.0.0.1"
STORE_SOCKET = "MEGATRON_STORE_SOCKET"
"""Descriptor of the socket on which the agent listens at MASTER_PORT, and rank 0 serves the store."""


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
            # connect of a datagram socket makes the kernel choose the route, and with it the address
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
    # localhost is meant as it says; a host's own name that leads to 127.0.1.1 is not
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
    """Return the listening socket of rank 0: that of the agent, if there is one. Raises OSError."""
    # it listened before the ranks started: no other program could take the port, and no connection is refused
    inherited = os.environ.pop(STORE_SOCKET, None)
    if inherited is None:
        return listening_socket(listen_address(host), port)
    return socket.socket(fileno=int(inherited))


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


def rank_connections() -> dict[Ends, int]:
    """Return the TCP connections between this process and the other ranks that its agent has started.

    The descriptor of each is by both ends. Those with other programs, such as a tracker's server, are not among them.
    """
    ends_of = _ends_by_inode()
    own = _connections_of(os.getpid(), ends_of)
    if not own:  # before a round, which is half of the calls
        return {}
    import psutil

    of_ranks = set[Ends]()
    for rank in psutil.Process(os.getppid()).children():  # this one too, which may have both ends
        of_ranks |= _connections_of(rank.pid, ends_of).keys()
    return {ends: number for ends, number in own.items() if ends[::-1] in of_ranks}


def _ends_by_inode() -> dict[str, Ends]:
    """Return the ends of all TCP connections in this process's network by the number of the socket, which links have.

    Read once for all ranks: psutil would read it, and make an address of each number, for each of them.
    """
    ends_of = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # there is no IPv6
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                words = line.split()
                if int(words[2].partition(":")[2], 16):  # one that listens has no port at its other end
                    ends_of[words[9]] = (words[1], words[2])
    return ends_of


def _connections_of(pid: int, ends_of: Mapping[str, Ends]) -> dict[Ends, int]:
    """Return the connections of a process; none of one that has ended."""
    own = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it has been closed since
                inode = os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]")
                if inode in ends_of:
                    own[ends_of[inode]] = int(name)
    return own


def break_connections(descriptors: Iterable[int]) -> None:
    """Break connections, as the end of this process would, also those of libraries that have no call for it."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _interfaces() -> Iterator[tuple[str, str]]:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                yield name, entry.address


# ---------------------------------------------------------------------------------------------------------------------
# A rank that mpirun has started: its place, from the variables of Open MPI and of MPICH's and Intel MPI's Hydra, and
# whether its output is seen.

OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def is_first_rank() -> bool:
    """Return True in rank 0, which says what all ranks would say alike, and in a process outside of a launcher."""
    return os.environ.get("RANK", "0") == "0"


STDOUT = "MEGATRON_STDOUT"
"""`terminal` or `file`: where mpirun's own output goes. Open MPI gives each process a terminal, whatever that is."""


def prints_to_terminal() -> bool:
    """Return True if a terminal shows what this rank prints; under Open MPI only where the launcher has said so."""
    return sys.stdout.isatty() and os.environ.get(STDOUT, "terminal") == "terminal"


def stdout_of_launcher() -> str:
    """Return the value of STDOUT for what writes to this process's output."""
    return "terminal" if sys.stdout.isatty() else "file"


def adopt_mpi_variables() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of a rank of mpirun.

    A launcher that has set RANK comes first. Slurm's srun sets PMI_RANK too, but none of the local ones, and is left
    alone. Raises ConfigError if the ranks of several hosts do not know the first one.
    """
    if OPEN_MPI[0] in os.environ:
        # what the launcher has said of its own output comes first
        os.environ.setdefault(STDOUT, "file")
    if "RANK" in os.environ:
        return
    # all four: Slurm sets PMI_RANK alone
    names = next((names for names in (OPEN_MPI, HYDRA) if all(name in os.environ for name in names)), None)
    if names is None:
        return
    os.environ.update(zip(OURS, (os.environ[name] for name in names), strict=True))
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"] and "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            [
                f"MASTER_ADDR is not set, but mpirun has started {os.environ['WORLD_SIZE']} ranks on several hosts; "
                "give them the first host: mpirun -x MASTER_ADDR=HOST, with Hydra mpirun -genv MASTER_ADDR HOST"
            ]
        )


def leave_mpi() -> int:
    """Remove what Open MPI's mpirun has set, and return the number of this process among those it has started.

    Libraries of an accelerator read a process's place there, but this process starts others, which have their own.
    """
    number = int(os.environ[OPEN_MPI[0]])
    os.environ.setdefault(STDOUT, "file")
    for name in [name for name in os.environ if name.startswith(("OMPI_", "ORTE_", "PMIX_", "PRTE_"))]:
        del os.environ[name]
    return number
