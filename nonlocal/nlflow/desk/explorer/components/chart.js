// Lines with axes, linear or logarithmic, drawn anew for every width of the page.

// Places of the marks of an axis, about `most` of them.
const ticks = (low, high, logarithmic, most) => {
  const marks = [];
  if (logarithmic) {
    const first = Math.ceil(low - 1e-9), last = Math.floor(high + 1e-9);
    const stride = Math.max(1, Math.ceil((last - first + 1) / most));
    for (let k = first; k <= last; k += stride) marks.push(k);
    if (marks.length > 1) return marks;
    marks.length = 0;
    for (let k = Math.floor(low); k <= high; k++) for (const one of [1, 2, 5]) marks.push(k + Math.log10(one));
    const inside = marks.splice(0).filter((mark) => mark >= low && mark <= high);
    if (inside.length > 1) return inside;
  }
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough);
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) marks.push(k * step);
  return marks;
};

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const words = (value, logarithmic) => {
  if (!logarithmic) return String(Number(value.toPrecision(6))).replace("-", "−");
  const power = Math.floor(value + 1e-9);
  if (power >= -2 && power <= 3) return String(Number((10 ** value).toPrecision(3)));
  const digits = Number((10 ** (value - power)).toPrecision(3));
  const raised = `10${power < 0 ? "⁻" : ""}${[...String(Math.abs(power))].map((k) => SUPERSCRIPTS[k]).join("")}`;
  return digits === 1 ? raised : `${digits}·${raised}`;
};

const range = (values) => {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  if (!(low <= high)) return [0, 1];
  // What differs by rounding alone is one value: its axis would have marks without end.
  const one = high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high));
  const room = one ? 0.1 * (Math.abs(high) || 1) : 0.04 * (high - low);
  return [low - room, high + room];
};

// Colours are variables of the page, which attributes of a drawing cannot name.
const stroke = ({ color, width, dash }) => `stroke: ${color}; stroke-width: ${width}; stroke-dasharray: ${dash}`;

const draw = ({ title, xlabel, ylabel, log, height, lines }, place, legend) => {
  const logx = log.includes("x"), logy = log.includes("y");
  const scaled = (values, logarithmic) =>
    values.map((v) => (v === null ? NaN : logarithmic ? (v > 0 ? Math.log10(v) : NaN) : v));
  const data = lines.map((line) => ({ ...line, x: scaled(line.x, logx), y: scaled(line.y, logy), told: line.y }));
  for (const line of lines.length > 1 ? lines : []) {
    const entry = document.createElement("span");
    const mark = node("svg", { width: 22, height: 10, "aria-hidden": "true" }, entry);
    if (line.width) node("line", { x1: 0, y1: 5, x2: 22, y2: 5, style: stroke(line) }, mark);
    else node("circle", { cx: 11, cy: 5, r: 3.5, style: `fill: ${line.color}` }, mark);
    entry.append(` ${line.name}`);
    legend.append(entry);
  }
  const told = `${title}: ${lines.map((line) => line.name).join(", ")}; ${xlabel}, ${ylabel}`;
  const { svg, left, top, w, h, axes } = framed(place, { xlabel, ylabel, height }, told, 62, 8);
  const [x0, x1] = range(data.flatMap((line) => line.x)), [y0, y1] = range(data.flatMap((line) => line.y));
  const px = (x) => left + (w * (x - x0)) / (x1 - x0), py = (y) => top + h * (1 - (y - y0) / (y1 - y0));
  for (const x of ticks(x0, x1, logx, Math.max(2, Math.floor(w / 75)))) {
    node("line", { x1: px(x), x2: px(x), y1: top, y2: top + h, class: "grid" }, svg);
    node("text", { x: px(x), y: top + h + 15, "text-anchor": "middle" }, svg, words(x, logx));
  }
  for (const y of ticks(y0, y1, logy, Math.max(2, Math.floor(h / 32)))) {
    node("line", { x1: left, x2: left + w, y1: py(y), y2: py(y), class: "grid" }, svg);
    node("text", { x: left - 5, y: py(y) + 4, "text-anchor": "end" }, svg, words(y, logy));
  }
  axes();
  // The path of a line, as far as its places are not beyond one.
  const traced = (line, most = Infinity) => {
    let path = "", pen = "M", end = null;
    line.x.forEach((x, k) => {
      const y = line.y[k];
      if (x > most) return;
      if (!Number.isFinite(x) || !Number.isFinite(y)) { pen = "M"; return; }
      end = [px(x), py(y)];
      path += `${pen}${end[0].toFixed(1)} ${end[1].toFixed(1)}`;
      pen = "L";
    });
    return { path, end };
  };
  const moving = [];
  for (const line of data) {
    if (line.markers) line.x.forEach((x, k) => {
      if (!Number.isFinite(x) || !Number.isFinite(line.y[k])) return;
      const dot = node("circle", { cx: px(x), cy: py(line.y[k]), r: 3.5, style: `fill: ${line.color}` }, svg);
      node("title", {}, dot, `${line.name}: ${line.told[k]}`);
    });
    const drawn = node("path", { d: traced(line).path, fill: "none", style: stroke(line) }, svg);
    if (line.runs || line.field !== undefined) moving.push([line, drawn]);
  }
  const heads = moving.filter(([line]) => line.runs).map(([line]) => node("circle", { r: 4, style: `fill: ${line.color}` }, svg));
  return ({ t, values }) => {
    let k = 0;
    for (const [line, drawn] of moving) {
      if (line.field !== undefined) {  // a state: all of it changes
        const y = [...values(line.field)];
        if (y.length === line.x.length) drawn.setAttribute("d", traced({ ...line, y }).path);
        continue;
      }
      const { path, end } = traced(line, logx ? Math.log10(t) : t), head = heads[k++];
      drawn.setAttribute("d", path);
      head.setAttribute("visibility", end ? "visible" : "hidden");
      if (end) { head.setAttribute("cx", end[0]); head.setAttribute("cy", end[1]); }
    }
  };
};

// A long line shows a window of its samples, which the server draws: the mouse says how it is to move.
export const render = ({ model }) => {
  const root = figure(model, draw), place = root.querySelector(".place");
  if (!model.shown.moves) return root;
  place.classList.add("moves");
  let from = null;
  place.addEventListener("pointerdown", (event) => { from = event.clientX; place.setPointerCapture(event.pointerId); });
  place.addEventListener("pointerup", (event) => {
    if (from !== null && Math.abs(event.clientX - from) > 3) model.send_msg({ shift: (event.clientX - from) / place.clientWidth });
    from = null;
  });
  place.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;  // the page is scrolled
    event.preventDefault();
    model.send_msg({ factor: Math.exp(event.deltaY / 300) });
  }, { passive: false });
  return root;
};
