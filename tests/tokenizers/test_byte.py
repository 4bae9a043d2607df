"""Byte ids, and bytes back to text."""

import random

from lmjax.tokenizers.byte import ByteTokenizer, decode_bytes


def test_ids_are_bytes_after_the_special_ones():
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == 262
    assert tokenizer.encode("Aé").tolist() == [6 + 0x41, 6 + 0xC3, 6 + 0xA9]
    assert tokenizer.encode("\ud800").tolist() == [6 + 0xED, 6 + 0xA0, 6 + 0x80]
    assert tokenizer.decode([2, 6 + 0x41, 3]) == "A"


def test_any_bytes_decode_and_only_faults_are_replaced():
    rng = random.Random(0)
    for _ in range(2000):
        data = bytes(rng.choice((0x41, 0xC3, 0xA9, 0xED, 0xA0, 0x80, 0xF0, 0xFF)) for _ in range(rng.randrange(12)))
        text = decode_bytes(data)
        if "\ufffd" not in text:
            assert text.encode("utf-8", "surrogatepass") == data
    assert decode_bytes(b"a\xffb") == "a\ufffdb"
    assert decode_bytes(b"\xe2\xed\xa0\x80\xe2") == "\ufffd\ud800\ufffd"
    assert decode_bytes(b"\xed\xa0\xbd\xed\xb8\x80") == "\ud83d\ude00"  # two halves stay two
    assert decode_bytes("é\U0010ffff".encode()) == "é\U0010ffff"
