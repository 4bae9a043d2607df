"""One real document on its whole way, by the commands that a user types: at each place its id, text and tokens are the same."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from lmjax import cli, run
from lmjax.data.source import open_source
from lmjax.data.written import read_written
from lmjax.monitor.write import read_metrics
from lmjax.tokenizers.build import load

SCRIPTS = Path(__file__).parent.parent / "scripts"
STEPS, ROWS, T = 12, 8, 64
SECRET = " Write to jane.doe@mail.example-corp.com for more."
CONFIG = f"""
from ml_collections import ConfigDict

def get_config():
    return ConfigDict(dict(
        model=dict(vocab_size=600, num_layers=1, d_model=16, num_heads=2, max_length={T}),
        data=dict(seq_len={T}), train=dict(steps={STEPS}, batch_size={ROWS}, precision="float32"),
        optim=dict(warmup_steps=0), eval=dict(every=100, rows=8), monitor=dict(log_every=1, tensorboard=False, peak_flops=1e12),
    ))
"""
PREPARE = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict(dict(stages=("clean", "exact_dedup", "pii")))
"""


def typed(capsys, *words) -> str:
    """What a command prints."""
    assert cli.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


@pytest.fixture
def batches(monkeypatch):
    """The batches that the run's program was called with, by step."""
    seen, build = [], run.steps.build_step

    def watched(*arguments):
        program = build(*arguments)

        def step(state, batch):
            assert int(state.step) == len(seen)
            seen.append(batch.__class__(*(None if array is None else np.asarray(array) for array in batch)))
            return program(state, batch)

        return step

    monkeypatch.setattr(run.steps, "build_step", watched)
    return seen


@pytest.mark.slow
def test_a_document_from_its_file_to_the_rows_that_a_step_reads(tmp_path, capsys, batches, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from real_documents import package_documents

    chosen = (document for document in package_documents() if 300 < len(document.text) < 900)
    given = {f"doc {i}": document.text for i, document in enumerate(itertools.islice(chosen, 12))}
    given["doc 3"] += SECRET
    given["copy"] = given["doc 4"]
    lines = [
        json.dumps({"id": name, "text": text, "url": f"https://example.org/{name}"}) for name, text in given.items()
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "prepare.py").write_text(PREPARE)
    (tmp_path / "run.py").write_text(CONFIG)
    prepared, documents, tokenizer, shards, workdir = (
        tmp_path / name for name in ("prepared", "documents", "tokenizer", "shards", "run")
    )

    # prepare: what --explain says of a document is what the folder holds
    words = ["--documents", tmp_path / "in.jsonl", "--source", "web", "--out", prepared]
    typed(capsys, "prepare", "--config", tmp_path / "prepare.py", *words)
    kept = {document.id: document for document in read_written(prepared / "web.jsonl.zst")}
    assert kept.keys() == given.keys() - {"copy"}
    assert 'dropped in exact_dedup because exact_duplicate: {"survivor": "doc 4"' in typed(
        capsys, "prepare", "--out", prepared, "--explain", "copy"
    )
    told = typed(capsys, "prepare", "--out", prepared, "--explain", "doc 3")
    text = kept["doc 3"].text
    assert "changed in pii" in told and f"web: kept, {len(text):,} characters" in told
    assert text.endswith(SECRET.replace("jane.doe@mail.example-corp.com", "<EMAIL>"))
    assert kept["doc 3"].meta["url"] == "https://example.org/doc 3" and kept["doc 3"].meta["pii"] == {"email": 1}

    # split, tokenize: the record of each document is its text's tokens, between bos and eos
    typed(capsys, "split", "--documents", prepared, "--out", documents, "--config.validation=0", "--config.test=0")
    assert {document.id: document for document in read_written(documents / "train" / "web.jsonl.zst")} == kept
    typed(capsys, "tokenizer", "--documents", documents, "--out", tokenizer, "--config.vocab_size=400")
    typed(
        capsys,
        "tokenize",
        "--documents",
        documents,
        "--tokenizer",
        tokenizer,
        "--out",
        shards,
        "--config.num_workers=0",
    )
    source, ids = open_source(shards, "train", "web"), load(tokenizer)
    number = {source.document(i)["id"]: i for i in range(source.num_documents)}
    assert number.keys() == kept.keys()
    records = dict(zip(number, source.read(np.array(list(number.values()))), strict=True))
    tokens = {name: record.astype(np.int32) for name, record in records.items()}
    special = [[] if i is None else [i] for i in (source.bos_id, source.eos_id)]
    for name, document in kept.items():
        assert source.document(number[name]) == {"id": name, "source": "web", "meta": document.meta}
        assert tokens[name].tolist() == [*special[0], *ids.encode(document.text).tolist(), *special[1]]
        assert ids.decode(tokens[name][len(special[0]) : len(tokens[name]) - len(special[1])]) == document.text

    # train, trace: the rows that the step was called with hold these tokens, and each is trained on unless it is a document's first
    words = [f"--config.tokenizer={tokenizer}", f"--config.data.shards={shards}", "--config.data.eval_split=train"]
    typed(capsys, "train", "--config", tmp_path / "run.py", "--workdir", workdir, *words)
    assert len(batches) == STEPS
    target_tokens = {row["step"]: row["train/target_tokens"] for row in read_metrics(workdir) if "train/loss" in row}
    read = {name: np.zeros(len(record), int) for name, record in tokens.items()}
    for step, batch in enumerate(batches):
        rows = [
            json.loads(row)
            for row in typed(capsys, "trace", "--workdir", workdir, "--step", step, "--json").splitlines()
        ]
        assert [row["row"] for row in rows] == list(range(ROWS))
        for row in rows:
            column = 0
            for segment, piece in enumerate(row["documents"], 1):
                start, stop, record = piece["start_token"], piece["stop_token"], tokens[piece["id"]]
                place = (row["row"], slice(column, column + stop - start))
                after = np.append(record[start + 1 : stop + 1], [0] * (stop == len(record)))
                trained = np.arange(start + 1, stop + 1) < len(record)
                np.testing.assert_array_equal(batch.tokens[place], record[start:stop])
                np.testing.assert_array_equal(batch.targets[place], after)
                np.testing.assert_array_equal(batch.loss_weights[place], trained.astype(np.float32))
                np.testing.assert_array_equal(batch.segment_ids[place], segment)
                np.testing.assert_array_equal(batch.positions[place], np.arange(stop - start))
                assert piece["meta"] == kept[piece["id"]].meta
                read[piece["id"]][start:stop] += row["epoch"] == 0
                column += stop - start
            assert column == T
        assert batch.loss_weights.sum() == target_tokens[step + 1]
    assert all(
        counts.max() == 1 for counts in read.values()
    )  # an epoch reads a token once, and leaves out less than a row
    assert sum(counts.sum() for counts in read.values()) > source.num_tokens - T
