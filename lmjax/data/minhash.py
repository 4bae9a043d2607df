r"""Sketches of a text: shingles, MinHash signatures and their bands, SimHash prints; and how alike two texts are.

A text is its set of shingles: xxh64 of each run of n words of the simplified text. For shingles S and permutations (a, b),

    signature_k = min over h ∈ S of ((h · a_k + b_k) mod 2^64) mod (2^61 − 1),      P(signature_k equal) = Jaccard(S, T)

(Broder 1997), bit for bit what datatrove computes, whose products wrap at 64 bits before the prime is applied. Texts that agree
in all hashes of one of the bands are candidates: for r hashes a band and b bands, with probability 1 − (1 − J^r)^b.
SimHash (Charikar 2002): bit k of the print says whether more shingles have it set than not; texts are close when few bits differ.
"""

import functools
import itertools
import re
import unicodedata

import numpy as np
import xxhash
from jaxtyping import UInt64

from lmjax.data.document import to_bytes
from lmjax.data.hashing import GOLDEN, mix
from lmjax.data.words import INVISIBLE, UNSPACED, split_words

PRIME = (1 << 61) - 1
BLOCK = 1024  # shingles that meet the permutations at a time: the products stay in the cache
WORDS_BLOCK = 1 << 16  # n-grams whose hashes are Python integers at a time
RARE_SIGNS = frozenset(map(chr, range(128, 160))) | frozenset("«´»–—’“”„…∶━►、。〈〉《》「」【】！％（），．１：；？～")
RARE_POINTS = frozenset("،٫⎖⎗⎘")  # decimal points
NUMBER = re.compile(r"\d+(?:[.,،٫⎖⎗⎘]\d+)?")
ASCII = bytes(range(128))
LOWER_ZEROS = bytes.maketrans(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZ123456789,", b"abcdefghijklmnopqrstuvwxyz000000000."
)  # , is . in a number
PLAIN = b"abcdefghijklmnopqrstuvwxyz0123456789"
SIGNS = bytes(code if code in PLAIN or code > 127 else ord(" ") for code in range(256))
ALONE = re.compile(f"[{UNSPACED}]")  # a word by itself
ANY_SIGNS = dict.fromkeys([code for code in range(128) if SIGNS[code] == ord(" ")] + list(map(ord, RARE_SIGNS)), " ")
FINAL = "Σ"  # whose small letter depends on what follows
FEW = 40  # different characters that are replaced one by one
BIT_BLOCKS_LEFT = 3  # equal blocks that a table of SimHash looks for: some 32 bits


def simplify(text: str) -> bytes:
    """The words of the text that are compared, a blank between two: in lower case, numbers as 0, no signs, no accents."""
    data = to_bytes(text)
    rare = set(data.translate(None, ASCII).decode("utf-8", "surrogatepass"))
    if len(rare) > FEW or any(spell(character) is None for character in rare):
        return simplify_any(text)
    data = single(data.translate(LOWER_ZEROS), b"0").replace(b"0.0", b"0").translate(SIGNS)
    for character in rare:
        data = data.replace(to_bytes(character), spell(character))
    return single(data, b" ").strip(b" ")


def simplify_any(text: str) -> bytes:
    """The same in any script, character by character."""
    text = NUMBER.sub("0", text.lower()).translate(ANY_SIGNS)
    text = unicodedata.normalize("NFD", text)
    marks = [ord(character) for character in set(text) if unicodedata.category(character) == "Mn"]
    return to_bytes(" ".join(split_words(text.translate(dict.fromkeys(marks)))))


def single(data: bytes, byte: bytes) -> bytes:
    """Each run of a byte as one."""
    if byte + byte not in data:
        return data
    codes = np.frombuffer(data, np.uint8)
    is_byte = codes == ord(byte)
    keep = np.ones(len(codes), bool)
    np.logical_and(is_byte[1:], is_byte[:-1], out=keep[1:])
    np.logical_not(keep[1:], out=keep[1:])
    return codes[keep].tobytes()


@functools.cache
def spell(character: str) -> bytes | None:
    """What a character that is not ASCII becomes wherever it stands; none where that depends on its neighbours."""
    if character in FINAL or character in RARE_POINTS or character.isdecimal():
        return None
    if character in RARE_SIGNS:
        return b" "
    spelling = ""
    for part in unicodedata.normalize("NFD", character.lower()):
        category = unicodedata.category(part)
        if part in INVISIBLE or category in ("Mc", "Me"):
            return None
        if part.isalnum() and not ALONE.match(part):
            spelling += part
        elif category != "Mn":
            spelling += " " if part.isspace() else f" {part} "
    return to_bytes(spelling)


def shingle_hashes(text: str, words: int) -> UInt64[np.ndarray, "S"]:
    """The text's set of shingles, sorted; empty for a text of fewer words."""
    joined = simplify(text)
    blanks = np.flatnonzero(np.frombuffer(joined, np.uint8) == ord(" "))
    count = len(blanks) + 2 - words
    if count < 1 or not joined:
        return np.empty(0, np.uint64)
    edges = np.concatenate([[-1], blanks, [len(joined)]])
    hashes = np.empty(count, np.uint64)
    digest = xxhash.xxh64_intdigest
    for first in range(0, count, WORDS_BLOCK):
        last = min(first + WORDS_BLOCK, count)
        cuts = edges[first : last + words].tolist()
        shingles = [digest(joined[start + 1 : end]) for start, end in zip(cuts, cuts[words:], strict=False)]
        hashes[first:last] = np.fromiter(shingles, np.uint64, last - first)
    hashes.sort()
    new = np.empty(count, bool)
    new[0] = True
    np.not_equal(hashes[1:], hashes[:-1], out=new[1:])
    return hashes[new]


class MinHasher:
    """Signatures by one set of permutations."""

    def __init__(self, num_hashes: int, seed: int):
        random = np.random.RandomState(seed)
        self.a = random.randint(1, PRIME, dtype=np.uint64, size=num_hashes)
        self.b = random.randint(0, PRIME, dtype=np.uint64, size=num_hashes)
        # times 8, the low 61 bits of h·a + b stand on top and order the products; plus 64, those that the prime wraps come first
        self.a8 = (self.a << np.uint64(3))[:, None]
        self.b8 = ((self.b << np.uint64(3)) + np.uint64(64))[:, None]
        self.rows = np.arange(num_hashes)
        self.products = np.empty(num_hashes * BLOCK, np.uint64)

    def signature(self, shingles: UInt64[np.ndarray, "S"]) -> UInt64[np.ndarray, "H"]:
        """The signature of a non-empty set of shingles."""
        if not len(shingles):
            raise ValueError("a text without shingles has no signature")
        blocks = [shingles[i : i + BLOCK] for i in range(0, len(shingles), BLOCK)]
        return functools.reduce(np.minimum, map(self.block_minimum, blocks))

    def block_minimum(self, shingles: UInt64[np.ndarray, "S"]) -> UInt64[np.ndarray, "H"]:
        """The signature of at most `BLOCK` shingles.

        x mod (2^61 − 1) is the low 61 bits of x plus its three top bits, so the product with the least low bits is the least,
        unless another comes within 7 of it or a sum reaches the prime: then, once in 10^12 texts, all are computed.
        """
        flat = self.products[: len(self.a) * len(shingles)]
        products = flat.reshape(len(self.a), len(shingles))
        np.multiply(shingles, self.a8, out=products)
        np.add(products, self.b8, out=products)
        least = products.argmin(1)
        places = least + self.rows * len(shingles)
        low = flat[places]
        flat[places] = np.uint64(0xFFFFFFFFFFFFFFFF)
        apart = products.min(1) - low
        if np.minimum(apart, low).min() < 64:
            return exact_minimum(shingles, self.a, self.b)
        return (shingles[least] * self.a + self.b) % np.uint64(PRIME)


def exact_minimum(
    shingles: UInt64[np.ndarray, "S"], a: UInt64[np.ndarray, "H"], b: UInt64[np.ndarray, "H"]
) -> UInt64[np.ndarray, "H"]:
    """The formula as it stands."""
    return ((shingles[:, None] * a + b) % np.uint64(PRIME)).min(0)


def band_hashes(signatures: UInt64[np.ndarray, "N H"], bands: int) -> UInt64[np.ndarray, "N bands"]:
    """One hash for each band of each signature; equal bands of different numbers differ."""
    rows = signatures.reshape(len(signatures), bands, -1)
    hashes = np.broadcast_to(mix(np.arange(1, bands + 1, dtype=np.uint64)), rows.shape[:2]).copy()
    for row in range(rows.shape[2]):
        hashes = mix(hashes * np.uint64(GOLDEN) + rows[:, :, row])
    return hashes


def simhash(shingles: UInt64[np.ndarray, "S"]) -> UInt64[np.ndarray, "1"]:
    """The 64-bit print of a non-empty set of shingles."""
    counts = np.zeros(64, np.int64)
    for first in range(0, len(shingles), WORDS_BLOCK):
        block = shingles[first : first + WORDS_BLOCK].astype(">u8").view(np.uint8).reshape(-1, 8)
        counts += np.unpackbits(block, axis=1).sum(0, dtype=np.int64)
    return np.packbits(2 * counts > len(shingles)).view(">u8").astype(np.uint64)


def print_hashes(prints: UInt64[np.ndarray, "N 1"], bits: int) -> UInt64[np.ndarray, "N tables"]:
    """Hashes of which prints that differ in at most `bits` bits share one.

    Of `bits + 3` blocks of the print at least three are then untouched: one table for each choice of three (pigeonhole; Manku,
    Jain and Sarma 2007).
    """
    blocks = bits + BIT_BLOCKS_LEFT
    edges = [64 * i // blocks for i in range(blocks + 1)]
    masks = [((1 << high) - 1) ^ ((1 << low) - 1) for low, high in itertools.pairwise(edges)]
    chosen = [sum(choice) for choice in itertools.combinations(masks, BIT_BLOCKS_LEFT)]
    table = mix(np.arange(1, len(chosen) + 1, dtype=np.uint64))
    return mix((prints & np.array(chosen, np.uint64)) ^ table)


# ---------------------------------------------------------------------------------------------------------------- alikeness


def jaccard(left: UInt64[np.ndarray, "S"], right: UInt64[np.ndarray, "T"], limit: int) -> float:
    """|S ∩ T| / |S ∪ T| of sorted sets; of those cut to their `limit` least members, over the range that both still show."""
    for one in (left, right):
        if len(one) >= limit:
            left, right = (side[: np.searchsorted(side, one[-1], "right")] for side in (left, right))
    both = np.concatenate([left, right])
    both.sort(kind="stable")  # two sorted runs: merged, not sorted
    common = int(np.count_nonzero(both[1:] == both[:-1]))
    return common / (len(both) - common) if len(both) else 0.0


def agreement(left: UInt64[np.ndarray, "H"], right: UInt64[np.ndarray, "H"]) -> float:
    """The share of equal hashes of two signatures: an estimate of the Jaccard similarity."""
    return float(np.mean(left == right))


def bits_apart(left: UInt64[np.ndarray, "1"], right: UInt64[np.ndarray, "1"]) -> int:
    """In how many bits two prints differ."""
    return int(left[0] ^ right[0]).bit_count()
