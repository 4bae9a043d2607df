"""Config files, overrides and typed dataclasses: what is right arrives, what is wrong is one line that names it."""

import dataclasses
import json
import random
from typing import Literal

import pytest

from lmjax.config import Text, build, diff, flatten, free, from_file, is_free, load, need, set_override, to_dict
from lmjax.errors import UserError
from lmjax.model.config import SIZES
from lmjax.train.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = 0.1
    steps: int | None = None
    kind: Literal["adam", "muon"] = "adam"
    speed: bool = free(True)


@dataclasses.dataclass(frozen=True)
class Part:
    start: int
    share: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str = "x"
    count: int = 3
    on: bool = False
    inner: Inner = dataclasses.field(default_factory=Inner)
    extra: Inner | None = None
    paths: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (1, 2)
    parts: tuple[Part, ...] = ()
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    limit: float | None = 1.0
    mode: Literal[1, 2] = 1
    place: Inner = dataclasses.field(default_factory=Inner, metadata={"free": True})

    def __post_init__(self):
        need(self.count != 13, f"config.count={self.count} brings bad luck")


@dataclasses.dataclass(frozen=True)
class Required:
    must: int
    inner: Inner


def override(*overrides, cls=Outer):
    values = {}
    for text in overrides:
        set_override(values, text)
    return build(cls, values)


def fails(says, call, *arguments, **kwargs):
    with pytest.raises(UserError, match=says) as error:
        call(*arguments, **kwargs)
    assert "\n" not in str(error.value)


def write(tmp_path, body, name="c.py"):
    (tmp_path / name).write_text(body)
    return str(tmp_path / name)


# ---------------------------------------------------------------------------------------------------------------- building


def test_defaults():
    assert build(Outer, {}) == Outer()
    assert build(Required, {"must": 1}) == Required(1, Inner())


def test_nested_values():
    values = {
        "inner": {"rate": 2, "kind": "muon"},
        "extra": {"steps": 5},
        "parts": [{"start": 0}, {"start": 9, "share": {"a": 1}}],
        "weights": {"a": 1, "b": 0.5},
        "paths": ["p", "q"],
        "limit": None,
    }
    assert build(Outer, values) == Outer(
        inner=Inner(rate=2.0, kind="muon"),
        extra=Inner(steps=5),
        parts=(Part(0), Part(9, {"a": 1.0})),
        weights={"a": 1.0, "b": 0.5},
        paths=("p", "q"),
        limit=None,
    )


def test_an_integer_serves_as_a_number_and_nothing_else_is_coerced():
    rate = build(Inner, {"rate": 3}).rate
    assert rate == 3.0 and type(rate) is float
    for value in ("0.1", True, None, [1], 10**400):
        fails(r"config\.rate=.* must be a number", build, Inner, {"rate": value})
    for value in (1.0, "1", True, None):
        fails(r"config\.count=.* must be an integer", build, Outer, {"count": value})
    for value in (1, "true", None):
        fails(r"config\.on=.* must be true or false", build, Outer, {"on": value})
    for value in (1, None, True):
        fails(r"config\.name=.* must be a text", build, Outer, {"name": value})


@pytest.mark.parametrize(
    "values, says",
    [
        ({"cuont": 1}, r"config\.cuont: no such field; did you mean 'count'\?"),
        ({"zzz": 1}, r"config\.zzz: no such field; known: count, extra, inner"),
        ({"inner": {"rat": 1}}, r"config\.inner\.rat: no such field; did you mean 'rate'\?"),
        ({"extra": {"stps": 1}}, r"config\.extra\.stps: no such field; did you mean 'steps'\?"),
        ({"parts": [{"start": 0}, {"start": 1, "shar": {}}]}, r"config\.parts\[1\]\.shar: no such field"),
        ({"parts": [{}]}, r"config\.parts\[0\]\.start must be given \(an integer\)"),
        ({"parts": {"start": 0}}, r"config\.parts=.* must be "),
        ({"paths": "p"}, r"config\.paths='p' must be "),
        ({"paths": [1]}, r"config\.paths\[0\]=1 must be a text"),
        ({"weights": {"a": "x"}}, r"config\.weights\.a='x' must be a number"),
        ({"weights": [1]}, r"config\.weights=\[1\] must be "),
        ({"inner": 3}, r"config\.inner=3 must be a Inner"),
        ({"inner": None}, r"config\.inner=None must be a Inner"),
        ({"inner": {"kind": "adm"}}, r"config\.inner\.kind='adm'; did you mean 'adam'\?"),
        ({"mode": 3}, r"config\.mode=3; known: 1, 2"),
        ({"limit": "x"}, r"config\.limit='x' must be a number"),
        ({"count": 13}, "brings bad luck"),
    ],
)
def test_mistakes_name_the_field(values, says):
    fails(says, build, Outer, values)


def test_a_field_without_default_must_be_given():
    fails(r"config\.must must be given \(an integer\)", build, Required, {})


# --------------------------------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    "text, key, value",
    [
        ("count=5", "count", 5),
        ("count=1e6", "count", 1_000_000),
        ("count=1_000", "count", 1000),
        ("count=-2", "count", -2),
        ("inner.rate=3", "inner.rate", 3.0),
        ("inner.rate=3e-4", "inner.rate", 3e-4),
        ("inner.steps=none", "inner.steps", None),
        ("inner.steps=None", "inner.steps", None),
        ("inner.steps=7", "inner.steps", 7),
        ("inner.kind=muon", "inner.kind", "muon"),
        ("inner.speed=False", "inner.speed", False),
        ("on=true", "on", True),
        ("name=5", "name", "5"),
        ("name=true", "name", "true"),
        ("name=", "name", ""),
        ("name=a=b", "name", "a=b"),
        ("mode=2", "mode", 2),
        ("limit=none", "limit", None),
        ("limit=2", "limit", 2.0),
        ("paths=a,b/c", "paths", ("a", "b/c")),
        ("paths=", "paths", ()),
        ("paths=/one/path", "paths", ("/one/path",)),
        ('paths=["a,b"]', "paths", ("a,b",)),
        ("sizes=3,4", "sizes", (3, 4)),
        ("sizes=(3, 4)", "sizes", (3, 4)),
        ("sizes=5", "sizes", (5,)),
        ("weights.a=1", "weights", {"a": 1.0}),
        ("weights={'a': 2}", "weights", {"a": 2.0}),
        ("parts=[{'start': 4}]", "parts", (Part(4),)),
        ("extra.rate=4", "extra", Inner(rate=4.0)),
    ],
)
def test_override(text, key, value):
    found = override(text)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text, says",
    [
        ("count", "'count' is not of the form section.field=value"),
        ("=3", "is not of the form"),
        ("cuont=3", "did you mean 'count'"),
        ("count=x", r"config\.count='x' must be an integer"),
        ("count=1.5", r"config\.count='?1\.5'? must be an integer"),
        ("count=True", r"config\.count=.* must be an integer"),
        ("count=none", r"config\.count='none' must be an integer"),
        ("on=1", r"config\.on=.* must be true or false"),
        ("on=yes", r"config\.on='yes' must be true or false"),
        ("inner.rate=fast", r"config\.inner\.rate='fast' must be a number"),
        ("inner=3", r"config\.inner=.* must be a Inner"),
        ("inner.kind=adem", "did you mean 'adam'"),
        ("sizes=1,x", r"config\.sizes\[1\]='x' must be an integer"),
        ("weights.a=x", r"config\.weights\.a='x' must be a number"),
        ("weights={[]: 1}", r"config\.weights=.* must be "),
        ("name.first=x", r"config\.name=.* must be a text"),
        ("inner.rate.more=1", r"config\.inner\.rate=.* must be a number"),
    ],
)
def test_bad_override(text, says):
    fails(says, override, text)


def test_later_overrides_win_and_a_value_is_no_section():
    assert override("count=4", "count=5").count == 5
    fails(r"config\.name\.x: 'name' is a value, not a section", override, "name=a", "name.x=1")


def test_every_text_is_a_value_of_the_type_or_a_users_error():
    rng = random.Random(0)
    alphabet = "019.-+e_,'\"[]{}():none trueFalse\\\0é\ud800"
    texts = ["".join(rng.choices(alphabet, k=rng.randrange(1, 9))) for _ in range(500)]
    texts += [
        "(" * 500,
        "[" * 100_000,
        "9" * 5000,
        "1" + "0" * 400,
        "-" * 9000,
        "1e999",
        "nan",
        "lambda: 1",
        "{}",
        "...",
    ]
    kinds = {
        "count": int, "on": bool, "name": str, "sizes": tuple, "weights": dict, "limit": float | None, "inner.rate": float,
        "inner.steps": int | None, "inner.kind": str, "mode": int, "paths": tuple, "parts": tuple, "extra": Inner | None,
    }  # fmt: skip
    accepted = 0
    for text in texts:
        for key, kind in kinds.items():
            try:
                value = override(f"{key}={text}")
            except UserError as error:
                assert "\n" not in str(error)
                continue
            for part in key.split("."):
                value = getattr(value, part)
            assert isinstance(value, kind) and not (kind is int and isinstance(value, bool)), (key, text, value)
            accepted += 1
    assert accepted > 500


# ------------------------------------------------------------------------------------------------------------------- files

GOOD = """
from ml_collections import ConfigDict
def get_config():
    return ConfigDict({"count": 4, "inner": {"rate": 1}, "paths": ("a",), "parts": (ConfigDict({"start": 1}),)})
"""


def test_a_config_file(tmp_path):
    expected = Outer(count=5, inner=Inner(rate=1.0), paths=("a",), parts=(Part(1),), on=True)
    assert load(Outer, write(tmp_path, GOOD), ["count=5", "on=true"]) == expected
    assert load(Outer, write(tmp_path, "def get_config():\n    return {'count': 4}\n")) == Outer(count=4)


def test_a_key_that_is_no_name(tmp_path):
    fails(r"config\.7: no such field", load, Outer, write(tmp_path, "def get_config():\n    return {7: 1}\n"))


def test_a_missing_file_names_the_nearest(tmp_path, monkeypatch):
    for name in ("tiny.py", "large.py", "notes.txt"):
        write(tmp_path, GOOD, name)
    fails(r"no config file '.*tinny\.py'; did you mean '.*tiny\.py'\?", load, Outer, str(tmp_path / "tinny.py"))
    fails(r"no config file '.*x\.py'$", load, Outer, str(tmp_path / "none" / "x.py"))
    monkeypatch.chdir(tmp_path)
    fails(r"no config file 'larg\.py'; did you mean 'large\.py'\?", load, Outer, "larg.py")
    fails(r"no config file '\.'", load, Outer, ".")


@pytest.mark.parametrize(
    "body, says",
    [
        ("x = (\n", r"c\.py:1: '\(' was never closed"),
        ("def get_config():\n  return {\n", r"c\.py:2: "),
        ("x = 1\n", r"c\.py defines no get_config\(\)"),
        ("get_config = 3\n", r"c\.py defines no get_config\(\)"),
        ("import nothing_of_this_name\n", r"c\.py:1: ModuleNotFoundError: No module named"),
        ("def get_config():\n\n    return undefined\n", r"c\.py:3: NameError: name 'undefined'"),
        ("def get_config():\n    raise ValueError('two\\nlines')\n", r"c\.py:2: ValueError: two lines"),
        ("def get_config(size):\n    return {}\n", r"c\.py:\d+: TypeError: get_config\(\) missing"),
        ("def get_config():\n    return 3\n", r"get_config\(\) must return a ConfigDict, not int"),
        ("def get_config():\n    pass\n", r"get_config\(\) must return a ConfigDict, not NoneType"),
        ("x = '\0'\ndef get_config():\n    return {}\n", r"c\.py:\S+: .*null byte"),
    ],
)
def test_a_broken_file_names_the_line(tmp_path, body, says):
    fails(says, from_file, write(tmp_path, body))


def test_a_file_that_is_not_utf8(tmp_path):
    (tmp_path / "c.py").write_bytes(b"x = 'caf\xe9'\ndef get_config():\n    return {}\n")
    fails(r"c\.py:\S+: ", from_file, str(tmp_path / "c.py"))


# --------------------------------------------------------------------------------------------------- keeping and comparing


@pytest.mark.parametrize(
    "config",
    [
        Outer(),
        Outer(paths=("a",), parts=(Part(1, {"a": 0.1}),), extra=Inner(steps=3), limit=None, weights={"b": 1e-9}),
        override("count=1e6", "inner.rate=0.30000000000000004"),
    ],
)
def test_dumped_configs_are_read_back_equal(config):
    dumped = to_dict(config)
    assert build(Outer, json.loads(json.dumps(dumped))) == config and to_dict(build(Outer, dumped)) == dumped


def test_flatten():
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": {}, "f": [1]}) == {"a.b": 1, "a.c.d": 2, "e": {}, "f": [1]}


def test_diff_names_each_field_and_whether_it_may_differ():
    old = Outer(weights={"a": 1.0})
    new = Outer(count=4, inner=Inner(rate=0.2, speed=False), weights={"a": 2.0}, place=Inner(rate=9.0))
    changes = diff(Outer, to_dict(old), to_dict(new))
    assert [(change.key, change.free) for change in changes] == [
        ("count", False), ("inner.rate", False), ("inner.speed", True), ("place.rate", True), ("weights.a", False)
    ]  # fmt: skip
    assert str(changes[0]) == "config.count: 3 → 4"
    assert diff(Outer, to_dict(old), to_dict(old)) == []


def test_diff_of_fields_that_came_or_went():
    assert [c.key for c in diff(Outer, {"count": 1, "gone": 2}, {"count": 1, "name": "x"})] == ["gone", "name"]
    assert not is_free(Outer, "gone") and not is_free(Outer, "inner.gone") and is_free(Outer, "place.gone")


def test_text_of_a_text_field_is_never_parsed():
    assert build(Outer, {"name": Text("1e6")}).name == "1e6"


def test_every_config_file_of_the_project_builds():
    import pathlib

    from lmjax.data.config import ShardsConfig, SplitConfig, TokenizerConfig
    from lmjax.data.prepare import PrepareConfig

    stages = {
        "data": PrepareConfig,
        "tokenizer": TokenizerConfig,
        "shards": ShardsConfig,
        "split": SplitConfig,
        "pretrain": RunConfig,
        "scaling": RunConfig,
    }
    paths = sorted(pathlib.Path(__file__).parent.parent.joinpath("configs").glob("*/*.py"))
    assert paths
    for path in paths:
        config = load(stages[path.parent.name], str(path))
        assert build(type(config), to_dict(config)) == config
        assert path.read_text(encoding="utf-8").startswith('"""'), f"{path} opens without its receipt"


@pytest.mark.parametrize(
    "field",
    [
        *(f"model.{name}" for name in SIZES),
        "train.loss_chunk", "eval.every", "eval.rows", "eval.batch_size", "checkpoint.every", "checkpoint.keep_every",
        "monitor.log_every",
    ],
)  # fmt: skip
def test_sizes_and_periods_are_at_least_one(field):
    """0 is no way to say never, or all."""
    for value in (0, -6):
        says = rf"config\.{field}={value} must be at least 1"
        fails(says, override, f"{field}={value}", cls=RunConfig)


@pytest.mark.parametrize("field", ["rope_theta", "attention_softcap", "logit_softcap"])
def test_what_is_divided_by_is_positive(field):
    for value in (0.0, -1.0):
        fails(rf"config\.model\.{field}={value} must be positive", override, f"model.{field}={value}", cls=RunConfig)


@pytest.mark.parametrize("field", ["model.norm_epsilon", "model.init_std", "train.z_loss"])
def test_what_is_added_or_weighed_is_not_negative(field):
    fails(rf"config\.{field}=-1\.0 must not be negative", override, f"{field}=-1.0", cls=RunConfig)
