"""The page of an offload: whole, readable in a browser, and of a report that was stored."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from polyattn.cli import main
from polyattn.errors import OffloadError
from polyattn.hooks import offload
from polyattn.hooks.layerwise_offload import OffloadReport
from polyattn.report.offload import page
from tests.hooks.layerwise_offload.small_models import frozen, inputs


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> OffloadReport:
    model = frozen()
    with offload(model, device="cpu", disk=tmp_path_factory.mktemp("weights")) as handle:
        for _ in range(3):
            model(inputs())
        return handle.report()


def test_it_is_stored_and_read(report: OffloadReport, tmp_path: Path) -> None:
    report.save(tmp_path / "report.json")
    assert OffloadReport.load(tmp_path / "report.json") == report
    for change in ({"schema": "x"}, {"units": [{"name": 3}]}, {"events": 3}, {"more": 1}):
        data = {**json.loads(report.to_json()), **change}
        with pytest.raises(OffloadError, match="no report of this version"):
            OffloadReport.from_json(json.dumps(data))
    with pytest.raises(OffloadError, match="cannot be read"):
        OffloadReport.load(tmp_path / "none.json")


def test_the_page_has_every_unit_and_loads_nothing(report: OffloadReport) -> None:
    text = page(report)
    assert all(f"blocks.{index}" in text for index in range(6))
    assert len(re.findall(r'<rect class="compute"', text)) == 18
    assert not re.search(r"(src|href)=|url\(", text)


def test_the_command(
    report: OffloadReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.save(tmp_path / "report.json")
    out = tmp_path / "page.html"
    assert main(["offload", "show", str(tmp_path / "report.json"), "--html", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "3 passes" in printed
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["offload", "show", str(tmp_path / "report.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passes"] == 3
    other = tmp_path / "other.html"
    other.write_text("something else")
    assert main(["offload", "show", str(tmp_path / "report.json"), "--html", str(other)]) == 2
    assert other.read_text() == "something else"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    binary = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    service = shutil.which("chromedriver")
    if binary is None or service is None:
        pytest.skip("no chromium with its chromedriver; scripts/browser installs them as root")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.ChromeService(service, env={**os.environ, "SE_OFFLINE": "true"})
    started = webdriver.Chrome(options=options, service=made)
    try:
        yield started
    finally:
        started.quit()


@pytest.mark.slow
def test_in_a_browser(report: OffloadReport, driver: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(report), encoding="utf-8")
    driver.get(path.as_uri())
    read = "return document.readyState === 'complete' && location.href === arguments[0]"
    wait = pytest.importorskip("selenium.webdriver.support.wait")
    wait.WebDriverWait(driver, 60, 0.05).until(lambda _: driver.execute_script(read, path.as_uri()))
    assert driver.find_element("css selector", "h1").is_displayed()
    bars = driver.find_elements("css selector", "rect.compute")
    assert len(bars) == 18
    widths = [bar.size["width"] for bar in bars]
    assert max(widths) > 1
    fill = driver.execute_script("return getComputedStyle(arguments[0]).fill", bars[0])
    assert fill not in ("", "rgb(0, 0, 0)")  # the page's own style may apply
    assert len(driver.find_elements("css selector", "table tr")) == 7
    assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
