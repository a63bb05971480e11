"""Train a model: `python -m megatron.train --config tiny_bloom --data-path PREFIX`.

Started once a rank by a launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or alone.
Exit status: megatron/runtime/commands.py.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from megatron.runtime.first_steps import end_process_at_interrupt

    end_process_at_interrupt()

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from megatron.options.config import Config, ConfigError
from megatron.resilience.process import ProcessState, leave, print_error, print_once
from megatron.resilience.shutdown import Signals
from megatron.runtime.commands import DONE, REFUSED
from megatron.runtime.first_steps import defer_backends, importing
from megatron.runtime.network import adopt_mpi_variables
from megatron.runtime.places import Places
from megatron.training.configure import load_settings, prepare_device
from megatron.weights.model_folder import fetch_weights

if TYPE_CHECKING:
    from megatron.parallel.context import ParallelContext
    from megatron.resilience.watchdog import Watchdog


def main(arguments: list[str], signals: Signals) -> None:
    """Train as a command line says. What it raises, `start` turns into a message and a status."""
    places = Places()
    while True:
        # every fault at once, before torch is imported; for each round again, as a new rank reads what files say now
        config = load_settings(arguments)
        # before the ranks join: none waits for a download of another
        fetch_weights(config.checkpoint.load, config.checkpoint.save, config.lora.lora_base)
        with importing():
            config, device = prepare_device(config)  # before anything imports deepspeed
        if not _left_round(config, device, signals, places):
            return
        from megatron.training.deepspeed.releases import free_engines  # late, as all that imports deepspeed

        free_engines()


def _left_round(config: Config, device: str, signals: Signals, places: Places) -> bool:
    """Train with the ranks of this round. Return whether this one has left it for a place in the next one."""
    try:
        with joined_ranks(config, device, places) as (ctx, watchdog):
            with importing():
                from megatron.training.run import run

            run(config, ctx, signals, watchdog)
    except RoundLeft:
        return True
    return False


class RoundLeft(BaseException):
    """This rank has left its round, since another one has ended, and has its place in the next one."""


@contextlib.contextmanager
def joined_ranks(config: Config, device: str, places: Places) -> Iterator[tuple[ParallelContext, Watchdog]]:
    """Yield the layout of all ranks and the watchdog. Collective.

    An error of one rank within ends them all; raises RoundLeft where another rank has ended and this one goes on.
    """
    import torch.distributed as dist

    from megatron.parallel.context import ParallelContext
    from megatron.resilience.errors import has_lost_another, raise_on_all_ranks
    from megatron.resilience.watchdog import Watchdog

    before = None
    with Watchdog(config) as watchdog:
        if places.may_come:
            before = ProcessState.now()
        try:
            watchdog.phase("joining the other ranks")
            ctx = ParallelContext.build(config.parallel, device)
            watchdog.connect(ctx)
            yield ctx, watchdog
            watchdog.phase("end", watchdog.step)
            raise_on_all_ranks(ctx, lambda: None)  # no rank leaves while another still needs it
        except BaseException as error:
            if before is not None and dist.is_initialized() and has_lost_another(error):
                from megatron.training.deepspeed.releases import leave_groups

                if before.restore(leave_groups) and watchdog.await_place(places, error):
                    raise RoundLeft from None
            to_raise = watchdog.fail(error)
            if to_raise is not error:
                raise to_raise from error
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def start(signals: Signals) -> int:
    """Run `main`, print the user's faults as messages without traceback, and return the exit status."""
    try:
        adopt_mpi_variables()
        defer_backends()
        main(sys.argv[1:], signals)
    except ConfigError as error:
        print_once(str(error))
        return REFUSED
    except Exception as error:
        from megatron.resilience.errors import USER_FAULTS, PeerLostError, TrainingAborted, exit_status, message_of

        if isinstance(error, TrainingAborted):
            print_once(f"training aborted: {error}")
        elif isinstance(error, PeerLostError):
            print_error(str(error))
        elif isinstance(error, USER_FAULTS):
            print_error(f"rank {os.environ.get('RANK', '0')}: {message_of(error)}")
        else:
            print_error(traceback.format_exc().rstrip())
        return exit_status(error)
    return DONE


def preload() -> None:
    """Import and build what the ranks of a run on a CPU need, before they are forked."""
    import encodings.idna  # noqa: F401  # as the two below, which Python, numpy and DeepSpeed import late

    import numpy.ma  # noqa: F401

    import megatron.data.tokenizers.build
    import megatron.models.families.bloom
    import megatron.models.families.llama
    import megatron.models.transformer
    import megatron.tasks.pretrain
    import megatron.training.run  # noqa: F401
    from megatron.settings.parser import build_parser
    from megatron.training.deepspeed.releases import import_late_modules

    import_late_modules()
    build_parser()  # it is kept, for the command line that each rank reads


def process() -> NoReturn:
    """Run the process of a rank: the command `megatron-train`."""
    # from the first, since importing torch may take longer than a signal leaves, to the end of the process: a signal
    # that comes when the work is done changes no status
    with Signals() as signals:
        leave(start(signals))


if __name__ == "__main__":
    process()
