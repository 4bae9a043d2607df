"""SLURM and Kubernetes: the files are what these read, and the scripts call them with the run's command."""

import json
import os
import re
import shlex
import sys

import pytest
import yaml
from test_pods import ROOT, RUN, bare_path, script  # noqa: F401

from lmjax import xla_flags

BUCKET = ["--config", "configs/pretrain/tiny.py", "--workdir", "gs://bucket/run"]
BUCKET += ["--tokenizer", "gs://bucket/tokenizer", "--shards", "gs://bucket/a,gs://bucket/b"]
TRAIN = ["train", "--config", "configs/pretrain/tiny.py", "--workdir", "gs://bucket/run", "--distributed"]
TRAIN += ["--config.tokenizer=gs://bucket/tokenizer", "--config.data.shards=gs://bucket/a,gs://bucket/b"]
JOB = ["--name", "run", "--hosts", "4", "--devices", "8", "--image", "registry/lmjax"]
GKE = ["--accelerator", "tpu-v5p-slice", "--topology", "2x2x4"]
SBATCH = "scripts/gpu/slurm.sbatch"


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Makes a stand-in on the path; what it was called with is in its file."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "tools").mkdir()

    def make(name, code=""):
        path = tmp_path / "tools" / name
        path.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" >>{path}.calls; printf "\\n" >>{path}.calls\n{code}\n')
        path.chmod(0o755)
        return lambda: [
            line.split("\0")[:-1] for line in (tmp_path / "tools" / f"{name}.calls").read_text().splitlines()
        ]

    return make


# --------------------------------------------------------------------------------------------------------------------- SLURM


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return [SBATCH, *RUN, "--environment", sys.prefix, "--logs", str(tmp_path / "logs"), "--config.train.steps=3"]


def test_srun_gets_the_run_and_its_failure_is_the_jobs(job, tools, tmp_path):
    calls = tools("srun", "exit 3")
    assert script(*job).returncode == 3
    (words,) = calls()
    assert words[:2] == ["--kill-on-bad-exit=1", f"--output={tmp_path / 'logs'}/host-%t.log"]
    assert words[words.index("-m") :][:3] == ["-m", "lmjax.cli", "train"]
    assert {"--distributed", "--config.train.steps=3", "--config.data.shards=/shared/shards"} <= set(words)


def test_a_job_that_is_preempted_saves_and_is_queued_again(job, tools):
    tools("srun", "trap 'kill $!; exit 0' TERM; kill -USR1 $PPID; sleep 60 & wait")
    ended = tools("scancel", "kill -TERM $(pgrep -P $PPID srun)")
    queued = tools("scontrol")
    done = script(*job)
    assert done.returncode == 0 and "saves" not in done.stderr, done.stderr
    assert ended() == [["--signal=TERM", "7.0"]] and queued() == [["requeue", "7"]]


def test_a_slurm_job_that_cannot_start(job, tools, bare_path, monkeypatch, tmp_path):  # noqa: F811
    assert "there is no srun" in script(*job).stderr
    flags, command = script(*job, "--dry-run", "--flags", "--xla_one=1").stdout.splitlines()
    assert flags == f"+ export 'XLA_FLAGS={xla_flags.flags('gpu', '--xla_one=1')}'"
    assert command.startswith("+ srun --kill-on-bad-exit=1")
    wrong = script(SBATCH, *RUN, "--environment", str(tmp_path))
    assert wrong.returncode == 2 and "is no virtual environment" in wrong.stderr and wrong.stderr.count("\n") == 1


def test_the_options_of_sbatch():
    """They stand before the first command, where sbatch reads them, and name options that exist."""
    lines = (ROOT / SBATCH).read_text().splitlines()
    options = [line for line in lines[1:10] if line.startswith("#SBATCH --")]
    assert options == [line for line in lines if line.startswith("#SBATCH")]
    names = {re.match(r"#SBATCH --([a-z-]+)", line)[1] for line in options}
    assert names == {
        "job-name",
        "nodes",
        "ntasks-per-node",
        "gpus-per-node",
        "exclusive",
        "requeue",
        "open-mode",
        "signal",
    }


# ---------------------------------------------------------------------------------------------------------------- Kubernetes


def test_the_job_for_gpus(bare_path):  # noqa: F811
    done = script("scripts/gpu/k8s.sh", *JOB, *BUCKET, "--config.train.steps=3", "--dry-run")
    service, job = yaml.safe_load_all(done.stdout)
    assert service["spec"] == {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": "run"}}
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 4
    (container,) = spec["template"]["spec"]["containers"]
    assert container["args"][: len(TRAIN)] == TRAIN and "--config.train.steps=3" in container["args"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8} and container["image"] == "registry/lmjax"
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert variables["JAX_COORDINATOR_ADDRESS"] == "run-0.run:1234" and variables["JAX_NUM_PROCESSES"] == "4"
    assert variables["XLA_FLAGS"] == xla_flags.flags("gpu")
    assert "job-completion-index" in json.dumps(container["env"])
    rule = spec["podFailurePolicy"]["rules"][0]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2]


def test_the_jobset_for_tpus(bare_path):  # noqa: F811
    given = "--xla_enable_async_all_gather=false"
    done = script("tpu/gke.sh", *JOB, *GKE, *BUCKET, "--slices", "2", "--flags", given, "--dry-run")
    (jobset,) = yaml.safe_load_all(done.stdout)
    assert jobset["kind"] == "JobSet" and jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    (slices,) = jobset["spec"]["replicatedJobs"]
    assert slices["replicas"] == 2
    job = slices["template"]["spec"]
    assert job["completions"] == job["parallelism"] == 4 and job["backoffLimit"] == 0
    pod = job["template"]["spec"]
    places = {"gke-tpu-accelerator": "tpu-v5p-slice", "gke-tpu-topology": "2x2x4"}
    assert pod["nodeSelector"] == {f"cloud.google.com/{name}": value for name, value in places.items()}
    (container,) = pod["containers"]
    assert container["args"][: len(TRAIN)] == TRAIN and container["resources"]["limits"] == {"google.com/tpu": 8}
    assert container["env"] == [{"name": "LIBTPU_INIT_ARGS", "value": xla_flags.flags("tpu", given)}]


@pytest.mark.parametrize("words", [["scripts/gpu/k8s.sh", *JOB], ["tpu/gke.sh", *JOB, *GKE]])
def test_quotes_among_the_flags_reach_xla(bare_path, words):  # noqa: F811
    done = script(*words, *BUCKET, "--flags", '--xla_a="b: c"', "--dry-run")
    *_, job = yaml.safe_load_all(done.stdout)
    values = re.findall(r"'value': '(--xla_a=[^']*)'", str(job))
    assert len(values) == 1 and values[0].startswith('--xla_a="b: c" ')


def test_kubectl_gets_the_manifest(tools, tmp_path):
    calls = tools("kubectl", f"[ $1 = config ] || cat >{tmp_path / 'manifest'}")
    assert script("scripts/gpu/k8s.sh", *JOB, *BUCKET).returncode == 0
    assert calls()[-1] == ["apply", "-f", "-"]
    assert [part["kind"] for part in yaml.safe_load_all((tmp_path / "manifest").read_text())] == ["Service", "Job"]


@pytest.mark.parametrize(
    "words,message",
    [
        (["scripts/gpu/k8s.sh", *JOB[2:], *BUCKET], "--name is missing"),
        (["scripts/gpu/k8s.sh", *JOB, *RUN], "give gs://"),
        (["scripts/gpu/k8s.sh", *JOB, *BUCKET], "kubectl is not installed"),
        (["tpu/gke.sh", *JOB, *BUCKET], "--accelerator is missing"),
        (["tpu/gke.sh", *JOB, *GKE, *BUCKET, "--slices", "two"], "--slices must be a positive number"),
        ([SBATCH, *RUN[:4]], "--tokenizer is missing"),
    ],
)
def test_what_is_missing_for_a_cluster(bare_path, words, message):  # noqa: F811
    done = script(*words)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


# --------------------------------------------------------------------------------------------------------------------- image


def test_the_image_is_made_of_files_that_are_there():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    python = next(line for line in lines if line.startswith("FROM python:"))
    minor = re.search(r"3\.(\d+)", python)[1]
    copied = [path for line in lines if line.startswith("COPY ") for path in shlex.split(line)[1:-1]]
    assert copied and all((ROOT / path).exists() for path in copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert set(copied) <= {line[1:] for line in ignored if line.startswith("!")}
    (install,) = (line for line in lines if line.startswith("RUN "))
    assert f"constraints/py3{minor}.txt" in install and (ROOT / f"constraints/py3{minor}.txt").exists()
