"""check_timeline.py FOLDER RANKS [--cut]: what must hold for the timelines of a run, event by event.

--cut: the run was killed in the middle, so the ranks' files may end at different places.
"""

import json
import os
import sys

LANES = (2, 3)  # the small and the large one
PHASES = ("pack", "move", "unpack")
TICK = 0.0015  # a time's last digit, in microseconds, and what rounding does


def check(condition, *what):
    if not condition:
        sys.exit("check_timeline: " + " ".join(str(part) for part in what))


class Rank:
    """The events of one file, by what they are."""

    def __init__(self, folder, rank, cut):
        self.rank = rank
        with open(os.path.join(folder, f"rank-{rank}.json")) as file:
            self.events = json.load(file)
        check(self.events, "rank", rank, "has an empty file")
        self.spans = []  # (category, name, begin, end, args, track)
        self.instants = []
        open_spans = {}
        open_bars = {}  # by track
        for event in self.events:
            check(event["pid"] == rank + 1, "rank", rank, "has an event of another:", event)
            if event["ph"] == "M":
                continue
            check(event["ts"] >= 0, "before time 0:", event)
            if event["ph"] == "X":
                check(event["dur"] > 0, "no duration:", event)
                self.add_span(event, event["ts"] + event["dur"])
            elif event["ph"] == "i":
                self.instants.append(event)
            elif event["ph"] == "b":
                key = event["cat"], event["id2"]["local"]
                check(key not in open_spans, "begun twice:", event)
                open_spans[key] = event
            elif event["ph"] == "B":
                check(event["tid"] not in open_bars, "begun within another:", event)
                open_bars[event["tid"]] = event
            elif event["ph"] == "E":
                begin = open_bars.pop(event["tid"], None)
                check(begin is not None and begin["name"] == event["name"], "ends another:", event)
                check(event["ts"] >= begin["ts"], "ends before it begins:", event)
                self.add_span(begin, event["ts"])
            else:
                check(event["ph"] == "e", "of no known kind:", event)
                begin = open_spans.pop((event["cat"], event["id2"]["local"]), None)
                check(begin is not None, "ended before it began:", event)
                check(event["ts"] >= begin["ts"], "ends before it begins:", event)
                self.add_span(begin, event["ts"])
        check(cut or not open_spans and not open_bars, "not ended:", open_spans, open_bars)
        self.begun = list(open_spans.values())
        names = [e["args"]["name"] for e in self.events if e.get("name") == "process_name"]
        check(len(names) == 1 and names[0].startswith(f"rank {rank} on "), "the rank's name:", names)
        check(not self.of("lost"), "events were lost:", self.of("lost"))

    def add_span(self, event, end):
        self.spans.append((event["cat"], event["name"], event["ts"], end, event["args"], event["tid"]))

    def of(self, category):
        return [span for span in self.spans if span[0] == category]

    def groups(self):
        """{(track, number): (name, begin, end, args)} of what the lanes have done."""
        return {(s[5], s[4]["number"]): (s[1], s[2], s[3], s[4]) for s in self.of("finish")}

    def submits(self):
        """{name: times of its calls, also of those that were never agreed on}"""
        times = {}
        calls = [(span[2], span[1]) for span in self.of("negotiate")]
        calls += [(event["ts"], event["name"]) for event in self.begun if event["cat"] == "negotiate"]
        for begin, name in sorted(calls):
            times.setdefault(name, []).append(begin)
        return times

    def agreements(self):
        times = {}
        for _, name, begin, end, _, _ in self.of("negotiate"):
            times.setdefault(name, []).append((begin, end))
        return times


def check_lanes(rank):
    groups = rank.groups()
    check(groups, "rank", rank.rank, "has moved nothing")
    queued = {(s[5], s[4]["number"]): s for s in rank.of("queue")}
    phases = {}
    for category, name, begin, end, args, track in rank.spans:
        if category in PHASES:
            phases.setdefault((track, args["number"]), []).append((begin, end, category, name))
    for key, (name, begin, end, args) in groups.items():
        check(key[0] in LANES, "a group on no lane:", key)
        check(args["bytes"] > 0 and args["count"] > 0, "a group of nothing:", name, args)
        check(key in queued, "never queued:", name)
        check(queued[key][3] <= begin + TICK, "began before its turn:", name)
        steps = sorted(phases.get(key, []))
        moves = [step for step in steps if step[2] == "move"]
        check(moves, "nothing was moved:", name, steps)
        check(all(move[3].startswith("move: ") for move in moves), "moved by nobody:", moves)
        for before, after in zip(steps, steps[1:]):
            check(before[1] <= after[0] + TICK, "phases overlap:", name, before, after)
        check(steps[0][0] >= begin - TICK and steps[-1][1] <= end + TICK, "a phase outside of", name, begin, end, steps)
    return groups


def check_large_lane(rank):
    spans = sorted((s[2], s[3], s[1]) for s in rank.of("finish") if s[5] == 3)
    for before, after in zip(spans, spans[1:]):
        check(before[1] <= after[0] + TICK, "the large lane does two at once:", before, after)


def check_agreements(ranks):
    """A call is agreed on when all ranks have made it, not before: the times are of one clock."""
    calls = [rank.submits() for rank in ranks]
    agreed = [rank.agreements() for rank in ranks]
    checked = 0
    for name in sorted(set().union(*agreed)):
        uses = min(len(times.get(name, [])) for times in agreed)
        for use in range(uses):
            last = max(times[name][use] for times in calls)
            for rank, times in enumerate(agreed):
                begin, end = times[name][use]
                check(abs(begin - calls[rank][name][use]) < TICK, "begun otherwise than called:", name)
                check(end >= last - TICK, name, "was agreed on by rank", rank, "at", end, "but called at", last)
                checked += 1
    return checked


def main():
    folder, size = sys.argv[1], int(sys.argv[2])
    cut = "--cut" in sys.argv
    ranks = [Rank(folder, rank, cut) for rank in range(size)]
    groups = [check_lanes(rank) for rank in ranks]
    for rank in ranks:
        check_large_lane(rank)
    common = set.intersection(*(set(of) for of in groups))
    check(common, "the ranks have no group in common")
    if not cut:
        check(all(set(of) == common for of in groups), "the ranks have other groups than each other")
    for key in common:
        first = groups[0][key]
        for of in groups:
            check(of[key][0] == first[0] and of[key][3]["count"] == first[3]["count"], "other groups:", first, of[key])
    agreements = check_agreements(ranks)
    check(agreements > 0, "nothing was agreed on")
    steps = [rank.of("step") for rank in ranks]
    if not cut:
        check(len({len(of) for of in steps}) == 1 and steps[0], "steps:", [len(of) for of in steps])
        for rank in ranks:
            calls, agreed = rank.submits(), rank.agreements()
            check({n: len(t) for n, t in calls.items()} == {n: len(t) for n, t in agreed.items()}, "calls that nobody agreed on")
    for of in steps:
        check([s[4]["number"] for s in of] == list(range(1, len(of) + 1)), "steps are not counted one by one")
        check(all(a[3] <= b[2] + TICK for a, b in zip(of, of[1:])), "steps overlap")
    print(f"{size} ranks: {sum(len(rank.events) for rank in ranks)} events, {len(common)} groups, "
          f"{agreements} agreements, {len(steps[0])} steps")


main()
