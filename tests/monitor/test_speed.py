"""Speed against a clock that the test moves; the peak by device."""

import dataclasses

import jax
import pytest

from lmjax.monitor import speed as speed_module
from lmjax.monitor.speed import Peak, Speed, measure_matmul_flops, peak_flops
from lmjax.sharding.config import MeshConfig
from lmjax.sharding.mesh import make_mesh, use


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@dataclasses.dataclass
class Device:
    device_kind: str
    platform: str = "gpu"
    process_index: int = 0


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def speed(clock):
    return Speed(flops_per_token=6e6, peak=Peak(1e9, "test"), clock=clock)


def test_a_window_in_closed_form(speed, clock):
    """4 steps of 100 tokens: 2 s each, of which 0.5 s waiting; and 30 s of evaluation, which is no part of any step."""
    for _ in range(4):
        with speed.waiting():
            clock.now += 0.5
        clock.now += 1.5
        speed.step(100)
    with speed.paused():
        clock.now += 30
    assert speed.read() == {
        "speed/tokens_per_s": 50.0,
        "speed/step_s": 2.0,
        "speed/data_wait_s": 0.5,
        "speed/mfu": 6e6 * 50 / 1e9,
    }


def test_each_window_starts_afresh(speed, clock):
    with speed.waiting():
        clock.now += 7
    speed.step(10)
    speed.read()
    clock.now += 4
    speed.step(10)
    speed.step(10)
    assert speed.read() == {
        "speed/tokens_per_s": 5.0, "speed/step_s": 2.0, "speed/data_wait_s": 0.0, "speed/mfu": 0.03,
    }  # fmt: skip


def test_restart_forgets_the_compiler(speed, clock):
    clock.now += 60
    speed.step(10)
    speed.restart()
    clock.now += 1
    speed.step(10)
    assert speed.read()["speed/step_s"] == 1.0


def test_a_window_without_steps_is_empty_and_divides_nothing(speed, clock):
    assert speed.read() == {}
    clock.now += 1
    assert speed.read() == {}


def test_a_pause_that_raises_is_still_a_pause(speed, clock):
    with pytest.raises(RuntimeError), speed.paused():
        clock.now += 5
        raise RuntimeError
    clock.now += 1
    speed.step(1)
    assert speed.read()["speed/step_s"] == 1.0


def test_peak_is_stated_before_tabled_before_measured():
    devices = [Device("NVIDIA H200")] * 8
    assert peak_flops(devices, "bfloat16").flops == 8 * 989.4e12
    assert peak_flops(devices, "float32").flops == 8 * 494.7e12
    assert "NVIDIA H200" in peak_flops(devices, "bfloat16").source
    assert peak_flops(devices, "bfloat16", stated=1e12) == Peak(8e12, "config.monitor.peak_flops: 8 × 1e+12 FLOP/s")


def test_virtual_cpu_devices_share_one_machine(monkeypatch):
    """Eight of them have the peak of one: the same cores. Two processes are taken for two machines."""
    monkeypatch.setattr(speed_module, "measure_matmul_flops", lambda dtype: 1e11)
    assert len(jax.devices()) == 8
    assert peak_flops(jax.devices(), "float32").flops == 1e11
    assert peak_flops([Device("cpu", "cpu", process) for process in (0, 0, 1, 1)], "float32").flops == 2e11
    assert peak_flops([Device("NVIDIA L4")] * 4, "float32").flops == 4e11
    assert peak_flops(jax.devices(), "float32").source.startswith("measured: 1 × cpu")


def test_measured_peak_is_plausible():
    assert 1e9 < measure_matmul_flops("float32", seconds=0.05) < 1e14


def test_a_peak_is_measured_inside_a_runs_mesh_too():
    with use(make_mesh(MeshConfig())):
        assert peak_flops(jax.devices(), "bfloat16").flops > 1e9
