"""A run as it is requested, and as it is launched once every check has passed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from megatron.launch.addresses import address_of, host_fault, host_key, is_example, is_own, is_this_machine
from megatron.launch.options import LaunchOptions, RowOptions
from megatron.options.config import Config
from megatron.options.data import parse_data_path
from megatron.runtime.commands import counted


@dataclass(frozen=True, kw_only=True)
class FineTuning(RowOptions):
    """Data of a fine-tuning run, before any of it has been read."""

    model: str
    """Folder that transformers wrote."""
    data: str | None
    """The files that the task trains on, as `file_words` reads them. None: they are already processed, in `folder`."""
    folder: str | None
    """Folder of the processed data. None: `data` in the results folder."""

    @classmethod
    def of(cls, model: str, files: str | Sequence[str | float], folder: str) -> FineTuning:
        """Return the data of a file, or of a list of files, with or without weights before them."""
        if isinstance(files, str):
            files = [files]
        words = map(str, files)
        return cls(model=model, data=shlex.join(words), folder=folder)

    @property
    def files(self) -> list[str]:
        """Files to process. Raises ValueError that states the rule for `data`."""
        return self._parsed()[0]

    def data_path(self, folder: Path) -> list[str]:
        """Return the data path of the datasets that are made of the files in a folder.

        One file becomes FOLDER/data, each of several NAME/data in it. Raises ValueError as `files`.
        """
        files, weights = self._parsed()
        # chats.jsonl.gz has several endings
        names = [Path(file).name.split(".")[0] for file in files]
        for number, name in enumerate(names):
            # files of one name from several folders
            if name in names[:number]:
                names[number] = f"{name}_{number + 1}"
        if len(names) < 2:
            names = [""]
        prefixes = [str(folder / name / "data") for name in names]
        if weights is None:
            return prefixes
        pairs = zip((f"{weight:.15g}" for weight in weights), prefixes, strict=True)
        return list(chain.from_iterable(pairs))

    def _parsed(self) -> tuple[list[str], list[float] | None]:
        if self.data is None:
            return [], None
        try:
            return parse_data_path(file_words(self.data))
        except ValueError as why:
            # the rule is that of --data-path, whose datasets have prefixes
            rule = str(why).replace("prefixes", "files").replace("prefix", "file").replace("PREFIX", "FILE")
            raise ValueError(rule) from None


def file_words(text: str) -> list[str]:
    """Return the words of HL_DATA: a file, or files with or without weights, in quotes where they hold spaces.

    Raises ValueError.
    """
    if Path(text).exists():  # a file whose name has blanks needs no quotes
        return [text]
    return shlex.split(text)


@dataclass
class LaunchRequest(LaunchOptions):
    """Launch options of a user, and the flags of megatron.train."""

    results_parent: str | None = None
    """Folder for a results folder named after the run, where --results-dir is not given."""
    checkpoints_dir: str | None = None
    save: bool = False
    resume: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for the ranks."""
    train_flags: list[str] = field(default_factory=list)
    fine_tuning: FineTuning | None = None
    samples_per_rank: int | None = None
    """Samples in one optimizer step of each data-parallel rank. None: global_batch_size is given or preset."""
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    """Options, and fields of this request, whose values are among the faults; `config` is all options."""
    lazy: bool | None = None
    """HPU: lazy mode. None: as PT_HPU_LAZY_MODE says, else `prefers_lazy`."""
    prefers_lazy: bool = False
    """HPU: lazy mode, unless layers are compiled."""


@dataclass(frozen=True)
class Host:
    """A line of the hostsfile."""

    name: str
    """[ssh:][USER@]HOST, as pdsh takes it."""
    slots: int
    line: int

    @property
    def address(self) -> str:
        """Name or address alone, without the user that ssh logs in as."""
        return address_of(self.name)


@dataclass(kw_only=True)
class LaunchPlan(LaunchOptions):
    """A run that may start. Its options are those of the request, with every default resolved."""

    config: Config
    train_flags: tuple[str, ...]
    """They say the device and the layout too."""
    devices_per_node: int
    min_nodes: int
    hosts: tuple[Host, ...]
    """Those of the run, then the spare ones. Empty: this machine."""
    environment: Mapping[str, str]
    """Variables for the ranks, on whatever machine."""
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    """Settings that were derived from others, a line each."""
    run_id: str
    """Equal on all nodes; agents on other machines are found by it in their command lines."""
    fine_tuning: FineTuning | None = None
    """Data to process before the ranks start, and the folder for it."""
    models: tuple[str, ...] = ()
    """Names on the hub, with their commits, of the models that each host has to have before its ranks start."""
    main: str = "megatron.train"
    """Module that each rank runs; the flags are its own."""
    is_chat: bool = False


class RefusedError(ValueError):
    """The run may not start. Carries every fault, each once."""

    def __init__(self, faults: Sequence[str], warnings: Sequence[str] = ()):
        self.faults, self.warnings = list(dict.fromkeys(faults)), list(warnings)
        super().__init__("\n".join(self.faults))

    def text(self, names: str = "") -> str:
        """Return the message for the user. `names`: which of their own names set the options that faults name."""
        lines = [f"refused, {counted(len(self.faults), 'fault')}; nothing was started or written:"]
        lines += [f"  - {fault}" for fault in self.faults]
        lines += [f"  - warning: {warning}" for warning in self.warnings]
        if names:
            lines.append(f"  ({names})")
        return "\n".join(lines)


DEVICES_PER_NODE = 8  # of a Gaudi or DGX server, and Habana's default


def read_hostsfile(path: str) -> tuple[list[Host], list[str]]:
    """Return the hosts of a file in order, and every fault; no hosts where it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], [f"hostsfile {path} does not exist; write one line `<host> slots=<n>` for each node"]
    except (OSError, UnicodeDecodeError) as error:
        return [], [f"hostsfile {path} cannot be read ({error}); make it a readable text file"]
    return parse_hostsfile(text, path)


def parse_hostsfile(text: str, source: str) -> tuple[list[Host], list[str]]:
    """Return the hosts in order, and every fault with its line number.

    A line is `<host> slots=<n>`; `#` starts a comment, blank lines are skipped.
    """
    hosts: list[Host] = []
    faults = []
    if text.startswith("\ufeff"):  # DeepSpeed's launcher reads the file too, and would take it for a part of the name
        faults.append(f"{source} begins with a byte order mark; save it as UTF-8 without one")
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if content:
            host = _parse_line(content, number, hosts)
            if isinstance(host, Host):
                hosts.append(host)
            else:
                faults.append(f"{source}, line {number}: {content!r}{host}")
    return hosts, faults


def _parse_line(content: str, number: int, earlier: Sequence[Host]) -> Host | str:
    """Return the host of a line, or the end of the message that says which rule the line breaks."""
    # what follows is matched too, so that a second word is named instead of passed over
    match = re.fullmatch(r"([\w.:@%\[\]-]+)(?:\s+slots=(\S*))?(\s.*)?", content)
    if match is None or content.startswith("-"):
        return " does not start with a host name; write `<host> slots=<n>`"
    name, slots, rest = match.groups()
    if slots is None or rest:
        return f" is not `<host> slots=<n>`; write for example `{name} slots={DEVICES_PER_NODE}`"
    if not slots.isdecimal() or int(slots) == 0:
        return ": slots must be a whole number above 0, the number of devices of the host"
    fault = host_fault(name)
    if fault:
        return f": {fault}"
    for first in earlier:
        if host_key(first.name) == host_key(name):
            also = ""
            if name != first.name:
                also = f", {first.name}: users and case make no other host"
            return f" repeats the host of line {first.line}{also}; give each host one line"
    return Host(name, int(slots), number)


def find_hosts(request: LaunchRequest, devices_per_node: int) -> tuple[list[Host], list[str]]:
    """Return the hosts of a run, then the spare ones, and their faults; no hosts if it uses this machine alone."""
    path = request.hostsfile
    if path is None:
        if request.nodes == 1 or request.rendezvous is not None:
            return [], []
        return [], [
            f"{request.nodes} nodes need a hostsfile (HL_HOSTSFILE, --hostsfile) that lists them; give one, or start "
            "this on each node with HL_RENDEZVOUS (--rendezvous), as scripts/slurm.sbatch does"
        ]
    listed, faults = read_hostsfile(path)
    if not faults:  # lines that cannot be read may be the hosts that lack
        faults += _check_number(request, path, len(listed))
    if request.rendezvous is not None:
        faults.append(
            f"hostsfile {path} and rendezvous {request.rendezvous} exclude each other: this launcher starts all hosts, "
            "or it is started on each of them; give one"
        )
    # a file may list more hosts than the run uses; the slots of those are not checked
    hosts = listed[: request.nodes + request.spare_hosts]
    faults += _check_hosts(hosts, path, request.nodes, devices_per_node)
    # the agent then runs here, without ssh
    if len(hosts) == 1 and is_this_machine(hosts[0].name):
        return [], faults
    return hosts, faults


def _check_number(request: LaunchRequest, path: str, listed: int) -> Iterator[str]:
    needed, lower = f"{request.nodes} nodes", "HL_NUM_NODES (--nodes)"
    if request.spare_hosts:
        needed, lower = f"{needed} and {request.spare_hosts} spare", "HL_SPARE_HOSTS (--spare-hosts)"
    if listed < request.nodes + request.spare_hosts:
        yield f"{path} lists {listed} hosts for {needed}; add hosts, or set {lower} lower"


def _check_hosts(hosts: Sequence[Host], path: str, nodes: int, devices_per_node: int) -> Iterator[str]:
    for host in hosts:
        where = f"{path}, line {host.line}: {host.name}"
        if host.slots < devices_per_node:
            yield (
                f"{where} has slots={host.slots}, fewer than the {devices_per_node} devices of each node; correct it, "
                "use another host, or set HL_NGPU_PER_NODE (--devices-per-node) lower"
            )
        if nodes > 1 and is_own(host.name):
            yield f"{where} means another machine on every node; give the address that all nodes know"


def check_addresses(hosts: Sequence[Host], hostsfile: str | None) -> Iterator[str]:
    """Yield a fault if the hosts are those of an example."""
    # of documentation, copied as it is
    examples = [host for host in hosts if is_example(host.name)]
    if examples:
        some = ", ".join(host.name for host in examples[:2])
        more = " ..." if len(examples) > 2 else ""
        yield f"{hostsfile}, line {examples[0].line}: {some}{more} are example addresses; replace them by your own"
