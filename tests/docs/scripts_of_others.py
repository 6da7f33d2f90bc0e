"""The training script of docs/from-ddp.md in other libraries; ``task.py`` is on that page."""

OTHERS = {
    "accelerate": """\
import torch
from accelerate import Accelerator
from task import Net, loss_fn, train
from torch.utils.data import DataLoader

accelerator = Accelerator()
torch.manual_seed(0)
model = Net()
opt = torch.optim.AdamW(model.parameters())
loader = DataLoader(train, batch_size=64, shuffle=True, num_workers=4)
model, opt, loader = accelerator.prepare(model, opt, loader)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 2 * len(loader))
for epoch in range(2):
    for batch in loader:
        accelerator.backward(loss_fn(model(batch[0]), batch[1]))
        opt.step()
        opt.zero_grad()
        scheduler.step()
""",
    "Fabric": """\
import torch
from lightning.fabric import Fabric
from task import Net, loss_fn, train
from torch.utils.data import DataLoader

fabric = Fabric(accelerator="cuda", devices=2)
fabric.launch()
torch.manual_seed(0)
model = Net()
opt = torch.optim.AdamW(model.parameters())
model, opt = fabric.setup(model, opt)
loader = fabric.setup_dataloaders(DataLoader(train, batch_size=64, shuffle=True, num_workers=4))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 2 * len(loader))
for epoch in range(2):
    for batch in loader:
        fabric.backward(loss_fn(model(batch[0]), batch[1]))
        opt.step()
        opt.zero_grad()
        scheduler.step()
""",
    "Horovod": """\
import horovod.torch as hvd
import torch
from task import Net, loss_fn, train
from torch.utils.data import DataLoader, DistributedSampler

hvd.init()
device = torch.device("cuda", hvd.local_rank())
model = Net().to(device)
opt = torch.optim.AdamW(model.parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(opt, root_rank=0)
opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters())
sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train, batch_size=64, sampler=sampler, num_workers=4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 2 * len(loader))
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        loss_fn(model(batch[0].to(device)), batch[1].to(device)).backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()
""",
    "PopDist": """\
import popdist
import popdist.poptorch
import poptorch
import torch
from task import Net, loss_fn, train


class NetWithLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, y):
        return loss_fn(self.net(x), y)


if popdist.isPopdistEnvSet():
    popdist.init()
options = popdist.poptorch.Options(ipus_per_replica=1)
options.randomSeed(0)
options.Training.gradientAccumulation(1)
model = NetWithLoss()
opt = poptorch.optim.AdamW(model.parameters())
loader = poptorch.DataLoader(options, train, batch_size=64, shuffle=True, num_workers=4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 2 * len(loader))
training = poptorch.trainingModel(model, options, opt)
for epoch in range(2):
    for x, y in loader:
        loss = training(x, y).mean()
        scheduler.step()
        training.setOptimizer(opt)
""",
}
