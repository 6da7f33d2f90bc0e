"""The training of one_replica.py, over all replicas of a job.

python examples/poptorch/all_replicas.py
poprun --num-instances 4 --num-replicas 4 --ipus-per-replica 4 python examples/poptorch/all_replicas.py
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import popdist
import poptorch
from one_replica import Classifier, datasets


def mean_of_all(values: list[Tensor]) -> float:
    """The mean over the values of all instances, the same number on each."""
    joined = torch.cat(values).double()
    return popdist.weighted_mean(float(joined.sum()), len(joined))


def main(words: Sequence[str] | None = None) -> None:
    """Train; instance 0 prints what all replicas found, and writes the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--checkpoint", type=Path, help="a file to write")
    chosen = parser.parse_args(words)
    popdist.init()

    options = popdist.poptorch.Options()  # this instance's process and replicas
    options.deviceIterations(4).outputMode(poptorch.OutputMode.All).randomSeed(42)
    options.Training.gradientAccumulation(2)
    test_options = popdist.poptorch.Options()

    train_set, test_set = datasets()
    loader = poptorch.DataLoader(options, train_set, batch_size=4, shuffle=True)
    test_loader = poptorch.DataLoader(test_options, test_set, batch_size=22)

    model = Classifier()  # the same weights on all instances, since options.randomSeed was called before
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=2e-3)
    training_model = poptorch.trainingModel(model, options, optimizer)
    for epoch in range(chosen.epochs):
        loss = mean_of_all([training_model(images, labels)[1] for images, labels in loader])
        if popdist.is_main():
            print(f"epoch {epoch + 1}: loss {loss:.4f}")

    inference_model = poptorch.inferenceModel(model, test_options)
    accuracy = mean_of_all([inference_model(images).argmax(1) == labels for images, labels in test_loader])
    if popdist.is_main():
        print(f"test accuracy {accuracy:.2%}, replicas: {popdist.num_replicas()}")
    if chosen.checkpoint:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        popdist.execute_on_instances({0}, torch.save, state, chosen.checkpoint)


if __name__ == "__main__":
    main()
