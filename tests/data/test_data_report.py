"""The report's page, in a real browser: it shows what report.json says, needs nothing else, and runs nothing of a crawl's."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import test_prepare

from lmjax.data import prepare, report
from lmjax.data.document import Document
from lmjax.data.units import InputConfig
from lmjax.data.written import read_written, write_documents
from lmjax.files import read_json

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROBE = """<script>
const shown = document.querySelectorAll("details");
const seen = () => [...document.querySelectorAll("details pre")].filter(p => p.checkVisibility()).length;
const folded = seen();
shown.forEach(d => d.open = true);
const result = {
  rows: [...document.querySelector("table").rows].map(r => [...r.cells].map(c => c.innerText)),
  bars: [...document.querySelectorAll("td.bar div")].map(b => [b.style.width, b.offsetWidth > 0]),
  folded: folded, opened: seen(),
  bold: getComputedStyle(document.querySelector("th")).fontWeight, overflow: document.body.scrollWidth > window.innerWidth,
  requests: performance.getEntriesByType("resource").map(e => e.name), owned: window.owned === true,
};
document.documentElement.innerHTML = "<pre id=result></pre>";
document.getElementById("result").textContent = JSON.stringify(result);
</script>"""


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """A preparation of documents some of which mean harm."""
    root = tmp_path_factory.mktemp("report")
    inputs = test_prepare.make_inputs(root / "in", 60)
    evil = "<img src=http://x.test/i.png onerror='window.owned=true'><script>window.owned=true</script></pre>\x00\ud800"
    rows = [Document(f"e{i}", evil * (i + 1), "evil", {"<b>": "</script>"}) for i in range(30)]
    write_documents(root / "evil.jsonl.zst", rows)
    config = test_prepare.config(inputs, short=test_prepare.Short(min_characters=300))
    sources = {**config.sources, "evil": InputConfig((str(root / "evil.jsonl.zst"),))}
    test_prepare.prepare.prepare(test_prepare.Config(**{**vars(config), "sources": sources}), root / "out")
    return root / "out"


def test_page_names_every_figure(out):
    page, values = (out / "report.html").read_text(), read_json(out / "report.json")
    for stage in values["stages"]:
        for reason, dropped in stage["total"]["dropped"].items():
            assert re.search(rf'<td>{reason}</td><td class="n">{dropped:,}</td>', page)
        for reason, samples in stage["samples"].items():
            assert f"<summary>{reason}: {len(samples)} of" in page
    assert not re.search(r"(src|href)=", re.sub(r"&lt;.*?&gt;", "", page)), "nothing is fetched"
    assert "clusters" in page and "letters" in page


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; CI installs it")
def test_page_in_a_browser(out, tmp_path):
    path = tmp_path / "probe.html"
    path.write_text((out / "report.html").read_text().replace("</body>", f"{PROBE}</body>"))
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1300,900",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    run = subprocess.run([CHROMIUM, *flags, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120)
    found = json.loads(
        re.search(r'<pre id="result">(.*)</pre>', run.stdout, re.DOTALL)[1]
        .replace("&gt;", ">")
        .replace("&lt;", "<")
        .replace("&amp;", "&")
    )
    assert found["requests"] == [] and not found["owned"]
    head, *rows = found["rows"]
    stages = read_json(out / "report.json")["stages"]
    assert head[0] == "stage" and [row[0] for row in rows] == [stage["stage"] for stage in stages]
    for row, stage in zip(rows, stages, strict=True):
        assert int(row[head.index("read")].replace(",", "")) == stage["total"]["read"]
        assert int(row[head.index("kept")].replace(",", "")) == stage["total"]["kept"]
    assert found["bold"] in ("600", "700"), "the style is in the page"
    assert found["bars"] and all(visible or width == "0.0%" for width, visible in found["bars"])
    assert found["folded"] == 0 < found["opened"], "samples are folded, and open"
    assert not found["overflow"]


def test_figures_as_people_read_them():
    assert [report.number(value) for value in (None, 1234, 1234.56, 0.01234)] == ["", "1,234", "1,234.6", "0.0123"]
    assert report.share(1, 3) == "33.3 %" and report.share(0, 0) == "–"
    assert report.text("a\x1b[31m<&\n") == "a�[31m&lt;&amp;\n"


def test_tokens_are_measured_on_what_is_counted(tmp_path, monkeypatch):
    """A page's markup has other tokens than its text: what is kept is told by the ratio of what is kept."""

    class Words:
        def encode_batch(self, texts):
            return [text.split() for text in texts]

    monkeypatch.setattr("lmjax.tokenizers.build.load", lambda folder: Words())
    (tmp_path / "in").mkdir()
    text = "The old bridge over the river was closed for two years while its stones were taken apart and cleaned. " * 4
    for i in range(20):
        head = "".join(f"<meta name='m{k}' content='x'>" for k in range(50))
        (tmp_path / "in" / f"{i}.html").write_text(f"<html><head>{head}</head><body><p>{text}{i}</p></body></html>")
    config = prepare.PrepareConfig(stages=("clean",), tokenizer=str(tmp_path / "tokenizer"), max_failed_share=0.0)
    prepare.prepare(config, tmp_path / "out", [str(tmp_path / "in")], "web")
    (source,) = (stage["sources"]["web"] for stage in read_json(tmp_path / "out" / "report.json")["stages"][-1:])
    words = sum(len(document.text.split()) for document in read_written(tmp_path / "out" / "web.jsonl.zst"))
    assert source["kept"] == 20 and source["tokens_kept"] == pytest.approx(words, rel=0.01)
    assert source["tokens_read"] == pytest.approx(words + 20 * 101, rel=0.1)  # a `<meta` is two words and a bit
