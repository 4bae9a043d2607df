"""The page: its numbers are the parts', its time is simple arithmetic, and it needs no jax."""

import dataclasses
import io
import json
import pathlib
import subprocess
import sys

import pytest
from rich.console import Console

from lmjax import cli
from lmjax.config import build
from lmjax.data.config import DataConfig
from lmjax.errors import UserError
from lmjax.model.config import ModelConfig, MoeConfig
from lmjax.plan import hardware, memory, params
from lmjax.plan.estimate import Assumptions, plan
from lmjax.plan.report import duration, gib, render, show, si, to_dict
from lmjax.sharding.config import MeshConfig
from lmjax.train.config import RunConfig, TrainConfig

LLAMA = RunConfig(
    model=ModelConfig(
        vocab_size=128_256, num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, d_ff=14_336, tie_embeddings=False,
        remat="full",
    ),
    mesh=MeshConfig(data=1, fsdp=-1),
    train=TrainConfig(steps=1000, batch_size=256),
    data=DataConfig(seq_len=8192),
)  # fmt: skip

FEW_ROWS = dataclasses.replace(LLAMA, train=TrainConfig(steps=1000, batch_size=8))  # there is less to search


def test_numbers_add_up():
    result = plan(LLAMA, 256, "v5e", Assumptions(mfu=0.5))
    assert result.params == 8_030_261_248 == sum(result.params_by_group.values())
    assert result.tokens == 1000 * 256 * 8192 and result.tokens_per_parameter == result.tokens / result.params
    assert result.training_flops == result.flops_per_token.training * result.tokens
    assert result.costs.seconds == pytest.approx(result.training_flops / (256 * 197e12 * 0.5))
    assert result.memory == memory.memory(LLAMA, 256)
    assert result.mesh == {"data": 1, "stage": 1, "fsdp": 256, "expert": 1, "context": 1, "tensor": 1}


def test_llama_8b_on_v5e_256_has_the_known_state():
    """Parameters and two moments in float32, 12 bytes a parameter over 256 chips: 0.38 GB of arguments (norms are whole)."""
    result = plan(LLAMA, 256, "v5e")
    assert result.memory.state == pytest.approx(0.38e9, rel=0.02)
    assert result.hbm_share < 0.9


def test_rows_that_grow_cost_what_each_length_costs():
    """Memory and a token's FLOPs are those of the longest rows; the run's FLOPs are summed over its stages."""
    stages = ({"from_step": 0, "seq_len": 4096}, {"from_step": 900, "seq_len": 32_768})
    data = build(DataConfig, {"seq_len": 8192, "stages": stages})
    model = dataclasses.replace(LLAMA.model, max_length=32_768)
    grows = plan(dataclasses.replace(LLAMA, data=data, model=model), 64)
    short, long = (
        plan(
            RunConfig(
                model=model,
                data=DataConfig(seq_len=n),
                mesh=LLAMA.mesh,
                train=TrainConfig(steps=1000, batch_size=8192 * 256 // n),
            ),
            64,
        )
        for n in (4096, 32_768)
    )
    assert grows.memory == long.memory and grows.flops_per_token == long.flops_per_token
    assert grows.training_flops == pytest.approx(0.9 * short.training_flops + 0.1 * long.training_flops)
    assert grows.tokens == short.tokens == long.tokens
    with pytest.raises(UserError, match=r"64 rows .* do not divide over fsdp = 256"):
        plan(dataclasses.replace(LLAMA, data=data, model=model), 256)


def test_fewest_devices_where_none_are_stated():
    assert plan(LLAMA).num_devices == 1
    assert plan(RunConfig(mesh=MeshConfig(data=2, fsdp=-1, tensor=2))).num_devices == 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"hardware_name": "h1000"}, "did you mean"),
        ({"assumed": {"mfu": 0.0}}, "--mfu 0.0 must be in"),
        ({"assumed": {"pue": 0.9}}, "--pue 0.9 must be at least 1"),
        ({"assumed": {"grid": "us-centrel1"}}, "did you mean 'us-central1'"),
        ({"assumed": {"preemptions_per_day": 0.0}}, "must be positive"),
        ({"hardware_name": "tpu7x", "assumed": {"budget_usd": 1e3}}, "state one with --usd-per-hour"),
        ({"num_devices": 0}, "--devices 0 must be at least 1"),
        ({"num_devices": -4}, "--devices -4 must be at least 1"),
        ({"assumed": {"budget_usd": float("inf")}}, "--budget-usd inf must be a finite number"),
        ({"num_devices": 7}, "do not divide over fsdp = 7"),
    ],
)
def test_mistakes(arguments, message):
    assumed = arguments.pop("assumed", {})
    with pytest.raises(UserError, match=message):
        plan(FEW_ROWS, **({"num_devices": 8, "hardware_name": "v5p"} | arguments), assumed=Assumptions(**assumed))


@pytest.mark.parametrize("words", [["--budget-usd", "10"], ["--mfu", "0.5"], ["--slices", "2"], ["--grid", "us"]])
def test_what_rests_on_an_accelerator_asks_for_it(words, capsys):
    code = cli.main(["plan", "--config", "configs/pretrain/tiny.py", *words])
    said = capsys.readouterr().err
    assert code == 2 and f"{words[0]}: say for which accelerator" in said and said.count("\n") == 1
    assert (
        cli.main(["plan", "--config", "configs/pretrain/tiny.py", *words, "--devices", "2", "--hardware", "v5p"]) == 0
    )


def test_json_holds_the_plan():
    result = plan(FEW_ROWS, 8, "v5p")
    values = json.loads(json.dumps(to_dict(result)))
    assert values["params"]["total"] == result.params
    assert values["flops_per_token"]["training"] == result.flops_per_token.training
    assert values["memory_bytes_per_device"]["total"] == result.memory.total
    assert values["hardware"]["name"] == "v5p" and values["seconds"] == result.costs.seconds
    assert "seconds" not in to_dict(plan(FEW_ROWS, 8))


@pytest.mark.parametrize("hardware_name", [None, *(row.name for row in hardware.ACCELERATORS)])
def test_the_page(hardware_name):
    console = Console(record=True, width=140, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(plan(FEW_ROWS, 8, hardware_name)))
    text = console.export_text()
    assert len(text.splitlines()) < 64 and max(map(len, text.splitlines())) <= 140
    for words in (
        "8,030,261,248",
        "mlp",
        "tokens a parameter",
        "compute-optimal tokens",
        "temporaries (estimate)",
        "8 device(s)",
    ):
        assert words in text
    assert ("MFU" in text) == (hardware_name is not None)
    if hardware_name is not None:
        row = hardware.by_name(hardware_name)
        assert ("state it with --watts" in text) == (row.watts.value is None)
        assert ("state it with --usd-per-hour" in text) == (row.usd_per_hour.value is None)


@pytest.mark.parametrize("share, words", [(1.01, "does not fit"), (0.95, "is tight"), (0.5, "fits")])
def test_whether_it_fits(share, words, monkeypatch):
    hbm = round(memory.memory(FEW_ROWS, 8).total / share)
    row = dataclasses.replace(hardware.by_name("v5p"), hbm_bytes=hbm)
    monkeypatch.setattr(hardware, "by_name", lambda name: row)
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(plan(FEW_ROWS, 8, "v5p")))
    assert f"HBM {words}" in console.export_text()


def test_devices_chips_and_hosts():
    """TPU7x: two devices a chip, four chips a host."""
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(plan(LLAMA, 32, "tpu7x")))
    text = console.export_text()
    assert (
        "32 × tpu7x (16 chip(s), 4 host(s) of 8)" in text
        and "mesh: data 1 × stage 1 × fsdp 32 × expert 1 × context 1 × tensor 1" in text
    )
    assert "HBM fits" in text


def test_show_prints_the_page(capsys):
    show(plan(LLAMA))
    assert "8,030,261,248" in capsys.readouterr().out


def test_tokens_are_whole_steps():
    """So many that the run reads at least what was asked for."""
    result = plan(FEW_ROWS, 8, "v5p", Assumptions(tokens=10**12))
    assert 0 <= result.tokens - 10**12 < result.tokens_per_step
    assert result.costs.step_s == pytest.approx(result.costs.seconds * result.tokens_per_step / result.tokens)


def test_a_budget_buys_the_tokens_that_cost_it():
    """The tokens that a plan says a budget buys make a run that costs the budget."""
    budget = plan(FEW_ROWS, 8, "v5p", Assumptions(budget_usd=1e6)).costs.budget
    again = plan(FEW_ROWS, 8, "v5p", Assumptions(tokens=round(budget.tokens)))
    assert again.costs.bill.usd == pytest.approx(1e6, rel=1e-3)
    assert 6 * 20 * budget.optimal_params**2 == pytest.approx(budget.flops)


@pytest.mark.parametrize(
    "seconds, words", [(1.5, "1.5 s"), (300.0, "5.0 minutes"), (7200.0, "2.0 hours"), (1e6, "11.6 days")]
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_units():
    assert (si(999.0), si(1234.0), si(4.56e12), gib(2**20), gib(3 * 2**30)) == (
        "999",
        "1.234 k",
        "4.560 T",
        "1.0 MiB",
        "3.00 GiB",
    )


def test_no_jax_is_imported():
    root = pathlib.Path(params.__file__).parents[2]
    code = "import sys, lmjax.plan.report; assert not {'jax', 'flax', 'optax', 'orbax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_experts_tell_the_parameters_that_a_token_runs_through():
    for moe in (None, MoeConfig()):
        result, console = (
            plan(RunConfig(model=ModelConfig(moe=moe))),
            Console(record=True, width=100, file=io.StringIO()),
        )
        console.print(render(result))
        assert ("that a token runs through" in console.export_text()) == (result.params_active < result.params)
        assert (result.params_active < result.params) == (moe is not None)
        assert to_dict(result)["params"]["active"] == result.params_active
