// What a test of the page does with it in a browser, and what it finds.
const faults = [];
addEventListener("error", (event) => faults.push(event.message));
addEventListener("securitypolicyviolation", (event) => faults.push(event.violatedDirective + " " + event.blockedURI));
const begin = () => {
  const charts = [...document.querySelectorAll(".chart")];
  if (!charts.every((chart) => chart.querySelector("svg"))) return setTimeout(begin, 50);
  const table = document.getElementById("flops-0");
  const column = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === "FLOPs");
  const values = () => [...table.tBodies[0].rows].filter((row) => !row.hidden)
    .map((row) => Number(row.cells[column].dataset.value));
  table.tHead.rows[0].cells[column].querySelector("button").click();
  const down = values();
  table.tHead.rows[0].cells[column].querySelector("button").click();
  const up = values();
  table.tHead.rows[0].cells[column].querySelector("button").click();
  const back = values();
  table.tHead.rows[0].cells[0].querySelector("button").click();
  const named = [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
  const field = document.querySelector('input[data-table="flops-0"]');
  field.value = "query";
  field.dispatchEvent(new Event("input", { bubbles: true }));
  const found = [...table.tBodies[0].rows].filter((row) => !row.hidden).map((row) => row.cells[0].textContent);
  const chosen = (chart, ...keys) => keys.map((key) => {
    chart.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    const tip = chart.querySelector(".tip");
    const rows = tip.hidden ? [] : [...tip.children].map((row) => row.textContent);
    return [rows.join(" | "), !chart.querySelector(".back").hidden];
  });
  const map = document.getElementById("parameters-0-map");
  const zoomed = chosen(map, "ArrowRight", "Enter", "Escape", "Escape");
  const [memory] = charts, dot = memory.querySelector(".peak").getBBox();
  const area = document.createElementNS("http://www.w3.org/2000/svg", "svg").createSVGPoint();
  [area.x, area.y] = [dot.x + dot.width / 2, dot.y + dot.height / 2 + 1];
  const stepped = chosen(memory, "ArrowRight", "End", "Enter", "Escape");
  const widths = () => charts.map((chart) => chart.querySelector("svg").viewBox.baseVal.width);
  const screen = widths();
  dispatchEvent(new Event("beforeprint"));
  const paper = widths();
  dispatchEvent(new Event("afterprint"));
  document.title = JSON.stringify({
    paper, restored: JSON.stringify(screen) === JSON.stringify(widths()),
    faults, down, up, back, named, found, zoomed,
    said: field.closest(".search").querySelector("output").textContent,
    stepped, isOnArea: [...memory.querySelectorAll("path")].some((path) => path.isPointInFill(area)),
    charts: charts.length, drawn: charts.filter((chart) => chart.querySelector("svg")).length,
    pictures: document.querySelectorAll("figure .scroll svg").length,
    requests: performance.getEntriesByType("resource").length,
  });
};
addEventListener("load", () => setTimeout(begin, 500));
