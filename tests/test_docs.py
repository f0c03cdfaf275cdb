"""Every Python block of the documents runs as a script; those that need ranks run under torchrun."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks() -> list:
    found = []
    for document in DOCUMENTS:
        codes = re.findall(r"```python\n(.*?)```", document.read_text(), flags=re.DOTALL)
        found += [pytest.param(code, id=f"{document.stem}-{i}") for i, code in enumerate(codes)]
    return found


@pytest.mark.parametrize("code", blocks())
def test_block_runs(code, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(code)
    command = [sys.executable, str(script)]
    if "init_process_group" in code:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *launcher, str(script)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_documents_name_files_that_exist():
    for document in DOCUMENTS:
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"
