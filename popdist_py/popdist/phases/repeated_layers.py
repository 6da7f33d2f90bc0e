"""Find the layers of a model: the modules that the model repeats in lists."""

from itertools import groupby

from torch import nn


def repeated_layers(module: nn.Module) -> set[nn.Module]:
    """Return the modules of one type that lists of ``module`` repeat: the type that occurs most often in a row."""
    runs = runs_of_layers(module)
    kind = type(max(runs, key=len)[0]) if runs else None
    return {member for run in runs for member in run if type(member) is kind}


def runs_of_layers(module: nn.Module) -> list[list[nn.Module]]:
    """Return the runs of at least two modules of one type in each ModuleList and Sequential of ``module``;
    leave out runs inside of another run's modules.
    """
    runs: list[list[nn.Module]] = []

    def search(parent: nn.Module) -> None:
        inside: set[nn.Module] = set()
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            for kind, run in groupby(parent, type):
                members = list(run)
                if len(members) > 1 and not issubclass(kind, nn.ModuleList | nn.Sequential):
                    runs.append(members)
                    inside.update(members)
        for child in parent.children():
            if child not in inside:
                search(child)

    search(module)
    return runs
