"""Shape annotations are checked while the tests run (jaxtyping with beartype), on eight virtual CPU devices."""

import dataclasses
import importlib.metadata
import os
import random
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA:CPU blocks a thread for each collective that a virtual device waits in: with fewer threads than those it can hang.
os.environ.setdefault("NPROC", "64")

os.environ.setdefault(
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false"
)  # it asks a service that the buckets' emulator lacks

# Programs here are small and run a few times: compiling them is what a test waits for.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
QUICK = {  # by version of jaxlib
    "0.10": " --xla_cpu_use_fusion_emitters=false",  # older emitters: a third of the time
    "0.12": " --xla_cpu_opt_preset=FAST_COMPILE",
}.get(".".join(importlib.metadata.version("jaxlib").split(".")[:2]), "")
if os.environ.setdefault("XLA_FLAGS", FLAGS) == FLAGS:
    os.environ["XLA_FLAGS"] = FLAGS + QUICK
    os.environ["LMJAX_TESTS_XLA_FLAGS"] = FLAGS + QUICK  # for processes of their own
    import jax

    jax.devices()  # reads them; libtpu does when it is loaded, and ends the process at one that it does not know
    os.environ["XLA_FLAGS"] = FLAGS

install_import_hook("lmjax", "beartype.beartype")

WORDS = ("the", "model", "reads", "a", "row", "of", "tokens", "and", "learns", "to", "say", "what", "comes", "next")


@dataclasses.dataclass(frozen=True)
class Line:
    """Folders of the line up to the shards."""

    tokenizer: Path  # bytes
    shards: tuple[Path, Path]  # of the sources `prose` and `lists`

    def overrides(self) -> list[str]:
        """What a run's config needs to read them."""
        return [f"tokenizer={self.tokenizer}", "data.shards=" + ",".join(map(str, self.shards))]


@pytest.fixture(scope="session")
def line(tmp_path_factory) -> Line:
    """A little text, through split, tokenizer and shards, as a user would bring it."""
    from lmjax.data.config import ShardsConfig, SplitConfig, TokenizerConfig
    from lmjax.data.shards import write_shards
    from lmjax.data.split import split_documents
    from lmjax.tokenizers.train import train_tokenizer

    root, rng = tmp_path_factory.mktemp("line"), random.Random(0)
    line = Line(root / "tokenizer", (root / "prose" / "shards", root / "lists" / "shards"))
    train_tokenizer(None, line.tokenizer, TokenizerConfig(kind="byte"))
    for source, between in (("prose", " "), ("lists", "\n- ")):
        texts = root / source / "texts"
        texts.mkdir(parents=True)
        for number in range(40):
            (texts / f"{number:02}.txt").write_text(between.join(rng.choices(WORDS, k=rng.randint(3, 30))))
        documents = root / source / "documents"
        split_documents([texts], documents, SplitConfig(validation=0.15, test=0.1), source)
        write_shards(documents, line.tokenizer, root / source / "shards", ShardsConfig(num_workers=0))
    return line
