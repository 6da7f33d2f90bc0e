"""The page of a plan in a real browser: what it shows, what keys and a pointer do, and that it loads nothing."""

from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, Page

from poprun.plan.render import render_plan
from poprun.plan.request import VipuSettings
from poprun.text.ranges import parse_hosts
from poprun.text.screen import TopologyFormat
from tests.planning import CLUSTER_NODE, planned

PLANS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"hosts": parse_hosts("node[0-3]"), "num_instances": 16, "num_replicas": 32, "ipus_per_replica": 2},
    {"hosts": parse_hosts("node[00-15].cluster.example.org"), "num_instances": 1024},
    {"hosts": parse_hosts("n[0-3]"), "num_instances": 32, "vipu": VipuSettings(num_ilds=2, pod="POD64")},
    {"hosts": parse_hosts("n[0-1]"), "num_instances": 32, "vipu": VipuSettings(num_ilds=4, pod="POD64")},
    {"hosts": parse_hosts("node[00-31]"), "num_instances": 2048, "vipu": VipuSettings(num_ilds=32)},
)
"""From one virtual IPU to 2,048; IPU-Link domains around hosts, in hosts, and left out."""

ILLEGIBLE: Final = """() => {
  const light = (color) => {
    const [r, g, b] = color.match(/[0-9.]+/g).map((it) => it / 255)
      .map((it) => it <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const bad = [];
  for (const text of document.querySelectorAll("svg g[transform] > text")) {
    const at = text.getBoundingClientRect(), x = at.left + at.width / 2, y = at.top + at.height / 2;
    const under = [...text.parentNode.children].filter((it) => it.tagName === "rect").filter((it) => {
      const its = it.getBoundingClientRect();
      return its.left <= x && x <= its.right && its.top <= y && y <= its.bottom;
    });
    const frame = under[0].getBoundingClientRect(), ground = getComputedStyle(under[under.length - 1]).fill;
    const paper = getComputedStyle(document.body).backgroundColor;
    const colors = [getComputedStyle(text).fill, ground === "none" ? paper : ground];
    const lights = colors.map(light).sort((a, b) => b - a);
    const contrast = (lights[0] + 0.05) / (lights[1] + 0.05);
    if (at.left < frame.left || at.right > frame.right || at.bottom > frame.bottom + 1)
      bad.push(`${text.textContent} is outside`);
    if (contrast < 4.5) bad.push(`${text.textContent}: contrast ${contrast}`);
  }
  return bad;
}"""
"""Texts that leave their shape, or whose contrast is below what WCAG 2.2 asks of small text (1.4.3)."""


def test_a_page_in_the_dark_and_in_the_light(browser: Browser, tmp_path: Path) -> None:
    """Every text is inside its shape and easy to read, for any size of plan; nothing is loaded, nothing fails."""
    for number, asked in enumerate(PLANS):
        shots = []
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 800})
            heard = _listen(page)
            _open(page, asked, tmp_path)
            shots.append(page.screenshot(path=tmp_path / f"{number}-{scheme}.png", full_page=True))

            assert page.evaluate(ILLEGIBLE) == []
            assert page.locator("svg g[transform] > text").count() >= 3
            assert page.evaluate("document.documentElement.scrollWidth") <= 1280
            assert heard == [f"file://{tmp_path}/plan.html"]
            page.close()

        assert shots[0] != shots[1]
        assert min(map(len, shots)) > 5_000


def test_keys_and_a_pointer_tell_what_is_there(browser: Browser, tmp_path: Path) -> None:
    """Tab comes in at the first host, arrows go on, Escape hides; a pointer shows what it points at."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    _open(page, PLANS[1], tmp_path)
    tip = page.locator("#tip")

    assert not tip.is_visible()
    told = []
    for key in ("Tab", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft", "End", "Home"):
        page.keyboard.press(key)
        told.append(tip.inner_text().splitlines()[0])
        assert _is_on_screen(page)
    assert told == [
        "host node0",
        "instance 0",
        "instance 1",
        "instance 3",
        "instance 1",
        "instance 0",
        "instance 15",
        "host node0",
    ]
    page.keyboard.press("Escape")
    assert not tip.is_visible()

    page.locator("svg .instance").nth(6).hover()
    assert tip.inner_text().splitlines() == [
        "instance 6",
        "on host node1, number 2 there",
        "replicas 12-13",
        "virtual IPUs 8-11: cores 32-47 in turns",
    ]
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement === document.body"), "one Tab leaves the picture"


def _open(page: Page, asked: dict[str, Any], folder: Path) -> None:
    file = folder / "plan.html"
    file.write_text(render_plan(planned(CLUSTER_NODE, **asked), TopologyFormat.HTML), encoding="utf-8")
    page.goto(file.as_uri())


def _listen(page: Page) -> list[str]:
    """A list that is going to hold the addresses that ``page`` asks for, its errors and its messages."""
    heard: list[str] = []
    page.on("request", lambda request: heard.append(request.url))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("console", lambda message: heard.append(message.text))
    return heard


def _is_on_screen(page: Page) -> bool:
    """Whether all of the tip is inside the window."""
    box = page.locator("#tip").bounding_box()
    assert box is not None
    return box["x"] >= 0 and box["y"] >= 0 and box["x"] + box["width"] <= 1280 and box["y"] + box["height"] <= 800
