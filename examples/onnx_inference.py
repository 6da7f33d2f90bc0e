"""Run an ONNX model by onnxruntime: each instance of the job computes its share of the samples.

    poprun --num-instances 2 --num-replicas 4 python examples/onnx_inference.py trained.onnx

examples/onnx_training.py writes such a file. poprun tells onnxruntime how many threads an instance has. The last
line is the same for any ``--num-instances``.
"""

import argparse

import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import TensorDataset

import popdist

NUM_TEST_IMAGES = 360
MICRO_BATCH_SIZE = 30


def main() -> None:
    """Compute the scores of all test images, in their order, and print from one instance."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="the file to read")
    arguments = parser.parse_args()
    popdist.init()
    session = onnxruntime.InferenceSession(arguments.model, providers=["CPUExecutionProvider"])
    (first,) = session.get_inputs()
    size = first.shape[0] if isinstance(first.shape[0], int) else MICRO_BATCH_SIZE  # some files fix their batches

    def compute(images: Tensor) -> Tensor:
        whole = torch.cat([images, images.new_zeros(size - len(images), *images.shape[1:])])
        (scores,) = session.run(None, {first.name: whole.numpy()})
        return torch.from_numpy(scores)[: len(images)]

    digits = load_digits()
    images = torch.tensor(digits.images[-NUM_TEST_IMAGES:], dtype=torch.float32).unsqueeze(1) / 16
    loader = popdist.data_loader(TensorDataset(images), size)
    scores = torch.cat([popdist.gather([compute(images) for (images,) in batch]) for batch in loader])
    accuracy = (scores.argmax(1) == torch.from_numpy(digits.target[-NUM_TEST_IMAGES:])).float().mean()
    if popdist.is_main():
        print(f"test accuracy {accuracy:.2%}, scores {popdist.checksum({'scores': scores})}")


if __name__ == "__main__":
    main()
