"""The order depends on the key and the ids alone, and is uniform."""

import json
import random

import numpy as np
import pytest

from lmjax.data.document import Document
from lmjax.data.shuffle import collect, deal
from lmjax.errors import UserError

IDS = [f"doc-{i}" for i in range(300)]


def order(tmp_path, ids=IDS, key="0", num_buckets=1):
    documents = (Document(id, f"text of {id}\n\ud800", "code", {"n": 1}) for id in ids)
    buckets, count = deal(documents, key, tmp_path, num_buckets)
    lines = [json.loads(line) for line in collect(buckets, "train/code")]
    assert count == len(lines) and not list(tmp_path.iterdir())
    for line in lines:
        assert line == {"id": line["id"], "text": f"text of {line['id']}\n\ud800", "source": "code", "meta": {"n": 1}}
    return [line["id"] for line in lines]


def test_order_depends_on_key_and_ids_alone(tmp_path):
    first = order(tmp_path)
    assert sorted(first) == sorted(IDS) and first != IDS
    assert order(tmp_path, random.Random(0).sample(IDS, len(IDS))) == first
    assert order(tmp_path, key="1") not in (first, IDS)
    assert [id for id in order(tmp_path, [*IDS, "new"]) if id != "new"] == first
    for num_buckets in (2, 3, 64, 10**6):
        assert order(tmp_path, num_buckets=num_buckets) == first


def test_buckets_are_about_equal(tmp_path):
    paths, _ = deal((Document(str(i), "", "code") for i in range(4000)), "0", tmp_path, 8)
    sizes = [len(path.read_bytes().splitlines()) for path in paths]
    assert min(sizes) > 400 and max(sizes) < 600


def test_order_is_uniform(tmp_path):
    """Where the first of four documents lands, over many keys."""
    landed = np.bincount([order(tmp_path, list("abcd"), str(key)).index("a") for key in range(400)])
    assert landed.min() > 60 and landed.max() < 140  # 100 expected, standard deviation 9


def test_two_documents_with_one_id_are_refused(tmp_path):
    why = r"two documents of train/code have the id 'doc-7': id_field=none .* raw files; folders .* want a source name each"
    with pytest.raises(UserError, match=why):
        order(tmp_path, [*IDS, "doc-7"], num_buckets=4)


def test_nothing(tmp_path):
    assert order(tmp_path, []) == []
