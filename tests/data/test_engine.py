"""Engines: tasks are done once, in any process; a Ray cluster of several nodes writes the same bytes as this machine."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from lmjax.data.engine import LocalEngine, RayEngine, Task
from lmjax.data.exact_dedup import ExactDedup
from lmjax.data.near_dedup import NearDedup
from lmjax.data.prepare import prepare
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


# ------------------------------------------------------------------------------------------------------------------- a cluster


def make_copies(folder: Path) -> Path:
    """Two sources in several files: copies, copies with a word changed, and texts that stand alone, far apart."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(500)]
    pages = [" ".join(rng.choices(words, k=60)) for _ in range(60)]
    for source in ("web", "books"):
        for part in range(4):
            texts = rng.choices(pages, k=30)
            for place in rng.sample(range(30), 12):
                texts[place] = " ".join([*texts[place].split()[:-1], rng.choice(words)])
            rows = ({"id": f"{part}-{i}", "text": text, "date": f"20{part}0-01-01"} for i, text in enumerate(texts))
            path = folder / source / f"{part}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def configs(inputs: Path, copies: Path, **options) -> dict:
    """What the engines must agree on: stages of a test, and those that remove duplicates, with their index."""
    import test_prepare

    real = {
        "exact_dedup": ExactDedup(keep="newest", index=True),
        "near_dedup": NearDedup(index=True, keep="longest"),
        "stages": ("exact_dedup", "near_dedup"),
        "shard_bytes": 5000,
    }
    return {
        "toy": test_prepare.config(inputs, **options),
        "real": test_prepare.config(copies, **real, **options),
        "lines": test_prepare.config(copies, **real | {"exact_dedup": ExactDedup(level="line")}, **options),
    }


RAY_SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import ray
from ray.cluster_utils import Cluster
import test_engine
from lmjax.data.prepare import prepare

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80_000_000})
for _ in range(2):
    cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
cluster.wait_for_nodes()
ray.init(address=cluster.address, include_dashboard=False)
inputs, copies, out = map(Path, sys.argv[2:5])
for name, config in test_engine.configs(inputs, copies, engine="ray", ray_address=cluster.address).items():
    prepare(config, out / name)
print("nodes", len([node for node in ray.nodes() if node["Alive"]]))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_ray_cluster_writes_the_same_bytes(tmp_path):
    import test_prepare

    inputs, copies = test_prepare.make_inputs(tmp_path / "in"), make_copies(tmp_path / "copies")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    places = map(str, (Path(__file__).parent, inputs, copies, tmp_path / "ray"))
    arguments = [sys.executable, "-c", RAY_SCRIPT, *places]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nodes 3" in done.stdout
    for name, config in configs(inputs, copies).items():
        prepare(config, tmp_path / "local" / name)
        assert test_prepare.outputs(tmp_path / "ray" / name) == test_prepare.outputs(tmp_path / "local" / name), name
    receipts = json.loads(next((tmp_path / "ray" / "toy" / "work").glob("01-*/receipts/web/*.json")).read_text())
    assert receipts["counts"][0]["read"] > 0
    _, exact, near = json.loads((tmp_path / "ray" / "real" / "report.json").read_text())["stages"]
    assert exact["total"]["dropped"]["exact_duplicate"] > 50 and near["total"]["dropped"]["near_duplicate"] > 20
    assert (tmp_path / "ray" / "real" / "near_dedup" / "index.json").exists()
