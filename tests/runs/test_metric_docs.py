"""The documentation lists the metrics."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("runs", "scaling", "data_parallel")
GROUPS = "train|eval|time|learn|env|loss|store|search|lag|actors|weights|learners|workers|exchange"


def test_docs_list_every_metric():
    docs = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in PAGES)
    files = (path for path in (ROOT / "corral").rglob("*.py") if "testing" not in path.parts)
    code = [path.read_text() for path in files if path.name != "migrate.py"]  # which has the old names
    names = {name for text in code for name in re.findall(rf'"((?:{GROUPS})/[a-z_]+)"', text)}
    assert {"loss/policy_gap", "exchange/timeouts"} <= names
    assert sorted(name for name in names - {"loss/total"} if f"`{name}`" not in docs) == []
