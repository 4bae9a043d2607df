"""Web archives in: every record is kept, failed or left out by kind, and damage costs the record that it hits."""

import gzip
import io
import json
import random
import tracemalloc

import pytest
import zstandard
from fastwarc.warc import WarcRecord, WarcRecordType

from lmjax.data.read import Counts, read_documents
from lmjax.data.web import HEADER_BYTES, Bad, decode_page, split_records
from lmjax.errors import UserError

PAGE = b"<html><body>page %d</body></html>"


def warc(
    number=0, body=None, http=b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8", kind=b"response", **more
):
    """One record, written by hand: http=None for a record that holds none."""
    body = PAGE % number if body is None else body
    block = body if http is None else http + b"\r\n\r\n" + body
    head = {
        b"WARC-Type": kind, b"WARC-Record-ID": b"<urn:uuid:%d>" % number, b"WARC-Date": b"2024-05-06T07:08:09Z",
        b"WARC-Target-URI": b"https://example.org/%d" % number,
        b"Content-Type": b"text/plain" if http is None else b"application/http; msgtype=response",
        b"Content-Length": b"%d" % len(block),
    }  # fmt: skip
    head |= {key.replace("_", "-").encode(): value for key, value in more.items()}
    lines = b"".join(key + b": " + value + b"\r\n" for key, value in head.items() if value is not None)
    return b"WARC/1.0\r\n" + lines + b"\r\n" + block + b"\r\n\r\n"


def read(tmp_path, data, name="a.warc", **options):
    """Documents and counts of a file; the law holds in every test."""
    (tmp_path / name).write_bytes(data)
    aside = []
    counts = Counts(quarantine=lambda where, why, raw: aside.append((where, why, raw)))
    documents = list(read_documents(tmp_path / name, "web", counts, **options))
    assert counts.read == counts.kept + counts.failed and counts.kept == len(documents)
    assert len(aside) == counts.failed
    return documents, counts, aside


def ids(documents):
    return [document.id for document in documents]


# ----------------------------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize(
    "name, pack", [("a.warc", bytes), ("a.warc.gz", gzip.compress), ("a.warc.zst", zstandard.compress)]
)
def test_what_is_a_document_and_what_is_not(tmp_path, name, pack):
    html = b"HTTP/1.1 200 OK\r\nContent-Type: "
    records = [
        warc(0, kind=b"warcinfo", http=None),
        warc(1, kind=b"request", http=b"GET / HTTP/1.1"),
        warc(2),
        warc(3, http=b"HTTP/1.1 404 Not Found\r\nContent-Type: text/html"),
        warc(4, http=b"HTTP/1.1 301 Moved\r\nLocation: /"),
        warc(5, http=html + b"image/png", body=b"\x89PNG\0"),
        warc(6, http=html + b"text/plain; charset=iso-8859-1", body=b"caf\xe9"),
        warc(7, http=html + b"application/xhtml+xml"),
        warc(8, http=html + b"text/css"),
        warc(9, http=html + b"x/y"),
        warc(10, kind=b"metadata", http=None),
        warc(11, kind=b"conversion", http=None, body="Grüße".encode()),
        warc(12, kind=b"response", http=None, Content_Type=b"text/dns"),
        warc(13, kind=b"resource", http=None, Content_Type=b"text/html"),
        warc(14, kind=b"strange", http=None),
        warc(15, http=b"HTTP/1.1 206 Partial Content\r\nContent-Type: text/html"),
    ]
    documents, counts, _ = read(tmp_path, b"".join(map(pack, records)), name)
    assert ids(documents) == ["2", "6", "7", "11", "13"] and (counts.failed, counts.repaired) == (0, 0)
    assert dict(counts.left_out) == {
        "warcinfo": 1, "request": 1, "http_404": 1, "http_301": 1, "http_206": 1, "type_image": 1, "type_text_other": 1,
        "type_unknown": 1, "metadata": 1, "not_http": 1, "unknown": 1,
    }  # fmt: skip
    assert [document.meta["format"] for document in documents] == ["html", "text", "html", "text", "html"]
    assert documents[1].text == "café" and documents[3].text == "Grüße" and documents[0].text == (PAGE % 2).decode()
    assert documents[0].meta == {
        "format": "html", "url": "https://example.org/2", "date": "2024-05-06T07:08:09Z", "content_type": "text/html",
    }  # fmt: skip


def test_a_page_that_the_crawler_cut_says_so(tmp_path):
    documents, _, _ = read(tmp_path, warc(1) + warc(2, WARC_Truncated=b"length"))
    assert [document.meta.get("truncated") for document in documents] == [None, "length"]


def test_an_archive_that_fastwarc_wrote(tmp_path):
    stream = io.BytesIO()
    for number in range(5):
        record = WarcRecord()
        record.init_headers(record_type=WarcRecordType.response, record_urn=b"<urn:uuid:%d>" % number)
        record.is_http = True
        record.set_bytes_content(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + PAGE % number)
        record.write(stream, checksum_data=True)
    documents, _, _ = read(tmp_path, stream.getvalue())
    assert [document.text for document in documents] == [(PAGE % number).decode() for number in range(5)]


def test_a_record_without_an_id_is_known_by_its_place(tmp_path):
    documents, _, _ = read(tmp_path, warc(1) + warc(2, WARC_Record_ID=None))
    assert ids(documents) == ["1", "a.warc#2"]


def test_content_encodings(tmp_path):
    ok, page = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n", b"<p>hello</p>"
    zipped = gzip.compress(page)
    records = [
        warc(1, zipped, ok + b"Content-Encoding: gzip"),
        warc(2, page, ok + b"Content-Encoding: gzip"),  # the crawler decoded it
        warc(3, b"5\r\n<p>he\r\n7\r\nllo</p>\r\n0\r\n\r\n", ok + b"Transfer-Encoding: chunked"),
        warc(4, page, ok + b"Transfer-Encoding: chunked"),
        warc(5, zipped[:-9].replace(zipped[10:14], b"\0\0\xff\0"), ok + b"Content-Encoding: gzip"),
        warc(6, page, ok + b"Content-Encoding: br"),
    ]
    documents, counts, aside = read(tmp_path, b"".join(records))
    assert ids(documents) == ["1", "2", "3", "4", "6"] and {document.text for document in documents} == {page.decode()}
    assert counts.failed == 1 and "payload cannot be read" in aside[0][1] and zipped[-18:-9] in aside[0][2]


# ------------------------------------------------------------------------------------------------------------------ damage

GOOD = [warc(number) for number in range(6)]


def damaged(how):
    """The third record, broken."""
    record = GOOD[2]
    return {
        "garbage before": b"garbage\r\n\r\n more" + b"x" * 200_000 + b"\r\n" + record,
        "length too long": record.replace(b"Content-Length: 9", b"Content-Length: 19"),
        "length far too long": record.replace(b"Content-Length: ", b"Content-Length: 99"),
        "length too short": record.replace(b"Content-Length: 9", b"Content-Length: 8"),
        "no length": record.replace(b"Content-Length", b"Content-Langth"),
        "length no number": record.replace(b"Content-Length: ", b"Content-Length: x"),
        "headers without end": b"WARC/1.0\r\nWARC-Type: response\r\n" + b"X-Long: 1\r\n" * (HEADER_BYTES // 8),
        "cut": record[:-20],
        "no WARC": record.replace(b"WARC/1.0", b"WORC/1.0"),
    }[how]


@pytest.mark.parametrize(
    "how",
    ["garbage before", "length too long", "length far too long", "length too short", "no length", "length no number",
     "headers without end", "cut", "no WARC"],
)  # fmt: skip
@pytest.mark.parametrize("piece", [1, 7, 1 << 16])
def test_damage_costs_one_record(how, piece):
    data = b"".join([*GOOD[:2], damaged(how), *GOOD[3:]])
    if piece == 1 and len(data) > 10_000:
        piece = 1000
    found = list(split_records((data[i : i + piece] for i in range(0, len(data), piece)), 1 << 20))
    bad = [item for item in found if isinstance(item, Bad)]
    good = [item + b"\r\n\r\n" for item in found if not isinstance(item, Bad)]
    assert len(bad) == 1 and bad[0].raw
    assert (bad[0].why == "no WARC record begins here") == (
        how not in ("length too long", "length far too long", "length too short", "cut")
    )
    kept = [0, 1, 2, 3, 4, 5] if how == "garbage before" else [0, 1, 3, 4, 5]
    assert good == [GOOD[number] for number in kept]


@pytest.mark.parametrize("lost", [3, 30, 200, 400])
def test_a_file_that_was_cut_short(tmp_path, lost):
    documents, counts, aside = read(tmp_path, b"".join(GOOD)[:-lost])
    last = 6 if lost < 4 else 5 if lost < len(GOOD[5]) else 4
    assert ids(documents) == [str(number) for number in range(last)] and counts.failed == (last < 6)
    packed = b"".join(map(gzip.compress, GOOD))
    documents, counts, aside = read(tmp_path, packed[: -min(lost, 300)], "a.warc.gz")
    assert counts.failed == 1 and len(documents) >= 4 and "cut short" in aside[0][1]
    assert documents[:4] == list(read_documents(tmp_path / "a.warc", "web"))[:4]


PACK = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_member_costs_its_own_record(tmp_path, seed, suffix):
    rng = random.Random(seed)
    body = [bytes(rng.choices(b"abcdefgh <>\n", k=rng.choice([100, 3000, 200_000]))) for _ in range(8)]
    members = [bytearray(PACK[suffix](warc(number, text))) for number, text in enumerate(body)]
    hit = rng.randrange(8)
    for _ in range(20):
        members[hit][rng.randrange(10, len(members[hit]))] ^= 0xFF
    documents, counts, _ = read(tmp_path, b"".join(members), f"a.warc{suffix}")
    assert ids(documents) == [str(number) for number in range(8) if number != hit] and counts.failed == 1
    assert all(document.text.encode() == body[int(document.id)] for document in documents)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "compressed"])
def test_an_archive_with_a_zstd_dictionary(tmp_path, packed):
    """As IIPC has it: a skippable frame before all others holds the dictionary, which may be compressed itself."""
    samples = [warc(number, b"<p>word %d</p>" % number) for number in range(500)]
    dictionary = zstandard.train_dictionary(8000, samples)
    frames = list(map(zstandard.ZstdCompressor(dict_data=dictionary).compress, samples[:30]))
    content = zstandard.compress(dictionary.as_bytes()) if packed else dictionary.as_bytes()
    opening = b"\x5d\x2a\x4d\x18" + len(content).to_bytes(4, "little") + content
    documents, counts, _ = read(tmp_path, opening + b"".join(frames), "a.warc.zst")
    assert ids(documents) == [str(number) for number in range(30)] and counts.failed == 0
    assert len(frames[0]) < len(zstandard.compress(samples[0])), "the dictionary is in use"
    _, counts, aside = read(tmp_path, opening[:100], "a.warc.zst")
    assert counts.failed == 1 and "cut short" in aside[0][1]
    assert read(tmp_path, b"".join(frames), "a.warc.zst")[1].kept == 0


def test_a_gzip_signature_inside_a_damaged_member_opens_none(tmp_path):
    inner = gzip.compress(b"hello " * 1000)
    member = bytearray(gzip.compress(warc(1, b"<p>x" + inner * 3), 0))
    member[12] ^= 0xFF  # the length of the stored block
    documents, counts, _ = read(tmp_path, gzip.compress(GOOD[0]) + member + gzip.compress(GOOD[2]), "a.warc.gz")
    assert ids(documents) == ["0", "2"] and counts.failed == 1


def test_a_file_that_is_no_archive(tmp_path):
    with pytest.raises(UserError, match=r"is not a .warc.gz file"):
        read(tmp_path, b"hello", "a.warc.gz")
    documents, counts, aside = read(tmp_path, b"hello\n" * 9)
    assert (documents, counts.failed, aside[0][2]) == ([], 1, b"hello\n" * 9)
    assert read(tmp_path, b"")[1].read == 0 and read(tmp_path, b"", "a.wet.gz")[1].failed == 1


def test_random_bytes_never_break_the_law(tmp_path):
    rng = random.Random(0)
    whole = b"".join(GOOD)
    for _ in range(100):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 30)):
            at = rng.randrange(len(data))
            data[at : at + rng.choice([0, 1, 50])] = rng.randbytes(rng.choice([0, 1, 3]))
        _, counts, _ = read(tmp_path, bytes(data))
        assert counts.failed <= 7 and sum(counts.left_out.values()) + counts.read <= 14


# ------------------------------------------------------------------------------------------------------------------- sizes


def peak(function):
    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_large_records_fail_and_are_never_held(tmp_path):
    big, bomb = warc(1, b"a" * 30_000_000), gzip.compress(b"b" * 30_000_000)
    coded = warc(2, bomb, b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: gzip")
    data = gzip.compress(GOOD[0], 1) + gzip.compress(big, 1) + gzip.compress(coded, 1) + gzip.compress(GOOD[3], 1)
    del big
    (documents, counts, aside), memory = peak(lambda: read(tmp_path, data, "a.warc.gz", max_bytes=1_000_000))
    assert ids(documents) == ["0", "3"] and counts.failed == 2
    assert "more than 1000000" in aside[0][1] and "more than 1000000" in aside[1][1]
    assert memory < 20_000_000


def test_memory_does_not_grow_with_the_file(tmp_path):
    def held(number):
        path = tmp_path / f"{number}.warc"
        path.write_bytes(b"".join(warc(i, b"x" * 5000) for i in range(number)))
        return peak(lambda: sum(1 for _ in read_documents(path, "web")))

    (small, first), (large, second) = held(100), held(1000)
    assert (small, large) == (100, 1000) and second < 1.2 * first


def test_a_long_line_fails_alone(tmp_path):
    lines = [b'{"text": "a"}', b'{"text": "' + b"x" * 3_000_000 + b'"}', b'{"text": "b"}']
    documents, counts, aside = read(tmp_path, b"\n".join(lines), "a.jsonl", max_bytes=1_000_000)
    assert [document.text for document in documents] == ["a", "b"] and counts.failed == 1
    assert aside[0][0] == "a.jsonl:2" and "more than 1000000 bytes" in aside[0][1]
    assert aside[0][2].startswith(b'{"text": "xxx')
    for most, kept in ((13, 2), (12, 0)):
        assert read(tmp_path, lines[0] + b"\n" + lines[2], "b.jsonl", max_bytes=most)[1].kept == kept


@pytest.mark.parametrize("name", ["a.txt", "a.html"])
def test_a_large_file_fails(tmp_path, name):
    documents, counts, aside = read(tmp_path, b"x" * 3000, name, max_bytes=1000)
    assert (documents, counts.failed) == ([], 1) and "more than 1000 bytes" in aside[0][1]
    assert read(tmp_path, b"x" * 1000, name, max_bytes=1000)[1].kept == 1


def test_a_zstd_bomb_is_not_held(tmp_path):
    data = zstandard.compress(b"x" * 200_000_000 + b'\n{"text": "b"}')
    (documents, counts, _), memory = peak(lambda: read(tmp_path, data, "a.jsonl.zst", max_bytes=1_000_000))
    assert [document.text for document in documents] == ["b"] and counts.failed == 1
    assert memory < 64_000_000


# -------------------------------------------------------------------------------------------------------------- HTML files


def test_html_files(tmp_path):
    page = '<html><head><meta charset="windows-1251"></head><body>Привет, мир</body></html>'
    (tmp_path / "a.html").write_bytes(page.encode("cp1251"))
    (tmp_path / "b.htm.gz").write_bytes(gzip.compress(page.replace("windows-1251", "utf-8").encode()))
    (tmp_path / "c.html.gz").write_bytes(gzip.compress(page.encode("cp1251"))[:-9])
    counts = Counts()
    documents = list(read_documents(tmp_path, "web", counts))
    assert ids(documents) == ["a.html", "b.htm.gz"] and all("Привет, мир" in document.text for document in documents)
    assert all(document.meta == {"format": "html"} for document in documents)
    assert (counts.read, counts.kept, counts.failed) == (3, 2, 1)


RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. " * 5
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。" * 5
HTML = "<html><head>{}</head><body>{}</body></html>"


@pytest.mark.parametrize(
    "text, codec, label, head",
    [
        (RUSSIAN, "cp1251", "windows-1251", ""),
        (RUSSIAN, "koi8-r", "KOI8-R", ""),
        (RUSSIAN, "cp1251", None, '<meta http-equiv="Content-Type" content="text/html; charset=windows-1251">'),
        (RUSSIAN, "cp1251", None, "<META CHARSET='cp1251'>"),
        (RUSSIAN, "cp1251", None, ""),  # detected
        (RUSSIAN, "cp1251", "utf-8", ""),  # a wrong label
        (RUSSIAN, "utf-16", None, ""),
        (RUSSIAN, "utf-16", "iso-8859-1", ""),  # the mark wins
        (RUSSIAN, "utf-8", None, ""),
        (RUSSIAN, "utf-8", None, '<meta charset="utf-16">'),
        (RUSSIAN, "utf-8", None, " " * 1024 + '<meta charset="windows-1251">'),  # too late to be heard
        (RUSSIAN, "utf-8-sig", "koi8-r", ""),
        (RUSSIAN, "utf-8", "no-such-charset", ""),
        (JAPANESE, "cp932", "Shift_JIS", ""),
        (JAPANESE, "euc-jp", None, '<meta charset="euc-jp">'),
        (JAPANESE, "iso2022_jp", "ISO-2022-JP", ""),
        (JAPANESE, "cp932", None, ""),
        ("①㈱～", "cp932", "shift_jis", ""),  # what browsers read as Shift_JIS
        ("똠방각하", "cp949", "euc-kr", ""),
        ("漢字 𠀀", "gb18030", "gb2312", ""),
        ("naïve – “x”", "cp1252", "ISO-8859-1", ""),
        ("caf\u00e9", "utf-8", None, '<?xml version="1.0" encoding="utf-8"?>'),
        ("\u0e20\u0e32\u0e29\u0e32", "cp874", "windows-874", ""),
    ],
)
def test_charsets(text, codec, label, head):
    page = HTML.format(head, text)
    assert decode_page(page.encode(codec), label) == (page, False)


def test_bad_bytes_are_replaced_and_counted(tmp_path):
    body = RUSSIAN.encode() + b"\xff" + b"<p>end</p>"
    assert decode_page(body, "utf-8") == (RUSSIAN + "\ufffd<p>end</p>", True)
    documents, counts, _ = read(tmp_path, warc(0, body))
    assert counts.repaired == 1 and documents[0].text.endswith("\ufffd<p>end</p>")


@pytest.mark.parametrize("label", ["unicode_escape", "utf-7", "base64", "idna", "\0", "x" * 1000])
def test_labels_that_are_no_charsets_of_the_web(label):
    assert decode_page(b"+ADw-script \\u0041 caf\xc3\xa9", label) == ("+ADw-script \\u0041 café", False)


def test_a_failed_row_of_parquet_is_set_aside(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a", None], "n": [1, 2]}), tmp_path / "b.parquet")
    _, counts, aside = read(tmp_path, (tmp_path / "b.parquet").read_bytes(), "b.parquet")
    assert counts.failed == 1 and json.loads(aside[0][2]) == {"text": None, "n": 2}
