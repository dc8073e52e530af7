"""Kubernetes' examples: an MPIJob of kubeflow.org/v2beta1 has the fields that the MPI Operator knows, and no others."""

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
    "env": each(fields({"name": TEXT, "value": {"type": "string"}}, ["name"])),
    "readinessProbe": fields({"tcpSocket": fields({"port": COUNT}, ["port"]), "initialDelaySeconds": COUNT, "periodSeconds": COUNT}),
    "resources": RESOURCES,
    "volumeMounts": each(fields({"name": TEXT, "mountPath": {"type": "string", "pattern": "^/"}}, ["name", "mountPath"])),
}, ["name", "image"])
VOLUME = fields({"name": TEXT, "emptyDir": fields({"medium": {"enum": ["", "Memory"]}, "sizeLimit": TEXT}),
                 "persistentVolumeClaim": fields({"claimName": TEXT}, ["claimName"])}, ["name"])
TEMPLATE = fields({"metadata": {"type": "object"}, "spec": fields({"containers": each(CONTAINER, 1), "volumes": each(VOLUME)}, ["containers"])},
                  ["spec"])


def replica(replicas):
    return fields({"replicas": replicas, "restartPolicy": {"enum": ["Never", "OnFailure"]}, "template": TEMPLATE}, ["template"])


MPI_JOB = fields({
    "apiVersion": {"const": "kubeflow.org/v2beta1"},
    "kind": {"const": "MPIJob"},
    # The names of the pods are made of this name, and they are names of hosts.
    "metadata": {"type": "object", "required": ["name"],
                 "properties": {"name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,40}[a-z0-9])?$"}}},
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


def faults(job):
    for error in sorted(jsonschema.Draft7Validator(MPI_JOB).iter_errors(job), key=lambda e: [str(p) for p in e.path]):
        yield f"{'.'.join(str(p) for p in error.path) or 'the document'}: {error.message[:200]}"
        return   # what follows reads the fields
    for role, specification in job["spec"]["mpiReplicaSpecs"].items():
        pod = specification["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    yield f"{role}: no volume is called {mount['name']}"


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
        findings += [f"{name}: {fault}" for document in documents for fault in faults(document)]
    tree.report("lint.kubernetes", len(names), findings)


main()
