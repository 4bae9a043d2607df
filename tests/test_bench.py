"""The benchmarks' contract: a table for people, rows for machines, peers only where they are."""

import importlib.util
import json
import pathlib
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).parent.parent / "scripts"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("bench_train", SCRIPTS / "bench_train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_for_machines(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["bench_harness"], "MAX_FOREIGN", 1.0)  # tests share the machine
    assert bench.main(["--quick", "--only", "cli", "--json", str(tmp_path / "rows.json")]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert {"machine", "versions", "commit", "lmjax --help", "lmjax plan"} <= rows.keys()
    for row in rows.values():
        assert row.keys() == {"name", "value", "unit", "target", "met", "command"}
    plan = rows["lmjax plan"]
    assert plan["met"] == (plan["value"] <= 1.0) and plan["unit"] == "s" and "--only cli" in plan["command"]
    assert "lmjax plan" in capsys.readouterr().out


def test_a_target_is_met_or_not(bench):
    row = sys.modules["bench_harness"].Row
    assert row("a", 1.1, "×", ">= 1.05").met and not row("a", 1.0, "×", ">= 1.05").met
    assert row("a", 0.2, "×", "<= 0.25").met and not row("a", 0.3, "×", "<= 0.25").met
    assert row("a", None, "×", "<= 0.25").met is None and row("a", 3.0, "ms").met is None


def test_without_the_peer_the_full_form_says_what_to_install(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert bench.main(["--only", "cli"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
