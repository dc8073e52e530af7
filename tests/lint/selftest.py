"""Each lint test finds what it is for: a small tree with one fault must fail, and the same tree without it must pass."""

import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
JOB = """{apiVersion: kubeflow.org/v2beta1, kind: MPIJob, metadata: {name: a}, spec: {mpiReplicaSpecs: {
  Launcher: {replicas: 1, template: {spec: {containers: [{name: a, image: a}]}}},
  Worker: {replicas: 2, template: {spec: {containers: [{name: a, image: a}]}}}}}}
"""
INDEXED = """{apiVersion: v1, kind: Service, metadata: {name: b}, spec: {clusterIP: None, selector: {job-name: a}}}
---
{apiVersion: batch/v1, kind: Job, metadata: {name: a}, spec: {completionMode: Indexed, completions: 2, parallelism: 2, template: {spec: {
  subdomain: b, restartPolicy: Never, containers: [{name: a, image: a, env: [{name: WORLD_SIZE, value: "2"},
  {name: MASTER_ADDR, value: a-0.b}, {name: SIRTAKI_SECRET, valueFrom: {secretKeyRef: {name: a, key: a}}}]}]}}}}
"""
GOOD = {
    "core/base/status.h": "#include <string>\n",
    "core/base/log.cc": "#include <spdlog/spdlog.h>\n",
    "core/base/environment.cc": "#include <cstdlib>\nconst char* Get() { return std::getenv(\"X\"); }\n",
    "mpi/transport.cc": "#include <mpi.h>\n\n#include \"ops/base/backend.h\"\n",
    "ops/base/backend.h": "#include \"core/base/status.h\"\n",
    "frameworks/python/bindings.cc": "#include <pybind11/pybind11.h>\n#include \"sirtaki/torch.h\"\n",
    "frameworks/include/sirtaki/torch.h": "#include <sirtaki/export.h>\n#include <torch/torch.h>\n",
    "docs/api.md": "| `Known` | what it is |\n\n`InitOptions`\n",
    "docs/configuration.md": "## known\n",
    "frameworks/include/sirtaki/init_options.h": "namespace sirtaki {\nclass InitOptions {\n  InitOptions& known(int count);\n};\n}  // namespace sirtaki\n"
                                                 "struct Known;\n",
    "examples/docker/Dockerfile": "FROM debian:12\nCOPY docs /docs\nRUN true \\\n && true\n",
    "examples/kubernetes/job.yaml": JOB,
    "examples/kubernetes/indexed.yaml": INDEXED,
}
# What the faults include: it is there, so that this is not what is wrong.
GOOD.update(dict.fromkeys(("core/engine/engine.h", "fusion/planner.h", "ops/groups/run_makers.h", "ops/lanes.h", "mpi/environment.h", "session/session.h",
                           "frameworks/torch/tensors/error.h", "frameworks/python/bindings.h", "tests/support/rank_threads.h"), ""))
PUBLIC = "frameworks/include/sirtaki/session.h"
DOCKERFILE = "examples/docker/Dockerfile"
KUBERNETES = "examples/kubernetes/job.yaml"
MACHINE_PATH = "/" + "home/somebody/x"
BAD = [
    ("layering.py", "core/base/status.h", "#include \"fusion/planner.h\"\n"),
    ("layering.py", "ops/base/backend.h", "#include \"mpi/environment.h\"\n"),
    ("layering.py", "mpi/transport.cc", "#include \"session/session.h\"\n"),
    ("layering.py", "core/base/status.h", "#include \"core/engine/engine.h\"\n"),
    ("layering.py", "ops/shm/backend.cc", "#include \"ops/groups/run_makers.h\"\n"),
    ("layering.py", "ops/base/backend.h", "#include \"ops/lanes.h\"\n"),
    ("layering.py", "ops/newcomer/new.h", "#include \"ops/base/backend.h\"\n"),
    ("layering.py", "launch/plan/plan.cc", "#include \"ops/base/backend.h\"\n"),
    ("layering.py", "core/base/status.h", "#include \"tests/support/rank_threads.h\"\n"),
    ("layering.py", "session/session.cc", "#include <mpi.h>\n"),
    ("layering.py", "mpi/transport.cc", "int n = MPI_Barrier(0);\n"),
    ("layering.py", "core/base/status.h", "#include <fmt/core.h>\n"),
    ("layering.py", "core/config/config.cc", "const char* g = std::getenv(\"X\");\n"),
    ("layering.py", "ops/base/backend.h", "#include <ATen/ATen.h>\n"),
    ("layering.py", "mpi/port.cc", "#include <hwy/highway.h>\n"),
    ("layering.py", "frameworks/include/sirtaki/torch.h", "#include \"core/base/status.h\"\n"),
    ("layering.py", "newcomer/new.h", "#include <string>\n"),
    ("layering.py", "core/base/log.cc", "#include \"../engine/engine.h\"\n"),
    ("layering.py", "ops/lanes.h", "#include \"base/backend.h\"\n"),
    ("layering.py", "frameworks/python/bindings.cc", "#include \"frameworks/torch/tensors/error.h\"\n"),
    ("layering.py", "frameworks/python/bindings.cc", "#include \"ops/base/backend.h\"\n"),
    ("layering.py", "frameworks/torch/session.cc", "#include \"frameworks/python/bindings.h\"\n"),
    ("layering.py", "frameworks/torch/session.cc", "#include <pybind11/pybind11.h>\n"),
    ("layering.py", "core/engine/engine.cc", "#include <nlohmann/json.hpp>\n"),
    ("layering.py", "core/config/config.cc", "#include <boost/program_options.hpp>\n"),
    ("layering.py", "session/session.cc", "#include <yaml-cpp/yaml.h>\n"),
    ("layering.py", "frameworks/python/sirtaki/torch/state.py", "data = tensor.numpy().tobytes()\n"),
    ("words.py", "docs/notes.md", f"see {MACHINE_PATH}\n"),
    ("format.py", "core/base/status.h", "int  f( ) ;\n"),
    ("dockerfile.py", DOCKERFILE, "FROM debian:12\nRUN if true; then \\\n true\n"),
    ("dockerfile.py", DOCKERFILE, "FROM debian:12\nCOPY nowhere /\n"),
    ("dockerfile.py", DOCKERFILE, "FROM debian:12\nRUNS true\n"),
    ("kubernetes.py", KUBERNETES, JOB.replace("v2beta1", "v1")),
    ("kubernetes.py", KUBERNETES, JOB.replace("replicas: 1", "replicas: 2")),
    ("kubernetes.py", KUBERNETES, JOB.replace("image: a}", "image: a, comand: [a]}")),
    ("kubernetes.py", KUBERNETES, JOB.replace("image: a}", "image: a, volumeMounts: [{name: b, mountPath: /b}]}")),
    ("kubernetes.py", KUBERNETES, JOB[:-4]),
    ("kubernetes.py", KUBERNETES, JOB.replace("MPIJob", "Pod")),
    ("kubernetes.py", KUBERNETES, INDEXED.replace("parallelism: 2", "parallelism: 1")),
    ("kubernetes.py", KUBERNETES, INDEXED.replace("Indexed", "NonIndexed")),
    ("kubernetes.py", KUBERNETES, INDEXED.replace("value: a-0.b", "value: a-0")),
    ("kubernetes.py", KUBERNETES, INDEXED.replace('"2"', '"3"')),
    ("kubernetes.py", KUBERNETES, INDEXED.replace("job-name: a", "job-name: c")),
    ("kubernetes.py", KUBERNETES, INDEXED.replace("SIRTAKI_SECRET", "SIRTAKI_SECRETS")),
    ("api.py", PUBLIC, "namespace sirtaki {\nSIRTAKI_API at::Tensor unknown(const at::Tensor& t);\n}  // namespace sirtaki\n"),
    ("api.py", PUBLIC, "namespace sirtaki {\nclass SIRTAKI_API Unknown : public Known {\n};\n}  // namespace sirtaki\n"),
    ("api.py", PUBLIC, "namespace sirtaki {\ninline int unknown(int known) {\n}\n}  // namespace sirtaki\n"),
    ("api.py", PUBLIC, "namespace sirtaki {\nstruct Known {\n  TORCH_ARG(std::vector<int>, unknown) = {};\n};\n}  // namespace sirtaki\n"),
    ("api.py", "docs/api.md", "| `Known`, `unknown(t)` | is gone |\n"),
    ("api.py", "docs/configuration.md", "## known\n\n## unknown\n"),
    ("api.py", PUBLIC, "namespace sirtaki {\nenum class Unknown : char { A };\n}  // namespace sirtaki\n"),
    ("api.py", PUBLIC, "namespace sirtaki {\nnamespace detail {\nclass Own;\n}\ntemplate <class T>\nT unknown(T t) {\n}\n}  // namespace sirtaki\n"),
]


def run(script, files):
    with tempfile.TemporaryDirectory() as top:
        for name, text in files.items():
            os.makedirs(os.path.dirname(os.path.join(top, name)), exist_ok=True)
            with open(os.path.join(top, name), "w", encoding="utf-8") as file:
                file.write(text)
        with open(os.path.join(TOP, ".clang-format"), encoding="utf-8") as style:
            with open(os.path.join(top, ".clang-format"), "w", encoding="utf-8") as copy:
                copy.write(style.read())
        return subprocess.run([sys.executable, os.path.join(HERE, script), top], capture_output=True, text=True, check=False)


def finds_missing_include():
    """Whether alone.py passes a source that includes what it needs, and finds one whose neighbour in the unity file does so."""
    codes = []
    for source in ("#include <string>\nstd::string a;\n", "std::string a;\n"):
        with tempfile.TemporaryDirectory() as top:
            unity = f"{top}/build/Unity/unity_0_cxx.cxx"
            os.makedirs(os.path.dirname(unity))
            for path, text in ((f"{top}/a.cc", source), (unity, f'#include <string>\n#include "{top}/a.cc"\n')):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
            with open(f"{top}/build/compile_commands.json", "w", encoding="utf-8") as file:
                json.dump([{"directory": top, "file": unity, "command": f"{os.environ.get('CXX', 'c++')} -o a.o -c {unity}"}], file)
            script = [sys.executable, os.path.join(HERE, "alone.py"), top, f"{top}/build"]
            codes.append(subprocess.run(script, capture_output=True, check=False).returncode)
    return codes == [0, 1]


def main():
    failures = [] if finds_missing_include() else ["alone.py overlooks a missing include, or finds one that is there"]
    for script in ("layering.py", "words.py", "format.py", "api.py", "dockerfile.py", "kubernetes.py"):
        result = run(script, GOOD)
        if result.returncode not in (0, 77):
            failures.append(f"{script} rejects a tree without a fault:\n{result.stdout}{result.stderr}")
    for script, name, text in BAD:
        result = run(script, {**GOOD, name: text})
        if result.returncode == 77:
            continue
        if result.returncode != 1 or name not in result.stdout:
            failures.append(f"{script} overlooks {text.strip()!r} in {name}:\n{result.stdout}{result.stderr}")
    for failure in failures:
        print(failure)
    print(f"lint.selftest: {len(BAD)} faults tried, {len(failures)} failures")
    sys.exit(1 if failures else 0)


main()
