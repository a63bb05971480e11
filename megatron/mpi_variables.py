"""A rank that mpirun has started: its place, from the variables of Open MPI and of MPICH's and Intel MPI's Hydra, and
whether its output is seen.
"""

from __future__ import annotations

import os
import sys

from megatron.config.options import ConfigError

OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

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
        os.environ.setdefault(STDOUT, "file")
    if "RANK" in os.environ:
        return
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
