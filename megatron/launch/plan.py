"""A run as it is requested, and as it is launched once every check has passed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.launch.addresses import address_of, host_fault, host_key, is_example, is_own, is_this_machine
from megatron.options.config import Config
from megatron.options.data import parse_data_path

if TYPE_CHECKING:
    from megatron.data.chat.encoder import TooLong, TrainOn

LAUNCHERS = ("pdsh", "mpirun")
"""Programs that start an agent on each host."""
TRAIN_ON: tuple[TrainOn, ...] = ("assistant", "all_but_system", "all")
"""Tokens of chats that can be trained."""
TOO_LONG: tuple[TooLong, ...] = ("drop", "truncate", "split")
"""Treatments of chats that are longer than a sample."""


@dataclass(frozen=True)
class FineTuning:
    """Data of a fine-tuning run, before any of it has been read."""

    model: str
    """Folder that transformers wrote."""
    data: str | None
    """The files that the task trains on, as `file_words` reads them. None: they are already processed, in `folder`."""
    chat_template: str | None
    folder: str | None
    """Folder of the processed data. None: `data` in the results folder."""
    train_on: TrainOn = "assistant"
    """Tokens of the chats to train."""
    too_long: TooLong = "drop"
    """Treatment of chats of more than seq_length tokens."""
    ignore_columns: tuple[str, ...] = ()
    """Columns of the rows that are left out, though they look like a part of the prompt."""

    @classmethod
    def of(cls, model: str, files: str | Sequence[str | float], folder: str) -> FineTuning:
        """Return the data of a file, or of a list of files, with or without weights before them."""
        words = [files] if isinstance(files, str) else map(str, files)
        return cls(model, shlex.join(words), None, folder)

    @property
    def files(self) -> list[str]:
        """Files to process. Raises ValueError that states the rule for `data`."""
        return self._parsed()[0]

    def data_path(self, folder: Path) -> list[str]:
        """Return the data path of the datasets that are made of the files in a folder.

        One file becomes FOLDER/data, each of several NAME/data in it. Raises ValueError as `files`.
        """
        files, weights = self._parsed()
        names = [Path(file).name.split(".")[0] for file in files]
        for number, name in enumerate(names):
            if name in names[:number]:
                names[number] = f"{name}_{number + 1}"
        prefixes = [str(folder / name / "data") for name in names] if len(files) > 1 else [str(folder / "data")]
        if weights is None:
            return prefixes
        return [word for weight, prefix in zip(weights, prefixes, strict=True) for word in (f"{weight:.15g}", prefix)]

    def _parsed(self) -> tuple[list[str], list[float] | None]:
        if self.data is None:
            return [], None
        try:
            return parse_data_path(file_words(self.data))
        except ValueError as why:
            rule = str(why).replace("prefixes", "files").replace("prefix", "file").replace("PREFIX", "FILE")
            raise ValueError(rule) from None


def file_words(text: str) -> list[str]:
    """Return the words of HL_DATA: a file, or files with or without weights, in quotes where they hold spaces.

    Raises ValueError.
    """
    return [text] if Path(text).exists() else shlex.split(text)


@dataclass
class LaunchRequest:
    """Launch options of a user, and the flags of megatron.train."""

    nodes: int = 1
    devices_per_node: int | None = None
    """None: 8, or on the CPU of this machine as many as the layout needs."""
    data_parallel_size: int | None = None
    """None: what the layout leaves of the devices."""
    hostsfile: str | None = None
    device: str = "auto"
    """hpu, cuda, cpu, auto, or no-hpu: the first of cuda and cpu that is there."""
    master_port: int | None = None
    launcher: str = "pdsh"
    """One of LAUNCHERS: pdsh, through DeepSpeed's launcher, or mpirun, which is used on this machine alone too."""
    cores_per_rank: int = 0
    """Cores that each rank is bound to. 0: ranks are not bound."""
    ranks_per_socket: int = 0
    """Bound ranks on each socket. 0: as many on each."""
    max_restarts: int = 0
    min_nodes: int | None = None
    """None: all of them."""
    spare_hosts: int = 0
    """Lines of the hostsfile after those of the run."""
    rendezvous: str | None = None
    dry_run: bool = False
    activate_dir: str | None = None
    """Folder whose `activate` every node sources first."""
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


@dataclass(frozen=True)
class LaunchPlan:
    """A run that may start."""

    config: Config
    train_flags: tuple[str, ...]
    nodes: int
    devices_per_node: int
    hosts: tuple[Host, ...]
    """Those of the run, then the spare ones. Empty: this machine."""
    hostsfile: str | None
    master_port: int | None
    activate_dir: str | None
    environment: Mapping[str, str]
    """Variables for the ranks, on whatever machine."""
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    """Settings that were derived from others, a line each."""
    run_id: str
    """Equal on all nodes; agents on other machines are found by it in their command lines."""
    launcher: str = "pdsh"
    cores_per_rank: int = 0
    ranks_per_socket: int = 0
    max_restarts: int = 0
    min_nodes: int = 1
    """Number of nodes that suffices to continue."""
    spare_hosts: int = 0
    rendezvous: str | None = None
    """HOST:PORT of the first node, where each node runs this launcher itself."""
    fine_tuning: FineTuning | None = None
    """Data to process before the ranks start, and the folder for it."""
    main: str = "megatron.train"
    """Module that each rank runs; the flags are its own."""
    is_chat: bool = False


class RefusedError(ValueError):
    """The run may not start. Carries every fault."""

    def __init__(self, faults: Sequence[str], warnings: Sequence[str] = ()):
        self.faults, self.warnings = list(faults), list(warnings)
        super().__init__("\n".join(self.faults))


# ---------------------------------------------------------------------------------------------------------------------
# The hostsfile: parsing, and the hosts of a run.

DEVICES_PER_NODE = 8  # of a Gaudi or DGX server, and Habana's default


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
        if not content:
            continue
        where = f"{source}, line {number}: {content!r}"
        match = re.fullmatch(r"([\w.:@%\[\]-]+)(?:\s+slots=(\S*))?(\s.*)?", content)
        name, slots, rest = match.groups() if match else (content, None, None)
        if not match or name.startswith("-"):
            faults.append(f"{where} does not start with a host name; write `<host> slots=<n>`")
        elif slots is None or rest:
            faults.append(f"{where} is not `<host> slots=<n>`; write for example `{name} slots={DEVICES_PER_NODE}`")
        elif not slots.isdecimal() or int(slots) == 0:
            faults.append(f"{where}: slots must be a whole number above 0, the number of devices of the host")
        elif fault := host_fault(name):
            faults.append(f"{where}: {fault}")
        elif (first := next((host for host in hosts if host_key(host.name) == host_key(name)), None)) is not None:
            also = "" if name == first.name else f", {first.name}: users and case make no other host"
            faults.append(f"{where} repeats the host of line {first.line}{also}; give each host one line")
        else:
            hosts.append(Host(name, int(slots), number))
    return hosts, faults


def find_hosts(request: LaunchRequest, devices_per_node: int) -> tuple[list[Host], list[str]]:
    """Return the hosts of a run, then the spare ones, and their faults; no hosts if it uses this machine alone."""
    path, nodes = request.hostsfile, request.nodes
    if path is None:
        if nodes == 1 or request.rendezvous is not None:
            return [], []
        return [], [
            f"{nodes} nodes need a hostsfile (HL_HOSTSFILE, --hostsfile) that lists them; give one, or start this on "
            "each node with HL_RENDEZVOUS (--rendezvous), as scripts/slurm.sbatch does"
        ]
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], [f"hostsfile {path} does not exist; write one line `<host> slots=<n>` for each node"]
    except (OSError, UnicodeDecodeError) as error:
        return [], [f"hostsfile {path} cannot be read ({error}); make it a readable text file"]
    hosts, faults = parse_hostsfile(text, path)
    spare = request.spare_hosts
    if len(hosts) < nodes + spare and not faults:
        needed, lower = f"{nodes} nodes", "HL_NUM_NODES (--nodes)"
        if spare:
            needed, lower = f"{needed} and {spare} spare", "HL_SPARE_HOSTS (--spare-hosts)"
        faults.append(f"{path} lists {len(hosts)} hosts for {needed}; add hosts, or set {lower} lower")
    if request.rendezvous is not None:
        faults.append(
            f"hostsfile {path} and rendezvous {request.rendezvous} exclude each other: this launcher starts all hosts, "
            "or it is started on each of them; give one"
        )
    hosts = hosts[: nodes + spare]
    for host in hosts:
        where = f"{path}, line {host.line}: {host.name}"
        if host.slots < devices_per_node:
            faults.append(
                f"{where} has slots={host.slots}, fewer than the {devices_per_node} devices of each node; correct it, "
                "use another host, or set HL_NGPU_PER_NODE (--devices-per-node) lower"
            )
        if nodes > 1 and is_own(host.name):
            faults.append(f"{where} means another machine on every node; give the address that all nodes know")
    if len(hosts) == 1 and is_this_machine(hosts[0].name):
        return [], faults
    return hosts, faults


def check_addresses(hosts: Sequence[Host], hostsfile: str | None) -> Iterator[str]:
    """Yield a fault if the hosts are those of an example."""
    examples = [host for host in hosts if is_example(host.name)]
    if examples:
        some = ", ".join(host.name for host in examples[:2]) + (" ..." if len(examples) > 2 else "")
        yield f"{hostsfile}, line {examples[0].line}: {some} are example addresses; replace them by your own"
