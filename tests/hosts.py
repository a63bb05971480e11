"""Several hosts on one machine, each with what tells real ones apart: an address, a name, processes and an sshd.

    with Hosts(2, folder) as hosts:
        hosts.login.run("ssh", hosts[0].address, "hostname")
        hosts[1].own_disk(folder / "data")     # the same path, other files
        hosts[1].cut_off()                     # packets are lost, in silence

Every host is a set of Linux namespaces (network, mounts, processes, name), joined by veth pairs to a bridge in another
one, `hosts.login`, from which runs are started. Files are shared, except what `own_disk` unshares. The keys, sshd's and
ssh's configuration and /etc/hosts are made in `folder` and mounted over the machine's in these namespaces alone, so
nothing of the machine is touched. Nothing has a name outside either: whatever kills this process, namespaces, bridge,
mounts and processes go with it, and `folder` alone stays.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.ranks import HANG_S

NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
PROGRAMS = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
"""What hosts are made of: the program, and Debian's package of it."""
SSH_PROGRAMS = {
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "pdsh": "pdsh",
    "pkill": "procps",
}
"""What runs need that begin on another host."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# A host's own part of the machine. The fresh /run is where sshd wants a folder. A shell that ssh starts reads
# ~/.bashrc: what this machine's runs may take a lock in the home folder, which a killed test leaves to later ones.
SET_UP = """
set -e
hostname "$1"
mount -t tmpfs none /run
mkdir -p /run/sshd
mount --bind "$2/ssh" /etc/ssh
mount --bind "$2/hosts.$1" /etc/hosts
[ ! -d ~/.ssh ] || mount -t tmpfs none ~/.ssh
[ ! -f ~/.bashrc ] || mount --bind /dev/null ~/.bashrc
ip link set lo up
"""
SSHD = """
echo ready
exec "$3" -D -e
"""
NO_SSHD = """
echo ready
exec sleep infinity
"""
SSHD_CONFIG = """
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/client_key.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
MaxStartups 100
"""
SSH_CONFIG = """
Host *
    IdentityFile /etc/ssh/client_key
    IdentitiesOnly yes
    GlobalKnownHostsFile /etc/ssh/known_hosts
    UserKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    BatchMode yes
"""


@functools.cache
def why_not(*, with_ssh: bool = True) -> str | None:
    """Why hosts cannot be made on this machine; None: they can."""
    if not sys.platform.startswith("linux"):
        return "needs Linux, for its namespaces"
    if os.geteuid() != 0:
        return "needs root, to make namespaces"
    programs = PROGRAMS | (SSH_PROGRAMS if with_ssh else {})
    missing = {program: package for program, package in programs.items() if shutil.which(program, path=_path()) is None}
    if missing:
        return f"needs {', '.join(missing)}: apt-get install {' '.join(sorted(set(missing.values())))}"
    attempt = (
        "mount -t tmpfs none /run && hostname probe && ip link add switch type bridge && "
        "ip link add port type veth peer name eth0"
    )
    command = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c", attempt]
    tried = subprocess.run(command, env=_environment(), capture_output=True, text=True)
    return None if tried.returncode == 0 else f"this machine allows no namespaces: {tried.stderr.strip()}"


class HostError(RuntimeError):
    """A host could not be made, or a command on it failed."""


class Host:
    """One host. Made by Hosts."""

    def __init__(self, name: str, address: str, folder: Path, *, runs_sshd: bool):
        self.name, self.address, self._folder = name, address, folder
        self._log = folder / f"log.{name}"
        script = SET_UP + (SSHD if runs_sshd else NO_SSHD)
        sshd = shutil.which("sshd", path=_path()) or "sshd"  # which it wants to be called by its whole path
        with self._log.open("wb") as log:
            # dies with us, and takes its first process and with that all others along
            self._root = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"),
                    *("sh", "-c", script, "sh", name, str(folder), sshd),
                ],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._root.stdout is not None
        self._is_ready = self._root.stdout.readline() == b"ready\n"

    def check(self) -> None:
        """Raise HostError if it could not be set up."""
        if not self._is_ready or self._root.poll() is not None:
            raise HostError(f"{self.name} could not be set up: {self.log()}")

    def log(self) -> str:
        """What sshd said."""
        return self._log.read_text(errors="replace").strip()

    def start(
        self,
        *command: str | os.PathLike[str],
        folder: str | os.PathLike[str] = "/",
        variables: Mapping[str, str] | None = None,
        **options: object,
    ) -> subprocess.Popen[str]:
        """Start a command on this host. Its HOME is a folder of its own; `options` are those of Popen.

        A signal for it goes through `send_signal` below: the process returned is nsenter's, outside.
        """
        environment = _environment() | {"HOME": str(self._folder / "home")} | dict(variables or {})
        return subprocess.Popen(
            [*self._entered("--mount", "--uts", "--ipc", "--net", pid=True), "env", "-C", os.fspath(folder), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            **options,  # type: ignore[call-overload]
        )

    def run(
        self,
        *command: str | os.PathLike[str],
        folder: str | os.PathLike[str] = "/",
        variables: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end, with its output captured. It is killed after `timeout_s`."""
        process = self.start(
            *command, folder=folder, variables=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            send_signal(process, signal.SIGKILL)
            out, err = process.communicate()
            raise HostError(f"{command} on {self.name} took more than {timeout_s} s; it said:\n{out}\n{err}") from None
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    def own_disk(self, path: Path) -> Path:
        """Give the host a disk of its own at `path`, a folder, with a copy of what is there; returns where it lies.

        Only processes started from now on are sure to see it.
        """
        own = self._folder / f"disk.{self.name}" / str(path.resolve()).strip("/").replace("/", "+")
        shutil.copytree(path, own)
        _call(*self._entered("--mount"), "mount", "--bind", str(own), str(path))
        return own

    def own_file(self, path: Path, text: str) -> None:
        """Give the host another text at `path`, a file. Only processes started from now on are sure to see it."""
        own = self._folder / f"file.{self.name}.{path.name}"
        own.write_text(text)
        _call(*self._entered("--mount"), "mount", "--bind", str(own), str(path))

    def full_disk(self, path: Path) -> None:
        """Give the host a disk at `path`, a folder, that takes a few kB more."""
        _call(*self._entered("--mount"), "mount", "-t", "tmpfs", "-o", "size=64k", "none", str(path))

    def cut_off(self) -> None:
        """Unplug its network cable: what is sent to it or by it is lost, and nobody is told."""
        self._set_port("down")

    def reconnect(self) -> None:
        self._set_port("up")

    def lose_link_to(self, other: Host) -> None:
        """Lose what is sent to one other host, in silence: it goes to a card that nobody has."""
        nobody = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
        _call(*self._entered("--net"), "ip", "neigh", "replace", other.address, *nobody)

    def lose_packets(self, percent: int) -> None:
        """Lose this part of what is sent to it, data and acknowledgements, at random. Needs nft."""
        chain = f"type filter hook ingress device eth0 priority 0; numgen random mod 100 < {percent} drop;"
        _call(*self._entered("--net"), "nft", f"table netdev loss {{ chain arriving {{ {chain} }}; }}")

    def slow_link_to(self, other: Host, bits_a_second: int) -> None:
        """Send to one other host at this rate, to the rest as before. Needs tc, and HTB and u32 in the kernel."""
        rules = [
            "qdisc replace dev eth0 root handle 1: htb default 1",
            "class add dev eth0 parent 1: classid 1:1 htb rate 100gbit",
            f"class add dev eth0 parent 1: classid 1:2 htb rate {bits_a_second}bit",
            f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {other.address}/32 flowid 1:2",
        ]
        for rule in rules:
            _call(*self._entered("--net"), "tc", *rule.split())

    def namespace(self, kind: str) -> str:
        """The file by which a process enters a namespace of it: net, uts."""
        return f"/proc/{self._root.pid}/ns/{kind}"

    def stop(self) -> None:
        """Kill everything on it, and return when all of it is gone."""
        send_signal(self._root, signal.SIGKILL)  # the first process; it is the last to go
        self._root.wait()
        assert self._root.stdout is not None
        self._root.stdout.close()

    def plug_into(self, switch: Host) -> None:
        self._switch = switch
        _call(
            *switch._entered("--net"),
            *("ip", "link", "add", f"port-{self.name}", "type", "veth", "peer", "name", "eth0"),
            *("netns", str(self._root.pid)),
        )
        _call(*switch._entered("--net"), "ip", "link", "set", f"port-{self.name}", "master", "eth0")
        self._take_address()
        self.reconnect()

    def be_switch(self) -> None:
        """The bridge that the others are plugged into, with an address of its own."""
        _call(*self._entered("--net"), "ip", "link", "add", "eth0", "type", "bridge")
        self._take_address()

    def _take_address(self) -> None:
        # without nodad an IPv6 address cannot be used for its first second, in which the kernel looks for another
        size = ["/64", "nodad"] if ":" in self.address else ["/24"]
        place = [f"{self.address}{size[0]}", *size[1:]]
        _call(*self._entered("--net"), "ip", "address", "add", *place, "dev", "eth0")
        _call(*self._entered("--net"), "ip", "link", "set", "eth0", "up")

    def _set_port(self, state: str) -> None:
        _call(*self._switch._entered("--net"), "ip", "link", "set", f"port-{self.name}", state)

    def _entered(self, *namespaces: str, pid: bool = False) -> list[str]:
        """What a command line begins with to run in these namespaces of the host."""
        # unshare itself stays in the old process namespace
        of_processes = [f"--pid=/proc/{self._root.pid}/ns/pid_for_children"] if pid else []
        return ["nsenter", f"--target={self._root.pid}", *namespaces, *of_processes]


class Hosts(Sequence[Host]):
    """`count` hosts and one more, `login`, on one network, until the context is left. Raises HostError."""

    def __init__(self, count: int, folder: Path, network: str = "10.77.0.", *, with_ssh: bool = True):
        """`with_ssh` False: nobody logs in; processes are started by `Host.start`, or enter the namespaces."""
        self._count, self._folder, self._network, self._with_ssh = count, folder, network, with_ssh
        self._hosts: list[Host] = []
        self.login: Host
        """Where runs are started. It has no sshd."""

    def __enter__(self) -> Hosts:
        numbers = [("login", 254), *((f"node{i}", i) for i in range(1, self._count + 1))]
        places = [(name, f"{self._network}{number}") for name, number in numbers]
        try:
            self._write_files(places)
            for name, address in places:
                self._hosts.append(Host(name, address, self._folder, runs_sshd=self._with_ssh and name != "login"))
                self._hosts[-1].check()
            self.login = self._hosts.pop(0)
            self.login.be_switch()
            for host in self._hosts:
                host.plug_into(self.login)
            if self._with_ssh:
                self._wait_for_sshd()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, place: int) -> Host:  # type: ignore[override]
        return self._hosts[place]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def hostsfile(self, slots: int) -> str:
        """A file that lists all hosts by their addresses."""
        path = self._folder / f"hostsfile.{slots}"
        module = "ssh:" if ":" in self._network else ""
        path.write_text("".join(f"{module}{host.address} slots={slots}\n" for host in self))
        return str(path)

    def _stop(self) -> None:
        for host in [*self._hosts, *([self.login] if hasattr(self, "login") else [])]:
            host.stop()

    def _write_files(self, places: Sequence[tuple[str, str]]) -> None:
        ssh = self._folder / "ssh"
        for folder in (ssh, self._folder / "home"):
            folder.mkdir(parents=True)
        if self._with_ssh:
            self._write_keys(ssh, places)
        for own, _ in places:
            # as Debian has it: its own name leads a host to itself, and to nobody whom others could reach
            known = [("localhost", "127.0.0.1"), *((n, "127.0.1.1" if n == own else address) for n, address in places)]
            (self._folder / f"hosts.{own}").write_text("".join(f"{address} {name}\n" for name, address in known))

    def _write_keys(self, ssh: Path, places: Sequence[tuple[str, str]]) -> None:
        for key in ("host_key", "client_key"):
            _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", key, "-f", str(ssh / key))
        addresses = ",".join(address for _, address in places)
        (ssh / "known_hosts").write_text(f"{addresses} {(ssh / 'host_key.pub').read_text()}")
        (ssh / "sshd_config").write_text(SSHD_CONFIG)
        (ssh / "ssh_config").write_text(SSH_CONFIG)

    def _wait_for_sshd(self) -> None:
        deadline_s = time.monotonic() + HANG_S
        for host in self._hosts:
            while (said := self.login.run("ssh", host.address, "true")).returncode:
                host.check()
                if time.monotonic() > deadline_s:
                    raise HostError(f"{host.name} is not reached by ssh: {said.stderr}\n{host.log()}")
                time.sleep(0.1)


def send_signal(process: subprocess.Popen[Any], number: int) -> None:
    """Send a signal to a command that Host.start started; to the process itself where it has no child."""
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]) if children else process.pid, number)
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), SYSTEM_PATH])


def _environment() -> dict[str, str]:
    # the interface of ranks of this process's tests, which other hosts cannot reach
    inherited = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    return inherited | {"PATH": _path()}


def _call(*command: str) -> None:
    done = subprocess.run(command, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise HostError(f"{' '.join(command)} failed: {done.stderr.strip()}")
