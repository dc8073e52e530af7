"""An elastic job under sirtakirun: workers are killed and stopped, others come, and the training goes on.

    elastic_job.py SIRTAKIRUN PYTHON [CASE ...]    with elastic_program.py
    elastic_job.py SIRTAKIRUN PROGRAM [CASE ...]   with its twin by the C++ API

ELASTIC_HOSTS: a folder that tells of two hosts (../multihost/elastic_faults_test.sh); then the cases are those on hosts.
"""

import json
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

FULL = os.environ.get("SIRTAKI_TEST_SCALE") == "full"
FAULTS = int(os.environ.get("ELASTIC_FAULTS", "300" if FULL else "5"))
GENERATIONS = int(os.environ.get("ELASTIC_GENERATIONS", "1000" if FULL else "60"))
PATIENCE = 120.0  # for an event, on a machine that others use, and for the next one on the way to it
MOST_PATIENCE = 900.0


class Job:
    """A job that runs, and what it has printed."""

    def __init__(self, command, folder, *arguments):
        self.enough = pathlib.Path(folder) / "enough"
        command = [*command, str(self.enough), *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines = []
        self._members = {}
        self._trained = set()
        self._came = {}  # where its worker's first line is
        self.news = threading.Condition()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            if not re.match(r"\[\d+\] step ", line):
                print(line, end="", flush=True)
            with self.news:
                self._note(line.rstrip("\n"))
                self.lines.append(line.rstrip("\n"))
                self.news.notify_all()
        with self.news:
            self.lines.append("(end)")
            self.news.notify_all()

    def wait_for(self, pattern, after=0):
        """The number of the first line behind `after` that matches, and its match. Several workers may have to start until then,
        each of which imports torch for a minute where others have the cores: it waits on as long as workers come and go."""
        began = time.monotonic()
        deadline = began + PATIENCE
        at = after
        with self.news:
            old = len(self.lines)
            while True:
                while at < len(self.lines):
                    found = re.search(pattern, self.lines[at])
                    if at >= old and re.match(r"sirtakirun: |\[\d+\] pid ", self.lines[at]):
                        deadline = time.monotonic() + PATIENCE
                    at += 1
                    if found:
                        return at, found
                assert self.lines[-1:] != ["(end)"], f"the job has ended, and nothing was like {pattern!r}"
                left = min(deadline, began + MOST_PATIENCE) - time.monotonic()
                assert left > 0, f"nothing like {pattern!r} came, and nothing on the way to it within {PATIENCE} s"
                self.news.wait(left)

    def pid(self, worker):
        return int(self.wait_for(rf"^\[{worker}\] pid (\d+)", self._came.get(worker, 0))[1][1])

    def members(self):
        """The workers of the newest generation that are still there, and their hosts."""
        with self.news:
            return dict(self._members)

    def holders(self):
        """Those of the members that have the state."""
        with self.news:
            return {worker: host for worker, host in self._members.items() if worker in self._trained}

    def _note(self, line):
        if found := re.search(r"generation \d+: \d+ ranks?: workers (.*)", line):
            self._members = {}
            for workers, host in re.findall(r"([\d, -]+) on host ([^,;]+)", found[1]):
                for first, last in re.findall(r"(\d+)(?:-(\d+))?", workers):
                    self._members |= dict.fromkeys(range(int(first), int(last or first) + 1), host)
        elif found := re.search(r"worker (\d+) on host", line):
            self._members.pop(int(found[1]), None)
        elif re.search(r"generation \d+ trains", line):
            self._trained |= set(self._members)
        elif found := re.match(r"\[(\d+)\] pid \d+", line):
            self._came[int(found[1])] = len(self.lines)

    def hit(self, choose, send=None):
        """Kills or stops one of the members, but not the last one that has the state; `send` does it on the member's host."""
        members, holders = self.members(), self.holders()
        victim = choose.choice([worker for worker in sorted(members) if set(holders) - {worker}])
        how = choose.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        print(f"--- {how.name} to worker {victim}", flush=True)
        if send:
            send(members[victim], how, self.pid(victim))
        else:
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

    def check_cannot_go_on(self, text):
        """The job ends with this text, though one of the workers does not; nobody comes and trains from nothing."""
        self.wait_for(rf"^sirtakirun: the training cannot go on: worker \d+ on host .*{text}")
        assert self.process.wait(PATIENCE) != 0
        self.reader.join(PATIENCE)
        end = next(i for i, line in enumerate(self.lines) if "the training cannot go on" in line)
        later = [line for line in self.lines[end:] if re.match(r"sirtakirun: generation \d+: ", line)]
        assert not later, later

    def check_losses(self, program):
        """They are those of one process that makes the same steps, as often as ranks have made them in the end."""
        newest = {}  # a later generation makes the steps again that were lost
        for line in self.lines:
            if found := re.match(r"\[\d+\] step (.*)", line):
                number, generation, everyone = json.loads(found[1])
                newest[number] = max(newest.get(number, (0, None)), (generation, everyone))
        steps = {number: everyone for number, (_, everyone) in newest.items()}
        assert sorted(steps) == list(range(1, len(steps) + 1)), "steps are missing"
        path = self.enough.with_name("steps")
        path.write_text(json.dumps(sorted(steps.items())))
        subprocess.run([*program, "--again", str(path)], check=True)

    def check_equal(self, ranks):
        """The ranks have the same parameters: when each generation began, after its first step, and at the end."""
        # A worker that finds something wrong is replaced as one that is lost.
        wrong = [line for line in self.lines if re.search(r"AssertionError|not that of one process|have gone through", line)]
        assert not wrong, wrong
        seen = {}
        for line in self.lines:
            if found := re.match(r"\[\d+\] (begins|goes-on) \d+ \d+ (.*) (\d+) (\S+)$", line):
                event, steps, generation, digest = found.groups()
                seen.setdefault((event, int(generation)), set()).add((steps, digest))
        different = {key: what for key, what in seen.items() if len(what) > 1}
        assert seen and not different, f"the ranks of generations differ: {different}"
        ends = [line.split()[2:] for line in self.lines if re.match(r"\[\d+\] ends ", line)]
        assert sorted(int(end[0]) for end in ends) == list(range(ranks)), ends
        assert len({tuple(end[1:]) for end in ends}) == 1, f"the ranks differ: {ends}"


    def check_shards(self):
        """The ranks have looked at their shards in each generation that trains, and at the end."""
        trained = sum(bool(re.search(r"generation \d+ trains", line)) for line in self.lines)
        looked = sum(bool(re.match(r"\[\d+\] exact ", line)) for line in self.lines)
        ends = sum(bool(re.match(r"\[\d+\] ends ", line)) for line in self.lines)
        assert trained > 0 and looked >= trained + ends, f"{looked} looks in {trained} generations and at {ends} ends"


def killed_and_replaced(start):
    """A worker is killed: the others go on, and a new one comes, which takes its GPU and no other."""
    for victim in (2, 0):
        job = start("-np", "4")
        at, _ = job.wait_for(r"epoch \d+ 4")
        steps = at
        os.kill(job.pid(victim), signal.SIGKILL)
        at, _ = job.wait_for(r"generation 1 is over: ", steps)
        at, _ = job.wait_for(r"begins \d 3 ", at)
        at, _ = job.wait_for(r"is to change: 1 worker comes", at)
        job.wait_for(rf"^\[4\] device {victim}$", at)
        at, _ = job.wait_for(r"begins 3 4 ", at)
        job.wait_for(r"epoch \d+ 4", at)
        assert job.end() == 0
        job.check_equal(4)


def stopped(start):
    """A worker that is stopped is missed, killed, and replaced."""
    job = start("-np", "3", "--peer-timeout", "2s", "--stall-limit", "20s")
    at, _ = job.wait_for(r"epoch \d+ 3")
    os.kill(job.pid(1), signal.SIGSTOP)
    at, _ = job.wait_for(r"worker 1 on host .* is ended: it is stopped$", at)
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
    job = start("-np", "3", arguments=["lost before run"])
    for worker in (0, 2):
        job.wait_for(rf"^\[{worker}\] begins \d [23] ")
    at, _ = job.wait_for(r"begins 2 3 ")
    job.wait_for(r"epoch \d+ 3", at)
    assert job.end() == 0
    job.check_equal(3)
    job.wait_for(r"^\[0\] again: .*run\(\) was called again, in an elastic job")


def one_that_comes_cannot_take_the_state(start):
    """A worker that comes has another optimizer, and the next one cannot take the state: each is dropped, the others go on,
    and the one that comes then takes it."""
    job = start("-np", "3", "--blacklist-cooldown-range", "1,1", arguments=["newcomer fails"])
    at, _ = job.wait_for(r"epoch \d+ 3")
    os.kill(job.pid(2), signal.SIGKILL)
    at, _ = job.wait_for(r"begins \d 2 ", at)
    at, _ = job.wait_for(r"worker 3 on host .*steps of another program", at)
    at, _ = job.wait_for(r"begins \d 2 ", at)
    at, _ = job.wait_for(r"worker 4 on host .*(no memory is left for it|No module named 'picky')", at)
    at, _ = job.wait_for(r"begins \d 2 ", at)
    at, _ = job.wait_for(r"^\[5\] begins 2 3 ", at)
    job.wait_for(r"epoch \d+ 3", at)
    assert job.end() == 0
    job.check_equal(3)
    assert {worker for worker in range(6) if any(line.startswith(f"[{worker}] ends ") for line in job.lines)} == {0, 1, 5}


def early_calls(start):
    """Calls that a worker which comes later would make alone are refused before run(), with no loss yet, and harm nothing."""
    job = start("-np", "2", arguments=["early calls"])
    for worker in (0, 1):
        for call in ("broadcast_parameters", "broadcast_optimizer_state", "broadcast_object", "allreduce_async", "barrier", "join",
                     "add_process_set"):
            job.wait_for(rf"^\[{worker}\] early {call}: .* came too early: in an elastic job collective calls belong into the function")
    at, _ = job.wait_for(r"epoch \d+ 2")
    os.kill(job.pid(1), signal.SIGKILL)
    at, _ = job.wait_for(r"begins \d 2 ", at)
    job.wait_for(r"epoch \d+ 2", at)
    assert job.end() == 0
    job.check_equal(2)


def fails(start):
    """What fails every time, with no rank lost, ends with the error."""
    job = start("-np", "2", arguments=["fails"])
    job.wait_for(r"gives up: it has failed 10 times without a commit")
    assert job.end() != 0
    job.wait_for(r"on purpose")


def the_one_that_fails_is_named(start):
    """A worker raises, or ends early: it is named, and not the others, which notice."""
    job = start("-np", "3", arguments=["last fails"])
    at, found = job.wait_for(r"generation 1 is over: worker (\d+) on host ")
    assert found[1] == "2", found.string
    at, _ = job.wait_for(r"worker 2 on host .* raised KeyError: 'no such sample'")
    job.wait_for(r"epoch \d+ 2")
    assert job.end() == 0
    job = start("-np", "3", arguments=["last returns"])
    job.wait_for(r"^sirtakirun: worker 2 on host .* has ended with exit code 0 while worker [01] on host .* let all ranks end")
    assert job.process.wait(PATIENCE) == 1


def the_one_whose_state_it_is_is_named(start):
    """All take the state of the last rank, which alone has kept the step before an error."""
    job = start("-np", "2", arguments=["last is farthest"])
    at, _ = job.wait_for(r"^sirtakirun: generation 1 trains, .*, with the state of worker 0$")
    at, _ = job.wait_for(r"^sirtakirun: generation 2 trains, .*, with the state of worker 1$", at)
    job.wait_for(r"epoch \d+ 2", at)
    assert job.end() == 0
    job.check_equal(2)


def shards_are_copied(start):
    """The shards of a killed worker are its partner's copies: state and parameters are those of one process, to the bit."""
    for mode in ("sharded", "sharded gradients"):
        job = start("-np", "4", arguments=[mode])
        at, _ = job.wait_for(r"epoch \d+ 4")
        for victim in (2, 0):
            os.kill(job.pid(victim), signal.SIGKILL)
            at, _ = job.wait_for(r"begins \d 3 ", at)
            at, _ = job.wait_for(r"exact \d+ \d+", at)
            at, _ = job.wait_for(r"begins \d 4 ", at)
            at, _ = job.wait_for(r"epoch \d+ 4", at)
        assert job.end() == 0
        job.check_equal(4)
        job.check_shards()


def shards_come_to_one_rank(start):
    """A rank that is alone has the whole state, and gives shards of it to one that comes."""
    job = start("-np", "2", arguments=["sharded"])
    at, _ = job.wait_for(r"epoch \d+ 2")
    os.kill(job.pid(0), signal.SIGKILL)
    at, _ = job.wait_for(r"begins 0 1 ", at)
    at, _ = job.wait_for(r"begins \d 2 ", at)
    job.wait_for(r"epoch \d+ 2", at)
    assert job.end() == 0
    job.check_equal(2)
    job.check_shards()


def shards_of_ranks_that_leave(start):
    """Ranks that are taken away give their shards to one that stays, also where that is nobody's partner yet."""
    hosts = HostList(tempfile.mkdtemp(dir=start.place))
    for mode in ("sharded", "sharded alone"):
        hosts.list({"localhost": 4})
        job = start("--host-discovery-script", str(hosts.find), arguments=[mode])
        at, _ = job.wait_for(r"epoch \d+ 4")
        for slots in (1, 4):
            hosts.list({"localhost": slots})
            at, _ = job.wait_for(rf"begins \d {slots} ", at)
            at, _ = job.wait_for(rf"epoch \d+ {slots}", at)
        assert job.end() == 0
        job.check_equal(4)
        job.check_shards()


def shards_are_handed_over(start):
    """Where all places are listed no more, and others fill --max-np, one rank stays until they have the state."""
    hosts = HostList(tempfile.mkdtemp(dir=start.place))
    for mode in ("sharded", "sharded alone"):
        hosts.list({"localhost": 2})
        job = start("--host-discovery-script", str(hosts.find), "--max-np", "2", arguments=[mode])
        at, _ = job.wait_for(r"epoch \d+ 2")
        hosts.list({"127.0.0.1": 2})
        at, _ = job.wait_for(r"generation \d+: 2 ranks: workers .* on host 127.0.0.1$", at)
        job.wait_for(r"epoch \d+ 2", at)
        assert job.end() == 0
        job.check_equal(2)
        job.check_shards()


def shards_are_lost(start):
    """Without copies, and where a rank and its partner are lost at once, the job ends with that text."""
    for mode, victims in (("sharded alone", [1]), ("sharded", [1, 2])):
        job = start("-np", "4", arguments=[mode])
        at, _ = job.wait_for(r"epoch \d+ 4")
        pids = [job.pid(victim) for victim in victims]
        for how in (signal.SIGSTOP, signal.SIGKILL):  # none of them does anything more when the first is lost
            for pid in pids:
                os.kill(pid, how)
        job.check_cannot_go_on("a rank that is lost takes its shards of the state with it: nobody is left that has those of rank 1 of 4")


def shards_by_hand(start):
    """The program restores, synchronizes and asks for a change itself: all go on from the last state that they have all of."""
    job = start("-np", "4", arguments=["sharded by hand"])
    at, _ = job.wait_for(r"begins \d 4 \d+ 4 2 ")
    at, _ = job.wait_for(r"begins \d 3 \d+ 7 3 ", at)
    at, _ = job.wait_for(r"begins \d 4 ", at)
    at, _ = job.wait_for(r"epoch \d+ 4", at)
    at, _ = job.wait_for(r"epoch \d+ 4", at)
    assert job.end() == 0
    job.check_equal(4)
    job.check_shards()


def shards_without_their_copies(start):
    """What has changed since the copies does not go with them: a loss then ends the ranks with that text."""
    cases = [("sharded adds", r"optimizer has other parameters than when its shards were kept" if start.is_python else
              r"cannot take the shards that were kept last: a shard is of 2 parameters, and the optimizer has 3")]
    if start.is_python:
        cases.append(("sharded saves", "nobody is left that has the rest of the state"))
    else:
        cases.append(("sharded adds another", "it has 2 sharded optimizers, and had 1 when their shards were kept last"))
    for mode, text in cases:
        start("-np", "4", arguments=[mode]).check_cannot_go_on(text)


def many_faults(start, mode=""):
    """Workers are killed and stopped at random, also while others join: no hang, and the same parameters everywhere."""
    seed = int(os.environ.get("SIRTAKI_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"SIRTAKI_TEST_SEED={seed}", flush=True)
    choose = random.Random(seed)
    job = start("-np", "4", "--peer-timeout", "2s", "--blacklist-cooldown-range", "1,1", arguments=[mode] if mode else [])
    at, _ = job.wait_for(r"generation 1 has begun")
    for _ in range(min(FAULTS, 100) if mode else FAULTS):   # all of both would not fit the time of a test
        at, _ = job.wait_for(r"generation \d+ has begun", at - 1)
        if choose.random() < 0.6 and len(job.members()) < 4:
            at, _ = job.wait_for(r"generation \d+: 4 ranks", at)
        while len(job.members()) < 2 or not job.holders():
            at, _ = job.wait_for(r"generation \d+ trains", at)
        time.sleep(choose.uniform(0, 0.3))
        at = job.mark()
        job.hit(choose)
        at, _ = job.wait_for(r"generation \d+(: \d+ rank| is over)", at)
    job.wait_for(r"epoch \d+ 4", at)
    assert job.end() == 0
    job.check_equal(4)
    if start.is_python:
        job.check_losses(start.program)


def many_faults_between_commits(start):
    """The same, where the training goes back to the last step and commits seldom."""
    many_faults(start, mode="steps")


def many_generations(start):
    """Generations of the same processes leave no descriptor, thread, mapping or megabyte behind."""
    job = start("-np", "3", arguments=[GENERATIONS])
    at = 0
    for generation in range(20, GENERATIONS, 20):
        at, _ = job.wait_for(rf"generation {generation} has begun", at)
    for worker in range(3):
        job.wait_for(rf"^\[{worker}\] leaves -?\d+ KiB after", at)
    assert job.end() == 0
    job.check_equal(3)


class HostList:
    """What the script `find` says."""

    def __init__(self, folder):
        self.state = pathlib.Path(folder)
        self.find = self.state / "find.sh"
        self.find.write_text(f"#!/bin/sh\ncat {self.state}/list\n")
        self.find.chmod(0o755)

    def list(self, slots):
        (self.state / "list.new").write_text("".join(f"{host}:{count}\n" for host, count in slots.items()))
        (self.state / "list.new").rename(self.state / "list")


class Hosts(HostList):
    """The hosts of hosts.sh."""

    def __init__(self, state):
        super().__init__(state)
        firsts = (self.state / "firsts").read_text().split()
        self.firsts = {f"h{number}": first for number, first in enumerate(firsts, 1)}

    def enter(self, host):
        return ["nsenter", "--target", self.firsts[host], "--net", "--uts", "--mount", "--pid", f"--wd={os.getcwd()}"]

    def send(self, host, how, pid):
        subprocess.run([*self.enter(host), "kill", f"-{how.name}", str(pid)], check=False)  # it may have ended

    def kill_all(self, host):
        subprocess.run([*self.enter(host), "sh", "-c", "kill -KILL -1"], check=False)  # all but the first

    def link(self, host, how):
        subprocess.run([*self.enter(host), "ip", "link", "set", "veth0", how], check=True)


WHOLE = {"h1": 2, "h2": 2}
FEWER = [{"h1": 2}, {"h1": 2, "h2": 1}, {"h1": 1, "h2": 2}, {"h1": 1, "h2": 1}]


def shards_on_hosts(start):
    """The same with a sharded optimizer: copies of shards lie on the other host, or that has the same shards."""
    on_hosts(start, ["sharded", "sharded by host"])


def on_hosts(start, modes=("",)):
    """Ranks are killed and stopped, a host loses its processes or its link, ranks are taken away and come back: as many_faults."""
    seed = int(os.environ.get("SIRTAKI_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"SIRTAKI_TEST_SEED={seed}", flush=True)
    choose = random.Random(seed)
    mode = choose.choice(modes)
    hosts = start.hosts
    hosts.list(WHOLE)
    job = start("--host-discovery-script", str(hosts.find), "--peer-timeout", "2s", "--ping-interval", "0.5s",
                "--blacklist-cooldown-range", "1,1", "--ssh-args", f"-F {hosts.state}/ssh_config", "--network-interfaces", "veth0",
                arguments=[mode] if mode else [])
    at, _ = job.wait_for(r"generation 1 has begun")
    faults = min(FAULTS, 30) if mode else FAULTS
    for number in range(faults):
        at, _ = job.wait_for(r"generation \d+ has begun", at - 1)
        if choose.random() < 0.6 and len(job.members()) < 4:
            at, _ = job.wait_for(r"generation \d+: 4 ranks", at)
            at, _ = job.wait_for(r"generation \d+ has begun", at)
        if mode:  # until then a second loss may take a shard and its copy
            number_of_it = max(int(found[1]) for line in job.lines if (found := re.search(r"generation (\d+) has begun", line)))
            at, _ = job.wait_for(rf"generation {number_of_it} trains")
        time.sleep(choose.uniform(0, 0.3))
        # Somebody who has the state must be left, on the host that stays.
        while len(job.members()) < 2 or not job.holders():
            at, _ = job.wait_for(r"generation \d+ trains", at)
        members, holders = job.members(), job.holders()
        kinds = ["rank"] * 3
        if "h1" in holders.values() and "h2" in members.values():
            kinds += ["host", "link"]
        if len(members) == 4:
            kinds += ["list"]
        kind = choose.choice(kinds)
        print(f"--- {number + 1} of {faults}: {kind}", flush=True)
        at = job.mark()
        if kind == "rank":
            job.hit(choose, hosts.send)
        elif kind == "host":
            hosts.kill_all("h2")
        elif kind == "link":
            hosts.link("h2", "down")
        else:
            fewer = choose.choice(FEWER)
            hosts.list(fewer)
            at, _ = job.wait_for(rf"generation \d+: {sum(fewer.values())} rank", at)
            hosts.list(WHOLE)
            continue
        at, _ = job.wait_for(r"generation \d+(: \d+ rank| is over)", at)
        if kind == "link":
            time.sleep(choose.uniform(0, 2))
            hosts.link("h2", "up")
    at, _ = job.wait_for(r"generation \d+ has begun", at - 1)
    if len(job.members()) < 4:
        at, _ = job.wait_for(r"generation \d+: 4 ranks", at)
    job.wait_for(r"epoch \d+ 4", at)
    assert job.end() == 0
    job.check_equal(4)
    if mode:
        job.check_shards()
    elif start.is_python:
        job.check_losses(start.program)


IN_PYTHON_ALONE = [the_one_that_fails_is_named, the_one_whose_state_it_is_is_named]
LONG = [many_faults, many_faults_between_commits, many_generations]
SHARDED = [shards_are_copied, shards_come_to_one_rank, shards_of_ranks_that_leave, shards_are_handed_over, shards_are_lost,
           shards_by_hand, shards_without_their_copies]
CASES = [killed_and_replaced, stopped, below_the_minimum, lost_before_run, one_that_comes_cannot_take_the_state, early_calls,
         fails, the_one_that_fails_is_named, the_one_whose_state_it_is_is_named, *SHARDED, *LONG]


ON_HOSTS = [on_hosts, shards_on_hosts]


def is_python(program):
    return pathlib.Path(program).name.startswith("python")


class Start:
    """Starts jobs of a case."""

    def __init__(self, sirtakirun, program, place):
        self.is_python = is_python(program)
        self.program = [program, str(pathlib.Path(__file__).with_name("elastic_program.py"))] if self.is_python else [program]
        self.hosts = Hosts(os.environ["ELASTIC_HOSTS"]) if "ELASTIC_HOSTS" in os.environ else None
        self._around = [*(self.hosts.enter("h1") if self.hosts else []), sirtakirun, "--elastic"]
        self.place = place
        self.jobs = []

    def __call__(self, *flags, arguments=()):
        folder = tempfile.mkdtemp(dir=self.place)
        self.jobs.append(Job([*self._around, "--flight-records", folder, *flags, *self.program], folder, *arguments))
        return self.jobs[-1]


def main(sirtakirun, program, *names):
    state = os.environ.get("ELASTIC_HOSTS")
    cases = [case for case in (ON_HOSTS if state else CASES) if not names or case.__name__ in names]
    if not is_python(program):
        cases = [case for case in cases if case not in IN_PYTHON_ALONE]
    if not (FULL or names or state):  # one of the long ones; with Python, whose workers start slowly, two of shards
        left_out = random.SystemRandom().sample(LONG, len(LONG) - 1)
        if is_python(program):
            left_out += random.SystemRandom().sample(SHARDED, len(SHARDED) - 2)
        cases = [case for case in cases if case not in left_out]
    for case in cases:
        with tempfile.TemporaryDirectory(dir=state) as place:
            start = Start(sirtakirun, program, place)
            print(f"--- {case.__name__}: {case.__doc__}", flush=True)
            try:
                case(start)
            finally:
                for job in start.jobs:
                    if job.process.poll() is None:
                        job.process.terminate()
                        job.process.wait(30)


main(*sys.argv[1:])
