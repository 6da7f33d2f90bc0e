"use strict";
// Reads values off the charts, for a pointer and for the arrow keys, and sorts the table of instances.
const GRID = 1000, MOST = 4;

// The points of a line on the grid, by its path's letters M and L; read when they are first asked for.
function pointsOf(path) {
  path.points ??= path.getAttribute("d").split(/[ML]/).slice(1).map((it) => it.split(/[ h]/).map(Number));
  return path.points;
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return x - points[low][0] < points[high][0] - x ? points[low] : points[high];
}

function duration(seconds) {
  const whole = Math.round(seconds), two = (it) => String(it).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

for (const plot of document.querySelectorAll(".plot")) {
  const keys = plot.parentNode.querySelector(".keys"), said = [...keys.childNodes], cursor = plot.querySelector(".cursor");
  const lines = [...plot.querySelectorAll(".curve")], names = keys.dataset.lines.split("\n");
  const low = Number(plot.dataset.low), high = Number(plot.dataset.high);
  let at = GRID;

  function read(x) {
    at = Math.max(0, Math.min(GRID, x));
    cursor.hidden = false;
    cursor.style.left = at / 10 + "%";
    const found = lines.map((line, number) => {
      const key = document.createElement("span"), y = nearest(pointsOf(line), at)[1];
      const value = high - (y / GRID) * (high - low);
      key.className = "key " + line.getAttribute("class").replace("curve ", "");
      key.textContent = (names[number] ? names[number] + " " : "") + Number(value.toPrecision(3)).toLocaleString("en");
      return [value, key];
    });
    const sorted = found.length <= MOST ? found : [...found].sort((a, b) => b[0] - a[0]);
    const shown = found.length <= MOST ? found : [...sorted.slice(0, MOST - 1), sorted[sorted.length - 1]];
    keys.replaceChildren(duration((at / GRID) * Number(plot.dataset.x)), ...shown.map((it) => it[1]));
  }

  function rest() {
    cursor.hidden = true;
    keys.replaceChildren(...said);
  }

  plot.addEventListener("pointermove", (event) => {
    const frame = plot.querySelector("svg").getBoundingClientRect();
    read(((event.clientX - frame.left) / frame.width) * GRID);
  });
  plot.addEventListener("pointerleave", rest);
  plot.addEventListener("blur", rest);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: at - 10, ArrowRight: at + 10, Home: 0, End: GRID }[event.key];
    if (event.key === "Escape") rest();
    if (step === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    read(step);
  });
}

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentNode, column = [...head.parentNode.children].indexOf(head);
    const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1, body = head.closest("table").tBodies[0];
    for (const it of head.parentNode.children) it.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    const value = (row) => row.children[column].dataset.v, number = (row) => Number(value(row));
    const isNumber = [...body.rows].every((row) => !Number.isNaN(number(row)));
    const order = isNumber ? (a, b) => number(a) - number(b) : (a, b) => value(a).localeCompare(value(b));
    body.append(...[...body.rows].sort((a, b) => direction * order(a, b)));
  });
}
