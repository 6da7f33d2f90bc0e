"""Training loops as programs write them: an evaluation at the top of the body, a kept iterator, early stopping.

Holds popdist.trainers.turn_loaders.
"""

import sys
from pathlib import Path

import pytest

from tests.running import Poprun

EVALUATED_AT_THE_TOP = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader
from popdist.accelerate import Accelerator
import popdist

torch.manual_seed(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
samples, unseen = torch.randn(96, 4), torch.randn(30, 4)
loaders = DataLoader(samples, batch_size=2, shuffle=True), DataLoader(unseen, batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader, others = accelerator.prepare(model, optimizer, *loaders)

def evaluate():
    model.eval()
    with torch.no_grad():
        found = [accelerator.gather_for_metrics(model(x).square() + torch.rand(())) for x in others]
    model.train()
    return torch.cat(found).sort(0).values.sum().item()

step, evaluated = 0, None
for _ in range(2):
    for x in loader:
        if step % 3 == 0 and evaluated != step:
            evaluated = step
            accelerator.print(f"step {step}: {evaluate()}")
            accelerator.save_state(sys.argv[1])
        x = x + torch.rand_like(x)
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        step += accelerator.sync_gradients
accelerator.print(f"step {step}: {popdist.checksum(model)}")
"""

KEPT = """
import sys, torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader
import popdist, popdist.fabric

class Endless:
    def __init__(self, loader):
        self.loader = loader
        self.batches = iter(loader)

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)

fabric = Fabric(strategy=popdist.fabric.FabricStrategy(), accelerator="cpu")
fabric.launch()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
samples, unseen = torch.randn(32, 4), torch.randn(32, 4)
loaders = DataLoader(samples, batch_size=2, shuffle=True), DataLoader(unseen, batch_size=2)
loader, others = fabric.setup_dataloaders(*loaders)

def evaluate():
    model.eval()
    with torch.no_grad():
        sums = torch.stack([model(x).square().sum() for x in others]).sum()
    model.train()
    return round(fabric.all_reduce(sums, reduce_op="sum").item(), 3)

step, number = 0, torch.zeros(1)
for x in (kept := Endless(loader)):
    if step == 7:
        break
    optimizer.zero_grad()
    fabric.backward(model(x).square().mean())
    optimizer.step()
    number += len(x)
    step += fabric.strategy.sync_gradients
fabric.print(f"step {step}: {evaluate()}, {fabric.all_reduce(number, reduce_op='sum').item()}")
fabric.save(sys.argv[1] + "/saved.ckpt", {"model": model})
fabric.print(f"step {step}: {popdist.checksum(model)}")
"""

DECIDED = """
import logging, sys
import lightning, popdist, popdist.lightning, torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from pathlib import Path
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch):
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        self.log("twice", 2 * loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.2)
        scheduler = ReduceLROnPlateau(optimizer, patience=1)
        config = {"scheduler": scheduler, "monitor": "twice_step", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}

lightning.seed_everything(1, verbose=False)
stopping = EarlyStopping("loss", patience=1, check_on_train_epoch_end=True)
best = ModelCheckpoint(sys.argv[1], monitor="loss", every_n_train_steps=1)
options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
strategy = popdist.lightning.ReplicatedStrategy()
trainer = lightning.Trainer(strategy=strategy, max_epochs=12, callbacks=[stopping, best], **options)
module = Module()
trainer.fit(module, DataLoader(torch.randn(48, 4), batch_size=4, shuffle=True))
rate = trainer.optimizers[0].param_groups[0]["lr"]
found = f"best {Path(best.best_model_path).name}, rate {rate}, {popdist.checksum(module)}"
module.print(f"step {trainer.global_step}: {found}")
"""


@pytest.mark.parametrize(
    ("program", "num_lines"),
    [(EVALUATED_AT_THE_TOP, 5), (KEPT, 2), (DECIDED, 1)],
    ids=["evaluated_at_the_top", "kept", "decided_by_an_unshared_value"],
)
def test_a_loop_has_the_same_bits(poprun: Poprun, tmp_path: Path, program: str, num_lines: int) -> None:
    """Also the loss of an evaluation, the number of steps, and the checkpoint and rate that a loss decides."""
    script = tmp_path / "program.py"
    script.write_text(program, encoding="utf-8")
    found = []
    for number in ("1", "2"):
        (folder := tmp_path / number).mkdir()
        words = ("--num-instances", number, "--num-replicas", "4", sys.executable, str(script), str(folder))
        finished = poprun(*words).succeeded_but_for_torch()
        lines = [line.removeprefix("[0] ") for line in finished.out.splitlines()]
        found.append([line for line in lines if line.startswith("step ")])

    assert len(found[0]) == num_lines
    assert found[0] == found[1]
