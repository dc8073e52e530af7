"""draw.py [--pipeline] TIMELINE.json PICTURE.svg TITLE FIRST LAST: draws the steps FIRST to LAST of a timeline of all ranks.

The file is what `sirtakirun --merge-timelines` makes. With --pipeline the batches FIRST to LAST of a pipeline are drawn, and
nothing else.
"""

import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "benchmarks"))

from picture import Picture  # noqa: E402

WIDTH, LEFT, RIGHT, TOP = 960, 100, 14, 60
ROW, GAP = 16, 8
LETTER = 5.6  # pixels of a letter, about
ROUNDING = 0.002  # microseconds: times are whole nanoseconds
COLOURS = {"step": "#cfe3d8", "mark": "#c9b4e0", "the program waits": "#e8a27c", "negotiate": "#8fbce6",
           "queue": "#dddddd", "an operation": "#7fc0a4", "move": "#0b6e4f", "pack, unpack": "#d6c33a", "stall": "#c22a2a",
          "batch": "#cfe3d8", "forward pass": "#8fbce6", "backward pass": "#7fc0a4", "bubble": "#f6e3d7", "sum": "#d6c33a"}
KINDS = {"wait_for": "the program waits", "finish": "an operation", "pack": "pack, unpack", "unpack": "pack, unpack",
         "reduce": "sum"}
PASSES = {"F": "forward pass", "B": "backward pass"}
DARK = ("#0b6e4f",)


class Span:
    def __init__(self, event, end):
        self.kind = KINDS.get(event["cat"], event["cat"])
        if event["cat"] == "pass":
            self.kind = PASSES[event["name"][0]]
        self.begin, self.end = event["ts"], end
        self.track = event["pid"], event["tid"]
        self.number = event["args"].get("number")
        self.name = event["name"].split(": ", 1)[-1]


def read(path):
    """The spans, the stalls as (rank, track, time), and the names of ranks and tracks."""
    with open(path) as file:
        events = json.load(file)
    spans, stalls, names, begun = [], [], {}, {}
    for event in events:
        track = event["pid"], event["tid"]
        if event["ph"] == "M":
            if event["name"] == "process_name":
                names[event["pid"]] = event["args"]["name"]
            elif event["name"] == "thread_name":
                names[track] = event["args"]["name"]
        elif event["ph"] == "X":
            spans.append(Span(event, event["ts"] + event["dur"]))
        elif event["ph"] == "i":
            if event["cat"] == "stall":
                stalls.append((track, event["ts"]))
        else:
            key = track if event["ph"] in "BE" else (event["pid"], event["cat"], event["id2"]["local"])
            if event["ph"] in "bB":
                begun[key] = event
            else:
                spans.append(Span(begun.pop(key), event["ts"]))
    return spans, stalls, names


def rows_of(spans):
    """[(span, row)]: none covers another; what contains others is above them."""
    ends, placed = [], []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        row = next((i for i, end in enumerate(ends) if end <= span.begin + ROUNDING), len(ends))
        ends[row:row + 1] = [span.end]
        placed.append((span, row))
    return placed, len(ends)


def tick_of(length):
    """1, 2 or 5 times a power of ten, of which about eight make the length."""
    step = 10.0 ** len(str(int(length)))
    for divisor in (2, 2.5, 2) * 12:
        if length / step >= 6:
            break
        step /= divisor
    return step


def draw(path, out, title, first, last, pipeline):
    spans, stalls, names = read(path)
    unit = "batch" if pipeline else "step"
    window = [span for span in spans if span.kind == unit and first <= span.number <= last]
    if not window:
        sys.exit(f"draw.py: {path} has no {unit} {first} to {last}")
    if pipeline:  # batches are seen by their passes, and the last rank begins to wait before the first one computes
        tracks = {span.track for span in window}
        spans = [span for span in spans if span.track in tracks and span.kind != "batch" and first <= span.number <= last]
        window = [span for span in spans if span.kind != "bubble"]
        stalls = []
    begin, end = min(span.begin for span in window), max(span.end for span in window)
    # What was before the first gradient is seen as well: forward, and who holds the others up.
    margin = (0.01 if pipeline else 0.12) * (end - begin)
    begin, end = begin - margin, end + 0.3 * margin
    spans = [span for span in spans if span.begin < end and span.end > begin]
    tracks = {}
    for track in sorted({span.track for span in spans}, key=lambda track: (track[0], track[1] < 1000, track[1])):
        tracks[track] = rows_of([span for span in spans if span.track == track])
    ranks = sorted({rank for rank, _ in tracks})
    height = TOP + sum(rows * ROW + GAP for _, rows in tracks.values()) + len(ranks) * (ROW + GAP) + 56
    picture = Picture(WIDTH, height)
    picture.text(LEFT, 24, title, size=15)

    def x(time):
        return LEFT + (min(max(time, begin), end) - begin) / (end - begin) * (WIDTH - LEFT - RIGHT)

    tick = tick_of(end - begin)
    time = 0
    while begin + time <= end:
        picture.line([(x(begin + time), TOP - 14), (x(begin + time), height - 44)], "#eee")
        picture.text(x(begin + time), TOP - 18, f"{time / 1000:g} ms", anchor="middle", size=10, colour="#666")
        time += tick

    y = TOP
    for rank in ranks:
        picture.text(8, y + 12, names[rank].split(" on ")[0], size=13)
        picture.line([(8, y - 3), (WIDTH - RIGHT, y - 3)], "#bbb")
        y += ROW
        for track, (placed, rows) in tracks.items():
            if track[0] != rank:
                continue
            picture.text(LEFT - 8, y + 11, names.get(track, "program"), anchor="end", size=10, colour="#666")
            for span, row in placed:
                left, right = x(span.begin), x(span.end)
                colour = COLOURS[span.kind]
                picture.bar(left, y + row * ROW, max(right - left, 0.6), ROW - 2, colour)
                name = f"{span.kind} {span.number}" if span.kind in ("step", "batch") else span.name
                if span.kind == "bubble":
                    continue
                room = int((right - left - 6) / LETTER)
                if room >= min(len(name), 5):
                    name = name if len(name) <= room else name[:room - 1] + "…"
                    picture.text(left + 3, y + row * ROW + 11, name, size=10,
                                 colour="white" if colour in DARK else "#222")
            for at, time in stalls:
                if at == track and begin < time < end:
                    picture.bar(x(time) - 1, y - 2, 2.5, rows * ROW + 2, COLOURS["stall"])
            y += rows * ROW + GAP
        y += GAP

    shown = {span.kind for span in spans} | ({"stall"} if any(begin < time < end for _, time in stalls) else set())
    left = LEFT
    for kind, colour in COLOURS.items():
        if kind in shown:
            picture.bar(left, height - 30, 12, 10, colour)
            picture.text(left + 17, height - 21, kind, size=11)
            left += 34 + 6.4 * len(kind)
    picture.save(out)


def main():
    pipeline = sys.argv[1:2] == ["--pipeline"]
    words = sys.argv[2 if pipeline else 1:]
    if len(words) != 5:
        sys.exit(__doc__)
    draw(words[0], words[1], words[2], int(words[3]), int(words[4]), pipeline)


main()
