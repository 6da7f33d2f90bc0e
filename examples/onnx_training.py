"""Train an ONNX model over the replicas of a job, and write it back as ONNX.

    poprun --num-instances 2 --num-replicas 4 python examples/onnx_training.py trained.onnx
    poprun --num-instances 2 --num-replicas 4 python examples/onnx_training.py again.onnx --model trained.onnx

The model takes images of 8 x 8 pixels and gives scores of the digits; without ``--model`` it is the one below. The
last line is the same for ``--num-instances`` 1, 2 and 4. examples/onnx_inference.py runs what was written.
"""

import argparse
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import popdist
from popdist.onnx import OnnxModule, load

NUM_TEST_IMAGES = 360
NETWORK = """
<ir_version: 8, opset_import: ["" : 17]>
network (float[N, 1, 8, 8] images) => (float[N, 10] scores) {
    features = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (images, "conv.weight", "conv.bias")
    active = Relu (features)
    flat = Flatten (active)
    scores = Gemm <transB = 1> (flat, "classifier.weight", "classifier.bias")
}
"""
SHAPES = {
    "conv.weight": (32, 1, 3, 3),
    "conv.bias": (32,),
    "classifier.weight": (10, 512),
    "classifier.bias": (10,),
}


def untrained() -> onnx.ModelProto:
    """The network above, with random weights."""
    model, random = onnx.parser.parse_model(NETWORK), np.random.default_rng(0)
    for name, shape in SHAPES.items():
        weights = random.normal(scale=0.1, size=shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weights, name))
    return model


def training_images() -> TensorDataset:
    """All images but the last ones, which examples/onnx_inference.py tests with."""
    digits, device = load_digits(), popdist.device()
    images = torch.tensor(digits.images[:-NUM_TEST_IMAGES], dtype=torch.float32, device=device).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(digits.target[:-NUM_TEST_IMAGES], device=device))


def main() -> None:
    """Train, print from one instance, and write the file there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trained", type=Path, help="the file to write")
    parser.add_argument("--model", type=Path, help="the file to read")
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    popdist.init()
    network = load(arguments.model) if arguments.model else OnnxModule(untrained())
    model = popdist.ReplicatedModel(network.to(popdist.device()))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = popdist.data_loader(training_images(), 16, shuffle=True)
    for epoch in range(arguments.epochs):
        mean = popdist.Mean()
        for batch in loader:
            for images, digits in model.micro_batches(batch):
                loss = nn.functional.cross_entropy(model(images), digits)
                loss.backward()
                mean.add(loss.item() * len(digits), len(digits))
            optimizer.step()
        average = mean.compute()
        if popdist.is_main():
            print(f"epoch {epoch + 1}: loss {average:.4f}")
    if popdist.is_main():
        network.save(arguments.trained)
        print(f"{arguments.trained.name}: weights {popdist.checksum(model)}")


if __name__ == "__main__":
    main()
