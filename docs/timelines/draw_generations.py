"""draw_generations.py TIMELINE.json PICTURE.svg TITLE: draws the generations of an elastic job, and when each of its workers took steps.

The file is what `sirtakirun --merge-timelines` makes.
"""

import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "benchmarks"))

from picture import Picture  # noqa: E402

WIDTH, LEFT, RIGHT, TOP, ROW = 960, 120, 14, 50, 22
GENERATIONS = ("#cfe3d8", "#c9d8ee")
PARTS = {"leave": "#e8a27c", "join": "#8fbce6", "get the state": "#d6c33a"}
STEP, LEFT_JOB = "#0b6e4f", "#c22a2a"


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    with open(sys.argv[1]) as file:
        events = json.load(file)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    bars = [event for event in events if event.get("cat") == "elastic" and event["ph"] == "X"]
    ends = [event for event in events if event.get("cat") == "elastic" and event["ph"] == "i"]
    generations = [bar for bar in bars if bar["name"].startswith("generation ")]
    changes = [bar for bar in bars if bar["name"] in PARTS]
    steps = [event for event in events if event.get("cat") == "step" and event["ph"] in "be"]
    workers = sorted(pid for pid, name in names.items() if name.startswith("worker "))
    end = max([bar["ts"] + bar["dur"] for bar in bars] + [step["ts"] for step in steps])
    height = TOP + (2 + len(workers)) * ROW + 46
    picture = Picture(WIDTH, height)
    picture.text(8, 22, sys.argv[3], size=15)

    def x(time):
        return LEFT + time / end * (WIDTH - LEFT - RIGHT)

    second = 0
    while second * 1e6 <= end:
        picture.line([(x(second * 1e6), TOP - 4), (x(second * 1e6), height - 36)], "#eee")
        picture.text(x(second * 1e6), TOP - 8, f"{second} s", anchor="middle", size=10, colour="#666")
        second += max(1, round(end / 1e7))
    picture.text(8, TOP + 14, "generations")
    for number, bar in enumerate(generations):
        picture.bar(x(bar["ts"]), TOP, x(bar["dur"]) - LEFT, ROW - 4, GENERATIONS[number % 2])
        label = bar["name"].split(": workers")[0]
        room = int((x(bar["dur"]) - LEFT) / 5.8)
        picture.text(x(bar["ts"]) + 4, TOP + 13, label if len(label) <= room else label[:max(room - 1, 0)], size=10)
    picture.text(8, TOP + ROW + 14, "changes")
    for bar in changes:
        picture.bar(x(bar["ts"]), TOP + ROW, max(x(bar["dur"]) - LEFT, 1), ROW - 4, PARTS[bar["name"]])
    for row, pid in enumerate(workers, 2):
        picture.text(8, TOP + row * ROW + 14, names[pid])
        begin = end_of = None  # of steps that follow each other without a gap that one could see
        for at in [*sorted(x(step["ts"]) for step in steps if step["pid"] == pid and step["ph"] == "e"), float("inf")]:
            if end_of is not None and at - end_of > 4:
                picture.bar(begin, TOP + row * ROW, end_of - begin + 0.8, ROW - 4, STEP)
                begin = None
            begin, end_of = at if begin is None else begin, at
        for event in ends:
            if event["name"].startswith(names[pid].split(" on ")[0] + " "):
                picture.bar(x(event["ts"]) - 1, TOP + row * ROW - 2, 3, ROW, LEFT_JOB)
    left = LEFT
    for name, colour in {**PARTS, "steps": STEP, "the worker has ended": LEFT_JOB}.items():
        picture.bar(left, height - 24, 12, 10, colour)
        picture.text(left + 17, height - 15, name, size=11)
        left += 34 + 6.4 * len(name)
    picture.save(sys.argv[2])


main()
