"""The memory that the driver reports of a job: Pss, so what ranks share counts once, and none of the launcher's own."""

import os
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "benchmarks", "driver"))

import memory  # noqa: E402

MIB = 1 << 20

# The launcher has 64 MiB and starts two ranks. Each has 16 MiB of its own and 64 MiB that both share.
RANK = """
import mmap, os, sys
own = b"x" * (16 << 20)
with open(sys.argv[1], "r+b") as file:
    shared = mmap.mmap(file.fileno(), 64 << 20)
for page in range(0, 64 << 20, 4096):
    shared[page] = 1
os.write(1, b"ready\\n")
sys.stdin.read()
"""
LAUNCHER = """
import os, subprocess, sys
own = b"x" * (64 << 20)
ranks = [subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], env={**os.environ, "PMI_RANK": str(rank)},
                          stdin=sys.stdin) for rank in range(2)]
sys.exit(max(rank.wait() for rank in ranks))
"""


def read_pss():
    assert memory.pss("Rss:                9000 kB\nPss:                3000 kB\nPss_Anon:           2000 kB\n") == 3000 * 1024
    assert memory.pss("Rss:                9000 kB\nPss_Anon:           2000 kB\n") is None
    assert memory.pss("") is None


def wait_for(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def count_shared_pages_once():
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(64 * MIB)
        job = subprocess.Popen([sys.executable, "-c", LAUNCHER, RANK, file.name], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
        watch = memory.Watch(2)
        watch.begin(job.pid)
        for _ in range(2):
            line = job.stdout.readline()
            assert line == "ready\n", line
        wait_for(lambda: watch.peak is not None and watch.peak > 48, f"the peak stays {watch.peak}")
        assert len(memory.ranks_below(job.pid)) == 2
        job.communicate("")
        watch.end()
        assert job.returncode == 0
    # 16 MiB and half of 64, and what an interpreter has; by resident set it would be 80 and that.
    assert 48 < watch.peak < 78, watch.peak


def see_the_only_process():
    job = subprocess.Popen([sys.executable, "-c", "import sys; own = b'x' * (32 << 20); sys.stdin.read()"],
                           stdin=subprocess.PIPE)
    watch = memory.Watch(None)
    watch.begin(job.pid)
    wait_for(lambda: watch.peak is not None and watch.peak > 32, "the process is not seen")
    job.communicate(b"")
    watch.end()


if memory.pss(open("/proc/self/smaps_rollup").read() if os.path.exists("/proc/self/smaps_rollup") else "") is None:
    print("skipped: " + memory.WHY_NONE)
    sys.exit(77)
read_pss()
count_shared_pages_once()
see_the_only_process()
