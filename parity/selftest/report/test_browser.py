"""The page in a headless Chromium, driven by Selenium: it renders, filters and links, and its console stays empty."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parity.cli.main import main
from parity.command import finite
from parity.selftest.report import example

pytest.importorskip("jinja2", reason="the report needs jinja2: pip install 'indexer-parity[report]'")
pytest.importorskip("matplotlib", reason="the report needs matplotlib: pip install 'indexer-parity[report]'")
pytest.importorskip("selenium", reason="the browser tests need selenium: pip install 'indexer-parity[dev]'")

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
# A browser that is installed and does not start is an error of the fixture, not a reason to skip.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (BROWSER and DRIVER), reason="no Chromium here (Debian: apt-get install chromium chromium-driver)"
    ),
]
FLAGS = [
    "--headless",
    "--no-sandbox",  # Chromium refuses to run as root with it
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def start(profile: Path) -> Any:
    """A headless Chromium with an empty profile, and both of its logs recorded."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in [*FLAGS, f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # With the path of a driver Selenium looks for none, and so downloads none.
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=str(DRIVER)))


def emulate(page: Any, media: str = "", **features: str) -> None:
    named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": named})


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("browser")
    reports = {"gate": finite(example.gate().to_json()), "explain": example.explained(), "recall": example.swept()}
    reports["memory"] = example.remembered()
    for name, report in reports.items():
        (folder / f"{name}.json").write_text(json.dumps(report))
    out = folder / "page.html"
    assert main(["report", *(str(folder / f"{name}.json") for name in reports), "-o", str(out)]) == 0
    driver = start(folder / "profile")
    try:
        driver.get(out.as_uri())
        yield driver
    finally:
        driver.quit()


def test_it_renders_with_nothing_on_the_console_and_nothing_fetched(page: Any) -> None:
    assert page.execute_script("return document.querySelector('h1 .badge').textContent") == "failed"
    boxes = page.execute_script(
        "return [...document.querySelectorAll('figure svg')].map((x) => x.getBoundingClientRect().height)"
    )
    assert len(boxes) == 6 and min(boxes) > 100
    assert page.get_log("browser") == []
    sent = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    addresses = [each["params"]["request"]["url"] for each in sent if each["method"] == "Network.requestWillBeSent"]
    # The browser's own start page (chrome:) is in the log too.
    assert any(address.startswith("file:") for address in addresses)
    assert not [address for address in addresses if address.startswith(("http", "ws"))]


def test_the_console_is_listened_to(page: Any) -> None:
    page.execute_script("console.error('heard')")
    assert any("heard" in entry["message"] for entry in page.get_log("browser"))


def test_links_lead_to_their_sections(page: Any) -> None:
    links = page.execute_script("return [...document.querySelectorAll('nav a')].map((x) => x.getAttribute('href'))")
    assert len(links) >= 8
    for link in links:
        page.execute_script("document.querySelector(`nav a[href='${arguments[0]}']`).click()", link)
        assert page.execute_script("return location.hash") == link
        top = page.execute_script("return document.querySelector(arguments[0]).getBoundingClientRect().top", link)
        bottom = page.execute_script("return innerHeight + scrollY >= document.documentElement.scrollHeight - 2")
        assert abs(top) < 2 or bottom, f"{link} is not scrolled to"


SHOWN = "return [...document.querySelectorAll('#check-table tbody tr')].filter((x) => x.offsetHeight).length"
TYPE = "const x = document.getElementById('filter-text'); x.value = arguments[0]; x.dispatchEvent(new Event('input'))"


def test_filters_hide_rows_and_say_how_many_are_left(page: Any) -> None:
    everything = page.execute_script(SHOWN)
    assert everything == 8
    page.execute_script(TYPE, "mine:logits")
    assert page.execute_script(SHOWN) == 4
    assert page.execute_script("return document.getElementById('filter-count').textContent") == "4 of 8 checks"
    page.execute_script("document.querySelector('.filters input[value=\"failed\"]').click()")
    assert page.execute_script(SHOWN) == 3
    page.execute_script(TYPE, "no such check")
    assert page.execute_script(SHOWN) == 0
    page.execute_script(TYPE, "")
    page.execute_script("document.querySelector('.filters input[value=\"failed\"]').click()")
    assert page.execute_script(SHOWN) == everything


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
def test_both_themes_are_readable_figures_too(page: Any, theme: str) -> None:
    emulate(page, prefers_color_scheme=theme)
    ground, *inks = page.execute_script(COLOURS)
    assert (luminance(ground) > 0.5) == (theme == "light")
    for ink in inks:
        high, low = sorted((luminance(ground), luminance(ink)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 7, f"{ink} on {ground}"
    emulate(page)


def test_a_phone_scrolls_tables_and_not_the_page(page: Any) -> None:
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    assert page.execute_script("return document.documentElement.scrollWidth") <= 390
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_print_shows_all_numbers_and_no_controls(page: Any) -> None:
    emulate(page, media="print")
    assert (
        page.execute_script(
            "return document.querySelector('nav').offsetHeight + document.querySelector('.filters').offsetHeight"
        )
        == 0
    )
    page.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    hidden = "return [...document.querySelectorAll('figure details table')].filter((x) => !x.offsetHeight).length"
    assert page.execute_script(hidden) == 0
    emulate(page)
