"""The page of a program in a real browser: what is seen, sorted, filtered and never run."""

import os
import re
import shutil

import pytest

from polyattn.report.program import write_page
from tests.report.program.records import hostile, long, many, one_process

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage --window-size=1440,1200"
)
WIDE = "return document.documentElement.scrollWidth - window.innerWidth"
READ = "return document.readyState === 'complete' && location.href === arguments[0]"
COLOUR = "return getComputedStyle(arguments[0])[arguments[1]]"


class Browser:
    """A browser with one page of a record."""

    def __init__(self, driver, folder):
        self.driver, self.folder, self.count = driver, folder, 0

    def open(self, record):
        self.count += 1
        self.driver.get_log("browser")
        self.driver.get(address := write_page(record, self.folder / f"{self.count}.html").as_uri())
        self.wait(lambda: self.run(READ, address))  # get() was seen to return amid a long table
        return self

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, test):
        return WebDriverWait(self.driver, 60, 0.05).until(lambda _: test())

    def one(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def emulate(self, **features):
        listed = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": listed})

    def width(self, pixels):
        size = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def logged(self):
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def column(self, number):
        rows = self.all("#problems tbody tr")
        cells = [row.find_elements(By.TAG_NAME, "td")[number] for row in rows if row.is_displayed()]
        return [cell.text for cell in cells]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    binary = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium with its chromedriver; scripts/browser installs them as root")
    options = Options()
    options.binary_location = binary
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = Chrome(
        options=options, service=Service(driver, env={**os.environ, "SE_OFFLINE": "true"})
    )
    try:
        yield Browser(started, tmp_path_factory.mktemp("pages"))
    finally:
        started.quit()


def test_what_is_seen(browser):
    browser.open(many())
    assert browser.one("h1").text == (
        "2,260 attention calls in 7 processes, 2,207 (98 %) on its backends, 53 not"
    )
    for name in ("ran", "gains", "processes", "problems", "refused", "unseen"):
        assert browser.one(f"#{name}").is_displayed(), name
    assert "train.py --steps 3" in browser.one("dl").text
    assert "1.91" in browser.one("#gains").text
    assert "cut short" in browser.one("#processes").text
    assert "python -I tool.py" in browser.one("#unseen").text
    assert browser.logged() == []


def test_a_bar_is_as_long_as_its_share(browser):
    browser.open(many())
    bar = browser.one("#ran > svg.shares").rect["width"]
    parts = [part.rect["width"] / bar for part in browser.all("#ran > svg.shares rect")]
    assert parts == pytest.approx([2200 / 2260, 53 / 2260, 7 / 2260], abs=0.01)
    colours = [browser.run(COLOUR, part, "fill") for part in browser.all("#ran > svg.shares rect")]
    assert len(set(colours)) == 3
    legend = [browser.run(COLOUR, part, "fill") for part in browser.all("#ran .legend rect")]
    assert legend == colours


def test_dark_and_light(browser):
    seen = []
    for scheme in ("light", "dark"):
        browser.emulate(prefers_color_scheme=scheme)
        browser.open(many())
        body = browser.run(COLOUR, browser.one("body"), "backgroundColor")
        bars = browser.run(COLOUR, browser.one("#gains svg.times rect.ours"), "fill")
        seen.append(([int(part) for part in re.findall(r"\d+", body)], bars))
    browser.emulate()
    assert min(seen[0][0]) > 200
    assert max(seen[1][0]) < 60
    assert seen[0][1] != seen[1][1]


@pytest.mark.parametrize("pixels", [360, 700, 1000, 1900])
@pytest.mark.parametrize("record", [one_process, many, hostile, long])
def test_no_width_is_too_narrow(browser, pixels, record):
    browser.width(pixels)
    try:
        browser.open(record())
        assert browser.run(WIDE) <= 0
        numbers = [cell for cell in browser.all("td.number")[:60] if cell.text]
        assert all(cell.rect["height"] < 80 or "\n" not in cell.text for cell in numbers)
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_problems_are_sorted_and_filtered(browser):
    browser.open(many())
    assert browser.column(0) == ["1", "2", "3"]
    heads = browser.all("#problems th button")
    heads[1].click()
    assert [int(text.replace(",", "")) for text in browser.column(1)] == [2000, 200, 7]
    heads[1].click()
    assert [int(text.replace(",", "")) for text in browser.column(1)] == [7, 200, 2000]
    assert browser.all("#problems th")[1].get_attribute("aria-sort") == "ascending"
    for _ in range(2):
        heads[5].click()  # times stock: what was not measured is last either way
        assert browser.column(5)[-1] == ""
    box = browser.one("#filter")
    box.send_keys("FLOAT32 grad")
    browser.wait(lambda: len(browser.column(0)) == 1)
    assert browser.column(0) == ["3"]
    box.clear()
    box.send_keys("nothing is called this")
    browser.wait(lambda: browser.column(0) == [])
    assert browser.logged() == []


def test_hostile_text_runs_nothing(browser):
    browser.open(hostile())
    assert browser.run("return window.hit") is None
    assert browser.run("return document.images.length") == 0
    assert browser.run("return document.scripts.length") == 2
    assert "\u202e" not in browser.one("body").text
    assert browser.logged() == []


def test_without_scripts_and_on_paper(browser):
    command = "Emulation.setScriptExecutionDisabled"
    browser.driver.execute_cdp_cmd(command, {"value": True})
    try:
        browser.open(many())
        assert browser.all("#filter") == []
        assert browser.column(0) == ["1", "2", "3"]
    finally:
        browser.driver.execute_cdp_cmd(command, {"value": False})
    browser.open(many())
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert not browser.one("#filter").is_displayed()
    assert browser.one("#problems table").is_displayed()
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    printed = browser.driver.execute_cdp_cmd("Page.printToPDF", {})
    assert len(printed["data"]) > 10_000


def test_many_problems(browser):
    browser.open(long(700))
    assert len(browser.column(0)) == 500
    assert browser.logged() == []
