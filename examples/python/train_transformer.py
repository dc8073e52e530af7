"""Trains a small GPT, letter by letter, on as many ranks as are started:

    sirtakirun -np 2 python train_transformer.py
    sirtakirun -np 2 python train_transformer.py --shard optimizer   AdamW's state once, not on each rank
    sirtakirun -np 2 python train_transformer.py --recompute         memory for activations of one block
    sirtakirun -np 4 python train_transformer.py --tensor-parallel 2 each layer on two ranks, and two of those
    sirtakirun -np 4 python train_transformer.py --tensor-parallel 2 --pipeline 2
                                                                     two stages, each layer on two ranks

The text, the net and the flags are those of ../train_transformer.cc. What makes the program distributed is explained in
train_digits.py.
"""

import argparse
import math
import os
import sys
import time

import torch

import sirtaki.torch as hvd
from training import check_agreed, choose_device, count, digest, rate, save, warmup_cosine
from transformer import BYTES, GPT, HEAD_WIDTH, loss_of, pipeline_of
from transformer_text import Writer

LETTERS = 200000  # of the text
SHARDS = {"none": None, "optimizer": "optimizer", "gradients": "gradients"}  # what --shard takes


def parse_settings():
    parser = argparse.ArgumentParser(description="Trains a small GPT on the letters of made-up sentences.", allow_abbrev=False)
    parser.add_argument("--epochs", type=count(1), default=4, help="passes over the training text (4)")
    parser.add_argument("--steps", type=count(0), default=0, help="ends an epoch after N steps (0: all of the text)")
    parser.add_argument("--batch-size", type=count(1), default=16, help="windows of text in a batch of one rank (16)")
    parser.add_argument("--context", type=count(1, 4096), default=64, help="letters in a window (64)")
    parser.add_argument("--layers", type=count(1, 1000), default=2, help="blocks of the transformer (2)")
    parser.add_argument("--width", type=count(HEAD_WIDTH, 32768), default=128,
                        help=f"numbers for each letter, a multiple of {HEAD_WIDTH} (128)")
    parser.add_argument("--lr", type=rate, default=0.002,
                        help="highest learning rate of one rank; grows with the root of the ranks (0.002)")
    parser.add_argument("--shard", choices=SHARDS, default="none",
                        help="what is kept once for all ranks in place of once on each: nothing, AdamW's state, or the "
                             "gradients as well (none)")
    parser.add_argument("--tensor-parallel", type=count(1, BYTES), default=1,
                        help="ranks that share each layer, which see the same windows (1)")
    parser.add_argument("--pipeline", type=count(1, 1000), default=1,
                        help="stages of a pipeline, each on a rank of its own, or on ranks that share its layers (1)")
    parser.add_argument("--micro-batches", type=count(1, 1000), default=4,
                        help="parts of a batch that are in the pipeline at the same time (4)")
    parser.add_argument("--recompute", action="store_true",
                        help="a block runs again in the backward pass in place of being remembered")
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="cpu",
                        help="auto: cuda if every rank has a GPU of its own (cpu)")
    parser.add_argument("--seed", type=count(0), default=1, help="of the order and the initial weights (1)")
    parser.add_argument("--checkpoint", metavar="DIR", help="saves the run in this folder after every epoch")
    parser.add_argument("--resume", action="store_true", help="goes on with what --checkpoint has saved")
    parser.add_argument("--stop-after", type=count(0), default=0, help="ends after so many epochs (0: never)")
    settings = parser.parse_args()
    if settings.width % HEAD_WIDTH:
        parser.error(f"--width takes a multiple of {HEAD_WIDTH}, not '{settings.width}'")
    if settings.tensor_parallel > 1 and settings.shard == "gradients":
        parser.error("--shard gradients takes no --tensor-parallel: shards of parts cannot be clipped")
    if settings.tensor_parallel > 1 and settings.checkpoint:
        parser.error("--checkpoint takes no --tensor-parallel: each rank has parts of the model")
    if settings.pipeline > 1 and settings.shard == "gradients":
        parser.error("--shard gradients takes no --pipeline: the first and the last stage have one matrix, whose gradient counts once")
    if settings.pipeline > 1 and settings.checkpoint:
        parser.error("--checkpoint takes no --pipeline: a checkpoint has one model for all ranks")
    if settings.pipeline > 1 and settings.batch_size % settings.micro_batches:
        parser.error(f"--micro-batches takes a number that divides the batch of {settings.batch_size} windows, not "
                     f"'{settings.micro_batches}'")
    if settings.resume and not settings.checkpoint:
        parser.error("--resume needs --checkpoint DIR, where it finds the run to go on with")
    return settings


def unigram_entropy(text):
    """What a guess costs that knows how often each letter comes, and nothing else."""
    counts = torch.bincount(text).double()
    shares = counts[counts > 0] / counts.sum()
    return -(shares * shares.log()).sum().item()


def validation_loss(net, windows, settings, mesh):
    """Each rank tests its share of the windows. A pipeline leaves out those at the end that are too few for its micro-batches."""
    share = windows[mesh.coordinate("data")::mesh.size("data")]
    if settings.pipeline > 1:
        share = share[:len(share) - len(share) % settings.micro_batches]
    with torch.no_grad():
        total = sum(float(loss_of(net, batch, train=False)) * len(batch) for batch in share.split(settings.batch_size) if len(batch))
    return hvd.metric_average(total / max(len(share), 1), weight=float(len(share)), name="validation loss")


def load(file, gpt, optimizer, scheduler):
    """Gives all ranks what rank 0 finds in the file; returns how many epochs are done."""
    saved = torch.load(file) if hvd.rank() == 0 and os.path.exists(file) else None
    if saved is not None:
        gpt.load_state_dict(saved["gpt"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    scheduler.load_state_dict(hvd.broadcast_object(scheduler.state_dict(), root_rank=0))
    epoch = hvd.broadcast_object(saved["epoch"] if saved else 0, root_rank=0)
    if hvd.rank() == 0:
        print(f"resumed after epoch {epoch}" if epoch else "no checkpoint yet: from the beginning", flush=True)
    return epoch


def train(settings):
    device = choose_device(settings.device)
    ranks = hvd.size()
    for flag, value in (("--tensor-parallel", settings.tensor_parallel), ("--pipeline", settings.pipeline)):
        if ranks % value:
            sys.exit(f"train_transformer: {flag} takes a number that divides the {ranks} ranks, not '{value}'")
        ranks //= value
    mesh = hvd.mesh({"data": -1, "pipe": settings.pipeline, "tensor": settings.tensor_parallel})
    alike = mesh.set("data")  # ranks that have the same parts of layers
    replicas = mesh.size("data")
    text = torch.tensor(list(Writer().text(LETTERS).encode()), device=device)
    training, validation_text = text[:LETTERS // 10 * 9], text[LETTERS // 10 * 9:]
    # A window is `context` letters and the one after them, which begins the next window.
    windows, validation = (part.unfold(0, settings.context + 1, settings.context) for part in (training, validation_text))
    sampler = torch.utils.data.distributed.DistributedSampler(
        windows, num_replicas=replicas, rank=mesh.coordinate("data"), seed=settings.seed, drop_last=True)
    steps = len(sampler) // settings.batch_size
    if steps == 0:
        sys.exit(f"train_transformer: the text is too short for a batch of {settings.batch_size} windows on each of "
                 f"{replicas} ranks")
    steps = min(steps, settings.steps or steps)

    torch.manual_seed(settings.seed)  # all ranks draw the same layers, of which each keeps its part
    net = GPT(settings, mesh.set("tensor")).to(device)
    averages = {"process_set": alike}
    if settings.pipeline > 1:
        net = pipeline_of(net, settings, mesh)
        averages = net.optimizer_options()
    # AdamW pulls matrices towards zero, and leaves biases and norms alone. More ranks make a larger batch; with Adam the
    # learning rate grows with the root of it.
    groups = [{"params": [p for p in net.parameters() if p.dim() == 2], "weight_decay": 0.1},
              {"params": [p for p in net.parameters() if p.dim() != 2], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, settings.lr * math.sqrt(replicas), betas=(0.9, 0.95))
    optimizer = hvd.DistributedOptimizer(adamw, net.named_parameters(), shard=SHARDS[settings.shard], **averages)
    all_steps = settings.epochs * steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(all_steps // 10, all_steps, rise=10))
    file = os.path.join(settings.checkpoint, "transformer.pt") if settings.checkpoint else None
    first = load(file, net, optimizer, scheduler) if settings.resume else 0
    hvd.broadcast_parameters(net, alike.ranks[0], process_set=alike)
    hvd.broadcast_optimizer_state(optimizer, alike.ranks[0], process_set=alike)

    last = min(settings.epochs, first + settings.stop_after) if settings.stop_after else settings.epochs
    test_loss = 0.0 if first < last else validation_loss(net, validation, settings, mesh)
    for epoch in range(first, last):
        sampler.set_epoch(epoch)
        order = torch.tensor(list(sampler), device=device)
        begin = time.perf_counter()
        loss_sum = torch.zeros((), device=device)  # on the device: nobody waits for it
        for rows in order.split(settings.batch_size)[:steps]:
            optimizer.zero_grad()
            loss_sum += loss_of(net, windows[rows], train=True)
            if settings.pipeline > 1:
                net.clip_grad_norm_(optimizer, 1.0)
            else:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
        loss = hvd.metric_average(loss_sum.item() / steps, name="loss")
        milliseconds = 1000 * (time.perf_counter() - begin) / steps
        test_loss = validation_loss(net, validation, settings, mesh)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:3d}/{settings.epochs}: loss {loss:.4f}, validation loss {test_loss:.4f}, "
                  f"{milliseconds:.1f} ms a step", flush=True)
        if file:
            state = optimizer.consolidated_state_dict(root_rank=0)  # by all ranks: each may have a shard of it
            save(file, gpt=net.state_dict(), optimizer=state, scheduler=scheduler.state_dict(), epoch=epoch + 1)
    hvd.check_parameters(net, process_set=alike)  # raises if a bit differs between the ranks
    if hvd.rank() == 0:
        print(f"parameters identical on all ranks, digest {digest(net):016x}")
        print(f"validation loss: {test_loss:.6f}; by the letters' frequencies alone: "
              f"{unigram_entropy(validation_text.cpu()):.6f}", flush=True)


if __name__ == "__main__":
    arguments = parse_settings()
    hvd.init()  # joins the ranks that sirtakirun or mpirun has started
    check_agreed(arguments)
    train(arguments)
    hvd.shutdown()
