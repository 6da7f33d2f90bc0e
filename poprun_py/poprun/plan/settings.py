"""What a job is told about its output and its end: values that go from the request into the plan as they are.

Pure. Their defaults live here; the checks name the options that set them.
"""

import math
from dataclasses import dataclass

from poprun.errors import PlanError
from poprun.plan.counts import check_count
from poprun.text.ranges import fold_numbers
from poprun.text.tag_format import check_tag_format


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSettings:
    """What is shown and kept of what the programs print.

    Attributes:
        shown_instances: The instances whose output is shown, ascending; None for all.
        is_tagged: Whether lines are tagged with their instance; None tags when there are several instances or a
            ``tag_format``.
        tag_format: The tag as a template, see `poprun.text.tag_format`; None for the usual one.
        is_folded: Whether lines that several instances print alike are shown once.
        log_dir: Directory for a log of each instance's streams, or None; a relative one starts at the job's
            working directory.
        has_monitor: Whether a live view of the instances takes the place of their lines.
    """

    shown_instances: tuple[int, ...] | None = None
    is_tagged: bool | None = None
    tag_format: str | None = None
    is_folded: bool = False
    log_dir: str | None = None
    has_monitor: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingSettings:
    """When a job ends other than by itself, and what is told of it.

    Attributes:
        stop_timeout_seconds: How long a program that is being stopped may take before it is killed.
        start_timeout_seconds: How long the instances may take to come to life.
        timeout_seconds: How long the whole job may take, or None.
        max_restarts: How often a failed job is started again.
        hang_report_seconds: How long instances may wait for others without any progress before poprun tells of
            it; None never does.
        hang_timeout_seconds: How long they may before poprun ends the job; None never does.
        report_file: File for the report of the job as JSON, or None; a relative one starts at the job's working
            directory.
    """

    stop_timeout_seconds: float = 5.0
    start_timeout_seconds: float = 60.0
    timeout_seconds: float | None = None
    max_restarts: int = 0
    hang_report_seconds: float | None = 120.0
    hang_timeout_seconds: float | None = None
    report_file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """How the hosts of a job are reached.

    Attributes:
        subnet: The subnet of the job's traffic, such as ``10.0.0.0/16``; None takes the way that ssh takes.
        ssh_config: File with the configuration of ssh, or None for the user's own.
        synchronises_venv: Whether hosts that lack poprun's Python environment get a copy of it.
        slurm_job: Slurm's number of the job in whose allocation the hosts are: then Slurm starts what runs there;
            None is ssh.
    """

    subnet: str | None = None
    ssh_config: str | None = None
    synchronises_venv: bool = False
    slurm_job: str | None = None


def check_output(output: OutputSettings, num_instances: int) -> None:
    """See that the values of ``output`` are possible in a job of ``num_instances``.

    Raises:
        PlanError: If one is not.
    """
    unknown = [index for index in output.shown_instances or () if not 0 <= index < num_instances]
    if unknown:
        raise PlanError(
            f"--only-output-from-instance {fold_numbers(unknown)}: there is no such instance; "
            f"--num-instances {num_instances} numbers them from 0 to {num_instances - 1}"
        )
    if output.tag_format is not None:
        check_tag_format(output.tag_format)
        if output.is_tagged is False:
            raise PlanError("--tag-format is of no use with --no-tag-output: leave one of them out")
    check_path("--log-dir", output.log_dir)


def check_ending(ending: EndingSettings) -> None:
    """See that the values of ``ending`` are possible.

    Raises:
        PlanError: If one is not.
    """
    _check_seconds("--stop-timeout", ending.stop_timeout_seconds, may_be_zero=True)
    for option, seconds in (
        ("--start-timeout", ending.start_timeout_seconds),
        ("--timeout", ending.timeout_seconds),
        ("--hang-report", ending.hang_report_seconds),
        ("--hang-timeout", ending.hang_timeout_seconds),
    ):
        if seconds is not None:
            _check_seconds(option, seconds, may_be_zero=False)
    check_count("--max-restarts", ending.max_restarts, minimum=0)
    check_path("--report", ending.report_file)


def check_remote(remote: RemoteSettings) -> None:
    """See that the values of ``remote`` are possible.

    Raises:
        PlanError: If one is not.
    """
    check_path("--ssh-config", remote.ssh_config)
    if remote.ssh_config is not None and len(remote.ssh_config.split()) != 1:
        raise PlanError(
            f"--ssh-config {remote.ssh_config!r} has a blank in its path, which the MPI launchers cannot pass on"
        )
    if remote.subnet is not None:
        from ipaddress import ip_network  # noqa: PLC0415 - jobs of one host go without

        try:
            ip_network(remote.subnet)
        except ValueError as error:
            raise PlanError(
                f"--host-subnet {remote.subnet} is no subnet: {error}; write it like 10.0.0.0/16 or fd00::/64"
            ) from None


def _check_seconds(option: str, seconds: float, *, may_be_zero: bool) -> None:
    if not math.isfinite(seconds) or seconds < 0 or not (seconds or may_be_zero):
        bound = "from 0 up" if may_be_zero else "greater than 0"
        raise PlanError(f"{option} {seconds} is not possible: it is a number of seconds {bound}")


def check_path(option: str, path: str | None) -> None:
    """See that the value of ``option`` can be a path, if there is one.

    Raises:
        PlanError: If not.
    """
    if path is not None and (not path or "\0" in path):
        raise PlanError(f"{option} {path!r} is not possible: it is a path")
