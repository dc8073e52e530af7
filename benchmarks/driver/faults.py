"""faults.py STATE [--build FOLDER] SYSTEM FAULT PROGRAM...: see ../elastic.sh, which has made the two hosts that STATE tells of.

The ranks write their events by a clock that all hosts of this machine share; what is measured lies between them.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time

RANKS = 4
HOSTS = (1, 2)
SETTLED = 40  # steps that the ranks have made together before anything happens to them
PATIENCE = 120.0  # seconds, for a step
OUR_LIMIT = "2s"  # peer_timeout


class NoStep(Exception):
    """The text says what did not come."""


class Hosts:
    def __init__(self, state):
        self.state = state
        with open(os.path.join(state, "firsts")) as file:
            self._firsts = [int(line) for line in file]
        self._environment = {**os.environ, "GLOO_SOCKET_IFNAME": "veth0", "OMP_NUM_THREADS": "1",
                             "PATH": os.path.join(state, "bin") + os.pathsep + os.environ["PATH"]}
        self._log = open(os.path.join(state, "log"), "a")
        self._started = []
        self.folder = os.path.join(state, "events")
        os.mkdir(self.folder)
        # Some launchers take no options of ssh.
        os.mkdir(os.path.join(state, "bin"))
        self._script("bin/ssh", f'exec {shutil.which("ssh")} -F {state}/ssh_config "$@"')
        self.find = self._script("find.sh", f"cat {state}/list")

    def _script(self, name, line):
        path = os.path.join(self.state, name)
        with open(path, "w") as file:
            file.write(f"#!/bin/sh\n{line}\n")
        os.chmod(path, 0o755)
        return path

    def list(self, hosts):
        """The hosts that find.sh names from now on."""
        path = os.path.join(self.state, "list")
        with open(path + ".new", "w") as file:
            file.writelines(f"h{host}:{RANKS // len(HOSTS)}\n" for host in hosts)
        os.rename(path + ".new", path)

    def enter(self, host):
        return ["nsenter", "--target", str(self._firsts[host - 1]), "--net", "--uts", "--mount", "--pid", f"--wd={os.getcwd()}"]

    def start(self, host, command, **variables):
        process = subprocess.Popen([*self.enter(host), *command], stdin=subprocess.DEVNULL, stdout=self._log,
                                   stderr=subprocess.STDOUT, env={**self._environment, **variables})
        if host == 1:
            self._started.append(process)

    def check(self):
        """Raises NoStep if what was started on the first host, to which nothing is done, has ended."""
        if any(process.poll() is not None for process in self._started):
            raise NoStep(f"it has ended: {(self.last_words() or ['without a word'])[-1]}")

    def processes(self, host):
        """The processes of the host but its first one: {number there: number here}."""
        of_host = os.readlink(f"/proc/{self._firsts[host - 1]}/ns/pid")
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{name}/ns/pid") == of_host and int(name) != self._firsts[host - 1]:
                    with open(f"/proc/{name}/status") as file:
                        there = re.search(r"^NSpid:.*\t(\d+)$", file.read(), re.MULTILINE)[1]
                    found[int(there)] = int(name)
            except OSError:
                pass  # it has ended meanwhile
        return found

    def end(self, host):
        for process in self.processes(host).values():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def last_words(self):
        self._log.flush()
        with open(self._log.name, errors="replace") as file:
            return file.read().strip().splitlines()[-12:]


# ---- systems ----


class System:
    """begin() starts the job on these hosts, and add() another host's part."""

    def __init__(self, hosts, program, build):
        self.hosts = hosts
        self.program = program
        self.build = build

    def begin(self, hosts):
        for host in hosts:
            self.add(host)

    def add(self, host):
        self.hosts.list(HOSTS)


class Ours(System):
    variant = "ours"

    def begin(self, hosts):
        self.hosts.list(hosts)
        self.hosts.start(1, [os.path.join(self.build, "sirtakirun"), "--max-np", str(RANKS), "--host-discovery-script",
                             self.hosts.find, "--blacklist-cooldown-range", "1,2", "--peer-timeout", OUR_LIMIT,
                             "--ping-interval", "0.5s", "--ssh-args", f"-F {self.hosts.state}/ssh_config",
                             "--network-interfaces", "veth0", *self.program, self.hosts.folder])


class OursInPython(Ours):
    variant = "ours, in Python"


class Torchrun(System):
    variant = "torchrun --max-restarts"

    def add(self, host):
        python, script = self.program[:-1], self.program[-1]
        # Without the variable ranks that were started again read the addresses of those before in the store of the agents (torch
        # 2.11: "connectFullMesh failed … Connection refused"), and the job never goes on.
        self.hosts.start(host, [*python, "-m", "torch.distributed.run", "--nnodes", f"1:{len(HOSTS)}", "--nproc-per-node",
                                str(RANKS // len(HOSTS)), "--max-restarts", "100", "--rdzv-id", "elastic", "--rdzv-backend",
                                "c10d", "--rdzv-endpoint", "h1:29400", script, self.hosts.folder],
                         TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


class Torchft(System):
    variant = "torchft over gloo"

    def begin(self, hosts):
        python = next(word for word in self.program if word.startswith("/"))
        lighthouse = os.path.join(os.path.dirname(python), "torchft_lighthouse")
        self.hosts.start(1, [lighthouse, "--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000",
                             "--bind", "h1:29510"])
        super().begin(hosts)

    def add(self, host):
        python, script = self.program[:-1], self.program[-1]
        each = RANKS // len(HOSTS)
        for replica in range((host - 1) * each, host * each):
            self.hosts.start(host, [*python, "-m", "torch.distributed.run", "--master-addr", f"h{host}", "--master-port",
                                    str(29600 + replica), "--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", "100",
                                    script, self.hosts.folder],
                             REPLICA_GROUP_ID=str(replica), NUM_REPLICA_GROUPS=str(RANKS), TORCHFT_LIGHTHOUSE="http://h1:29510")


class Horovod(System):
    variant = "Horovod with Gloo"

    def begin(self, hosts):
        self.hosts.list(hosts)
        horovodrun = [self.program[0], os.path.join(os.path.dirname(self.program[0]), "horovodrun")]
        self.hosts.start(1, [*horovodrun, "--gloo", "-np", str(RANKS * len(hosts) // len(HOSTS)), "--min-np", "1", "--max-np",
                             str(RANKS), "--host-discovery-script", self.hosts.find, "--blacklist-cooldown-range", "1", "2",
                             "--network-interfaces", "veth0", *self.program, self.hosts.folder])


SYSTEMS = {"ours": Ours, "python": OursInPython, "torchrun": Torchrun, "torchft": Torchft, "horovod": Horovod}


# ---- what the ranks have written ----


class Rank:
    def __init__(self, path):
        self.path = path
        name = os.path.basename(path).removeprefix("events-")
        self.name = name
        self.host = int(name[1:].partition("-")[0])
        self.pid = int(name.rpartition("-")[2])  # on its host
        self.started = self.ready = self.killed = None
        self.steps = []  # (time, number, ranks, group)
        self._read = 0

    def read(self):
        with open(self.path) as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith("\n"):
                    break
                self._read += len(line)
                event, at, *words = line.split()
                if event == "step":
                    self.steps.append((float(at), *map(int, words)))
                elif event == "start":
                    self.started = float(at)
                else:
                    setattr(self, event, float(at))


class Job:
    def __init__(self, hosts, system):
        self.hosts = hosts
        self.system = system
        self.ranks = {}

    def look(self):
        for name in os.listdir(self.hosts.folder):
            if name.startswith("events-") and name not in self.ranks:
                self.ranks[name] = Rank(os.path.join(self.hosts.folder, name))
        for rank in self.ranks.values():
            rank.read()
        return list(self.ranks.values())

    def wait(self, what, find):
        """What find(ranks) returns, as soon as that is something."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = find(self.look())
            if found:
                return found
            self.hosts.check()
            time.sleep(0.05)
        raise NoStep(f"no {what} within {PATIENCE:.0f} s")

    def settle(self, count):
        """The ranks that train together, when they have made some steps."""
        def find(ranks):
            together = [rank for rank in ranks if rank.steps and rank.steps[-1][2] == count]
            settled = [rank for rank in together if sum(step[2:] == rank.steps[-1][2:] for step in rank.steps) >= SETTLED]
            return len(settled) == count and settled
        return self.wait(f"{SETTLED} steps of {count} ranks", find)

    @staticmethod
    def step_time(ranks):
        times = [step[0] for step in ranks[0].steps[-SETTLED:]]
        return statistics.median(later - earlier for earlier, later in zip(times, times[1:]))

    def next_step(self, since, before, hosts):
        """The time of the first step behind `since` of another group than those of the ranks `before`, on these hosts."""
        groups = {rank.name: rank.steps[-1][3] for rank in before}

        def find(ranks):
            times = [step[0] for rank in ranks for step in rank.steps
                     if rank.host in hosts and step[0] > since and step[3] != groups.get(rank.name)]
            return min(times, default=None)
        return self.wait("step", find)


def killed(job, ranks):
    victim = next(rank for rank in ranks if rank.host == 2)
    open(os.path.join(job.hosts.folder, f"kill-{victim.name}"), "w").close()
    return job.wait("end of a rank", lambda ranks: victim.killed), HOSTS


def host_killed(job, ranks):
    since = time.monotonic()
    job.hosts.end(2)
    return since, (1,)


def link_down(job, ranks):
    since = time.monotonic()
    subprocess.run([*job.hosts.enter(2), "ip", "link", "set", "veth0", "down"], check=True)
    return since, (1,)


def stopped(job, ranks):
    victim = next(rank for rank in ranks if rank.host == 2)
    process = job.hosts.processes(2)[victim.pid]
    since = time.monotonic()
    os.kill(process, signal.SIGSTOP)
    return since, HOSTS


FAULTS = {"kill": (killed, "a rank is killed in its backward pass"), "host": (host_killed, "all processes of a host are killed"),
          "link": (link_down, "the link of a host goes down"), "stop": (stopped, "a rank is stopped")}
COMES = "a host comes"
LATER, STANDS, STEPS, STARTS = "next step", "the others stand still", "steps that the others lose", "its start"


def works_of(fault):
    """The names of the works that are measured."""
    if fault == "join":
        return [f"{COMES}: {what}" for what in (LATER, STANDS, STEPS, STARTS)]
    return [f"{FAULTS[fault][1]}: {LATER}"]


def lose(job, fault):
    """Seconds, one for each of the works."""
    job.system.begin(HOSTS)
    ranks = job.settle(RANKS)
    step = job.step_time(ranks)
    since, hosts = FAULTS[fault][0](job, ranks)
    job.look()
    return [job.next_step(since, ranks, hosts) - since - step]


def join(job):
    job.system.begin(HOSTS[:1])
    ranks = job.settle(RANKS // len(HOSTS))
    step = job.step_time(ranks)
    since = time.monotonic()
    job.system.add(2)
    job.settle(RANKS)
    everyone = job.look()
    together = min(step[0] for rank in everyone for step in rank.steps if step[0] > since and step[2] == RANKS)
    new = [rank for rank in everyone if rank.host == 2 and any(step[2] == RANKS for step in rank.steps)]
    # Steps that are made again are no progress.
    progress, most = [], 0
    for at, number in sorted((step[0], step[1]) for rank in everyone if rank.host == 1 for step in rank.steps):
        if number > most:
            most = number
            progress.append(at)
    longest = max(later - earlier for earlier, later in zip(progress, progress[1:]) if later > since)
    ready = max(rank.ready for rank in new)
    stands = longest - step
    return [together - ready - step, stands, stands / step, max(rank.ready - rank.started for rank in new)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("state")
    parser.add_argument("system", choices=list(SYSTEMS))
    parser.add_argument("fault", choices=[*FAULTS, "join"])
    parser.add_argument("--build", default="build/release")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    hosts = Hosts(arguments.state)
    system = SYSTEMS[arguments.system](hosts, arguments.program, os.path.abspath(arguments.build))
    job = Job(hosts, system)
    why = None
    works = works_of(arguments.fault)
    try:
        values = join(job) if arguments.fault == "join" else lose(job, arguments.fault)
    except NoStep as error:
        values, why = [None] * len(works), str(error)
        print("\n".join(hosts.last_words()), file=sys.stderr)
    for host in HOSTS:
        hosts.end(host)
    for work, value in zip(works, values):
        variant = system.variant if why is None else f"{system.variant}: {why}"
        unit = "steps" if work.endswith(STEPS) else "s"
        print(json.dumps({"work": work, "ranks": RANKS, "variant": variant, "value": value, "unit": unit}))


main()
