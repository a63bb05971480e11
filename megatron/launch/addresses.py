"""Hosts and endpoints as a user writes them: what pdsh, ssh and the ranks can use, and which mean one host.

pdsh reads a host as [MODULE:][USER@]HOSTS, where HOSTS may be a list or a range: `h1:22` is host 22 by a module h1.
An IPv6 address needs the module, `ssh:fd00:1::2`, unless its first colon is a double one.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
import socket

# addresses that no machine has: RFC 5737, RFC 3849
EXAMPLE_NETWORKS = ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")
RENDEZVOUS_PORT = 29500  # unless another is given: the default of torch and DeepSpeed
# hosts' names have underscores, though DNS has a narrower rule
LABEL = r"\w[\w-]*"
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def ip_address(address: str) -> IpAddress | None:
    """Return the address as a number, an IPv4 address inside an IPv6 one as the former; None for a name."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    # ::ffff:10.0.0.1 is 10.0.0.1, which a hostsfile must not list twice
    return getattr(parsed, "ipv4_mapped", None) or parsed


def login_of(name: str) -> str:
    """Return [USER@]HOST, as ssh takes it, of a host as pdsh takes it."""
    return name.removeprefix("ssh:")


def address_of(name: str) -> str:
    """Return the host alone."""
    return login_of(name).rpartition("@")[2]


def host_fault(name: str) -> str | None:
    """Return the rule that a host, [ssh:][USER@]HOST, breaks, with the remedy; None: pdsh and ssh take it."""
    user, at, address = login_of(name).rpartition("@")
    number = ip_address(address)
    # brackets first: a URL writes an IPv6 address in them, and without them it may be a good one
    if "[" in name or "]" in name:
        if ip_address(address.strip("[]")) is not None:
            return f"pdsh takes brackets for a range; write ssh:{user}{at}{address.strip('[]')}"
        return "pdsh takes brackets for a range of hosts; give each host a line of its own"
    if at and not re.fullmatch(r"\w[\w.-]*", user, re.ASCII):
        return "a host is HOST or USER@HOST; set `User` for this host in ~/.ssh/config"
    if number is not None:
        fault = address_fault(number)
        # pdsh reads no module where the first colon is a double one, and no user stands before it
        is_safe = ":" not in address or name.startswith("ssh:") or (not at and re.match("[^:]*::", address))
        if fault is None and not is_safe:
            return f"pdsh takes what stands before its first colon for a module; write ssh:{name}"
        return fault
    if ":" in address:
        return (
            "pdsh takes no port; write the host alone, and set `Port` for it in ~/.ssh/config, or "
            "PDSH_SSH_ARGS_APPEND='-p PORT' for all"
        )
    return name_fault(address)


def address_fault(number: IpAddress) -> str | None:
    """Return why no host can be reached by this address; None: one can."""
    if number.is_unspecified:
        return "it is the address of no host, but stands for all of its own; give the one that the others reach"
    if number.is_multicast or number == ipaddress.ip_address("255.255.255.255"):
        return "it is the address of a group, not of one host; give the host's own"
    # fe80::1%eth0 names an interface of the machine that reads it
    if isinstance(number, ipaddress.IPv6Address) and (number.is_link_local or number.scope_id):
        return "an address in fe80::/10 holds on one network interface only; give another of the host, or its name"
    return None


def name_fault(address: str) -> str | None:
    """Return why no host has this name; None: one may."""
    labels = address.removesuffix(".").split(".")
    if re.fullmatch(r"\d+|0[xX][\da-fA-F]*", labels[-1], re.ASCII):  # resolvers read it as a number: 10.1 is 10.0.0.1
        return "an IPv4 address is four numbers from 0 to 255 without leading zeros; write it so, or give a name"
    if not all(re.fullmatch(LABEL, label, re.ASCII) for label in labels):
        return "a name is made of letters, digits, - and _, with dots between; correct it"
    return None


def host_key(name: str) -> str:
    """Return the one way to write a host without its user: names differ in neither case nor a last dot."""
    address = address_of(name)
    number = ip_address(address)
    if number is not None:
        return str(number)
    return address.removesuffix(".").lower()


def is_own(name: str) -> bool:
    """Return True for a host that every machine calls itself: localhost and the loopback addresses."""
    key = host_key(name)
    number = ip_address(key)
    if number is not None:
        return number.is_loopback
    # the names that distributions give the loopback addresses in /etc/hosts
    return key in ("localhost", "localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback")


def is_this_machine(name: str) -> bool:
    """Return True for this machine by its own name or a loopback address, unless another user is to log in."""
    user = login_of(name).rpartition("@")[0]
    return (not user or user == _own_user()) and (is_own(name) or host_key(name) == host_key(socket.gethostname()))


def _own_user() -> str | None:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container a user may have no name
        return None


def is_example(name: str) -> bool:
    number = ip_address(host_key(name))
    return number is not None and any(number in ipaddress.ip_network(network) for network in EXAMPLE_NETWORKS)


def endpoint_of(host: str, port: int) -> str:
    """Return HOST:PORT, an IPv6 address in brackets."""
    if ":" in host:
        host = f"[{host}]"
    return f"{host}:{port}"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; an IPv6 address may stand in brackets."""
    # from the right: an IPv6 address has colons of its own
    host, _, port = endpoint.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def endpoint_fault(endpoint: str) -> str | None:
    """Return the rule that HOST:PORT breaks, with the remedy."""
    host, colon, port = endpoint.rpartition(":")
    # without a port: the last group of fd00::1 would be read as one
    if ip_address(endpoint.strip("[]")) is not None:
        return "it is not HOST:PORT; write the port behind the address, one of IPv6 in brackets: [fd00::1]:29500"
    if not (host and colon and re.fullmatch(r"\d{1,5}", port, re.ASCII) and 0 < int(port) < 2**16):
        return "it is not HOST:PORT; give the first node's, such as node0:29500"
    if "@" in host:
        return "no user logs in there; leave it out"
    return host_fault(split_endpoint(endpoint)[0])
