"""A comparison's page in a real browser: what is seen, clicked, filtered and never run."""

import os
import re
import shutil
import time
from dataclasses import replace

import pytest

from polyattn.report.verdict import page, write_page
from polyattn.trace.compare import Verdict
from tests.report.verdict.verdicts import HOSTILE, different, endless, hostile, long, same, unknown

pytest.importorskip("selenium", reason="selenium is not installed")
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage --window-size=1440,1200"
)

READ = "return document.readyState === 'complete' && location.href === arguments[0]"

# how much of the chart has the culprit's colour of a bright page, after an event if one is named
RED = """
    if (arguments[0]) window.dispatchEvent(new Event(arguments[0]));
    const canvas = document.getElementById('curve');
    const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let red = 0;
    for (let at = 0; at < data.length; at += 4)
        if (data[at] === 200 && data[at + 1] === 16 && data[at + 2] === 46) red++;
    return red"""


class Browser:
    """A browser with one page: `logged` has what its console said since the page was opened."""

    def __init__(self, driver, folder):
        self.driver, self.folder, self.count = driver, folder, 0

    def open(self, verdict, change=lambda text: text, ready=True):
        self.count += 1
        path = write_page(verdict, self.folder / f"{self.count}.html")
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
        self.driver.get_log("browser")
        self.driver.get(path.as_uri())
        self.wait(lambda: self.run(READ, path.as_uri()))  # get() was seen to return amid a page
        if ready:
            self.wait(lambda: self.run("return document.documentElement.className === 'js'"))
        return self

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, test):
        return WebDriverWait(self.driver, 20, 0.05).until(lambda _: test())

    def one(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector):
        return self.one(selector).text

    def logged(self):
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def names(self):
        """The names in the table, of the rows that are in sight."""
        script = """return [...document.querySelectorAll('#table .row')]
            .sort((a, b) => parseFloat(a.style.top) - parseFloat(b.style.top))
            .map((row) => row.querySelector('.name').textContent)"""
        return self.run(script)

    def line(self, name):
        """A module's line in the tree."""
        return self.one(f'#tree .row[data-path="{name}"]')

    def chosen(self):
        """The name in the panel of what was chosen."""
        found = self.all("#details .name")
        return found[0].text if found else None


def _binary():
    return next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    binary, driver = _binary(), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium with its chromedriver; scripts/browser installs them as root")
    options = Options()
    options.binary_location = binary
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service(driver, env={**os.environ, "SE_OFFLINE": "true"})
    started = Chrome(options=options, service=service)
    try:
        yield Browser(started, tmp_path_factory.mktemp("pages"))
    finally:
        started.quit()


class TestWhatIsSeen:
    def test_verdict_culprit_and_chart(self, browser):
        browser.open(different())
        assert browser.text("h1").endswith(
            "different: the code of layers.1 itself: what it hands to layers.1.act"
        )
        assert browser.one("h1").is_displayed()
        line = browser.line("layers.1")
        assert line.is_displayed()
        assert {"culprit", "chosen"} <= set(line.get_attribute("class").split())
        row = browser.one("#table .row.chosen")
        assert "layers.1" in row.text
        assert "culprit" in row.text
        assert browser.chosen() == "layers.1"
        assert not browser.one("#static").is_displayed()
        assert browser.logged() == []

    def test_chart_is_painted_with_the_culprit(self, browser):
        browser.open(different())
        browser.wait(lambda: browser.run(RED) > 300)
        assert "layers.1" in browser.one("#curve").get_attribute("aria-label")
        browser.open(same())
        browser.wait(lambda: browser.run("return document.getElementById('curve').width") > 600)
        assert browser.run(RED) == 0

    @pytest.mark.parametrize(
        ("verdict", "said"),
        [
            (same, "same: no module's error is above its threshold"),
            (unknown, "cannot say whether they are the same:"),
            (lambda: unknown(1), "cannot say whether they are the same:"),
            (endless, "different: the output of m.2; its inputs agree"),
            (lambda: replace(different(), rows=()), "different: the code of layers.1"),
            (lambda: different(None), "different: the code of layers.1"),
            (lambda: different(300, 2), "different: the code of layers.1"),
            (lambda: replace(different(), culprit=None, equal=True), "same"),
        ],
        ids=["same", "empty", "unknown", "endless", "no rows", "no steps", "steps", "no culprit"],
    )
    def test_every_kind_of_verdict(self, browser, verdict, said):
        given = verdict()
        browser.open(given, ready=bool(given.rows))
        assert said in browser.text("h1")
        assert browser.logged() == []
        if given.rows:
            for key in ("order", "out", "ratio", "module"):
                browser.one(f'#table [data-key="{key}"]').click()
            assert browser.names()
            assert browser.logged() == []

    def test_every_verdict_of_rows_has_a_colour_a_shape_and_a_meaning(self, browser):
        verdicts = ("culprit", "differs", "inherited", "cannot say", "extra", "missing", "same")
        row = different().rows[0]
        rows = tuple(replace(row, module=one, verdict=one) for one in verdicts)
        browser.open(Verdict(equal=False, rows=rows))
        chips = browser.all("#verdicts button")
        assert [chip.get_attribute("data-verdict") for chip in chips] == list(verdicts)
        assert all(chip.get_attribute("title") for chip in chips)
        glyphs = browser.run(
            "return [...document.querySelectorAll('#verdicts canvas')]"
            ".map((one) => one.toDataURL())"
        )
        assert len(set(glyphs)) == len(verdicts)
        assert browser.logged() == []

    def test_dark_and_light(self, browser):
        seen = []
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            browser.open(different())
            colour = "return getComputedStyle(document.body).backgroundColor"
            seen.append([int(part) for part in re.findall(r"\d+", browser.run(colour))])
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        assert min(seen[0]) > 200
        assert max(seen[1]) < 60

    def test_print_has_the_chart_and_a_table(self, browser):
        browser.open(different())
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        try:
            assert browser.one("#static table").is_displayed()
            assert browser.one("#curve").is_displayed()
            assert not browser.one("#tree").is_displayed()
            assert not browser.one("#table").is_displayed()
        finally:
            browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        features = [{"name": "prefers-color-scheme", "value": "dark"}]
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.wait(lambda: browser.run(RED) == 0)  # another red on a dark screen
        assert browser.run(RED, "beforeprint") > 300  # but on paper
        assert browser.run(RED, "afterprint") == 0
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        printed = browser.driver.execute_cdp_cmd("Page.printToPDF", {})
        assert len(printed["data"]) > 10_000
        assert browser.run("return document.documentElement.className") == "js"


class TestHostile:
    def test_names_run_nothing_and_are_shown(self, browser):
        browser.open(hostile())
        browser.one("#tree-open").click()
        for at in range(0, 700, 200):  # bring every row and line into the document
            browser.run(
                "for (const id of ['tree', 'table'])"
                " document.getElementById(id).scrollTop = arguments[0]",
                at,
            )
            time.sleep(0.05)
        assert browser.run("return window.hit") is None
        assert browser.run("return document.images.length + document.scripts.length") == 2
        assert browser.all("svg, iframe, img") == []
        assert HOSTILE[0] in browser.text("h1")
        assert browser.run("return document.title").startswith("different: the code of '</script>")
        assert browser.logged() == []
        for name in HOSTILE:
            for box in ("#details", "#table", "#tip"):
                assert "\u202e" not in browser.run(
                    "return document.querySelector(arguments[0]).textContent", box
                ), name

    def test_wide_and_long_names_do_not_widen_the_page(self, browser):
        browser.open(hostile())
        wide = "return document.documentElement.scrollWidth - window.innerWidth"
        assert browser.run(wide) <= 0

    def test_policy_holds(self, browser):
        browser.open(different())
        stopped = browser.run("""
            const said = [];
            document.addEventListener('securitypolicyviolation',
                (event) => said.push(event.violatedDirective));
            try { document.body.innerHTML += '<b>x</b>'; said.push('html'); }
            catch { said.push('no html'); }
            const script = document.createElement('script');
            try { script.textContent = 'window.hit = 1'; } catch { said.push('no script'); }
            document.body.append(script);
            const image = new Image();
            image.src = 'https://example.invalid/x.png';
            const style = document.createElement('style');
            style.textContent = 'body { display: none }';
            document.head.append(style);
            const wanted = ['img-src', 'style-src-elem'], end = performance.now() + 20000;
            return new Promise((done) => {
                const look = () => {
                    if (performance.now() < end && !wanted.every((one) => said.includes(one)))
                        setTimeout(look, 50);
                    else
                        done([said, window.hit, getComputedStyle(document.body).display]);
                };
                setTimeout(look, 300);
            })""")
        said, hit, display = stopped
        assert "html" not in said
        assert {"no html", "no script", "img-src", "style-src-elem"} <= set(said)
        assert (hit, display) == (None, "block")

    def test_a_page_whose_data_is_damaged_shows_what_is_static(self, browser):
        browser.open(different(), lambda text: text.replace('id="data">{', 'id="data">'), False)
        assert browser.one("#failed").is_displayed()
        assert browser.one("#static table").is_displayed()
        assert not browser.one("#explorer").is_displayed()

    def test_without_scripts(self, browser):
        command = "Emulation.setScriptExecutionDisabled"
        browser.driver.execute_cdp_cmd(command, {"value": True})
        try:
            browser.open(different(), ready=False)
            assert "layers.1" in browser.text("h1")
            assert browser.one("#static table").is_displayed()
            assert "layers.1" in browser.text("#static tr.culprit")
            assert not browser.one("#explorer").is_displayed()
        finally:
            browser.driver.execute_cdp_cmd(command, {"value": False})


class TestWhatIsDone:
    def test_a_node_of_the_tree_selects_the_row(self, browser):
        browser.open(different())
        browser.line("layers.2").click()
        assert browser.chosen() == "layers.2"
        row = browser.one("#table .row.chosen")
        assert row.text.splitlines()[1].startswith("layers.2")
        box, inside = browser.one("#table").rect, row.rect
        assert box["y"] <= inside["y"] < box["y"] + box["height"]
        browser.line("layers.2").find_element(By.CSS_SELECTOR, ".twist").click()
        browser.line("layers.2.down").click()
        assert browser.chosen() == "layers.2.down"
        browser.line("layers.2").find_element(By.CSS_SELECTOR, ".twist").click()
        assert not browser.all('#tree .row[data-path="layers.2.down"]')

    def test_a_row_of_the_table_selects_the_node(self, browser):
        browser.open(different())
        browser.one("#table").send_keys(Keys.END)
        assert browser.chosen() == "layers.2.down"
        line = browser.line("layers.2.down")  # its parents were unfolded
        assert "chosen" in line.get_attribute("class")
        browser.one("#table").send_keys(Keys.HOME)
        assert browser.chosen() == "(model)"

    def test_curve_by_pointer_and_keyboard(self, browser):
        browser.open(different())
        browser.one("#curve-culprit").click()
        curve = browser.one("#curve")
        browser.run("arguments[0].scrollIntoView({block: 'center'})", curve)
        said = None
        for y in range(-150, 150, 12):  # the culprit is in the middle
            ActionChains(browser.driver, 0).move_to_element_with_offset(curve, 22, y).perform()
            tip = browser.one("#tip")
            if tip.is_displayed() and "input" in tip.text:
                said = tip.text
                break
        assert said is not None
        name = said.splitlines()[0]
        for part in (name, "step", "call", "error", "threshold"):
            assert part in said
        ActionChains(browser.driver, 0).click().perform()
        assert browser.chosen() == name
        before = browser.one("#details").text
        curve.send_keys(Keys.ARROW_LEFT)
        assert browser.one("#details").text != before
        ActionChains(browser.driver, 0).drag_and_drop_by_offset(curve, 120, 0).perform()
        assert browser.logged() == []

    def test_filter_and_verdicts(self, browser):
        browser.open(different())
        total = browser.text("#table-said")
        box = browser.one("#filter")
        browser.one("body").send_keys("/")
        assert browser.driver.switch_to.active_element == box
        box.send_keys("layers.2 LINEAR")
        browser.wait(lambda: browser.text("#table-said") != total)
        assert set(browser.names()) == {"layers.2.up", "layers.2.down"}
        lines = browser.run(
            "return [...document.querySelectorAll('#tree .row')].map((row) => row.dataset.path)"
        )
        assert set(lines) == {"", "layers", "layers.2", "layers.2.up", "layers.2.down"}
        browser.one('#verdicts [data-verdict="inherited"]').click()
        assert browser.text("#table-said").startswith("4 of ")  # two steps, two modules
        box.send_keys(Keys.CONTROL, "a")
        box.send_keys("nothing has this name")
        browser.wait(lambda: browser.text("#table-said").startswith("0 of "))
        browser.one("#reset").click()
        assert browser.text("#table-said") == total
        assert box.get_attribute("value") == ""
        assert browser.logged() == []

    def test_sort(self, browser):
        browser.open(different(None))
        cell = "return [...document.querySelectorAll('#table [role=columnheader]')]"
        at = browser.run(cell + ".findIndex((one) => one.querySelector('[data-key=out]'))")

        def column():
            return browser.run(
                "return [...document.querySelectorAll('#table .row')].sort((a, b) => "
                "parseFloat(a.style.top) - parseFloat(b.style.top))"
                ".map((row) => row.children[arguments[0]].textContent)",
                at,
            )

        browser.one('#table [data-key="out"]').click()
        down = [float(text) for text in column()]
        assert down == sorted(down, reverse=True)
        assert down[0] > down[-1]
        head = browser.one('#table [data-key="out"]').find_element(By.XPATH, "..")
        assert head.get_attribute("aria-sort") == "descending"
        browser.one('#table [data-key="out"]').click()
        assert [float(text) for text in column()] == sorted(down)

    def test_what_is_not_known_is_sorted_last(self, browser):
        browser.open(endless())
        for _ in range(2):
            browser.one('#table [data-key="ratio"]').click()
            first = browser.one('#table .row[aria-rowindex="2"]')
            assert re.search(r"\d|\u221e", first.text.split("\n")[-2])

    def test_steps_by_slider_strip_and_cells(self, browser):
        browser.open(different(4))
        slider, said = browser.one("#axis-slider"), browser.one("#axis-said")
        assert said.text == "all 4 steps"
        slider.send_keys(Keys.HOME)
        slider.send_keys(Keys.ARROW_RIGHT)
        assert said.text.startswith("step 0: worst error ")
        assert browser.text("#table-said") == "13 of 52 calls"
        browser.one("#axis-on").click()
        assert said.text.startswith("step 1")
        assert not any(x.text.endswith("culprit") for x in browser.all("#tree .row"))
        strip = browser.one("#axis-strip")
        width = strip.rect["width"]
        actions = ActionChains(browser.driver, 0)
        actions.move_to_element_with_offset(strip, int(width * 0.4), 0).click().perform()
        assert said.text.startswith("step 3")
        assert "step 3" in browser.text("#details")  # the module chosen, in that step
        cells = browser.line("layers.1").find_element(By.CSS_SELECTOR, "canvas[data-strip]")
        wide = cells.rect["width"]
        actions = ActionChains(browser.driver, 0)
        actions.move_to_element_with_offset(cells, int(wide * 0.125), 0).click().perform()
        assert said.text.startswith("step 2")
        assert browser.chosen() == "layers.1"
        browser.one("#axis-all").click()
        assert browser.text("#table-said") == "52 of 52 calls"

    def test_calls_are_the_axis_where_there_are_no_steps(self, browser):
        browser.open(same())
        assert browser.text("#axis-said") == "all 2 forward passes"
        browser.open(different(None))
        assert not browser.one("#axis").is_displayed()

    def test_tree_by_keyboard(self, browser):
        browser.open(different(None))
        tree = browser.one("#tree")
        tree.send_keys(Keys.HOME)
        assert browser.chosen() == "(model)"
        tree.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
        assert browser.chosen() == "layers.0"
        tree.send_keys(Keys.ARROW_RIGHT)
        assert browser.line("layers.0").get_attribute("aria-expanded") == "true"
        tree.send_keys(Keys.ARROW_RIGHT)
        assert browser.chosen() == "layers.0.up"
        tree.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
        assert browser.line("layers.0").get_attribute("aria-expanded") == "false"
        assert browser.one("#details .name").is_displayed()


class TestMany:
    def test_twenty_thousand_rows_stay_fast(self, browser):
        verdict = long(20_000)
        assert len(page(verdict)) < 4_000_000
        began = time.monotonic()
        browser.open(verdict)
        assert browser.chosen() == "layers.1"
        assert browser.text("#table-said").startswith("20000 of 20000 calls; ")
        assert browser.one(".left-out").is_displayed()
        browser.one("#axis-back").click()
        browser.one("#axis-all").click()
        browser.one("#filter").send_keys("down")
        browser.wait(lambda: "20000 of 20000" not in browser.text("#table-said"))
        spent = browser.run("""
            const began = performance.now();
            for (let at = 0; at < 5; at++) {
                document.getElementById('curve-in').click();
                document.getElementById('axis-on').click();
                document.querySelector('#table [data-key=out]').click();
            }
            document.getElementById('reset').click();
            return performance.now() - began""")
        assert spent < 5_000, "16 redraws of everything, on a machine that does other things too"
        assert time.monotonic() - began < 60
        assert browser.run("return document.querySelectorAll('#explorer *').length") < 3_000
        assert browser.logged() == []
