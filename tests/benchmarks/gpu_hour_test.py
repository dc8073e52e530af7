"""The kit for a machine with a GPU: how its steps end, what it writes of them, and that it asks the bundle for nothing more than
bundle.sh puts there."""

import json
import os
import subprocess
import sys
import tarfile
import tempfile

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(TOP, "benchmarks", "gpu"))

import hour  # noqa: E402
from steps import Step, mpi_tests  # noqa: E402

hour.PATIENCE = 0.5
SKIPS = """[ RUN      ] GpuTest.A
device_test.cc:38: Skipped
no driver
[  PASSED  ] {passed} tests.
[  SKIPPED ] 1 test, listed below:
"""
SAMPLE = '{{"work": "step", "ranks": 2, "variant": "{}", "value": {}, "unit": "ms"}}'


def say(*lines, code=0):
    """A command that writes these lines."""
    return ["bash", "-c", 'code=$1; shift; printf "%s\\n" "$@"; exit "$code"', "say", str(code), *lines]


def run(folder, steps, why_no_gpu="none", driver_error="", seconds=600, part="1"):
    machine.why_no_gpu, machine.driver_error = why_no_gpu, driver_error
    with tempfile.TemporaryDirectory() as scratch:
        states = hour.run_part(part, steps, machine, folder, scratch, seconds)
    with open(os.path.join(folder, f"part{part}.json")) as file:
        result = json.load(file)
    with open(os.path.join(folder, f"part{part}.md")) as file:
        page = file.read()
    assert states == [step["state"] for step in result["steps"]]
    return states, {step["name"]: step for step in result["steps"]}, page


def logs(folder, part="1"):
    with tarfile.open(os.path.join(folder, f"part{part}-logs.tar.gz")) as tar:
        return {name: tar.extractfile(name).read().decode() for name in tar.getnames()}


def how_steps_end(folder):
    states, steps, page = run(folder, [
        Step("good", 20, say(SAMPLE.format("ours", 2), SAMPLE.format("DDP", 3), "{no json")),
        Step("good", 20, say(SAMPLE.format("ours", 4))),
        Step("named", 20, say(SAMPLE.format("ours", 9)), suffix=", with a | timeline"),
        Step("fact", 20, say('{"fact": "nvcc", "value": "13"}', '{"probe": "abort", "answer": "hung"}')),
        Step("bad", 20, say("x.cc:3: Error: no memory", "later", code=3)),
        Step("a test", 20, say("x.cc:3: Failure", "Failed", "no memory", "[  FAILED  ] A.B", "[  FAILED  ] A.C (2 ms)", "[  FAILED  ] A.B", code=1)),
        Step("under mpirun", 20, say("[rank 1] gone", "-" * 74, "prterun: a process exited", "-" * 74, code=1)),
        Step("none", 20, say("LibTorch finds no GPU", code=77)),
        Step("example", 20, say("rank 0 cannot compute on a GPU: no driver", code=2)),
        Step("skips", 20, say(*SKIPS.format(passed=0).splitlines())),
        Step("partly", 20, say(*SKIPS.format(passed=4).splitlines())),
        Step("no test", 20, say("[==========] Running 0 tests from 0 test suites.", "[  PASSED  ] 0 tests.")),
        Step("no such program", 20, ["/no/such/program"]),
        Step("no tool", 20, say("never"), tool="no-such-tool"),
        Step("no library", 20, say("never"), needs=("tests/sirtaki_gpu_tests",)),
        Step("once more", 20, say("a second look"), after="bad"),
        Step("not once more", 20, say("never"), after="named"),
    ])
    assert states == ["ok", "ok", "ok", "ok", "FAILED", "FAILED", "FAILED", "NO GPU", "NO GPU", "NO GPU", "ok",
                      "FAILED", "FAILED", "SKIP", "SKIP", "ok"], states
    assert steps["bad"]["says"] == "exit code 3: x.cc:3: Error: no memory", steps["bad"]
    assert steps["a test"]["says"] == "exit code 1: A.B, A.C; the first: no memory", steps["a test"]
    assert steps["under mpirun"]["says"] == "exit code 1: [rank 1] gone", steps["under mpirun"]
    assert steps["none"]["says"] == "LibTorch finds no GPU" and steps["skips"]["says"] == "no driver"
    assert steps["partly"]["says"] == "1 skipped: no driver"
    assert steps["no test"]["says"] == "no test ran", steps["no test"]
    assert "no-such-tool" in steps["no tool"]["says"] and "sirtaki_gpu_tests" in steps["no library"]["says"]
    assert "| step | 2 | 3 ms | DDP: 3 ms (1.00) |" in page, page
    assert "| step, with a \\| timeline | 2 | 9 ms |  |" in page, page
    assert "| nvcc | 13 |" in page and "| probe abort | hung |" in page, page
    assert logs(folder)["good.log"].count('"ours"') == 4, "the command and the output of both"   # each is in both
    # Where there is a GPU, what is skipped has failed, and what lacks a library, but not what lacks a tool or time.
    states, steps, _ = run(folder, [Step("none", 20, say("LibTorch finds no GPU", code=77)),
                                    Step("skips", 20, say(*SKIPS.format(passed=0).splitlines())),
                                    Step("no tool", 20, say("never"), tool="no-such-tool"),
                                    Step("no library", 20, say("never"), needs=("tests/sirtaki_gpu_tests",))], why_no_gpu="")
    assert states == ["FAILED", "FAILED", "SKIP", "FAILED"], states
    assert steps["skips"]["says"].endswith("although there is a GPU: no driver"), steps
    assert "sirtaki_gpu_tests" in steps["no library"]["says"], steps
    states, steps, page = run(folder, [Step("none", 20, say("no GPU", code=77))], why_no_gpu="", driver_error="cuInit gives 999")
    assert states == ["FAILED"] and steps["none"]["says"].endswith("CUDA's driver: cuInit gives 999"), steps
    assert "GPU: cuInit gives 999." in page, page


def a_gpu_that_the_driver_does_not_take(folder):
    """The machine has its device, and no driver that works."""
    find, ask = hour.glob.glob, hour.ASK_FOR_GPU
    hour.ASK_FOR_GPU = "raise SystemExit('cuInit gives 999')"
    for devices, told in (["/dev/nvidia0"], ("", "cuInit gives 999")), ([], ("cuInit gives 999", "")):
        hour.glob.glob = lambda pattern, found=devices: found if pattern.startswith("/dev/nvidia") else find(pattern)
        asked = hour.Machine(folder)
        assert (asked.why_no_gpu, asked.driver_error) == told, vars(asked)
        assert (asked.environment.get("SIRTAKI_TEST_GPU") == "required") == bool(devices)
    hour.glob.glob, hour.ASK_FOR_GPU = find, ask


def a_step_that_hangs(folder):
    """It has a child in a group of its own, and neither minds SIGTERM."""
    hangs = 'trap "" TERM; echo begun; set -m; sleep 98761 & sleep 98762 & wait; wait'
    states, steps, _ = run(folder, [Step("hangs", 4, ["bash", "-c", hangs]), Step("next", 20, say("next"))], part="2")
    assert states == ["HUNG", "ok"] and "4 s" in steps["hangs"]["says"], steps
    log = logs(folder, "2")["hangs.log"]
    assert "begun" in log and log.count("=== stacks of process") == 3, log
    assert "sleep 98761" in log and "sleep 98762" in log and "thread " in log, log
    left = subprocess.run(["pgrep", "-f", "^sleep 9876[123]$"], capture_output=True, text=True).stdout.split()
    assert not left, left



def a_command_that_hangs():
    """A debugger may be a script, whose child holds the output."""
    said, good = hour.output_of(["bash", "-c", "echo begun; sleep 98763; echo never"], 2)
    assert not good and said.splitlines() == ["begun", "no end in 2 s"], said
    assert hour.output_of(["bash", "-c", "echo good"]) == ("good", True)
    assert hour.output_of(["bash", "-c", "echo bad; exit 1"]) == ("bad", False)
    assert not hour.output_of(["/no/such/program"])[1]


def when_time_is_over(folder):
    states, steps, _ = run(folder, [Step("late", 60, say("never")), Step("short", 9, say("in time"))], seconds=15)
    assert states == ["SKIP", "ok"] and "no time left" in steps["late"]["says"], steps


def under_mps(folder):
    """The steps find the MPS that was started, which is ended whatever happens to them."""
    control = os.path.join(folder, hour.MPS)
    told = os.path.join(folder, "told")
    with open(control, "w") as file:
        file.write(f'#!/bin/sh\n[ "$1" = -d ] || read -r word\necho "$1$word $CUDA_MPS_PIPE_DIRECTORY" >>{told}\n')
    os.chmod(control, 0o755)
    before = dict(machine.environment)
    machine.environment["PATH"] = folder + os.pathsep + machine.environment["PATH"]
    try:
        with hour.mps(machine, folder):
            _, good = hour.output_of(["sh", "-c", 'test -d "$CUDA_MPS_PIPE_DIRECTORY"'], environment=machine.environment)
            assert good
            raise KeyError("a step's")
    except KeyError:
        pass
    finally:
        machine.environment = before
    pipe = os.path.join(folder, "mps-pipe")
    assert hour.lines_of(told) == [f"-d {pipe}", f"quit {pipe}"], hour.lines_of(told)


def what_the_bundle_has():
    for steps in hour.parts(machine, "/scratch").values():
        names = [step.name for step in steps]
        for step in steps:
            assert step.limit <= 300 and step.needs == tuple(n for n in step.needs if n in hour.PROGRAMS or n == "torch"), step
            used = {program for program in hour.PROGRAMS if machine.program(program) in step.command}
            assert used == set(step.needs) - {"torch"}, (step.name, used)
            assert not step.after or step.after in names, step
            assert not step.tool or step.tool in step.command and step.tool in hour.TOOLS, step
    names = {step.name for steps in hour.parts(machine, "/scratch").values() for step in steps}
    for stem, suites, counts in mpi_tests():
        assert suites and {f"test-{stem}-{count}" for count in counts if count <= 2} <= names, (stem, counts)
    assert len(mpi_tests()) >= 3


with tempfile.TemporaryDirectory() as folder:
    machine = hour.Machine(folder)
    how_steps_end(folder)
    a_gpu_that_the_driver_does_not_take(folder)
    a_command_that_hangs()
    a_step_that_hangs(folder)
    when_time_is_over(folder)
    under_mps(folder)
    what_the_bundle_has()
