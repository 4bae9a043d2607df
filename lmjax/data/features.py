"""Features of images, sounds or anything else that an encoder made, as `.npz` beside text: an array [P, I] for each document's id.

They stand before the document's text in its row; what is learned is the text.
"""

import dataclasses
import functools
import os
import threading
import zipfile
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from lmjax.config import need
from lmjax.data.source import Source
from lmjax.errors import UserError
from lmjax.files import sha256_file

LOCK = threading.Lock()  # of the open files: the reader's threads share them


@dataclasses.dataclass(frozen=True)
class Features:
    """Reads the features of a source's documents. Pickles without its open file."""

    path: str

    def __getstate__(self) -> dict[str, str]:
        return {"path": self.path}

    @functools.cached_property
    def archive(self) -> np.lib.npyio.NpzFile:
        """The open file; an array is read when it is asked for."""
        try:
            archive = np.load(self.path, allow_pickle=False)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise UserError(f"{self.path} is no .npz of numbers: {error}") from error
        need(isinstance(archive, np.lib.npyio.NpzFile), f"{self.path} is no .npz of numbers: it is one array")
        need(bool(archive.files), f"{self.path} holds no features")
        return archive

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Documents that have features."""
        return frozenset(self.archive.files)

    @functools.cached_property
    def members(self) -> frozenset[str]:
        """Names inside the file."""
        return frozenset(self.archive.zip.namelist())

    @functools.cached_property
    def shape(self) -> tuple[int, int]:
        """(P, I), of all."""
        first = self.load(self.archive.files[0])
        need(first.ndim == 2, f"{self.path}: {self.archive.files[0]!r} has shape {first.shape}, which is not [P, I]")
        return first.shape

    def load(self, name: str) -> np.ndarray:
        """One array as it is stored, in float32."""
        member = f"{name}.npy"  # NumPy takes a name that ends so for the member, which is another document's
        try:
            with LOCK:
                return np.asarray(self.archive[member if member in self.members else name], np.float32)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise UserError(f"{self.path} is no .npz of numbers: {name!r}: {error}") from error

    def read(self, name: str) -> Float[np.ndarray, "P I"]:
        """The features of a document, by its id: of the shape of all, and finite."""
        need(name in self.names, f"{self.path} holds no features of document {name!r}")
        array = self.load(name)
        need(
            array.shape == self.shape,
            f"{self.path}: {name!r} has shape {array.shape}, others {self.shape}; [P, I] it is",
        )
        need(bool(np.isfinite(array).all()), f"{self.path}: {name!r} holds numbers that are not finite")
        return array

    def of(self, source: Source, documents: Sequence[int]) -> Float[np.ndarray, "B P I"]:
        """The features of documents, by their numbers in the source."""
        arrays = [self.read(source.document(number)["id"]) for number in documents]
        return np.stack(arrays) if arrays else np.zeros((0, *self.shape), np.float32)

    def check(self, source: Source) -> None:
        """Every document has some; looks at names alone."""
        for number in range(source.num_documents):
            name = source.document(number)["id"]
            need(name in self.names, f"{self.path} holds no features of document {name!r} of source {source.name!r}")


def open_features(paths: dict[str, str], sources: Sequence[Source]) -> dict[str, Features]:
    """Those of each source; all have some of one shape, or none has."""
    if not paths:
        return {}
    missing = [source.name for source in sources if source.name not in paths]
    need(not missing, f"config.data.features names no file for source {missing}")
    features = {source.name: Features(os.fspath(paths[source.name])) for source in sources}
    shapes = {each.path: each.shape for each in features.values()}
    need(len(set(shapes.values())) == 1, f"config.data.features: their shapes differ: {shapes}")
    return features


def fingerprints(features: dict[str, Features]) -> dict[str, str]:
    """Of their content, by source."""
    return {name: sha256_file(each.path) for name, each in features.items()}


def for_prompts(path: os.PathLike | str, count: int) -> Float[np.ndarray, "B P I"]:
    """The arrays of a file in their order, one for each prompt."""
    features = Features(os.fspath(path))
    names = features.archive.files
    need(len(names) == count, f"{path} holds {len(names)} arrays for {count} prompts")
    return np.stack([features.read(name) for name in names])
