"""A host that passes reaches pdsh as it was written; any other is refused with the rule and the remedy."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess

import pytest

from megatron.cli import launch
from megatron.launch.addresses import (
    address_of,
    endpoint_fault,
    endpoint_of,
    host_fault,
    is_own,
    is_this_machine,
    login_of,
    split_endpoint,
)
from megatron.launch.plan import parse_hostsfile

GOOD = (
    *("h1", "H1", "worker-0", "a_b", "node1.cluster.local", "node1.cluster.local.", "10h", "localhost", "127.0.1.1"),
    *("10.77.0.1", "fd00::2", "::1", "ssh:FD00:0::2", "ssh:a@fd00:1::3", "ssh:h2", "a@h3", "a.b-c@10.77.0.2", "_x@h-1"),
)


@pytest.mark.skipif(shutil.which("pdsh") is None, reason="needs pdsh")
def test_pdsh_takes_what_passes_for_one_host_and_one_user() -> None:
    """One call for all: the place of a host is its line in the output."""
    hosts = ",".join(re.sub("^ssh:", "exec:", name) for name in GOOD)
    command = ["pdsh", "-R", "exec", "-w", hosts, "echo", "%n", "%u@%h"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = dict(line.partition(": ")[2].split(" ", 1) for line in shown)
    assert len(found) == len(GOOD)
    for place, name in enumerate(GOOD):
        assert host_fault(name) is None
        login = login_of(name)
        assert (found[str(place)] if "@" in login else found[str(place)].partition("@")[2]) == login
        assert address_of(name) == login.partition("@")[2] or login


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h1:22", "pdsh takes no port; write the host alone, and set `Port` for it in ~/.ssh/config"),
        ("a@h1:22", "pdsh takes no port"),
        ("rsh:h1", "pdsh takes no port"),
        ("10.0.0.1:22", "pdsh takes no port"),
        ("fd00::1::2", "pdsh takes no port"),
        ("[fd00::1]", "pdsh takes brackets for a range; write ssh:fd00::1"),
        ("2001:db8:1::5", "pdsh takes what stands before its first colon for a module; write ssh:2001:db8:1::5"),
        ("h[1-3]", "pdsh takes brackets for a range of hosts; give each host a line of its own"),
        ("root@fd00::1", "pdsh takes what stands before its first colon for a module; write ssh:root@fd00::1"),
        ("fe80::1", "holds on one network interface only"),
        ("fe80::1%eth0", "holds on one network interface only"),
        ("a@b@h1", "a host is HOST or USER@HOST"),
        ("@h1", "a host is HOST or USER@HOST"),
        ("-oProxyCommand=x@h1", "a host is HOST or USER@HOST"),
        ("0.0.0.0", "it is the address of no host"),
        ("::", "it is the address of no host"),
        ("224.0.0.1", "it is the address of a group"),
        ("255.255.255.255", "it is the address of a group"),
        ("10.1", "an IPv4 address is four numbers"),
        ("010.0.0.1", "an IPv4 address is four numbers"),
        ("300.0.0.1", "an IPv4 address is four numbers"),
        ("0x7f000001", "an IPv4 address is four numbers"),
        ("7", "an IPv4 address is four numbers"),
        ("h..1a", "a name is made of letters"),
        (".h", "a name is made of letters"),
        ("-h", "a name is made of letters"),
        ("h1%eth0", "a name is made of letters"),
        ("knöten", "a name is made of letters"),
    ],
)
def test_a_host_that_pdsh_would_take_for_another_is_refused(name: str, said: str) -> None:
    assert said in (host_fault(name) or "")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("h1", "H1"),
        ("a@h1", "b@h1"),
        ("h1", "ssh:me@h1."),
        ("fd00::1", "ssh:FD00:0::1"),
        ("10.0.0.1", "::ffff:10.0.0.1"),
    ],
)
def test_two_lines_for_one_host_are_refused(first: str, second: str) -> None:
    """pdsh would start two agents on it, and log in as the first line's user for both."""
    [fault] = parse_hostsfile(f"{first} slots=8\n{second} slots=8\n", "hosts")[1]
    assert f"repeats the host of line 1, {first}: users and case make no other host" in fault


def test_a_machine_knows_itself_by_any_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Node1")
    assert all(map(is_this_machine, ("node1", "NODE1", "localhost", "LOCALHOST", "127.0.1.1", "::1", "ip6-localhost")))
    assert not any(map(is_this_machine, ("node2", "nobody-here@localhost", "127.example.org")))
    assert not any(map(is_own, ("node1", "127.example.org", "10.0.0.1")))


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("node0", "it is not HOST:PORT; give the first node's, such as node0:29500"),
        ("node0:0", "it is not HOST:PORT"),
        ("node0:65536", "it is not HOST:PORT"),
        (":29500", "it is not HOST:PORT"),
        ("fd00::1", "it is not HOST:PORT; write the port behind the address"),
        ("[fd00::1]", "it is not HOST:PORT; write the port behind the address"),
        ("me@node0:29500", "no user logs in there"),
        ("0.0.0.0:29500", "it is the address of no host"),
        ("node0:22:29500", "write the host alone"),
    ],
)
def test_an_endpoint_that_no_node_can_reach_is_refused(endpoint: str, said: str) -> None:
    assert said in (endpoint_fault(endpoint) or "")


@pytest.mark.parametrize("host", ["node0", "10.0.0.1", "fd00::2", "127.0.0.1"])
def test_an_endpoint_is_read_as_it_is_written(host: str) -> None:
    endpoint = endpoint_of(host, 29500)
    assert endpoint_fault(endpoint) is None
    assert split_endpoint(endpoint) == (host, 29500)


@pytest.mark.parametrize("port", ["0", "65536", "-1", "abc"])
def test_a_port_that_no_socket_has_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--master-port", port]) == 2
    assert f"--master-port {port}: input should be " in capsys.readouterr().err
