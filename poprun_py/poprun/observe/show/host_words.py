"""Texts about the problems of a host, such as full memory: one line for each kind of problem. Pure."""

from collections.abc import Callable, Mapping
from typing import Final

from popdist.errors import name_instances
from poprun.observe.judge.host_rules import HostFinding
from poprun.text.ranges import describe_bytes


def describe_finding(finding: HostFinding) -> str:
    """Return one line about a problem of a host, such as growing memory or throttled processors."""
    return _WORDS[finding.kind](finding)


def _growth(finding: HostFinding) -> str:
    room, rate = finding.numbers["room"], finding.numbers["rate"]
    return (
        f"the memory of {name_instances(finding.instances)} grows by {describe_bytes(round(rate * 60))} a minute: "
        f"in {max(1, round(room / rate / 60))} min {describe_bytes(round(room))} more are used, which is all that "
        "is left"
    )


_THROTTLES: Final = "host {} throttles its processors for {:.0%} of the time, {}"
_WORDS: Final[Mapping[str, Callable[[HostFinding], str]]] = {
    "growth": _growth,
    "heat": lambda it: _THROTTLES.format(it.host, it.numbers["share"], "because they are hot"),
    "quota": lambda it: _THROTTLES.format(it.host, it.numbers["share"], "to the limit of a control group"),
}
