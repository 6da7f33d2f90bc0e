"""The page of a job in a real browser: it fits any width, loads nothing, and keys read and sort what is there.

Holds poprun.observe.show.page.
"""

from pathlib import Path

from playwright.sync_api import Browser, Page

from poprun.observe.show.page import render_page
from tests.measured_jobs import measured_job

ILLEGIBLE = """() => {
  const light = (color) => {
    const [r, g, b] = color.match(/[0-9.]+/g).map((it) => it / 255)
      .map((it) => it <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const groundOf = (it) => {
    const color = getComputedStyle(it).backgroundColor;
    return color === "rgba(0, 0, 0, 0)" && it.parentElement ? groundOf(it.parentElement) : color;
  };
  const words = [...document.querySelectorAll("header *, section *:not(svg *)")]
    .filter((it) => [...it.childNodes].some((child) => child.nodeType === 3 && child.data.trim()));
  return words.map((it) => {
    const lights = [light(getComputedStyle(it).color), light(groundOf(it))].sort((a, b) => b - a);
    return [(lights[0] + 0.05) / (lights[1] + 0.05), it.textContent];
  }).filter((it) => it[0] < 4.5);
}"""
"""Texts whose contrast is below what WCAG 2.2 asks of small text (1.4.3)."""


def test_the_page_of_a_job(browser: Browser, tmp_path: Path) -> None:
    """Narrow and wide, in the light and in the dark, for few instances and for many; then with keys alone."""
    for num_instances in (4, 24):
        page_file = tmp_path / f"{num_instances}.html"
        page_file.write_text(render_page(measured_job(num_instances, 600.0, first="epoch 1")), encoding="utf-8")
        for scheme in ("dark", "light"):
            width = 360 if scheme == "dark" else 1200
            page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
            heard = _listen(page)
            page.goto(page_file.as_uri())

            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(ILLEGIBLE) == []
            assert page.locator(".chart").count() == 5
            _read_a_chart(page)
            _sort_the_table(page, num_instances)
            assert heard == [page_file.as_uri()]
            page.close()


def _listen(page: Page) -> list[str]:
    """A list that is going to hold the addresses that ``page`` asks for, its errors and its messages."""
    heard: list[str] = []
    page.on("request", lambda request: heard.append(request.url))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("console", lambda message: heard.append(message.text))
    return heard


def _read_a_chart(page: Page) -> None:
    """The arrow keys read the loss; Escape ends that."""
    plot, keys = page.locator(".plot").first, page.locator(".keys").first
    before = keys.inner_text()
    while not plot.evaluate("it => it === document.activeElement"):
        page.keyboard.press("Tab")
    page.keyboard.press("Home")
    page.keyboard.press("End")
    told = keys.inner_text().split()
    assert told[0] == "10:00"
    assert [word for word in told if word.startswith("0.")] == ["0.25"] * len(plot.locator(".curve").all())
    assert plot.locator(".cursor").is_visible()
    page.keyboard.press("Escape")
    assert keys.inner_text() == before


def _sort_the_table(page: Page, num_instances: int) -> None:
    """A click on a heading sorts by numbers, another one the other way."""
    heading = page.get_by_role("button", name="peak memory")
    for order, first in (("ascending", "0"), ("descending", str(num_instances - 1))):
        heading.focus()
        page.keyboard.press("Enter")
        assert heading.locator("..").get_attribute("aria-sort") == order
        assert page.locator("tbody tr").first.locator("th").inner_text() == first
