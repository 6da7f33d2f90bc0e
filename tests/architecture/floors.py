"""The law of the house: the order of its folders. A file imports from lower floors, and siblings in its folder."""

from typing import Final

Floors = tuple[dict[str, str], ...]
"""Lowest first: the folders and files of each floor, and what each one is, in a few words."""

POPRUN: Final[Floors] = (
    {"errors": "what poprun raises, each with its exit code"},
    {"text": "values as text: numbers, host names, fields of files, poprun's own words"},
    {"process": "processes of this machine: started, found, signalled"},
    {"messages": "what poprun, agents and monitors send each other"},
    {"plan": "from a request and facts to a plan; pure"},
    {"probe": "facts about this machine"},
    {"hosts": "other hosts: routes, and the look at them before a job starts"},
    {
        "launch": "launchers, shim and agent",
        "render": "a plan as table, text, picture",
    },
    {"devices": "who holds which virtual IPUs and cores: pools, leases, the server of a pool"},
    {
        "job": "the supervisor: loop, policy, output, report",
        "monitor": "a live view of running jobs",
        "emit": "a plan as a job of Slurm or Kubernetes",
        "doctor": "what is there and what is missing",
    },
    {
        "cli": "the table of options and its parser",
        "vipu": "the words of the command vipu",
    },
    {"start": "from a plan to a job"},
    {"command": "from a command line to a plan, a print-out or a job"},
    {"__main__": "words in, an exit code out"},
)

POPDIST: Final[Floors] = (
    {
        "errors": "what popdist raises, and checks of arguments",
        "layout": "which replicas each instance owns",
        "tree": "the one order of addition",
        "stack_signal": "stacks on request",
        "startup": "what Python does first under poprun",
    },
    {
        "contract": "every variable between launcher and library",
        "torch_private": "the private names of torch that are used",
        "extension": "what is written in C: found, and as old as its sources",
    },
    {
        "environments": "jobs of other launchers",
        "progress": "how far a program has come, and where its steps end",
    },
    {"host_memory": "memory that the processes of a host share"},
    {"transport": "how the instances of a job reach each other"},
    {"groups": "instances that do the same things in the same order, and their headers"},
    {"process_group": "the backend popdist of torch.distributed"},
    {"context": "the one global: which job this process is in"},
    {
        "collectives": "sums, copies, barriers, values for all",
        "metrics": "means over all instances, exact for any split",
        "weights": "weights made equal, and proved equal",
    },
    {
        "instances": "work for some instances only",
        "gradients": "where gradients lie and how they are added",
    },
    {"data": "datasets dealt to replicas"},
    {
        "training": "the replicated model and its step",
        "packing": "several sequences in one row of the batch",
    },
    {"checks": "checks against misuse, in the steps of models and optimizers"},
    {"optim": "optimizers for large batches and low precision"},
    {"sharded": "the sharded optimizer"},
    {
        "checkpoint": "states on the disk",
        "compat": "PopDist's own names",
        "stubs": "libraries that programs for PopTorch import, where they are not installed",
        "poptorch": "options of a poptorch program that is a job's instance",
        "preemption": "leaving when the machine is wanted back",
        "testing": "small real jobs for tests",
    },
    {"popdist_core": "where PopDist's compiled part has its functions"},
)

POPTORCH: Final[Floors] = (
    {
        "errors": "what poptorch raises",
        "enums": "choices that programs make by name",
        "environment": "the process of a job, and defaults",
        "_impl": "what programs ask of PopTorch's inside",
        "profiling": "names for parts of a program",
    },
    {
        "_logging": "the log, in PopTorch's form",
        "custom_types": "nested values, with types of a program's own",
    },
    {
        "options": "all that a program says of how its model runs",
        "losses": "the loss that a model trains by",
    },
    {
        "blocks": "parts of a model: annotated, dealt to stages, placed, reported",
        "poptorch_core": "the check of options by name and type, errors to test with",
        "optim": "optimizers, and their steps on a device",
        "data": "combined batches of a process's part of the data",
    },
    {
        "executor": "models that run: what a call takes, and what it gives",
        "ops": "the operations that PopTorch adds to torch's",
    },
)

FLOORS: Final = {"popdist": POPDIST, "poprun": POPRUN, "poptorch": POPTORCH}

BRIDGE: Final = frozenset({"popdist.contract", "popdist.layout", "popdist.errors", "popdist.progress"})
"""All that poprun may import of popdist."""


def floor_of(package: str, part: str) -> int | None:
    """On which floor of ``package`` the folder or file ``part`` stands; None if on none."""
    return next((number for number, parts in enumerate(FLOORS[package]) if part in parts), None)
