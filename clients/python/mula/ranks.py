"""Finds this process's rank and the number of ranks, from torch.distributed or the launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from mula.errors import Error

# Launchers and their environment variables, the innermost first: srun may start one torchrun on
# each node, which starts the ranks. A Slurm batch script has SLURM_PROCID but no
# SLURM_STEP_NUM_TASKS: it is one process, whatever the size of the job.
LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
REMEDY = "pass rank= and world= to mula.Stream"


def number(variable: str, environment: Mapping[str, str]) -> int | None:
    """Returns the number in a variable, or None if the variable is not set."""
    text = environment.get(variable, "")
    if text == "":
        return None
    if not text.isascii() or not text.isdecimal():
        raise Error(f"the variable {variable} is {text!r}, which is not a number; {REMEDY}")
    return int(text)


def launched(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Returns the launcher, rank and world of this process, or None if no launcher started it.

    Inconsistent values raise an Error.
    """
    found: list[tuple[str, int, int]] = []
    for launcher, rank_name, world_name in LAUNCHERS:
        rank, world = number(rank_name, environment), number(world_name, environment)
        if launcher == "Slurm" and world is None:
            continue
        if rank is None and world in (None, 1):
            continue
        if rank is None or world is None:
            there, missing = (rank_name, world_name) if world is None else (world_name, rank_name)
            raise Error(
                f"the variable {there} is {environment[there]}, but {missing} is not set, so the rank of this process "
                f"is unknown; {REMEDY}"
            )
        if not rank < world:
            raise Error(f"{rank_name} is {rank} and {world_name} is {world}, but ranks count from 0; {REMEDY}")
        found.append((launcher, rank, world))
    if not found:
        if environment.get("PALS_RANKID"):
            raise Error(
                f"PALS started this process as rank {environment['PALS_RANKID']}, but no variable has the number of "
                f"processes; {REMEDY}"
            )
        return None
    # An outer launcher may start fewer processes, and each of these starts several. It cannot start
    # more.
    inner = found[0]
    for outer in found[1:]:
        if outer[2] > inner[2] or outer[2] == inner[2] and outer[1] != inner[1]:
            raise Error(
                f"{inner[0]} sets rank {inner[1]} of {inner[2]} and {outer[0]} sets rank {outer[1]} of {outer[2]}; "
                f"unset the wrong variables, or {REMEDY}"
            )
    return inner


def distributed() -> tuple[str, int, int] | None:
    """Returns the rank and world of torch.distributed if this process has initialized it.

    It imports nothing.
    """
    torch = sys.modules.get("torch.distributed")
    if torch is None or not torch.is_available() or not torch.is_initialized():
        return None
    return "torch.distributed", torch.get_rank(), torch.get_world_size()


def choose(rank: int | None, world: int | None, replicate: bool) -> tuple[int, int]:
    """Returns the rank and world of a stream: the arguments, or else this process's own."""
    if (rank is None) != (world is None):
        raise Error(
            "only one of rank and world is set; pass both, or neither to read them from torch.distributed or the "
            "launcher's variables"
        )
    if rank is None or world is None:
        if replicate:
            return 0, 1
        found = distributed() or launched(os.environ)
        return (0, 1) if found is None else found[1:]
    if world == 1 and not replicate:
        try:
            found = distributed() or launched(os.environ)
        except Error:  # the arguments replace inconsistent variables
            found = None
        if found is not None and found[2] > 1:
            raise Error(
                f"with rank {rank} of {world}, each of the {found[2]} processes of {found[0]} reads all samples; "
                "omit rank and world, or pass replicate=True if every process must read all samples"
            )
    return rank, world


def recheck(rank: int, world: int) -> None:
    """Raises an Error if the rank differs from the rank of torch.distributed.

    This happens if the stream was created before torch.distributed was initialized.
    """
    found = distributed()
    if found is not None and found[1:] != (rank, world):
        raise Error(
            f"this stream reads as rank {rank} of {world}, and torch.distributed has rank {found[1]} of {found[2]}; "
            "create the stream after init_process_group (in Lightning: in train_dataloader), or pass rank= and world="
        )
