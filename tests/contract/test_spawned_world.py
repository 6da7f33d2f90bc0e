"""The laws of a job hold, too, where each instance is a process with an import of torch and hashes of its own.

The files of each subject run them in forked worlds, of all sizes; here they run in a job of `popdist.launch`,
which watches over its instances, and waits for the one that has the cause of an error to report first. The laws of
training are left to the forked worlds.
"""

from functools import partial
from pathlib import Path

import popdist
from popdist.exchange import groups
from tests.contract import (
    checkpoint_laws,
    collective_laws,
    data_laws,
    preemption_laws,
    process_group_laws,
    sharding_laws,
)
from tests.contract.laws import laws_of, run_laws
from tests.running import DEADLINE_SECONDS


def run_all(folder: Path) -> list[int]:
    """How many laws of each file hold on this instance; each file has a job of its own."""
    groups.FIRST_ERROR_SECONDS = 0.1  # type: ignore[misc] # many laws wait so long, and none is about how long
    counts = []
    for run in (
        partial(run_laws, collective_laws.__name__),
        partial(run_laws, data_laws.__name__, folder / "data"),
        partial(run_laws, checkpoint_laws.__name__, folder / "checkpoint"),
        partial(sharding_laws.run_all, folder / "sharding", apart=False),
        partial(preemption_laws.run_all, folder / "preemption"),
        process_group_laws.run_all,
    ):
        counts.append(run())
        popdist.finalize()
    return counts


def test_laws(tmp_path: Path) -> None:
    """Every law, on every instance."""
    for name in ("data", "checkpoint", "sharding", "preemption"):
        (tmp_path / name).mkdir()
    told = popdist.launch(run_all, (tmp_path,), num_instances=2, num_replicas=4, timeout=DEADLINE_SECONDS)
    files = (collective_laws, data_laws, checkpoint_laws, sharding_laws, preemption_laws)
    lists = (*map(laws_of, files), process_group_laws.all_laws())
    expected = [len(laws) for laws in lists]

    assert told == [expected] * 2
