"""The folder of a run is known as one, whatever another process of the run has just made in it."""

import pytest
from etils import epath

from lmjax.errors import UserError
from lmjax.workdir import check_folder


@pytest.mark.parametrize(
    "names", [[], ["lock"], ["lock", "tokenizer", ".run.json.ab12cd34.tmp"], ["run.json", "checkpoints"]]
)
def test_a_folder_of_a_run_that_begins(tmp_path, names):
    for name in names:
        (tmp_path / name).touch()
    check_folder(epath.Path(tmp_path))
    check_folder(epath.Path(tmp_path / "not there"))


def test_another_folder_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError, match="is not empty and is not the workdir of a run"):
        check_folder(epath.Path(tmp_path))


def test_a_run_that_appears_meanwhile(tmp_path, monkeypatch):
    """`run.json` and what follows are written between two looks of another process."""
    look = type(epath.Path(tmp_path)).exists

    def exists(path):
        seen = look(path)
        for name in ("run.json", "metrics.jsonl"):
            (tmp_path / name).touch()
        return seen

    monkeypatch.setattr(type(epath.Path(tmp_path)), "exists", exists)
    check_folder(epath.Path(tmp_path))
