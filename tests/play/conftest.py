"""A browser and a client of the page's server, if installed."""

import shutil

import pytest


@pytest.fixture(scope="module")
def browser():
  """Of a file: while it is open, `asyncio.run` fails in the whole process."""
  playwright = pytest.importorskip("playwright.sync_api")
  chromium = shutil.which("chromium") or shutil.which("google-chrome")
  if chromium is None:
    pytest.skip("there is no chromium")
  with playwright.sync_playwright() as driver:
    options = {"executable_path": chromium, "args": ["--no-sandbox"]}
    browser = driver.chromium.launch(**options)
    yield browser
    browser.close()


@pytest.fixture
def client_of():
  """Creates a client of the server of an inspector's page."""
  pytest.importorskip("httpx")
  testclient = pytest.importorskip("starlette.testclient")
  from loopjax.play import server

  def make(*arguments):
    app = server.make(*arguments)
    return testclient.TestClient(app, base_url="http://localhost:8000")

  return make
