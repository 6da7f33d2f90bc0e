"""What does the page of a real job look like? Three instances train, and one is slow in data for a while.

python benchmarks/page_picture.py --plot docs/report_page.png
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

PROGRAM = """
import sys, time, torch, popdist
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

seconds = float(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(0)
began = time.monotonic()

class Waves(Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        if dist.get_rank() == 2 and 0.5 < (time.monotonic() - began) / seconds < 0.75:
            time.sleep(0.002)
        x = torch.randn(64)
        return x, x[:8].sin().sum(0, keepdim=True)

wide = torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()
model = DistributedDataParallel(torch.nn.Sequential(*wide, torch.nn.Linear(512, 1)))
optimizer = torch.optim.Adam(model.parameters(), 1e-4)
for step, (x, y) in enumerate(DataLoader(Waves(), batch_size=32)):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 10)
    optimizer.step()
    popdist.report(step=step, loss=loss, **{"norm of the gradients": norm})
    is_over = torch.tensor(float(time.monotonic() - began > seconds))
    dist.broadcast(is_over, 0)
    if is_over:
        break
"""


def main() -> None:
    """Run the job and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="how long the job trains")
    parser.add_argument("--plot", type=Path, required=True, help="the picture, a PNG")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(PROGRAM, encoding="utf-8")
        words = (
            "--num-instances",
            "3",
            "--report",
            "run.html",
            sys.executable,
            "train.py",
            f"{arguments.seconds:g}",
        )
        subprocess.run([sys.executable, "-m", "poprun", *words], cwd=folder, check=True)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1160, "height": 1240})
            page.goto(Path(folder, "run.html").as_uri())
            page.screenshot(path=arguments.plot)
            browser.close()


if __name__ == "__main__":
    main()
