"use strict";
// Shows what a host or an instance is while it is pointed at or has the focus, and moves the focus with the arrows.
const things = [...document.querySelectorAll("svg [tabindex]")];
const tip = document.getElementById("tip");
const GAP = 8;

function show(thing) {
  tip.textContent = thing.getAttribute("aria-label");
  tip.hidden = false;
  const at = thing.firstElementChild.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const left = Math.min(at.left, innerWidth - size.width - GAP);
  const isRoomBelow = at.bottom + GAP + size.height <= innerHeight;
  const top = isRoomBelow ? at.bottom + GAP : at.top - GAP - size.height;
  tip.style.left = Math.max(GAP, left) + "px";
  tip.style.top = Math.max(GAP, Math.min(top, innerHeight - size.height - GAP)) + "px";
}

function hide() {
  const focused = things.find((it) => it === document.activeElement);
  if (focused) show(focused); else tip.hidden = true;
}

function enter(thing) {
  for (const it of things) it.tabIndex = it === thing ? 0 : -1;
  thing.focus();
}

// The nearest thing of the same kind in the row above (-1) or below (1).
function across(thing, direction) {
  const isHost = thing.matches(".host"), from = thing.firstElementChild.getBoundingClientRect();
  let nearest = null, least = Infinity;
  for (const it of things) {
    const to = it.firstElementChild.getBoundingClientRect();
    const step = direction > 0 ? to.top - from.bottom : from.top - to.bottom;
    const distance = step + 2 * Math.abs(to.left + to.width / 2 - from.left - from.width / 2);
    if (it.matches(".host") === isHost && step >= 0 && distance < least) [nearest, least] = [it, distance];
  }
  return nearest;
}

document.addEventListener("keydown", (event) => {
  const index = things.indexOf(document.activeElement);
  if (event.key === "Escape") tip.hidden = true;
  if (index < 0 || event.ctrlKey || event.altKey || event.metaKey) return;
  const next = {
    ArrowRight: () => things[index + 1],
    ArrowLeft: () => things[index - 1],
    ArrowDown: () => across(things[index], 1),
    ArrowUp: () => across(things[index], -1),
    Home: () => things[0],
    End: () => things[things.length - 1],
  }[event.key];
  if (!next) return;
  event.preventDefault();
  const thing = next();
  if (thing) enter(thing);
});
for (const thing of things) {
  thing.addEventListener("focus", () => show(thing));
  thing.addEventListener("blur", hide);
}
document.addEventListener("pointerover", (event) => {
  const thing = event.target.closest("svg [tabindex]");
  if (thing) show(thing); else hide();
});
document.addEventListener("scroll", hide, { capture: true, passive: true });
