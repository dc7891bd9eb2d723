// Draws the charts one by one after the text, in the colours of the theme, and again to fit the paper.
const root = document.documentElement;
const figures = [...document.querySelectorAll("script.figure")];
const dark = matchMedia("(prefers-color-scheme: dark)");
// plotly knows no variables of style sheets: each "var(--name)" becomes its colour.
const themed = (text) => {
  const style = getComputedStyle(root);
  return JSON.parse(text.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim()));
};
const draw = (data) => Plotly.newPlot(data.previousElementSibling, ...themed(data.textContent));
const waiting = [...figures];
const next = () => {
  const data = waiting.shift();
  if (!data) return;
  draw(data);
  setTimeout(next);
};
addEventListener("load", () => setTimeout(next));
const recolor = () => figures.filter((data) => !waiting.includes(data)).forEach(draw);
dark.addEventListener("change", recolor);
// The printer's paper is white and of another width, which plotly fixes in pixels.
const redraw = (change) => document.querySelectorAll(".js-plotly-plot").forEach((chart) => Plotly.relayout(chart, change));
const folded = () => document.querySelectorAll("details:not([open])");
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...folded()];
  opened.forEach((part) => { part.open = true; });
  root.dataset.theme = "light";
  if (dark.matches) recolor();
  redraw({ width: 680, autosize: false });
});
addEventListener("afterprint", () => {
  opened.forEach((part) => { part.open = false; });
  delete root.dataset.theme;
  if (dark.matches) recolor();
  redraw({ width: null, autosize: true });
});

const number = (cell) => parseFloat(cell.dataset.value ?? cell.textContent.replaceAll(",", ""));
// Figures begin with the largest, words with A; the third click restores the order.
const sort = (button) => {
  const head = button.closest("th"), table = head.closest("table"), place = [...head.parentNode.children].indexOf(head);
  const body = table.tBodies[0], rows = [...body.rows], isNumber = !head.classList.contains("text");
  rows.forEach((row, came) => { row.dataset.came ??= came; });
  const turns = isNumber ? ["descending", "ascending", ""] : ["ascending", "descending", ""];
  const turn = turns[(turns.indexOf(head.getAttribute("aria-sort") ?? "") + 1) % 3];
  const order = (one, other) => isNumber
    ? (number(one) || 0) - (number(other) || 0) : one.textContent.localeCompare(other.textContent, "en", { numeric: true });
  rows.sort((one, other) => turn === "" ? one.dataset.came - other.dataset.came
    : (turn === "descending" ? -1 : 1) * order(one.cells[place], other.cells[place]));
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  if (turn) head.setAttribute("aria-sort", turn);
  body.append(...rows);
};
const search = (field) => {
  const wanted = field.value.toLowerCase(), table = document.getElementById(field.dataset.table);
  let shown = 0;
  for (const row of table.tBodies[0].rows) {
    row.hidden = !row.textContent.toLowerCase().includes(wanted);
    shown += !row.hidden;
  }
  field.closest(".search").querySelector("output").textContent = wanted ? `${shown}` : "";
};
// A shadow at each edge behind which there is more.
const cue = (box) => {
  box.classList.toggle("left", box.scrollLeft > 1);
  box.classList.toggle("right", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  box.classList.toggle("down", box.scrollTop + box.clientHeight < box.scrollHeight - 1);
};
// A table that is too wide or too long ends with a whole column and a whole row, so that no number is cut.
const fitted = (box) => {
  box.style.width = box.style.maxHeight = "";
  const { left, top } = box.getBoundingClientRect();
  const shorten = (side, cells, room, end, bar) => {
    const ends = [...cells].map(end).filter((place) => place <= room + 1);
    if (ends.length > 1 && ends.length < cells.length) box.style[side] = `${Math.max(...ends) + bar}px`;
  };
  shorten("width", box.querySelectorAll("th"), box.clientWidth, (head) => head.getBoundingClientRect().right - left,
    box.offsetWidth - box.clientWidth);
  shorten("maxHeight", box.querySelectorAll("tbody tr:not([hidden])"), box.clientHeight,
    (row) => row.getBoundingClientRect().bottom - top, box.offsetHeight - box.clientHeight);
};
const boxes = [...document.querySelectorAll(".scroll, nav")];
boxes.forEach((box) => box.addEventListener("scroll", () => cue(box), { passive: true }));
const refit = () => boxes.forEach((box) => { box.scrollLeft || box.scrollTop || fitted(box); cue(box); });
new ResizeObserver(() => requestAnimationFrame(refit)).observe(document.body);

// The map by keyboard: arrow keys choose a box of this level, Enter zooms into it, Escape goes back.
const chosen = new WeakMap();
const choose = (chart, level, place) => {
  const { ids, parents, customdata } = chart.data[0];
  const inside = ids.flatMap((id, index) => (parents[index] === level ? [index] : []));
  const found = inside.length ? inside[(place + inside.length) % inside.length] : ids.indexOf(level);
  const style = getComputedStyle(root);
  const color = (name) => style.getPropertyValue(name).trim();
  chosen.set(chart, { level, place: inside.length ? (place + inside.length) % inside.length : 0, id: ids[found] });
  document.querySelector(`output[data-map="${chart.id}"]`).textContent = customdata[found].replaceAll("<br>", ", ");
  // The width is one number: plotly draws no path bar with a list of widths.
  const lines = ids.map((_, index) => color(index === found ? "--ink" : "--paper"));
  Plotly.restyle(chart, { level, "marker.line.width": 3, "marker.line.color": [lines] });
};
const zoom = (chart, key) => {
  const { ids, parents } = chart.data[0], top = ids[0];
  const level = chart._fullData?.[0].level || chart.data[0].level || top;
  const at = chosen.get(chart);
  const place = at?.level === level ? at.place : -1;
  if (key === "ArrowRight" || key === "ArrowDown") choose(chart, level, place + 1);
  else if (key === "ArrowLeft" || key === "ArrowUp") choose(chart, level, place < 0 ? -1 : place - 1);
  else if (key === "Enter" && place >= 0 && parents.includes(at.id)) choose(chart, at.id, 0);
  else if ((key === "Escape" || key === "Backspace") && level !== top) {
    const outer = parents[ids.indexOf(level)];
    choose(chart, outer, ids.filter((_, index) => parents[index] === outer).indexOf(level));
  } else return false;
  return true;
};
addEventListener("keydown", (event) => {
  const chart = event.target;
  if (chart.matches?.(".chart[tabindex]") && chart.data && zoom(chart, event.key)) event.preventDefault();
});
addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.chart) {
    const drawn = document.getElementById(button.dataset.chart);
    if (!drawn.data) return;
    Plotly.restyle(drawn, { type: drawn.data[0].type === "treemap" ? "icicle" : "treemap" });
    [button.textContent, button.dataset.other] = [button.dataset.other, button.textContent];
  } else if (button?.dataset.copied) {
    await navigator.clipboard?.writeText(button.previousElementSibling.textContent);
    button.textContent = button.dataset.copied;
  } else if (button?.closest("th")) sort(button);
});
addEventListener("input", (event) => event.target.dataset.table && search(event.target));
