"""An elastic job under sirtakirun: workers are killed and stopped, others come, and the training goes on.

    elastic_job.py SIRTAKIRUN PYTHON [CASE ...]    with elastic_program.py
    elastic_job.py SIRTAKIRUN PROGRAM [CASE ...]   with its twin by the C++ API
"""

import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

FAULTS = int(os.environ.get("ELASTIC_FAULTS", "300" if os.environ.get("SIRTAKI_TEST_SCALE") == "full" else "5"))
PATIENCE = 120.0  # for an event, on a machine that others use


class Job:
    """A job that runs, and what it has printed."""

    def __init__(self, sirtakirun, program, flags, folder, mode):
        self.enough = pathlib.Path(folder) / "enough"
        command = [sirtakirun, *flags, *program, str(self.enough), mode]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines = []
        self.news = threading.Condition()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            print(line, end="", flush=True)
            with self.news:
                self.lines.append(line.rstrip("\n"))
                self.news.notify_all()
        with self.news:
            self.lines.append("(end)")
            self.news.notify_all()

    def wait_for(self, pattern, after=0):
        """The number of the first line behind `after` that matches, and its match."""
        deadline = time.monotonic() + PATIENCE
        at = after
        with self.news:
            while True:
                while at < len(self.lines):
                    found = re.search(pattern, self.lines[at])
                    at += 1
                    if found:
                        return at, found
                assert self.lines[-1:] != ["(end)"], f"the job has ended, and nothing was like {pattern!r}"
                left = deadline - time.monotonic()
                assert left > 0, f"nothing like {pattern!r} came within {PATIENCE} s"
                self.news.wait(left)

    def pid(self, worker):
        return int(self.wait_for(rf"^\[{worker}\] pid (\d+)")[1][1])

    def members(self):
        """The workers of the newest generation that are still there."""
        with self.news:
            lines = list(self.lines)
        members = set()
        for line in lines:
            if found := re.search(r"generation \d+: \d+ ranks?: workers (.*)", line):
                members = set()
                for first, last in re.findall(r"(\d+)(?:-(\d+))?(?=[ ,-])", found[1]):
                    members.update(range(int(first), int(last or first) + 1))
            elif found := re.search(r"worker (\d+) on host", line):
                members.discard(int(found[1]))
        return sorted(members)

    def hit(self, choose):
        """Kills or stops one of the members."""
        victim = choose.choice(self.members())
        how = choose.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        print(f"--- {how.name} to worker {victim}", flush=True)
        os.kill(self.pid(victim), how)

    def mark(self):
        with self.news:
            return len(self.lines)

    def end(self):
        """Lets the training end, and returns the exit code."""
        self.enough.touch()
        code = self.process.wait(PATIENCE)
        self.reader.join(PATIENCE)
        return code

    def check_equal(self, ranks):
        ends = [line.split()[2:] for line in self.lines if re.match(r"\[\d+\] ends ", line)]
        assert sorted(int(end[0]) for end in ends) == list(range(ranks)), ends
        assert len({tuple(end[1:]) for end in ends}) == 1, f"the ranks differ: {ends}"


def killed_and_replaced(start):
    """A worker is killed: the others go on, and a new one comes."""
    for victim in (2, 0):
        job = start("-np", "4")
        at, _ = job.wait_for(r"epoch \d+ 4")
        steps = at
        os.kill(job.pid(victim), signal.SIGKILL)
        at, _ = job.wait_for(r"generation 1 is over: ", steps)
        at, _ = job.wait_for(r"begins \d 3 ", at)
        at, _ = job.wait_for(r"is to change: 1 worker comes", at)
        at, _ = job.wait_for(r"begins 3 4 ", at)
        job.wait_for(r"epoch \d+ 4", at)
        assert job.end() == 0
        job.check_equal(4)


def stopped(start):
    """A worker that is stopped is missed, killed, and replaced."""
    job = start("-np", "3", "--peer-timeout", "2s", "--stall-limit", "20s")
    at, _ = job.wait_for(r"epoch \d+ 3")
    os.kill(job.pid(1), signal.SIGSTOP)
    at, _ = job.wait_for(r"worker 1 on host .* is ended", at)
    at, _ = job.wait_for(r"begins \d 2 ", at)
    at, _ = job.wait_for(r"begins 2 3 ", at)
    job.wait_for(r"epoch \d+ 3", at)
    assert job.end() == 0
    job.check_equal(3)


def below_the_minimum(start):
    """Below --min-np the others wait, and go on when there are enough."""
    job = start("-np", "2", "--min-np", "2")
    at, _ = job.wait_for(r"epoch \d+ 2")
    os.kill(job.pid(0), signal.SIGKILL)
    at, _ = job.wait_for(r"begins 1 2 ", at)
    job.wait_for(r"epoch \d+ 2", at)
    assert not any(re.search(r"begins \d 1 ", line) for line in job.lines)
    assert job.end() == 0
    job.check_equal(2)


def lost_before_run(start):
    """A worker is lost when it has made an optimizer and has not called run(): the others go on."""
    job = start("-np", "3", mode="lost before run")
    for worker in (0, 2):
        job.wait_for(rf"^\[{worker}\] begins \d [23] ")
    at, _ = job.wait_for(r"begins 2 3 ")
    job.wait_for(r"epoch \d+ 3", at)
    assert job.end() == 0
    job.check_equal(3)
    job.wait_for(r"^\[0\] again: .*run\(\) was called again, in an elastic job")


def fails(start):
    """What fails every time, with no rank lost, ends with the error."""
    job = start("-np", "2", mode="fails")
    job.wait_for(r"gives up: it has failed 10 times without a commit")
    assert job.end() != 0
    job.wait_for(r"on purpose")


def many_faults(start, mode=""):
    """Workers are killed and stopped at random, also while others join: no hang, and the same parameters everywhere."""
    seed = int(os.environ.get("SIRTAKI_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"SIRTAKI_TEST_SEED={seed}", flush=True)
    choose = random.Random(seed)
    job = start("-np", "4", "--peer-timeout", "2s", "--blacklist-cooldown-range", "1,1", mode=mode)
    at, _ = job.wait_for(r"generation 1 has begun")
    for _ in range(FAULTS):
        at, _ = job.wait_for(r"generation \d+ has begun", at - 1)
        if choose.random() < 0.6 and len(job.members()) < 4:
            at, _ = job.wait_for(r"generation \d+: 4 ranks", at)
        elif len(job.members()) < 2:  # the job ends where nobody is left
            at, _ = job.wait_for(r"generation \d+: [2-4] ranks", at)
        time.sleep(choose.uniform(0, 0.3))
        at = job.mark()
        job.hit(choose)
        at, _ = job.wait_for(r"generation \d+ is over", at)
    job.wait_for(r"epoch \d+ 4", at)
    assert job.end() == 0
    job.check_equal(4)


def many_faults_between_commits(start):
    """The same, where the training goes back to the last step and commits seldom."""
    many_faults(start, mode="steps")


CASES = [killed_and_replaced, stopped, below_the_minimum, lost_before_run, fails, many_faults,
         many_faults_between_commits]


def main(sirtakirun, program, *names):
    is_python = pathlib.Path(program).name.startswith("python")
    command = [program, str(pathlib.Path(__file__).with_name("elastic_program.py"))] if is_python else [program]
    for case in CASES:
        if names and case.__name__ not in names:
            continue
        jobs = []

        def start(*flags, mode=""):
            folder = tempfile.mkdtemp(dir=place)
            jobs.append(Job(sirtakirun, command, ["--elastic", *flags], folder, mode))
            return jobs[-1]

        with tempfile.TemporaryDirectory() as place:
            print(f"--- {case.__name__}: {case.__doc__}", flush=True)
            try:
                case(start)
            finally:
                for job in jobs:
                    if job.process.poll() is None:
                        job.process.terminate()
                        job.process.wait(30)


main(*sys.argv[1:])
