r"""Scores that say how good a text is: perplexity under an n-gram model of good text, readability, and a classifier good against raw.

Score once, choose thresholds later: every score goes to `meta`, nothing is dropped unless a threshold is set, and the report
shows how the scores are spread.

    perplexity    2^(bits / words) by `ngram_model`, trained on the text that the user calls good (CCNet: Wenzek et al. 2020)
    quality       P(good) by logistic regression over hashed words and pairs of words (as for GPT-3: Brown et al. 2020)
    readability   Flesch reading ease and Flesch-Kincaid grade (Kincaid et al. 1975), for English
"""

import dataclasses
import functools
import heapq
import io
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from lmjax.config import need
from lmjax.data import ngram_model
from lmjax.data.document import Document, draw, to_bytes
from lmjax.data.hashing import GOLDEN
from lmjax.data.inputs import find_files
from lmjax.data.ngram_model import NgramModel
from lmjax.data.read import read_documents
from lmjax.data.stage import Apply, Drop, MapStage, Tally
from lmjax.data.written import read_written
from lmjax.errors import UserError
from lmjax.files import read_json, write_atomic, write_json

MODEL, CLASSIFIER, FACTS = "ngram_model.npz", "classifier.npy", "fit.json"
RAW_SHARDS = 32  # spread over the corpus, from which the raw documents are drawn
PIECE_WORDS = 512  # of a text that the classifier judges: long and short ones then look alike
MIN_PIECES = 20  # of each class, below which nothing can be learned
HELD_OUT = 0.1
BUCKET_BITS = 18
BUCKETS = 1 << BUCKET_BITS  # weights of the classifier
MIX = np.uint64(GOLDEN)
EPOCHS, BATCH, RATE, DECAY = 8, 32, 0.3, 1e-6  # of AdaGrad
MAX_BITS = 64.0  # a word; 2^64 is a number that JSON holds
ENGLISH = ("en", "eng", "english")  # readability is for it alone; where `meta.language` is not set, the letters decide


@dataclasses.dataclass(frozen=True)
class Quality(MapStage):
    """Annotates `meta` with `perplexity`, `quality` and `readability`; drops by them where a threshold is set."""

    name: ClassVar[str] = "quality"
    fits: ClassVar[bool] = True

    good: tuple[str, ...] = ()  # files and folders of text that is called good; none: only readability is scored
    max_perplexity: float | None = None  # a word; good text of another author has 100 to 1,000
    min_quality: float | None = None  # P(good), 0 to 1, at equal shares of good and raw
    min_ease: float | None = None  # Flesch: 100 is easy, 30 a scientific paper, below 0 are lists and names
    max_grade: float | None = None  # Flesch-Kincaid: years of school
    vocabulary: int = 1 << 16  # words of the n-gram model
    max_ngrams: int = 1 << 21  # pairs, and triples, of the n-gram model; 24 to 48 bytes each in every worker
    train_bytes: int = 64_000_000  # of good text, and of raw; the fit takes about 25 times this in memory
    seed: int = 0  # of the drawn documents and of the classifier's order

    def __post_init__(self) -> None:
        for field in ("max_perplexity", "min_quality"):
            need(bool(self.good) or getattr(self, field) is None, f"quality.{field} needs good text: set quality.good")
        need(self.max_perplexity is None or self.max_perplexity > 1, "quality.max_perplexity must be above 1")
        need(self.min_quality is None or 0 <= self.min_quality <= 1, "quality.min_quality must be 0 to 1")
        most = ngram_model.MAX_VOCABULARY - ngram_model.SPECIAL
        need(0 < self.vocabulary <= most, f"quality.vocabulary must be 1 to {most:,}")
        need(self.max_ngrams > 0, "quality.max_ngrams must be above 0")
        need(self.train_bytes > 0, "quality.train_bytes must be above 0")

    def files(self) -> Sequence[str]:
        """The good text."""
        if self.good:
            find_files(self.good)  # says what is missing
        return self.good

    def fit(self, shards: Sequence[Path], folder: Path) -> None:
        """Trains both models and writes them, with what is known of them, to the folder."""
        if not self.good:
            return
        good = sample(read_documents(self.good, "good"), self.train_bytes, self.seed)
        raw = sample(read_shards(shards), self.train_bytes, self.seed)
        model = ngram_model.train((document.text for document in good), self.vocabulary, self.max_ngrams)
        need(bool(model.vocabulary), f"quality.good={self.good} holds no word twice: it is no text to learn from")
        model.save(folder / MODEL)
        weights, facts = fit_classifier(pieces(good), pieces(raw), self.seed)
        buffer = io.BytesIO()
        np.save(buffer, weights)
        write_atomic(folder / CLASSIFIER, buffer.getvalue())
        write_json(
            folder / FACTS,
            {
                "model": {"words": len(model.vocabulary), "pairs": model.ngrams()[0], "triples": model.ngrams()[1]},
                "documents": {"good": len(good), "raw": len(raw)},
                "classifier": facts,
            },
        )  # fmt: skip

    def open(self, folder: Path) -> Apply:
        """Loads the models."""
        if not self.good:
            return functools.partial(self.judge, Lexicon({}), None, None)
        return functools.partial(self.judge, *load(folder, (folder / MODEL).stat().st_mtime_ns))

    def judge(
        self, lexicon: "Lexicon", model: NgramModel | None, weights: np.ndarray | None, document: Document, tally: Tally
    ) -> Document | Drop:
        """Scores one document, then asks the thresholds."""
        words = ngram_model.normalize(document.text)
        known, scores = lexicon.of(words), {}
        if model is not None and weights is not None:
            bits = model.bits(words, known & ID) / len(words) if words else MAX_BITS
            tally.add("bits_per_word", f"{min(bits, MAX_BITS):04.1f}")
            scores["perplexity"] = round(2 ** min(bits, MAX_BITS), 2)
            scores["quality"] = round(probability(weights, features(known)), 4)
            tally.add("quality", f"{scores['quality']:.2f}")
        english = (document.meta.get("language") or "en") in ENGLISH
        if english and (found := readability(document.text, known)) is not None:
            scores["readability"] = found
            tally.add("reading_ease", str(max(min(5 * round(found["ease"] / 5), 125), -100)))
        return self.threshold(scores) or dataclasses.replace(document, meta=document.meta | scores)

    def threshold(self, scores: dict[str, Any]) -> Drop | None:
        """The first score that misses its threshold."""
        read = scores.get("readability") or {}
        misses = (
            ("perplexity", scores.get("perplexity"), self.max_perplexity, 1),
            ("quality", scores.get("quality"), self.min_quality, -1),
            ("readability", read.get("ease"), self.min_ease, -1),
            ("readability", read.get("grade"), self.max_grade, 1),
        )
        for reason, score, limit, sign in misses:
            if score is not None and limit is not None and sign * score > sign * limit:
                return Drop(reason, score)
        return None

    def finish(self, tally: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
        """How the models did on held-out text, and how the scores are spread: what a threshold would keep."""
        facts = read_json(folder / FACTS) if self.good else {}
        histograms = {
            kind: ordered(tally[kind]) for kind in ("bits_per_word", "quality", "reading_ease") if tally.get(kind)
        }
        shares = {kind: quantiles(table) for kind, table in histograms.items()}
        if "bits_per_word" in shares:
            shares["perplexity"] = {share: round(2**bits, 1) for share, bits in shares.pop("bits_per_word").items()}
        return facts | {"histograms": histograms, "quantiles": shares}


@functools.lru_cache(1)
def load(folder: Path, written_ns: int) -> tuple["Lexicon", NgramModel, np.ndarray]:
    """The models, once in a process, not once a shard; `written_ns` tells a new fit from an old one."""
    model = NgramModel.load(folder / MODEL)
    return Lexicon(model.ids), model, np.load(folder / CLASSIFIER)


def ordered(table: dict[str, int]) -> dict[str, int]:
    """A histogram in the order of its numbers."""
    return {key: table[key] for key in sorted(table, key=float)}


def quantiles(table: dict[str, int]) -> dict[str, float]:
    """The score below which a share of the documents lies, to a bucket's width."""
    numbers, counts = zip(*((float(key), count) for key, count in ordered(table).items()))
    summed = np.cumsum(counts)
    shares = (1, 5, 10, 25, 50, 75, 90, 95, 99)
    return {f"{share}%": numbers[int((summed < share / 100 * summed[-1]).sum())] for share in shares}


# ------------------------------------------------------------------------------------------------------------------- words

ID = (1 << 20) - 1  # where an entry keeps what
HASH_AT, HASH = 20, (1 << 32) - 1
SYLLABLES_AT, SYLLABLES = 52, 63
ASCII = 1 << 58
MAX_ENTRIES = 1 << 19


class Lexicon(dict):
    """All that the three scores want to know of a word, in one integer, found once: id, hash, syllables (0: not spoken), letters."""

    def __init__(self, ids: Mapping[str, int]):
        self.ids = ids

    def of(self, words: Sequence[str]) -> Int[np.ndarray, " words"]:
        """The entries of words in lower case."""
        if len(self) > MAX_ENTRIES:
            self.clear()
        return np.array([self[word] for word in words], np.int64)

    def __missing__(self, word: str) -> int:
        spoken = word[0].isalpha() and len(word) <= LONGEST_WORD
        entry = self.ids.get(word, ngram_model.UNKNOWN) | zlib.crc32(to_bytes(word)) << HASH_AT
        if spoken:
            entry |= count_syllables(word) << SYLLABLES_AT | ASCII * word.isascii()
        return self.setdefault(word, entry)


# ----------------------------------------------------------------------------------------------------------- what is learned


def read_shards(shards: Sequence[Path]) -> Iterator[Document]:
    """The documents of at most RAW_SHARDS shards, evenly spread."""
    step = max(1, math.ceil(len(shards) / RAW_SHARDS))
    return (document for path in shards[::step] for document in read_written(path))


def sample(documents: Iterable[Document], enough_bytes: int, seed: int) -> list[Document]:
    """The documents with the smallest draws by id, in their order, as few as make `enough_bytes`: whatever order they come in."""
    heap: list[tuple[float, str, int, Document]] = []  # the largest draw on top
    size = 0
    for number, document in enumerate(documents):
        heapq.heappush(heap, (-draw(document.id, "quality", seed), document.id, number, document))
        size += len(to_bytes(document.text))
        while size - (top := len(to_bytes(heap[0][3].text))) >= enough_bytes:
            heapq.heappop(heap)
            size -= top
    return [document for *_, document in sorted(heap, key=lambda item: (-item[0], item[1], item[2]))]


@dataclasses.dataclass(frozen=True)
class Piece:
    """What the classifier learns from."""

    document: str  # its id
    number: int  # within the document
    features: np.ndarray  # int32: buckets of words and pairs


def pieces(documents: Iterable[Document]) -> list[Piece]:
    """Texts cut into PIECE_WORDS words; a rest under an eighth of that is left out unless it is all there is."""
    found, lexicon = [], Lexicon({})
    for document in documents:
        known = lexicon.of(ngram_model.normalize(document.text))
        for start in range(0, len(known), PIECE_WORDS):
            if start == 0 or len(known) - start >= PIECE_WORDS // 8:
                found.append(Piece(document.id, start, features(known[start : start + PIECE_WORDS])))
    return found


def features(known: Int[np.ndarray, " words"]) -> Int[np.ndarray, " features"]:
    """Buckets of the words and of the pairs of neighbours."""
    hashes = (known >> HASH_AT & HASH).astype(np.uint64)
    pairs = (hashes[:-1] * np.uint64(0x9E3779B1) + hashes[1:]) * MIX  # modulo 2^64
    return (np.concatenate([hashes * MIX, pairs]) >> np.uint64(64 - BUCKET_BITS)).astype(np.int32)


def probability(weights: Float[np.ndarray, " buckets_plus_1"], row: Int[np.ndarray, " features"]) -> float:
    """P(good) of a text; the last weight is the bias."""
    return 1 / (1 + math.exp(-max(min(logit(weights, row), 500), -500)))


def logit(weights: Float[np.ndarray, " buckets_plus_1"], row: Int[np.ndarray, " features"]) -> float:
    """Above 0: good. A mean, so that it does not grow with the text."""
    return float(weights[-1]) + (float(weights[row].mean(dtype=np.float64)) if len(row) else 0.0)


def fit_classifier(
    good: list[Piece], raw: list[Piece], seed: int
) -> tuple[Float[np.ndarray, " buckets_plus_1"], dict[str, Any]]:
    """Logistic regression by AdaGrad, both classes of the same weight, and how it does on documents it has not seen.

    Raises:
      UserError: a class is too small to learn from.
    """
    for name, found in (("good text", good), ("raw text", raw)):
        if len(found) < MIN_PIECES:
            raise UserError(
                f"quality: {len(found)} pieces of {PIECE_WORDS} words of {name} are too few to learn from: at least {MIN_PIECES}"
            )
    train_good, test_good = hold_out(good, seed)
    train_raw, test_raw = hold_out(raw, seed)
    rows = [piece.features for piece in train_good + train_raw]
    labels = np.repeat([1.0, 0.0], [len(train_good), len(train_raw)])
    importance = np.where(labels == 1, 0.5 / labels.mean(), 0.5 / (1 - labels.mean()))
    weights = np.zeros(BUCKETS + 1, np.float64)
    squares = np.full(BUCKETS + 1, 1e-8)
    order = np.random.Generator(np.random.PCG64(seed))
    for _ in range(EPOCHS):
        for batch in np.array_split(order.permutation(len(rows)), math.ceil(len(rows) / BATCH)):
            adagrad(weights, squares, [rows[i] for i in batch], labels[batch], importance[batch])
    weights = weights.astype(np.float32)
    scores = [np.array([logit(weights, piece.features) for piece in part]) for part in (test_good, test_raw)]
    facts = {
        "pieces": {"good": len(good), "raw": len(raw), "held_out_good": len(test_good), "held_out_raw": len(test_raw)},
        "held_out_accuracy": round(float((scores[0] > 0).mean() + (scores[1] <= 0).mean()) / 2, 4),  # at equal shares
        "held_out_auc": round(auc(*scores), 4),
    }
    return weights, facts


def hold_out(found: list[Piece], seed: int) -> tuple[list[Piece], list[Piece]]:
    """A tenth of the documents (where there are few: of the pieces) is kept from the training."""
    few = len({piece.document for piece in found}) < MIN_PIECES
    names = [f"{piece.document}/{piece.number}" if few else piece.document for piece in found]
    drawn = sorted(set(names), key=lambda name: draw(name, "quality/held_out", seed))
    held = set(drawn[: math.ceil(HELD_OUT * len(drawn))])
    parts: tuple[list[Piece], list[Piece]] = ([], [])
    for name, piece in zip(names, found):
        parts[name in held].append(piece)
    return parts


def adagrad(
    weights: np.ndarray, squares: np.ndarray, rows: list[np.ndarray], labels: np.ndarray, importance: np.ndarray
) -> None:
    """One step, in place, over the buckets that the rows touch."""
    sizes = np.array([len(row) for row in rows])
    touched, where = np.unique(np.concatenate(rows), return_inverse=True)
    owner = np.repeat(np.arange(len(rows)), sizes)
    means = np.bincount(owner, weights[touched][where], len(rows)) / sizes
    error = (1 / (1 + np.exp(-(means + weights[-1]))) - labels) * importance / len(rows)
    touched = np.append(touched, BUCKETS)
    gradient = np.append(np.bincount(where, (error / sizes)[owner]), error.sum()) + DECAY * weights[touched]
    squares[touched] += gradient**2
    weights[touched] -= RATE * gradient / np.sqrt(squares[touched])


def auc(good: Float[np.ndarray, " g"], raw: Float[np.ndarray, " r"]) -> float:
    """How often a good piece scores above a raw one; equal scores count half."""
    raw = np.sort(raw)
    return float((np.searchsorted(raw, good, "left") + np.searchsorted(raw, good, "right")).mean() / (2 * len(raw)))


# -------------------------------------------------------------------------------------------------------------- readability

SENTENCE_END = re.compile(r"""[.!?]["'”’)\]]{0,3}(?=\s|$)|[^\s.!?"'”’)\]](?=\n\n)""")  # a paragraph ends one, too
VOWELS = re.compile(r"[aeiouyàáâãäåèéêëìíîïòóôõöùúûü]+")  # a run is a syllable …
SILENT = re.compile(  # … but for these
    r"[^aeiouyl]e$|[aeiouywrl]le$|[^aeiouytd]ed$|[aeiouy][^aeiouy]?[^aeiouytdlscxzg]es$|[aeiou][tdkpbvnmrl]es$"
    r"|[^aeiouy]e(?:ly|ment|ments|less|ful|ness)$|^(?:some|every)(?=.)"
)
SPOKEN = re.compile(  # … and these runs are two
    r"ia(?!l$|n$|ns$|ll?y$|ge|m)|[^tscgx]ia[nl]|[^tscglnh]io|[^tcgx]iou|iu|[aeiouy]ing|sm$|[^q]ua[lt]|eo(?!p|u|rge)"
    r"|[^tch]ie[nt](?!d)|ier$|[aeou]y[aeiou](?![ds]?$)|[aeiouy][^aeiouy]eas?$|creat|ired?$|^mc|^sci"
)
LONGEST_WORD = 40  # characters; longer ones are no words of English


def count_syllables(word: str) -> int:
    """Syllables of an English word in lower case, by rule: right for 98 % of running words."""
    return max(1, len(VOWELS.findall(word)) - len(SILENT.findall(word)) + len(SPOKEN.findall(word)))


def readability(text: str, known: Int[np.ndarray, " words"]) -> dict[str, float] | None:
    """Flesch reading ease and Flesch-Kincaid grade of a text and its words; None where most are not of English letters."""
    counts = known >> SYLLABLES_AT & SYLLABLES
    spoken = int((counts > 0).sum())
    if not spoken or 2 * int((known & ASCII > 0).sum()) < spoken:
        return None
    syllables, length = int(counts.sum()) / spoken, spoken / max(1, len(SENTENCE_END.findall(text)))
    ease, grade = 206.835 - 1.015 * length - 84.6 * syllables, 0.39 * length + 11.8 * syllables - 15.59
    return {"ease": round(ease, 1), "grade": round(grade, 1)}
