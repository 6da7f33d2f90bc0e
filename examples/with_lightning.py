"""A Lightning script that knows nothing of poprun: it trains on scikit-learn's handwritten digits.

    poprun -n 2 python examples/with_lightning.py --devices 2
    poprun -n 2 --num-replicas 4 python examples/with_lightning.py --replicas

With ``--replicas`` a strategy of popdist trains several replicas in an instance, and
the weights are bitwise equal for any number of instances.

Needs ``pip install 'poprun[examples,neighbours]'``.
"""

import argparse

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitsModule(lightning.LightningModule):  # type: ignore[misc]
    """A network with one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of one rank's batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """The accuracy of all ranks."""
        images, labels = batch
        accuracy = (self.network(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.005)


def main() -> None:
    """Train for three epochs, test, and print from rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--replicas", action="store_true")
    arguments = parser.parse_args()
    if arguments.replicas:
        import popdist.lightning
    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [1437, 360])
    trainer = lightning.Trainer(
        devices=arguments.devices,
        strategy=popdist.lightning.ReplicatedStrategy() if arguments.replicas else "auto",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = DigitsModule()
    trainer.fit(module, DataLoader(train, batch_size=32, shuffle=True))
    (metrics,) = trainer.test(module, DataLoader(test, batch_size=90), verbose=False)
    if trainer.is_global_zero:
        print(f"world size {trainer.world_size}, test accuracy {metrics['accuracy']:.2%}")
        if arguments.replicas:
            print(f"weights {popdist.checksum(module)}")
    trainer.strategy.barrier()  # no rank ends before rank 0 has printed


if __name__ == "__main__":
    main()
