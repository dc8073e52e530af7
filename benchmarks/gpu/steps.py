"""The steps of hour.py: what is run in each part, and which programs that needs."""

import glob
import os
import re
import sys
import time
from dataclasses import dataclass, field

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# What is run, by its place in a build and in a bundle, and the target of CMake's that makes it.
PROGRAMS = {
    "tests/sirtaki_gpu_tests": "sirtaki_gpu_tests",
    "tests/sirtaki_gpu_mpi_tests": "sirtaki_gpu_mpi_tests",
    "benchmarks/gpu_pack": "benchmark_gpu_pack",
    "benchmarks/gpu_nccl": "benchmark_gpu_nccl",
    "benchmarks/gpu_vectors": "benchmark_gpu_vectors",
    "benchmarks/gpu_training": "benchmark_gpu_training",
    "examples/train_resnet": "train_resnet",
    "examples/train_digits": "train_digits",
}


@dataclass
class Step:
    name: str
    limit: int
    command: list
    needs: tuple = ()   # of PROGRAMS, or "torch"
    tool: str = ""      # without which it is not begun
    environment: dict = field(default_factory=dict)
    suffix: str = ""    # of its works' names, where another step has the same
    after: str = ""     # begun only if this step failed or hung


def parts(machine, scratch):
    """The steps of each part, in the order of what is most worth knowing."""
    ranks = lambda count, *command: ["bash", os.path.join(TOP, "tests", "support", "mpirun.sh"), str(count), *command]  # noqa: E731
    at = machine.program
    this = [sys.executable, "-B", os.path.join(TOP, "benchmarks", "gpu", "hour.py"), "--bundle", machine.bundle]
    reference = lambda name, count, *arguments: ranks(  # noqa: E731
        count, sys.executable, "-W", "ignore", os.path.join(TOP, "benchmarks", "reference", name),
        os.path.join(scratch, f"meeting-{time.monotonic_ns()}"), *map(str, arguments))
    single, several = "tests/sirtaki_gpu_tests", "tests/sirtaki_gpu_mpi_tests"
    pack, nccl, vectors, training = (f"benchmarks/gpu_{name}" for name in ("pack", "nccl", "vectors", "training"))
    resnet, digits = "examples/train_resnet", "examples/train_digits"

    def tests(count, **more):
        return [Step(f"test-{name}-{count}", 120, ranks(count, at(several), f"--gtest_filter={suites}"), (several,), **more)
                for name, suites, counts in mpi_tests() if count in counts]

    def figures(count, steps=20, rounds=3):
        arguments = ("--batch", "64", "--side", "224", "--steps", str(steps), "--rounds", str(rounds))
        return [Step(f"resnet50-{count}", 150, ranks(count, at(training), *arguments), (training,)),
                Step(f"resnet50-ddp-{count}", 150, reference("gpu_training.py", count, 64, 224, steps, rounds), ("torch",))]

    def vectors_of(work):
        sizes = ",".join(str(1 << power) for power in (2, 6, 10, 14, 18, 20, 22, 24, 26, 28, 30))
        for count in (2, 1):
            yield Step(f"vectors-{work}-{count}", 90, ranks(count, at(vectors), "--works", work, "--bytes", sizes), (vectors,))
            yield Step(f"vectors-torch-{work}-{count}", 90, reference("gpu_vectors.py", count, work, sizes, 5), ("torch",))

    # Ranks that share a GPU say to NCCL, and so to the examples, that they are of different hosts.
    shared = ["bash", "-c", 'NCCL_HOSTID=rank$OMPI_COMM_WORLD_RANK NCCL_SOCKET_IFNAME=lo exec "$@"', "shared"]
    few_images = ("--device", "cuda", "--dtype", "bfloat16", "--images", "1920", "--epochs", "1")
    data = ("--device", "cuda", "--data", os.path.join(TOP, "examples", "data", "digits.csv"), "--epochs", "5")
    return {
        "1": [
            Step("machine", 60, [*this, "--machine"]),
            Step("libraries", 30, [*this, "--libraries"]),
            Step("two-ranks-by-torch-alone", 90, reference("gpu_vectors.py", 2, "all-reduce", 4 << 20, 3), ("torch",)),
            Step("test-device", 90, [at(single)], (single,)),
            *tests(1),
            Step("test-train_resnet", 180, ["bash", os.path.join(TOP, "tests", "examples", "train_resnet_gpu_test.sh"), at(resnet)],
                 (resnet,)),
            Step("memcheck", 120, ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "1",
                                   at(single)], (single,),
                 "compute-sanitizer"),
            Step("pack", 90, [at(pack), "--rounds", "21"], (pack,)),
            Step("pack-counters", 90, ["ncu", "--clock-control", "none", "--set", "full", "-k", "regex:sirtaki", "-c", "6", at(pack),
                                       "--rounds", "1"], (pack,), "ncu"),
        ],
        "2": [
            *tests(2, environment={"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,REG,COLL", "SIRTAKI_LOG_LEVEL": "info"}),
            *(Step(f"test-collectives_mpi_test-2-{variable}", 90,
                   ranks(2, at(several), "--gtest_filter=GpuCollectivesTest.*"), (several,),
                   environment={variable: value}, after="test-collectives_mpi_test-2")
              for variable, value in (("CUDA_LAUNCH_BLOCKING", "1"), ("CUDA_MODULE_LOADING", "EAGER"))),
            *(Step(f"probe-{probe}", 150 if probe == "abort" else 75, [at(nccl), "--probes", probe, "--limit", "30"], (nccl,))
              for probe in ("abort", "calls", "stuck", "window", "averages", "kill")),
            *(step for work in ("all-reduce", "all-gather", "reduce-scatter", "broadcast") for step in vectors_of(work)),
            # The ranks count the seed on alike, and make their communicators again each time.
            Step("test-collectives-20-times", 120,
                 ranks(2, at(several), "--gtest_filter=GpuCollectivesTest.*", "--gtest_shuffle", "--gtest_random_seed=1",
                       "--gtest_repeat=20"), (several,)),
        ],
        "3": [
            *figures(1), *figures(2), *figures(2), *figures(1),
            Step("timeline", 60, ranks(2, at(training), "--steps", "3", "--rounds", "1"), (training,),
                 environment={"SIRTAKI_TIMELINE": os.path.join(scratch, "timeline.json"), "SIRTAKI_LOG_LEVEL": "info"},
                 suffix=", with a timeline"),
            *(Step(f"buckets-{size}", 90, ranks(2, at(training), "--steps", "10", "--rounds", "2"), (training,),
                   environment={"SIRTAKI_BUCKET_BYTES": size}, suffix=f", buckets of {size}") for size in ("4M", "25M", "64M")),
            Step("example-digits-1", 60, [at(digits), *data], (digits,)),
            Step("example-digits-2", 60, ranks(2, *shared, at(digits), *data), (digits,)),
            Step("example-resnet-1", 60, [at(resnet), *few_images], (resnet,)),
            Step("example-resnet-2", 90, ranks(2, *shared, at(resnet), *few_images), (resnet,)),
        ],
    }


def mpi_tests():
    """(name, filter of its suites, rank counts) of each file of tests/gpu/torch, as CMake registers them."""
    found = []
    for path in sorted(glob.glob(os.path.join(TOP, "tests", "gpu", "torch", "*_test.cc"))):
        with open(path) as file:
            text = file.read()
        suites = sorted(set(re.findall(r"^TEST(?:_[FP])?\((\w+)", text, re.M)))
        counts = re.search(r"^// RANKS:((?: +\d+)+)", text).group(1)
        found.append((os.path.basename(path)[:-3], ":".join(f"{suite}.*" for suite in suites), [int(n) for n in counts.split()]))
    return found
