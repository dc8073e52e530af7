"""Pipelines: who is measured, and what each side loses beyond what bubbles take."""

import statistics

import table

BATCH, MICRO_BATCHES, RANKS = 512, 8, 2
TITLE = f"pipeline of the MLP, batch {BATCH} as {MICRO_BATCHES} micro-batches"
STEP = f"{TITLE}: step"
# The same stages with nothing sent, of our programs in C++ and of those of the peers in Python: what each side is measured by.
UNSENT, UNSENT_PEERS = "the stages with nothing sent", "the stages with nothing sent, in Python"
PEERS = {"unsent": UNSENT_PEERS, "1f1b": "torch.distributed.pipelining, 1F1B", "gpipe": "torch.distributed.pipelining, GPipe",
         "deepspeed": "DeepSpeed's PipelineModule"}
OURS = {"unsent": UNSENT}
OURS_IN_PYTHON = "ours, in Python"


def named(sample, names):
    """A sample as one of STEP. A peer that does not run is called KIND: WHY."""
    kind, colon, why = sample["variant"].partition(":")
    return {**sample, "work": STEP, "ranks": RANKS, "variant": names.get(kind, kind) + colon + why}


def compare(works):
    """Makes a work of the time that is lost beyond the limit, (m + p - 1) / m times that of the stages with nothing sent."""
    measured = {variant: (unit, statistics.median(values))
                for variant, (unit, values) in works.get((STEP, RANKS), {}).items() if None not in values}
    lost = {}
    for variant, base in ((table.OURS, UNSENT), (OURS_IN_PYTHON, UNSENT_PEERS), (PEERS["1f1b"], UNSENT_PEERS),
                          (PEERS["deepspeed"], UNSENT_PEERS)):
        if variant in measured and base in measured:
            unit, time = measured[variant]
            lost[variant] = unit, [time - measured[base][1] * (MICRO_BATCHES + RANKS - 1) / MICRO_BATCHES]
    if table.OURS in lost:
        works[f"{TITLE}: time lost beyond the limit", RANKS] = lost
