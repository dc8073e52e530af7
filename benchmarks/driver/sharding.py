"""Sharded optimizers: who is measured, and who is compared with whom."""

import statistics

import table

TITLE = "MLP, batch 8, Adam"
FAMILIES = ("DistributedDataParallel", "ZeroRedundancyOptimizer", "FSDP2")
OURS = {"adam": "unsharded", "adam-sharded": "sharded state", "adam-gradients": "sharded gradients"}
PEERS = {"ddp": "DistributedDataParallel", "zero": "ZeroRedundancyOptimizer",
         "zero-overlap": "ZeroRedundancyOptimizer, overlap_with_ddp", "fsdp2": "FSDP2",
         "fsdp2-kept": "FSDP2, reshard_after_forward=False"}
ADAMS = {"": "loop", "-fused": "fused"}  # the end of a variant's name, and what Adam is then
EMPTY = ("vectors", "nothing")  # ranks of ours and of the peers that have no model
ON_HOSTS = {"adam-sharded": "state", "adam-gradients": "gradients", "adam-sharded-over-host": "state, over each host",
            "adam-gradients-over-host": "gradients, over each host"}
STEP, MEMORY = "step", "peak memory"


def on_hosts(sample):
    """The sample of a variant on several hosts as the samples of works: one, or one beside each of the others."""
    variant = sample["variant"]
    names = [ON_HOSTS[variant]] if variant in ON_HOSTS else ON_HOSTS.values()
    ours = table.OURS if variant in ON_HOSTS else "ours, unsharded"
    return [{**sample, "work": f"{TITLE}, 2 hosts, 1 Gbit, sharded {name}: {STEP}", "variant": ours} for name in names]


def compare(works, ranks):
    """Makes works of what was measured: each of ours beside the peers with the same kind of Adam, and the best of each side.
    Of memory also without what the same ranks take without a model."""
    for kind in (STEP, MEMORY):
        measured = works.pop((f"{TITLE}: {kind}", ranks), {})
        empty = {name: statistics.median(measured.pop(name)[1]) for name in EMPTY if name in measured}
        _compare(works, ranks, kind if kind == STEP else f"{kind} of all ranks", measured)
        own = {}
        for variant, (unit, values) in measured.items():
            name = EMPTY[0] if variant.startswith("adam") else EMPTY[1]
            if name in empty:
                own[variant] = unit, [value - empty[name] for value in values]
        _compare(works, ranks, f"{kind} of all ranks, less that without a model", own)


def _compare(works, ranks, kind, measured):
    unsharded = {}
    for ending, adam in ADAMS.items():
        ours, peers = _named(measured, OURS, ending), _named(measured, PEERS, ending)
        if OURS["adam"] in ours:
            unsharded[f"ours, unsharded ({adam})"] = ours.pop(OURS["adam"])
        for name, values in ours.items():
            works[f"{TITLE} ({adam}), {name}: {kind}", ranks] = {table.OURS: values, **unsharded, **peers}
    for best, values in _best(measured, OURS).items():
        peers = {}
        for family in FAMILIES:
            peers |= _best(measured, {variant: name for variant, name in PEERS.items() if name.startswith(family)})
        works[f"{TITLE}, the best of each side ({best}): {kind}", ranks] = {table.OURS: values, **unsharded, **peers}


def _named(measured, names, ending):
    """{its name in the table: its values} of variants with this ending. One that failed is called VARIANT: WHY."""
    found = {}
    for variant, values in measured.items():
        variant, colon, why = variant.partition(":")
        base = variant.removesuffix("-fused")
        if base in names and base + ending == variant:
            found[names[base] + colon + why] = values
    return found


def _best(measured, names):
    """The one with the lowest median, by its name."""
    ran = {}
    for ending, adam in ADAMS.items():
        ran |= {f"{name}, {adam}": values for name, values in _named(measured, names, ending).items() if None not in values[1]}
    return dict(sorted(ran.items(), key=lambda entry: statistics.median(entry[1][1]))[:1])
