"""The code in docs/tables.md runs, one block after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tables.md"


@pytest.mark.slow
def test_the_code_on_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    ours = [block for block in blocks if "prefetchpipe" in block]
    assert (len(blocks), len(ours)) == (4, 3)
    names: dict[str, Any] = {}
    for block in ours:
        code = block.replace("/tmp/", f"{tmp_path}/").replace("1_000_000", "10_000").replace("50_000", "500")
        exec(compile(code, str(PAGE), "exec"), names)
    assert capsys.readouterr().out.startswith("[[")
