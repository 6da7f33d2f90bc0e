"""A program for Lightning's Trainer and for Fabric, with noise and dropout, that prints the bits of its state."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

import popdist
import popdist.fabric
import popdist.lightning
from tests.contract.accelerate_program import Noisy

ACCUMULATION = 2
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}

OF_LIGHTNING_CLI: dict[str, Any] = {"cluster_environment": None, "find_unused_parameters": False}
"""Options that LightningCLI passes with their defaults, like many more."""


def network() -> nn.Sequential:
    """Return a classifier whose buffers and random numbers depend on the replica."""
    layers = (nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    return nn.Sequential(*layers)


class Classifier(lightning.LightningModule):  # type: ignore[misc]  # Lightning has no types
    """A module that logs one loss of the job, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch of one replica."""
        x, y = batch
        loss = nn.functional.cross_entropy(self.network(x), y)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("number", float(batch_idx))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Log the loss of a batch of one replica."""
        x, y = batch
        self.log("evaluation", nn.functional.cross_entropy(self.network(x), y), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Log a number that has no batch, as the best value of a metric."""
        self.log("best", 1.0, sync_dist=True)

    def on_after_backward(self) -> None:
        """Log the sum of the gradients of all replicas."""
        self.log("gradients", sum(parameter.grad.sum() for parameter in self.parameters()))

    def on_train_batch_end(self, outputs: Any, _batch: Any, _batch_idx: int) -> None:
        """Print the logged values, and the loss that hooks get."""
        values = {name: value.item() for name, value in sorted(self.trainer.callback_metrics.items())}
        self.print(f"logged {self.global_step}: {values}, {outputs['loss'].item()}", flush=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW with a schedule in steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 400)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def with_trainer(folder: Path, begin: str | None) -> None:
    """Train for two epochs of two steps by Lightning's Trainer, and print the bits at the end."""
    lightning.seed_everything(42, verbose=False)
    checkpoints = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = lightning.Trainer(
        strategy=popdist.lightning.ReplicatedStrategy(**OF_LIGHTNING_CLI),
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=ACCUMULATION,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        callbacks=[checkpoints],
        **QUIET,
    )
    module, data = Classifier(), Noisy()
    loader = DataLoader(data, batch_size=4, shuffle=True)
    trainer.fit(module, loader, DataLoader(data, batch_size=4), ckpt_path=begin)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    module.print(f"trainer: rate {rate:.4f}, {popdist.checksum(module)}", flush=True)


def with_fabric(folder: Path, begin: str | None, *, is_killed: bool = False) -> None:
    """Train for two epochs by Fabric, and print the bits after each epoch; or be killed within the second one."""
    fabric = Fabric(strategy=popdist.fabric.FabricStrategy(accumulation=ACCUMULATION), accelerator="cpu")
    fabric.launch()
    fabric.seed_everything(42, verbose=False)
    net, data = network(), Noisy()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 400)
    loaders = [DataLoader(data, batch_size=4) for _ in range(2)]  # not shuffled: a load begins with epoch 0 again
    train, test = fabric.setup_dataloaders(*loaders)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": 0}
    if begin:
        fabric.load(begin, state)
    for epoch in range(state["epoch"], 2):
        model.train()
        for number, (x, y) in enumerate(train):
            if is_killed and epoch == number == 1 and popdist.is_main():
                os.kill(os.getpid(), signal.SIGKILL)
            is_last = number % ACCUMULATION == ACCUMULATION - 1
            with fabric.no_backward_sync(model, enabled=not is_last):
                fabric.backward(nn.functional.cross_entropy(model(x), y) / ACCUMULATION)
            if is_last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = torch.cat([(model(x).argmax(-1) == y).float() for x, y in test])
        share = float(fabric.all_reduce(right.mean()))
        bits = popdist.checksum(model)
        fabric.print(f"fabric {epoch}: {share} right, {schedule.last_epoch} steps, {bits}", flush=True)
        state["epoch"] = epoch + 1
        fabric.save(str(folder / f"epoch-{epoch}.ckpt"), state)


class Endless:
    """The batches of a loader, again and again; the iterator of the loader is kept."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> "Endless":
        return self

    def __next__(self) -> Any:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._loader)
            batch = next(self._batches)
        return batch


def with_a_kept_iterator(folder: Path) -> None:
    """Leave a training loop of Fabric whose iterator is kept, then evaluate, add up, and save."""
    fabric = Fabric(strategy=popdist.fabric.FabricStrategy(), accelerator="cpu")
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    net = network()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loaders = [DataLoader(Noisy(), batch_size=3, shuffle=shuffle) for shuffle in (True, False)]
    train, test = fabric.setup_dataloaders(*loaders)
    step, number = 0, torch.zeros(1)
    for x, y in (kept := Endless(train)):
        if step == 7:
            break
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        number += len(x)
        step += fabric.strategy.sync_gradients
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(-1) == y).sum() for x, y in test)
    model.train()
    sums = [fabric.all_reduce(it, reduce_op="sum").item() for it in (right, number)]
    fabric.save(str(folder / "kept.ckpt"), {"model": model})
    fabric.print(f"kept {type(kept).__name__} {step}: {sums}, {popdist.checksum(model)}", flush=True)


class Deciding(Classifier):
    """A module that logs a loss for each process, by which a scheduler and callbacks decide, in two ways."""

    def training_step(self, batch: tuple[Tensor, Tensor], _batch_idx: int) -> Tensor:
        """Return the loss of a batch of one replica."""
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("twice", 2 * loss, on_step=True, on_epoch=True)
        self.logger.log_metrics({"own": loss.item()}, self.global_step)
        return loss

    def on_train_batch_end(self, *_unused: Any) -> None:
        """Print nothing."""

    def configure_optimizers(self) -> Any:
        """Return SGD with a rate that falls when a loss does not."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        config = {"scheduler": schedule, "monitor": "twice_step", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}


def with_decisions(folder: Path) -> None:
    """Stop, choose a checkpoint, and set the learning rate by a value that is logged without ``sync_dist``."""
    lightning.seed_everything(1, verbose=False)
    stopping = EarlyStopping("loss", patience=1, check_on_train_epoch_end=True)
    best = ModelCheckpoint(folder / "best", monitor="loss", every_n_train_steps=1)
    trainer = lightning.Trainer(
        strategy=popdist.lightning.ReplicatedStrategy(),
        accelerator="cpu",
        max_epochs=12,
        callbacks=[stopping, best],
        log_every_n_steps=1,
        **{**QUIET, "logger": CSVLogger(folder, version="")},
    )
    module = Deciding()
    trainer.fit(module, DataLoader(Noisy(), batch_size=4, shuffle=True))
    rate, name = trainer.optimizers[0].param_groups[0]["lr"], Path(best.best_model_path).name
    bits = popdist.checksum(module)
    if popdist.is_main():
        logged = (Path(trainer.logger.log_dir) / "metrics.csv").read_text(encoding="utf-8")
        module.print(f"decided {trainer.global_step}: {name}, rate {rate}, {bits}, {logged.split()}", flush=True)


if __name__ == "__main__":
    saved = Path(sys.argv[1])
    if sys.argv[2:] == ["killed"]:
        with_fabric(saved, None, is_killed=True)
    checkpoint_of_trainer, checkpoint_of_fabric = sys.argv[2:] or (None, None)
    with_trainer(saved, checkpoint_of_trainer)
    with_fabric(saved, checkpoint_of_fabric)
    if checkpoint_of_fabric is None:
        with_a_kept_iterator(saved)
        with_decisions(saved)
