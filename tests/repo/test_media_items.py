"""Every requirement on pictures is a test named after it, or the docs say why it is not done."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "media.md"
WANTED = {
    # The list has no FET-19.
    **{f"FET-{number:02}": "fet" for number in (*range(1, 19), *range(20, 27))},
    **{f"PRE-{number:02}": "pre" for number in range(1, 16)},
    **{f"CAC-{number:02}": "cac" for number in range(1, 10)},
}
ROW = re.compile(r"^\| ((?:FET|PRE|CAC)-\d\d) \|([^|]*)\|([^|]*)\|$", re.MULTILINE)
TAG = re.compile(r"(?<![a-z])(fet|pre|cac)_(\d\d)(?!\d)")
NOT_DONE = "not done"


def rows() -> dict[str, tuple[str, str]]:
    """What the page says of each item: its proof and its note."""
    found = ROW.findall(PAGE.read_text())
    assert len({item for item, _, _ in found}) == len(found), "an item has two rows"
    return {item: (proof.strip(), note.strip()) for item, proof, note in found}


def proofs() -> dict[str, set[str]]:
    """Test files by the item that their tests are named after."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").glob("**/test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if not node.name.startswith("test_"):
                    continue
                for kind, number in TAG.findall(node.name):
                    found.setdefault(f"{kind.upper()}-{number}", set()).add(path.stem)
    return found


def test_the_page_has_every_item_once_and_no_other() -> None:
    assert sorted(rows()) == sorted(WANTED)


def test_every_item_is_proven_where_the_page_says_or_has_a_reason() -> None:
    found = proofs()
    wrong: dict[str, tuple[str, set[str]]] = {}
    for item, (proof, note) in rows().items():
        named = set(re.findall(r"`(test_\w+)`", proof))
        tested = found.get(item, set())
        is_reasoned = proof == NOT_DONE and len(note.split()) >= 5 and not tested
        is_proven = bool(named) and named == tested
        if not (is_reasoned or is_proven):
            wrong[item] = (proof, tested)
    assert not wrong


def test_no_test_is_named_after_an_item_that_is_not_on_the_list() -> None:
    assert set(proofs()) <= set(WANTED)
