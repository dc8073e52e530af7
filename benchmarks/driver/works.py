"""The works: what is started for each, in turn, and what the variants are called."""

import os
import re
import tempfile

import launch
import memory
import pipelines
import sharding

MIB = 1 << 20


class Runner:
    """Runs works and gathers their samples. What cannot run here is in `skipped`, what went wrong in `failed`."""

    def __init__(self, launcher, samples, ranks, full, tiny):
        self.launcher = launcher
        self.samples = samples
        self.ranks = ranks
        self.full = full
        self.tiny = tiny
        self.skipped = {}
        self.failed = []

    def choose(self, tiny, quick, full):
        return tiny if self.tiny else full if self.full else quick

    @property
    def rounds(self):
        return self.choose(1, 3, 7)

    def skip(self, what, why):
        self.skipped.setdefault(why, [])
        if what not in self.skipped[why]:
            self.skipped[why].append(what)

    def in_turn(self, rounds, starts):
        """Each start is a function that returns samples; each round begins with another one."""
        broken = set()
        for turn in range(rounds):
            for i in range(len(starts)):
                start = starts[(i + turn) % len(starts)]
                if start in broken:
                    continue
                try:
                    for sample in start():
                        self.samples.add(sample["work"], sample["ranks"], sample["variant"], sample["unit"],
                                         sample["value"])
                except launch.Failed as error:
                    broken.add(start)
                    self.failed.append(str(error))

    def watched(self, work, ranks, start):
        """The peak of the memory of start(), which is a run of its own: looking at its memory takes a run's time."""
        samples, peak = self.launcher.watched(ranks, start)
        if peak is None:
            self.skip("peak memory", memory.WHY_NONE)
            return []
        ran = samples[:1] if samples[0]["value"] is not None else []
        return [{**sample, "work": f"{work}: peak memory", "value": peak, "unit": "MiB"} for sample in ran]

    def has_torch(self, what):
        if self.launcher.why_no_torch:
            self.skip(what, self.launcher.why_no_torch)
        return not self.launcher.why_no_torch

    def has_module(self, what):
        if not self.has_torch(what):
            return False
        why = self.launcher.why_no_module
        if why:
            self.skip(what, why)
        return not why

    def has_horovod(self):
        why = self.launcher.why_no_horovod
        if why:
            self.skip("Horovod", why)
        return not why

    # ---- collectives ----

    def collective(self, program, work, ranks, inner, flags=(), gloo=True, kept=True, horovod=False):
        """Ours beside raw MPI in one process, MPI where malloc keeps memory, gloo; inner: rounds in a process. Horovod is
        called from Python, and so is ours beside it."""
        flags = (*flags, "--rounds", inner)
        starts = [lambda: self.launcher.ranks(ranks, program, "--works", work, *flags)]
        if kept:
            starts.append(lambda: self.launcher.ranks(ranks, program, "--works", work, *flags, "--references-only"))
        if gloo and self.has_torch("gloo"):
            starts.append(lambda: self.launcher.torch(ranks, "gloo.py", work, *flags))
        if horovod and self.has_horovod():
            starts.append(lambda: self.launcher.horovod(ranks, "calls.py", work, *flags))
            if self.has_module("Sirtaki in Python"):
                starts.append(lambda: self.launcher.module(ranks, "calls.py", work, *flags))
        self.in_turn(self.rounds, starts)

    def latency(self):
        flags = self.choose(("--bytes", "4,1024"), (), ())
        self.collective("vectors", "latency", self.ranks, self.choose(3, 7, 11), flags, kept=False,
                        horovod=True)

    def allreduce(self):
        flags = self.choose(("--bytes", "1048576"), (), ())
        self.collective("vectors", "allreduce", self.ranks, self.choose(2, 5, 9), flags)

    def resnet50(self):
        self.collective("gradients", "resnet50", self.ranks, self.choose(1, 7, 11))

    def small(self):
        self.collective("gradients", "small", self.ranks, self.choose(1, 31, 31), kept=False, horovod=True)

    def half(self):
        self.collective("gradients", "half", self.ranks, self.choose(1, 5, 9), gloo=False, kept=False)

    def oversubscribed(self):
        size = self.choose(MIB, 16 * MIB, 16 * MIB)
        self.collective("vectors", "allreduce", 4, self.choose(2, 7, 11), ("--bytes", size))

    def waiting(self):
        seconds = self.choose(1, 10, 10)
        starts = [lambda: self.launcher.ranks(self.ranks, "waiting", "--seconds", seconds)]
        if self.full and self.has_torch("gloo"):
            starts.append(lambda: self.launcher.torch(self.ranks, "gloo.py", "waiting", "--seconds", seconds))
        self.in_turn(self.choose(1, 1, 3), starts)

    def observing(self):
        self.in_turn(self.rounds, [lambda: self.launcher.ranks(self.ranks, "observing", "--rounds",
                                                               self.choose(3, 21, 41))])

    # ---- training ----

    def mlp8(self):
        self.training("MLP of six 2048 x 2048, batch 8", "mlp", 8, steps=self.choose(2, 20, 40))

    def mlp64(self):
        self.training("MLP of six 2048 x 2048, batch 64", "mlp", 64, steps=self.choose(2, 12, 24))

    def resnet18(self):
        self.training("ResNet-18 at 112 x 112, batch 8", "resnet18", 8, steps=self.choose(1, 5, 12))

    def training(self, title, model, batch, steps):
        def start(ranks, variant, steps):
            """One run, whose samples are those of its steps."""
            arguments = ("--model", model, "--batch", batch, "--steps", steps)
            if variant == "ddp":
                return self.launcher.torch(ranks, "training.py", model, batch, steps)
            if variant == "python":
                return self.launcher.module(ranks, "training.py", model, batch, steps)
            if variant == "horovod":
                return self.launcher.horovod(ranks, "training.py", model, batch, steps)
            if variant == "plain":
                return self.launcher.alone("training", variant, *arguments)
            return self.launcher.ranks(ranks, "training", variant, *arguments)

        def timed(ranks, variant):
            return lambda: [{**sample, "work": f"{title}: {sample['work']}"} for sample in start(ranks, variant, steps)]

        def watched(ranks, variant):
            launched, few = None if variant == "plain" else ranks, self.choose(1, 4, 4)
            return lambda: self.watched(title, launched, lambda: start(ranks, variant, few))

        counts = self.choose((2,), (2, 4), (2, 4))
        others = [variant for variant, there in (("ddp", self.has_torch("DistributedDataParallel")),
                                                 ("horovod", self.has_horovod()),
                                                 ("python", self.has_module("Sirtaki in Python"))) if there]
        runs = [(1, variant) for variant in ("ours", "no-communication", "plain")]
        runs += [(ranks, variant) for ranks in counts for variant in ("ours", "no-communication", "loop", *others)]
        self.in_turn(self.choose(1, 2, 5), [timed(*run) for run in runs])
        self.in_turn(self.choose(1, 1, 3), [watched(*run) for run in runs])
        self.name_variants(title, counts)

    def name_variants(self, title, counts):
        """One rank's figures are references of several ranks' as well."""
        works = self.samples.works
        for kind in ("step", "peak memory"):
            work = f"{title}: {kind}"
            alone = works.get((work, 1), {})
            names = {"no-communication": "one rank alone", "plain": "one rank, plain LibTorch"}
            of_one = {names[variant]: alone[variant] for variant in names if variant in alone}
            for ranks in (1, *counts):
                variants = works.get((work, ranks), {})
                renamed = {"no-communication": "ranks without communication", "loop": "MPI_Allreduce of each parameter",
                           "ddp": "DistributedDataParallel, gloo"}
                own = {renamed.get(variant, variant): values for variant, values in variants.items()
                       if ranks > 1 or variant == "ours"}
                works[work, ranks] = own | of_one

    def sharded(self):
        ours = self.choose(["adam", "adam-sharded"], list(sharding.OURS), list(sharding.OURS))
        peers = self.choose(["ddp", "zero-overlap"], list(sharding.PEERS), list(sharding.PEERS))
        there = [*ours, *(peers if self.has_torch("peers of sharded optimizers") else [])]
        variants = [variant + ending for variant in there for ending in self.choose([""], sharding.ADAMS, sharding.ADAMS)]

        def start(ranks, variant, steps):
            if variant == "vectors":
                samples = self.launcher.ranks(ranks, "vectors", "--works", "latency", "--bytes", 4, "--rounds", 1)
                return [{**samples[0], "variant": variant}]
            if variant.startswith("adam"):
                return self.launcher.ranks(ranks, "training", variant, "--model", "mlp", "--batch", 8, "--steps", steps)
            return self.launcher.torch(ranks, "sharded.py", variant, 8, steps)

        def timed(ranks, variant):
            steps = self.choose(1, 10, 20)
            return lambda: [{**sample, "work": f"{sharding.TITLE}: {sharding.STEP}"} for sample in start(ranks, variant, steps)]

        def watched(ranks, variant):
            few = self.choose(1, 4, 4)
            return lambda: [{**sample, "value": sample["value"] * ranks}  # of all together
                            for sample in self.watched(sharding.TITLE, ranks, lambda: start(ranks, variant, few))]

        counts = self.choose((2,), (2, 4), (2, 4))
        empty = sharding.EMPTY if len(there) > len(ours) else sharding.EMPTY[:1]
        seen = (*self.choose(variants[1:3], variants, variants), *empty)
        self.in_turn(self.choose(1, 3, 5), [timed(ranks, variant) for ranks in counts for variant in variants])
        self.in_turn(self.choose(1, 1, 3), [watched(ranks, variant) for ranks in counts for variant in seen])
        for ranks in counts:
            sharding.compare(self.samples.works, ranks)

    def pipeline(self):
        steps = self.choose(1, 12, 24)
        batch, ranks = pipelines.BATCH, pipelines.RANKS

        def peer(kind):
            return lambda: [pipelines.named(sample, pipelines.PEERS)
                            for sample in self.launcher.torch(ranks, "pipeline.py", kind, batch, steps)]

        def module():
            return [pipelines.named(sample, {}) for sample in self.launcher.module(ranks, "pipeline.py", batch, steps)]

        starts = [lambda: [pipelines.named(sample, pipelines.OURS)
                           for sample in self.launcher.ranks(ranks, "pipelining", "--batch", batch, "--rounds", steps)]]
        if self.has_torch("pipelines of torch.distributed"):
            starts += [peer(kind) for kind in pipelines.PEERS]
            if self.has_module("a pipeline in Python"):
                starts.append(module)
        self.in_turn(self.rounds, starts)
        pipelines.compare(self.samples.works)
        self.in_turn(1, [lambda schedule=schedule: self.launcher.ranks(
            ranks, "pipelining", "--peak", schedule, "--batch", self.choose(32, 2048, 2048), "--micro-batches", 16)
                         for schedule in ("1f1b", "gpipe")])

    def sharded_hosts(self):
        steps = self.choose(1, 6, 12)
        program = self.launcher.program("training")

        def started(variant):
            try:
                samples = self.launcher.run([*self.launcher.on_hosts(2, 2, self.choose(10000, 1000, 1000)), program, variant,
                                             "--model", "mlp", "--batch", "8", "--steps", str(steps)])
            except launch.Skipped as reason:
                self.skip("sharded optimizers on two hosts with 1 Gbit links", str(reason))
                return []
            return [made for sample in samples for made in sharding.on_hosts(sample)]

        variants = ("adam", *self.choose(["adam-gradients"], sharding.ON_HOSTS, sharding.ON_HOSTS))
        self.in_turn(self.choose(1, 3, 5), [lambda variant=variant: started(variant) for variant in variants])

    def checkpoint(self):
        """What 4 ranks save 2 ranks load and save again, and 4 ranks load that."""
        rounds = self.choose(1, 5, 9)
        peers = {"fsdp2": "torch.distributed.checkpoint, FSDP2", "ddp": "torch.distributed.checkpoint, DistributedDataParallel"}

        def started(variant):
            def one(ranks, load, save):
                if variant in peers:
                    return self.launcher.torch(ranks, "checkpoint.py", variant, rounds, load or "-", save or "-")
                return self.launcher.ranks(ranks, "checkpoint", "--rounds", rounds, "--load", load, "--save", save)

            with tempfile.TemporaryDirectory(dir=self.launcher.scratch.name) as folder:
                first, second = os.path.join(folder, "a"), os.path.join(folder, "b")
                os.mkdir(first)
                os.mkdir(second)
                samples = [*one(4, "", first), *one(2, first, second), *one(4, second, "")]
            return [{**sample, "work": f"MLP with Adam in shards: {sample['work']}",
                     "variant": peers.get(sample["variant"], sample["variant"])} for sample in samples]

        variants = ["ours", *(peers if self.has_torch("torch.distributed.checkpoint") else ())]
        self.in_turn(self.choose(1, 3, 3), [lambda variant=variant: started(variant) for variant in variants])

    # ---- what needs no ranks, or more hosts ----

    def control(self):
        sizes = self.choose("16,256", "16,256,4096,65536", "16,256,4096,65536")
        self.in_turn(1, [lambda: self.launcher.alone("control_plane", "--ranks", sizes, "--tensors", 16)])

    def hosts(self):
        size = self.choose(MIB, 64 * MIB, 64 * MIB)
        vectors = (self.launcher.program("vectors"), "--works", "allreduce", "--bytes", str(size), "--rounds", "3")

        def started(hosts, ranks):
            try:
                samples = self.launcher.run([*self.launcher.on_hosts(hosts, ranks, 1000), *vectors])
            except launch.Skipped as reason:
                self.skip(f"{hosts} x {ranks} ranks over 1 Gbit links", str(reason))
                return []
            for sample in samples:
                sample["work"] += f", {hosts} hosts, 1 Gbit"
            return [sample for sample in samples if "memcpy" not in sample["variant"]]

        shapes = self.choose([(2, 2)], [(2, 2), (3, 1), (3, 2)], [(2, 2), (3, 1), (3, 2)])
        self.in_turn(self.choose(1, 2, 3), [lambda shape=shape: started(*shape) for shape in shapes])

    def powersgd(self):
        if not self.has_module("PowerSGD"):
            return

        def started():
            try:
                return self.launcher.module_on_hosts(2, 100, "low_rank.py", self.choose(1, 4, 8))
            except launch.Skipped as reason:
                self.skip("PowerSGD on two hosts with 100 Mbit links", str(reason))
                return []

        self.in_turn(self.choose(1, 1, 3), [started])

    def elastic(self):
        """Each start is a job of its own, to which one thing happens."""
        systems = {"ours": [self.launcher.program("elastic")]}
        if self.has_module("elastic jobs in Python"):
            systems["python"] = self.launcher.python_script(launch.PYTHON, "elastic.py", "sirtaki.torch")
        if self.has_torch("torchrun and torchft"):
            for system in ("torchrun", "torchft"):
                systems[system] = self.launcher.python_script(launch.REFERENCE, f"elastic_{system}.py")
        if self.has_horovod():
            systems["horovod"] = self.launcher.horovod_script("elastic.py")

        def started(system, fault):
            try:
                return self.launcher.elastic(system, fault, systems[system])
            except launch.Skipped as reason:
                self.skip(f"an elastic job of {system}", str(reason))
                return []

        faults = self.choose(["kill"], ["kill", "host", "link", "stop", "join"], ["kill", "host", "link", "stop", "join"])
        starts = [lambda system=system, fault=fault: started(system, fault) for fault in faults for system in systems]
        self.in_turn(self.choose(1, 3, 7), starts)

    # ---- on GPUs ----

    def on_gpus(self, work, turns, program, flags, reference, arguments):
        """A program beside a reference over torch.distributed, each on 1 and 2 ranks, also where these share a GPU."""
        try:
            self.launcher.alone(program, "--look", "yes")
        except launch.Skipped as reason:
            self.skip(work, str(reason))
            return
        has_reference = self.has_torch(reference)
        if has_reference and self.launcher.why_no_torch_gpu:
            self.skip(reference, self.launcher.why_no_torch_gpu)
            has_reference = False
        for ranks in (1, 2):
            starts = [lambda: self.launcher.ranks(ranks, program, *flags)]
            if has_reference:
                starts.append(lambda: self.launcher.torch(ranks, f"{program}.py", *arguments))
            self.in_turn(turns, starts)

    def gpu_resnet50(self):
        batch, side = self.choose(2, 64, 64), self.choose(64, 224, 224)
        steps, rounds = self.choose(2, 20, 20), self.choose(1, 5, 9)
        self.on_gpus("gpu_resnet50", self.rounds, "gpu_training",
                     ("--batch", batch, "--side", side, "--steps", steps, "--rounds", rounds),
                     "DistributedDataParallel over NCCL", (batch, side, steps, rounds))

    def gpu_vectors(self):
        works = "all-reduce,all-gather,reduce-scatter,broadcast"
        most = self.choose(10, 30, 30)
        sizes = ",".join(str(1 << power) for power in (2, 6, 10, 14, 18, 20, 22, 24, 26, 28, 30) if power <= most)
        rounds = self.choose(1, 5, 9)
        self.on_gpus("gpu_vectors", 1, "gpu_vectors", ("--works", works, "--bytes", sizes, "--rounds", rounds),
                     "torch.distributed over NCCL", (works, sizes, rounds))

    def gpu_pack(self):
        def started():
            try:
                return self.launcher.alone("gpu_pack", "--rounds", self.choose(1, 11, 21))
            except launch.Skipped as reason:
                self.skip("gpu_pack", str(reason))
                return []

        self.in_turn(1, [started])

    def kernels(self):
        self.in_turn(1, [lambda: self.launcher.alone("kernels")])

    def submission(self):
        if self.has_module("submission"):
            self.in_turn(self.rounds, [lambda: self.launcher.module(self.ranks, "submission.py", self.choose(3, 31, 101))])

    def wrapper(self):
        self.in_turn(1, [lambda: self.launcher.alone("single_rank_step")])

    def recompute(self):
        title = "transformer of 12 blocks, width 384, 8 x 256 tokens"
        shape = self.choose(("--blocks", 2, "--batch", 1, "--length", 8), (), ())

        def timed(variant):
            return lambda: [{**sample, "work": f"{title}: step"}
                            for sample in self.launcher.alone("recomputing", variant, *shape)]

        def watched(variant):
            return lambda: self.watched(title, None, lambda: self.launcher.alone("recomputing", variant, *shape, "--steps", 1))

        variants = ("ours", "plain")
        self.in_turn(self.rounds, [timed(variant) for variant in variants])
        self.in_turn(self.choose(1, 1, 3), [watched(variant) for variant in variants])

    def tensor_parallel(self):
        title = "MLP of 4 blocks of 512 x 2048 x 512, batch 256, split over 2 ranks"
        shape = self.choose(("--blocks", 1, "--batch", 2, "--rounds", 1), (), ("--rounds", 31))
        self.in_turn(self.rounds, [lambda: [{**sample, "work": f"{title}: step"}
                                            for sample in self.launcher.ranks(2, "tensor_parallel", *shape)]])


TABLE = ("latency", "allreduce", "resnet50", "small", "oversubscribed", "waiting", "mlp8", "mlp64", "resnet18", "hosts",
         "control", "gpu_resnet50", "gpu_pack", "gpu_vectors")
OTHERS = ("checkpoint", "elastic", "half", "kernels", "observing", "pipeline", "powersgd", "recompute", "sharded", "sharded_hosts", "submission",
          "tensor_parallel", "wrapper")


def why_unknown(name):
    if name in TABLE + OTHERS:
        return None
    close = [known for known in TABLE + OTHERS if re.sub(r"\W", "", name.lower()) in known]
    hint = f"; {close[0]} is meant?" if close else ""
    return f"no work is called '{name}'{hint} There are: {' '.join(TABLE)}; by name also {' '.join(OTHERS)}"
