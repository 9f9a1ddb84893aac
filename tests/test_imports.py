"""Imports of programs: the public paths, and what comes with them."""

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import gradring
from gradring.machine import packages
from support.documents import ROOT

#: What programs may import, and what they may import from there. It may grow. ``gradring.ray``
#: needs Ray: see tests/engines.
PUBLIC = {
    "gradring": """
        Communicator GradringError Monitor ReduceOp TlsFiles Work __version__ build_info elastic
        errors init notebook stats tensorflow testing updates""",
    "gradring.elastic": "State run",
    "gradring.errors": """
        AbortedError AuthenticationError CollectiveTimeoutError ConfigError GradringError
        MismatchError PeerLostError ProtocolError RendezvousError RestoreError SaveError""",
    "gradring.horovod.tensorflow": """
        DistributedGradientTape DistributedOptimizer allreduce broadcast_variables elastic init
        local_rank rank size""",
    "gradring.horovod.tensorflow.data.compute_service": """
        TfDataServiceConfig compute_worker_fn send_to_data_service tf_data_service""",
    "gradring.horovod.tensorflow.keras": "DistributedOptimizer callbacks elastic init rank size",
    "gradring.notebook": "run",
    "gradring.stats": "Stats",
    "gradring.tensorflow": """
        CustomCollectiveStrategy GradientReducer MPIClusterResolver Overlap ScalarWriter all_gather
        all_reduce all_to_all broadcast broadcast_variables check_replicas distribute_input
        failure_of input_service join measure_overlap reduce_scatter restore save
        sync_replicas""",
    "gradring.tensorflow.callbacks": "CheckReplicas LiveLine PreemptionCheckpoint",
    "gradring.tensorflow.elastic": "CommitState State",
    "gradring.testing": """
        Host Outcome RankFailure RankTimeout RemoteError run_ranks simulated_hosts""",
    "gradring.updates": """
        AllReduce Bits16 Int8 LocalSGD Nesterov ParameterServer PowerSGD Primary TopK""",
}
#: The names at the top of the package.
NAMES_MAX = 19

PROGRAM = """
import json, sys
import numpy
before = set(sys.modules)
import gradring
gradring.init(rank=0, world_size=1).close()
print(json.dumps(sorted(set(sys.modules) - before)))
"""
#: Each takes milliseconds, in each rank, and most programs do without.
UNNEEDED = {
    "asyncio",
    "concurrent.futures",
    "ctypes",
    "decimal",
    "gradring.elastic",
    "gradring.observe.metrics",
    "gradring.observe.monitor",
    "gradring.records.records",
    "gradring.testing",
    "gradring.records.timeline",
    "gradring.updates",
    "hashlib",
    "http",
    "multiprocessing",
    "random",
    "statistics",
    "subprocess",
    "tensorflow",
}


def test_who_joins_a_group_imports_nothing_that_only_others_need() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=300
    )
    imported = set(json.loads(done.stdout))
    assert "gradring.group.communicator" in imported
    assert not imported & UNNEEDED


@pytest.mark.parametrize("module", PUBLIC)
def test_public_paths_stay(module: str) -> None:
    found = import_module(module)
    assert not [name for name in PUBLIC[module].split() if not hasattr(found, name)]


@pytest.mark.parametrize(
    "module",
    [
        *PUBLIC,
        "gradring.horovod",
        "gradring.horovod.tensorflow.elastic",
        "gradring.horovod.tensorflow.keras.callbacks",
        "gradring.horovod.tensorflow.keras.elastic",
    ],
)
def test_only_public_names_are_shown(module: str) -> None:
    found = import_module(module)
    later = gradring._LAZY_MODULES if found is gradring else ()
    assert dir(found) == sorted({*found.__all__, *later})
    assert all(hasattr(found, name) for name in dir(found))


@pytest.mark.parametrize(
    ("part", "missing"),
    [
        ("tensorflow.callbacks", "tensorflow"),
        ("horovod.tensorflow.keras", "tensorflow"),
        ("ray", "ray"),
    ],
)
def test_a_part_whose_package_is_missing_says_what_to_install(part: str, missing: str) -> None:
    program = f"import sys; sys.modules['{missing}'] = None; import gradring.{part}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    *_, last = done.stderr.splitlines()
    assert last.startswith("ModuleNotFoundError: ")
    assert f'needs it; type: pip install "{missing}' in last


def test_what_is_to_be_installed_is_what_the_extras_ask_for() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for requirement in packages.REQUIREMENTS.values():
        assert re.search(rf'"{re.escape(requirement)}[" ]', project), requirement
    # pip would unpack one TensorFlow over the files of the other.
    assert "tensorflow" not in packages.advice(["sklearn", "matplotlib"])
    assert packages.missing(["sklearn", "not_there"]) == ["not_there"]


def test_the_package_has_few_names_at_its_top() -> None:
    parts = {path.name for path in Path(gradring.__file__).parent.iterdir()}
    modules = {name.removesuffix(".py") for name in parts if not name.startswith(("_", "py."))}
    assert len(modules) <= NAMES_MAX, sorted(modules)
