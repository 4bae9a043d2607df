"""Chat templates and lists of ends: through import, a run and export, as transformers reads them before and after."""

import json

import peer
import pytest
from etils import epath

from lmjax.cli import main
from lmjax.errors import UserError
from lmjax.files import read_json, write_json
from lmjax.hf.chat import NO_CHAT, Chat, read_chat
from lmjax.hf.export import all_ends
from lmjax.interchange import find_chat
from lmjax.tokenizers.hf import HfTokenizer

TEMPLATE = "{% for message in messages %}w7 {{ message.content }} <eos>{% endfor %}"
OTHER = "{% for message in messages %}w9 {{ message.content }}{% endfor %}"
MESSAGES = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w8"}]
ENDS = [2, 17, 5]


def theirs(folder, template=None, ends=2):
    """A Llama and its tokenizer as transformers saves them."""
    model = peer.model("llama", num_hidden_layers=1)
    model.generation_config.eos_token_id = model.config.eos_token_id = ends
    model.save_pretrained(folder)
    tokenizer = peer.transformers.PreTrainedTokenizerFast(
        tokenizer_object=peer.word_tokenizer(), bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def chats(folder):
    """What transformers has of a folder: ids of each template, ends of the model and of its generation."""
    tokenizer = peer.transformers.AutoTokenizer.from_pretrained(folder)
    names = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else [None]
    ids = [tokenizer.apply_chat_template(MESSAGES, chat_template=name, tokenize=False) for name in names]
    model = peer.load(folder)
    return ids, model.config.eos_token_id, model.generation_config.eos_token_id


@pytest.mark.parametrize("template", [TEMPLATE, {"default": TEMPLATE, "tool_use": OTHER}])
def test_an_export_has_the_chat_template_and_all_ends_of_its_import(template, tmp_path):
    source = theirs(tmp_path / "in", template, ENDS)
    assert main(["hf-import", "--from", str(source), "--out", str(tmp_path / "run")]) == 0
    assert main(["hf-export", "--workdir", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    expected = chats(source)
    assert len(expected[0]) == (1 if template is TEMPLATE else 2) and expected[1:] == (ENDS, ENDS)
    assert chats(tmp_path / "out") == expected
    assert read_chat(tmp_path / "out") == read_chat(source)


def test_a_folder_without_either_stays_without(tmp_path):
    source = theirs(tmp_path / "in")
    assert read_chat(source) == NO_CHAT
    assert main(["hf-import", "--from", str(source), "--out", str(tmp_path / "run")]) == 0
    assert main(["hf-export", "--workdir", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    assert "chat_template" not in read_json(tmp_path / "out/tokenizer_config.json")
    assert read_json(tmp_path / "out/generation_config.json")["eos_token_id"] == 2


def test_another_tokenizer_has_no_use_for_either(tmp_path):
    source = theirs(tmp_path / "in", TEMPLATE, ENDS)
    HfTokenizer(peer.word_tokenizer().to_str()).save(epath.Path(tmp_path / "other"))
    words = ["--from", str(source), "--out", str(tmp_path / "run"), "--tokenizer", str(tmp_path / "other")]
    assert main(["hf-import", *words]) == 0
    assert find_chat(tmp_path / "run") == NO_CHAT


def test_where_each_is_read_first(tmp_path):
    """A file of a template before the tokenizer's config, the config of generation before the model's."""
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": OTHER})
    write_json(tmp_path / "config.json", {"eos_token_id": [1, 2]})
    assert read_chat(tmp_path) == Chat(OTHER, [1, 2])
    write_json(tmp_path / "generation_config.json", {"eos_token_id": ENDS})
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert read_chat(tmp_path) == Chat(TEMPLATE, ENDS)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": 2})
    assert read_chat(tmp_path) == Chat(TEMPLATE, None)


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("tokenizer_config.json", '{"chat_template": 1}', "neither a text nor a list"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "neither a text nor a list"),
        ("tokenizer_config.json", "[]", "not an object"),
        ("generation_config.json", '{"eos_token_id": ["</s>"]}', "must be an id or a list of ids"),
        ("chat_template.jinja", b"\xff", "is not UTF-8"),
    ],
)
def test_bad_files_are_named(file, content, message, tmp_path):
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=f"{file}.*{message}"):
        read_chat(tmp_path)


def test_the_end_of_our_documents_is_among_the_ends():
    tokenizer = HfTokenizer(peer.word_tokenizer().to_str())
    assert all_ends(tokenizer, NO_CHAT) == 2
    assert all_ends(tokenizer, Chat(None, ENDS)) == ENDS
    assert all_ends(tokenizer, Chat(None, [17])) == [17, 2]


def test_a_run_goes_back_to_its_import(tmp_path, capsys):
    """Over any number of runs; one that is gone is told, and two that name each other end."""

    def record(name, **values):
        write_json(tmp_path / name / "run.json", {"config": {"init_from": None}} | values)
        return str(tmp_path / name)

    chat = Chat([{"name": "default", "template": TEMPLATE}], ENDS)
    first = record("first", imported={"family": "llama", "from": "x", "chat": json.loads(json.dumps(chat._asdict()))})
    second = record("second", config={"init_from": first})
    assert find_chat(record("third", config={"init_from": second})) == find_chat(first) == chat
    assert find_chat(record("fresh")) == NO_CHAT and not capsys.readouterr().out
    assert find_chat(record("lost", config={"init_from": str(tmp_path / "none")})) == NO_CHAT
    assert f"{tmp_path / 'none'} is gone" in capsys.readouterr().out
    record("first", config={"init_from": second})
    assert find_chat(second) == NO_CHAT
