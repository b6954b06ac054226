"""Conditions in a page. Playwright's `wait_for_function` needs `eval`, which our Content-Security-Policy forbids."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any

SLOW = 60_000  # milliseconds that a request or a condition may take on a loaded machine
TICK = 200  # milliseconds between two looks
GROWS = 5 * SLOW  # a status is written once a minute at least, and the page asks for it up to 30 s later

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
#: Texts whose contrast is below 4.5 to 1 (WCAG 2 AA, for texts of normal size).
LOW_CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const backOf = (item) => {
    const color = parse(getComputedStyle(item).backgroundColor);
    return color.length === 4 && color[3] === 0 ? backOf(item.parentElement) : color;
  };
  const found = [];
  for (const item of document.body.querySelectorAll("*")) {
    if (![...item.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())) continue;
    const [a, b] = [parse(getComputedStyle(item).color), backOf(item)].map(luminance);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${item.tagName} ${item.textContent.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return found;
}"""
COLORS = """async ([picture, width, points]) => {
  const image = new Image();
  image.src = `data:image/png;base64,${picture}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.width, image.height];
  const context = canvas.getContext("2d"), scale = image.width / width;
  context.drawImage(image, 0, 0);
  return points.map(([x, y]) => [...context.getImageData(x * scale, y * scale, 1, 1).data].slice(0, 3));
}"""


def colors(tab: Any, points: Sequence[Sequence[float]]) -> list[tuple[int, ...]]:
    """What the user sees at points of the window: red, green and blue of each.

    :param points: x and y in CSS pixels, inside the window.
    """
    picture = base64.b64encode(tab.screenshot()).decode()
    found = tab.evaluate(COLORS, [picture, tab.viewport_size["width"], points])
    return [tuple(color) for color in found]


def until(tab: Any, expression: str, arg: Any = None, timeout: int = SLOW) -> Any:
    """Wait until a JavaScript expression is true in a tab or frame; returns its value.

    :param arg: the argument of the expression, if it is a function.
    :param timeout: in milliseconds.
    """
    end = time.monotonic() + timeout / 1000
    while not (value := tab.evaluate(expression, arg)):
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout / 1000:.0f} s: {expression}")
        tab.wait_for_timeout(TICK)
    return value
