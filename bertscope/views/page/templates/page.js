// The tables, the boxes that scroll, the print, and the copied command.
const root = document.documentElement;
const folded = () => document.querySelectorAll("details:not([open])");
let opened = [];
// The printer's paper is white and of another width.
addEventListener("beforeprint", () => {
  opened = [...folded()];
  opened.forEach((part) => { part.open = true; });
  root.dataset.theme = "light";
  isPrinting = true;
  drawAll();
});
addEventListener("afterprint", () => {
  opened.forEach((part) => { part.open = false; });
  delete root.dataset.theme;
  isPrinting = false;
  drawAll();
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

addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.copied) {
    await navigator.clipboard?.writeText(button.previousElementSibling.textContent);
    button.textContent = button.dataset.copied;
  } else if (button?.closest("th")) sort(button);
});
addEventListener("input", (event) => event.target.dataset.table && search(event.target));
