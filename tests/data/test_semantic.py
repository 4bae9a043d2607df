"""One survivor of documents that mean the same, whatever the shards, and no document for a dropped one."""

import json
import random

import numpy as np
import pytest

from lmjax.data import semantic, survivors
from lmjax.data.document import Document
from lmjax.data.engine import LocalEngine
from lmjax.data.semantic import SemanticDedup, cluster_count
from lmjax.data.stage import Counts, Shard
from lmjax.data.survivors import survive
from lmjax.data.written import read_written, write_documents
from lmjax.errors import UserError

WORDS = [f"w{i}" for i in range(400)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A static model whose words stand at right angles: a cosine is that of the counts of words."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    size = len(WORDS) + 1
    tensors = {"embeddings": np.eye(size, dtype=np.int8), "mapping": np.arange(size), "weights": np.ones(size, "f4")}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return str(folder)


def corpus(seed: int = 0, count: int = 120) -> list[Document]:
    """Bags of 40 words; a third are a former one with a few words changed."""
    rng, documents = random.Random(seed), []
    for number in range(count):
        words = rng.choices(WORDS, k=40)
        if documents and rng.random() < 0.33:
            words = rng.choice(documents).text.split()
            for place in rng.sample(range(len(words)), rng.randint(0, 12)):
                words[place] = rng.choice(WORDS)
            rng.shuffle(words)
            words = words[: rng.randint(36, 40)]
        meta = {"quality": rng.random()} if number % 3 else {}
        documents.append(Document(f"d{number:03}\ud800", " ".join(words), "web", meta))
    return documents


def run(stage, documents, folder, sizes) -> tuple[list[Document], dict, dict]:
    """The stage over shards of these sizes: what is kept, id → detail of the dropped, and the report."""
    shards, start = [], 0
    for number, size in enumerate(sizes):
        path = folder / "in" / f"{number}.jsonl.zst"
        write_documents(path, documents[start : start + size])
        shards.append(Shard("web", number, path, size, 0))
        start += size
    assert start == len(documents)
    with LocalEngine() as engine:
        files = stage.decide(shards, folder / "stage", engine)
    kept, lost = [], {}
    for shard in shards:
        counts = Counts(stage.name, lambda loss, _: lost.__setitem__(loss.id, loss.detail))
        kept += stage.process(counts.reading(read_written(shard.path)), counts, files[shard.key])
        counts.close()
    return kept, lost, stage.finish({}, folder / "stage")


def brute(documents: list[Document], threshold: float, rank) -> dict[str, str]:
    """Dropped → survivor, one document after another."""
    vectors = np.array([[d.text.split().count(word) for word in WORDS] for d in documents], float)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    alive, dropped = [], {}
    for place in sorted(range(len(documents)), key=lambda i: (rank(documents[i]), i)):
        near = [other for other in alive if vectors[other] @ vectors[place] > threshold]
        if near:
            dropped[documents[place].id] = documents[near[0]].id
        else:
            alive.append(place)
    return dropped


@pytest.mark.parametrize(
    "keep, rank",
    [
        ("first", lambda document: 0),
        ("longest", lambda document: -len(document.text)),
        ("best", lambda document: -document.meta.get("quality", -np.inf)),
    ],
)
def test_agrees_with_comparing_all_pairs(model, tmp_path, keep, rank):
    """One cluster, so that no pair is parted; the threshold lies between the cosines that occur."""
    documents = corpus()
    stage = SemanticDedup(model=model, common=0, clusters=1, threshold=0.8003, keep=keep)
    kept, lost, report = run(stage, documents, tmp_path, (50, 0, 70))
    expected = brute(documents, 0.8003, rank)
    assert {key: detail["of"] for key, detail in lost.items()} == expected and len(expected) > 15
    assert [document.id for document in kept] == [d.id for d in documents if d.id not in expected]
    assert report["dropped"] == sum(report["cosines"]) == len(expected) and report["embedded"] == 120
    assert all(0.8 < detail["cosine"] <= 1 for detail in lost.values())


def test_the_shards_do_not_matter(model, tmp_path):
    documents = corpus(1)
    stage = SemanticDedup(model=model, common=0, threshold=0.8003, clusters=3)
    results = [
        run(stage, documents, tmp_path / str(i), sizes) for i, sizes in enumerate([(120,), (7, 13, 100), (40, 40, 40)])
    ]
    assert results[0] == results[1] == results[2]


def test_ranges_and_blocks_do_not_matter(model, tmp_path, monkeypatch):
    documents = corpus(2)
    stage = SemanticDedup(model=model, common=0, threshold=0.8003, clusters=5)
    kept, lost, report = run(stage, documents, tmp_path / "a", (60, 60))
    for module, name, value in (
        (semantic, "RANGE_ROWS", 30),
        (semantic, "BATCH", 11),
        (survivors, "BLOCK", 4),
        (survivors, "SURVIVORS", 3),
    ):
        monkeypatch.setattr(module, name, value)
    other_kept, other_lost, other = run(stage, documents, tmp_path / "b", (60, 60))
    assert len(list((tmp_path / "b" / "stage" / "compare").glob("*.arrow"))) > 2
    assert (kept, lost) == (other_kept, other_lost) and len(lost) > 15
    for part in (report, other):
        for pair in part["pairs"]:
            pair["cosine"] = round(pair["cosine"], 5)
    assert report == other


def test_copies_meet_and_short_texts_are_left_alone(model, tmp_path):
    rng = random.Random(3)
    texts = [" ".join(rng.choices(WORDS, k=60)) for _ in range(30)]
    documents = [
        Document(f"{i}", text, "web") for i, text in enumerate([*texts, *texts, "", "", "w1", "w1 w2", "w1 w2"])
    ]
    _, lost, report = run(SemanticDedup(model=model, common=0, clusters=8), documents, tmp_path, (40, 25))
    assert {key: detail["of"] for key, detail in lost.items()} == {f"{i + 30}": f"{i}" for i in range(30)}
    assert (report["documents"], report["embedded"], report["dropped"]) == (65, 60, 30)
    assert report["largest_groups"][0]["dropped"] == 1 and len(report["pairs"]) == 20
    pair = report["pairs"][0]
    assert pair["text"] == pair["of_text"] == texts[int(pair["of"])][:200] and pair["cosine"] == pytest.approx(1)


def test_likeness_does_not_chain(model, tmp_path):
    """a ~ b ~ c but not a ~ c: b goes for a, and c stays, for its only likeness went."""
    texts = [" ".join(WORDS[start : start + 20]) for start in (0, 3, 6)]
    documents = [Document(name, text, "web") for name, text in zip("abc", texts, strict=True)]
    kept, lost, _ = run(SemanticDedup(model=model, common=0, threshold=0.8), documents, tmp_path, (3,))
    assert lost == {"b": {"of": "a", "cosine": 0.85}} and [d.id for d in kept] == ["a", "c"]


def test_nothing_to_do(model, tmp_path):
    documents = [Document("a", "", "web"), Document("b", "\ud800 x", "web")]
    kept, lost, report = run(SemanticDedup(model=model, common=0), documents, tmp_path, (2, 0))
    assert kept == documents and not lost and report["embedded"] == 0


def test_what_all_share_is_no_likeness(model, tmp_path):
    """A long common part makes all alike; without the shared direction the copies alone are."""
    rng = random.Random(4)
    texts = [" ".join(["w0"] * rng.randint(40, 60) + rng.choices(WORDS[1:], k=30)) for _ in range(220)]
    documents = [Document(f"{i}", text, "web") for i, text in enumerate([*texts, *texts[:20]])]
    _, lost, _ = run(SemanticDedup(model=model, common=0, clusters=4), documents, tmp_path / "a", (240,))
    assert len(lost) > 200
    _, lost, _ = run(SemanticDedup(model=model, clusters=4), documents, tmp_path / "b", (240,))
    assert {key: detail["of"] for key, detail in lost.items()} == {f"{i + 220}": f"{i}" for i in range(20)}
    with pytest.raises(UserError, match="is not known from 50"):
        run(SemanticDedup(model=model), documents[:50], tmp_path / "c", (50,))


def test_a_second_run_does_no_task_again(model, tmp_path, monkeypatch):
    documents, stage = corpus(5), SemanticDedup(model=model, common=0)
    first = run(stage, documents, tmp_path, (60, 60))
    monkeypatch.setattr(semantic, "load_encoder", None)
    assert run(stage, documents, tmp_path, (60, 60)) == first


def test_many_of_one_kind_in_linear_memory():
    vectors = np.tile(np.eye(1, 16, dtype=np.float16), (20_000, 1))
    survivor, cosine = survive(vectors, 0.9)
    assert survivor[0] == -1 and np.all(survivor[1:] == 0) and np.allclose(cosine[1:], 1)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(UserError, match=r"min_words=0.*all alike"):
        SemanticDedup(min_words=0)
    with pytest.raises(UserError, match="threshold=1"):
        SemanticDedup(threshold=1.0)
    with pytest.raises(UserError, match=r"holds no config\.json"):
        SemanticDedup(model=str(tmp_path)).files()
    assert [cluster_count(n) for n in (0, 1, 2001, 10**6, 10**8)] == [1, 1, 2, 500, 10_000]


def test_decisions_are_json_lines(model, tmp_path):
    texts = [" ".join(WORDS[:30])] * 3
    run(
        SemanticDedup(model=model, common=0),
        [Document(n, t, "w") for n, t in zip("abc", texts, strict=True)],
        tmp_path,
        (3,),
    )
    lines = (tmp_path / "stage" / "decide" / "web" / "00000.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [[1, {"of": "a", "cosine": 1.0}], [2, {"of": "a", "cosine": 1.0}]]


def test_a_cosine_that_is_the_threshold_is_no_copy():
    survivor, _ = survive(np.array([[1, 0], [0, 1], [1, 0]], np.float16), 0.0)
    assert survivor.tolist() == [-1, -1, 0]
