"""Kubernetes' examples: an MPIJob of kubeflow.org/v2beta1 has the fields that the MPI Operator knows, and no others; an indexed Job,
and the Service that names its pods, tell the ranks what they need (docs/tcp.md)."""

import sys

import tree

try:
    import jsonschema
    import yaml
except ImportError as missing:
    print(f"lint.kubernetes: skipped: {missing} (SIRTAKI_BOOTSTRAP_WITH='python3-yaml python3-jsonschema' bash bootstrap.sh)")
    sys.exit(tree.SKIPPED)

TEXT = {"type": "string", "minLength": 1}
TEXTS = {"type": "array", "items": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0}


def fields(known, required=()):
    return {"type": "object", "properties": known, "required": list(required), "additionalProperties": False}


def each(item, least=0):
    return {"type": "array", "items": item, "minItems": least}


# Pods have the fields that such examples use.
QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^[0-9.]+(m|[kMGT]i?)?$"}}
RESOURCES = fields({"limits": QUANTITIES, "requests": QUANTITIES})
CONTAINER = fields({
    "name": TEXT,
    "image": TEXT,
    "imagePullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "command": TEXTS,
    "args": TEXTS,
    "env": each(fields({"name": TEXT, "value": {"type": "string"},
                        "valueFrom": fields({"secretKeyRef": fields({"name": TEXT, "key": TEXT}, ["name", "key"])}, ["secretKeyRef"])},
                       ["name"])),
    "readinessProbe": fields({"tcpSocket": fields({"port": COUNT}, ["port"]), "initialDelaySeconds": COUNT, "periodSeconds": COUNT}),
    "resources": RESOURCES,
    "volumeMounts": each(fields({"name": TEXT, "mountPath": {"type": "string", "pattern": "^/"}}, ["name", "mountPath"])),
}, ["name", "image"])
VOLUME = fields({"name": TEXT, "emptyDir": fields({"medium": {"enum": ["", "Memory"]}, "sizeLimit": TEXT}),
                 "persistentVolumeClaim": fields({"claimName": TEXT}, ["claimName"])}, ["name"])
POD = {"containers": each(CONTAINER, 1), "volumes": each(VOLUME)}
RESTARTS = {"enum": ["Never", "OnFailure"]}
TEMPLATE = fields({"metadata": {"type": "object"}, "spec": fields(POD, ["containers"])}, ["spec"])


def replica(replicas):
    return fields({"replicas": replicas, "restartPolicy": RESTARTS, "template": TEMPLATE}, ["template"])


# The names of the pods are made of this name, and they are names of hosts.
NAMED = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,40}[a-z0-9])?$"}}}

MPI_JOB = fields({
    "apiVersion": {"const": "kubeflow.org/v2beta1"},
    "kind": {"const": "MPIJob"},
    "metadata": NAMED,
    "spec": fields({
        "slotsPerWorker": COUNT,
        "runLauncherAsWorker": {"type": "boolean"},
        "sshAuthMountPath": {"type": "string", "pattern": "^/"},
        "mpiImplementation": {"enum": ["OpenMPI", "Intel", "MPICH"]},
        "launcherCreationPolicy": {"enum": ["AtStartup", "WaitForWorkersReady"]},
        "runPolicy": fields({
            "cleanPodPolicy": {"enum": ["None", "Running", "All"]},
            "ttlSecondsAfterFinished": COUNT,
            "activeDeadlineSeconds": COUNT,
            "backoffLimit": COUNT,
            "suspend": {"type": "boolean"},
        }),
        "mpiReplicaSpecs": fields({"Launcher": replica({"const": 1}), "Worker": replica({"type": "integer", "minimum": 1})},
                                  ["Launcher", "Worker"]),
    }, ["mpiReplicaSpecs"]),
}, ["apiVersion", "kind", "metadata", "spec"])


JOB = fields({
    "apiVersion": {"const": "batch/v1"},
    "kind": {"const": "Job"},
    "metadata": NAMED,
    "spec": fields({
        "completionMode": {"const": "Indexed"},
        "completions": COUNT,
        "parallelism": COUNT,
        "backoffLimit": COUNT,
        "activeDeadlineSeconds": COUNT,
        "ttlSecondsAfterFinished": COUNT,
        "template": fields({"metadata": {"type": "object"},
                            "spec": fields({**POD, "subdomain": TEXT, "restartPolicy": RESTARTS}, ["containers", "subdomain", "restartPolicy"])},
                           ["spec"]),
    }, ["completionMode", "completions", "parallelism", "template"]),
}, ["apiVersion", "kind", "metadata", "spec"])

SERVICE = fields({
    "apiVersion": {"const": "v1"},
    "kind": {"const": "Service"},
    "metadata": NAMED,
    "spec": fields({"clusterIP": {"const": "None"}, "publishNotReadyAddresses": {"type": "boolean"},
                    "selector": fields({"job-name": TEXT}, ["job-name"])}, ["clusterIP", "selector"]),
}, ["apiVersion", "kind", "metadata", "spec"])

KINDS = {"MPIJob": MPI_JOB, "Job": JOB, "Service": SERVICE}


def mount_faults(who, pod):
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for container in pod["containers"]:
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{who}: no volume is called {mount['name']}"


def job_faults(job, documents):
    """What the pods of an indexed Job are told of the job has to be so."""
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    yield from mount_faults(name, pod)
    if spec["parallelism"] != spec["completions"]:
        yield f"{name}: {spec['completions']} ranks wait for each other, and {spec['parallelism']} run at once"
    selectors = {d["metadata"]["name"]: d["spec"]["selector"]["job-name"] for d in documents if d["kind"] == "Service"}
    if selectors.get(pod["subdomain"]) != name:
        yield f"{name}: no Service {pod['subdomain']} selects its pods"
    wanted = {"WORLD_SIZE": str(spec["completions"]), "MASTER_ADDR": f"{name}-0.{pod['subdomain']}"}
    for container in pod["containers"]:
        variables = {one["name"]: one for one in container.get("env", [])}
        for variable, value in wanted.items():
            if variables.get(variable, {}).get("value") != value:
                yield f"{name}: {variable} has to be {value}"
        if "valueFrom" not in variables.get("SIRTAKI_SECRET", {}):
            yield f"{name}: SIRTAKI_SECRET has to be of a Secret"


def faults(documents):
    for document in documents:
        kind = document.get("kind") if isinstance(document, dict) else None
        if kind not in KINDS:
            yield f"the kind {kind} is none of {', '.join(KINDS)}"
            return
        for error in sorted(jsonschema.Draft7Validator(KINDS[kind]).iter_errors(document), key=lambda e: [str(p) for p in e.path]):
            yield f"{kind}: {'.'.join(str(p) for p in error.path) or 'the document'}: {error.message[:200]}"
            return   # what follows reads the fields
    for document in documents:
        if document["kind"] == "MPIJob":
            for role, specification in document["spec"]["mpiReplicaSpecs"].items():
                yield from mount_faults(role, specification["template"]["spec"])
        elif document["kind"] == "Job":
            yield from job_faults(document, documents)


def main():
    top = tree.root()
    names = [n for n in tree.files(top, (".yaml", ".yml")) if n.startswith("examples/kubernetes/")]
    findings = []
    for name in names:
        try:
            with open(f"{top}/{name}", encoding="utf-8") as file:
                documents = list(yaml.safe_load_all(file))
        except yaml.YAMLError as error:
            findings.append(f"{name}: {' '.join(str(error).split())}")
            continue
        findings += [f"{name}: {fault}" for fault in faults(documents)]
    tree.report("lint.kubernetes", len(names), findings)


main()
