"""k-means on planted clusters, the shared part against its definition, and what a sample takes."""

import numpy as np

from lmjax.data.clustering import k_means, nearest, sample, shared_part, without
from lmjax.data.vectors import vector_column, vector_schema, write_table


def test_k_means_finds_clusters_that_stand_apart():
    rng = np.random.default_rng(0)
    middles = np.linalg.qr(rng.normal(size=(8, 8)))[0].astype(np.float32)
    truth = np.repeat(np.arange(4), 50)
    vectors = (middles[truth] + 0.05 * rng.normal(size=(200, 8))).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = min((k_means(vectors, 4, seed) for seed in range(5)), key=lambda c: -(vectors @ c.T).max(axis=1).sum())
    labels = nearest(vectors, found)
    assert {tuple(np.unique(labels[truth == k])) for k in range(4)} == {(0,), (1,), (2,), (3,)}
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert np.array_equal(k_means(vectors, 4, 7), k_means(vectors, 4, 7))


def test_shared_part_is_orthogonal_to_the_rest():
    rng = np.random.default_rng(1)
    vectors = (rng.normal(size=(100, 6)) * [9, 5, 1, 1, 1, 1] + 3).astype(np.float32)
    shared = shared_part(vectors, 2)
    rest = without(vectors, shared)
    assert np.abs(rest @ shared[1:].T).max() < 1e-5 and np.allclose(np.linalg.norm(rest, axis=1), 1, atol=1e-5)
    assert np.abs(shared[1:, :2]).min(axis=1).max() < 0.3 and without(vectors, shared_part(vectors, 0)) is vectors


def test_a_sample_takes_from_every_stretch(tmp_path):
    import pyarrow as pa

    paths, rows = [tmp_path / f"{i}.arrow" for i in range(3)], [500, 0, 1500]
    start = 0
    for path, count in zip(paths, rows, strict=True):
        places = np.arange(start, start + count)
        vectors = np.stack([np.cos(places / 2000), np.sin(places / 2000)], 1).astype(np.float16)
        columns = [pa.array(places, pa.int32())] + [pa.array([0] * count, kind) for kind in (pa.int64(), pa.float64())]
        columns += [pa.array([b""] * count, pa.binary())] * 2 + [vector_column(vectors)]
        table = pa.Table.from_arrays(columns, schema=vector_schema(2))
        write_table(path, [table], table.schema)
        start += count
    taken = sample(paths, rows, 100, 0)
    angles = np.arctan2(taken[:, 1], taken[:, 0]) * 2000
    assert np.array_equal(np.floor(angles / 20 + 0.02).astype(int) - np.arange(100), np.zeros(100)) or np.all(
        np.abs(angles - (np.arange(100) * 20 + 10)) < 13
    )
    assert len(sample(paths, rows, 5000, 0)) == 2000
