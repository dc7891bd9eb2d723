// Draws the charts one by one after the text, and again to fit the paper: plotly fixes a width in pixels.
const waiting = [...document.querySelectorAll("script.figure")];
const draw = () => {
  const data = waiting.shift();
  if (!data) return;
  Plotly.newPlot(data.previousElementSibling, ...JSON.parse(data.textContent));
  setTimeout(draw);
};
addEventListener("load", () => setTimeout(draw));
const redraw = (change) => document.querySelectorAll(".chart").forEach((chart) => Plotly.relayout(chart, change));
const number = (cell) => parseFloat(cell.dataset.value ?? cell.textContent.replaceAll(",", ""));
const text = (cell) => cell.textContent.replace(/^[\s│├└─]+/, "");  // a tree's branches are no words
// Figures begin with the largest, words with A; the third click restores the order.
const sort = (button) => {
  const head = button.closest("th"), table = head.closest("table"), place = [...head.parentNode.children].indexOf(head);
  const body = table.tBodies[0], rows = [...body.rows], figures = !head.classList.contains("text");
  rows.forEach((row, came) => { row.dataset.came ??= came; });
  const turns = figures ? ["descending", "ascending", ""] : ["ascending", "descending", ""];
  const turn = turns[(turns.indexOf(head.getAttribute("aria-sort") ?? "") + 1) % 3];
  const order = (one, other) => figures
    ? (number(one) || 0) - (number(other) || 0) : text(one).localeCompare(text(other), "en", { numeric: true });
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
  const said = field.closest(".search").querySelector("output");
  said.textContent = wanted ? `${shown} row${shown === 1 ? "" : "s"}` : "";
};
addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.chart) {
    const drawn = document.getElementById(button.dataset.chart);
    if (!drawn.data) return;
    button.textContent = `as ${drawn.data[0].type}`;
    Plotly.restyle(drawn, { type: drawn.data[0].type === "treemap" ? "icicle" : "treemap" });
  } else if (button?.closest("th")) sort(button);
});
addEventListener("input", (event) => event.target.dataset.table && search(event.target));
addEventListener("beforeprint", () => redraw({ width: 680, autosize: false }));
addEventListener("afterprint", () => redraw({ width: null, autosize: true }));
