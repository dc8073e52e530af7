"""hour.py [--bundle FOLDER] [--out FOLDER] [--seconds N] [--limit N] [--mps] PART [STEP...]: runs a part of what is to be
seen on a GPU.

PART is 1, 2 or 3; STEPs are patterns of names, as 'probe-*', for a part of a part. FOLDER of the bundle is what bundle.sh made
(build/gpu), or a build of this machine's own. After each step FOLDER of the results ($OUT, or build/gpu-results) has
partN.json, partN.md and partN-logs.tar.gz. No step runs longer than its own limit, or than --limit, or when --seconds (520) are
over; writing the stacks of one that hangs takes up to a minute more. With --mps the ranks that share a GPU use it at the same
time, by CUDA's MPS, in place of taking turns.

A step ends as
  ok       and what it skipped, if it skipped some of its tests
  FAILED   also when no test ran; and where there is a GPU, when it skips, or a library is missing
  HUNG     it was over its limit; the log has the stacks of its processes, and they were ended
  SKIP     it was not begun: a tool is missing, or without a GPU a library, or there is no time left
  NO GPU   it was begun and said so, on a machine without one
The exit code is 1 if a step failed or hung.
"""

import argparse
import contextlib
import fnmatch
import glob
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time

from steps import PROGRAMS, TOP, parts

sys.path.insert(0, os.path.join(TOP, "benchmarks", "driver"))

import table  # noqa: E402

TOOLS = ("python3", "nvcc", "gcc", "g++", "cmake", "ninja", "mpirun", "nvidia-smi", "nsys", "ncu", "compute-sanitizer", "cuda-gdb",
         "gdb")
TOOL_FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute/*", "/usr/local/nvidia/bin")
MPS = "nvidia-cuda-mps-control"
SKIPPED = 77
WRONG_ARGUMENTS = 2
LOG_LIMIT = 4 << 20
STACKS_LIMIT = 60
PATIENCE = 5   # after SIGTERM
ASK_FOR_GPU = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
code, count = driver.cuInit(0), ctypes.c_int(0)
assert code == 0, f"cuInit gives {code}"
driver.cuDeviceGetCount(ctypes.byref(count))
assert count.value, "CUDA's driver sees no GPU"
"""
ASK_TORCH = """
import torch
nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else "not asked"
print(torch.__version__, torch.version.git_version[:12], "CUDA", torch.version.cuda, "NCCL", nccl, "GPUs", torch.cuda.device_count())
"""
ASK_LIBRARY = """
import ctypes, sys
library, version = ctypes.CDLL(sys.argv[1]), ctypes.c_int(0)
getattr(library, sys.argv[2])(ctypes.byref(version))
places = [line.split()[-1] for line in open("/proc/self/maps") if sys.argv[1].split(".")[0] + ".so" in line]
print(version.value, *places[:1])
"""


def output_of(command, limit=30, environment=None):
    """What a command prints, and whether it succeeded. Never raises; over its limit, the command and its children are ended."""
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        try:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                       start_new_session=True)
        except OSError as error:
            return str(error), False
        late = ""
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            late = f"\nno end in {limit:.0f} s"
            end_session(process.pid)
        file.seek(0)
        return (file.read().rstrip() + late).strip(), process.poll() == 0


class Machine:
    """What is here: the bundle, this Python's LibTorch, a GPU or why there is none, and the environment of the steps."""

    def __init__(self, bundle):
        self.bundle = os.path.abspath(bundle)
        torch = importlib.util.find_spec("torch")
        self.torch = torch.submodule_search_locations[0] if torch else None
        self.environment = self._environment()
        said, has_gpu = output_of([sys.executable, "-c", ASK_FOR_GPU], environment=self.environment)
        error = "" if has_gpu else said.splitlines()[-1] if said else "no reason given"
        has_gpu = has_gpu or bool(glob.glob("/dev/nvidia[0-9]*"))   # where the driver has an error, that is to be seen
        self.why_no_gpu, self.driver_error = ("", error) if has_gpu else (error, "")
        if has_gpu:
            self.environment["SIRTAKI_TEST_GPU"] = "required"
        self.missing = {program: self._missing(program) for program in PROGRAMS}
        self.missing["torch"] = [] if torch else ["this Python has none"]

    def _environment(self):
        environment = dict(os.environ)
        folders = [os.path.join(self.bundle, "lib"), os.path.join(self.bundle, "openmpi", "lib")]
        if self.torch:
            packages = os.path.dirname(self.torch)
            folders += [os.path.join(self.torch, "lib"), *glob.glob(os.path.join(packages, "nvidia", "*", "lib"))]
        folders += [*environment.get("LD_LIBRARY_PATH", "").split(os.pathsep), "/usr/local/cuda/lib64", "/usr/local/nvidia/lib64"]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(folder for folder in folders if os.path.isdir(folder))
        mpi = os.path.join(self.bundle, "openmpi")
        if os.path.isdir(mpi):
            environment |= {"OPAL_PREFIX": mpi, "MPIEXEC": os.path.join(mpi, "bin", "mpirun")}
            for path in glob.glob(os.path.join(mpi, "bin", "*")):
                os.chmod(path, 0o755)   # whatever the way here has made of it
        tools = [folder for pattern in TOOL_FOLDERS for folder in sorted(glob.glob(pattern))]
        environment["PATH"] = os.pathsep.join([environment.get("PATH", os.defpath), *tools])
        defaults = {"HOME": "/tmp", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1",
                    "NCCL_DEBUG": "WARN"}
        return {**defaults, **environment}

    def program(self, name):
        return os.path.join(self.bundle, name)

    def _missing(self, program):
        """The libraries that a program does not find here, or its own path."""
        path = self.program(program)
        if not os.path.exists(path):
            return [path]
        os.chmod(path, 0o755)
        said, _ = output_of(["ldd", path], environment=self.environment)
        return list(dict.fromkeys(line.split()[0] for line in said.splitlines() if "not found" in line))

    def tool(self, name):
        return shutil.which(name, path=self.environment["PATH"])


# ---- one step ----

def session(leader):
    """The processes of a session: mpirun gives its ranks groups of their own, but no session."""
    found = []
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path) as file:
                state, _, _, of = file.read().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == leader and state != "Z":
            found.append(int(path.split("/")[2]))
    return found


def write_stacks(leader, machine, log):
    """What each process of a session is at: by a debugger, or by what the kernel tells of its threads."""
    debugger = machine.tool("cuda-gdb") or machine.tool("gdb")
    until = time.monotonic() + STACKS_LIMIT
    for process in sorted(session(leader), reverse=True)[:12]:   # ranks before their mpirun
        try:
            with open(f"/proc/{process}/cmdline") as file:
                words = file.read().split("\0")
        except OSError:
            continue
        log.write(f"\n=== stacks of process {process}: {' '.join(words)[:300]}\n")
        for task in glob.glob(f"/proc/{process}/task/*"):
            waits = [output_of(["cat", f"{task}/{what}"])[0] for what in ("comm", "wchan")]
            log.write(f"thread {os.path.basename(task)} {' in '.join(waits)}\n")
        if os.path.basename(words[0]) in ("bash", "sh", "timeout"):
            continue
        left = until - time.monotonic()
        if debugger and left > 1:
            log.write(output_of([debugger, "-p", str(process), "-batch", "-nx", "-ex", "thread apply all bt 14"], left,
                                machine.environment)[0] + "\n")
        log.flush()


def end_session(leader):
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in session(leader):
            try:
                os.kill(process, number)
            except ProcessLookupError:
                pass
        until = time.monotonic() + PATIENCE
        while session(leader) and time.monotonic() < until:
            time.sleep(0.05)


def samples_of(text):
    """The lines of JSON in an output; what other programs write between them is no error."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                pass
    return found


def why_skipped(text):
    """The reason in a log, of GoogleTest's or a program's own."""
    reasons = re.findall(r": Skipped\n(.+)", text) or [line for line in text.splitlines() if re.search("GPU|cuda|CUDA", line)]
    lines = reasons or text.strip().splitlines() or ["no reason given"]
    return lines[-1].strip()


def verdict(code, text, machine):
    """How a step ended that ended by itself, and what is to be said of it."""
    passed, skipped = (sum(map(int, re.findall(rf"^\[  {word} +\] (\d+) test", text, re.M))) for word in ("PASSED", "SKIPPED"))
    refused = machine.why_no_gpu and code == WRONG_ARGUMENTS and "cannot compute on a GPU" in text   # an example's words
    if code == SKIPPED or refused or (code == 0 and skipped and not passed):
        if machine.why_no_gpu:
            return "NO GPU", why_skipped(text)
        error = machine.driver_error and f"; CUDA's driver: {machine.driver_error}"
        return "FAILED", f"skipped although there is a GPU: {why_skipped(text)}{error}"
    if code == 0 and not passed and re.search(r"^\[=+\] ", text, re.M):   # a head of GoogleTest's
        return "FAILED", "no test ran"
    if code == 0:
        return "ok", f"{skipped} skipped: {why_skipped(text)}" if skipped else ""
    tests = list(dict.fromkeys(re.findall(r"^\[  FAILED  \] (\w+\.\w+)", text, re.M)))
    if tests:
        first = re.search(r": Failure\n(?:Failed\n)?(.+)", text)
        return "FAILED", f"exit code {code}: {', '.join(tests)}" + (f"; the first: {first.group(1).strip()}" if first else "")
    own = re.split("^-{60,}$", text, maxsplit=1, flags=re.M)[0]   # before mpirun's words on it
    lines = [line for line in (own.strip() or text).splitlines() if line.strip()]
    told = [line for line in lines if re.search(r"FAILED|HANGS|[Ee]rror|Failure|not found", line)] or lines
    return "FAILED", f"exit code {code}: {told[-1].strip() if told else 'nothing was written'}"


def run_step(step, limit, machine, scratch):
    """The record of a step that is begun."""
    path = os.path.join(scratch, f"{step.name}.log")
    environment = {**machine.environment, "SIRTAKI_TEST_SECONDS": str(limit + 60), "SIRTAKI_TEST_WATCHDOG": str(limit + 60),
                   **step.environment}
    begin = time.monotonic()
    with open(path, "a") as log:
        log.write(f"$ {' '.join(f'{k}={v}' for k, v in step.environment.items())} {' '.join(step.command)}\n")
        log.flush()
        at = log.tell()
        try:
            process = subprocess.Popen(step.command, cwd=TOP, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                                       stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            return {"state": "FAILED", "says": str(error), "seconds": 0.0, "samples": []}
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - begin
        if code is None:
            write_stacks(process.pid, machine, log)
        end_session(process.pid)   # what the step has left behind as well
        process.poll()
    with open(path, errors="replace") as log:
        log.seek(at)
        text = log.read()
    state, says = ("HUNG", f"not over after {limit} s; its log has the stacks") if code is None else verdict(
        code, text, machine)
    samples = samples_of(text)
    for sample in samples:
        if "work" in sample:
            sample["work"] += step.suffix
    return {"state": state, "says": says, "seconds": round(seconds, 1), "samples": samples}


def why_not_begun(step, machine, left):
    """How a step ends that cannot begin, and why; None if it can."""
    lacking = [f"{os.path.basename(program)}: {', '.join(machine.missing[program])}" for program in step.needs
               if machine.missing[program]]
    if lacking:
        return "SKIP" if machine.why_no_gpu else "FAILED", "missing for " + "; ".join(lacking)
    if step.tool and not machine.tool(step.tool):
        return "SKIP", f"there is no {step.tool} here"
    if left < min(step.limit, 20):
        return "SKIP", "no time left; name the step in another call"
    return None


# ---- results ----

def cell(text):
    return str(text).replace("|", "\\|").replace("\n", " ")


def page(result):
    """The results as Markdown."""
    lines = [f"# Part {result['part']} on {result['host']}, {result['began']}", "",
             f"GPU: {'none: ' + result['why_no_gpu'] if result['why_no_gpu'] else result['driver_error'] or 'yes'}. "
             f"Bundle: {'; '.join(result['bundle']) or 'without made-of.txt'}", "",
             "| step | ended | seconds | |", "|---|---|---|---|"]
    lines += [f"| {step['name']} | {step['state']} | {step['seconds']} | {cell(step['says'])} |" for step in result["steps"]]
    found = [sample for step in result["steps"] for sample in step["samples"]]
    facts = [(s["fact"], s["value"]) for s in found if "fact" in s]
    facts += [(f"probe {s['probe']}", s["answer"]) for s in found if "probe" in s]
    if facts:
        lines += ["", "| what | |", "|---|---|", *(f"| {cell(what)} | {cell(value)} |" for what, value in facts)]
    samples = table.Samples()
    for s in found:
        if "work" in s:
            samples.add(s["work"], s["ranks"], s["variant"], s["unit"], s["value"])
    if samples.works:
        lines += ["", "| work | ranks | ours | others, and how much better ours is |", "|---|---|---|---|"]
    for (work, ranks), variants in samples.works.items():
        medians = {variant: samples.median(work, ranks, variant) for variant in variants}
        ours = medians.pop(table.OURS, None)
        others = []
        for variant, (value, unit) in medians.items():
            ratio = table.ratio(unit, ours[0], value) if ours else None
            others.append(f"{variant}: {value:.4g} {unit}" + (f" ({ratio:.2f})" if ratio else ""))
        lines.append(f"| {cell(work)} | {ranks} | {'%.4g %s' % ours if ours else ''} | {cell('; '.join(others))} |")
    return "\n".join(lines) + "\n"


def clip(path):
    """Leaves the beginning and the end of a log that is too long to be brought back."""
    if os.path.getsize(path) <= LOG_LIMIT:
        return
    with open(path, "rb") as file:
        head = file.read(LOG_LIMIT // 4)
        file.seek(-LOG_LIMIT // 2, os.SEEK_END)
        tail = file.read()
    with open(path, "wb") as file:
        file.write(head + b"\n... left out ...\n" + tail)


def write_results(result, out, scratch):
    stem = os.path.join(out, f"part{result['part']}")
    with open(f"{stem}.json", "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")
    with open(f"{stem}.md", "w") as file:
        file.write(page(result))
    for path in glob.glob(os.path.join(scratch, "*.log")):
        clip(path)
    with tarfile.open(f"{stem}-logs.tar.gz", "w:gz") as tar:
        for path in sorted(glob.glob(os.path.join(scratch, "*"))):
            if os.path.isfile(path) and not os.path.basename(path).startswith("meeting-"):
                tar.add(path, os.path.basename(path))


def lines_of(path):
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []


def run_part(part, steps, machine, out, scratch, seconds):
    """Runs steps and writes the results after each. Their states."""
    begin = time.monotonic()
    result = {"part": part, "host": platform.node(), "began": time.strftime("%Y-%m-%d %H:%M:%S"),
              "why_no_gpu": machine.why_no_gpu, "driver_error": machine.driver_error, "bundle": lines_of(os.path.join(machine.bundle, "made-of.txt")), "steps": []}
    for step in steps:
        if step.after and not any(done["name"] == step.after and done["state"] in ("FAILED", "HUNG") for done in result["steps"]):
            continue
        left = seconds - (time.monotonic() - begin)
        ended = why_not_begun(step, machine, left)
        record = {"state": ended[0], "says": ended[1], "seconds": 0.0, "samples": []} if ended else run_step(
            step, int(min(step.limit, left)), machine, scratch)
        result["steps"].append({"name": step.name, "limit": step.limit, "command": step.command, **record})
        print(f"{record['state']:7} {step.name} {record['seconds']} s {record['says']}"[:300], flush=True)
        write_results(result, out, scratch)
    return [step["state"] for step in result["steps"]]


# ---- MPS ----

@contextlib.contextmanager
def mps(machine, scratch):
    """While this lasts, the steps share their GPU by an MPS of their own."""
    folders = {f"CUDA_MPS_{what}_DIRECTORY": os.path.join(scratch, f"mps-{what.lower()}") for what in ("PIPE", "LOG")}
    for folder in folders.values():
        os.makedirs(folder)
    machine.environment |= folders
    control = machine.tool(MPS)
    subprocess.run([control, "-d"], env=machine.environment, check=True, timeout=30)
    try:
        yield
    finally:
        subprocess.run([control], input="quit\n", text=True, env=machine.environment, timeout=30)


# ---- steps of this program's own ----

def tell(fact, value):
    print(json.dumps({"fact": fact, "value": value}), flush=True)


def show_machine(machine):
    """What is exactly there. Nothing in here is an error."""
    tell("system", " ".join(platform.uname()) + ", glibc " + platform.libc_ver()[1])
    for line in lines_of("/etc/os-release"):
        if line.startswith("PRETTY_NAME="):
            tell("distribution", line.partition("=")[2].strip('"'))
    tell("cores", len(os.sched_getaffinity(0)))
    for what, command in (("memory", ["free", "-h"]), ("/dev/shm", ["df", "-h", "/dev/shm"]), ("interfaces", ["ip", "-br", "address"])):
        tell(what, output_of(command)[0])
    for tool in TOOLS:
        path = machine.tool(tool)
        asked = path and tool != "nvidia-smi"
        said = output_of([path, "--version"], environment=machine.environment)[0].splitlines() if asked else []
        tell(tool, " ".join([path, *(said[-2:] if tool == "nvcc" else said[:1])]) if path else "not here")
    tell("GPU", output_of(["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit,compute_cap",
                           "--format=csv,noheader"], environment=machine.environment)[0])
    tell("mpirun of the bundle", output_of([machine.environment.get("MPIEXEC", "mpirun"), "--version"],
                                           environment=machine.environment)[0].split("\n")[0])
    tell("Python", f"{sys.version.split()[0]}, {sys.executable}")
    tell("torch", machine.torch or "not here: what needs LibTorch is not begun")
    said, _ = output_of([sys.executable, "-W", "ignore", "-c", ASK_TORCH], 60, machine.environment)
    tell("torch says", said.splitlines()[-1] if said else "nothing")
    for library, version in (("libcuda.so.1", "cuDriverGetVersion"), ("libcudart.so.13", "cudaRuntimeGetVersion"),
                             ("libcudart.so.12", "cudaRuntimeGetVersion"), ("libnccl.so.2", "ncclGetVersion")):
        said, _ = output_of([sys.executable, "-c", ASK_LIBRARY, library, version], environment=machine.environment)
        tell(library, said.splitlines()[-1] if said else "nothing")
    text, _ = output_of(["nvidia-smi", "-q"], environment=machine.environment)
    print(text[:6000])


def show_libraries(machine):
    """What each program does not find. The exit code is 1 if something is missing."""
    for program, missing in machine.missing.items():
        tell(program, "; ".join(missing) or "nothing is missing")
    lacking = [program for program, missing in machine.missing.items() if missing]
    if lacking:
        print(f"something is not found for {', '.join(lacking)}")
    return 1 if lacking else 0


def main():
    parser = argparse.ArgumentParser(prog="hour.sh", description="Runs a part of what is to be seen on a GPU.")
    parser.add_argument("part", nargs="?", choices=("1", "2", "3"))
    parser.add_argument("steps", nargs="*", metavar="STEP", help="patterns of its steps' names: all")
    parser.add_argument("--bundle", default=os.path.join(TOP, "build", "gpu"), help="what bundle.sh made (build/gpu)")
    parser.add_argument("--out", default=os.environ.get("OUT") or os.path.join(TOP, "build", "gpu-results"))
    parser.add_argument("--seconds", type=float, default=520, help="after which no step begins, and none goes on (520)")
    parser.add_argument("--limit", type=float, default=600, help="of seconds of each step, where its own is higher")
    parser.add_argument("--mps", action="store_true", help="start CUDA's MPS for it, and end it afterwards")
    parser.add_argument("--targets", action="store_true", help="print what the bundle consists of, and the targets that make it")
    parser.add_argument("--machine", action="store_true", help="print what is here")
    parser.add_argument("--libraries", action="store_true", help="print which libraries are missing")
    arguments = parser.parse_args()
    if arguments.targets:
        print("\n".join(f"{program} {target}" for program, target in PROGRAMS.items()))
        return 0
    machine = Machine(arguments.bundle)
    if arguments.machine or arguments.libraries:
        return (show_machine if arguments.machine else show_libraries)(machine) or 0
    if not arguments.part:
        parser.error("which part? 1, 2 or 3")
    os.makedirs(arguments.out, exist_ok=True)
    patterns = arguments.steps or ["*"]
    with tempfile.TemporaryDirectory(prefix="sirtaki-gpu-") as scratch:
        steps = [step for step in parts(machine, scratch)[arguments.part] if any(fnmatch.fnmatch(step.name, p) for p in patterns)]
        for step in steps:
            step.limit = min(step.limit, arguments.limit)
        if not steps:
            parser.error(f"part {arguments.part} has no step {' or '.join(arguments.steps)}")
        if arguments.mps and not machine.tool(MPS):
            parser.error(f"there is no {MPS} here, which --mps needs")
        with mps(machine, scratch) if arguments.mps else contextlib.nullcontext():
            states = run_part(arguments.part, steps, machine, arguments.out, scratch, arguments.seconds)
    print(f"part {arguments.part}: " + ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) +
          f"; {arguments.out}/part{arguments.part}.md")
    return 1 if "FAILED" in states or "HUNG" in states else 0


if __name__ == "__main__":
    sys.exit(main())
