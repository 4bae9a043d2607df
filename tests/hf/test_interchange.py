"""The verbs: import, generate, begin a run from it on a mesh, export; and what they refuse."""

import dataclasses
import json

import numpy as np
import peer
import pytest
from etils import epath
from test_load import imported, logits
from tokenizers import processors

from lmjax.cli import main
from lmjax.data.config import TokenizerConfig
from lmjax.errors import UserError
from lmjax.files import read_json
from lmjax.hf import export
from lmjax.hf.tokenizer import write_tokenizer
from lmjax.monitor.write import read_metrics
from lmjax.tokenizers import build as tokenizers
from lmjax.tokenizers.hf import HfTokenizer
from lmjax.tokenizers.train import train_tokenizer
from lmjax.workdir import check_init_from, open_run


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A Qwen3 over the byte tokenizer's ids, without a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("theirs")
    peer.model("qwen3", vocab_size=262).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def workdir(theirs, line, tmp_path_factory):
    out = tmp_path_factory.mktemp("imported") / "workdir"
    arguments = ["--from", str(theirs), "--out", str(out), "--tokenizer", str(line.tokenizer)]
    assert main(["hf-import", *arguments, "--config.train.precision=float32"]) == 0
    return out


def config_file(path, model):
    """A config of a short run with this model."""
    values = {
        "model": model, "data": {"seq_len": 32}, "optim": {"schedule": "constant", "warmup_steps": 0},
        "train": {"steps": 2, "batch_size": 8, "precision": "float32"}, "eval": {"every": None, "rows": 8},
        "monitor": {"tensorboard": False, "peak_flops": 1e12, "log_every": 1},
    }  # fmt: skip
    text = f"from ml_collections import ConfigDict\n\n\ndef get_config():\n    return ConfigDict({values!r})\n"
    path.write_text(text)
    return path


def test_an_import_evaluates_and_generates(workdir, line, capsys):
    shards = f"--config.data.shards={line.shards[0]}"
    assert main(["eval", "--workdir", str(workdir), "--json", shards]) == 0
    assert json.loads(capsys.readouterr().out)["eval/loss"] > 0
    assert (
        main(["generate", "--workdir", str(workdir), "--prompt", "ab", "--max-tokens", "3", "--temperature", "0"]) == 0
    )
    assert capsys.readouterr().out.startswith("ab")


@pytest.mark.slow
def test_a_run_begins_with_the_parameters_of_an_import_on_a_mesh(theirs, workdir, line, tmp_path):
    model = read_json(workdir / "run.json")["config"]["model"]
    file = config_file(tmp_path / "config.py", model)
    base = [
        "train",
        "--config",
        str(file),
        *(f"--config.{o}" for o in line.overrides()),
        f"--config.init_from={workdir}",
    ]
    still = [
        "--config.optim.learning_rate=1e-30",
        "--config.mesh.data=2",
        "--config.mesh.fsdp=2",
        "--config.mesh.tensor=2",
    ]
    assert main([*base, "--workdir", str(tmp_path / "still"), *still]) == 0
    assert (
        main(["hf-export", "--workdir", str(tmp_path / "still"), "--out", str(tmp_path / "same"), "--dtype=float32"])
        == 0
    )
    run = [*base, "--workdir", str(tmp_path / "run"), "--config.optim.learning_rate=0.01"]
    assert main([*run, "--config.train.stop_at=1"]) == 0
    assert (
        main([*run, "--config.mesh.data=1", "--config.mesh.fsdp=4", "--config.mesh.tensor=2"]) == 0
    )  # goes on, on another mesh
    assert main([*base, "--workdir", str(tmp_path / "whole"), "--config.optim.learning_rate=0.01"]) == 0
    parts, whole = (
        [r["train/loss"] for r in read_metrics(tmp_path / name) if "train/loss" in r] for name in ("run", "whole")
    )
    assert len(parts) == 2 and parts == pytest.approx(whole, abs=1e-5)
    assert main(["hf-export", "--workdir", str(tmp_path / "run"), "--out", str(tmp_path / "moved")]) == 0
    tokens = np.arange(70)[None]
    before, same, moved = (
        peer.logits(peer.load(folder), tokens) for folder in (theirs, tmp_path / "same", tmp_path / "moved")
    )
    np.testing.assert_array_equal(before, same)
    assert np.abs(moved - before).max() > 0.1
    assert main([*base, "--workdir", str(tmp_path / "wrong"), "--config.model.rope_theta=5.0"]) == 2


def test_mistakes_exit_with_2(theirs, workdir, tmp_path, capsys):
    def fails(*arguments):
        assert main([*map(str, arguments)]) == 2
        return capsys.readouterr().err

    out = tmp_path / "out"
    assert "tokenizer.json" in fails("hf-import", "--from", theirs, "--out", out)
    assert "no such file" in fails("hf-import", "--from", tmp_path / "none", "--out", out)
    assert "not empty" in fails("hf-import", "--from", theirs, "--out", workdir, "--tokenizer", workdir / "tokenizer")
    assert "keeps the model" in fails(
        "hf-import",
        "--from",
        theirs,
        "--out",
        out,
        "--tokenizer",
        workdir / "tokenizer",
        "--config.model.rope_theta=3.0",
    )


def test_an_import_is_no_run_to_go_on_with(workdir, line, tmp_path, capsys):
    """Its folder keeps what was imported: a run begins with it elsewhere."""
    file = config_file(tmp_path / "config.py", read_json(workdir / "run.json")["config"]["model"])
    words = ["train", "--config", str(file), *(f"--config.{o}" for o in line.overrides())]
    assert main([*words, "--workdir", str(workdir)]) == 2
    assert (
        f"holds an import; begin a run with it in another --workdir by --config.init_from={workdir}"
        in capsys.readouterr().err
    )


def test_each_difference_to_the_run_to_begin_with_is_named(workdir, tmp_path):
    config, tokenizer = open_run(workdir)
    other = dataclasses.replace(config.model, rope_theta=5.0, qk_norm=False)
    config = dataclasses.replace(config, model=other, init_from=str(workdir))
    with pytest.raises(UserError, match=r"qk_norm=False, not True.*rope_theta=5.0, not 777.0|rope_theta.*qk_norm"):
        check_init_from(config, epath.Path(tmp_path), tokenizer)
    begun = epath.Path(tmp_path) / "checkpoints" / "2"
    begun.mkdir(parents=True)
    check_init_from(dataclasses.replace(config, init_from="/moved/away"), epath.Path(tmp_path), tokenizer)


# --------------------------------------------------------------------------------------------------------------- tokenizers


TEXTS = ["the model reads", "a  b\n\tc", "naïve 🎉", ""]


def exported(tokenizer, tmp_path):
    """The tokenizer as transformers reads it."""
    write_tokenizer(epath.Path(tmp_path), tokenizer, 128)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return peer.transformers.AutoTokenizer.from_pretrained(tmp_path)


def test_bytes_are_the_same_ids_and_bos_comes_once(line, tmp_path):
    own = tokenizers.load(line.tokenizer)
    other = exported(own, tmp_path)
    for text in TEXTS:
        assert other(text).input_ids == [own.bos_id, *own.encode(text).tolist()]
        assert other.decode(own.encode(text)) == text
    assert (other.bos_token_id, other.eos_token_id, other.pad_token_id) == (own.bos_id, own.eos_id, own.pad_id)


def test_a_tokenizer_json_keeps_its_special_tokens(tmp_path):
    """The eos of a chat model is not the first one that has a usual name, and <bos> is what the tokenizer puts first."""
    library = peer.word_tokenizer()
    library.add_special_tokens(["<|im_end|>"])
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    plain = HfTokenizer.read(tmp_path / "tokenizer.json")
    assert (plain.bos_id, plain.eos_id) == (1, 2)
    named = {"bos_token": "<bos>", "eos_token": {"content": "<|im_end|>"}, "pad_token": None, "model_max_length": 9}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    own = HfTokenizer.read(tmp_path / "tokenizer.json")
    assert (own.bos_id, own.eos_id, own.pad_id) == (1, 96, None)
    own.save(epath.Path(tmp_path / "saved"))
    again = tokenizers.load(tmp_path / "saved")
    assert (again.bos_id, again.eos_id, again.pad_id) == (1, 96, None)
    assert again.fingerprint() == own.fingerprint() != plain.fingerprint()
    (tmp_path / "out").mkdir()
    other = exported(again, tmp_path / "out")
    assert other("w5 w6").input_ids == [1, 5, 6] == [again.bos_id, *again.encode("w5 w6").tolist()]
    assert (other.eos_token, other.pad_token) == ("<|im_end|>", None)
    library.post_processor = None
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    assert HfTokenizer.read(tmp_path / "tokenizer.json").bos_id is None


ENDS = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 2)])


@pytest.mark.parametrize("before", [None, ENDS, processors.ByteLevel(), processors.Sequence([ENDS])])
def test_bos_is_put_first_where_a_bare_tokenizer_json_does_not(before, tmp_path):
    """Without a tokenizer_config.json the usual names count, and ours begins each text with <bos>."""
    library = peer.word_tokenizer()
    library.post_processor = before
    own = HfTokenizer(library.to_str())
    ids = library.encode("w5 w6").ids
    assert own.bos_id == 1 and ids[:2] == own.encode("w5 w6").tolist()
    assert exported(own, tmp_path)("w5 w6").input_ids == [1, *ids]
    again = HfTokenizer.read(tmp_path / "tokenizer.json")
    assert (again.bos_id, again.eos_id, again.pad_id) == (own.bos_id, own.eos_id, own.pad_id)


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_a_sentencepiece_model_gives_the_same_ids(algorithm, line, tmp_path):
    documents = line.shards[0].parent / "documents"
    train_tokenizer(documents, tmp_path / "own", TokenizerConfig(vocab_size=304, algorithm=algorithm))
    own = tokenizers.load(tmp_path / "own")
    (tmp_path / "out").mkdir()
    other = exported(own, tmp_path / "out")
    for text in (*TEXTS, " lead"):
        assert other(text).input_ids == [own.bos_id, *own.encode(text).tolist()]
        assert other.decode(own.encode(text)) == text
    assert (other.bos_token_id, other.eos_token_id, other.pad_token_id) == (own.bos_id, own.eos_id, own.pad_id)


def test_rows_that_pad_the_vocabulary_are_left_out(tmp_path):
    theirs = peer.model("llama, llama3 rope, tied", vocab_size=96)
    theirs.save_pretrained(tmp_path / "in")
    model, params = imported(tmp_path / "in")
    tokenizer = HfTokenizer(peer.word_tokenizer(90).to_str())
    export.write_folder(tmp_path / "out", model, params, tokenizer)
    back = peer.load(tmp_path / "out")
    assert back.config.vocab_size == 90 and back.config.eos_token_id == 2
    tokens = np.arange(70)[None]
    np.testing.assert_allclose(peer.logits(back, tokens), logits(model, params, tokens)[..., :90], atol=1e-4)
