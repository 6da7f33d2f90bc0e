"""A notebook: cells that run one after the other in ``__main__`` without a file, again and again."""

import sys

from tests.running import run

SETUP = """
import os, signal, torch, popdist
popdist.init()
_ = torch.manual_seed(0)
points = torch.randn(64, 8)
dataset = torch.utils.data.TensorDataset(points, points.sum(1, keepdim=True))
loader = popdist.data_loader(dataset, 16, shuffle=True, num_workers=1)
model = popdist.ReplicatedModel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""

TRAIN = """
for batch in loader:
    for x, y in model.micro_batches(batch):
        torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

print(popdist.num_replicas(), popdist.checksum(model))
"""

INTERRUPTED_INSIDE = """
for batch in loader:
    for x, y in model.micro_batches(batch):
        os.kill(os.getpid(), signal.SIGINT)

"""

INTERRUPTED_BETWEEN = """
for batch in loader:
    os.kill(os.getpid(), signal.SIGINT)

"""


def test_cells_may_be_interrupted_and_run_again() -> None:
    """The same cells give the same weights again; a step that was interrupted is lost, and the next ones go on."""
    cells = [
        SETUP,
        TRAIN,
        SETUP,
        TRAIN,
        INTERRUPTED_BETWEEN,
        SETUP,
        TRAIN,
        INTERRUPTED_INSIDE,
        TRAIN,
        SETUP,
        TRAIN,
    ]

    notebook = run([sys.executable, "-i", "-q"], stdin="".join(cells)).succeeded()

    first, *others = notebook.out.splitlines()
    assert first.startswith("1 ")
    assert others[:2] + others[-1:] == [first] * 3
    assert len(others) == 4
    assert notebook.err.count("KeyboardInterrupt") == 2
    assert "MicroBatchError" not in notebook.err


def test_cells_may_launch_functions() -> None:
    """Live, training and interrupted; afterwards the kernel is as it was. The other cells by hand."""
    cells = [0, 2, 4, 5, -1]

    run([sys.executable, "-m", "tests.contract.notebook_cells", *map(str, cells)]).succeeded()
