"""What is personal is masked, what only looks so stays; and the time is linear in the text, whatever the text is."""

import ipaddress
import random
import re
import time

import pytest

from lmjax.data.document import Document
from lmjax.data.pii import COUNTRIES, KINDS, Pii, find, is_card
from lmjax.data.stage import Counts, Tally, run
from lmjax.errors import UserError

# what is inside ⟦ ⟧ is personal
POSITIVE = {
    "email": [
        "'⟦jane@example.com⟧', -⟦bob@example.com⟧",
        "Write to ⟦jane.doe@example.com⟧.",
        "mailto:⟦j_doe+news@mail.example.co.uk⟧?subject=hi",
        "<⟦a@b.io⟧>",
        "Kontakt: ⟦jörg.müller@bücher-shop.de⟧, oder",
        "⟦иван@почта.рф⟧ пишите",
        "“⟦o'brien@dublin.ie⟧”",
        "user:⟦first-last@sub-domain.example.museum⟧:22",
        "联系⟦wang.wei@163.com⟧谢谢".replace("联系", "联系 ").replace("谢谢", " 谢谢"),
        "⟦x123@xn--bcher-kva.example.com⟧",
        "To: 'Bob' <⟦BOB@EXAMPLE.ORG⟧>, ⟦carol@example.net⟧",
    ],
    "phone": [
        "Call +1 (212) 555-0123 now".replace("+1 (212) 555-0123", "⟦+1 (212) 555-0123⟧"),
        "⟦+44 20 7946 0958⟧",
        "Tel. ⟦+49 30 901820⟧, Berlin",
        "⟦+33 1 42 68 53 00⟧",
        "⟦+81-3-3224-5000⟧",
        "WhatsApp ⟦+919876543210⟧",
        "⟦+55 11 91234-5678⟧",
        "(⟦+61 2 9374 4000⟧)",
        "⟦+86 10 6552 9988⟧",
        "phone: ⟦(415) 555-2671⟧",
        "my number is ⟦415-555-2671⟧.",
        "Tel:⟦415-555-2671⟧, (⟦415-555-2672⟧)",
        "⟦(415)555-2671⟧",
        '<a href="tel:⟦+1-415-555-2671⟧">',
        "⟦555-123-4567⟧ or ⟦555-123-4568⟧",
        "⟦212.736.5000⟧ is a hotel",
        "ring ⟦020 7946 0958⟧ after six",
        "London ⟦020 7946 0958⟧",
        "Tel: ⟦030 901820⟧",
        "Téléphone : ⟦01 42 68 53 00⟧",
        "appelez le ⟦01.42.68.53.00⟧",
        "Teléfono ⟦912 345 678⟧",
        "電話:⟦03-3224-5000⟧",
        "Fax ⟦1-800-356-9377⟧",
        "mobile ⟦0412 345 678⟧",
        "⟦+7 495 739-70-00⟧",
        "Telefone: ⟦(11) 91234-5678⟧",
        "⟦0044 20 7946 0958⟧",
        "cell 4155552671".replace("4155552671", "⟦4155552671⟧"),
    ],
    "ip": [
        "Host ⟦93.184.216.34⟧ is up",
        "http://⟦93.184.216.34⟧:8080/index",
        "nameserver ⟦8.8.8.8⟧",
        "ban ⟦185.220.101.7⟧, then ⟦185.220.101.8⟧",
        "⟦66.249.66.1⟧ - - [10/Oct/2000:13:55:36]",
        "from [⟦209.85.220.41⟧]",
        "ssh root@⟦45.33.32.156⟧",
        "the resolver at ⟦1.1.1.1⟧.",
        "route ⟦151.101.0.0⟧/16",
        "⟦2001:4860:4860::8888⟧ answers",
        "[⟦2a00:1450:4001:0812:0000:0000:0000:200e⟧]:443",
        "AAAA ⟦2606:2800:220:1:248:1893:25c8:1946⟧.",
        "IP=⟦81.2.69.142⟧;",
    ],
    "card": [
        "Visa ⟦4111 1111 1111 1111⟧ exp 12/27",
        "card ⟦5500-0000-0000-0004⟧",
        "Amex: ⟦3782 822463 10005⟧",
        "⟦378282246310005⟧",
        "pay with ⟦6011111111111117⟧.",
        "JCB ⟦3530 1113 3330 0000⟧",
        "Diners ⟦3056 930902 5904⟧",
        "cc=⟦4012888888881881⟧&cvv=123",
        "⟦2223003122003222⟧",
        "nineteen digits: ⟦4000000000000001236⟧",
    ],
    "iban": [
        "IBAN ⟦DE89 3704 0044 0532 0130 00⟧",
        "⟦GB82WEST12345698765432⟧",
        "Compte ⟦FR14 2004 1010 0505 0001 3M02 606⟧.",
        "⟦NL91ABNA0417164300⟧, Amsterdam",
        "⟦CH93 0076 2011 6238 5295 7⟧ BIC POFICHBE",
        "conto ⟦IT60 X054 2811 1010 0000 0123 456⟧",
        "⟦ES91 2100 0418 4502 0005 1332⟧ BIC",
        "⟦MT84MALT011000012345MTLCAST001S⟧",
        "⟦NO93 8601 1117 947⟧",
        "(⟦PL61 1090 1014 0000 0712 1981 2874⟧)",
    ],
    "ssn": [
        "SSN: ⟦123-45-6789⟧",
        "my social security number is ⟦512 34 7890⟧",
        "⟦078-05-1120⟧, the famous one",
        "ssn ⟦219099999⟧",
    ],
}
NEGATIVE = [
    "Python 3.11.2.1 is out",
    "version 1.2.3.4",
    "v10.20.30.40 fixes it",
    "see section 1.2.3.4 for more",
    "1.2.3.4 Scope of this document",
    "OID 1.3.6.1.4.1.311.21.20",
    "linux-image 5.10.0.8-1",
    "Chrome/91.0.4472.114 Safari/537.36",
    "Mozilla/5.0 Chrome/120.0.0.0",
    "upgrade from 2.6.32.9 to 2.6.33.1",
    "openssl-1.0.2.1.tar.gz",
    "requires foo>=93.184.216.34",
    "libc 2.31.0.1",
    "file 12.34.56.78.txt",
    "ping 127.0.0.1 and 192.168.0.1 and 10.1.2.3",
    "http://172.16.254.1/, 169.254.1.1",
    "documentation: 192.0.2.1, 198.51.100.7, 203.0.113.9",
    "mask 255.255.255.0, multicast 224.0.0.251",
    "256.300.1.2 is none",
    "::1, fe80::1, 2001:db8::1, fd00::1",
    "std::vector<int>, dead::beef, face::add",
    "at 20:15:30, MAC 00:1a:2b:3c:4d:5e",
    "2023:10:05 12:30:00",
    "fingerprint 2a:00:14:50:40:01:08:12:00:00:00:00:00:00:20:0e",
    "ISBN 978-0-306-40615-7",
    "ISBN 0-306-40615-2, ISBN-10: 0306406152",
    "ISSN 2049-3630",
    "id 5551234567, next 5551234568",
    "order 2015550123",
    "unix time 1609459200, 1609459200123",
    "timestamp 1609459200123456",
    "2023-10-05 12:30:00",
    "2023-10-05T12:30:00.123456Z",
    "05.10.2023 12:30",
    "12/10/2023, 10-12-2023",
    "sha1 da39a3ee5e6b4b0d3255bfef95601890afd80709",
    "md5 d41d8cd98f00b204e9800998ecf8427e",
    "550e8400-e29b-41d4-a716-446655440000",
    "costs $1,234,567.89 or 1 234 567 890 EUR",
    "€ 12.345.678,90",
    "ACGTACGTTAGCCGATAGCTAGCTTAGGCTAACG",
    "51.507351, -0.127758",
    "N 40° 26′ 46″, 40.446195 -79.982195",
    "pi = 3.14159265358979323846",
    "0123456789",
    "1234567890 1234567890",
    "00 01 02 03 04 05 06 07 08 09 0a 0b",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14",
    "100 200 300 400 500 600",
    "0.000 0.125 0.250 0.375",
    "card 4111 1111 1111 1112",
    "1234 5678 9012 3456",
    "0000-0000-0000-0000",
    "9999999999999995",
    "000-12-3456, 666-12-3456, 900-12-3456, 123-00-4567, 123-45-0000",
    "part 1123-45-67890",
    "DE89 3704 0044 0532 0130 01",
    "GB82 WEST 1234 5698 7654 3",
    "ZZ82 WEST 1234 5698 7654 32",
    "ABCD12345678901234567890",
    "a @ b, @decorator, C@ ",
    "@user on a network, @scope/package",
    "pip install foo@1.2.3",
    "icon@2x.png, getty@tty1.service, LOGO@2X.PNG",
    "y = x@w.T + a@b",
    "user@localhost",
    "@media (min-width: 600px)",
    "RFC 2616, port 65535, 1,000,000,000",
    "1990-1995, 1914-1918, pp. 123-145",
    "+0000, +0530, -0800",
    "f(x) = +12345",
    "lines 1234-1290 1300-1350",
    "0x7fffffff 0755 00000000",
    "1-2-3-4-5-6-7",
    "(1) 200 (2) 300 (3) 400",
    "3.14 2.71 1.41 1.73",
    "1 1 2 3 5 8 13 21 34 55 89 144 233 377 610 987 1597",
    "telnet 127.0.0.1 8081",
    "00000000 08:02 135522 /usr/lib",
    "A1 B1 01\n02 01 02 01 02.",
    "70h(0111 000W) or 38h(011 1000) for socket 1",
    "Mon Dec 17 16:05:06 2012 -0800",
    "octal 0240..0377 (0241..0376), 0377 (0241",
]


def marked(text: str) -> tuple[str, list[str]]:
    """A snippet without its marks, and what they held."""
    return re.sub("[⟦⟧]", "", text), re.findall("⟦(.*?)⟧", text)


def hits(text: str, **options) -> list[tuple[str, str]]:
    """What is found: (piece of the text, kind)."""
    stage = Pii(**options)
    return [(text[hit.start : hit.end], hit.kind) for hit in find(text, stage.kinds, stage.regions)]


def masked(text: str, **options) -> str:
    """The text after the stage."""
    return Pii(**options).apply(Document("d", text, "s"), Tally()).text


def test_table():
    wanted = {kind: [marked(snippet) for snippet in snippets] for kind, snippets in POSITIVE.items()}
    total = found = 0
    wrong = [(text, got) for text in NEGATIVE if (got := hits(text))]
    for kind, rows in wanted.items():
        for text, secrets in rows:
            got = hits(text)
            total, found = total + len(secrets), found + sum((secret, kind) in got for secret in secrets)
            wrong += [(text, hit) for hit in got if hit not in [(secret, kind) for secret in secrets]]
    assert total >= 60 and len(NEGATIVE) >= 60
    assert not wrong  # precision 1
    assert found >= 0.95 * total


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_alone_and_masked(kind):
    for snippet in POSITIVE[kind]:
        text, _ = marked(snippet)
        assert masked(text) == re.sub("⟦.*?⟧", f"<{kind.upper()}>", snippet)
        assert all(found == kind for _, found in hits(text, kinds=(kind,)))
        assert masked(text, kinds=tuple(other for other in KINDS if other != kind)).count("<" + kind.upper()) == 0
        assert masked(masked(text)) == masked(text)


def test_counts_and_meta():
    text = "jane@example.com, bob@example.com, SSN 123-45-6789"
    counts = Counts("pii")
    (document,) = run(Pii(), [Document("d", text, "s", {"url": "u"})], counts)
    assert document.text == "<EMAIL>, <EMAIL>, SSN <SSN>"
    assert document.meta == {"url": "u", "pii": {"email": 2, "ssn": 1}}
    closed = counts.close()
    assert closed["tally"] == {"pii": {"email": 2, "ssn": 1}} and closed["changed"] == 1
    clean = Document("d", "nothing here", "s")
    assert Pii().apply(clean, Tally()) is clean
    tally = Tally()
    seen = Pii(mask=False).apply(Document("d", text, "s"), tally)
    assert seen.text == text and seen.meta["pii"] == {"email": 2, "ssn": 1} and tally.counts["pii"]["email"] == 2


def test_placeholders():
    assert masked("a@b.com 123-45-6789", placeholders={"email": "email@example.com"}) == "email@example.com <SSN>"
    with pytest.raises(UserError, match="e_mail"):
        Pii(placeholders={"e_mail": "x"})
    with pytest.raises(UserError, match="regions"):
        Pii(regions=("Germany",))
    with pytest.raises(UserError, match="kinds"):
        Pii(kinds=())


def test_regions():
    assert hits("(030) 901820", regions=("DE",)) == [("(030) 901820", "phone")]
    assert hits("(030) 901820", regions=()) == [] and hits("415-555-2671", regions=("DE",)) == []
    assert hits("+49 30 901820", regions=()) == [("+49 30 901820", "phone")]  # international ones need no region


def test_luhn_finds_every_single_wrong_digit():
    card = "4111111111111111"
    assert is_card(card)
    for i in range(len(card)):
        assert not any(is_card(card[:i] + digit + card[i + 1 :]) for digit in "0123456789" if digit != card[i])


def test_iban_of_every_country_and_its_check_digits():
    rng = random.Random(0)
    for country in COUNTRIES.split():
        account = "".join(rng.choice("0123456789") for _ in range(int(country[2:]) - 4))
        check = 98 - int("".join(str(int(sign, 36)) for sign in account + country[:2] + "00")) % 97
        iban = f"{country[:2]}{check:02}{account}"
        assert hits(f"to {iban}.", kinds=("iban",)) == [(iban, "iban")]
        grouped = " ".join(iban[i : i + 4] for i in range(0, len(iban), 4))
        assert hits(f"to {grouped} now", kinds=("iban",)) == [(grouped, "iban")]
        other = f"{country[:2]}{check % 97 + 1 if check != 97 else 2:02}{account}"
        assert other == iban or hits(f"to {other}.", kinds=("iban",)) == []
        assert hits(f"to {iban}0.", kinds=("iban",)) == []


def test_addresses_agree_with_ipaddress():
    rng = random.Random(1)
    for _ in range(3000):
        address = ".".join(str(rng.choice([rng.randrange(256), 0, 10, 127, 192, 168])) for _ in range(4))
        network = ipaddress.ip_address(address)
        assert bool(hits(f"server {address} up", kinds=("ip",))) == (network.is_global and not network.is_multicast), (
            address
        )
        six = ":".join(f"{rng.randrange(65536):x}" for _ in range(8))
        public = ipaddress.ip_address(six).is_global and six[0] in "23" and len(six.split(":")[0]) == 4
        assert bool(hits(f"server {six} up", kinds=("ip",))) == public, six


def test_overlaps_are_masked_once():
    assert masked("4155552671@example.com") == "<EMAIL>"
    assert masked("tel 415-555-2671@example.com, 8.8.8.8@8.8.8.8.example.com") == "tel <EMAIL>, <EMAIL>"
    assert masked("a" * 70 + "@example.com") == "a" * 6 + "<EMAIL>"  # a name has at most 64 characters
    assert masked("call 415-555-2671 415-555-2672") == "call <PHONE> <PHONE>"
    assert masked("a@b.com,c@d.org;e@f.net") == "<EMAIL>,<EMAIL>;<EMAIL>"


@pytest.mark.parametrize(
    "text", ["", "a", "@", "+", "\ud800", "\ud800@\ud800.com", "1", "+1", "::", "@.@", "(", "\n@b.com", "9" * 7]
)
def test_edges(text):
    assert masked(text) == text


RUNS = (
    *(
        "a",
        "@",
        "1",
        ".",
        "1.1.1.1.",
        "a@",
        "a@b.",
        "@a.",
        "1 ",
        "01 ",
        "+1",
        "+1 (",
        "(1",
        "2000:",
        "::",
        "AB12",
        "DE89 ",
        "0-",
    ),
    *(
        " ",
        "\ud800",
        "12-",
        "123-45-",
        "4111 ",
        "x@y.zz",
        "555-123-4567 ",
        "020 7946 0958, ",
        "a.b-c_d+",
        "+44 20 7946 0958 ",
    ),
)


@pytest.mark.parametrize("piece", RUNS)
def test_time_is_linear(piece):
    def seconds(length: int) -> float:
        text, best = piece * (length // len(piece)), 1e9
        for _ in range(3):
            start = time.process_time()
            find(text, KINDS, Pii().regions)
            best = min(best, time.process_time() - start)
        return best

    seconds(1000)  # loads the library of phones
    short = seconds(20_000)
    assert seconds(80_000) < 4 * 2.5 * max(short, 0.002)
