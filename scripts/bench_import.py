"""Section of `bench_model.py`: the import of a random Llama of a billion parameters, its time and its memory.

The files are read from the disk both times: they are dropped from the machine's page cache before. What `lmjax hf-import` holds at most
is the peak of its whole process, Python and its libraries included. It reads and writes the model once: where a disk reads
faster than it writes, the time of both is what to compare with.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np
from bench_harness import Row, Sampler, peak_bytes
from safetensors import safe_open
from safetensors.numpy import save_file

from lmjax.config import load as load_config
from lmjax.data.config import TokenizerConfig
from lmjax.hf import config_write, names
from lmjax.hf.families import FAMILIES
from lmjax.hf.load import CONFIG, INDEX
from lmjax.model.config import ModelConfig
from lmjax.plan import params
from lmjax.tokenizers.train import train_tokenizer
from lmjax.train.config import RunConfig

BILLION = pathlib.Path(__file__).parents[1] / "configs" / "pretrain" / "llama_1b.py"
QUICK = ModelConfig(vocab_size=8192, num_layers=4, d_model=512, num_heads=8, d_ff=2048)
GIB = 2**30


def write_llama(folder: pathlib.Path, model: ModelConfig) -> list[pathlib.Path]:
    """A checkpoint of random float32 weights, a layer in each file, as transformers names it."""
    kind, config = config_write.write(model)
    (folder / CONFIG).write_text(json.dumps(config))
    rng, sizes, files = np.random.default_rng(0), names.sizes(model), {}
    for tensor in names.tensors(model, FAMILIES[kind].scheme):
        files.setdefault(dict(tensor.at).get("L", -1), []).append(tensor)
    index = {}
    for number, tensors in files.items():
        file = folder / f"model-{number + 1:05}.safetensors"
        arrays = {t.name: 0.02 * rng.standard_normal(t.shape(sizes), np.float32) for t in tensors}
        save_file(arrays, file, metadata={"format": "pt"})
        index |= dict.fromkeys(arrays, file.name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sorted(folder.glob("*.safetensors"))


def forget(paths: list[pathlib.Path]) -> None:
    """Drops files from the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(paths: list[pathlib.Path]) -> float:
    """Seconds to read every tensor, one after another."""
    forget(paths)
    start = time.perf_counter()
    for path in paths:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                file.get_tensor(name)
    return time.perf_counter() - start


def write_as_many(paths: list[pathlib.Path], out: pathlib.Path) -> float:
    """Seconds to write as many bytes as the files hold, until the disk has them."""
    block = os.urandom(2**24)
    start = time.perf_counter()
    with out.open("wb") as file:
        for _ in range(sum(path.stat().st_size for path in paths) // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    out.unlink()
    return seconds


def run(words: list[str]) -> tuple[float, int]:
    """Seconds that `lmjax` takes, and the bytes that it held at most."""
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen([sys.executable, "-m", "lmjax.cli", *words], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, peak_bytes(process.pid))
        time.sleep(0.05)
    if process.returncode:
        raise RuntimeError(f"lmjax {' '.join(words)} ended with {process.returncode}")
    return time.perf_counter() - start, peak


def hf_import(sampler: Sampler, quick: bool) -> list[Row]:
    """Time against that of reading the files, and peak memory against the parameters."""
    model = QUICK if quick else load_config(RunConfig, str(BILLION)).model
    command = "python scripts/bench_model.py --only import" + " --quick" * quick
    root = pathlib.Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR", "/tmp")))
    try:
        (root / "llama").mkdir()
        paths = write_llama(root / "llama", model)
        train_tokenizer(None, root / "tokenizer", TokenizerConfig(kind="byte"))
        words = ["hf-import", "--from", root / "llama", "--out", root / "run", "--tokenizer", root / "tokenizer"]
        reading, writing = read(paths), write_as_many(paths, root / "written")
        forget(paths)
        importing, peak = run([str(word) for word in words])
        stored = sum(path.stat().st_size for path in (root / "run" / "checkpoints").rglob("*") if path.is_file())
    finally:
        shutil.rmtree(root)
    size = 4 * params.total(model)
    return [
        Row(f"Llama of {params.total(model) / 1e6:,.0f}M: reading its files", reading, "s", None, command),
        Row("writing as many bytes until the disk has them", writing, "s", None, command),
        Row("hf-import, the whole command", importing, "s", None, command),
        Row("hf-import / reading", importing / reading, "×", None if quick else "<= 2.0", command),
        Row("hf-import / (reading + writing)", importing / (reading + writing), "×", None, command),
        Row("peak memory beside the parameters", (peak - size) / GIB, "GiB", None if quick else "<= 1.0", command),
        Row("the checkpoint / the parameters", stored / size, "×", None, command),
    ]
