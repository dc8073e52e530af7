"""Every public name is in docs/api.md: the functions, types and enumerations of the public headers, as code."""

import re

import tree

HEADERS = "frameworks/include/sirtaki/"
TYPE = re.compile(r"^(?:class|struct|enum class)\s+(?:SIRTAKI_API\s+)?(\w+)\b(?!\s*;)")
ALIAS = re.compile(r"^using\s+(\w+)\s*=")
MODULE = re.compile(r"^TORCH_MODULE\((\w+)\)")
EXPORTED = re.compile(r"^SIRTAKI_API\s+[^(]*?(\w+)\(")
TEMPLATE = re.compile(r"^(?:[\w:<>&*]+\s+)+(\w+)\(")
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
        for pattern in (TYPE, ALIAS, MODULE, EXPORTED) + ((TEMPLATE,) if template else ()):
            found = pattern.match(line)
            if found:
                yield number, found.group(1)
                break
        template = False


def main():
    top = tree.root()
    names = [n for n in tree.files(top, (".h",)) if n.startswith(HEADERS)]
    text = "\n".join(line for _, line in tree.lines(top, "docs/api.md"))
    told = set()
    for inline, block in CODE.findall(text):
        told.update(re.findall(r"\w+", inline or block))
    findings = []
    for name in names:
        for number, public in public_names(top, name):
            if public not in told:
                findings.append(f"{name}:{number}: {public} is not in docs/api.md")
    tree.report("lint.api", len(names), findings)


main()
