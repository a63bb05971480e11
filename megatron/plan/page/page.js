"use strict";

// Sort a table by the column of its head's button: numbers by data-value, other cells by their text.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", direction);
      const sign = direction === "ascending" ? 1 : -1;
      const rows = [...body.rows].sort((a, b) => sign * compare(a.cells[column], b.cells[column]));
      body.append(...rows);
    });
  });
}

function compare(a, b) {
  if ("value" in a.dataset && "value" in b.dataset) return Number(a.dataset.value) - Number(b.dataset.value);
  return a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
}

// Enlarge a timeline around the middle of what is seen; it is panned by scrolling.
const MOST = 64;
for (const scroller of document.querySelectorAll(".timeline .scroller")) {
  const drawing = scroller.firstElementChild;
  let zoom = 1;
  const show = (wanted) => {
    const middle = (scroller.scrollLeft + scroller.clientWidth / 2) / drawing.clientWidth;
    zoom = Math.min(MOST, Math.max(1, wanted));
    drawing.style.setProperty("--zoom", zoom);
    scroller.scrollLeft = middle * drawing.clientWidth - scroller.clientWidth / 2;
  };
  const bar = document.createElement("div");
  bar.className = "zoom";
  for (const [text, factor] of [["Larger", 2], ["Smaller", 0.5], ["Whole", 0]]) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", () => show(zoom * factor));
    bar.append(button);
  }
  scroller.parentElement.before(bar);
}
