"""The environment variables of programs: variables that poprun adds, and the user's variables for other hosts.

Pure: the user's variables are an argument. The names of the contract are in `popdist.ground.contract`.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

from popdist.ground import contract
from popdist.ground.contract import JOB_ID, NUM_REPLICAS
from poprun.errors import PlanError
from poprun.makers import maker as makers
from poprun.plan.frameworks import ACCELERATE_ON_CPU, framework_variables
from poprun.plan.plan import LaunchPlan, StartFacts
from poprun.plan.request import TRACED_STEPS

UNBUFFERED = "PYTHONUNBUFFERED"
PYTHON_PATH = "PYTHONPATH"
PROFILER_LOG = "KINETO_LOG_LEVEL"
HASH_SEED = "PYTHONHASHSEED"

RECORDER_LENGTHS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
RECORDED_CALLS = 256  # calls that torch's recorder keeps; reading all takes 3 ms, every few seconds

STARTUP_FOLDER: Final = os.path.join(os.path.dirname(os.path.dirname(contract.__file__)), "startup")
"""The folder with the code that Python runs first in each program: see `popdist.startup.sitecustomize`."""

PASSED_NAMES: Final = ("PATH", "LD_LIBRARY_PATH", "LANG", "LANGUAGE", "TERM", "TZ", "NO_COLOR", "VIRTUAL_ENV")
PASSED_PREFIXES: Final = (
    *("LC_", "PYTHON", "POPDIST_", "POPTORCH_", "TORCH", "PYTORCH_"),
    *makers.PASSED_PREFIXES,
    *("GLOO_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "OMPI_MCA_", "MPIR_CVAR_", "UCX_", "FI_"),
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_", "ACCELERATE_", "LT_", "XLA_", "JAX_", "TF_", "KERAS_", "ORT_"),
)
"""Beginnings of the names of variables that poprun passes to other hosts, in addition to ``PASSED_NAMES``."""

HYDRA_SSH_OPTIONS: Final = "HYDRA_LAUNCHER_EXTRA_ARGS"  # options for Hydra's ssh; poprun replaces the user's value
_LAUNCHER_NAMES: Final = ("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "SSH_AUTH_SOCK", "KRB5CCNAME")
_LAUNCHER_PREFIXES: Final = ("HYDRA_", "MPIEXEC_", "OMPI_", "OPAL_", "PRTE_", "PMIX_", "SLURM")
_SECRET: Final = ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "API_KEY", "ACCESS_KEY")
_INTERFACE_NAMES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

CACHES: Final = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "PYTORCH_KERNEL_CACHE_PATH": "kernels",
    **makers.CACHES,
    "POPTORCH_CACHE_DIR": "",
}
"""Environment variables for the folders of compiled programs, each with its folder below poprun's cache folder."""


def check_folder_name(option: str, job_id: str) -> None:
    """Raise PlanError if the job id ``job_id`` cannot be the name of a folder."""
    if job_id in {".", ".."} or "/" in job_id:
        raise PlanError(f"{option}: a job called {job_id!r} can have no folder: set another POPDIST_JOB_ID")


def wished_job_id(user: Mapping[str, str]) -> str:
    """Return the job id that the user set in POPDIST_JOB_ID; "" if it is not set, or if an outer job set it."""
    # a program of a job that starts another job passes its own id on without intention
    return "" if NUM_REPLICAS in user else user.get(JOB_ID, "")


def passed_environment(user: Mapping[str, str], named: Collection[str] = ()) -> dict[str, str]:
    """Return which of the user's variables other hosts get: well-known ones, and ``named`` (``A*``: a prefix)."""
    # variables of a machine or a login stay here, and so do secrets, because the connection is not encrypted
    beginnings = tuple(name.removesuffix("*") for name in named if name.endswith("*"))
    return {
        name: value
        for name, value in user.items()
        if name in named
        or (beginnings and name.startswith(beginnings))
        or (
            (name in PASSED_NAMES or name.startswith(PASSED_PREFIXES)) and not any(map(name.__contains__, _SECRET))
        )
    }


def launcher_environment(user: Mapping[str, str]) -> dict[str, str]:
    """Return which of the user's variables a launcher of several hosts gets: those that it reads or passes on."""
    # Hydra sends all its variables to every host unencrypted, so it gets only harmless and necessary variables
    launcher_variables = {
        name: value
        for name, value in user.items()
        if (name in _LAUNCHER_NAMES or name.startswith(_LAUNCHER_PREFIXES)) and name != HYDRA_SSH_OPTIONS
    }
    return {**passed_environment(user), **launcher_variables}


def interface_environment(user: Mapping[str, str], interface: str) -> dict[str, str]:
    """Return variables with which torch and NCCL use the network ``interface``, except what the user has set."""
    return {name: interface for name in _INTERFACE_NAMES if name not in user}


def hash_seed(user: Mapping[str, str]) -> dict[str, str]:
    """Return PYTHONHASHSEED, so that sets of strings have one order on all instances; {} if the user set it."""
    return {} if HASH_SEED in user else {HASH_SEED: "0"}


def program_environment(
    plan: LaunchPlan, index: int, user: Mapping[str, str], start: StartFacts | None = None
) -> dict[str, str]:
    """Return the variables that poprun adds to the user's environment ``user`` for instance ``index``.

    The result contains the variables that the user gave with poprun's options.
    """
    if start is not None and start.devices:
        plan = replace(plan, devices=start.devices)
    asked = plan.variables_of(index)
    user = {**user, **asked}
    env = {**asked, **plan.contract(index, start).to_env()}
    env |= _masks(plan, index, user)
    if not plan.devices and ACCELERATE_ON_CPU not in user:  # without it, accelerate lets instances train alone
        env[ACCELERATE_ON_CPU] = "true"
    name, value = makers.DETERMINISM
    if plan.is_deterministic and name not in user:
        env[name] = value
    if plan.cache_directory is not None:
        env |= {
            name: os.path.join(plan.cache_directory, folder).rstrip("/")
            for name, folder in CACHES.items()
            if name not in user
        }
    if plan.is_watched:
        env[PYTHON_PATH] = os.pathsep.join(filter(None, (STARTUP_FOLDER, user.get(PYTHON_PATH))))
    has_recorder = plan.is_watched and plan.num_instances > 1 and plan.trace.folder is None  # a trace has calls
    if has_recorder and not user.keys() & set(RECORDER_LENGTHS):
        env[RECORDER_LENGTHS[0]] = str(RECORDED_CALLS)
    if UNBUFFERED not in user:
        env[UNBUFFERED] = "1"
    env |= framework_variables(plan, index, user, start or StartFacts())
    return env | hash_seed(user) | _trace_environment(plan, index, user, start)


def _masks(plan: LaunchPlan, index: int, user: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that select the GPUs that a program sees, and the order of these GPUs."""
    if not plan.devices:
        return dict(maker.hiding for maker in makers.MAKERS.values()) if plan.vipu.is_offline else {}
    maker = makers.MAKERS[plan.maker]
    # without a mask of the user, poprun has numbered devices as the tool does, so the runtime must do the same
    order = [maker.order] if maker.order is not None and user.keys().isdisjoint(maker.masks) else []
    return {maker.mask: ",".join(plan.instance(index).visible), **dict(order)}


def _trace_environment(
    plan: LaunchPlan, index: int, user: Mapping[str, str], start: StartFacts | None
) -> dict[str, str]:
    """Return the variables that say which steps a program records for a trace; {} if the job has no trace."""
    trace = plan.trace
    if trace.folder is None or start is None:
        return {}
    import json

    steps = trace.steps or (None if trace.seconds else TRACED_STEPS)
    file = os.path.join(plan.trace_parts(start.job_id, start.restart_count), f"instance-{index}")
    settings = {"file": file, "steps": steps and [steps.start, steps.stop], "seconds": trace.seconds}
    # torch's profiler writes a line to standard error when it starts or stops
    quiet = {} if PROFILER_LOG in user else {PROFILER_LOG: "99"}
    return {contract.TRACE: json.dumps(settings), **quiet}
