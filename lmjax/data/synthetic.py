"""Synthetic documents: a model rewrites or extends a document by a template; two templates make a back-translation.

The model is a run of lmjax (`lmjax generate` in a process of its own: data never imports jax) or an endpoint that speaks OpenAI's
protocol. Each request carries a seed, a function of the document's id: its answer is asked for once, kept in the stage's folder
under the request's hash, and never paid for again. Given the answers, the output is a function of the input.

What comes back is judged before it is kept: neither empty, nor out of proportion, nor a copy of its source or of a sibling.
"""

import dataclasses
import email.utils
import hashlib
import http.client
import itertools
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from lmjax.config import need
from lmjax.data.document import Document, draw
from lmjax.data.stage import Counts, Drop, Failed, MapStage, Tally, Verdict
from lmjax.data.words import split_words
from lmjax.errors import RunError, UserError
from lmjax.files import read_json, sha256_json, write_atomic, write_json

log = logging.getLogger(__name__)

PLACEHOLDER = re.compile(r"\{\{|\}\}|\{(\w+)\}")
SHINGLE = 5  # words, of which overlap is measured
BACKOFF_S = 1.0  # before the first retry; doubles
LONGEST_WAIT_S = 60.0  # that an endpoint's Retry-After may ask for
REFUSED = (401, 403, 404)  # the key, the right or the name is wrong: so it will be for all documents
TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)


@dataclasses.dataclass(frozen=True)
class Synthetic(MapStage):
    """Adds documents that a model makes of others, or puts them in their place."""

    name: ClassVar[str] = "synthetic"

    template: str = ""  # the prompt: {text}, {id}, {source} or a field of meta in braces; {{ and }} are braces
    second_template: str | None = None  # back-translation: the first answer is its {text}
    workdir: str | None = None  # a run of lmjax, whose model continues the prompt; or
    endpoint: str | None = None  # "https://host/v1": POST to …/chat/completions
    model: str | None = None  # the endpoint's name of it
    key_variable: str | None = None  # the environment variable with the endpoint's key; none: it needs no key
    step: int | None = None  # the workdir's checkpoint; none: the newest when the stage begins
    mode: Literal["add", "replace"] = "add"
    extend: bool = False  # the new document is the source's text and then the answer; the answer alone is judged
    samples: int = 1  # new documents for each document, each with its own seed
    share: float = 1.0  # of the documents that are given to the model, drawn by id, 0 to 1; the others pass
    seed: int = 0  # with the document's id: the request's seed
    temperature: float = 0.8  # 0: the likeliest
    max_tokens: int = 512  # of an answer
    min_ratio: float = 0.2  # characters of a new text to its source's, at least
    max_ratio: float = 3.0  # and at most
    max_overlap: float = 0.6  # Jaccard of word 5-grams with its source, and with its siblings: above, it is a copy
    on_failure: Literal["fail", "keep"] = "fail"  # of a request: the document is set aside, or goes on without
    batch_size: int = 64  # documents at a time; a workdir's model is loaded anew for each
    concurrency: int = 8  # requests to an endpoint at a time
    timeout_s: float = 120.0  # of a request to an endpoint; of a workdir's, for each prompt
    retries: int = 5  # after a request that was refused for now; the wait doubles from 1 s
    give_up_after: int = 50  # failed requests in a row end the run: the endpoint is down

    def __post_init__(self) -> None:
        need(self.workdir is None or self.endpoint is None, "synthetic needs either workdir or endpoint, not both")
        need(self.endpoint is None or self.model is not None, "synthetic: an endpoint needs model, its name there")
        url = urllib.parse.urlparse(self.endpoint or "http://x")
        need(url.scheme in ("http", "https") and bool(url.netloc), f"endpoint={self.endpoint!r} is no http(s) address")
        for name in ("template", "second_template"):
            value = getattr(self, name)
            need(not value or "text" in PLACEHOLDER.findall(value), f"{name}={value!r} must hold {{text}}")
        need(self.samples >= 1, f"samples={self.samples} must be at least 1")
        need(0 < self.share <= 1, f"share={self.share} must be in (0, 1]")
        need(self.temperature >= 0, f"temperature={self.temperature} must not be negative")
        need(self.max_tokens >= 1, f"max_tokens={self.max_tokens} must be at least 1")
        need(
            0 <= self.min_ratio <= self.max_ratio,
            f"min_ratio={self.min_ratio} must be in 0 … max_ratio={self.max_ratio}",
        )
        need(0 <= self.max_overlap <= 1, f"max_overlap={self.max_overlap} must be in 0 … 1")
        for name in ("batch_size", "concurrency", "give_up_after"):
            need(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        need(self.timeout_s > 0, f"timeout_s={self.timeout_s} must be positive")
        need(self.retries >= 0, f"retries={self.retries} must not be negative")

    def files(self) -> Sequence[str]:
        """What the run says of itself."""
        need(bool(self.workdir or self.endpoint), "synthetic needs a workdir or an endpoint: which model is to write?")
        need(bool(self.template), "synthetic needs a template, which holds {text}")
        self.key()
        return [] if self.workdir is None else [str(run_file(self.workdir))]

    def key(self) -> str | None:
        """The endpoint's key, which stands in no file of ours."""
        if self.key_variable is None:
            return None
        need(bool(os.environ.get(self.key_variable)), f"the environment variable {self.key_variable} is not set")
        return os.environ[self.key_variable]

    def fit(self, shards: Sequence[Path], folder: Path) -> None:
        """Settles which model answers."""
        model: dict[str, Any] = {"endpoint": self.endpoint, "model": self.model}
        if self.workdir is not None:
            step = newest_step(self.workdir) if self.step is None else self.step
            model = {"run": sha256_json(read_json(run_file(self.workdir))), "step": step}
        write_json(folder / "model.json", model)

    def process(self, documents: Iterable[Document], counts: Counts, folder: Path) -> Iterator[Document]:
        """The stage over a stream, a batch at a time, in order."""
        answers = Answers(self, folder)
        while batch := list(itertools.islice(documents, self.batch_size)):
            chosen = [document for document in batch if draw(document.id, "synthetic", self.seed) < self.share]
            made = iter(self.make(chosen, answers))
            waiting = {id(document) for document in chosen}
            for document in batch:
                if id(document) not in waiting:
                    yield from counts.settle(document, document)
                    continue
                try:
                    verdict = self.judge(document, next(made), answers.model, counts.tally)
                except Failed as error:
                    counts.fail(document, error)
                    continue
                yield from counts.settle(document, verdict)

    def make(self, documents: Sequence[Document], answers: "Answers") -> list[list["Made"]]:
        """For each document its answers, or why there is none."""
        requests = [self.request(document, k) for document in documents for k in range(self.samples)]
        results = answers.ask(requests)
        if self.second_template is not None:
            seconds = [
                result if isinstance(result, Failed) else self.second_request(request, result)
                for request, result in zip(requests, results, strict=True)
            ]
            results = answers.ask(seconds)
        made = [
            Made(0 if isinstance(request, Failed) else request.seed, result)
            for request, result in zip(requests, results, strict=True)
        ]
        return [made[start : start + self.samples] for start in range(0, len(made), self.samples)]

    def request(self, document: Document, k: int) -> "Request | Failed":
        """What a document's k-th sample asks."""
        fields = {**document.meta, "text": document.text, "id": document.id, "source": document.source}
        seed = int(draw(document.id, f"synthetic/{k}", self.seed) * (1 << 32))
        try:
            return Request(fill(self.template, fields), seed, fields)
        except KeyError as error:
            return Failed(f"template: the document has no field {error.args[0]!r}")

    def second_request(self, first: "Request", answer: str) -> "Request | Failed":
        """What is asked of a first answer."""
        try:
            return Request(fill(self.second_template or "", {**first.fields, "text": answer}), first.seed, first.fields)
        except KeyError as error:
            return Failed(f"second_template: the document has no field {error.args[0]!r}")

    def judge(self, document: Document, made: list["Made"], model: str, tally: Tally) -> Verdict:
        """The source and its new documents, or these alone."""
        accepted: list[Document] = []
        shingles = [shingled(document.text)]
        reasons = []
        for k, (seed, answer) in enumerate(made):
            tally.add("synthetic", "requested")
            if isinstance(answer, Failed):
                if self.on_failure == "fail":
                    raise answer
                reasons.append("request_failed")
                continue
            new = shingled(answer)
            reason = self.why_not(document.text, answer, new, shingles)
            if reason is not None:
                reasons.append(reason)
                continue
            shingles.append(new)
            accepted.append(self.document(document, answer, seed, k, model))
        for reason in reasons:
            tally.add("synthetic_rejected", reason)
        tally.add("synthetic", "accepted", len(accepted))
        if self.mode == "add":
            return [document, *accepted]
        return accepted or Drop("synthetic_rejected", reasons)

    def document(self, source: Document, answer: str, seed: int, k: int, model: str) -> Document:
        """A new document, which says what it was made from and by what."""
        made = {"synthetic": True, "from": source.id, "template": self.template_hash(), "model": model, "seed": seed}
        text = source.text + answer if self.extend else answer.strip()
        return dataclasses.replace(source, id=f"{source.id}#synthetic-{k}", text=text, meta={**source.meta, **made})

    def template_hash(self) -> str:
        """Names the templates; the report holds them."""
        return sha256_json([self.template, self.second_template])[:12]

    def why_not(self, source: str, answer: str, new: frozenset, others: list[frozenset]) -> str | None:
        """Why an answer makes no document, or None; `others` are the shingles of the source and of its siblings so far."""
        length = len(answer.strip())
        if not length:
            return "empty"
        if length < self.min_ratio * len(source):
            return "too_short"
        if length > self.max_ratio * len(source):
            return "too_long"
        if jaccard(new, others[0]) > self.max_overlap:
            return "copy_of_source"
        if any(jaccard(new, other) > self.max_overlap for other in others[1:]):
            return "copy_of_sibling"
        return None

    def finish(self, tally: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
        """What made the documents."""
        templates = {"template": self.template, "second_template": self.second_template, "hash": self.template_hash()}
        return {**templates, "answered_by": read_json(folder / "model.json"), **tally.get("synthetic", {})}


def fill(template: str, fields: dict[str, Any]) -> str:
    """The template with its fields; braces in what is filled in stand for themselves.

    Raises:
      KeyError: a field is missing.
    """
    return PLACEHOLDER.sub(lambda match: str(fields[match[1]]) if match[1] else match[0][0], template)


def shingled(text: str) -> frozenset[str]:
    """Word 5-grams, folded; a shorter text is one of its own."""
    words = [word.casefold() for word in split_words(text)]
    grams = [" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)]
    return frozenset(grams or [" ".join(words)])


def jaccard(a: frozenset, b: frozenset) -> float:
    """What two sets share, of all they hold."""
    return len(a & b) / len(a | b)


# ----------------------------------------------------------------------------------------------------------------- answers


class Request(NamedTuple):
    """What a model is asked."""

    prompt: str
    seed: int  # of 32 bits
    fields: dict[str, Any]  # of its document, for a second template


class Made(NamedTuple):
    """An answer, or why there is none."""

    seed: int
    answer: str | Failed


Keep = Callable[[Request, str], None]


@runtime_checkable
class Backend(Protocol):
    """What answers."""

    whole: bool  # answers depend, in their last bits, on what is asked together: a batch is asked whole, or not at all

    def answer(self, requests: Sequence[Request], keep: Keep) -> Iterator[str | Failed]:
        """The answers, in order; each is kept as soon as it is there."""
        ...


class Answers:
    """A backend's answers, each asked for once."""

    def __init__(self, stage: Synthetic, folder: Path):
        self.folder, self.stage = folder / "answers", stage
        self.identity = read_json(folder / "model.json")
        self.model = str(self.identity.get("model") or f"{self.identity['run'][:12]}@{self.identity['step']}")
        self.backend: Backend = Endpoint(stage) if stage.endpoint else Workdir(stage, self.identity["step"])
        self.failed = 0  # in a row

    def ask(self, requests: Sequence[Request | Failed]) -> list[str | Failed]:
        """Answers in the order of the requests, from the folder where they are there."""
        paths = {place: self.path(r) for place, r in enumerate(requests) if not isinstance(r, Failed)}
        results: dict[int, str | Failed] = {p: r for p, r in enumerate(requests) if isinstance(r, Failed)}
        missing = [place for place, path in paths.items() if not path.exists()]
        if self.backend.whole and missing:
            missing = list(paths)
        for place in paths.keys() - set(missing):
            results[place] = read_json(paths[place])["text"]
        asked = [requests[place] for place in missing]
        for place, answer in zip(missing, self.backend.answer(asked, self.keep), strict=True):
            results[place] = answer
            self.failed = self.failed + 1 if isinstance(answer, Failed) else 0
            if self.failed >= self.stage.give_up_after:
                raise RunError(
                    f"synthetic: {self.failed} requests in a row failed: {answer}; what was answered is kept"
                )
        return [results[place] for place in range(len(requests))]

    def keep(self, request: Request, answer: str) -> None:
        """Writes an answer, whole or not at all."""
        write_atomic(self.path(request), json.dumps({"text": answer}))

    def path(self, request: Request) -> Path:
        """Where a request's answer is kept."""
        stage = self.stage
        asked = [self.identity, request.prompt, request.seed, stage.temperature, stage.max_tokens]
        name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        return self.folder / name[:2] / f"{name}.json"


# ---------------------------------------------------------------------------------------------------------------- endpoint


class Endpoint:
    """An OpenAI-compatible endpoint."""

    whole = False

    def __init__(self, stage: Synthetic):
        self.stage, self.url = stage, f"{str(stage.endpoint).rstrip('/')}/chat/completions"
        self.headers = {"Content-Type": "application/json"}
        if key := stage.key():
            self.headers["Authorization"] = f"Bearer {key}"

    def answer(self, requests: Sequence[Request], keep: Keep) -> Iterator[str | Failed]:
        """See `Backend`; a few at a time."""

        def one(request: Request) -> str | Failed:
            answer = self.one(request)
            if not isinstance(answer, Failed):
                keep(request, answer)
            return answer

        with ThreadPoolExecutor(self.stage.concurrency) as pool:
            try:
                yield from pool.map(one, requests)
            finally:
                pool.shutdown(cancel_futures=True)

    def one(self, request: Request) -> str | Failed:
        """One answer; what may pass is tried again."""
        for attempt in itertools.count():
            try:
                return self.post(request)
            except urllib.error.HTTPError as error:
                said = error.read(300).decode("utf-8", "replace")
                if error.code in REFUSED:
                    raise UserError(f"{self.url} refuses ({error.code}): {said}") from error
                why, wait = f"HTTP {error.code}: {said}", asked_wait(error.headers.get("Retry-After"))
                if error.code not in TRY_AGAIN:
                    return Failed(why)
            except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
                why, wait = f"{type(error).__name__}: {error}", None
            except (ValueError, LookupError, TypeError) as error:
                why, wait = f"no answer of this protocol: {error!r}", None
            if attempt == self.stage.retries:
                return Failed(f"{why} ({attempt + 1} tries)")
            time.sleep(BACKOFF_S * 2**attempt if wait is None else wait)
        raise AssertionError

    def post(self, request: Request) -> str:
        """Sends it once."""
        stage = self.stage
        prompt = request.prompt.encode(
            "utf-8", "replace"
        ).decode()  # JSON has no form for lone surrogates that all read
        body = {"model": stage.model, "messages": [{"role": "user", "content": prompt}], "seed": request.seed}
        body |= {"temperature": stage.temperature, "max_tokens": stage.max_tokens}
        sent = urllib.request.Request(self.url, json.dumps(body).encode(), self.headers)
        with urllib.request.urlopen(sent, timeout=stage.timeout_s) as response:
            text = json.load(response)["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise TypeError(f"content is {type(text).__name__}")
        return text


def asked_wait(value: str | None) -> float | None:
    """Seconds of a Retry-After, a number or a date, within bounds."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(seconds, 0.0), LONGEST_WAIT_S) if seconds == seconds else None


# ----------------------------------------------------------------------------------------------------------------- workdir


class Workdir:
    """A run of lmjax, in a process of its own for each batch."""

    whole = True

    def __init__(self, stage: Synthetic, step: int):
        self.stage, self.step = stage, step

    def answer(self, requests: Sequence[Request], keep: Keep) -> Iterator[str | Failed]:
        """See `Backend`.

        Raises:
          RunError: the process failed.
        """
        if not requests:
            return
        stage = self.stage
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "prompts.jsonl"
            path.write_text("".join(json.dumps({"prompt": r.prompt, "seed": r.seed}) + "\n" for r in requests))
            words = ["--workdir", str(stage.workdir), "--step", str(self.step), "--prompts", str(path)]
            words += ["--max-tokens", str(stage.max_tokens), "--temperature", str(stage.temperature)]
            command = [sys.executable, "-m", "lmjax.cli", "generate", *words]
            limit = 300 + stage.timeout_s * len(requests)  # beside the answers: to load and to compile
            try:
                done = subprocess.run(command, capture_output=True, timeout=limit, check=False)
            except subprocess.TimeoutExpired as error:
                raise RunError(f"synthetic: `lmjax generate` took more than {limit:.0f} s") from error
        if done.returncode:
            last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise RunError(f"synthetic: `lmjax generate` left with {done.returncode}: {''.join(last)}")
        texts = [json.loads(line)["text"] for line in done.stdout.splitlines() if line.startswith(b"{")]
        for request, text in zip(requests, texts, strict=True):
            keep(request, text)
            yield text


def run_file(workdir: str) -> Path:
    """What a run says of itself."""
    path = Path(workdir) / "run.json"
    need(path.is_file(), f"workdir={workdir!r} is not the workdir of a run")
    return path


def newest_step(workdir: str) -> int:
    """The newest checkpoint."""
    folder = Path(workdir) / "checkpoints"
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    need(bool(steps), f"workdir={workdir!r} holds no checkpoint")
    return max(steps)
