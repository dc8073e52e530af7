"""No path of one person's machine in any file: it would mean nothing, or something else, on the next one."""

import re

import tree

# Written with brackets so that this file does not find itself.
MACHINE = re.compile(r"(?<![\w.}$*-])/(w[o]rk|f[a]rm|r[o]ot|h[o]me/[a-z]\w*|U[s]ers/\w+)/")


def main():
    top = tree.root()
    names = tree.files(top)
    findings = []
    for name in names:
        for number, text in tree.lines(top, name):
            if MACHINE.search(text):
                findings.append(f"{name}:{number}: a machine's path: {text.strip()[:120]}")
    tree.report("lint.words", len(names), findings)


main()
