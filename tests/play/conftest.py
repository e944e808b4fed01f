"""A browser, if installed."""

import shutil

import pytest


@pytest.fixture(scope="package")
def browser():
  playwright = pytest.importorskip("playwright.sync_api")
  chromium = shutil.which("chromium")
  if chromium is None:
    pytest.skip("there is no chromium")
  with playwright.sync_playwright() as driver:
    options = {"executable_path": chromium, "args": ["--no-sandbox"]}
    browser = driver.chromium.launch(**options)
    yield browser
    browser.close()
