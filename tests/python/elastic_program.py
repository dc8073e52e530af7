"""Trains a small net in an elastic job, until a file says that it is enough. elastic_job.py starts it, and ends some of
its processes.

    elastic_program.py FILE              trains
    elastic_program.py FILE GENERATIONS  makes that many generations by itself, and looks at what they leave behind
    elastic_program.py --again STEPS     trains by plain torch what a job has trained in these steps, and compares the losses
"""

import json
import os
import signal
import sys
import time

import torch

import sirtaki.torch as hvd
from sirtaki.torch._library import _C
from sirtaki.torch._shards import is_cut

SAMPLES = 60
BATCH = 2
STEPS_OF_COMMIT = 10  # where step() is called after each
STEPS_OF_COPY = 4  # of shards
# Rank 0 stays this long after an error that ends the job: sirtakirun has to end it, and starts nobody meanwhile.
LINGERS = 600.0
FIRST_GENERATION = "ELASTIC_FIRST_GENERATION"  # a variable; cloudpickle would send the main module's own ones along
PAUSE = 0.01  # between steps, so that some are left when a change comes


def say(*words):
    print(*words, flush=True)


def digest(model):
    return hash(tuple(float(x) for p in model.parameters() for x in p.detach().flatten()))


def make_net():
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def make_counter():
    """Its weight goes down by 1 with each step of an optimizer, as no other state of a rank can tell."""
    counter = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(counter.weight)
    return counter


class Picky:
    """A part of the state that the first worker which comes later, and gets that far, cannot take."""

    def __init__(self, enough):
        self.marker = enough + ".picky"

    def __deepcopy__(self, _):
        return self

    def __reduce__(self):
        return taken, (self.marker,)


def taken(marker):
    if os.environ[FIRST_GENERATION] != "1" and not os.path.exists(marker):
        with open(marker, "x"):
            raise ModuleNotFoundError("No module named 'picky'")
    return Picky(marker.removesuffix(".picky"))


def is_first_to_come(enough):
    """Whether this is the first worker that comes later."""
    if os.environ[FIRST_GENERATION] == "1" or os.path.exists(enough + ".other"):
        return False
    with open(enough + ".other", "x"):
        return True


def make_data():
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def call_early(model, optimizer):
    """Makes calls before run(), which are refused."""
    calls = {"broadcast_parameters": lambda: hvd.broadcast_parameters(model.state_dict(), root_rank=0),
             "broadcast_optimizer_state": lambda: hvd.broadcast_optimizer_state(optimizer, root_rank=0),
             "broadcast_object": lambda: hvd.broadcast_object("text"),
             "allreduce_async": lambda: hvd.allreduce_async(torch.ones(2)),
             "barrier": hvd.barrier,
             "join": hvd.join,
             "add_process_set": lambda: hvd.add_process_set([0])}
    for name, call in calls.items():
        try:
            call()
            say(f"early {name}: not refused")
        except hvd.InvalidArgumentError as error:
            say(f"early {name}: {error}")


def main(enough, mode=""):
    """The mode "lost before run": a rank is lost when it has made what run() sets up; "early calls": calls that run() has to be
    begun for are made before; "fails": every time; "last fails", "last returns": the last rank, after its first step; "last is farthest": it alone keeps that step; "steps":
    step() is called in the place of most commits; "newcomer fails": of those that come later the first has another optimizer, and the second cannot take the state; "sharded" and what follows it: see train_sharded(); a number: that
    many generations are made."""
    generations = int(mode) if mode.isdigit() else 0
    say("pid", os.getpid())
    hvd.init()
    say("device", hvd.local_rank())
    os.environ[FIRST_GENERATION] = str(_C.elastic_generation())
    if mode.startswith("sharded"):
        return train_sharded(enough, mode)
    torch.manual_seed(hvd.rank())  # only sync() makes the nets equal
    imported = set(sys.modules)
    model = make_net()
    counter = make_counter()
    local = make_optimizer(model)
    late = [name for name in sys.modules if name.startswith("torch.") and name not in imported]
    assert len(late) < 10, f"the others wait while this rank imports {len(late)} modules of torch: {late[:10]} …"
    local.add_param_group({"params": counter.parameters(), "lr": 1.0, "momentum": 0.0})
    steps = "steps of another program" if mode == "newcomer fails" and is_first_to_come(enough) else "steps that were made"
    optimizer = hvd.DistributedOptimizer(local, [*model.named_parameters(), (steps, counter.weight)])
    inputs, targets = make_data()
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES))
    state = hvd.elastic.TorchState(model=model, counter=counter, optimizer=optimizer, sampler=sampler,
                                   epoch=0, trained=[], filled=0, steps=0,
                                   **({"picky": Picky(enough)} if mode == "newcomer fails" else {}))
    leaves = Leaves(generations)

    if mode == "lost before run" and hvd.rank() == 1 and _C.elastic_generation() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "early calls":
        call_early(model, optimizer)

    @hvd.elastic.run
    def train(state):
        if mode == "fails":
            raise hvd.HorovodInternalError("on purpose")
        generation = _C.elastic_generation()
        say("begins", hvd.rank(), hvd.size(), state.epoch, state.steps, generation, digest(model))
        check_counter(counter, state.steps)
        first = True
        while not hvd.broadcast_object(os.path.exists(enough)):
            left = SAMPLES - len(set(state.trained))
            if left > 0:
                state.filled = -left % hvd.size()
            indices = list(sampler)
            for at in range(0, len(indices), BATCH):
                ours = indices[at:at + BATCH]
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs[ours]), targets[ours])
                everyone = hvd.allgather_object((ours, loss.item()))
                (loss + counter.weight.sum()).backward()
                optimizer.step()
                sampler.record_batch(at // BATCH, len(ours))
                state.trained = state.trained + sum((theirs for theirs, _ in everyone), [])
                state.steps += 1
                if first:
                    say("goes-on", hvd.rank(), hvd.size(), state.steps, generation, digest(model))
                    first = False
                say("step", json.dumps([state.steps, generation, everyone]))
                if mode == "last is farthest" and generation == 1:
                    if hvd.rank() == hvd.size() - 1:
                        state.step()
                    raise hvd.HorovodInternalError("on purpose")
                if mode == "last fails" and generation == 1 and hvd.rank() == hvd.size() - 1:
                    raise KeyError("no such sample")
                if mode == "last returns" and generation == 1 and hvd.rank() == hvd.size() - 1:
                    return state.steps
                time.sleep(0 if generations else PAUSE)
                if mode == "steps":
                    state.step()
                if mode != "steps" or state.steps % STEPS_OF_COMMIT == 0:
                    state.commit()
                leaves.check(generation)
            check(state.trained, state.filled)
            state.epoch += 1
            state.trained = []
            sampler.set_epoch(state.epoch)
            state.commit()
            if hvd.rank() == 0:
                say("epoch", state.epoch, hvd.size())
        return state.steps

    steps = train(state)
    check_counter(counter, steps)
    try:
        train(state)
    except hvd.InvalidArgumentError as error:
        say("again:", error)
    say("ends", hvd.rank(), hvd.size(), steps, digest(model))


class Exact(torch.nn.Module):
    """A net whose gradient is exact, in whatever order the ranks' are added up: small whole numbers. So one process that makes
    the same steps has the same bits."""

    LARGE = 1000  # elements: several ranks have parts of them
    RATE = 0.01

    def __init__(self):
        super().__init__()
        self.large = torch.nn.Parameter(torch.zeros(self.LARGE))
        self.small = torch.nn.Parameter(torch.zeros(5))

    @staticmethod
    def gradients(parameter):
        """By sample."""
        return ((torch.arange(parameter.numel()) + 3 * torch.arange(SAMPLES).view(-1, 1)) % 7 - 3).float()

    def forward(self, samples):
        return sum((parameter * self.gradients(parameter)[samples].sum(0)).sum() for parameter in self.parameters())


def check_exact(exact, optimizer, history):
    """The sharded optimizer and its parameters are, to the bit, what one process makes of the steps with these samples."""
    alone = Exact()
    adam = torch.optim.Adam(alone.parameters(), Exact.RATE)
    of_sample = [Exact.gradients(parameter) for parameter in alone.parameters()]
    for samples in history:
        for parameter, gradients in zip(alone.parameters(), of_sample):
            parameter.grad = gradients[samples].sum(0)
        adam.step()
    cut = is_cut(optimizer)
    looked = 0
    for parameter, wanted in zip(exact.parameters(), alone.parameters()):
        assert torch.equal(parameter, wanted), f"a parameter after {len(history)} steps"
        shard, begin = optimizer._sirtaki_shards.mine.get(parameter, (None, 0)) if cut else (parameter, 0)
        if not history or shard is None:
            continue
        assert not cut or shard.numel() < Exact.LARGE or hvd.local_size() == 1, "a parameter is not cut"
        now, then = optimizer.state[shard], adam.state[wanted]
        assert now["step"] == then["step"], f"{now['step']} steps of Adam in the place of {then['step']}"
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(now[key].view(-1), then[key].view(-1)[begin:begin + shard.numel()]), f"{key} after {len(history)} steps"
        looked += shard.numel()
    assert not history or looked > 0, "no state was looked at"
    say("exact", len(history), looked)


def lose_rank_1():
    """Rank 1 is lost when all ranks have come here."""
    hvd.barrier()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.barrier()


def do_by_hand(mode, state, optimizer):
    """What the modes of train_sharded() do between two steps."""
    now = (_C.elastic_generation(), len(state.history))
    if mode == "sharded by hand":
        if now == (1, STEPS_OF_COPY + 1):  # shards are kept as they were a step ago
            raise hvd.HostsUpdatedInterrupt()
        if now == (2, STEPS_OF_COPY + 3):
            state.sync()
            lose_rank_1()
    elif mode == "sharded saves" and now == (1, STEPS_OF_COPY - 1):
        state.save()
        lose_rank_1()
    elif mode == "sharded adds" and now == (1, STEPS_OF_COPY + 1):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        lose_rank_1()


def train_sharded(enough, mode):
    """The modes "sharded", "sharded gradients", "sharded by host": each host has all shards; "sharded alone": without copies;
    "sharded by hand": the program calls restore() and sync(), and raises HostsUpdatedInterrupt; "sharded saves" and "sharded adds":
    a rank is lost after what no copies go with."""
    exact = Exact()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(exact.parameters(), Exact.RATE), exact.named_parameters(), op=hvd.Sum,
                                         shard="gradients" if mode == "sharded gradients" else "optimizer",
                                         shard_over="host" if mode == "sharded by host" else "all")
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES))
    state = hvd.elastic.TorchState(model=exact, optimizer=optimizer, sampler=sampler, epoch=0, history=[])
    state.copy_shards = None if mode == "sharded alone" else STEPS_OF_COPY
    if mode == "sharded by hand":
        state.register_reset_callbacks([lambda: state.restore() if _C.elastic_generation() > 2 else None])

    @hvd.elastic.run
    def train(state):
        say("begins", hvd.rank(), hvd.size(), state.epoch, len(state.history), _C.elastic_generation(), digest(exact))
        check_exact(exact, optimizer, state.history)
        assert state.history or state._steps.place == 0, state._steps.place
        kept = None  # bytes of copies, when step() has made some
        while not hvd.broadcast_object(os.path.exists(enough)):
            indices = list(sampler)
            for at in range(0, len(indices), BATCH):
                ours = indices[at:at + BATCH]
                everyone = hvd.allgather_object(ours)
                optimizer.zero_grad()
                exact(ours).backward()
                optimizer.step()
                sampler.record_batch(at // BATCH, len(ours))
                state.history = state.history + [sum(everyone, [])]
                time.sleep(PAUSE)
                do_by_hand(mode, state, optimizer)
                state.step()
                if state.copy_shards and state._steps_since_copy == 0:
                    kept = state._copies.bytes_kept()
                if len(state.history) % STEPS_OF_COMMIT == 0:
                    state.commit()
                    assert kept is None or kept <= 1.2 * state._copies.bytes_kept(), "step() has left two copies"
                    if mode == "sharded by hand":
                        optimizer.zero_grad()
                        exact(ours).backward()
                        optimizer.step()
                        state.restore()
                        check_exact(exact, optimizer, state.history)
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()
            if hvd.rank() == 0:
                say("epoch", state.epoch, hvd.size())

    try:
        train(state)
    except hvd.InvalidArgumentError:
        if hvd.rank() == 0:
            time.sleep(LINGERS)
        raise
    check_exact(exact, optimizer, state.history)
    say("ends", hvd.rank(), hvd.size(), len(state.history), digest(exact))


def check_counter(counter, steps):
    made = -counter.weight.item()
    assert abs(made - steps) < 0.5, f"the parameters have gone through {made} steps, the state tells of {steps}"


def check(trained, filled):
    """Every sample of the epoch was trained, and once. Only as many are there twice as have filled up the ranks' shares when those
    that were left were dealt out last."""
    missing = set(range(SAMPLES)) - set(trained)
    assert not missing, f"samples {sorted(missing)} were not trained"
    twice = len(trained) - SAMPLES
    assert twice == filled, f"{twice} samples were trained twice, and {filled} have filled up shares"


class Leaves:
    """Makes generations, and looks at what they leave in this process: the least of some that follow each other, since an
    allocator gives back what is free when it likes."""

    WARM = 20  # generations, until all is there that stays
    LOOKS = 10  # generations that are looked at

    def __init__(self, generations):
        self._generations = generations
        self._before = []
        self._after = []

    def check(self, generation):
        if generation >= self._generations:
            if self._before and self._after:
                self._compare()
            return
        if self.WARM <= generation < self.WARM + self.LOOKS:
            self._before.append(self._look())
        if generation >= self._generations - self.LOOKS:
            self._after.append(self._look())
        if hvd.rank() == generation % hvd.size():
            raise hvd.HorovodInternalError("aborted: another generation is wanted")

    def _compare(self):
        before, after = (map(min, zip(*looks)) for looks in (self._before, self._after))
        self._before = []
        for what, least, most, excuse in zip(("descriptors", "threads", "mappings", "KiB"), before, after, (0, 0, 4, 1024)):
            say("leaves", most - least, what, "after", self._generations - self.WARM, "generations:", least, "to", most)
            assert most <= least + excuse, f"{most - least} {what} are left of {self._generations - self.WARM} generations"

    @staticmethod
    def _look():
        with open("/proc/self/maps") as file:
            mappings = len(file.readlines())
        with open("/proc/self/status") as file:
            status = dict(line.split(":", 1) for line in file)
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mappings, int(status["VmRSS"].split()[0])


def train_again(path):
    """The steps of a job, each with the samples and the loss of each of its ranks, as one process makes them: the mean of the
    gradients of the ranks' samples, whose number changes where that of the job did."""
    with open(path) as file:
        steps = json.load(file)
    torch.manual_seed(0)  # rank 0 of the first generation has had it
    model = make_net()
    optimizer = make_optimizer(model)
    inputs, targets = make_data()
    worst = 0.0
    for number, everyone in steps:
        optimizer.zero_grad()
        for ours, told in everyone:
            loss = torch.nn.functional.mse_loss(model(inputs[ours]), targets[ours])
            (loss / len(everyone)).backward()
            worst = max(worst, abs(loss.item() - told) / max(abs(told), 1e-2))
            assert worst < 1e-2, f"step {number}: the loss of samples {ours} was {told}, and is {loss.item()} in one process"
        optimizer.step()
    say(f"{len(steps)} steps again: the losses differ by {worst:.1e} at most")


if sys.argv[1] == "--again":
    train_again(sys.argv[2])
else:
    main(*sys.argv[1:])
