"""Starts the programs and reads the lines that they write."""

import itertools
import json
import os
import subprocess
import sys
import tempfile

import memory

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
REFERENCE = os.path.join(TOP, "benchmarks", "reference")
PYTHON = os.path.join(TOP, "benchmarks", "python")


class Failed(Exception):
    """A program failed; the text says which and what it wrote."""


def python_with_torch():
    """A command that runs Python with torch, its environment, and why there is none."""
    environment = dict(os.environ)
    own = environment.get("SIRTAKI_BENCH_PYTHON")
    python = own or os.path.join(TOP, ".venv", "bin", "python")
    additions = os.path.join(TOP, ".venv-bench")
    if not own and os.path.isdir(additions):
        for variable, folder in (("PYTHONPATH", "packages"), ("LD_LIBRARY_PATH", "stubs")):
            folder = os.path.join(additions, folder)
            environment[variable] = folder + (os.pathsep + environment[variable] if variable in environment else "")
    try:
        asked = subprocess.run([python, "-W", "ignore", "-c", "import torch, torch._dynamo, torch.distributed as d; "
                                "print(torch.__version__, d.is_gloo_available())"],
                               env=environment, capture_output=True, text=True)
        if asked.returncode == 0 and asked.stdout.strip().endswith("True"):
            return [python, "-W", "ignore"], environment, None
        why = (asked.stderr.strip() or "torch without gloo").splitlines()[-1]
    except OSError as error:
        why = str(error)
    return None, None, f"no Python that imports torch ({why}): `bash bootstrap.sh --benchmarks`, or name one in SIRTAKI_BENCH_PYTHON"


def python_with_horovod():
    """A command that runs Python with Horovod, and why there is none."""
    python = os.environ.get("SIRTAKI_BENCH_HOROVOD")
    if not python:
        return None, "SIRTAKI_BENCH_HOROVOD names no Python that imports horovod.torch"
    try:
        asked = subprocess.run([python, "-W", "ignore", "-c", "import horovod.torch as hvd; hvd.Sum"], capture_output=True,
                               text=True)
        if asked.returncode == 0:
            return [python, "-W", "ignore"], None
        why = (asked.stderr.strip() or "no reason given").splitlines()[-1]
    except OSError as error:
        why = str(error)
    return None, f"SIRTAKI_BENCH_HOROVOD={python}: it does not import horovod.torch: {why}"


class Skipped(Exception):
    """A program cannot run here; the text says why."""


class Launcher:
    def __init__(self, build, verbose):
        self.programs = os.path.join(build, "benchmarks")
        self.package = os.path.abspath(os.path.join(build, "python"))
        self.verbose = verbose
        self.scratch = tempfile.TemporaryDirectory(prefix="sirtaki-bench-")
        self.meetings = itertools.count()
        self._python = None
        self._horovod = None
        self._watch = None

    def program(self, name):
        path = os.path.join(self.programs, name)
        if not os.path.exists(path):
            raise Failed(f"{path} is not there: build sirtaki_benchmarks, with MPI and LibTorch")
        return path

    @property
    def why_no_torch(self):
        if self._python is None:
            self._python = python_with_torch()
        return self._python[2]

    @property
    def why_no_module(self):
        """Why Python cannot import ours. Precondition: there is a torch."""
        command, environment = self._with_module()
        asked = subprocess.run(command + ["-c", "import sirtaki.torch"], env=environment, capture_output=True, text=True)
        if asked.returncode == 0:
            return None
        return f"Python cannot import sirtaki.torch: {(asked.stderr.strip() or 'no reason given').splitlines()[-1]}"

    @property
    def why_no_horovod(self):
        if self._horovod is None:
            self._horovod = python_with_horovod()
        return self._horovod[1]

    def _with_module(self):
        command, environment, _ = self._python
        others = environment.get("PYTHONPATH")
        return command, {**environment, "PYTHONPATH": self.package + (os.pathsep + others if others else "")}

    @property
    def why_no_torch_gpu(self):
        """Precondition: there is a torch."""
        command, environment, _ = self._python
        asked = subprocess.run(command + ["-c", "import torch, torch.distributed as d; "
                                          "print(torch.cuda.is_available() and d.is_nccl_available())"],
                               env=environment, capture_output=True, text=True)
        if asked.stdout.strip() == "True":
            return None
        return f"the torch of {command[0]} finds no GPU, or has no NCCL"

    def run(self, command, environment=None):
        """The samples that a command writes. Raises Failed, and Skipped if it ends with code 77."""
        environment = dict(environment or os.environ)
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("SIRTAKI_TEST_SECONDS", "600")
        process = subprocess.Popen(command, env=environment, cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True)
        if self._watch:
            self._watch.begin(process.pid)
        output, errors = process.communicate()
        if self._watch:
            self._watch.end()
        samples = []
        for line in output.splitlines():
            if line.startswith("{"):
                samples.append(json.loads(line))
        if self.verbose and errors:
            sys.stderr.write(errors)
        if process.returncode == 77:
            raise Skipped((errors.strip() or "no reason given").splitlines()[-1])
        if process.returncode != 0:
            tail = "\n  ".join((output + errors).strip().splitlines()[-12:])
            raise Failed(f"exit code {process.returncode} of {' '.join(command)}\n  {tail}")
        return samples

    def watched(self, ranks, start):
        """The samples of start(), which runs one command, and the peak of its ranks' memory: memory.Watch says of what."""
        self._watch = memory.Watch(ranks)
        try:
            return start(), self._watch.peak
        finally:
            self._watch = None

    def alone(self, program, *arguments):
        return self.run([self.program(program), *map(str, arguments)])

    def ranks(self, count, program, *arguments):
        return self.run(self._mpirun(count) + [self.program(program), *map(str, arguments)])

    def torch(self, count, script, *arguments):
        """A script of reference/, on ranks that meet in a file, its first argument."""
        command, environment, _ = self._python
        meeting = os.path.join(self.scratch.name, f"meeting-{next(self.meetings)}")
        script = os.path.join(REFERENCE, script)
        return self.run(self._mpirun(count) + command + [script, meeting, *map(str, arguments)], environment)

    def module(self, count, script, *arguments):
        """A script of python/ that calls our module."""
        command, environment = self._with_module()
        return self._script(count, command, script, "sirtaki.torch", arguments, environment)

    def module_on_hosts(self, hosts, rate, script, *arguments):
        """The same with one rank on each of so many hosts, whose links are of `rate` Mbit. mpirun does not give all of the
        environment to other hosts."""
        command, environment = self._with_module()
        passed = [f"{name}={environment[name]}" for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in environment]
        return self.run([*self.on_hosts(hosts, 1, rate), "env", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=veth0", *passed,
                         *command, os.path.join(PYTHON, script), "sirtaki.torch", *map(str, arguments)])

    def python_script(self, folder, script, *arguments):
        """The words that run a script which may import ours. Precondition: there is a torch."""
        command, environment = self._with_module()
        passed = [f"{name}={environment[name]}" for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in environment]
        return ["env", *passed, *command, os.path.join(folder, script), *arguments]

    def horovod_script(self, script):
        """The same with Horovod. Precondition: it is there."""
        return [*self._horovod[0], os.path.join(PYTHON, script), "horovod.torch"]

    def elastic(self, system, fault, program):
        """The samples of one job of the work elastic: ../elastic.sh says of what."""
        return self.run(["bash", os.path.join(TOP, "benchmarks", "elastic.sh"), "--build", os.path.dirname(self.programs), system,
                         fault, *program])

    def horovod(self, count, script, *arguments):
        """A script of python/ that calls Horovod. Precondition: it is there."""
        return self._script(count, self._horovod[0], script, "horovod.torch", arguments, None)

    def _script(self, count, command, script, module, arguments, environment):
        return self.run(self._mpirun(count) + command + [os.path.join(PYTHON, script), module, *map(str, arguments)],
                        environment)

    @staticmethod
    def on_hosts(hosts, ranks, rate):
        """What stands before a program that runs on so many ranks of each host."""
        return ["bash", os.path.join(TOP, "benchmarks", "hosts.sh"), str(hosts), str(ranks), str(rate)]

    @staticmethod
    def _mpirun(count):
        return ["bash", os.path.join(TOP, "tests", "support", "mpirun.sh"), str(count)]
