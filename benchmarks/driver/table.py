"""From samples to the table: medians, rows, text and JSON."""

import statistics

OURS = "ours"


class Samples:
    """All values of each variant of each work, in the order in which they first came."""

    def __init__(self):
        self.works = {}  # (work, ranks): {variant: (unit, values)}

    def add(self, work, ranks, variant, unit, value):
        variants = self.works.setdefault((work, ranks), {})
        variants.setdefault(variant, (unit, []))[1].append(value)

    def median(self, work, ranks, variant):
        """None for one that does not run here, whose name says why."""
        unit, values = self.works[work, ranks][variant]
        return (None if None in values else statistics.median(values)), unit

    def rows(self):
        rows = []
        for (work, ranks), variants in self.works.items():
            if OURS not in variants:
                continue
            value, unit = self.median(work, ranks, OURS)
            others = [variant for variant in variants if variant != OURS]
            for variant in others:
                reference_value, _ = self.median(work, ranks, variant)
                rows.append({"work": work, "ranks": ranks, "value": value, "unit": unit, "reference": variant,
                             "reference_value": reference_value, "ratio": ratio(unit, value, reference_value)})
            if not others:
                rows.append({"work": work, "ranks": ranks, "value": value, "unit": unit, "reference": None,
                             "reference_value": None, "ratio": None})
        return rows


def ratio(unit, value, reference_value):
    """How much better ours is: above 1 it is. None where one of them is nothing."""
    if reference_value is None or value <= 0 or reference_value <= 0:
        return None
    return value / reference_value if "/s" in unit else reference_value / value


def text(rows):
    """Lines, with what repeats left out."""
    header = ("work", "ranks", "ours", "reference", "", "ratio")
    cells, before = [header], None
    for row in rows:
        first = (row["work"], str(row["ranks"]), f"{row['value']:.4g} {row['unit']}")
        repeated, before = first == before, first
        has_reference = row["reference_value"] is not None
        cells.append((*(("", "", "") if repeated else first), row["reference"] or "-",
                      f"{row['reference_value']:.4g}" if has_reference else "-",
                      f"{row['ratio']:.2f}" if row["ratio"] is not None else "-"))
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    right = {1, 2, 4, 5}
    return ["  ".join(cell.rjust(width) if column in right else cell.ljust(width)
                      for column, (cell, width) in enumerate(zip(line, widths))).rstrip() for line in cells]
