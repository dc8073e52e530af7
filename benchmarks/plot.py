"""plot.py TABLE.json FOLDER: draws what benchmarks/run.sh --json has written on this machine.

bandwidth.svg: bytes of an all-reduce over its time, by size. efficiency.svg: the time of a step on one rank alone over
that on several. table.md: all of it, and the machine.
"""

import json
import math
import os
import platform
import re
import subprocess
import sys

from picture import COLOURS, Picture

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 250, 46, 54


class Chart(Picture):
    """A title, two axes and a legend."""

    def __init__(self, title, x_title, y_title):
        super().__init__(WIDTH, HEIGHT)
        self.text(LEFT, 24, title, size=15)
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_title, anchor="middle")
        self.upright_text(18, (TOP + HEIGHT - BOTTOM) / 2, y_title)

    def legend(self, names):
        for i, name in enumerate(names):
            y = TOP + 8 + 19 * i
            self.bar(WIDTH - RIGHT + 16, y - 9, 12, 10, COLOURS[i % len(COLOURS)])
            self.text(WIDTH - RIGHT + 34, y, name)

    def grid(self, ticks, scale):
        for tick in ticks:
            y = scale(tick)
            self.line([(LEFT, y), (WIDTH - RIGHT, y)], "#ddd")
            self.text(LEFT - 8, y + 4, f"{tick:g}", anchor="end")


def bandwidths(rows):
    """{name: {bytes: GB/s}} of all-reduces on 2 ranks."""
    curves = {}
    for row in rows:
        found = re.fullmatch(r"all-reduce of (\d+) MiB, (arena|private)", row["work"])
        if not found or row["ranks"] != 2:
            continue
        size = int(found[1]) << 20
        curves.setdefault(f"Sirtaki, {found[2]}", {})[size] = size / row["value"] * 1e-6
        if found[2] == "arena" and row["reference_value"]:
            curves.setdefault(row["reference"], {})[size] = size / row["reference_value"] * 1e-6
    first = [name for name in curves if name.startswith("Sirtaki")]
    return {name: curves[name] for name in first + [name for name in curves if name not in first]}


def ticks_to(top):
    step = 10 ** math.floor(math.log10(top))
    while top / step < 4:
        step /= 2
    return [step * i for i in range(int(top / step) + 1)]


def draw_bandwidth(rows, path):
    curves = bandwidths(rows)
    sizes = sorted({size for curve in curves.values() for size in curve})
    if len(sizes) < 2:
        return False
    top = 1.08 * max(value for curve in curves.values() for value in curve.values())
    low, high = math.log2(sizes[0]), math.log2(sizes[-1])

    def x(size):
        return LEFT + 16 + (math.log2(size) - low) / (high - low) * (WIDTH - RIGHT - LEFT - 32)

    def y(value):
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    picture = Chart("All-reduce of one vector, 2 ranks of one host", "size of the vector, MiB", "GB/s of vector")
    picture.grid(ticks_to(top), y)
    for size in sizes:
        picture.text(x(size), HEIGHT - BOTTOM + 18, str(size >> 20), anchor="middle")
    for i, curve in enumerate(curves.values()):
        points = [(x(size), y(value)) for size, value in sorted(curve.items())]
        picture.line(points, COLOURS[i % len(COLOURS)], 2.2)
        for point in points:
            picture.dot(*point, COLOURS[i % len(COLOURS)])
    picture.legend(curves)
    picture.save(path)
    return True


def efficiencies(rows):
    """{model and ranks: {variant: efficiency}}."""
    groups = {}
    for row in rows:
        work, _, kind = row["work"].rpartition(": ")
        if kind == "step" and row["ranks"] > 1:
            times = groups.setdefault((work, row["ranks"]), {"Sirtaki": row["value"]})
            times[row["reference"]] = row["reference_value"]
    result = {}
    for (work, ranks), times in groups.items():
        alone = times.pop("one rank alone", None)
        times.pop("one rank, plain LibTorch", None)
        if alone:
            result[f"{work}, {ranks} ranks"] = {variant: alone / time for variant, time in times.items()}
    return {name: shares for name, shares in result.items() if name.endswith(" 2 ranks")}


def draw_efficiency(rows, path):
    groups = efficiencies(rows)
    if not groups:
        return False
    variants = list(dict.fromkeys(variant for group in groups.values() for variant in group))
    top = 1.1

    def y(value):
        return HEIGHT - BOTTOM - min(value, top) / top * (HEIGHT - TOP - BOTTOM)

    picture = Chart("Time of a step on one rank alone over that on 2 ranks", "", "efficiency")
    picture.grid([0, 0.2, 0.4, 0.6, 0.8, 1.0], y)
    width = (WIDTH - RIGHT - LEFT) / len(groups)
    for column, (name, shares) in enumerate(groups.items()):
        left = LEFT + column * width
        bar = (width - 24) / len(variants)
        for i, variant in enumerate(variants):
            if variant in shares:
                x = left + 12 + i * bar
                picture.bar(x, y(shares[variant]), bar - 3, y(0) - y(shares[variant]), COLOURS[i % len(COLOURS)])
                picture.text(x + bar / 2 - 1, y(shares[variant]) - 4, f"{shares[variant]:.2f}", anchor="middle", size=10)
        for i, words in enumerate(name.rsplit(", ", 2)[:2]):
            picture.text(left + width / 2, HEIGHT - BOTTOM + 16 + 14 * i, words, anchor="middle", size=10)
    picture.legend(variants)
    picture.save(path)
    return True


def first_line(command):
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[0]
    except (OSError, IndexError):
        return "not found"


def machine():
    """Name and value of what the figures depend on."""
    with open("/proc/cpuinfo") as file:
        model = re.search(r"model name\s*: (.+)", file.read())
    with open("/proc/meminfo") as file:
        memory = int(re.search(r"MemTotal:\s*(\d+)", file.read())[1]) / (1 << 20)
    yield "processor", f"{model[1] if model else platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    yield "memory", f"{memory:.0f} GiB"
    yield "kernel", platform.release()
    yield "C library", " ".join(platform.libc_ver())
    yield "MPI", first_line(["mpirun", "--version"])
    yield "compiler", first_line(["g++", "--version"])
    version = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bootstrap.sh")
    with open(version) as file:
        yield "LibTorch", re.search(r"torch_version=(\S+)", file.read())[1]


def write_table(rows, path):
    with open(path, "w") as file:
        file.write("<!-- Written by benchmarks/plot.py. -->\n\n| machine | |\n|---|---|\n")
        for name, value in machine():
            file.write(f"| {name} | {value} |\n")
        file.write("\n| work | ranks | ours | reference | | ratio |\n|---|---|---|---|---|---|\n")
        for row in rows:
            value = "" if row["reference_value"] is None else f"{row['reference_value']:.4g}"
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
            file.write(f"| {row['work']} | {row['ranks']} | {row['value']:.4g} {row['unit']} | {row['reference'] or ''} | "
                       f"{value} | {ratio} |\n")


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1]) as file:
        rows = json.load(file)
    os.makedirs(sys.argv[2], exist_ok=True)
    for draw, name in ((draw_bandwidth, "bandwidth.svg"), (draw_efficiency, "efficiency.svg")):
        path = os.path.join(sys.argv[2], name)
        print(f"{path}: drawn" if draw(rows, path) else f"{name}: the table has not what it shows")
    write_table(rows, os.path.join(sys.argv[2], "table.md"))


main()
