"""Jobs that hang, and users who want to know where their jobs stand."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from poprun.launch.program_watch import StackQuestion
from tests.process.endings import has_met
from tests.process.test_endings import wait_until
from tests.running import DEADLINE_SECONDS, Poprun

LATE = """
import time
import popdist
import torch

popdist.init()
popdist.barrier()
popdist.report(step=17)
if popdist.instance_index() == 1:
    time.sleep(600)
popdist.all_reduce(torch.ones(3))
"""

PAUSE = """
import os
import time
import popdist
from popdist.ground.progress import progress_page

rank = popdist.instance_index()
if os.environ["POPDIST_RESTART_COUNT"] == "0":
    if rank == 0:
        progress_page.wait("barrier()")
    time.sleep(600)
print("done")
"""
"""Says that it waits, as a collective does, and needs no torch for it."""


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    """What poprun says until a line of it holds ``text``."""
    assert process.stderr is not None
    said = ""
    while text not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return said


def test_an_instance_that_keeps_the_others_waiting_is_named(poprun: Poprun, tmp_path: Path) -> None:
    """With the line it stands at, before any other; the job ends with a code of its own."""
    program = tmp_path / "late.py"
    program.write_text(LATE)

    finished = poprun(
        *("--launcher", "local", "--hang-report", "2", "--hang-timeout", "5", "-n", "3", str(program))
    )

    assert finished.code == 75
    assert "instances 0 and 2 wait in all_reduce(float32[3] on cpu, op='sum')" in finished.err
    assert "instance 1 did not arrive: reported step 17" in finished.err
    told = finished.err.partition("instance 1:\n")[2].splitlines()
    assert told[:2] == [f'    | File "{program}", line 10, in <module>', "    |   time.sleep(600)"]
    assert "popdist.all_reduce(torch.ones(3))" in finished.err.partition("instances 0 and 2:\n")[2]
    assert finished.err.count("did not arrive") == 1
    assert "no progress for --hang-timeout 5 s" in finished.err


def test_a_hang_is_a_failure_that_is_started_again(poprun: Poprun) -> None:
    """An attempt that hangs is not the last one."""
    words = ("--hang-timeout=1", "--max-restarts=1", "-n2", "--no-tag-output", sys.executable, "-c", PAUSE)

    finished = poprun(*words)

    assert finished.succeeded().lines == ["done", "done"]
    assert "attempt 0: no progress for --hang-timeout 1 s" in finished.err


def test_a_report_alone_leaves_the_job_running(poprun: Poprun) -> None:
    """It says so, once, and names the places of instances that share a replica."""
    words = ("--hang-report", "1", "-n2", "--parallelism", "pp=2", "-v")
    with poprun.started(*words, sys.executable, "-c", PAUSE) as process:
        said = read_until(process, "the job goes on")
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=DEADLINE_SECONDS)

    assert re.search(r"no progress for \d+ s: instance 0 \(replica 0, stage 0, shard 0\) waits in barrier", said)
    assert "instance 1 (replica 0, stage 1, shard 0) did not arrive: popdist.init() not called yet" in said
    assert (process.returncode, "did not arrive" in rest) == (143, False)


KINDS = """
case $RANK in
2) touch "$1/ready-2"; exec sleep 603 ;;
4) exec "$PYTHON" -I stand.py "$1" ;;
*) exec "$PYTHON" stand.py "$1" ;;
esac
"""
STAND = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
if rank == 0:
    import popdist
    popdist.num_instances()
open(f"{sys.argv[1]}/ready-{rank}", "w").close()
if rank == 3:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""


def test_ctrl_backslash_shows_where_every_program_stands(launcher: Poprun, tmp_path: Path) -> None:
    """Python with popdist and without, another program, a stopped one, an isolated one: none is disturbed."""
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    (tmp_path / "stand.py").write_text(STAND)
    words, env = ("sh", "-c", KINDS, "sh", str(meeting)), {"PYTHON": sys.executable}

    with launcher.started("-n", "5", *words, env=env, cwd=tmp_path) as process:
        wait_until(lambda: has_met(tmp_path, 5))
        wait_until(lambda: len(stopped_processes(process.pid)) == 1)
        said = []
        for _ in range(2):
            process.send_signal(signal.SIGQUIT)
            said.append(read_until(process, "-I stand.py"))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_SECONDS)

    for text in said:
        assert text.count("    |   time.sleep(600)") == 1
        assert "  instances 0 and 1:\n" in text
        assert re.search(r"process \d+: sleeping in clock_nanosleep, .*\(sleep 603\)", text)
        assert re.search(r"process \d+: stopped by a signal, SIGCONT continues it \(.*stand\.py", text)
    assert process.returncode == 143


def command_line(pid: int) -> list[str]:
    """The command line of a process now: a child that begins has its parent's, and for a moment none."""
    return Path("/proc", str(pid), "cmdline").read_text().split("\0")[:-1]


def stopped_processes(root: int) -> list[psutil.Process]:
    """The descendants of ``root`` that a signal has stopped."""
    return [one for one in psutil.Process(root).children(recursive=True) if one.status() == psutil.STATUS_STOPPED]


def test_a_single_program_keeps_the_terminal(poprun: Poprun) -> None:
    """It is asked twice, and reads its input afterwards as if nothing had been."""
    program = "print('ready', flush=True); print(input())"
    with poprun.started("--launcher", "local", sys.executable, "-c", program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):
            process.send_signal(signal.SIGQUIT)
            read_until(process, 'File "<string>", line 1, in <module>')
        out, _ = process.communicate("goes on\n", timeout=DEADLINE_SECONDS)

    assert (process.returncode, out) == (0, "goes on\n")


@pytest.mark.parametrize(("is_child", "has_page"), [(True, True), (True, False), (False, False)])
def test_who_does_not_listen_is_never_signalled(tmp_path: Path, *, is_child: bool, has_page: bool) -> None:
    """Whatever a page announces, and who has it open: the signal would end the process."""
    with (
        (tmp_path / "page").open("w+b") as page,
        subprocess.Popen(["sleep", "600"], pass_fds=[page.fileno()] if has_page else []) as process,
    ):
        pid = process.pid if is_child else psutil.Process().ppid()
        wait_until(lambda: command_line(process.pid) == ["sleep", "600"])
        answer = StackQuestion(page.fileno(), 4096, pid, 63).answer()
        process.terminate()

    assert process.returncode == -signal.SIGTERM
    assert answer is not None
    assert (answer["text"], "sleep 600" in str(answer["processes"])) == ("", True)


GROUPS = """
import time

def barrier(group=None):
    time.sleep(600)
"""
"""In the place of torch's own, which would take seconds to load: what counts is where the file stands."""

ALONE = """
import os, time
from torch.distributed.distributed_c10d import barrier

if os.environ["RANK"] == "1":
    while True:
        pass  # it computes, and does not come
barrier()
"""


def test_a_hang_of_torch_distributed_is_found_from_outside(poprun: Poprun, tmp_path: Path) -> None:
    """Programs that know nothing of popdist: who computes nothing is asked, and stands in a collective."""
    place = tmp_path / "torch" / "distributed"
    place.mkdir(parents=True)
    for folder in (place, place.parent):
        (folder / "__init__.py").touch()
    (place / "distributed_c10d.py").write_text(GROUPS)
    program = tmp_path / "train.py"
    program.write_text(ALONE)
    options = ("--launcher", "local", "-n", "2", "--hang-report", "4", "--hang-timeout", "6")
    finished = poprun(*options, sys.executable, str(program))

    assert finished.code == 75
    assert "instance 0 waits in barrier() of torch.distributed\n  instance 1 did not arrive\n" in finished.told
    assert re.search(rf'  instance 1:\n    \| File "{program}", line [67], in <module>', finished.told)


STAGE = """
import os, signal, sys, time
import popdist, torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

popdist.init(torch_distributed=True)
place, spoiled = popdist.instance_index(), sys.argv[1]
module = nn.Linear(4, 4)
model = popdist.ReplicatedModel(module)
stage = PipelineStage(module, place, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
for step in range(3):
    if step == 2 and place == 1:
        def spoil(*_):
            time.sleep(600) if spoiled == "stands" else os.kill(os.getpid(), signal.SIGKILL)

        module.register_forward_pre_hook(spoil)
    model.pipeline_step(schedule, (torch.ones(8, 4), torch.ones(8, 4)))
    model.zero_grad()
"""


@pytest.mark.parametrize("ending", ["stands", "killed"])
def test_a_stage_of_a_pipeline_is_lost(poprun: Poprun, tmp_path: Path, ending: str) -> None:
    """Its neighbour waits in a receive; the job ends with the usual code, and says which stage it was."""
    program = tmp_path / "train.py"
    program.write_text(STAGE)
    options = ("-n", "2", "--parallelism", "pipeline=2", "--hang-report", "4", "--hang-timeout", "6")
    finished = poprun("--launcher", "local", *options, sys.executable, str(program), ending)

    lost, waiting = (f"(replica 0, stage {stage}, shard 0)" for stage in (1, 0))
    if ending == "killed":
        assert finished.code == 137
        assert (
            "instance 1 failed first: SIGKILL, killed (host localhost, replica 0, stage 1, shard 0)"
            in finished.err
        )
    else:
        assert finished.code == 75
        assert f"instance 0 {waiting} waits in step() of torch.distributed.pipelining\n" in finished.told
        assert f"\n  instance 1 {lost} did not arrive\n" in finished.told
        assert (
            "time.sleep(600)" in finished.told.partition(f"  instance 1 {lost}:\n")[2].partition("  instance 0")[0]
        )


LOADER = """
import os, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2 and os.environ["RANK"] == "1":
            time.sleep(600)
        return torch.ones(3)

dist.init_process_group("gloo")
for batch in DataLoader(Data(), num_workers=1):
    dist.all_reduce(batch)
"""


def test_a_stuck_worker_of_a_data_loader_is_named(poprun: Poprun, tmp_path: Path) -> None:
    """With its line, and the collective in which torch's recorder has the others; in the report, too."""
    program = tmp_path / "train.py"
    program.write_text(LOADER)
    options = ("--launcher", "local", "-n", "2", "--hang-report", "3", "--hang-timeout", "3")
    finished = poprun(*options, "--report", "report.json", sys.executable, str(program), cwd=tmp_path)

    waits = "instance 0 waits in collective 3: all_reduce(float32[1, 3]), which instance 1 has not called"
    stuck = rf"instance 1 waits for its data loader's worker, process \d+, which stands at {program}:12, in \w+"
    assert finished.code == 75
    assert finished.told.count(f"\n  {waits}\n") == 2  # when it hangs, and at the end
    assert len(re.findall(rf"\n  {stuck}: time.sleep\(600\)", finished.told)) == 2
    (attempt,) = json.loads((tmp_path / "report.json").read_text())["attempts"]
    verdict, (waiting, late) = attempt["verdict"], attempt["instances"]
    assert (verdict["cause"], verdict["culprits"], verdict["victims"]) == ("helper process", [1], [0])
    assert verdict["places"]["1"] == f"{program}:12"
    groups = [it["evidence"]["groups"][0] for it in (waiting, late)]
    assert [group["calls"][-1]["is_done"] for group in groups] == [False, True]
    assert late["evidence"]["helpers"][0]["stacks"]["threads"][0][-1] == {
        "file": str(program),
        "line": 12,
        "function": "__getitem__",
    }


@pytest.mark.parametrize("num_instances", [1, 2])
def test_programs_that_stand_still_by_themselves_are_ended(poprun: Poprun, num_instances: int) -> None:
    """Nobody waits in a collective, and nobody computes: where all stand is said."""
    options = ("--launcher", "local", "-n", str(num_instances), "--hang-report", "1", "--hang-timeout", "2")
    finished = poprun(*options, sys.executable, "-c", "import threading; threading.Event().wait()")

    assert finished.code == 75
    assert "still, and nobody waits in a collective" in finished.told
    assert re.search(r"instances? 0.*: at <string>:1, in <module>", finished.told)


def test_a_program_that_computes_alone_is_not_ended(poprun: Poprun) -> None:
    """Its processor time moves, or it tells of its progress."""
    computing = """
import os, time, popdist
end = time.monotonic() + 5
while time.monotonic() < end:
    if os.environ["RANK"] == "0":
        time.sleep(0.1)
        popdist.report(step=int(10 * time.monotonic()))
"""
    options = ("--launcher", "local", "-n", "2", "--hang-report", "1", "--hang-timeout", "2")
    finished = poprun(*options, sys.executable, "-c", computing).succeeded()

    assert finished.err == ""


SHARD = """
import sys
import popdist, torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = popdist.device_mesh()
net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
model = popdist.ReplicatedModel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, batch in enumerate(popdist.data_loader(torch.randn(40, 4), 4)):
    try:
        for x in model.micro_batches(batch):
            if step in (2, 5) and (sys.argv[1] == "all" or mesh["tensor"].get_local_rank() == 1):
                raise ValueError("a sample that cannot be read")
            model(x).square().mean().backward()
        optimizer.step()
    except ValueError:
        continue
print("trained", net[0].weight.full_tensor().sum().item())
"""
"""Catches an exception, on one shard of a replica or on all, in a step that is checked and in another one."""


def test_a_shard_that_leaves_its_step_alone_is_named(poprun: Poprun, tmp_path: Path) -> None:
    """The others wait for it in a layer; the job ends as any that hangs. Where all leave theirs, they go on."""
    program = tmp_path / "train.py"
    program.write_text(SHARD)
    options = ("-n", "2", "--parallelism", "tensor=2", "--hang-report", "4", "--hang-timeout", "6")
    one, every = (
        poprun("--launcher", "local", *options, "--no-tag-output", sys.executable, str(program), how)
        for how in ("one", "all")
    )

    assert one.code == 75
    assert "instance 1 (replica 0, stage 0, shard 1) differs from the others" in one.told
    assert "it caught an exception that ended its step, and goes on" in one.told
    assert len(set(every.succeeded().lines)) == 1
