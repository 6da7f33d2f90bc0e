"""The words of the command line as values of poprun's own."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.cli.command_line import CommandLine, read_command_line, read_words
from poprun.errors import PoprunError, UsageError
from poprun.plan.request import (
    EndingSettings,
    LauncherChoice,
    LaunchRequest,
    OutputSettings,
    RemoteSettings,
    VipuSettings,
)
from poprun.plan.topology import ProcessPlacement
from poprun.text.screen import TopologyFormat


def read(*words: str) -> CommandLine:
    """The command line of ``words``."""
    return read_command_line(words, {})


def test_nothing_given_leaves_every_default_to_the_request() -> None:
    """The command line has no defaults of its own."""
    line = read("train", "-n", "3")

    assert (line.given, line.values) == ((), {})
    assert line.program == ("train", "-n", "3")
    assert line.request(("train",), "/w") == LaunchRequest(program=("train",), working_directory="/w")
    assert (line.plan_file, line.is_dry_run, line.prints_topology, line.verbosity) == (None, False, False, 0)
    assert line.topology_format is TopologyFormat.TABLE


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["-n", "4"], {"num_instances": 4}),
        (["-n", "auto"], {"num_instances": None}),
        (["--num-replicas=8", "--ipus-per-replica", "2"], {"num_replicas": 8, "ipus_per_replica": 2}),
        (["-H", "a,n[1-2]"], {"hosts": ("a", "n1", "n2"), "num_instances": 3}),
        (["--host", "a", "--host", "b"], {"hosts": ("a", "b"), "num_instances": 2}),
        (["--host", "a,b", "-n", "1"], {"hosts": ("a", "b"), "num_instances": 1}),
        (["--launcher", "local"], {"launcher": LauncherChoice.LOCAL}),
        (
            ["--mpi-global-args= --mca a 'b c'", "--mpi-global-args", "-x D"],
            {"mpi_global_args": ("--mca", "a", "b c", "-x", "D")},
        ),
        (["--mpi-local-args", "'-x A=1 -x B=2'"], {"mpi_local_args": ("-x", "A=1", "-x", "B=2")}),
        (["--mpi-global-args", "--tag-output \\\n -x A"], {"mpi_global_args": ("--tag-output", "-x", "A")}),
        (["--debug=yes"], {"is_debugged": True}),
        (["--mpi-local-args", "-x A=1"], {"mpi_local_args": ("-x", "A=1")}),
        (["--threads-per-replica", "3"], {"threads_per_replica": 3}),
        (
            ["--instance-mpi-local-args", '0:"-x A=1"', "--instance-mpi-local-args=1:-x B='2 3'"],
            {"instance_mpi_local_args": ((0, ("-x", "A=1")), (1, ("-x", "B=2 3")))},
        ),
        (["--process-placement", "compact"], {"placement": ProcessPlacement.COMPACT}),
        (["--numa-aware=yes"], {"placement": ProcessPlacement.SPREADNUMA}),
        (["--numa-aware", "no"], {"placement": ProcessPlacement.DISABLED}),
        (
            ["--process-placement=core", "--numa-aware=no"],
            {"placement": ProcessPlacement.CORE},
        ),
        (
            ["--host-subnet=10.1.2.3/16", "--synchronise-python-venv=yes", "--executable-cache-path", "/c"],
            {
                "remote": RemoteSettings(subnet="10.1.0.0/16", synchronises_venv=True),
                "executable_cache_path": "/c",
            },
        ),
        (["--ssh-config", "hosts"], {"remote": RemoteSettings(ssh_config="hosts")}),
        (
            ["--vipu-partition=p", "--vipu-partition-attempts", "3", "--vipu-allocation=a", "--vipu-cluster", "c"],
            {"vipu": VipuSettings(partition="p", partition_attempts=3, allocation="a", cluster="c")},
        ),
        (
            ["--update-partition=yes", "--reset-partition=no", "--remove-partition=false", "--num-ilds=2"],
            {
                "vipu": VipuSettings(
                    updates_partition=True, resets_partition=False, removes_partition=False, num_ilds=2
                )
            },
        ),
        (
            ["--ipus-per-host=4", "--wait-for-devices", "--share-devices", "--offline-mode=on"],
            {"vipu": VipuSettings(ipus_per_host=4, waits_for_devices=True, shares_devices=True, is_offline=True)},
        ),
        (["--pod=POD64", "--pool", "/p"], {"vipu": VipuSettings(pod="POD64", pool="/p")}),
        (["--vipu-server-timeout=6000"], {"vipu": VipuSettings(server_timeout_seconds=6000)}),
        (
            ["--vipu-server-host=h", "--vipu-server-port", "80"],
            {"vipu": VipuSettings(server_host="h", server_port=80)},
        ),
        (["--sync-type=ST_POD_NATIVE_DEFAULT"], {}),
        (["--synchronise-poplar-sdk=1", "--distribute-ssh-key", "0", "--allow-run-as-root=1"], {}),
        (["--deterministic"], {"is_deterministic": True}),
        (["--only-output-from-instance", "0,4-6"], {"output": OutputSettings(shown_instances=(0, 4, 5, 6))}),
        (["--tag-output"], {"output": OutputSettings(is_tagged=True)}),
        (["--no-tag-output"], {"output": OutputSettings(is_tagged=False)}),
        (["--tag-output=on", "--tag-output", "off"], {"output": OutputSettings(is_tagged=False)}),
        (["--stop-timeout", "0.5"], {"ending": EndingSettings(stop_timeout_seconds=0.5)}),
        (
            ["--start-timeout=9", "--timeout", "3600", "--max-restarts", "3", "--report", "r.json"],
            {
                "ending": EndingSettings(
                    start_timeout_seconds=9, timeout_seconds=3600, max_restarts=3, report_files=("r.json",)
                )
            },
        ),
        (
            ["--hang-report", "off", "--hang-timeout", "2.5"],
            {"ending": EndingSettings(hang_report_seconds=None, hang_timeout_seconds=2.5)},
        ),
        (
            ["--tag-format", "{instance}: ", "--fold-output", "--log-dir", "logs", "--monitor"],
            {
                "output": OutputSettings(
                    tag_format="{instance}: ", is_folded=True, log_dir="logs", has_monitor=True
                )
            },
        ),
    ],
)
def test_options(words: list[str], given: dict[str, Any]) -> None:
    """Each option becomes a field of the request, with its type; the last of several counts."""
    line = read(*words, "train")

    assert line.program == ("train",)
    assert line.request((), "/") == LaunchRequest(working_directory="/", **given)


def test_options_that_the_request_does_not_know() -> None:
    """How to look at the plan is the command line's own business."""
    line = read("-vv", "--dry-run", "--print-topology=yes", "--topology-format", "yaml", "--plan", "-")

    assert (line.verbosity, line.is_dry_run, line.prints_topology) == (2, True, True)
    assert (line.topology_format, line.plan_file) == (TopologyFormat.YAML, "-")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["-n", "two", "x"], "--num-instances two: give a whole number, or auto"),
        (["--num-replicas", "x", "x"], "--num-replicas x: give a whole number"),
        (["--launcher", "slurm", "x"], "--launcher slurm: give one of auto, mpi, local"),
        (["--emit", "yaml", "train"], "--emit yaml: give one of mpijob, jobset"),
        (["--topology-format", "json", "train"], "--topology-format says how the plan is printed, and it is not"),
        (
            ["--topology-format", "xml"],
            "--topology-format xml: give one of table, text, json, yaml, svg, html, mermaid",
        ),
        (["--host", "a[", "x"], "unbalanced bracket"),
        (["--mpi-global-args", "'x", "x"], "--mpi-global-args 'x: no closing quotation"),
        (["--host-subnet", "10.1"], "--host-subnet 10.1: give a subnet, such as 10.1.0.0/16"),
        (["--instance-mpi-local-args", "-x A"], "names no instance: write 0:'-x NAME=value'"),
        (["--vipu-partition", ""], "--vipu-partition '': give a name"),
        (["--process-placement", "core2"], "give one of spreadnuma, compact, core, disabled"),
        (["--plan", "p", "-n", "2", "--host", "a"], "--plan says it all: leave out --num-instances, --host"),
        (["--plan", "p", "--no-tag-output"], "leave out --tag-output"),
        (["--only-output-from-instance", "3-1", "x"], "--only-output-from-instance 3-1: the numbers of"),
        (["--only-output-from-instance", "", "x"], "--only-output-from-instance '': name one instance or more"),
        (["--timeout", "", "x"], "--timeout '': give a number of seconds, such as 90"),
        (["--hang-report", "soon", "x"], "--hang-report soon: give a number of seconds, or off"),
    ],
)
def test_what_is_refused(words: list[str], what: str) -> None:
    """Values of the wrong type, and options beside --plan that would change it."""
    with pytest.raises(PoprunError) as caught:
        read(*words)
    assert what in str(caught.value)


def spelled(words: list[str]) -> list[str]:
    """What is read of ``words``, spelled out: each option with its text, and the program behind ``--``."""
    texts, program = read_words(words)
    options = [f"--{name}={text}" for name, given in texts.items() for text in given]
    return [*options, "--", *program] if program else options


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("", ""),
        ("prog", "-- prog"),
        ("--num-instances 2 prog", "--num-instances=2 -- prog"),
        ("--num-instances=2 prog", "--num-instances=2 -- prog"),
        ("--num-instance 2 prog", "--num-instances=2 -- prog"),
        ("--num-in=2 prog", "--num-instances=2 -- prog"),
        ("-n 2 prog", "--num-instances=2 -- prog"),
        ("-n2 prog", "--num-instances=2 -- prog"),
        ("-n=2 prog", "--num-instances=2 -- prog"),
        ("-vn2 prog", "--verbose=1 --num-instances=2 -- prog"),
        ("-vn 2 prog", "--verbose=1 --num-instances=2 -- prog"),
        ("-n -2 prog", "--num-instances=-2 -- prog"),
        ("-H a=b prog", "--host=a=b -- prog"),
        ("-vv prog", "--verbose=2 -- prog"),
        ("--vv prog", "--verbose=2 -- prog"),
        ("--verb prog", "--verbose=1 -- prog"),
        ("--help prog", "--help=1 -- prog"),
        ("--help-a prog", "--help-all=1 -- prog"),
        ("--dry-run prog", "--dry-run=yes -- prog"),
        ("--dry prog", "--dry-run=yes -- prog"),
        ("--dry-run yes prog", "--dry-run=yes -- prog"),
        ("--dry-run off prog", "--dry-run=no -- prog"),
        ("--dry-run=ON prog", "--dry-run=yes -- prog"),
        ("--dry-run=0 prog", "--dry-run=no -- prog"),
        ("--dry-run=true prog", "--dry-run=yes -- prog"),
        ("--no-dry-run prog", "--dry-run=no -- prog"),
        ("--no-tag prog", "--tag-output=no -- prog"),
        ("--no-tag-output=no prog", "--tag-output=yes -- prog"),
        ("--dry-run -- true", "--dry-run=yes -- true"),
        ("--dry-run true true", "--dry-run=yes -- true"),
        ("-- -n 2", "-- -n 2"),
        ("- x", "-- - x"),
        ("prog -n 2 --vv --nonsense", "-- prog -n 2 --vv --nonsense"),
        ("-n 2 prog -- -n 3", "--num-instances=2 -- prog -- -n 3"),
    ],
)
def test_spellings(line: str, read: str) -> None:
    """Each option becomes one long word; the first word that is none starts the program."""
    assert spelled(line.split()) == read.split()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("--num-instnces 2 prog", "there is no option --num-instnces: did you mean --num-instances?"),
        ("-num-instances 2 prog", "there is no option -num-instances: did you mean --num-instances?"),
        ("--xyzzy prog", "there is no option --xyzzy: poprun --help-all lists the options"),
        ("-y prog", "there is no option -y: poprun --help-all lists the options"),
        ("-vy prog", "there is no option -y"),
        ("-np 2 prog", "there is no option -np: --num-instances N says how many processes there are in all"),
        ("-np2 prog", "there is no option -np2: --num-instances N says"),
        ("--nproc_per_node=2 prog", "there is no option --nproc_per_node: --num-instances N says"),
        ("--nproc-per-node 2 prog", "there is no option --nproc-per-node: --num-instances N says"),
        ("--num_processes 2 prog", "there is no option --num_processes: --num-instances N says"),
        ("--nnodes 2 prog", "there is no option --nnodes: --host a,b names the hosts"),
        ("--num_nodes 2 prog", "there is no option --num_nodes: --host a,b names the hosts"),
        ("--num_gpus 4 prog", "there is no option --num_gpus: -n auto starts one instance for each free GPU"),
        ("--multi_gpu prog", "there is no option --multi_gpu: -n auto starts one instance for each free GPU"),
        ("-x FOO=1 prog", "there is no option -x: programs here get all variables of poprun; --mpi-local-args"),
        ("-vx FOO=1 prog", "there is no option -x: programs here get"),
        ("--tensor-parallel-size 2 prog", "--parallelism tensor=2,pipeline=2 says how instances share"),
        ("-m train", "there is no option -m: write poprun python -m MODULE"),
        (
            "--num=ilds 4 prog",
            "--num is the beginning of --num-ilds and of --num-instances and of --num-replicas and of",
        ),
        ("--ver prog", "--ver is the beginning of --verbose and of --version"),
        ("--dry-run=maybe prog", "--dry-run=maybe is neither yes nor no: write --dry-run=yes or --dry-run=no"),
        ("--dry-run= prog", "--dry-run= is neither yes nor no"),
        ("--verbose=2 prog", "--verbose takes no value, and '2' was given: write --verbose"),
        ("--num-instances", "--num-instances needs a value: write --num-instances=VALUE"),
        ("-n", "--num-instances needs a value"),
    ],
)
def test_words_that_are_refused(line: str, what: str) -> None:
    """Unknown options with the nearest name, ambiguous beginnings with the candidates, values that are none."""
    with pytest.raises(UsageError) as caught:
        read_words(line.split())
    assert what in str(caught.value)


@given(st.lists(st.text(max_size=5), max_size=5))
def test_the_program_keeps_its_words(arguments: list[str]) -> None:
    """Whatever stands behind the program is the program's."""
    assert read_words(["-v", "prog", *arguments]) == ({"verbose": ("1",)}, ("prog", *arguments))
    assert read_words(["--", *arguments, "end"]) == ({}, (*arguments, "end"))
