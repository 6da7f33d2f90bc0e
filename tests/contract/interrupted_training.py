"""A training that is killed or asked to leave at a chosen step, and goes on from its last checkpoint.

``interrupted_training.py FOLDER [--exit-code CODE] [--wait-at STEP] [--kill ATTEMPT:INSTANCE:STEP:WHOM]...``: at
that step of that attempt the instance kills the program (itself), its agent or its shim. After the step
``--wait-at`` instance 0 waits for a signal, and says so. At the end it tells the steps and the checksum of the
weights.
"""

import argparse
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import popdist
from popdist.checkpoint import load_latest, save

NUM_EPOCHS = 5
SAVE_EVERY = 7
DEADLINE_SECONDS = 300.0


def tell(line: str) -> None:
    """Print ``line`` now, in one piece."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def parent_of(pid: int) -> int:
    """Which process started ``pid``."""
    return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])


class Interruptions:
    """What happens to this instance in this attempt.

    Args:
        kills: Attempt, instance, step and whom, of all that is killed.
        wait_at: After this step instance 0 waits for a signal; None for never.
    """

    def __init__(self, kills: list[str], wait_at: int | None) -> None:
        mine = [os.environ.get("POPDIST_RESTART_COUNT", "0"), str(popdist.instance_index())]
        parts = [kill.split(":") for kill in kills]
        self._kills = {int(step): whom for *whose, step, whom in parts if whose == mine}
        self._wait_at = wait_at if popdist.is_main() else None
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)

    def come_to(self, step: int) -> None:
        """A step has begun, after ``step`` others."""
        if step in self._kills:
            agent = os.getppid()
            victims = {"program": os.getpid(), "agent": agent, "shim": parent_of(agent)}
            os.kill(victims[self._kills[step]], signal.SIGKILL)
        if step == self._wait_at:
            tell(f"waiting after {step} steps")
            assert select.select([self._reader], [], [], DEADLINE_SECONDS)[0]


def main() -> None:
    """Go on from the last checkpoint to the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--exit-code", type=int, default=143)
    parser.add_argument("--wait-at", type=int)
    parser.add_argument("--kill", action="append", default=[])
    words = parser.parse_args()
    popdist.init(timeout_seconds=DEADLINE_SECONDS)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model = popdist.ReplicatedModel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = popdist.data_loader(torch.randn(144, 4), 3, shuffle=True)
    named: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    last = load_latest(words.folder, **named)
    epoch, step = (last.values["epoch"], last.step) if last else (0, 0)
    saved = step

    def leave() -> None:
        if step > saved:
            save(words.folder, step=step, epoch=epoch, **named)
        tell(f"left after {step} steps")

    interruptions = Interruptions(words.kill, words.wait_at)
    popdist.on_preemption(leave, exit_code=words.exit_code)
    while epoch < NUM_EPOCHS:
        for batch in loader:
            interruptions.come_to(step)
            for x in model.micro_batches(batch):
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            step += 1
            if step % SAVE_EVERY == 0:
                save(words.folder, step=step, epoch=epoch, **named)
                saved = step
        epoch += 1
    if popdist.is_main():
        tell(f"{step} steps, weights {popdist.checksum(model)}")


if __name__ == "__main__":
    main()
