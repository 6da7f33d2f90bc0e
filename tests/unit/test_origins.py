"""Defaults, file, variables, flags: each overrides those before it, and each value knows where it comes from."""

from pathlib import Path

import pytest

from poprun.cli.command_line import CommandLine, misspelled_variables, origins, read_command_line
from poprun.cli.options import OPTIONS, Option
from poprun.errors import PoprunError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of options."""
    path = tmp_path / "job.yaml"
    path.write_text("num-instances: 2\nnum-replicas: 8\nmpi-local-args: [-x A, -x B]\nvipu-partition: p\n")
    return path


def read(file: Path, *words: str, **variables: str) -> CommandLine:
    """The command line of ``words`` over ``variables`` over ``file``."""
    return read_command_line(["--import-config", str(file), *words], variables)


def test_the_later_wins(file: Path) -> None:
    """Default < file < variable < flag, one option at a time; a repeated option is replaced, not added to."""
    line = read(
        file, "--num-replicas=16", "--mpi-local-args=-x C", POPRUN_NUM_REPLICAS="4", POPRUN_NUM_INSTANCES="4"
    )
    request = line.request((), "/")

    assert (request.num_instances, request.num_replicas, request.ipus_per_replica) == (4, 16, None)
    assert request.mpi_local_args == ("-x", "C")
    assert request.vipu.partition == "p"
    assert origins(line.given, with_defaults=False) == (
        ("import-config", str(file), "command line"),
        ("num-instances", "4", "POPRUN_NUM_INSTANCES"),
        ("num-replicas", "16", "command line"),
        ("mpi-local-args", "-x C", "command line"),
        ("vipu-partition", "p", f"{file}:4"),
    )


@pytest.mark.parametrize(
    ("words", "variables", "placement"),
    [
        ([], {}, "core"),
        (["--numa-aware=no"], {}, "disabled"),
        (["--process-placement=compact", "--numa-aware=no"], {"POPRUN_NUMA_AWARE": "yes"}, "compact"),
        (["--numa-aware=no"], {"POPRUN_PROCESS_PLACEMENT": "compact"}, "disabled"),
    ],
)
def test_two_options_for_one_thing(
    tmp_path: Path, words: list[str], variables: dict[str, str], placement: str
) -> None:
    """The stronger place counts, whichever of the two is written there."""
    file = tmp_path / "job.yaml"
    file.write_text("process-placement: core\nnuma-aware: yes\n")
    line = read(file, *words, **variables)

    assert line.request((), "/").placement == placement


def test_every_value_has_an_origin(file: Path) -> None:
    """With its defaults the list names every option but those that only look."""
    rows = {name: (value, origin) for name, value, origin in origins(read(file).given, with_defaults=True)}

    assert rows["num-replicas"] == ("8", f"{file}:2")
    assert rows["stop-timeout"] == ("5", "default")
    assert rows["remove-partition"] == ("yes", "default")
    assert rows["tag-format"] == ("none", "default")
    assert {option.name for option in OPTIONS if option.field and not option.field.startswith("line.")} <= set(
        rows
    )


@pytest.mark.parametrize("option", [option for option in OPTIONS if not option.is_local], ids=lambda o: o.name)
def test_every_option_has_a_variable(option: Option) -> None:
    """Its name in capitals; an empty one sets nothing."""
    assert read_command_line([], {option.variable: ""}).given == ()
    if option.kind.is_switch:
        (given,) = read_command_line([], {option.variable: "yes"}).given
        assert (given.option, given.place) == (option, option.variable)


def test_a_variable_is_one_text() -> None:
    """Words with quotes arrive as a flag's would; what only flags may say is not read."""
    line = read_command_line(
        [], {"POPRUN_MPI_GLOBAL_ARGS": "--mca a 'b c'", "POPRUN_PLAN": "p", "POPRUN_VERSION": "1"}
    )

    assert line.request((), "/").mpi_global_args == ("--mca", "a", "b c")
    assert (line.plan_file, line.prints_version) == (None, False)


def test_a_plan_takes_no_variables() -> None:
    """Beside --plan, variables of options that do not go with it are left alone: the plan says it all."""
    line = read_command_line(["--plan", "p"], {"POPRUN_NUM_INSTANCES": "4", "POPRUN_VERBOSE": "2"})

    assert (line.values, line.verbosity) == ({}, 2)


@pytest.mark.parametrize(
    ("content", "words", "variables", "what"),
    [
        ("num-replicas: 8\nnum-instances: four", [], {}, "{file}:2: --num-instances four: give a whole number"),
        ("host: n[2-1]", [], {}, "{file}:1: --host 'n[2-1]': the range 2-1 runs backwards"),
        ("print-topology: maybe", [], {}, "{file}:1: --print-topology maybe: give yes or no"),
        ("", [], {"POPRUN_LAUNCHER": "slurm"}, "POPRUN_LAUNCHER: --launcher slurm: give one of auto, mpi, local"),
        ("", [], {"POPRUN_HOST": "a,a"}, "POPRUN_HOST: --host names a twice"),
        ("", ["--plan", "p"], {}, "--plan says it all: leave out --import-config"),
    ],
)
def test_a_mistake_is_told_with_its_place(
    tmp_path: Path, content: str, words: list[str], variables: dict[str, str], what: str
) -> None:
    """File and line, or variable; a flag needs none."""
    file = tmp_path / "job.yaml"
    file.write_text(content)

    with pytest.raises(PoprunError) as caught:
        read(file, *words, **variables)
    assert str(caught.value).startswith(what.format(file=file))


@pytest.mark.parametrize(("name", "reason"), [("none", "No such file"), (".", "Is a directory"), ("raw", "UTF-8")])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, reason: str) -> None:
    """The option and the reason."""
    (tmp_path / "raw").write_bytes(b"\xff")

    with pytest.raises(PoprunError, match=f"--import-config .*{reason}"):
        read(tmp_path / name)


def test_variables_that_are_almost_an_options() -> None:
    """They are told of, since they do nothing; other variables that begin so are somebody else's."""
    environ = {"POPRUN_NUM_REPLICA": "2", "POPRUN_POOL": "/x", "POPRUN_NUM_INSTANCES": "2", "PATH": "/bin"}

    assert list(misspelled_variables(environ)) == [
        "POPRUN_NUM_REPLICA sets no option: did you mean POPRUN_NUM_REPLICAS?"
    ]
