"""What the documents refer to exists: links, command-line options, configuration fields, and quoted messages."""

import argparse
import ast
import re
from pathlib import Path

import pytest
import yaml

from opslot.cli import _parser, main
from opslot.trainer.config import RunConfig
from opslot.trainer.parse import _leaf_types, load_config
from opslot.trainer.prompts import MEDIA_PROMPT

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "examples/README.md"]


def anchors(document):
    """The anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    headings = (re.sub(r"[^\w\- ]", "", line.lower()) for line in re.findall(r"^#+ (.*)$", text, re.M))
    return {heading.strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_relative_links_resolve(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not link.startswith("http"):
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def options_of(parser):
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options_of(inner)


def test_options_and_fields_exist():
    commands = next(a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    fields = _leaf_types(RunConfig)
    sections = {field.rsplit(".", depth)[0] for field in fields for depth in (0, 1, 2)}
    known = {name: {*options_of(parser), "--traceback", "--help", "--help-all"} for name, parser in commands.items()}
    unknown = []
    for document in [*DOCUMENTS, *sorted(ROOT.glob("configs/**/*.yaml"))]:
        text = document.read_text()
        for command, arguments in re.findall(r"opslot (\w+)([^`\n#]*)", text):
            for option in re.findall(r"(?<!\S)(--?[a-zA-Z][\w.-]*)", arguments):
                is_field = option.removeprefix("--") in fields and command in ("train", "data")
                if command in known and option not in known[command] and not is_field:
                    unknown.append(f"{document.name}: opslot {command} {option}")
        for field in re.findall(r"`((?:train|data|model|evaluation|lora)\.[\w.]*\w)(?=[`:= ])", text):
            if field not in sections and not field.startswith("model.ops_implementation."):
                unknown.append(f"{document.name}: {field}")
    assert unknown == []


def test_yaml_in_the_documentation_is_valid():
    blocks = [
        (document.name, block)
        for document in DOCUMENTS
        for block in re.findall(r"^```yaml\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    ]
    assert len(blocks) >= 4
    for name, block in blocks:
        assert isinstance(yaml.safe_load(block), dict), name
    assert yaml.safe_load(MEDIA_PROMPT) == {"text": "How many circles?", "images": ["shapes.png"]}


@pytest.mark.parametrize("file", sorted(ROOT.glob("configs/**/*.yaml")), ids=lambda file: file.stem)
def test_configurations_are_read(file):
    assert load_config(file).train.output_dir


def test_shown_output_of_discover_is_that_of_the_command(capsys):
    shown = re.search(
        r"```text\n\$ opslot (discover \w+)\n(.*?)```", (ROOT / "docs/architectures.md").read_text(), re.S
    )
    assert main(shown[1].split()) == 0
    assert capsys.readouterr().out == shown[2]


def test_quoted_messages_exist():
    strings = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                strings.append("".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node.value)
    source = "\n".join(strings)
    cells = re.findall(r"^\| `(.+?)`", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    parts = [part.strip(" ;:'=") for cell in cells for part in re.split(r"\.\.\.|\b[NX]\b|X_| nan", cell)]
    assert len(parts) > 30
    assert [part for part in parts if part not in source] == []


def test_cells_of_the_design_are_short():
    rows = re.findall(r"^\|.*\|$", (ROOT / "docs/design.md").read_text(), re.M)
    assert [cell for row in rows for cell in row.split("|") if len(cell) > 200] == []
