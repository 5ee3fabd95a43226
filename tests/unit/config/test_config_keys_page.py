"""docs/keys.md: every key, and as the code has it."""

import re
import runpy
from pathlib import Path

from rayformer.config.job import Job
from rayformer.config.keys import is_list, keys_of, section_of

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "keys.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date():
    assert runpy.run_path(str(DOCS / "make_keys.py"))["keys_page"]() == PAGE, "run python docs/make_keys.py"


def test_the_page_has_every_key_and_a_sentence_for_each():
    rows = dict(re.findall(r"^\| `([^`]+)` \|.*\| ([^|]+) \|$", PAGE, re.MULTILINE))
    keys = {
        f"{name}[i].{key}" if is_list(field) else f"{name}.{key}"
        for name, field in Job.model_fields.items()
        for key in keys_of(section_of(field) or Job)
    }
    inner = {key for key in rows if key.count(".") > 1}
    assert keys | {"data.train[i].path", "data.train[i].weight", "model.factory"} <= set(rows)
    assert set(rows) - keys - inner == {"model.factory"}
    assert [key for key, sentence in rows.items() if not re.fullmatch(r"\S.{10,}\.", sentence)] == []
