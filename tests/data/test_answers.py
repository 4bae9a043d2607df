"""What answers: an endpoint of our own that refuses, hangs and breaks, and a run; nothing is asked twice."""

import contextlib
import io
import json
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lmjax.data import answers
from lmjax.data.answers import asked_wait
from lmjax.data.document import Document
from lmjax.data.stage import Counts, run
from lmjax.data.synthetic import Synthetic
from lmjax.errors import RunError, UserError

TEXT = "One two three four five six seven eight nine ten."


@contextlib.contextmanager
def server(reply):
    """An endpoint; `reply(body, number)` gives (status, text or whole JSON). Yields its address and what it was asked."""
    asked, lock = [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(asked)
                asked.append({**body, "path": self.path, "key": self.headers.get("Authorization")})
            status, said = reply(body, number)
            if isinstance(said, str) and status == 200:
                said = {"choices": [{"message": {"role": "assistant", "content": said}}]}
            data = json.dumps(said).encode() if not isinstance(said, bytes) else said
            self.send_response(status)
            if status == 429:
                self.send_header("Retry-After", "0")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1", asked
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def rewrite(body, _):
    """Other words, which depend on the prompt and the seed."""
    prompt = body["messages"][0]["content"]
    return 200, " ".join(f"{word[::-1]}{body['seed'] % 97}" for word in prompt.split()[1:])


def judge(stage, documents, folder):
    stage.fit([], folder)
    counts = Counts("synthetic")
    kept = list(run(stage, documents, counts, folder))
    return kept, counts.close()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(answers, "BACKOFF_S", 0.001)


def stage_of(address, **options) -> Synthetic:
    return Synthetic(endpoint=address, model="m", template="Rewrite: {text}", **options)


def documents(count=10) -> list[Document]:
    return [Document(f"d{i}", f"{TEXT} Number {i}.", "web", {"url": f"u{i}"}) for i in range(count)]


def test_nothing_is_asked_twice_and_order_does_not_matter(tmp_path):
    def fails_after(body, number):
        return (500, "down") if number >= 6 else rewrite(body, number)

    with server(fails_after) as (address, asked), pytest.raises(RunError, match="3 requests in a row failed"):
        judge(stage_of(address, retries=0, concurrency=1, give_up_after=3), documents(), tmp_path / "a")
    assert 9 <= len(asked) <= 10  # one more may be under way
    with server(rewrite) as (other, asked):
        stage = stage_of(other, concurrency=1)
        whole, _ = judge(stage, documents(), tmp_path / "b")
        assert len(asked) == 10
        again, _ = judge(stage, documents(), tmp_path / "b")
        assert again == whole and len(asked) == 10
        shuffled, _ = judge(stage_of(other, batch_size=3, concurrency=4), documents()[::-1], tmp_path / "c")
        assert sorted(shuffled, key=lambda d: d.id) == sorted(whole, key=lambda d: d.id) and len(asked) == 20
        judge(stage_of(other, temperature=0.1), documents(1), tmp_path / "b")
        assert len(asked) == 21
    kept = list((tmp_path / "a" / "answers").rglob("*.json"))
    assert len(kept) == 6


def test_a_killed_run_pays_only_for_what_is_missing(tmp_path):
    down = threading.Event()

    def reply(body, number):
        if number >= 6 and not down.is_set():
            return 503, "down"
        return rewrite(body, number)

    with server(reply) as (address, asked):
        stage = stage_of(address, retries=0, concurrency=1, give_up_after=2)
        with pytest.raises(RunError):
            judge(stage, documents(), tmp_path)
        before = len(asked)
        down.set()
        _, counts = judge(stage, documents(), tmp_path)
        assert len(asked) - before == 4 and counts["added"] == 10


def test_what_is_refused_for_now_is_tried_again(tmp_path):
    def reply(body, number):
        empty = {"choices": [{"message": {"content": None}}]}
        failures = [(429, "slow"), (500, "oops"), (200, b"not json"), (200, {"choices": []}), (200, empty)]
        return failures[number] if number < len(failures) else rewrite(body, number)

    with server(reply) as (address, asked):
        stage = stage_of(address)
        kept, _ = judge(stage, documents(1), tmp_path)
    assert len(asked) == 6 and [d.id for d in kept] == ["d0", f"d0#synthetic-{stage.mark('m')}-0"]


def test_failures_that_are_not_in_a_row_end_nothing(tmp_path):
    with server(lambda body, number: (400, "no") if number % 2 else rewrite(body, number)) as (address, _):
        _, counts = judge(stage_of(address, concurrency=1, give_up_after=2), documents(), tmp_path)
    assert (counts["failed"], counts["added"]) == (5, 5)


def test_a_wrong_key_ends_the_run_at_once(tmp_path):
    with server(lambda *_: (401, "who are you")) as (address, asked):
        with pytest.raises(UserError, match=r"refuses \(401\).*who are you"):
            judge(stage_of(address, concurrency=1), documents(), tmp_path)
        assert len(asked) <= 2


def test_a_server_that_hangs_or_is_not_there(tmp_path):
    with server(lambda *_: (time.sleep(0.5), (200, "late"))[1]) as (address, _):
        kept, counts = judge(stage_of(address, timeout_s=0.05, retries=1), documents(1), tmp_path)
    assert counts["failed"] == 1 and "(2 tries)" in str(counts["samples"]["failed"])
    kept, counts = judge(stage_of(address, retries=0), documents(1), tmp_path)
    assert counts["failed"] == 1 and not kept


def test_what_an_endpoint_asks_to_wait():
    assert [asked_wait(v) for v in (None, "7", "-3", "1e9", "nan", "soon")] == [None, 7.0, 0.0, 60.0, None, None]
    assert asked_wait("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


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

    monkeypatch.setattr(answers.subprocess, "run", here)
    stage = Synthetic(workdir=str(tmp_path / "run"), template="{text}", extend=True, max_tokens=12, min_ratio=0.0)
    assert stage.files()
    kept, counts = judge(stage, documents(3), tmp_path / "stage")
    assert counts["tally"]["synthetic"]["requested"] == 3 and kept[0].text == documents(3)[0].text
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
