"""What answers prompts: a run of lmjax, or an endpoint that speaks OpenAI's protocol; and the answers, each asked for once.

Each request carries a seed: its answer is kept under the hash of all that decides it, and never paid for again, whatever other
option or input comes to be. A run answers by `lmjax generate` in a process of its own: data never imports jax.
"""

import dataclasses
import email.utils
import hashlib
import http.client
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lmjax.config import free, need
from lmjax.data.stage import Failed
from lmjax.errors import RunError, UserError
from lmjax.files import read_json, sha256_json, write_atomic

FOLDER = "answers"
BACKOFF_S = 1.0  # before the first retry; doubles
LONGEST_WAIT_S = 60.0  # that an endpoint's Retry-After may ask for
REFUSED = (401, 403, 404)  # the key, the right or the name is wrong: so it will be for all documents
TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)


@dataclasses.dataclass(frozen=True)
class Model:
    """Which model answers, and how it is asked."""

    workdir: str | None = None  # a run of lmjax, whose model continues the prompt; or
    endpoint: str | None = None  # "https://host/v1": POST to …/chat/completions
    model: str | None = None  # the endpoint's name of it
    key_variable: str | None = free(None)  # the environment variable with the endpoint's key; none: it needs no key
    step: int | None = None  # the workdir's checkpoint; none: the newest when the stage begins
    temperature: float = 0.8  # 0: the likeliest
    max_tokens: int = 512  # of an answer
    concurrency: int = free(8)  # requests to an endpoint at a time
    # these two decide which requests fail, so another value asks again for those that did, and for no others
    timeout_s: float = 120.0  # of a request to an endpoint; of a workdir's, for each prompt
    retries: int = 5  # after a request that was refused for now; the wait doubles from 1 s
    give_up_after: int = free(50)  # failed requests in a row end the run: the endpoint is down

    def __post_init__(self) -> None:
        need(self.workdir is None or self.endpoint is None, "synthetic needs either workdir or endpoint, not both")
        need(self.endpoint is None or self.model is not None, "synthetic: an endpoint needs model, its name there")
        url = urllib.parse.urlparse(self.endpoint or "http://x")
        need(
            url.scheme in ("http", "https") and bool(url.netloc),
            f"synthetic.endpoint={self.endpoint!r} is no http(s) address",
        )
        need(self.temperature >= 0, f"synthetic.temperature={self.temperature} must not be negative")
        for name in ("max_tokens", "concurrency", "give_up_after"):
            need(getattr(self, name) >= 1, f"synthetic.{name}={getattr(self, name)} must be at least 1")
        need(self.timeout_s > 0, f"synthetic.timeout_s={self.timeout_s} must be positive")
        need(self.retries >= 0, f"synthetic.retries={self.retries} must not be negative")

    def key(self) -> str | None:
        """The endpoint's key, which stands in no file of ours."""
        if self.key_variable is None:
            return None
        need(bool(os.environ.get(self.key_variable)), f"the environment variable {self.key_variable} is not set")
        return os.environ[self.key_variable]

    def identity(self) -> dict[str, Any]:
        """Settles which model answers; of a run, which checkpoint."""
        if self.workdir is None:
            return {"endpoint": self.endpoint, "model": self.model}
        step = newest_step(self.workdir) if self.step is None else self.step
        return {"run": sha256_json(read_json(run_file(self.workdir))), "step": step}


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


# -------------------------------------------------------------------------------------------------------------------- answers


class Answers:
    """A backend's answers, each asked for once."""

    def __init__(self, options: Model, folder: Path):
        self.folder, self.options = folder / FOLDER, options
        self.identity = read_json(folder / "model.json")
        self.model = str(self.identity.get("model") or f"{self.identity['run'][:12]}@{self.identity['step']}")
        self.backend: Backend = Endpoint(options) if options.endpoint else Workdir(options, self.identity["step"])
        self.failed = 0  # in a row
        self.together: str | None = None  # names the batch that is asked, where that decides the answers

    def ask(self, requests: Sequence[Request | Failed]) -> list[str | Failed]:
        """Answers in the order of the requests, from the folder where they are there."""
        self.together = self.named_together(requests)
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
            if self.failed >= self.options.give_up_after:
                raise RunError(
                    f"synthetic: {self.failed} requests in a row failed: {answer}; what was answered is kept"
                )
        return [results[place] for place in range(len(requests))]

    def named_together(self, requests: Sequence[Request | Failed]) -> str | None:
        """The hash of a batch, for a backend that must be asked it whole."""
        asked = [(r.prompt, r.seed) for r in requests if not isinstance(r, Failed)]
        return sha256_json(asked) if self.backend.whole else None

    def keep(self, request: Request, answer: str) -> None:
        """Writes an answer, whole or not at all."""
        write_atomic(self.path(request), json.dumps({"text": answer}))

    def path(self, request: Request) -> Path:
        """Where a request's answer is kept."""
        options = self.options
        asked = [self.identity, request.prompt, request.seed, options.temperature, options.max_tokens, self.together]
        name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        return self.folder / name[:2] / f"{name}.json"


# ------------------------------------------------------------------------------------------------------------------- endpoint


class Endpoint:
    """An OpenAI-compatible endpoint."""

    whole = False

    def __init__(self, options: Model):
        self.options, self.url = options, f"{str(options.endpoint).rstrip('/')}/chat/completions"
        self.headers = {"Content-Type": "application/json"}
        if key := options.key():
            self.headers["Authorization"] = f"Bearer {key}"

    def answer(self, requests: Sequence[Request], keep: Keep) -> Iterator[str | Failed]:
        """See `Backend`; a few at a time."""

        def one(request: Request) -> str | Failed:
            answer = self.one(request)
            if not isinstance(answer, Failed):
                keep(request, answer)
            return answer

        with ThreadPoolExecutor(self.options.concurrency) as pool:
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
            if attempt == self.options.retries:
                return Failed(f"{why} ({attempt + 1} tries)")
            time.sleep(BACKOFF_S * 2**attempt if wait is None else wait)
        raise AssertionError

    def post(self, request: Request) -> str:
        """Sends it once."""
        options = self.options
        prompt = request.prompt.encode(
            "utf-8", "replace"
        ).decode()  # lone surrogates: not all readers of JSON take them
        body = {"model": options.model, "messages": [{"role": "user", "content": prompt}], "seed": request.seed}
        body |= {"temperature": options.temperature, "max_tokens": options.max_tokens}
        sent = urllib.request.Request(self.url, json.dumps(body).encode(), self.headers)
        with urllib.request.urlopen(sent, timeout=options.timeout_s) as response:
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


# -------------------------------------------------------------------------------------------------------------------- workdir


class Workdir:
    """A run of lmjax, in a process of its own for each batch."""

    whole = True

    def __init__(self, options: Model, step: int):
        self.options, self.step = options, step

    def answer(self, requests: Sequence[Request], keep: Keep) -> Iterator[str | Failed]:
        """See `Backend`.

        Raises:
          RunError: the process failed.
        """
        if not requests:
            return
        options = self.options
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "prompts.jsonl"
            path.write_text("".join(json.dumps({"prompt": r.prompt, "seed": r.seed}) + "\n" for r in requests))
            words = ["--workdir", str(options.workdir), "--step", str(self.step), "--prompts", str(path)]
            words += ["--max-tokens", str(options.max_tokens), "--temperature", str(options.temperature)]
            command = [sys.executable, "-m", "lmjax.cli", "generate", *words]
            limit = 300 + options.timeout_s * len(requests)  # beside the answers: to load and to compile
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
