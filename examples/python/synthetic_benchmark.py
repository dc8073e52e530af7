"""Times training steps on made-up images:

    sirtakirun -np 4 python synthetic_benchmark.py --model resnet50 --batch-size 32
    sirtakirun -np 2 python synthetic_benchmark.py --model mlp --no-cuda

The flags are those of Horovod's synthetic benchmark; the models are written by hand, so that only torch is needed.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

import sirtaki.torch as hvd
from resnet import resnet


# ---- models ----

def mlp(side):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
                         nn.Linear(1024, 1000))


MODELS = {"resnet18": lambda side: resnet([2, 2, 2, 2], deep=False),
          "resnet34": lambda side: resnet([3, 4, 6, 3], deep=False),
          "resnet50": lambda side: resnet([3, 4, 6, 3], deep=True),
          "mlp": mlp}


# ---- the benchmark ----

def at_least_one(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"it is {value}, and must be 1 or more")
    return value


def parse():
    parser = argparse.ArgumentParser(description="Training steps on made-up images.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--batch-size", type=at_least_one, default=32, help="images of a rank")
    parser.add_argument("--image-size", type=at_least_one, default=224, help="pixels on each side")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="that are not measured")
    parser.add_argument("--num-batches-per-iter", type=at_least_one, default=10, help="measured together")
    parser.add_argument("--num-iters", type=at_least_one, default=10, help="how many measurements")
    parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel as float16 between hosts")
    parser.add_argument("--use-adasum", action="store_true", help="combine the ranks' steps by Adasum")
    parser.add_argument("--no-cuda", action="store_true", help="on the CPU, also where there is a GPU")
    return parser.parse_args()


def main():
    arguments = parse()
    hvd.init()
    cuda = not arguments.no_cuda and torch.cuda.is_available()
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True

    model = MODELS[arguments.model](arguments.image_size).to(device)
    # Adasum needs the learning rate of one rank.
    scale = 1 if arguments.use_adasum else hvd.size()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01 * scale), named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if arguments.use_adasum else hvd.Average)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    images = torch.randn(arguments.batch_size, 3, arguments.image_size, arguments.image_size, device=device)
    classes = torch.randint(1000, (arguments.batch_size,), device=device)

    def steps(number):
        for _ in range(number):
            optimizer.zero_grad()
            F.cross_entropy(model(images), classes).backward()
            optimizer.step()
        if cuda:
            torch.cuda.synchronize()

    def say(text):
        if hvd.rank() == 0:
            print(text, flush=True)

    unit = "GPU" if cuda else "CPU"
    say(f"Model: {arguments.model}\nBatch size: {arguments.batch_size}\nNumber of {unit}s: {hvd.size()}")
    steps(arguments.num_warmup_batches)
    speeds = []
    for i in range(arguments.num_iters):
        begin = time.perf_counter()
        steps(arguments.num_batches_per_iter)
        speeds.append(arguments.batch_size * arguments.num_batches_per_iter / (time.perf_counter() - begin))
        say(f"Iter #{i}: {speeds[-1]:.1f} img/sec per {unit}")
    mean, spread = statistics.mean(speeds), 1.96 * statistics.pstdev(speeds)
    say(f"Img/sec per {unit}: {mean:.1f} +-{spread:.1f}")
    say(f"Total img/sec on {hvd.size()} {unit}(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
