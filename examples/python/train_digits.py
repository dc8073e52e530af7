"""Trains a small convolutional net on handwritten digits, on as many ranks as are started:

    python train_digits.py                                  one process
    sirtakirun -np 2 python train_digits.py                 two ranks that learn together
    sirtakirun -np 2 python train_digits.py --device cuda   the same on GPUs
    sirtakirun --elastic -np 4 python train_digits.py       goes on when ranks are lost or come

The data, the net and the flags are those of ../train_digits.cc, besides --powersgd-start. The five steps that
make a PyTorch program distributed are marked below.
"""

import argparse
import math
import os
import random
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import sirtaki.torch as hvd
from powersgd import PowerSGD
from training import check_agreed, choose_device, count, digest, rate, save, warmup_cosine

SIDE, CLASSES, MAX_PIXEL = 8, 10, 16
DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "digits.csv")
LEARNING_RATES = {"sgd": 0.02, "adam": 0.002, "adamw": 0.002, "rmsprop": 0.001, "adagrad": 0.01}


# ---- settings ----

def parse_settings():
    parser = argparse.ArgumentParser(description="Trains a convolutional net on handwritten digits.", allow_abbrev=False)
    parser.add_argument("--epochs", type=count(1), default=15, help="passes over the training data (15)")
    parser.add_argument("--batch-size", type=count(1), default=32, help="samples in a batch of one rank (32)")
    parser.add_argument("--accumulate", type=count(1), default=1, help="batches whose gradients add up to one step (1)")
    parser.add_argument("--optimizer", choices=LEARNING_RATES, default="sgd")
    parser.add_argument("--lr", type=rate, default=0.0,
                        help="learning rate of one rank; multiplied by the number of ranks (depends on the optimizer)")
    parser.add_argument("--compression", choices=["none", "f16", "bf16"], default="none",
                        help="what gradients travel as between hosts (none)")
    parser.add_argument("--powersgd", type=count(0), default=0, metavar="RANK",
                        help="gradients travel as factors of this rank (0: whole)")
    parser.add_argument("--powersgd-start", type=count(0), metavar="STEPS",
                        help="steps before that with whole gradients (those in which the learning rate rises)")
    parser.add_argument("--uneven", choices=["pad", "drop"], default="drop",
                        help="samples that cannot be shared out evenly: pad repeats some, drop leaves some out (drop)")
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="cpu",
                        help="auto: cuda if every rank has a GPU of its own (cpu)")
    parser.add_argument("--seed", type=count(0), default=1, help="of the split, the shuffling and the weights (1)")
    parser.add_argument("--data", default=DATA, help="lines of 64 pixels (0..16) and a class (0..9), between commas")
    parser.add_argument("--checkpoint", metavar="DIR", help="saves the run in this folder after every epoch")
    parser.add_argument("--resume", action="store_true", help="goes on with what --checkpoint has saved")
    parser.add_argument("--stop-after", type=count(0), default=0, help="ends after so many epochs (0: never)")
    settings = parser.parse_args()
    if settings.resume and not settings.checkpoint:
        parser.error("--resume needs --checkpoint DIR, where it finds the run to go on with")
    if settings.powersgd and settings.compression != "none":
        parser.error("--powersgd compresses itself: leave out --compression")
    if hvd.elastic.is_elastic() and (settings.checkpoint or settings.powersgd or settings.stop_after
                                     or settings.device != "cpu" or settings.uneven != "drop"):
        parser.error("an elastic job takes no --checkpoint, --powersgd, --stop-after, --uneven pad, and no --device but cpu")
    return settings


# ---- data and model ----

def read_samples(path):
    samples = []
    try:
        file = open(path)
    except OSError as error:
        sys.exit(f"train_digits: --data {path}: {error.strerror}")
    with file:
        for number, line in enumerate(file, start=1):
            fields = line.strip().split(",")
            try:
                values = [int(field) for field in fields]
                if len(values) != SIDE * SIDE + 1 or not 0 <= values[-1] < CLASSES or not all(
                        0 <= pixel <= MAX_PIXEL for pixel in values[:-1]):
                    raise ValueError
            except ValueError:
                sys.exit(f"{path}:{number}: not {SIDE * SIDE} pixels from 0 to {MAX_PIXEL} and a class")
            samples.append((values[:-1], values[-1]))
    return samples


def as_tensors(samples):
    images = torch.tensor([pixels for pixels, _ in samples], dtype=torch.float32) / MAX_PIXEL
    return images.reshape(-1, 1, SIDE, SIDE), torch.tensor([digit for _, digit in samples])


def split(samples, seed):
    """A fifth of each class is held out for the test. The same split on every rank: it depends on the seed."""
    random.Random(seed).shuffle(samples)
    seen = [0] * CLASSES
    train, test = [], []
    for sample in samples:
        (test if seen[sample[1]] % 5 == 0 else train).append(sample)
        seen[sample[1]] += 1
    return as_tensors(train), as_tensors(test)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 24, 3, padding=1)
        self.conv2 = nn.Conv2d(24, 48, 3, padding=1)
        self.hidden = nn.Linear(48 * SIDE * SIDE // 4, 64)
        self.output = nn.Linear(64, CLASSES)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.output(F.relu(self.hidden(x.flatten(1))))


def compression_of(settings):
    return {"none": hvd.Compression.none, "f16": hvd.Compression.fp16, "bf16": hvd.Compression.bf16}[settings.compression]


def make_optimizer(settings, parameters, lr):
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=0.9)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop,
             "adagrad": torch.optim.Adagrad}
    return kinds[settings.optimizer](parameters, lr)


# ---- training ----

def test_accuracy(net, test, device):
    """Each rank tests its share of the samples; every sample is tested once, so shares may be uneven."""
    images, classes = (part[hvd.rank()::hvd.size()] for part in test)
    net.eval()
    with torch.no_grad():
        right = (net(images.to(device)).argmax(1).cpu() == classes).double().mean().item() if len(classes) else 0.0
    net.train()
    return hvd.metric_average(right, weight=float(len(classes)), name="test accuracy")


def load(file, net, optimizer, scheduler, hook):
    """Gives all ranks what rank 0 finds in the file; returns how many epochs are done."""
    saved = torch.load(file) if hvd.rank() == 0 and os.path.exists(file) else None
    if saved is not None:
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    scheduler.load_state_dict(hvd.broadcast_object(scheduler.state_dict(), root_rank=0))
    epoch = hvd.broadcast_object(saved["epoch"] if saved else 0, root_rank=0)
    if hook and epoch:
        hook.load_state_dict(saved["powersgd"] if saved else None)
    if hvd.rank() == 0:
        print(f"resumed after epoch {epoch}" if epoch else "no checkpoint yet: from the beginning", flush=True)
    return epoch


def train(settings):
    device = choose_device(settings.device)
    training, test = split(read_samples(settings.data), settings.seed)
    # Step 2: each rank takes its share of the data, a different one in each epoch. All must make equally many steps.
    sampler = torch.utils.data.distributed.DistributedSampler(
        torch.utils.data.TensorDataset(*training), num_replicas=hvd.size(), rank=hvd.rank(), seed=settings.seed,
        drop_last=settings.uneven == "drop")
    steps = math.ceil(len(sampler) / settings.batch_size) // settings.accumulate
    if steps == 0:
        sys.exit(f"train_digits: too few samples for {hvd.size()} ranks")
    if hvd.rank() == 0:
        print(f"{len(training[1])} training and {len(test[1])} test samples; {hvd.size()} "
              f"rank{'s' if hvd.size() > 1 else ''}, batches of {settings.batch_size} each", flush=True)
    torch.manual_seed(settings.seed)
    net = Net().to(device)

    # Step 3: more ranks make a larger batch, so the learning rate grows with the ranks.
    lr = (settings.lr or LEARNING_RATES[settings.optimizer]) * hvd.size()

    # Step 4: wrap the optimizer; its step() now averages the gradients of all ranks.
    rising = min(2, settings.epochs) * steps
    start = rising if settings.powersgd_start is None else settings.powersgd_start
    hook = PowerSGD(settings.powersgd, start, settings.seed) if settings.powersgd else None
    optimizer = hvd.DistributedOptimizer(make_optimizer(settings, net.parameters(), lr),
                                         named_parameters=net.named_parameters(),
                                         compression=compression_of(settings), communication_hook=hook,
                                         backward_passes_per_step=settings.accumulate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, warmup_cosine(rising, (settings.epochs + 1) * steps, hvd.size()))
    first = 0
    file = os.path.join(settings.checkpoint, "digits.pt") if settings.checkpoint else None
    if settings.resume:
        first = load(file, net, optimizer, scheduler, hook)

    # Step 5: start from the same weights everywhere.
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    last = min(settings.epochs, first + settings.stop_after) if settings.stop_after else settings.epochs
    accuracy = 0.0 if first < last else test_accuracy(net, test, device)
    seconds = 0.0
    for epoch in range(first, last):
        sampler.set_epoch(epoch)
        begin = time.perf_counter()
        loss_sum = run_epoch(net, optimizer, scheduler, training, list(sampler), settings, steps, device)
        seconds += time.perf_counter() - begin
        loss = hvd.metric_average(loss_sum / (steps * settings.accumulate), name="loss")
        accuracy = test_accuracy(net, test, device)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:3d}/{settings.epochs}: loss {loss:.4f}, test accuracy {100 * accuracy:.2f} %",
                  flush=True)
        if file:
            save(file, net=net.state_dict(), optimizer=optimizer.state_dict(), scheduler=scheduler.state_dict(),
                 powersgd=hook.state_dict() if hook else None, epoch=epoch + 1)
    hvd.check_parameters(net)  # raises if a bit differs between the ranks
    if hvd.rank() == 0:
        print(f"test accuracy: {100 * accuracy:.2f} %")
        if seconds:
            samples = min(len(sampler), steps * settings.accumulate * settings.batch_size)  # of a rank in an epoch
            print(f"speed: {(last - first) * hvd.size() * samples / seconds:.0f} samples per second")
        print(f"parameters identical on all ranks, digest {digest(net):016x}", flush=True)


def run_epoch(net, optimizer, scheduler, training, order, settings, steps, device):
    images, classes = training
    loss_sum = 0.0
    optimizer.zero_grad()
    for batch in range(steps * settings.accumulate):
        rows = order[batch * settings.batch_size:(batch + 1) * settings.batch_size]
        loss = F.cross_entropy(net(images[rows].to(device)), classes[rows].to(device))
        (loss / settings.accumulate).backward()  # each gradient is on its way as soon as it exists
        loss_sum += loss.item()
        if (batch + 1) % settings.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return loss_sum


def train_elastic(settings):
    """Trains in an elastic job. A rank may begin while the others train, and they do not make its collective calls:
    elastic.run() does what Step 5 does."""
    training, test = split(read_samples(settings.data), settings.seed)
    images, classes = training
    torch.manual_seed(settings.seed)
    net = Net()
    hvd.init()  # Step 1, behind all that can be done before: the others wait from here on.
    optimizer = hvd.DistributedOptimizer(make_optimizer(settings, net.parameters(), 1.0), net.named_parameters(),
                                         compression=compression_of(settings),
                                         backward_passes_per_step=settings.accumulate)
    sampler = hvd.elastic.ElasticSampler(classes, seed=settings.seed)
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer, sampler=sampler, epoch=0, accuracy=0.0)
    samples = settings.batch_size * settings.accumulate  # of one rank in a step

    @hvd.elastic.run
    def run(state):
        while state.epoch < settings.epochs:
            # Other ranks make steps of another size, and another number of them.
            steps = max(1, len(classes) // (samples * hvd.size()))
            lr = (settings.lr or LEARNING_RATES[settings.optimizer]) * hvd.size()
            factor = warmup_cosine(min(2, settings.epochs) * steps, (settings.epochs + 1) * steps, hvd.size())
            order = list(sampler)
            left = len(order) // samples
            loss_sum = 0.0
            for step in range(left):
                for group in optimizer.param_groups:
                    group["lr"] = lr * factor((state.epoch + 1) * steps - left + step)
                optimizer.zero_grad()
                for part in range(settings.accumulate):
                    first = step * samples + part * settings.batch_size
                    rows = order[first:first + settings.batch_size]
                    loss = F.cross_entropy(net(images[rows]), classes[rows])
                    (loss / settings.accumulate).backward()
                    loss_sum += loss.item() / settings.accumulate
                optimizer.step()
                sampler.record_batch(step, samples)
                state.step()
                if step % 10 == 0:
                    state.commit()
            loss = hvd.metric_average(loss_sum / max(1, left), name="loss")
            state.accuracy = test_accuracy(net, test, "cpu")
            if hvd.rank() == 0:
                print(f"epoch {state.epoch + 1:3d}/{settings.epochs}: loss {loss:.4f}, "
                      f"test accuracy {100 * state.accuracy:.2f} %", flush=True)
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()
        hvd.check_parameters(net)
        if hvd.rank() == 0:
            print(f"test accuracy: {100 * state.accuracy:.2f} %")
            print(f"parameters identical on all ranks, digest {digest(net):016x}", flush=True)

    run(state)


if __name__ == "__main__":
    arguments = parse_settings()
    if hvd.elastic.is_elastic():
        train_elastic(arguments)
    else:
        hvd.init()  # Step 1: join the ranks that sirtakirun or mpirun has started.
        check_agreed(arguments)
        train(arguments)
    hvd.shutdown()
