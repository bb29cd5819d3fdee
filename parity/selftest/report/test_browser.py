"""The page in a headless Chromium, driven by its chromedriver: it renders, filters, links, and complains of nothing."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parity.cli.main import main
from parity.selftest.report import example

pytest.importorskip("jinja2", reason="the report needs jinja2: pip install 'indexer-parity[report]'")
pytest.importorskip("matplotlib", reason="the report needs matplotlib: pip install 'indexer-parity[report]'")

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (BROWSER and DRIVER), reason="no Chromium here (Debian: apt-get install chromium chromium-driver)"
    ),
]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Driver:
    """The few commands of the WebDriver protocol that the tests need."""

    def __init__(self, port: int, profile: Path) -> None:
        self.base = f"http://127.0.0.1:{port}"
        options = {"binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        found = self.ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.base += f"/session/{found['sessionId']}"

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, address: str) -> None:
        self.ask("POST", "/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def log(self, kind: str) -> list[Any]:
        return self.ask("POST", "/se/log", {"type": kind})

    def size(self, width: int, height: int) -> None:
        self.ask("POST", "/window/rect", {"width": width, "height": height})

    def emulate(self, **features: str) -> None:
        named = [
            {"name": name.replace("_", "-"), "value": value} for name, value in features.items() if name != "media"
        ]
        self.tools("Emulation.setEmulatedMedia", {"media": features.get("media", ""), "features": named})

    def tools(self, command: str, parameters: Any) -> Any:
        return self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Driver]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(
        [str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as child:
        try:
            for _ in range(100):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5):
                    break
                time.sleep(0.1)
            driver = Driver(port, folder / "profile")
            try:
                yield driver
            finally:
                driver.ask("DELETE", "")
        finally:
            child.terminate()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder = tmp_path_factory.mktemp("browser")
    reports = {"gate": example.gate(), "explain": example.explained(), "recall": example.swept()}
    reports["memory"] = example.remembered()
    for name, report in reports.items():
        (folder / f"{name}.json").write_text(json.dumps(report))
    out = folder / "page.html"
    assert main(["report", *(str(folder / f"{name}.json") for name in reports), "-o", str(out)]) == 0
    with chromium(folder) as driver:
        driver.open(out.as_uri())
        yield driver


def test_it_renders_with_nothing_on_the_console_and_nothing_fetched(page: Driver) -> None:
    assert page.run("return document.querySelector('h1 .badge').textContent") == "failed"
    boxes = page.run("return [...document.querySelectorAll('figure svg')].map((x) => x.getBoundingClientRect().height)")
    assert len(boxes) == 6 and min(boxes) > 100
    assert page.log("browser") == []
    sent = [json.loads(entry["message"])["message"] for entry in page.log("performance")]
    addresses = [each["params"]["request"]["url"] for each in sent if each["method"] == "Network.requestWillBeSent"]
    # The browser's own start page (chrome:) is in the log too.
    assert any(address.startswith("file:") for address in addresses)
    assert not [address for address in addresses if address.startswith(("http", "ws"))]


def test_the_console_is_listened_to(page: Driver) -> None:
    page.run("console.error('heard')")
    assert any("heard" in entry["message"] for entry in page.log("browser"))


def test_links_lead_to_their_sections(page: Driver) -> None:
    links = page.run("return [...document.querySelectorAll('nav a')].map((x) => x.getAttribute('href'))")
    assert len(links) >= 8
    for link in links:
        page.run("document.querySelector(`nav a[href='${arguments[0]}']`).click()", link)
        assert page.run("return location.hash") == link
        top = page.run("return document.querySelector(arguments[0]).getBoundingClientRect().top", link)
        bottom = page.run("return innerHeight + scrollY >= document.documentElement.scrollHeight - 2")
        assert abs(top) < 2 or bottom, f"{link} is not scrolled to"


SHOWN = "return [...document.querySelectorAll('#check-table tbody tr')].filter((x) => x.offsetHeight).length"
TYPE = "const x = document.getElementById('filter-text'); x.value = arguments[0]; x.dispatchEvent(new Event('input'))"


def test_filters_hide_rows_and_say_how_many_are_left(page: Driver) -> None:
    everything = page.run(SHOWN)
    assert everything == 8
    page.run(TYPE, "mine:logits")
    assert page.run(SHOWN) == 4
    assert page.run("return document.getElementById('filter-count').textContent") == "4 of 8 checks"
    page.run("document.querySelector('.filters input[value=\"failed\"]').click()")
    assert page.run(SHOWN) == 3
    page.run(TYPE, "no such check")
    assert page.run(SHOWN) == 0
    page.run(TYPE, "")
    page.run("document.querySelector('.filters input[value=\"failed\"]').click()")
    assert page.run(SHOWN) == everything


COLOURS = """
const style = getComputedStyle(document.body);
const text = getComputedStyle(document.querySelector('figure svg text'));
return [style.backgroundColor, style.color, text.fill]
"""


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2) of an rgb(...) colour."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_are_readable_figures_too(page: Driver, theme: str) -> None:
    page.emulate(prefers_color_scheme=theme)
    ground, *inks = page.run(COLOURS)
    assert (luminance(ground) > 0.5) == (theme == "light")
    for ink in inks:
        high, low = sorted((luminance(ground), luminance(ink)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 7, f"{ink} on {ground}"
    page.emulate()


def test_a_phone_scrolls_tables_and_not_the_page(page: Driver) -> None:
    page.tools(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    assert page.run("return document.documentElement.scrollWidth") <= 390
    page.tools("Emulation.clearDeviceMetricsOverride", {})


def test_print_shows_all_numbers_and_no_controls(page: Driver) -> None:
    page.emulate(media="print")
    assert (
        page.run("return document.querySelector('nav').offsetHeight + document.querySelector('.filters').offsetHeight")
        == 0
    )
    page.run("window.dispatchEvent(new Event('beforeprint'))")
    hidden = "return [...document.querySelectorAll('figure details table')].filter((x) => !x.offsetHeight).length"
    assert page.run(hidden) == 0
    page.emulate()
