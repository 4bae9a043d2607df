"""The report of a preparation: `report.json` for programs, `report.html` (one self-contained page) for a person.

For each stage and source: read, kept, dropped by reason, failed, bytes, tokens, time; what each stage counted and found; lengths
and languages of what is left; and samples: twenty kept and twenty dropped documents for each reason, drawn by the hash of the
id, because a person must see what a filter does.
"""

import datetime
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lmjax.config import to_dict
from lmjax.data import passes
from lmjax.data.document import to_bytes
from lmjax.data.stage import Stage
from lmjax.data.written import read_written
from lmjax.errors import UserError
from lmjax.files import code_version, read_manifest, write_atomic, write_json

BYTES_PER_TOKEN = 4.0  # where no tokenizer is given: a guess, and the report says so


# -------------------------------------------------------------------------------------------------------------------- data


def write(values: dict[str, Any], out: Path) -> None:
    """Writes both reports."""
    write_json(out / "report.json", values)
    write_atomic(out / "report.html", page(values).encode("utf-8", "backslashreplace"))


def collect(tokenizer: str | None, done: Sequence[passes.Pass]) -> dict[str, Any]:
    """All figures; lets each stage finish.

    Raises:
      RunError: a stage read other documents than the one before it kept.
    """
    profiles = {side: profile(one) for side, one in (("read", done[0]), ("kept", done[-1]))}
    stages, before = [], None
    for one in done:
        after = (before or {}) | bytes_per_token(tokenizer, profile(one))  # HTML has other tokens than the text in it
        for stage, rows in zip(one.stages or (None,), passes.rows(one), strict=True):
            stages.append(stage_report(stage.name if stage else "read", stage, rows, one, before or after, after))
            before = after
    check_chain(stages)
    return {
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "code": code_version(),
        "tokenizer": tokenizer,
        "bytes_per_token": after,
        "stages": stages,
        "profiles": profiles,
    }


def profile(one: passes.Pass) -> dict[str, dict[str, Any]]:
    """source → lengths, languages and samples of the documents that a pass gave on."""
    merged: dict[str, dict[str, Any]] = {}
    for receipt in one.receipts:
        source, found = receipt["source"], receipt["profile"]
        merged[source] = passes.merge_counts([merged[source], found]) if source in merged else found
    return merged


def bytes_per_token(tokenizer: str | None, profiles: dict[str, Any]) -> dict[str, float]:
    """source → UTF-8 bytes a token: measured on its samples, or a guess where no tokenizer is given; none without a sample."""
    if tokenizer is None:
        return dict.fromkeys(profiles, BYTES_PER_TOKEN)
    from lmjax.tokenizers.build import load

    encode = load(tokenizer).encode_batch
    measured = {}
    for source, values in profiles.items():
        texts = [text for _, _, text, _ in values["samples"]]
        tokens = sum(len(ids) for ids in encode(texts))
        if tokens:
            measured[source] = sum(map(len, map(to_bytes, texts))) / tokens
    return measured


def stage_report(
    name: str,
    stage: Stage | None,
    rows: list[dict[str, Any]],
    one: passes.Pass,
    before: dict[str, float],
    after: dict[str, float],
) -> dict[str, Any]:
    """A stage's part: its sources, and what they are together; `before` and `after` it each source has so many bytes a token."""
    sources = {}
    for row in rows:
        source = row["source"]
        sources[source] = {key: value for key, value in row.items() if key != "source"} | {
            "tokens_read": round(row["bytes_read"] / before.get(source, BYTES_PER_TOKEN)),
            "tokens_kept": round(row["bytes_kept"] / after.get(source, BYTES_PER_TOKEN)),
            "documents_per_s": round(row["read"] / row["seconds"], 1) if row["seconds"] > 0 else None,
        }
    every = passes.merge_counts([{k: v for k, v in row.items() if k != "documents_per_s"} for row in sources.values()])
    law(name, every)
    every["seconds"] += passes.seconds_before(stage, one.folder) if stage else 0.0
    return {
        "stage": name,
        "options": to_dict(stage) if stage else {},
        "seconds": every["seconds"],
        "total": {key: value for key, value in every.items() if key not in ("samples", "tally")},
        "tally": every.get("tally", {}),
        "sources": {source: {k: v for k, v in row.items() if k != "samples"} for source, row in sources.items()},
        "found": stage.finish(every["tally"], passes.own_folder(one.folder, stage)) if stage else {},
        "samples": every.get("samples", {}),
    }


def law(name: str, counts: dict[str, Any]) -> None:
    """read + added = kept + dropped + failed."""
    dropped = sum(counts["dropped"].values())
    if counts["read"] + counts["added"] != counts["kept"] + dropped + counts["failed"]:
        raise RuntimeError(f"the counts of stage {name} do not add up: {counts}")


def check_chain(stages: Sequence[dict[str, Any]]) -> None:
    """Each stage read what the one before it kept, source by source."""
    for before, after in itertools.pairwise(stages):
        for source, row in after["sources"].items():
            if row["read"] != before["sources"][source]["kept"]:
                raise RuntimeError(
                    f"{after['stage']} read {row['read']} documents of {source}, but {before['stage']} kept"
                    f" {before['sources'][source]['kept']}"
                )


# -------------------------------------------------------------------------------------------------------------------- page

STYLE = """
:root { color-scheme: light dark; --line: #8884; --bar: #4a90d9; --bad: #d9534f; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
table { border-collapse: collapse; margin: .5rem 0; } th, td { padding: .15rem .6rem; border-bottom: 1px solid var(--line); }
th { text-align: left; font-weight: 600; } td { vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td.bar { min-width: 12rem; } td.bar div { background: var(--bar); height: .8rem; border-radius: 2px; }
td.bar.bad div { background: var(--bad); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); padding: .6rem; margin: .3rem 0 1rem; }
pre { max-height: 16rem; overflow: auto; }
summary { cursor: pointer; padding: .15rem 0; } .note { opacity: .75; } .id { font-weight: 600; overflow-wrap: anywhere; }
"""


def page(values: dict[str, Any]) -> str:
    """The whole page. All that comes from documents is escaped: a crawl is no friend."""
    first, last = values["stages"][0]["total"], values["stages"][-1]["total"]
    guessed = "" if values["tokenizer"] else ", guessed at 4 bytes a token: give config.tokenizer to have them measured"
    parts = [
        "<h1>Data preparation</h1>",
        f"<p>{first['read']:,} records read, <b>{last['kept']:,} documents kept</b> ({share(last['kept'], first['read'])}):"
        f" {last['bytes_kept']:,} bytes, about {last['tokens_kept']:,} tokens{guessed}.</p>",
        f'<p class="note">Made {text(values["made"])} by lmjax {text(values["code"])}. At each stage'
        " read + added = kept + dropped + failed.</p>",
        "<h2>Stages</h2>",
        funnel(values["stages"]),
        "<h2>Sources</h2>",
        *(f"<h3>{text(source)}</h3>{source_table(values['stages'], source)}" for source in values["profiles"]["read"]),
        "<h2>Lengths and languages</h2>",
        *(distributions(source, values["profiles"]) for source in values["profiles"]["read"]),
        *(stage_section(stage) for stage in values["stages"]),
        "<h2>Kept documents</h2>",
        *(
            samples(f"{source}: a random sample of what is left", p["samples"])
            for source, p in values["profiles"]["kept"].items()
        ),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Data preparation</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def text(value: Any) -> str:
    """Any value as escaped text; control characters become visible ones."""
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return escape("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in shown))


def number(value: Any) -> str:
    """A figure as people read it."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.3g}"
    return f"{value:,}" if isinstance(value, int) else text(value)


def share(part: int | float, whole: int | float) -> str:
    """A percentage."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def table(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A table; figures stand right."""
    rows = "".join(f"<tr>{''.join(map(cell, line))}</tr>" for line in lines)
    return f"<table><tr>{''.join(f'<th>{text(name)}</th>' for name in head)}</tr>{rows}</table>"


def cell(value: Any) -> str:
    """A cell: a figure, or what is HTML already."""
    return f'<td class="n">{number(value)}</td>' if isinstance(value, int | float | None) else f"<td>{value}</td>"


def bars(counts: dict[str, Any], whole: int | float, name: str, bad: bool = False, sort: bool = True) -> str:
    """A table of counts with bars, the largest first or in their own order."""
    if not counts:
        return ""
    most = max(counts.values()) or 1
    lines = []
    for key, value in (sorted(counts.items(), key=lambda item: -item[1]) if sort else list(counts.items()))[:50]:
        bar = f'<td class="bar{" bad" if bad else ""}"><div style="width:{100 * value / most:.1f}%"></div></td>'
        cells = f'<td>{text(key)}</td><td class="n">{number(value)}</td><td class="n">{share(value, whole)}</td>{bar}'
        lines.append(f"<tr>{cells}</tr>")
    more = f'<p class="note">and {len(counts) - 50:,} more in report.json</p>' if len(counts) > 50 else ""
    return f"<table><tr><th>{text(name)}</th><th></th><th></th><th></th></tr>{''.join(lines)}</table>{more}"


HEAD = (
    "stage",
    "read",
    "added",
    "kept",
    "kept, %",
    "dropped",
    "failed",
    "changed",
    "bytes kept",
    "tokens kept",
    "seconds",
    "documents/s",
)


def line(name: str, row: dict[str, Any]) -> list[Any]:
    """A stage's row."""
    speed = row["read"] / row["seconds"] if row["seconds"] > 0 else None
    kept = share(row["kept"], row["read"] + row["added"])
    return [
        text(name), row["read"], row["added"], row["kept"], f'<span class="n">{kept}</span>', sum(row["dropped"].values()),
        row["failed"], row["changed"], row["bytes_kept"], row["tokens_kept"], row["seconds"], speed,
    ]  # fmt: skip


def funnel(stages: Sequence[dict[str, Any]]) -> str:
    """All stages, all sources together."""
    return table(HEAD, [line(stage["stage"], stage["total"]) for stage in stages])


def source_table(stages: Sequence[dict[str, Any]], source: str) -> str:
    """All stages of a source."""
    return table(
        HEAD, [line(stage["stage"], stage["sources"][source]) for stage in stages if source in stage["sources"]]
    )


def distributions(source: str, profiles: dict[str, Any]) -> str:
    """Lengths and languages of a source, as read and as kept."""
    parts = [f"<h3>{text(source)}</h3>"]
    for side, name in (("read", "as read"), ("kept", "as kept")):
        values = profiles[side].get(source)
        if values is None:
            continue
        documents = sum(values["lengths_below"].values())
        lengths = {
            f"below {int(k):,}": v for k, v in sorted(values["lengths_below"].items(), key=lambda item: int(item[0]))
        }
        parts.append(bars(lengths, documents, f"characters, {name}", sort=False))
        parts.append(bars(values["languages"], documents, f"language, {name}"))
    return "".join(parts)


def stage_section(stage: dict[str, Any]) -> str:
    """All about one stage."""
    total = stage["total"]
    parts = [f"<h2>{text(stage['stage'])}</h2>"]
    if stage["options"]:
        options = "".join(f"{text(key)} = {text(value)}\n" for key, value in stage["options"].items())
        parts.append(f"<details><summary>options</summary><pre>{options}</pre></details>")
    parts.append(bars(total["dropped"], total["read"] + total["added"], "dropped because", bad=True))
    parts += [bars(counts, sum(counts.values()), kind) for kind, counts in stage["tally"].items()]
    if stage["found"]:
        parts.append(f"<h3>found</h3>{tree(stage['found'])}")
    parts += [
        samples(f"{reason}: {len(found)} of {total['dropped'].get(reason, total.get(reason, 0)):,}", found)
        for reason, found in stage["samples"].items()
    ]
    return "\n".join(parts)


def tree(value: Any) -> str:
    """JSON as nested tables."""
    if isinstance(value, dict):
        lines = (f"<tr><th>{text(key)}</th><td>{tree(item)}</td></tr>" for key, item in value.items())
        return f"<table>{''.join(lines)}</table>"
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        fold = "<details open>" if len(value) < 4 else "<details>"
        return "".join(f"{fold}<summary>{i}</summary>{tree(item)}</details>" for i, item in enumerate(value, 1))
    return text(value) if isinstance(value, str | bool | list) else number(value)


def samples(title: str, found: Sequence[Sequence[Any]]) -> str:
    """Documents behind a fold."""
    parts = []
    for _, name, start, detail in found:
        shown = "" if detail is None else f"<pre>{text(detail)}</pre>"
        parts.append(f'<div class="id">{text(name)}</div><pre>{text(start)}</pre>{shown}')
    return f"<details><summary>{text(title)}</summary>{''.join(parts)}</details>" if parts else ""


# ----------------------------------------------------------------------------------------------------------------- explain


def explain(out: os.PathLike | str, name: str) -> Iterator[str]:
    """What happened to the documents of an id, line by line.

    Raises:
      UserError: the folder holds no finished preparation, or no document of that id was seen.
    """
    out, found = Path(out), False
    manifest = read_manifest(out, "prepare")
    for file in manifest.content["files"]:
        kind, _, _ = file.rpartition("/")
        if kind == "events":
            for event in passes.read_lines(out / file):
                if event["id"] == name:
                    found = True
                    yield told(event)
        elif kind == "":
            for document in read_written(out / file):
                if document.id == name:
                    found = True
                    yield f"{document.source}: kept, {len(document.text):,} characters in {file}"
                    yield f"  meta: {json.dumps(document.meta, ensure_ascii=False)}"
    if not found:
        raise UserError(f"no document {name!r} was dropped, changed or kept in {out}; ids are those of report.html")


def told(event: dict[str, Any]) -> str:
    """An event in a line."""
    reason = f" because {event['reason']}" if event["reason"] else ""
    detail = "" if event["detail"] is None else f": {json.dumps(event['detail'], ensure_ascii=False)}"
    return f"{event['source']}: {event['what']} in {event['stage']}{reason}{detail}"
