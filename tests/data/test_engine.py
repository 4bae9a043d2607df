"""Engines: tasks are done once, in any process; a Ray cluster of several nodes writes the same bytes as this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmjax.data.engine import LocalEngine, RayEngine, Task
from lmjax.errors import UserError


def square(number: int, log: Path) -> dict:
    with open(log, "a") as file:
        file.write(f"{number}\n")
    if number == 5 and not log.with_suffix(".mended").exists():
        raise ValueError("five")
    return {"square": number**2, "process": os.getpid()}


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_results_in_order_and_once(tmp_path, num_workers):
    log, told = tmp_path / "log", []
    tasks = [Task(f"part/{i}", square, (i, log)) for i in (3, 1, 2)]
    with LocalEngine(num_workers, lambda *args: told.append(args)) as engine:
        assert [result["square"] for result in engine.run(tasks, tmp_path, "squares")] == [9, 1, 4]
        assert engine.run(tasks, tmp_path)[0]["square"] == 9
    assert sorted(log.read_text().split()) == ["1", "2", "3"], "each ran once"
    assert told[0] == ("squares", 0, 3) and told[3] == ("squares", 3, 3) and told[4] == ("", 3, 3)


def test_what_was_done_before_a_failure_is_kept(tmp_path):
    log = tmp_path / "log"
    tasks = [Task(str(i), square, (i, log)) for i in range(8)]
    with LocalEngine() as engine, pytest.raises(ValueError, match="five"):
        engine.run(tasks, tmp_path)
    log.with_suffix(".mended").touch()
    with LocalEngine() as engine:
        engine.run(tasks, tmp_path)
    assert sorted(log.read_text().split()) == sorted(["5", *"01234567"])


def test_ray_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'lmjax\[ray\]'"):
        RayEngine()


RAY_SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import ray
from ray.cluster_utils import Cluster
import test_prepare as t

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80_000_000})
for _ in range(2):
    cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
cluster.wait_for_nodes()
inputs, out = map(Path, sys.argv[2:4])
t.prepare.prepare(t.config(inputs, engine="ray", ray_address=cluster.address), out)
ray.init(address=cluster.address, ignore_reinit_error=True, include_dashboard=False)
print("nodes", len([node for node in ray.nodes() if node["Alive"]]))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_ray_cluster_writes_the_same_bytes(tmp_path):
    import test_prepare

    inputs = test_prepare.make_inputs(tmp_path / "in")
    test_prepare.prepare.prepare(test_prepare.config(inputs), tmp_path / "local")
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent),
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    arguments = [sys.executable, "-c", RAY_SCRIPT, str(Path(__file__).parent), str(inputs), str(tmp_path / "ray")]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nodes 3" in done.stdout
    assert test_prepare.outputs(tmp_path / "ray") == test_prepare.outputs(tmp_path / "local")
    receipts = json.loads(next((tmp_path / "ray" / "work").glob("01-*/receipts/web/*.json")).read_text())
    assert receipts["counts"][0]["read"] > 0
