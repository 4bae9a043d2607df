"""Spherical k-means on a sample of a corpus's vectors, once the part that all of them share is taken out.

    v' = (v − m − Σ_c ⟨v − m, d_c⟩ d_c) / |…|      m the mean, d_c the directions in which vectors differ most from it

What is left says what a text is about (Mu and Viswanath, 2018, 1702.01417); similar vectors meet in one cluster.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int

from lmjax.data.embedding import normalised
from lmjax.data.vectors import read_table, vectors_of

BATCH = 256  # vectors that are assigned at a time
ROUNDS = 10  # of k-means


def sample(paths: Sequence[Path], rows: Sequence[int], size: int, seed: int) -> Float32[np.ndarray, "S D"]:
    """One vector of each of `size` equal stretches of the corpus, or all."""
    total = sum(rows)
    places = np.arange(total)
    if total > size:
        places = np.floor((np.arange(size) + np.random.default_rng(seed).random(size)) * total / size).astype(np.int64)
    parts, start = [], 0
    for path, count in zip(paths, rows, strict=True):
        inside = places[np.searchsorted(places, start) : np.searchsorted(places, start + count)] - start
        parts.append(normalised(vectors_of(read_table(path))[inside].astype(np.float32)))
        start += count
    return np.concatenate(parts) if parts else np.zeros((0, 1), np.float32)


def shared_part(vectors: Float32[np.ndarray, "S D"], common: int) -> Float32[np.ndarray, "C D"]:
    """The mean, and the directions in which vectors differ most from it: topic-free, they drown the rest."""
    if not common or not len(vectors):
        return np.zeros((0, vectors.shape[1]), np.float32)
    mean = vectors.mean(axis=0)
    off = vectors - mean
    directions = np.linalg.eigh(off.T @ off)[1][:, ::-1][:, :common]
    return np.concatenate([mean[None], directions.T])


def without(vectors: Float32[np.ndarray, "N D"], shared: Float32[np.ndarray, "C D"]) -> Float32[np.ndarray, "N D"]:
    """The rest of vectors, of length 1."""
    if not len(shared):
        return vectors
    off, directions = vectors - shared[0], shared[1:]
    return normalised(off - (off @ directions.T) @ directions)


def k_means(vectors: Float32[np.ndarray, "S D"], count: int, seed: int) -> Float32[np.ndarray, "K D"]:
    """Centroids of length 1; one that loses all its members stays where it was."""
    if not len(vectors):
        return np.zeros((1, vectors.shape[1]), np.float32)
    centroids = vectors[np.sort(np.random.default_rng(seed).permutation(len(vectors))[:count])]
    for _ in range(ROUNDS):
        labels = nearest(vectors, centroids)
        order = np.argsort(labels, kind="stable")
        members, starts = np.unique(labels[order], return_index=True)
        moved = centroids.copy()
        moved[members] = normalised(np.add.reduceat(vectors[order], starts, axis=0))
        if np.array_equal(moved, centroids):
            break
        centroids = moved
    return centroids


def nearest(vectors: Float32[np.ndarray, "N D"], centroids: Float32[np.ndarray, "K D"]) -> Int[np.ndarray, " N"]:
    """The centroid of the largest cosine; the first of several."""
    labels = np.zeros(len(vectors), np.int64)
    for start in range(0, len(vectors), BATCH):
        labels[start : start + BATCH] = np.argmax(vectors[start : start + BATCH] @ centroids.T, axis=1)
    return labels
