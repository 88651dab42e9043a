"""Manifests: fields that Kubernetes, KubeRay and Ray know, memory that adds up, nothing open to strangers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import tyro
import yaml

from ingest import __version__
from train_integration.jobs import EXCLUDES

IMAGE = f"reelray:{__version__}"
KUBERAY = ("raycluster.yaml", "rayjob.yaml", "rayjob-sidecar.yaml")
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


def _list(items: dict[str, Any], least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0}
FLAG = {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^\d+(m|Ki|Mi|Gi)?$"}}
NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
RESOURCES = _object("requests limits", requests=QUANTITIES, limits=QUANTITIES)
METADATA = {**_object("namespace", name=NAME, generateName=TEXT, namespace=NAME, labels=TEXTS), "minProperties": 2}
SECRET = _object("name key", name=NAME, key=TEXT, optional=FLAG)
ENV = {**_object("name", name=TEXT, value=TEXT, valueFrom=_object("secretKeyRef", secretKeyRef=SECRET)), "minProperties": 2}
CONTAINER = _object(
    "name image resources",
    name=NAME,
    image=TEXT,
    env=_list(ENV),
    ports=_list(_object("containerPort name", containerPort={"type": "integer", "minimum": 1, "maximum": 65535}, name=NAME)),
    resources=RESOURCES,
    securityContext=_object(
        "allowPrivilegeEscalation", allowPrivilegeEscalation={"const": False}, capabilities=_object(drop={"const": ["ALL"]})
    ),
    volumeMounts=_list(_object("name mountPath", name=NAME, mountPath={"type": "string", "pattern": "^/"})),
)
VOLUME = {
    **_object(
        "name",
        name=NAME,
        emptyDir=_object(medium={"const": "Memory"}, sizeLimit=TEXT),
        persistentVolumeClaim=_object("claimName", claimName=NAME),
    ),
    "minProperties": 2,
}
POD = _object(
    "metadata spec",
    metadata=_object("labels", labels=TEXTS),
    spec=_object(
        "containers automountServiceAccountToken",
        automountServiceAccountToken=FLAG,
        restartPolicy={"enum": ["Never", "OnFailure"]},
        terminationGracePeriodSeconds=COUNT,
        securityContext=_object("runAsNonRoot", runAsNonRoot={"const": True}, runAsUser=COUNT, fsGroup=COUNT),
        containers=_list(CONTAINER, 1),
        volumes=_list(VOLUME),
        tolerations=_list(_object(key=TEXT, operator={"enum": ["Exists", "Equal"]}, effect=TEXT)),
    ),
)
CLUSTER_SPEC = _object(
    "rayVersion authOptions headGroupSpec workerGroupSpecs",
    rayVersion=TEXT,
    authOptions=_object("mode", mode={"const": "token"}),
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=_object(
        idleTimeoutSeconds=COUNT, upscalingMode={"enum": ["Default", "Conservative", "Aggressive"]}, resources=RESOURCES
    ),
    headGroupSpec=_object("rayStartParams template", serviceType={"const": "ClusterIP"}, rayStartParams=TEXTS, template=POD),
    workerGroupSpecs=_list(
        _object(
            "groupName rayStartParams template minReplicas maxReplicas",
            groupName=NAME,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            rayStartParams=TEXTS,
            template=POD,
        ),
        1,
    ),
)
SCHEMAS = {
    "RayCluster": _object(
        "apiVersion kind metadata spec", apiVersion={"const": "ray.io/v1"}, kind=TEXT, metadata=METADATA, spec=CLUSTER_SPEC
    ),
    "RayJob": _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": "ray.io/v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=_object(
            "entrypoint submissionMode",
            entrypoint=TEXT,
            submissionMode={"enum": ["K8sJobMode", "HTTPMode", "SidecarMode"]},
            runtimeEnvYAML=TEXT,
            shutdownAfterJobFinishes=FLAG,
            ttlSecondsAfterFinished=COUNT,
            backoffLimit=COUNT,
            activeDeadlineSeconds=COUNT,
            submitterPodTemplate=POD,
            rayClusterSpec=CLUSTER_SPEC,
            clusterSelector=TEXTS,
        ),
    ),
    "NetworkPolicy": _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": "networking.k8s.io/v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=_object(
            "podSelector policyTypes ingress egress",
            podSelector={"type": "object"}, policyTypes=_list(TEXT), ingress=_list({}), egress=_list({}),
        ),
    ),
    "PodMonitor": _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": "monitoring.coreos.com/v1"},
        kind=TEXT,
        metadata=METADATA,
        spec=_object(
            "selector podMetricsEndpoints",
            selector={"type": "object"},
            podMetricsEndpoints=_list(_object("port", port=NAME, interval=TEXT, relabelings=_list({"type": "object"})), 1),
        ),
    ),
}  # fmt: skip


def _load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _bytes(text: str) -> int:
    return int(text[:-2]) * _UNITS[text[-2:]] if text[-2:] in _UNITS else int(text)


def _cluster_spec(manifest: dict[str, Any]) -> dict[str, Any] | None:
    return manifest["spec"] if manifest["kind"] == "RayCluster" else manifest["spec"].get("rayClusterSpec")


def _groups(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    spec = _cluster_spec(manifest)
    return [] if spec is None else [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


@pytest.mark.parametrize("name", [*KUBERAY, "networkpolicy.yaml", "podmonitor.yaml"])
def test_fields_are_those_that_kubernetes_knows(manifests: Path, name: str) -> None:
    manifest = _load(manifests / name)
    jsonschema.validate(manifest, SCHEMAS[manifest["kind"]])
    assert manifest["metadata"]["namespace"] == "reelray"


def test_the_check_refuses_what_is_misspelt(manifests: Path) -> None:
    manifest = _load(manifests / "raycluster.yaml")
    manifest["spec"]["headGroupSpec"]["template"]["spec"]["container"] = []
    with pytest.raises(jsonschema.ValidationError, match="container"):
        jsonschema.validate(manifest, SCHEMAS["RayCluster"])


@pytest.mark.parametrize("name", KUBERAY)
def test_every_container_runs_the_same_image_without_privileges(manifests: Path, name: str) -> None:
    manifest = _load(manifests / name)
    templates = [group["template"] for group in _groups(manifest)]
    templates += [manifest["spec"]["submitterPodTemplate"]] if "submitterPodTemplate" in manifest["spec"] else []
    assert templates
    for template in templates:
        assert template["metadata"]["labels"]["app.kubernetes.io/name"] == "reelray"  # the network policy goes by it
        mounted = {volume["name"] for volume in template["spec"].get("volumes", [])}
        for container in template["spec"]["containers"]:
            assert container["image"] == IMAGE
            assert {mount["name"] for mount in container.get("volumeMounts", [])} == mounted
            for env in container.get("env", []):
                assert not re.search("TOKEN|SECRET|PASSWORD", env["name"]) or "valueFrom" in env, "secrets come from secrets"


@pytest.mark.parametrize("name", ["raycluster.yaml", "rayjob.yaml"])
def test_shared_memory_adds_up(manifests: Path, name: str) -> None:
    for group in _groups(_load(manifests / name)):
        (container,) = group["template"]["spec"]["containers"]
        store = int(group["rayStartParams"]["object-store-memory"])
        shm = next(volume["emptyDir"] for volume in group["template"]["spec"]["volumes"] if volume["name"] == "shm")
        memory = _bytes(container["resources"]["limits"]["memory"])
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"], "shared memory cannot be lent"
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert shm["medium"] == "Memory"
        # The object store has to fit /dev/shm with room to spare, or Ray moves it to disk.
        assert _bytes(shm["sizeLimit"]) >= 1.05 * store
        # Frame slots take a quarter of the node unless told otherwise; the rest is for ranks, decoders and compressed pictures.
        assert store + memory / 4 < 0.6 * memory
        gpus = int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
        assert memory - store - memory / 4 >= gpus * (8 + 4) * (1 << 30), "8 GiB byte budget and 4 GiB of its own for every rank"


@pytest.mark.parametrize("name", ["raycluster.yaml", "rayjob.yaml"])
def test_the_cluster_is_private_and_stops_gently(manifests: Path, name: str) -> None:
    spec = _cluster_spec(_load(manifests / name))
    assert spec is not None
    assert spec["rayVersion"] == "2.60.0"
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    head = spec["headGroupSpec"]["template"]["spec"]
    wait_s = {env["name"]: env.get("value") for env in head["containers"][0]["env"]}["RAY_JOB_STOP_WAIT_TIME_S"]
    assert int(wait_s) < head["terminationGracePeriodSeconds"]
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group.get("replicas", group["minReplicas"]) <= group["maxReplicas"]
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] <= 120, "a spot node gives two minutes"
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        ports = {port["name"]: port["containerPort"] for port in group["template"]["spec"]["containers"][0]["ports"]}
        assert ports["metrics"] == int(group["rayStartParams"]["metrics-export-port"]) == 8080


def test_no_manifest_opens_a_door(manifests: Path) -> None:
    for path in manifests.rglob("*.y*ml"):
        text = path.read_text(encoding="utf-8")
        for door in ("LoadBalancer", "NodePort", "kind: Ingress", "hostNetwork", "privileged: true", "hostPath", ":latest"):
            assert door not in text, f"{path.name}: {door}"
        assert not re.search(r"(AKIA[0-9A-Z]{16}|hf_[A-Za-z0-9]{20,})", text)


def test_the_network_policy_names_everyone_who_may_come(manifests: Path) -> None:
    spec = _load(manifests / "networkpolicy.yaml")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    for rule in spec["ingress"]:
        assert rule["from"]
        assert all("podSelector" in peer or "namespaceSelector" in peer for peer in rule["from"])
    strangers = [rule for rule in spec["ingress"] if "namespaceSelector" in rule["from"][0]]
    assert all(rule["ports"] for rule in strangers)
    allowed = {rule["from"][0]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]: rule["ports"] for rule in strangers}
    assert [port["port"] for port in allowed["monitoring"]] == [8080]
    world = [peer["ipBlock"] for rule in spec["egress"] for peer in rule["to"] if peer.get("ipBlock", {}).get("cidr") == "0.0.0.0/0"]
    assert world
    assert all("169.254.169.254/32" in block["except"] for block in world)


def test_training_entry_points_parse(manifests: Path) -> None:
    from reelray.commands.train import Train

    command = _load(manifests / "rayjob.yaml")["spec"]["entrypoint"]
    assert "--resume" in command
    plain = re.sub(r"\$\([^)]*\)", "", command).replace("$RUN", "runs/x")
    words = shlex.split(plain.partition("train_integration.train")[2])
    parsed = tyro.cli(Train, args=words)
    assert parsed.use_gpu
    spec = _load(manifests / "rayjob.yaml")["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    gpus = int(spec["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert parsed.world_size == spec["replicas"] * gpus, "every rank of the job has a GPU, and every GPU a rank"


def test_the_sidecar_job_finds_the_cluster_and_its_token(manifests: Path) -> None:
    cluster, job = _load(manifests / "raycluster.yaml"), _load(manifests / "rayjob-sidecar.yaml")
    name = cluster["metadata"]["name"]
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": name}
    env = {one["name"]: one for one in job["spec"]["submitterPodTemplate"]["spec"]["containers"][0]["env"]}
    assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": name, "key": "auth_token"}
    from actors.build_sidecars import BuildSidecars

    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:3] == ["python", "-m", "actors.build_sidecars"]
    assert tyro.cli(BuildSidecars, args=words[3:]).src == "lerobot/pusht"


@pytest.fixture(scope="module")
def aws(manifests: Path) -> dict[str, Any]:
    return _load(manifests / "aws.yaml")


def test_ray_accepts_the_cluster_configuration(aws: dict[str, Any]) -> None:
    util = pytest.importorskip("ray.autoscaler._private.util", reason="Ray keeps its validation elsewhere")
    prepared = util.prepare_config(aws)
    util.validate_config(prepared)
    broken = aws | {"max_worker": 3}
    with pytest.raises(jsonschema.ValidationError, match="max_worker"):
        util.validate_config(util.prepare_config(broken))


def test_the_aws_cluster_is_private(aws: dict[str, Any]) -> None:
    starts = [command for key in ("head_start_ray_commands", "worker_start_ray_commands") for command in aws[key] if "ray start" in command]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]
    assert aws["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    opened = list(aws["provider"]["security_group"]["IpPermissions"])
    assert [rule["FromPort"] for rule in opened] == [22]
    assert all(block["CidrIp"] != "0.0.0.0/0" for rule in opened for block in rule["IpRanges"])
    for node in aws["available_node_types"].values():
        config = node["node_config"]
        assert config["MetadataOptions"]["HttpTokens"] == "required"
        assert all(disk["Ebs"]["Encrypted"] for disk in config["BlockDeviceMappings"])


def test_aws_workers_are_spot_and_the_head_is_not(aws: dict[str, Any]) -> None:
    for name, node in aws["available_node_types"].items():
        spot = node["node_config"].get("InstanceMarketOptions", {}).get("MarketType") == "spot"
        assert spot == (name != aws["head_node_type"])
    assert aws["available_node_types"]["head"]["resources"] == {"CPU": 0}
    assert sum(node.get("max_workers", 0) for node in aws["available_node_types"].values()) <= aws["max_workers"]


def test_the_aws_object_store_fits_shared_memory(aws: dict[str, Any]) -> None:
    (store,) = re.findall(r"--object-store-memory=(\d+)", aws["worker_start_ray_commands"][1])
    (shm,) = [int(option[11:-1]) << 30 for option in aws["docker"]["run_options"] if option.startswith("--shm-size=")]
    assert shm >= 1.05 * int(store)
    assert aws["docker"]["image"] == IMAGE


def _instructions(path: Path) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def test_the_dockerfile_keeps_good_habits(manifests: Path) -> None:
    found = _instructions(manifests / "Dockerfile")
    words = [word for word, _ in found]
    assert words[:2] == ["ARG", "FROM"]
    assert words.count("FROM") == 1
    (base,) = [rest.partition("=")[2] for word, rest in found if word == "ARG" and rest.startswith("BASE=")]
    assert re.fullmatch(rf"rayproject/ray:{re.escape(ray.__version__)}-py31[123]-\w+", base), "the base is that of the tested Ray"
    assert [rest for word, rest in found if word == "USER"][-1] != "root"
    assert not {"ADD", "MAINTAINER", "EXPOSE"} & set(words)
    for word, rest in found:
        if word == "RUN":
            assert "sudo" not in rest
            assert not re.search(r"curl[^|]*\|\s*(ba)?sh", rest)
            assert "apt-get install" not in rest or ("--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists" in rest)
            assert all("--no-cache-dir" in part for part in rest.split("&&") if "pip install" in part)
    environment = next(rest for word, rest in found if word == "ENV")
    assert "RAY_AUTH_MODE=token" in environment
    assert not re.search(r"(TOKEN|SECRET|PASSWORD)=", environment)


def test_the_image_holds_the_packages_and_nothing_else(manifests: Path) -> None:
    import tomllib

    root = manifests.parent
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    copied = [rest.split()[1:-1] for word, rest in _instructions(manifests / "Dockerfile") if word == "COPY"]
    sources = {source for sources in copied for source in sources}
    assert all((root / source).exists() for source in sources)
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert packages <= sources
    admitted = {
        line[1:] for line in (manifests / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")
    }
    assert admitted == sources
    assert "s3" in project["project"]["optional-dependencies"]


def test_what_a_working_directory_leaves_out_is_written_once(manifests: Path) -> None:
    lines = (manifests / ".rayignore").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == list(EXCLUDES)
