"""Memory of the ranks of a job by proportional set size (Pss): a page that n processes map counts one n-th in each."""

import os
import re
import threading

PAUSE = 0.005  # seconds between two looks
RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK=")
WHY_NONE = "/proc/PID/smaps_rollup cannot be read: it takes Linux 4.14, and ranks of the same user"


def pss(rollup):
    """Bytes that the text of a smaps_rollup gives; None if it gives none."""
    found = re.search(r"^Pss: +(\d+) kB$", rollup, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _read(process, name):
    try:
        with open(f"/proc/{process}/{name}", "rb") as file:
            return file.read()
    except OSError:  # it has ended
        return b""


def _children():
    """{process: those that it has started} of all that run."""
    children = {}
    for name in os.listdir("/proc"):
        fields = _read(name, "stat").rpartition(b")")[2].split() if name.isdigit() else []
        if len(fields) > 1:
            children.setdefault(int(fields[1]), []).append(int(name))
    return children


def ranks_below(process):
    """The processes that a launcher has started, by the variable that it gives them; not what these start."""
    children, ranks, others = _children(), [], [process]
    for parent in others:  # which grows meanwhile
        for child in children.get(parent, []):
            is_rank = any(entry.startswith(RANK_VARIABLES) for entry in _read(child, "environ").split(b"\0"))
            (ranks if is_rank else others).append(child)
    return ranks


class Watch:
    """Looks at the ranks of one job from begin() to end(), in a thread of its own."""

    def __init__(self, ranks):
        """`ranks`: how many a launcher starts; None: the process itself is the only one."""
        self.ranks = ranks
        self.peak = None  # MiB a rank: the most that all had together at a time, over their number
        self._ended = threading.Event()
        self._thread = None

    def begin(self, process):
        self._thread = threading.Thread(target=self._look, args=(process,), daemon=True)
        self._thread.start()

    def end(self):
        self._ended.set()
        self._thread.join()

    def _look(self, process):
        ranks = [process] if self.ranks is None else []
        while not self._ended.is_set():
            if not ranks:
                found = ranks_below(process)
                ranks = found if len(found) == self.ranks else []
            sizes = [pss(_read(rank, "smaps_rollup").decode()) for rank in ranks]
            if sizes and None not in sizes:
                self.peak = max(self.peak or 0, sum(sizes) / len(sizes) / (1 << 20))
            self._ended.wait(PAUSE)
