"""The README's example runs as it stands."""

import re

from repository import ROOT

README = ROOT / "README.md"


def test_the_kernel_example_runs(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    script = tmp_path / "example.py"  # a file, because compiled functions are cached beside their source
    script.write_text(example)
    names = {"__name__": "example"}
    exec(compile(example, str(script), "exec"), names)
    assert names["target"] == bytearray(range(256))


def test_it_names_the_two_commands_and_existing_documents():
    text = README.read_text()
    assert "make demo" in text
    assert "make test" in text
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#:]+)\)", prose):
        assert (README.parent / link).exists(), f"README links to {link}, which does not exist"
