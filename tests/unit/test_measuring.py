"""What the benchmarks make of their samples."""

import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measuring.control_group import ControlGroup, NoControlGroupError, control_group
from measuring.documents import put, table
from measuring.limits import LIMITS, duration_name, size_name, verdicts
from measuring.log_log import Panel, svg
from measuring.medians import CONFIDENCE, median, ratio

from tests.running import DEADLINE_SECONDS, run


@given(st.integers(6, 200))
def test_the_interval_of_a_median_is_the_smallest_that_is_sure_enough(count: int) -> None:
    """As many samples are left out at each end as a coin allows, and not one more."""
    found = median([float(it) for it in range(count)])
    left_out = int(found.lower)

    def chance(below: int) -> float:
        return float(sum(math.comb(count, it) for it in range(below + 1)) / 2**count)

    assert chance(left_out) <= (1 - CONFIDENCE) / 2 < chance(left_out + 1)
    assert found.upper == count - 1 - left_out
    assert found.value == (count - 1) / 2


def test_few_samples_have_the_widest_interval() -> None:
    """Less than six say nothing with that confidence; all of them is what there is."""
    found = median([3.0, 1.0, 2.0])
    assert (found.lower, found.value, found.upper) == (1.0, 2.0, 3.0)


def test_a_ratio_is_that_within_a_round() -> None:
    """A slow round slows both and changes nothing."""
    assert ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]).value == 2.0


def test_a_limit_holds_by_its_median() -> None:
    """Every limit of what was measured has its verdict, and no other one."""
    limit = next(it for it in LIMITS if it.theirs == "gloo" and it.least == 30)
    samples = {limit.num_bytes: {"gloo": [30.0] * 9, limit.ours: [1.0] * 9}}
    (verdict,) = verdicts(limit.num_ranks, samples)
    assert verdict.holds
    (verdict,) = verdicts(limit.num_ranks, {limit.num_bytes: {"gloo": [29.0] * 9, limit.ours: [1.0] * 9}})
    assert not verdict.holds


def test_sizes_and_durations_have_their_units() -> None:
    """As people write them."""
    assert [size_name(it) for it in (1024, 65536, 25 << 20)] == ["1 KiB", "64 KiB", "25 MiB"]
    assert [duration_name(it) for it in (2e-6, 0.0123, 1.5)] == ["2 µs", "12.3 ms", "1.5 s"]


def test_figures_have_one_place_in_a_document(tmp_path: Path) -> None:
    """What stood there goes; all else stays; a document without the place is refused."""
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x begins -->\nold \\1\n<!-- x ends -->\nb\n", encoding="utf-8")
    put(page, "x", table(["", "time"], [["gloo", "2 ms"]]))
    assert page.read_text(encoding="utf-8") == (
        "a\n<!-- x begins -->\n|      | time |\n|------|-----:|\n| gloo | 2 ms |\n<!-- x ends -->\nb\n"
    )
    with pytest.raises(SystemExit, match="<!-- y begins -->"):
        put(page, "y", "")


def test_a_plot_draws_each_point_where_its_logarithm_is() -> None:
    """Ten times as much is as far from the first point as that is from a tenth of it."""
    curve = {1: (1e-3, 1e-3, 1e-3), 10: (1e-2, 1e-2, 1e-2), 100: (1e-1, 1e-1, 1e-1)}
    picture = svg([Panel(title="a < b", curves={"x": curve})], str, str, "times")
    circles = ET.fromstring(picture).findall(  # noqa: S314 - drawn above
        "{http://www.w3.org/2000/svg}circle"
    )
    (x1, y1), (x2, y2), (x3, y3) = [(float(it.attrib["cx"]), float(it.attrib["cy"])) for it in circles]
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y2 - y1 == pytest.approx(y3 - y2, abs=0.2)
    assert x1 < x2
    assert y1 > y2


def test_a_control_group_enforces_its_limit(limited_memory: Callable[[int], ControlGroup]) -> None:
    """A command within the limit ends well, one beyond it is killed; the group is removed with what it started."""
    group = limited_memory(32 << 20)
    words = [sys.executable, "-I", "-S", "-c", "import sys; b'x' * (int(sys.argv[1]) << 20)"]

    assert run(group.command([*words, "4"])).code == 0
    assert group.num_killed == 0
    assert run(group.command([*words, "64"])).code == -signal.SIGKILL
    assert group.num_killed == 1
    assert (group.peak_bytes or group.limit_bytes) == group.limit_bytes
    with subprocess.Popen(group.command(["sh", "-c", "echo in; sleep 600"]), stdout=subprocess.PIPE) as left:
        assert left.stdout is not None
        left.stdout.readline()
        group.end()
        assert left.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    assert not group.folder.exists()


@pytest.mark.parametrize(
    ("mounts", "why"),
    [("tmpfs / tmpfs rw 0 0\n", "are mounted here"), ("cgroup2 {root} cgroup2 rw 0 0\n", "can be made here")],
)
def test_a_machine_without_control_groups_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: str, why: str
) -> None:
    """None are mounted, or the folder gives no limits, as one that is read-only."""
    (tmp_path / "mounts").write_text(mounts.format(root=tmp_path / "groups"), encoding="utf-8")
    (tmp_path / "groups").mkdir()
    (tmp_path / "membership").write_text("0::/a/b\n", encoding="utf-8")
    monkeypatch.setattr(f"{control_group.__module__}._MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(f"{control_group.__module__}._MEMBERSHIP", tmp_path / "membership")
    with pytest.raises(NoControlGroupError, match=why), control_group(1 << 30):
        pass
    assert not any((tmp_path / "groups").iterdir())
