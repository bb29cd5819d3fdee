"""The page: what it holds, what it refuses, that it is one file, and that comparing marks what changed."""

import html.parser
import json
import re
from pathlib import Path

import pytest

from parity.cli.main import main
from parity.command import finite
from parity.report import compare, figures, inputs
from parity.report import write as writing
from parity.selftest.report import example

pytest.importorskip("jinja2", reason="the report needs jinja2: pip install 'indexer-parity[report]'")
pytest.importorskip("matplotlib", reason="the report needs matplotlib: pip install 'indexer-parity[report]'")


class Page(html.parser.HTMLParser):
    """Ids, links, fetched addresses, figures and open tags of a page."""

    VOID = frozenset({"meta", "link", "input", "br", "path", "use", "image", "rect", "line"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.labelled = 0
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.ids += [named["id"] or ""] if "id" in named else []
        if tag == "a":
            self.links.append(named.get("href") or "")
        for name in ("src", "href", "xlink:href", "data", "action"):
            value = named.get(name)
            if value and tag != "a" and not value.startswith(("#", "data:")):
                self.fetched.append(value)
        self.labelled += tag == "svg" and named.get("role") == "img" and bool(named.get("aria-labelledby"))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    found = {"gate": finite(example.gate().to_json()), "better": example.better().to_json()}
    found |= {"explain": example.explained()}
    found |= {"recall": example.swept(), "memory": example.remembered()}
    found |= {f"other{i}": report for i, report in enumerate(example.others())}
    for name, report in found.items():
        (folder / f"{name}.json").write_text(json.dumps(report))
    return {name: folder / f"{name}.json" for name in found}


@pytest.fixture(scope="module")
def text(files: dict[str, Path]) -> str:
    out = files["gate"].parent / "page.html"
    given = [str(path) for name, path in files.items() if name != "better"]
    assert main(["report", *given, "-o", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def test_the_page_is_one_well_formed_file_of_moderate_size(text: str) -> None:
    page = Page(text)
    assert not page.open and not page.fetched
    assert len(page.ids) == len(set(page.ids)), "an id occurs twice"
    assert {link[1:] for link in page.links} <= set(page.ids) and all(link.startswith("#") for link in page.links)
    assert len(text.encode()) < 2_000_000
    assert "http://" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text) and "https://" not in text
    assert "@import" not in text and "url(http" not in text


def test_every_figure_has_words_and_numbers(text: str) -> None:
    page = Page(text)
    count = text.count("<figure")
    assert count == page.labelled == text.count("<summary>Numbers</summary>") == 6
    assert figures.INK not in text and "currentColor" in text


def test_the_verdict_comes_first_and_everything_is_there(text: str) -> None:
    body = text[text.index("<body>") :]
    assert body.index('class="badge failed"') < body.index('id="levels"') < body.index('id="checks"')
    for section in ("rejections", "ratios", "explain-0", "recall-0", "memory-0", "story-0", "faults-0", "compile-0"):
        assert f'<section id="{section}"' in body, section
    for part in ("request 0, key 65", "the process died", "spills", "NVIDIA H200", "last-page-skipped", "0123abc"):
        assert part in body, part
    assert "not run: triton is not installed" in body and "real keys and queries may behave differently" in body


def test_what_a_report_says_is_text_and_never_markup(text: str) -> None:
    assert "<b>3</b>" not in text and "&lt;b&gt;3&lt;/b&gt;" in text


def test_themes_phones_and_print_are_provided_for(text: str) -> None:
    for part in ("prefers-color-scheme: dark", "@media print", "width=device-width", "max-width: 40rem"):
        assert part in text
    assert "Content-Security-Policy" in text and "default-src 'none'" in text


def test_the_same_files_give_the_same_page(files: dict[str, Path], tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert main(["report", str(files["gate"]), str(files["explain"]), "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()


def test_comparing_marks_what_changed(files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert main(["report", "--compare", str(files["gate"]), str(files["better"]), "-o", str(out)]) == 0
    text = out.read_text()
    table = compare.changes(example.gate(), example.better())
    found = {(line[0], line[1]): line[2:] for line in table.rows}
    assert found == {
        ("triton-fp8", "invariance/again"): ("-", "failed", "new"),
        ("mine:logits", "layout/exact"): ("failed", "passed", "better"),
        ("triton-bf16", "rounding/ordinary"): ("0.0041", "0.41", "ratio up"),
        ("triton-fp8", "resources/graph"): ("not run", "-", "gone"),
    }
    assert table.rows[0][4] == "new"
    assert compare.provenance(example.gate(), example.better()).rows == [("torch", "2.13.0", "2.14.0")]
    assert "What changed" in text and "was failed" in text and 'class="passed changed"' in text
    assert compare.changes(example.gate(), example.gate()).rows == []


def test_a_page_without_a_gate_report(files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(files["explain"]), "-o", str(out)]) == 0
    text = out.read_text()
    assert "Of the " in text[: text.index("<nav")] and 'id="levels"' not in text
    assert not Page(text).open


def test_pictures_are_files_of_their_own(files: dict[str, Path], tmp_path: Path) -> None:
    import xml.etree.ElementTree

    out = tmp_path / "page.html"
    words = ["report", str(files["gate"]), str(files["recall"]), "-o", str(out)]
    assert main([*words, "--pictures", str(tmp_path)]) == 0
    found = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert found == ["ratio-bars.svg", "recall0-0.svg", "recall0-needle-0.svg"]
    for name in found:
        root = xml.etree.ElementTree.fromstring((tmp_path / name).read_text())
        assert root.tag.endswith("svg") and "currentColor" not in (tmp_path / name).read_text()
    assert main([*words, "--pictures", str(tmp_path / "none")]) == 2


def test_mistakes_are_one_sentence(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"rows": [1]}')
    later = tmp_path / "later.json"
    later.write_text(json.dumps({**finite(example.gate().to_json()), "format": 3}))
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps({"kind": "indexer-parity/explain", "format": 2}))
    gate, explain = str(files["gate"]), str(files["explain"])
    for words, part in (
        ([], "expected at least one JSON file"),
        ([str(bad)], "bad.json: not a JSON file of gate"),
        ([str(later)], "later.json: report format 3, this version reads 2"),
        ([str(newer)], "report format 2, this version reads 1"),
        ([gate, gate], "a second gate report"),
        ([str(tmp_path / "none.json")], "none.json: No such file"),
        (["--compare", explain, gate], "--compare wants a gate report"),
        (["--compare", gate, explain], "--compare wants a gate report"),
        ([gate, "-o", str(tmp_path / "no" / "page.html")], "its folder does not exist"),
    ):
        assert main(["report", *words]) == 2, words
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert part in line and line.startswith("parity report: ")
    monkeypatch.setattr(writing, "MOST", 1000)
    assert main(["report", gate, "-o", str(tmp_path / "page.html")]) == 2
    assert "more than 1,000: give fewer files" in capsys.readouterr().err
    monkeypatch.setattr(writing.importlib.util, "find_spec", lambda name: None)
    assert main(["report", gate]) == 2
    assert "the report needs jinja2 and matplotlib: pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    "report, kind",
    [
        (example.gate().to_json(), "gate"),
        ({"kind": "indexer-parity/explain"}, "explain"),
        ({"kind": "bench store"}, "store_bench"),
        ({"kind": "something else", "rows": []}, None),
        ({"rows": []}, None),
        ([], None),
        *zip(example.others(), ("story", "compile", "bench", "faults"), strict=True),
    ],
)
def test_kinds_are_told_apart(report: object, kind: str | None) -> None:
    assert inputs.kind_of(report) == kind


def test_a_histogram_counts_every_ratio_once() -> None:
    found = figures.histogram(example.gate().rows)
    assert found is not None
    cells = [int(value) for line in found.table.rows for value in line[1:]]
    assert sum(cells) == 3  # the infinite one belongs to a failure, which is listed
    assert figures.histogram([]) is None
    assert [figures.thousands(x) for x in (512, 4096, 22000, 1 << 20)] == ["512", "4K", "22,000", "1M"]
    assert [figures.number(x) for x in (None, 0.00123456, 12345, "inf", "x")] == ["-", "0.00123", "12,345", "inf", "x"]
