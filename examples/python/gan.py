"""Two models and two optimizers that take turns: a generator learns to place points on a ring.

    sirtakirun -np 2 python gan.py
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

import sirtaki.torch as hvd

NOISE = 4


def net(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
                         nn.Linear(64, outputs))


def ring(count):
    angles = torch.rand(count) * 2 * math.pi
    return torch.stack([angles.cos(), angles.sin()], 1)


def at_least_one(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"it is {value}, and must be 1 or more")
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=at_least_one, default=400)
    parser.add_argument("--batch-size", type=at_least_one, default=64)
    arguments = parser.parse_args()
    hvd.init()
    torch.manual_seed(1)
    generator, discriminator = net(NOISE, 2), net(2, 1)
    for model in (generator, discriminator):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    # Names tell the two apart in messages and in the timeline. A step of the discriminator has two backward(): one of
    # real points, one of made ones.
    of_generator = hvd.DistributedOptimizer(torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.9)),
                                            generator.named_parameters(), name="generator")
    of_discriminator = hvd.DistributedOptimizer(torch.optim.Adam(discriminator.parameters(), 1e-3, betas=(0.5, 0.9)),
                                                discriminator.named_parameters(), name="discriminator",
                                                backward_passes_per_step=2)
    hvd.seed_all(7)  # different points on every rank
    for _ in range(arguments.steps):
        made = generator(torch.randn(arguments.batch_size, NOISE))

        of_discriminator.zero_grad()
        F.softplus(-discriminator(ring(arguments.batch_size))).mean().backward()
        F.softplus(discriminator(made.detach())).mean().backward()
        of_discriminator.step()

        of_generator.zero_grad()
        # The loss reaches the discriminator too; nobody uses its gradients here, so they do not travel.
        with of_discriminator.no_sync():
            F.softplus(-discriminator(made)).mean().backward()
        of_generator.step()

    hvd.check_parameters(generator)
    hvd.check_parameters(discriminator)
    with torch.no_grad():
        radius = generator(torch.randn(1000, NOISE)).norm(dim=1).mean().item()
    radius = hvd.metric_average(radius, name="radius")
    if hvd.rank() == 0:
        print(f"points lie {radius:.2f} from the middle; those of the ring 1.00", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
