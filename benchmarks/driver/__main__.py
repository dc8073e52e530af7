"""Runs works of the benchmarks, prints one table and writes it as JSON. See ../README.md."""

import argparse
import json
import os
import sys
import time

import launch
import table
import works


def parse():
    parser = argparse.ArgumentParser(prog="benchmarks/run.sh", description="Measures Sirtaki beside its references.")
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"works: {' '.join(works.TABLE)} (the default); {' '.join(works.OTHERS)}")
    parser.add_argument("--json", metavar="FILE", help="write the table there as well")
    parser.add_argument("--full", action="store_true", help="more rounds")
    parser.add_argument("--ranks", type=int, default=2, help="of the collectives (2)")
    parser.add_argument("--tiny", action="store_true", help="to try the scripts: the figures mean nothing")
    parser.add_argument("--build", metavar="FOLDER", default=os.path.join(launch.TOP, "build", "release"),
                        help="where the programs were built")
    parser.add_argument("--verbose", action="store_true", help="show what the programs write")
    arguments = parser.parse_args()
    for name in arguments.names:
        if why := works.why_unknown(name):
            parser.error(why)
    if arguments.ranks < 1:
        parser.error(f"{arguments.ranks} is no number of ranks")
    if arguments.json and not os.path.isdir(os.path.dirname(os.path.abspath(arguments.json))):
        parser.error(f"no folder for {arguments.json}")
    return arguments


def main():
    arguments = parse()
    samples = table.Samples()
    launcher = launch.Launcher(arguments.build, arguments.verbose)
    runner = works.Runner(launcher, samples, arguments.ranks, arguments.full, arguments.tiny)
    for name in arguments.names or works.TABLE:
        begin = time.monotonic()
        sys.stderr.write(f"{name} ... ")
        sys.stderr.flush()
        try:
            getattr(runner, name)()
        except launch.Failed as error:
            runner.failed.append(str(error))
        sys.stderr.write(f"{time.monotonic() - begin:.0f} s\n")
    rows = samples.rows()
    print("\n".join(table.text(rows)))
    for why, what in runner.skipped.items():
        print(f"skipped: {', '.join(what)}: {why}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)
            file.write("\n")
    for failure in runner.failed:
        sys.stderr.write(f"benchmarks/run.sh: {failure}\n")
    nothing = 77 if runner.skipped else 1  # 77: it cannot run here
    sys.exit(1 if runner.failed else 0 if rows else nothing)


main()
