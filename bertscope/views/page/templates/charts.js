// Draws each chart as SVG to the width of its box. Colours are variables of the style sheet, so the theme and the
// printer choose them. Charts of one scale share their axes. A chart returns items: rectangles with a text on hover.
const NAMES = "http://www.w3.org/2000/svg", pen = document.createElement("canvas").getContext("2d");
const wide = (text) => { pen.font = "12px system-ui, sans-serif"; return pen.measureText(text).width; };
const put = (parent, name, attributes, text = "") => {
  const made = document.createElementNS(NAMES, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  made.textContent = text;
  return parent.appendChild(made);
};
const charts = [...document.querySelectorAll(".chart")].map((box) => ({ box, ...JSON.parse(box.nextElementSibling.textContent) }));
const shared = (chart, key) => Math.max(...charts.filter((other) => other.scale === chart.scale).map((other) => other[key]));
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"], PREFIXES = ["", "k", "M", "G", "T", "P", "E"];
const power = (value, base) => Math.min(Math.max(Math.floor(Math.log(value) / Math.log(base) + 1e-12), 0), 6) || 0;
const bytes = (size) => {
  const unit = power(size, 1024);
  return `${(size / 1024 ** unit).toLocaleString("en", { minimumFractionDigits: unit && 2, maximumFractionDigits: 2 })} ${UNITS[unit]}`;
};
// Round steps of an axis up to `top`, with their texts in one unit.
const ticks = (top, base, names) => {
  const unit = base ** power(top, base), rough = top / unit / 4, ten = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((times) => times * ten >= rough) * ten;
  return [...Array(Math.floor(top / unit / step + 1e-9) + 1).keys()].map((times) => [times * step * unit,
    `${Number((times * step).toFixed(6)).toLocaleString("en")} ${times || base === 1024 ? names[power(top, base)] : ""}`.trim()]);
};
const rows = (svg, chart, [left, top, width, height], highest, base, names) => {
  const place = (value) => top + height * (1 - value / highest);
  for (const [value, text] of ticks(highest, base, names)) {
    put(svg, "line", { class: "grid", x1: left, x2: left + width, y1: place(value), y2: place(value) });
    put(svg, "text", { x: left - 6, y: place(value) + 4, "text-anchor": "end" }, text);
  }
  put(svg, "text", { x: left + width / 2, y: top + height + (chart.kind === "line" ? 36 : 20), "text-anchor": "middle" }, chart.x);
  if (chart.y) put(svg, "text", { x: 2, y: top - 12 }, chart.y);
  return place;
};

// Memory: areas one on the other. A column of pixels shows the highest of its samples, so that no peak is lost.
const memory = (chart, svg, width, height) => {
  // A text is a number of samples without a change.
  chart.columns ??= chart.changes.map((changes) => {
    let sum = 0;
    return changes.flatMap((change) => (typeof change === "string" ? Array(Number(change)).fill(sum) : (sum += change)));
  });
  const { columns, parts, peak } = chart, count = columns[0].length, [from, to] = chart.zoom ?? [0, count];
  chart.totals ??= columns[0].map((_, index) => columns.reduce((sum, column) => sum + column[index], 0));
  const band = 8 + 30 * shared(chart, "rows"), area = [66, band + 22, width - 76, height - band - 50];
  const [left, top, room, tall] = area;
  const place = rows(svg, chart, area, shared(chart, "top") * 1.02, 1024, UNITS);
  const steps = Math.max(Math.min(to - from, Math.floor(room)), 1), at = (index) => left + (room * (index - from)) / (to - from);
  const chosen = [...Array(steps).keys()].map((step) => {
    let best = from + Math.floor(((to - from) * step) / steps);
    for (let index = best; index < from + Math.floor(((to - from) * (step + 1)) / steps); index++) if (chart.totals[index] > chart.totals[best]) best = index;
    return best;
  });
  const edge = (step) => left + (room * step) / steps, sums = chosen.map(() => 0);
  const outlines = parts.map((_, part) => chosen.map((index, step) => {
    sums[step] += columns[part][index];
    return `${step ? "V" : `M${left},${place(0)}V`}${place(sums[step]).toFixed(1)}H${edge(step + 1).toFixed(1)}`;
  }).join("") + `V${place(0)}Z`);
  for (let part = parts.length - 1; part >= 0; part--) put(svg, "path", { d: outlines[part], style: `fill:${parts[part][1]}` });
  for (const [name, size, start, end, row, isAtEnd] of chart.marks) {
    if (end < from || start >= to) continue;
    const first = Math.max(at(start), left), last = Math.min(at(end + 1), left + room), y = 14 + 30 * row;
    if (start > from) put(svg, "line", { class: "phase", x1: first, x2: first, y1: y - 10, y2: top + tall });
    const side = isAtEnd ? { x: last - 3, "text-anchor": "end" } : { x: first + 3 };
    put(svg, "text", { ...side, y, class: "strong halo" }, name);
    put(svg, "text", { ...side, y: y + 14, class: "halo" }, size);
  }
  if (peak[0] >= from && peak[0] < to) {
    const step = chosen.indexOf(peak[0]), x = (edge(step) + edge(step + 1)) / 2, y = place(chart.totals[peak[0]]);
    put(svg, "circle", { class: "peak", cx: x, cy: y, r: 4 });
    put(svg, "text", { class: "strong halo", x: x + (x > left + room / 2 ? -8 : 8), y: y - 6, "text-anchor": x > left + room / 2 ? "end" : "start" }, peak[1]);
  }
  const value = (y) => (shared(chart, "top") * 1.02 * (top + tall - y)) / tall;
  return chosen.map((index, step) => ({
    box: [edge(step), top, edge(step + 1), top + tall], range: [index, to - from],
    tip: (y) => {
      let sum = 0;
      const [phase, path, operator] = chart.places.map((place, kind) => chart.names[kind][place[index]]);
      const sizes = parts.map(([name, color], part) => {
        const isAt = y !== undefined && value(y) >= sum && value(y) < (sum += columns[part][index]);
        return columns[part][index] ? [`${name} ${bytes(columns[part][index])}`, color, isAt] : null;
      });
      return [[[phase, operator].filter(Boolean).join(" · "), "", true], ...(path ? [[path]] : []),
        ...sizes.filter(Boolean).reverse(), [`${chart.total} ${bytes(chart.totals[index])}`, "", true]];
    },
  }));
};

const bars = (chart, svg, width, height) => {
  const highest = shared(chart, "top"), room = width - 20, tall = height - 44, each = tall / chart.bars.length;
  for (const [value, text] of ticks(highest, 1000, PREFIXES)) {
    const x = 10 + (room * value) / highest;
    put(svg, "line", { class: "grid", x1: x, x2: x, y1: 4, y2: 4 + tall });
    put(svg, "text", { x, y: tall + 20, "text-anchor": x > room - 20 ? "end" : value ? "middle" : "start" }, text);
  }
  put(svg, "text", { x: width / 2, y: tall + 38, "text-anchor": "middle" }, chart.x);
  return chart.bars.map(([name, label, value, text, color], row) => {
    const long = (room * value) / highest, y = 4 + row * each, needed = wide(label) + 12;
    put(svg, "rect", { x: 10, y: y + each * 0.06, width: Math.max(long, 1), height: each * 0.88, style: `fill:${color}` });
    const place = needed < long ? { x: 16, class: "on" } : long + needed < room ? { x: 16 + long, class: "halo" }
      : { x: 10 + room, class: "halo", "text-anchor": "end" };
    if (each > 9) put(svg, "text", { ...place, y: y + each / 2 + 4 }, label);
    return { box: [10, y, 10 + room, y + each], mark: [10, y, 10 + Math.max(long, 1), y + each], tip: () => [[name, color, true], [text]] };
  });
};

const line = (chart, svg, width, height) => {
  const area = [66, 28, width - 84, height - 74], [left, top, room, tall] = area, last = shared(chart, "longest");
  const place = rows(svg, chart, area, shared(chart, "top") * 1.04, 1000, PREFIXES);
  const at = (value) => left + (room * value) / last;
  put(svg, "path", { class: "curve", d: chart.points.map(([x, y], index) => `${index ? "L" : "M"}${at(x)},${place(y)}`).join("") });
  let free = 0;
  return chart.points.map(([x, y, text], index) => {
    const near = (other) => (chart.points[other] ? (at(x) + at(chart.points[other][0])) / 2 : at(x) + 20 * Math.sign(other - index));
    put(svg, "circle", { class: "point", cx: at(x), cy: place(y), r: 3.5 });
    if (at(x) - wide(x) / 2 > free) put(svg, "text", { x: at(x), y: top + tall + 18, "text-anchor": "middle" }, x);
    free = Math.max(free, at(x) + wide(x) / 2 + 4);
    return { box: [near(index - 1), top, near(index + 1), top + tall], mark: [at(x) - 7, place(y) - 7, at(x) + 7, place(y) + 7],
      tip: () => [[`${chart.x} ${x}`, "", true], [text]] };
  });
};

// A treemap (Bruls, Huizing and van Wijk 2000): rows along the shorter side, as long as their boxes become squarer.
const squarified = (values, [x, y, width, height]) => {
  const boxes = [], sum = (list) => list.reduce((total, value) => total + value, 0);
  const scale = (width * height) / sum(values);
  for (let begun = 0; begun < values.length;) {
    const side = Math.min(width, height), isRow = width < height;
    const worst = (list) => {
      const thick = (sum(list) * scale) / side;
      return Math.max(thick ** 2 / (list.at(-1) * scale), (list[0] * scale) / thick ** 2);
    };
    let end = begun + 1;
    while (end < values.length && worst(values.slice(begun, end + 1)) <= worst(values.slice(begun, end))) end++;
    const thick = (sum(values.slice(begun, end)) * scale) / side || 0;
    let place = isRow ? x : y;
    for (; begun < end; begun++) {
      const long = thick ? (values[begun] * scale) / thick : 0;
      boxes.push(isRow ? [place, y, long, thick] : [x, place, thick, long]);
      place += long;
    }
    if (isRow) { y += thick; height -= thick; } else { x += thick; width -= thick; }
  }
  return boxes;
};
const DEEPEST = 3;  // frames around a box; a click on one shows what is deeper
const map = (chart, svg, width, height) => {
  const { nodes } = chart, level = chart.zoom ?? 0, items = [];
  const inside = (parent) => nodes.map((_, index) => index).filter((index) => nodes[index][0] === parent && nodes[index][2] > 0)
    .sort((one, other) => nodes[other][2] - nodes[one][2]);
  const drawn = (index, [x, y, wideness, tall], depth) => {
    const [, label, value, color, text] = nodes[index], children = inside(index);
    put(svg, "rect", { class: "box", x, y, width: Math.max(wideness, 0), height: Math.max(tall, 0), style: `fill:${color}` });
    items.push({ box: [x, y, x + wideness, y + tall], node: index, step: depth === 1, leads: depth ? children.length > 0 : level > 0,
      tip: () => text.map((words, row) => [words, row ? "" : color, !row]) });
    const share = `${((100 * value) / nodes[0][2]).toFixed(value * 10 < nodes[0][2] ? 1 : 0)} %`;
    const shown = [`${label} ${share}`, label].find((words) => wide(words) < wideness - 8);
    if (shown && tall > 18) put(svg, "text", { class: "on", x: x + 5, y: y + 14 }, shown);
    const head = children.length && shown && tall > 30 ? 18 : 2;
    if (depth === DEEPEST || wideness < 8 || tall < 8 + head) return;
    const boxes = squarified(children.map((child) => nodes[child][2]), [x + 2, y + head, wideness - 4, tall - head - 2]);
    children.forEach((child, place) => drawn(child, boxes[place], depth + 1));
  };
  const side = level ? 1 : Math.sqrt(chart.top / shared(chart, "top"));  // the areas of two models are in proportion
  drawn(level, [1, 1, (width - 2) * side, (height - 2) * side], 0);
  return items;
};

const KINDS = { memory, bars, line, map };
const inBox = ([left, top, right, bottom], x, y) => x >= left && x < right && y >= top && y < bottom;
const draw = (chart, width = chart.box.clientWidth) => {
  if (!width) return;
  const height = chart.height ?? chart.box.clientHeight;
  chart.svg?.remove();
  chart.svg = put(chart.box, "svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", "aria-hidden": "true" });
  chart.items = KINDS[chart.kind](chart, chart.svg, width, height);
  chart.cursor = put(chart.svg, "rect", { class: "cursor", visibility: "hidden" });
  chart.width = width;
  chart.back.hidden = chart.zoom === undefined;
  hide(chart);
};
const hide = (chart) => {
  chart.at = undefined;
  chart.tip.hidden = true;
  chart.cursor.setAttribute("visibility", "hidden");
};
const show = (chart, item, y) => {
  const [left, top, right, bottom] = item.mark ?? item.box, scale = chart.box.clientWidth / chart.width;
  chart.at = item;
  for (const [key, value] of Object.entries({ x: left, y: top, width: right - left, height: bottom - top, visibility: "visible" })) chart.cursor.setAttribute(key, value);
  chart.tip.replaceChildren(...item.tip(y).map(([text, color, isStrong]) => {
    const row = document.createElement(isStrong ? "b" : "span");
    if (color) row.appendChild(document.createElement("i")).style.background = color;
    row.append(text);
    return row;
  }));
  chart.tip.hidden = false;
  const x = Math.min(right, left + 60) * scale + 12, most = chart.box.clientWidth - chart.tip.offsetWidth;
  chart.tip.style.left = `${Math.max(x <= most ? x : Math.min(left * scale - chart.tip.offsetWidth - 12, most), 0)}px`;
  chart.tip.style.top = `${Math.max(Math.min((y ?? top) + 8, chart.box.clientHeight - chart.tip.offsetHeight), 0)}px`;
};
// `target` is a box of the map or a range of samples; without one the chart goes back.
const zoom = (chart, target) => {
  if (chart.kind === "map") {
    const outer = chart.nodes[chart.zoom ?? 0][0], to = target ?? (outer < 0 ? 0 : outer);
    chart.zoom = to || undefined;
  } else if (chart.kind === "memory") {
    const count = chart.totals.length;
    if (target && target[1] - target[0] >= 8) chart.zoom = [Math.max(target[0], 0), Math.min(target[1], count)];
    else if (!target) chart.zoom = undefined;
  }
  draw(chart);
};
const enter = (chart, item) => {
  if (chart.kind === "map" && item.leads) zoom(chart, item.step ? item.node : undefined);
  else if (chart.kind === "memory") {
    const [index, count] = item.range, few = Math.max(Math.ceil(count / 8), 4);
    zoom(chart, [index - few, index + few]);
    show(chart, chart.items.find((other) => other.range[0] >= index) ?? chart.items[0]);
  }
};
const press = (chart, key) => {
  const steps = chart.kind === "map" ? chart.items.filter((item) => item.step) : chart.items, at = steps.indexOf(chart.at);
  const far = Math.max(Math.round(steps.length / 10), 1);
  const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: far, PageUp: -far, Home: -steps.length, End: steps.length };
  if (key in moves && steps.length) show(chart, steps[at < 0 && moves[key] === 1 ? 0 : Math.min(Math.max(at + moves[key], 0), steps.length - 1)]);
  else if (key === "Enter" && chart.at) {
    const { kind } = chart;
    enter(chart, chart.at);
    if (kind === "map" && !chart.at) show(chart, chart.items[0]);
  } else if (key === "Escape" && (chart.zoom !== undefined || chart.at)) {
    if (chart.zoom === undefined) hide(chart); else { zoom(chart); show(chart, chart.items[0]); }
  } else return false;
  return true;
};
const attend = (chart) => {
  const { box } = chart, pointed = (event) => {
    const frame = box.getBoundingClientRect(), scale = chart.width / frame.width;
    return [(event.clientX - frame.left) * scale, event.clientY - frame.top];
  };
  const under = (event) => chart.items.findLast((item) => inBox(item.box, ...pointed(event)));
  const child = (tag, name) => box.appendChild(Object.assign(document.createElement(tag), { className: name, hidden: true }));
  let begun;
  chart.tip = child("div", "tip");
  chart.tip.setAttribute("role", "status");
  chart.back = Object.assign(child("button", "back"), { type: "button", textContent: chart.back_label ?? "", onclick: () => zoom(chart) });
  if (chart.kind === "bars") chart.box.style.height = `${Math.min(Math.max(chart.bars.length * 24, 120), 900) + 44}px`;
  box.addEventListener("pointermove", (event) => { const item = under(event); if (item) show(chart, item, pointed(event)[1]); else hide(chart); });
  box.addEventListener("pointerleave", () => hide(chart));
  box.addEventListener("blur", () => hide(chart));
  box.addEventListener("keydown", (event) => { if (event.target === box && press(chart, event.key)) event.preventDefault(); });
  box.addEventListener("pointerdown", (event) => { begun = event.target === chart.back ? undefined : under(event); });
  box.addEventListener("dblclick", () => chart.kind === "memory" && zoom(chart));
  box.addEventListener("pointerup", (event) => {
    const item = under(event), isMemory = chart.kind === "memory";
    if (!begun || !item) return;
    if (isMemory && begun !== item) zoom(chart, [begun.range[0], item.range[0]].sort((one, other) => one - other));
    if (!isMemory && chart.kind === "map") {
      const [x, y] = pointed(event), [whole] = chart.items;
      const inner = chart.items.find((other) => other.step && inBox(other.box, x, y));
      if (inner?.leads) zoom(chart, inner.node); else if (!inner && whole.leads) zoom(chart);
    }
    begun = undefined;
  });
};
let isPrinting = false;
const PAPER = 680;  // CSS pixels between the margins of A4
const drawAll = () => { for (const chart of charts) if (isPrinting || chart.width !== chart.box.clientWidth) draw(chart, isPrinting ? PAPER : undefined); };
charts.forEach(attend);
drawAll();
new ResizeObserver(() => isPrinting || requestAnimationFrame(drawAll)).observe(document.body);
