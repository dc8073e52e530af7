"""checkpoint_tool.py FOLDER NAME...: goes on in Python from what sirtaki-checkpoint made of a checkpoint of checkpoint_tool.cc."""

import os
import sys

import torch


def numbers(shape, phase):
    places = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(places * 1.7 + phase).reshape(shape).float()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Linear(5, 7)
        self.norm = torch.nn.BatchNorm1d(7)
        self.output = torch.nn.Linear(7, 3)

    def forward(self, x):
        return self.output(torch.tanh(self.norm(self.hidden(x))))


def go_on(folder, name):
    saved = torch.load(os.path.join(folder, name + ".py.pt"), weights_only=True)
    after = torch.load(os.path.join(folder, name + ".after.py.pt"), weights_only=True)["model"]
    assert saved["epoch"] == 3 and list(saved["generators"]) == ["default"], saved.keys()
    net = Net()
    net.load_state_dict(saved["model"])
    optimizer = getattr(torch.optim, name)([
        {"params": [net.hidden.weight, net.output.weight]},
        {"params": [net.hidden.bias, net.norm.weight, net.norm.bias, net.output.bias]}], lr=1)
    state = saved["optimizer"]
    assert sorted(state["state"]) == [0, 1, 2, 3, 4, 5], state["state"].keys()
    assert state["param_groups"][0]["lr"] == 2 * state["param_groups"][1]["lr"]
    optimizer.load_state_dict(state)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    torch.nn.functional.mse_loss(net(numbers((4, 5), 3)), numbers((4, 3), 5)).backward()
    optimizer.step()
    here = net.state_dict()
    assert here.keys() == after.keys(), (here.keys(), after.keys())
    for key, value in after.items():
        torch.testing.assert_close(here[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{name}: {key}: {text}")
    moved = max((a - b).abs().max().item() for a, b in zip(before, net.parameters()))
    assert moved > 1e-3, f"{name}: the step changed no parameter by more than {moved}"
    print(f"{name}: goes on in Python")


for each in sys.argv[2:]:
    go_on(sys.argv[1], each)
