"""What chats with a model need and no part of ours reads: its chat template, and all ids that end a text. No jax.

An import keeps them and an export writes them out again, where transformers 4 and 5 both find them.
"""

import os
from typing import Any, NamedTuple

from etils import epath

from lmjax.errors import UserError
from lmjax.files import read_json
from lmjax.tokenizers.hf import CONFIG as TOKENIZER_CONFIG

GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # a folder; each file is named as its template
NAMED = {"name", "template"}


class Chat(NamedTuple):
    """A chat template, or several as [{"name": …, "template": …}]; and ids of which each ends a text, none: the tokenizer's."""

    template: str | list[dict[str, str]] | None = None
    ends: list[int] | None = None


NO_CHAT = Chat()


def read_chat(folder: os.PathLike | str) -> Chat:
    """The chat template and the ends of a folder of Hugging Face, each from where transformers looks first."""
    folder = epath.Path(folder)
    return Chat(read_template(folder), read_ends(folder))


def read_template(folder: epath.Path) -> str | list[dict[str, str]] | None:
    """From the files of templates; else from the tokenizer's config."""
    paths = {"default": folder / TEMPLATE} if (folder / TEMPLATE).exists() else {}
    if (folder / MORE_TEMPLATES).is_dir():
        paths |= {path.stem: path for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    if paths:
        texts = {name: read_text(path) for name, path in paths.items()}
        named = [{"name": name, "template": text} for name, text in texts.items()]
        return texts["default"] if set(texts) == {"default"} else named
    template = read_object(folder / TOKENIZER_CONFIG).get("chat_template")
    texts = template if isinstance(template, list) else [{"name": "default", "template": template or ""}]
    if not all(
        isinstance(each, dict) and each.keys() == NAMED and set(map(type, each.values())) == {str} for each in texts
    ):
        raise UserError(f"{folder / TOKENIZER_CONFIG}: chat_template is neither a text nor a list of named ones")
    return template


def read_ends(folder: epath.Path) -> list[int] | None:
    """The ids of `eos_token_id`, if they are several: one is the tokenizer's own."""
    for name in (GENERATION, "config.json"):
        ends = read_object(folder / name).get("eos_token_id")
        if isinstance(ends, list) and not all(type(id) is int for id in ends):
            raise UserError(f"{folder / name}: eos_token_id={ends} must be an id or a list of ids")
        if ends is not None:
            return ends if isinstance(ends, list) else None
    return None


def read_text(path: epath.Path) -> str:
    """A file of UTF-8."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}") from error


def read_object(path: epath.Path) -> dict[str, Any]:
    """An object of JSON; empty where there is no such file."""
    values = read_json(path) if path.exists() else {}
    if not isinstance(values, dict):
        raise UserError(f"{path} is not an object of JSON")
    return values
