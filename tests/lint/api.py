"""docs/api.md and the public headers name the same things.

Every public name is in docs/api.md, as code: functions, types, enumerations, and the fields of options. What a table there calls a
function or a type is in a header. Every option of docs/configuration.md has a setter of its name in InitOptions.
"""

import re

import tree

HEADERS = "frameworks/include/sirtaki/"
SETTERS = HEADERS + "init_options.h"
OPTIONS = "docs/configuration.md"
TYPE = re.compile(r"^(?:class|struct|enum class)\s+(?:SIRTAKI_API\s+)?(\w+)\b(?!\s*;)")
ALIAS = re.compile(r"^using\s+(\w+)\s*=")
MODULE = re.compile(r"^TORCH_MODULE\((\w+)\)")
FIELD = re.compile(r"^  TORCH_ARG\([^;]*,\s*(\w+)\)")
INLINE = re.compile(r"^inline\s+[^(]*?(\w+)\(")
EXPORTED = re.compile(r"^SIRTAKI_API\s+[^(]*?(\w+)\(")
TEMPLATE = re.compile(r"^(?:[\w:<>&*]+\s+)+(\w+)\(")
ROW = re.compile(r"^\| (`[^|]*)")
IN_ROW = re.compile(r"`([A-Za-z_]\w*)[`<(]")
OPTION = re.compile(r"^## (\w+)$")
SETTER = re.compile(r"^  InitOptions& (\w+)\(")
OPENS = re.compile(r"^(?:inline\s+)?namespace\s*([\w:]*)\s*\{")
CODE = re.compile(r"`([^`]*)`|^```cpp\n(.*?)^```", re.MULTILINE | re.DOTALL)


def public_names(top, name):
    """(line number, name) of what a header declares in namespace sirtaki itself."""
    inside = []  # namespaces, each with the line that opens it
    template = False
    for number, line in tree.lines(top, name):
        opens = OPENS.match(line)
        if opens:
            inside.append((opens.group(1), number))
            continue
        # clang-format comments the end of every namespace but those of a single line.
        if inside and (line.startswith("}  // namespace") or (line == "}" and number - inside[-1][1] <= 2)):
            inside.pop()
            continue
        if [namespace for namespace, _ in inside] != ["sirtaki"]:
            continue
        if line.startswith("template "):
            template = True
            continue
        for pattern in (TYPE, ALIAS, MODULE, FIELD, INLINE, EXPORTED) + ((TEMPLATE,) if template else ()):
            found = pattern.match(line)
            if found:
                yield number, found.group(1)
                break
        template = False


def stale_names(top, names):
    """(line number, name) of what a table of docs/api.md names, and no header has."""
    words = set()
    for name in names:
        for _, line in tree.lines(top, name):
            words.update(re.findall(r"\w+", line))
    for number, line in tree.lines(top, "docs/api.md"):
        row = ROW.match(line)
        for name in IN_ROW.findall(row.group(1)) if row else ():
            if name not in words:
                yield number, name


def matches(top, name, pattern):
    return [(number, found.group(1)) for number, line in tree.lines(top, name) for found in [pattern.match(line)] if found]


def main():
    top = tree.root()
    every = tree.files(top)
    names = [n for n in every if n.startswith(HEADERS) and n.endswith(".h")]
    text = "\n".join(line for _, line in tree.lines(top, "docs/api.md"))
    told = set()
    for inline, block in CODE.findall(text):
        told.update(re.findall(r"\w+", inline or block))
    findings = []
    for name in names:
        for number, public in public_names(top, name):
            if public not in told:
                findings.append(f"{name}:{number}: {public} is not in docs/api.md")
    findings += [f"docs/api.md:{number}: {name} is in no public header" for number, name in stale_names(top, names)]
    if SETTERS in names and OPTIONS in every:
        setters = {name for _, name in matches(top, SETTERS, SETTER)}
        findings += [f"{OPTIONS}:{number}: InitOptions has no setter {option}, see {SETTERS}"
                     for number, option in matches(top, OPTIONS, OPTION) if option not in setters]
    tree.report("lint.api", len(names), findings)


main()
