"""The table of options: every option of PopRun's is there, and every row of it fits the values it sets."""

from dataclasses import fields
from typing import Final

import pytest

from poprun.cli.command_line import CommandLine, read_command_line
from poprun.cli.options import OPTIONS, Option
from poprun.plan.request import (
    EndingSettings,
    LaunchRequest,
    OutputSettings,
    RemoteSettings,
    TraceSettings,
    VipuSettings,
)

SECTIONS: Final = {
    "line": CommandLine,
    "request": LaunchRequest,
    "output": OutputSettings,
    "ending": EndingSettings,
    "vipu": VipuSettings,
    "remote": RemoteSettings,
    "trace": TraceSettings,
}

POPRUN_OPTIONS: Final = (
    ("version", "--version"),
    ("version-format", "--version-format=full-json"),
    ("import-config", "--import-config=/dev/null"),
    ("export-config", "--export-config=job.yaml"),
    ("overwrite-config", "--overwrite-config=1"),
    ("debug", "--debug=1"),
    ("host", "--host=host[0-2,4]"),
    ("host", "-Hhost0,host1"),
    ("num-replicas", "--num-replicas=8"),
    ("ipus-per-replica", "--ipus-per-replica=2"),
    ("num-instances", "--num-instances=4"),
    ("num-ilds", "--num-ilds=1"),
    ("vipu-server-host", "--vipu-server-host=10.0.0.1"),
    ("vipu-server-port", "--vipu-server-port=8090"),
    ("vipu-server-timeout", "--vipu-server-timeout=600"),
    ("vipu-partition", "--vipu-partition=pod16"),
    ("vipu-partition-attempts", "--vipu-partition-attempts=2"),
    ("update-partition", "--update-partition=yes"),
    ("reset-partition", "--reset-partition=no"),
    ("remove-partition", "--remove-partition=0"),
    ("vipu-cluster", "--vipu-cluster=c16"),
    ("vipu-allocation", "--vipu-allocation=c16"),
    ("executable-cache-path", "--executable-cache-path=/cache"),
    ("mpi-global-args", "--mpi-global-args=--tag-output"),
    ("mpi-local-args", "--mpi-local-args=-x A=1"),
    ("instance-mpi-local-args", '--instance-mpi-local-args=0:"-x A=1"'),
    ("numa-aware", "--numa-aware=yes"),
    ("process-placement", "--process-placement=spreadnuma"),
    ("host-subnet", "--host-subnet=10.1.0.0/16"),
    ("synchronise-python-venv", "--synchronise-python-venv=1"),
    ("synchronise-poplar-sdk", "--synchronise-poplar-sdk=1"),
    ("distribute-ssh-key", "--distribute-ssh-key=1"),
    ("sync-type", "--sync-type=ST_POD_NATIVE_DEFAULT"),
    ("print-topology", "--print-topology=yes"),
    ("only-output-from-instance", "--only-output-from-instance=0"),
    ("offline-mode", "--offline-mode=on"),
    ("allow-run-as-root", "--allow-run-as-root=1"),
    ("verbose", "--vv"),
    ("verbose", "-v"),
    ("verbose", "-vv"),
    ("verbose", "--verbose"),
)
"""Every option of PopRun's but ``--help``, in the spellings of its users."""


@pytest.mark.parametrize(("name", "word"), POPRUN_OPTIONS)
def test_every_option_of_popruns(name: str, word: str) -> None:
    """It is read, and has an effect or says why it has none."""
    line = read_command_line([word, "program"], {})
    (given,) = line.given

    assert given.option.name == name
    assert bool(given.option.field) != bool(given.option.why_no_effect)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_a_row_sets_a_field_that_is_there(option: Option) -> None:
    """Its section and name are those of a value; nothing else would be noticed before somebody gives it."""
    if option.field:
        section, name = option.field.split(".")
        assert name in {field.name for field in fields(SECTIONS[section])}


def test_names_and_letters_are_used_once() -> None:
    """No two rows have the same name or letter."""
    names = [option.name for option in OPTIONS]
    letters = [option.short for option in OPTIONS if option.short]

    assert len(set(names)) == len(names)
    assert len(set(letters)) == len(letters)
