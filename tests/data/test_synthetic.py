"""Synthetic documents against an endpoint of our own: seeds, provenance, and what is no document."""

import json

import pytest
from test_answers import TEXT, documents, judge, rewrite, server, stage_of

from lmjax.data.document import Document
from lmjax.data.synthetic import Synthetic, fill, jaccard, shingled
from lmjax.errors import UserError


def test_new_documents_say_what_they_were_made_from(tmp_path, monkeypatch):
    monkeypatch.setenv("OUR_KEY", "secret")
    with server(rewrite) as (address, asked):
        stage = stage_of(address, key_variable="OUR_KEY", samples=2, temperature=0.5, max_tokens=99, batch_size=4)
        kept, counts = judge(stage, documents(), tmp_path)
    assert [d.id for d in kept[:4]] == ["d0", "d0#synthetic-0", "d0#synthetic-1", "d1"]
    assert kept[0] == documents()[0] and (counts["read"], counts["added"], counts["kept"]) == (10, 20, 30)
    new = kept[1]
    assert new.meta == {
        "url": "u0", "synthetic": True, "from": "d0", "model": "m", "seed": new.meta["seed"], "template": stage.template_hash(),
    }  # fmt: skip
    assert {a["path"] for a in asked} == {"/v1/chat/completions"} and {a["key"] for a in asked} == {"Bearer secret"}
    assert {(a["model"], a["temperature"], a["max_tokens"]) for a in asked} == {("m", 0.5, 99)}
    by_prompt = {(a["messages"][0]["content"], a["seed"]) for a in asked}
    assert (f"Rewrite: {TEXT} Number 0.", new.meta["seed"]) in by_prompt and len({seed for _, seed in by_prompt}) == 20
    assert counts["tally"] == {"synthetic": {"accepted": 20, "requested": 20}}
    report = stage.finish(counts["tally"], tmp_path)
    assert report["template"] == "Rewrite: {text}" and report["hash"] == new.meta["template"]
    assert "secret" not in json.dumps(report) + "".join(p.read_text() for p in tmp_path.rglob("*.json"))


@pytest.mark.parametrize("on_failure, failed, kept", [("fail", 1, 4), ("keep", 0, 5)])
def test_a_request_that_fails_is_counted(tmp_path, on_failure, failed, kept):
    def reply(body, number):
        return (400, "too long") if "Number 1." in body["messages"][0]["content"] else rewrite(body, number)

    with server(reply) as (address, asked):
        out, counts = judge(stage_of(address, on_failure=on_failure), documents(3), tmp_path)
    assert (counts["failed"], len(out), len(asked)) == (failed, kept, 3)
    if on_failure == "fail":
        assert "HTTP 400" in counts["samples"]["failed"][0][3]
    else:
        assert counts["tally"]["synthetic_rejected"] == {"request_failed": 1}


def test_back_translation_is_a_pair(tmp_path):
    def reply(body, _):
        verb, _, text = body["messages"][0]["content"].partition(": ")
        return 200, text.translate(
            str.maketrans("aeiou", "uioae")
        ) if verb == "To" else f"back {text.upper()} again and again"

    with server(reply) as (address, asked):
        stage = Synthetic(
            endpoint=address, model="m", template="To: {text}", second_template="Fro: {text}", mode="replace"
        )
        kept, counts = judge(stage, documents(2), tmp_path)
        judge(stage, documents(2), tmp_path)
    changed = f"{TEXT} Number 1.".translate(str.maketrans("aeiou", "uioae"))
    assert [d.text for d in kept][1] == f"back {changed.upper()} again and again"
    assert len(asked) == 4 and [d.id for d in kept] == ["d0#synthetic-0", "d1#synthetic-0"] and counts["added"] == 0


@pytest.mark.parametrize(
    "answer, reason",
    [
        (" \n ", "empty"),
        ("Too short", "too_short"),
        ("words " * 100, "too_long"),
        (TEXT, "copy_of_source"),
        (f"Here: {TEXT.upper()}", "copy_of_source"),
        ("Eleven twelve thirteen one two three four five six.", None),
    ],
)
def test_what_is_no_document(tmp_path, answer, reason):
    with server(lambda *_: (200, answer)) as (address, _):
        stage = stage_of(address, mode="replace", samples=2)
        kept, counts = judge(stage, [Document("a", TEXT, "web")], tmp_path)
    if reason is None:  # one is accepted, and the other is its copy
        assert [d.text for d in kept] == [answer]
        assert counts["tally"]["synthetic_rejected"] == {"copy_of_sibling": 1}
    else:
        assert counts["dropped"] == {"synthetic_rejected": 1}
        assert counts["tally"]["synthetic_rejected"] == {reason: 2}


def test_share_extend_and_odd_texts(tmp_path):
    odd = [
        Document(str(i), text, "web") for i, text in enumerate(["", "a", "\ud800 b", "{text} {{x}}", "x" * 1_000_000])
    ]
    with server(lambda body, _: (200, " and more\ud800 of it")) as (address, asked):
        stage = stage_of(address, extend=True, min_ratio=0.0, max_ratio=1e9)
        kept, counts = judge(stage, odd, tmp_path / "a")
        some, _ = judge(stage_of(address, share=0.3), documents(300), tmp_path / "b")
    texts = {d.id: d.text for d in kept}
    assert texts["3#synthetic-0"].startswith("{text} {{x}} and more") and counts["added"] == 4
    assert counts["tally"]["synthetic_rejected"] == {"too_long": 1}  # of the empty one
    assert {"Rewrite: {text} {{x}}", "Rewrite: ? b"} <= {a["messages"][0]["content"] for a in asked}
    assert 60 < len(asked) - 5 < 120 and [d for d in some if "#" not in d.id] == documents(300)


def test_a_template_takes_fields(tmp_path):
    assert fill("{{{url}}} {text}", {"url": "{text}", "text": "x"}) == "{{text}} x"
    with server(rewrite) as (address, _):
        stage = Synthetic(endpoint=address, model="m", template="{url}: {text}")
        kept, counts = judge(stage, [*documents(1), Document("bare", TEXT, "web")], tmp_path)
    assert counts["failed"] == 1 and "no field 'url'" in str(counts["samples"]["failed"]) and len(kept) == 2


def test_overlap():
    assert jaccard(shingled("a b c d e f"), shingled("A B C D E g")) == 1 / 3
    assert jaccard(shingled("a b"), shingled("A  b")) == 1 and jaccard(shingled(""), shingled("")) == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "needs a workdir or an endpoint"),
        ({"workdir": "x"}, "needs a template"),
        ({"endpoint": "http://x", "workdir": "y"}, "either workdir or endpoint"),
        ({"endpoint": "http://x", "template": "{text}"}, "needs model"),
        ({"endpoint": "ftp://x", "model": "m", "template": "{text}"}, "no http"),
        ({"workdir": "x", "template": "{{text}}"}, r"must hold \{text\}"),
        ({"workdir": "x", "template": "{text}", "share": 0.0}, "share=0"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(UserError, match=message):
        Synthetic(**options).files()
<<<<<<< HEAD


def test_workdirs_and_keys_that_are_none(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="not the workdir of a run"):
        Synthetic(workdir=str(tmp_path), template="{text}").files()
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(UserError, match="NO_KEY is not set"):
        stage_of("http://x", key_variable="NO_KEY").files()


@pytest.mark.slow
def test_a_run_of_ours_answers(tmp_path, monkeypatch):
    """A batch of which an answer is missing is asked anew as a whole, and says the same; one that is whole, not at all."""
    import jax

    from lmjax import cli, trained
    from lmjax import config as configs
    from lmjax.model import decoder
    from lmjax.parts import build_parts
    from lmjax.tokenizers.byte import ByteTokenizer
    from lmjax.train.config import RunConfig

    values = {"model": {"vocab_size": 264, "num_layers": 1, "d_model": 16, "num_heads": 2, "max_length": 64}}
    values |= {"data": {"shards": ["x"]}, "tokenizer": "x", "train": {"steps": 200, "batch_size": 8}}
    parts = build_parts(configs.build(RunConfig, values))
    model = trained.Model(parts, ByteTokenizer(), decoder.init(parts.config.model, jax.random.key(0)))
    monkeypatch.setattr(trained, "load_model", lambda workdir, step, _: {"2": model}[str(step)])
    (tmp_path / "run" / "checkpoints" / "2").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    commands = []

    def here(command, **_):  # in this process, and without the training of a model
        commands.append(len(Path(command[command.index("--prompts") + 1]).read_text().splitlines()))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = cli.main(command[3:])
        return subprocess.CompletedProcess(command, code, out.getvalue().encode(), b"")

    monkeypatch.setattr(synthetic.subprocess, "run", here)
    stage = Synthetic(workdir=str(tmp_path / "run"), template="{text}", extend=True, max_tokens=12, min_ratio=0.0)
    assert stage.files()
    kept, counts = judge(stage, documents(3), tmp_path / "stage")
    assert counts["tally"]["synthetic"]["requested"] == 3 and kept[0] == documents(3)[0]
    new = [d for d in kept if d.meta.get("synthetic")]
    assert new and all(d.text.startswith(TEXT) and d.meta["model"].endswith("@2") for d in new)
    assert judge(stage, documents(3), tmp_path / "stage")[0] == kept and commands == [3]
    next((tmp_path / "stage" / "answers").rglob("*.json")).unlink()
    assert judge(stage, documents(3), tmp_path / "stage")[0] == kept and commands == [3, 3]


def test_a_run_that_cannot_answer_says_why(tmp_path):
    """The real command, in a process of its own."""
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    with pytest.raises(RunError, match=r"`lmjax generate` left with \d: "):
        judge(Synthetic(workdir=str(tmp_path), template="{text}"), documents(1), tmp_path / "stage")
=======
>>>>>>> c30fbf7 (What answers prompts is a file of its own beside the stage that asks)
