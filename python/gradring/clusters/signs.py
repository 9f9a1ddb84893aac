"""Signs of several processes, from launchers that give a process too little information.

A process with a sign and no place must not train alone, because all the others would, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradring.config import parse
from gradring.errors import ConfigError

OURS = "GRADRING_RANK, GRADRING_WORLD_SIZE and GRADRING_RENDEZVOUS"

#: Variables with rank 0's address that do not give this process's rank, and the missing variables.
ADDRESSES = {
    parse.RENDEZVOUS: "GRADRING_RANK and GRADRING_WORLD_SIZE",
    "MASTER_ADDR": "RANK and WORLD_SIZE",
    "MASTER_PORT": "RANK and WORLD_SIZE",
    "JAX_COORDINATOR_ADDRESS": "JAX_PROCESS_ID and JAX_NUM_PROCESSES",
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": (
        "KERAS_DISTRIBUTION_PROCESS_ID and KERAS_DISTRIBUTION_NUM_PROCESSES"
    ),
}

#: Variables with a rank or a number of processes, and the least value that proves other processes.
NUMBERS = {
    "LOCAL_WORLD_SIZE": 2,
    "LOCAL_RANK": 1,
    "GROUP_RANK": 1,
    "NODE_RANK": 1,
    "HOROVOD_SIZE": 2,
    "SLURM_PROCID": 1,
    "PMIX_RANK": 1,
    "MPI_LOCALNRANKS": 2,
    "MPI_LOCALRANKID": 1,
    "PALS_RANKID": 1,
    "ALPS_APP_PE": 1,
    "TPU_WORKER_ID": 1,
}


def check(environ: Mapping[str, str]) -> None:
    """Refuses a process that is one of several and cannot know its rank.

    Raises:
        ConfigError: There is a sign; the message says what to set.
    """
    for name, wanted in ADDRESSES.items():
        if parse.value(environ, name) is not None:
            raise ConfigError(
                f"{name} is set but nothing tells this process its rank; set {wanted}, or unset "
                f"{name} to train alone"
            )
    for name, least in NUMBERS.items():
        text = parse.value(environ, name) or ""
        if parse.is_digits(text) and least <= int(text[: parse.MAX_DIGITS]):
            raise ConfigError(
                f"{name}={parse.shown(text)} says that this is one of several processes, but its "
                f"rank and the address of rank 0 are not known; start with gradring run, or set "
                f"{OURS}; GRADRING_RANK=0 and GRADRING_WORLD_SIZE=1 train alone"
            )
