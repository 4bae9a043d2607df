"""Scripts that start pods, run against a stand-in `gcloud` whose hosts are processes of this machine."""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from lmjax import xla_flags
from lmjax.monitor.write import read_metrics

ROOT = pathlib.Path(__file__).parent.parent.parent
POD = ["--name", "pod", "--zone", "us-east5-a"]


@pytest.fixture
def gcloud(tmp_path, monkeypatch):
    """The stand-in on the path; its folder."""
    folder = tmp_path / "gcloud"
    folder.mkdir()
    monkeypatch.setenv("FAKE_GCLOUD", str(folder))
    monkeypatch.setenv("PATH", f"{pathlib.Path(__file__).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LMJAX_POLL_S", "0.1")
    monkeypatch.setenv("LMJAX_GRACE_S", "3")
    flags = os.environ.get("LMJAX_TESTS_XLA_FLAGS", os.environ["XLA_FLAGS"]).replace("device_count=8", "device_count=1")
    monkeypatch.setenv("XLA_FLAGS", flags)
    yield folder
    for path in folder.glob("*/state.json"):
        subprocess.run(["gcloud", "compute", "tpus", "tpu-vm", "delete", path.parent.name, "--zone", "z"], check=False)


def script(name, *words):
    path = name if "/" in name else f"tpu/{name}.sh"
    return subprocess.run(["bash", path, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)


def calls(folder):
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


# --------------------------------------------------------------------------------------------------------------- the scripts


def test_shellcheck_finds_nothing():
    tool = shutil.which(
        "shellcheck", path=os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    )
    scripts = [*ROOT.glob("tpu/*.sh"), *ROOT.glob("scripts/*.sh"), *ROOT.glob("scripts/gpu/*s*"), ROOT / ".ci" / "run"]
    scripts = [path for path in scripts if path.suffix != ".yaml"]
    assert len(scripts) > 10
    done = subprocess.run(
        [tool, "-x", "-P", "SCRIPTDIR", "--", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_a_pod_is_created_once_and_deleted(gcloud):
    create = ["create", *POD, "--type", "v5litepod-16", "--spot"]
    assert script(*create).returncode == 0
    assert "pod is ready" in script(*create).stdout
    made = [call for call in calls(gcloud) if call[3:4] == ["create"]]
    assert len(made) == 1 and "--spot" in made[0] and "v2-alpha-tpuv5-lite" in made[0]
    assert script("delete", *POD).returncode == 0
    assert "there is no pod" in script("delete", *POD).stdout


def test_a_queued_resource_is_waited_for_and_deleted_by_its_request(gcloud):
    done = script("create", *POD, "--type", "v5p-16", "--queued")
    assert done.returncode == 0 and "WAITING_FOR_RESOURCES" in done.stdout and "ACTIVE" in done.stdout
    assert script("delete", *POD).returncode == 0
    assert any(call[2:4] == ["queued-resources", "delete"] for call in calls(gcloud))
    assert not any(call[2:4] == ["tpu-vm", "delete"] for call in calls(gcloud))


def test_a_warning_of_gcloud_is_no_state(gcloud):
    (gcloud / "warning").touch()
    create = ["create", *POD, "--type", "v5litepod-8"]
    assert script(*create, "--queued").returncode == 0
    assert "pod is ready" in script(*create).stdout
    assert script("delete", *POD).returncode == 0


def test_a_pod_that_is_being_made_is_waited_for(gcloud):
    create = ["create", *POD, "--type", "v5litepod-8"]
    assert script(*create).returncode == 0
    state = gcloud / "pod" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"state": "CREATING", "looks": 3}))
    done = script(*create)
    assert done.returncode == 0 and "pod: CREATING" in done.stdout and "pod: READY" in done.stdout, done.stderr
    assert len([call for call in calls(gcloud) if call[3:4] == ["create"]]) == 1


def test_a_request_that_waits_is_taken_up(gcloud):
    (gcloud / "pod.request").mkdir()
    request = {"kind": "v5litepod-8", "version": "v2-alpha-tpuv5-lite", "looks": 0}
    (gcloud / "pod.request" / "state.json").write_text(json.dumps(request))
    done = script("create", *POD, "--type", "v5litepod-8", "--queued")
    assert done.returncode == 0 and "WAITING_FOR_RESOURCES" in done.stdout and "ACTIVE" in done.stdout, done.stderr
    assert not [call for call in calls(gcloud) if call[3:4] == ["create"]]


def test_a_watch_outlives_some_looks_that_fail(gcloud):
    assert script("create", *POD, "--type", "v5litepod-8").returncode == 0
    subprocess.run(["gcloud", "fake", "preempt", "pod", "0"], check=True)
    (gcloud / "outage").write_text("x" * 9)
    done = script("watch", *POD)
    assert done.returncode == 1 and "pod: PREEMPTED" in done.stdout and done.stderr.count("UNAVAILABLE") == 9
    (gcloud / "outage").write_text("x" * 10)
    done = script("watch", *POD)
    assert done.returncode == 1 and "PREEMPTED" not in done.stdout and (gcloud / "outage").read_text() == ""


def test_recovering_outlives_a_look_that_fails(gcloud, monkeypatch):
    """The run cannot start (the checkout of the host has no such environment): exit code 2 comes from the host, not from the look."""
    assert script("create", *POD, "--type", "v5litepod-4").returncode == 0
    (gcloud / "outage").write_text("xxx")
    done = script("watch", "--recover", *POD, "--type", "v5litepod-4", *RUN, "--environment", "/nowhere")
    assert done.returncode == 2 and "/nowhere is no environment" in done.stderr, done.stdout + done.stderr


def test_what_git_does_not_track_is_copied_only_where_code_lies(gcloud, tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "tpu", checkout / "tpu")
    for path in (
        "lmjax/xla_flags.py",
        "configs/mine.py",
        "elsewhere/mine.py",
        "my_run/checkpoints/1",
        "lmjax/changed.py",
    ):
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).touch()
    subprocess.run("git init -q . && git add tpu lmjax/xla_flags.py", shell=True, cwd=checkout, check=True)
    subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m"], cwd=checkout, check=True)
    assert script("create", *POD, "--type", "v5litepod-4").returncode == 0
    run = [*POD, "--config", "elsewhere/mine.py", *RUN[2:], "--environment", "/nowhere"]
    done = subprocess.run(["bash", "tpu/launch.sh", *run], cwd=checkout, capture_output=True, text=True, timeout=100)
    assert "/nowhere is no environment" in done.stderr, done.stdout + done.stderr
    there = {str(path.relative_to(gcloud / "pod/0/lmjax")) for path in (gcloud / "pod/0/lmjax").rglob("*")}
    assert {"lmjax/xla_flags.py", "configs/mine.py", "elsewhere/mine.py", "lmjax/changed.py"} <= there
    assert not [path for path in there if path.startswith("my_run")]
    assert "untracked ones of lmjax configs" in done.stdout


@pytest.mark.slow
def test_one_host_that_fails_stops_all(gcloud, tmp_path):
    assert script("create", *POD, "--type", "v5litepod-8").returncode == 0
    command = "echo $JAX_PROCESS_ID of $JAX_NUM_PROCESSES; [ $JAX_PROCESS_ID != 1 ] || exit {}; sleep 300"
    for code, expected in ((3, 1), (2, 2)):  # a mistake of the user stays one
        start = time.monotonic()
        done = script("multihost", *POD, "--logs", str(tmp_path / "logs"), "--", command.format(code))
        assert done.returncode == expected and f"host 1 ended with {code}" in done.stderr
        assert time.monotonic() - start < 60
        logs = [(tmp_path / "logs" / f"host-{i}.log").read_text() for i in range(2)]
        assert [log.splitlines()[0] for log in logs] == ["0 of 2", "1 of 2"]
    marks = [path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/environ") if readable(path)]
    assert not [mark for mark in marks if f"FAKE_HOST={gcloud}".encode() in mark]
    quick = script("multihost", *POD, "--logs", str(tmp_path / "logs"), "--", "echo \"it's\" '$HOME'")
    assert quick.returncode == 0 and (tmp_path / "logs" / "host-1.log").read_text() == "it's $HOME\n"


def readable(path):
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


RUN = ["--config", "configs/pretrain/tiny.py", "--workdir", "/shared/run"]
RUN += ["--tokenizer", "/shared/tokenizer", "--shards", "/shared/shards"]


@pytest.mark.parametrize(
    "name,words,message",
    [
        ("create", ["--name", "pod"], "--zone is missing"),
        ("create", [*POD], "--type is missing"),
        ("create", [*POD, "--type", "v9-8"], "--version is missing"),
        ("create", [*POD, "--tpye", "v5p-8"], "unknown argument --tpye"),
        ("multihost", [*POD], "no command"),
        ("multihost", [*POD, "--", "true"], "pod is not ready but ABSENT"),
        ("launch", [*POD], "--config is missing"),
        ("launch", [*POD, *RUN[:2]], "--workdir is missing"),
        ("launch", [*POD, "--config", "configs/none.py", *RUN[2:]], "no file configs/none.py"),
        ("launch", [*POD, *RUN[:2], "--workdir", "run", *RUN[4:]], "run must be seen by all hosts"),
        ("launch", [*POD, *RUN[:2], "--workdir", "gs://bucket/run", *RUN[4:]], "no access to the bucket of gs://bucket/run"),
        ("launch", [*POD, *RUN], "pod is not ready but ABSENT"),
        ("recover", [*POD, *RUN], "--type is missing"),
        ("watch", [*POD, "--recover"], "--config is missing"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_line_and_exit_code_2(gcloud, name, words, message):
    done = script(name, *words)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not (gcloud / "pod").exists()


@pytest.fixture
def bare_path(tmp_path, monkeypatch):
    """A path with the tools that every system has, and no gcloud, kubectl or srun."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in (
        "bash",
        "basename",
        "cat",
        "cut",
        "dirname",
        "git",
        "grep",
        "gzip",
        "mktemp",
        "python3",
        "rm",
        "sed",
        "tar",
        "tr",
        "wc",
    ):
        (folder / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(
    "path", [*sorted(ROOT.glob("tpu/*.sh")), *sorted(ROOT.glob("scripts/gpu/*s*"))], ids=lambda p: p.name
)
def test_help_is_told_from_any_folder(path):
    if path.name in ("common.sh", "host.sh", "k8s.yaml"):  # sourced; started by others; no script
        return
    words = ["bash", path.name, "--help"]
    done = subprocess.run(words, cwd=path.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and f"/{path.name}" in done.stdout and not done.stderr


def test_a_folder_of_shards_may_have_spaces(gcloud):
    run = [*RUN[:-1], "/shared/my shards,gs://bucket/a b"]
    done = script("launch", *POD, *run, "--dry-run")
    assert done.returncode == 0 and "--config.data.shards=/shared/my shards,gs://bucket/a b" in done.stdout, done.stderr
    assert "b must be seen by all hosts" in script("launch", *POD, *run[:-1], "/a,b", "--dry-run").stderr


def test_no_account(gcloud):
    (gcloud / "account").write_text("")
    assert "gcloud auth login" in script("create", *POD, "--type", "v5p-8").stderr


def test_no_gcloud(gcloud, bare_path):
    done = script("create", *POD, "--type", "v5p-8")
    assert done.returncode == 2 and "gcloud is not installed" in done.stderr


@pytest.mark.parametrize("name", ["create", "launch", "watch", "delete", "recover", "multihost"])
def test_a_dry_run_tells_and_does_nothing(gcloud, bare_path, name):
    words = [*POD, "--type", "v5p-16", *RUN, "--flags", "--xla_one=1", "--dry-run"]
    done = script(name, *words, *(["--", "true"] if name == "multihost" else []))
    assert done.returncode == 0 and "gcloud compute tpus" in done.stdout, done.stderr
    assert not (gcloud / "calls").exists()
    assert name != "launch" or f"LIBTPU_INIT_ARGS={xla_flags.flags('tpu', '--xla_one=1')}" in done.stdout


def test_the_commands_of_the_readme_are_real(gcloud, bare_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Start a pod\n")[1].split("\n## ")[0]
    blocks = "".join(text.split("```bash\n")[1:][i].split("```")[0] for i in range(text.count("```bash\n")))
    lines = [shlex.split(line) for line in blocks.replace("\\\n", " ").splitlines()]
    assert len(lines) == 7
    for name, *words in lines:
        if name == "sbatch":
            name, words = words[1], [*words[2:], "--environment", sys.prefix]
        done = script(name, *words, "--dry-run")
        assert done.returncode == 0 and not done.stderr, done.stderr


# ----------------------------------------------------------------------------------------------------------------- a real run


REAL = shutil.which("gcloud", path="/usr/bin:/usr/local/bin:/opt/google-cloud-sdk/bin")


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason="gcloud is not installed")
def test_gcloud_itself_knows_the_commands(gcloud, tmp_path, monkeypatch):
    """It reads the arguments, and then misses an account."""
    words = [*POD, "--type", "v5p-16", "--spot", "--project", "p", *RUN, "--dry-run"]
    said = [script(*parts).stdout for parts in (["recover", *words], ["recover", *words, "--queued"])]
    lines = {line.removeprefix("+ ") for out in said for line in out.splitlines() if line.startswith("+ gcloud")}
    lines |= {
        f"gcloud compute tpus {kind} describe pod --zone z --project p --format='value(state)'"
        for kind in ("tpu-vm", "queued-resources")
    }
    kinds = {tuple(line.split()[3:5]) for line in lines}
    assert kinds == {(k, v) for k in ("tpu-vm", "queued-resources") for v in ("create", "delete", "describe")} | {
        ("tpu-vm", "scp"),
        ("tpu-vm", "ssh"),
    }
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "nobody"))
    for line in {tuple(line.split()[3:5]): line for line in lines}.values():
        done = subprocess.run([REAL, *shlex.split(line)[1:]], capture_output=True, text=True, timeout=120)
        assert "do not currently have an active account" in done.stderr, line + done.stderr


@pytest.mark.slow
def test_a_preempted_run_is_recovered_to_the_bit(gcloud, line, tmp_path):
    """create → launch on 4 hosts → one is preempted → recover: the losses are those of 4 processes that nothing disturbed."""
    from test_cli import cluster

    config = "tests/tpu/small.py"
    run = ["--config", config, "--tokenizer", str(line.tokenizer), "--shards", ",".join(map(str, line.shards))]
    run += ["--environment", sys.prefix, "--type", "v5litepod-16", *POD]
    launch = [*run, "--workdir", str(tmp_path / "run"), "--logs", str(tmp_path / "logs")]
    assert script("create", *launch).returncode == 0
    words = ["bash", "tpu/launch.sh", *launch]
    launched = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: len(losses(tmp_path / "run")) >= 25, launched, tmp_path / "logs")
    subprocess.run(["gcloud", "fake", "preempt", "pod", "2"], check=True)
    said, _ = launched.communicate(timeout=200)
    assert launched.returncode == 1 and "ended with" in said, said
    assert script("watch", *POD).returncode == 1
    recovered = script("watch", "--recover", *launch)
    log = (tmp_path / "logs" / "host-0.log").read_text()
    assert recovered.returncode == 0 and "pod: PREEMPTED" in recovered.stdout, recovered.stdout + recovered.stderr + log
    assert "going on from checkpoint" in log
    assert script("delete", *POD).returncode == 0

    words = ["train", "--config", config, "--workdir", str(tmp_path / "whole")]
    whole = cluster([*words, *(f"--config.{override}" for override in line.overrides())], 4, devices=1)
    ends = [(process.communicate(timeout=200), process.returncode) for process in whole]
    assert [code for _, code in ends] == [0] * 4, ends
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert len(ours) == 120 and ours == theirs


def losses(workdir):
    if not (workdir / "metrics.jsonl").exists():
        return {}
    return {row["step"]: row["train/loss"] for row in read_metrics(workdir) if "train/loss" in row}


def wait_for(condition, process, logs):
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, [path.read_text() for path in logs.glob("*.log")]
        assert time.monotonic() < deadline
        time.sleep(0.05)
