"""A real browser on every page: nothing fails, nothing leaves the machine, figures are drawn."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboard.app import serve
from dashboard.report import write_report
from tests.dashboard.recording import Recording

pytestmark = pytest.mark.browser

FLAGS = [
    f"--{flag}"
    for flag in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
    )
]
PAGES = {  # and their titles
    "": "Overview",
    "residency": "Residency",
    "access": "Access",
    "access?mode=experts": "Access: experts",
    "memory": "Memory",
    "communication": "Communication",
}
DEMO = "demo/lru%2Bnone"
# What a link of the app does.
FOLLOW = """address => {
    history.pushState({}, '', address);
    dispatchEvent(new PopStateEvent('popstate'));
}"""
DRAWN = """[...document.querySelectorAll('#content .dash-graph')]
    .every(g => g.querySelector('.main-svg') && g.querySelector('.xaxislayer-above, .xy'))"""


class Watch:
    """Notes everything that a page must not do."""

    def __init__(self, page, local: str) -> None:
        self.page = page
        self.faults: list[str] = []
        note = self.faults.append
        page.on("console", lambda m: note(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: note(f"exception {error}"))
        page.on("requestfailed", lambda r: None if _is_cut_off(r) else note(f"failed {r.url}"))
        page.on("response", lambda r: note(f"{r.status} {r.url}") if r.status >= 400 else None)
        page.on("request", lambda r: None if _is_local(r.url, local) else note(f"left: {r.url}"))


def _is_cut_off(request) -> bool:
    """Whether the timer's question was under way when the test went to another page."""
    return "_dash-update-component" in request.url and "ERR_ABORTED" in str(request.failure)


def _is_local(url: str, local: str) -> bool:
    return url.startswith((local, "data:", "blob:"))


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("chromium is not installed (apt-get install chromium, or make chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("browser")
    Recording().write(root / "demo" / "lru+none")
    Recording(prefetch="popularity", hit_rate=0.8).write(root / "demo" / "popularity")
    Recording(ranks=4, steps=3).write(root / "ranks")
    return root


@pytest.fixture(scope="module")
def url(folder: Path) -> str:
    return serve(folder, port=0, block=False)


@pytest.fixture
def watched(browser, url: str) -> Iterator[Watch]:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    watch = Watch(context.new_page(), url)
    yield watch
    context.close()
    assert watch.faults == []


@pytest.fixture(scope="module")
def tab(browser, url: str) -> Iterator[Watch]:
    """The app, loaded once: that takes longer than any of its pages."""
    watch = Watch(browser.new_page(), url)
    load(watch, url)
    yield watch
    watch.page.close()


@pytest.fixture
def app(tab: Watch) -> Iterator[Watch]:
    """The loaded app, for tests that leave nothing behind in it."""
    tab.page.set_viewport_size({"width": 1440, "height": 900})
    yield tab
    faults, tab.faults[:] = list(tab.faults), []
    assert faults == []


def load(watch: Watch, address: str) -> None:
    watch.page.goto(address)
    watch.page.wait_for_selector("#content h1", timeout=30_000)
    watch.page.wait_for_function(DRAWN, timeout=30_000)


def follow(watch: Watch, url: str, path: str, run: str = DEMO) -> None:
    """Goes to a page as a link does, past one without figures: all that is drawn is new."""
    for one in ("memory" if path == "communication" else "communication", path):
        sign = "&" if "?" in one else "?"
        watch.page.evaluate(FOLLOW, f"{url}{one}{sign}run={run}")
        watch.page.wait_for_function(
            "title => document.querySelector('#content h1').textContent === title",
            arg=PAGES[one],
            timeout=30_000,
        )
    watch.page.wait_for_function(DRAWN, timeout=30_000)


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES)
def test_every_page_can_be_loaded(watched: Watch, url: str, path: str) -> None:
    sign = "&" if "?" in path else "?"
    load(watched, f"{url}{path}{sign}run={DEMO}")
    assert_page_is_whole(watched.page, path)


@pytest.mark.parametrize("path", PAGES)
def test_every_page_draws_its_figures_shares_nothing_and_fits(app: Watch, url: str, path) -> None:
    follow(app, url, path)
    page = app.page
    assert_page_is_whole(page, path)
    assert_nothing_is_shared(page)
    for width in (1440, 420):
        page.set_viewport_size({"width": width, "height": 860})
        page.wait_for_timeout(200)  # plotly lays itself out anew
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def assert_page_is_whole(page, path: str) -> None:
    graphs = page.locator("#content .dash-graph").count()
    if path == "communication":
        assert "one rank" in page.inner_text(".verdict") and graphs == 0
    else:
        assert any(character.isdigit() for character in page.inner_text(".verdict"))
        assert graphs and page.locator("#content table tbody tr").count() > 1
        assert page.locator(".modebar-btn").count() >= graphs


def assert_nothing_is_shared(page) -> None:
    titles = page.eval_on_selector_all(
        ".modebar-btn, button, a",
        "all => all.map(b => (b.dataset.title || '') + ' ' + b.textContent)",
    )
    assert titles
    assert not [t for t in titles if any(w in t.lower() for w in ("share", "cloud", "upload"))]


def test_the_matrix_of_ranks_has_its_numbers(app: Watch, url: str) -> None:
    follow(app, url, "communication", "ranks")
    texts = app.page.eval_on_selector_all(
        "#graph-matrix text", "all => all.map(text => text.textContent)"
    )
    assert texts.count("0") >= 8
    assert_nothing_is_shared(app.page)


def test_hovering_a_page_names_it_and_its_state(app: Watch, url: str) -> None:
    follow(app, url, "residency")
    plot = app.page.locator("#graph-residency .nsewdrag").first.bounding_box()
    app.page.mouse.move(plot["x"] + plot["width"] * 0.4, plot["y"] + plot["height"] * 0.15)
    text = app.page.wait_for_function(
        "document.querySelector('#graph-residency .hovertext')?.textContent", timeout=10_000
    ).json_value()
    assert " · page " in text
    assert "(2 device, 1 home, 3 none, 0 unknown)" in text
    assert any(f"state {code}" in text for code in range(4))


def test_a_copied_address_shows_the_same_and_controls_change_it(watched: Watch, url: str) -> None:
    load(watched, f"{url}access?run=demo/lru%2Bnone&step0=2&step1=4&mode=misses")
    page = watched.page
    assert "In steps 2–4" in page.inner_text(".verdict")
    assert page.locator(".choice a.chosen").inner_text() == "demand loads"
    page.click(".rail a:has-text('Memory')")
    page.wait_for_function("document.querySelector('#content h1').textContent === 'Memory'")
    assert "step0=2" in page.url and "mode" not in page.url
    page.go_back()
    page.wait_for_function("document.querySelector('#content h1').textContent === 'Access'")
    assert "mode=misses" in page.url


def test_the_step_control_writes_the_address(app: Watch, url: str) -> None:
    follow(app, url, "access")
    first = app.page.locator(".step-control input").first
    first.fill("3")
    first.press("Enter")
    app.page.wait_for_url("**step0=3**", timeout=10_000)
    app.page.wait_for_function(
        "document.querySelector('.verdict').textContent.includes('steps 3–6')"
    )


def test_the_theme_switch_redraws_the_page(app: Watch, url: str) -> None:
    follow(app, url, "memory")
    page = app.page
    color = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(color)
    page.click("#theme-button")
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    assert page.evaluate(color) != before
    text = "document.querySelector('#content .xtick text').style.fill"
    page.wait_for_function(f"{text} === 'rgb(228, 233, 240)'", timeout=20_000)
    page.click("#theme-button")
    page.wait_for_function("document.documentElement.dataset.theme === 'light'")


def test_a_growing_run_appears_without_reloading(watched: Watch, tmp_path: Path) -> None:
    root = tmp_path / "live"
    root.mkdir()
    url = serve(root, port=0, block=False)
    context = watched.page.context
    live = Watch(context.new_page(), url)
    live.page.goto(url)
    live.page.wait_for_selector("h1:has-text('No run found')")
    Recording(steps=2, close=False, status="").write(root / "new")
    live.page.wait_for_selector("h1:has-text('Overview')", timeout=20_000)
    assert "Steps 1–2" in live.page.inner_text(".verdict")
    assert live.faults == []


def test_the_report_draws_itself_without_any_request(browser, folder: Path, tmp_path: Path) -> None:
    path = write_report(folder, tmp_path / "report.html")
    page = browser.new_page(color_scheme="dark", viewport={"width": 1440, "height": 900})
    watch = Watch(page, path.as_uri())
    page.goto(path.as_uri())
    needed, shown = page.locator(".table .scroll").first.evaluate(
        "e => [e.scrollWidth, e.clientWidth]"
    )
    assert needed <= shown, "the comparison of runs is cut off"
    # One of the runs of one rank, and that of several: every kind of figure.
    page.evaluate("document.querySelectorAll('details.run').forEach((d, i) => d.open = i != 1)")
    for plot in page.locator(".plot:not(details.run:not([open]) .plot)").all():
        plot.scroll_into_view_if_needed()
        page.wait_for_function(
            'name => document.querySelector(`[data-figure="${name}"] .main-svg`)',
            arg=plot.get_attribute("data-figure"),
            timeout=20_000,
        )
    assert page.locator(".plot .main-svg").count() > 20
    assert_nothing_is_shared(page)
    page.close()
    assert watch.faults == []
