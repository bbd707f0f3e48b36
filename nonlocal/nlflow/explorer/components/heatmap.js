// Numbers by row and column as colours, with the scale beside them and the number of a cell where the pointer is.
export function render({ model }) {
  const root = document.createElement("figure");
  root.className = "chart";
  root.innerHTML = `<figcaption></figcaption><div class="place"></div>`;
  const [caption, place] = root.children;
  const draw = () => {
    const { title, xlabel, ylabel, values, names, low, high, palette, height, serial } = model.shown;
    caption.textContent = title;
    place.replaceChildren();
    root.dataset.serial = serial;
    if (!values.length) return;
    const width = Math.max(place.clientWidth, 160), columns = values.length, rows = values[0].length;
    const left = 40, right = 66, top = 6, bottom = 40, w = width - left - right, h = height - top - bottom;
    const svg = node("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title }, place);
    const shade = (v) => palette[Math.min(palette.length - 1, Math.floor(((v - low) / (high - low)) * palette.length))];
    values.forEach((column, i) => column.forEach((value, j) => {
      if (value === null) return;
      const cell = node("rect", { x: left + (w * i) / columns, y: top + (h * (rows - 1 - j)) / rows,
        width: w / columns + 0.3, height: h / rows + 0.3, fill: shade(value) }, svg);
      node("title", {}, cell, `${names[i]}, head ${j}: ${value}`);
    }));
    const every = (count, room) => Math.max(1, Math.ceil(count / Math.max(1, Math.floor(room))));
    for (let i = 0; i < columns; i += every(columns, w / 28)) {
      node("text", { x: left + (w * (i + 0.5)) / columns, y: top + h + 15, "text-anchor": "middle" }, svg, i);
    }
    for (let j = 0; j < rows; j += every(rows, h / 18)) {
      node("text", { x: left - 6, y: top + (h * (rows - 0.5 - j)) / rows + 4, "text-anchor": "end" }, svg, j);
    }
    node("path", { d: `M${left} ${top}V${top + h}H${left + w}`, class: "axis" }, svg);
    node("text", { x: left + w / 2, y: height - 6, "text-anchor": "middle" }, svg, xlabel);
    node("text", { transform: `translate(12 ${top + h / 2}) rotate(-90)`, "text-anchor": "middle" }, svg, ylabel);
    palette.forEach((colour, k) => node("rect", { x: width - right + 12, width: 12, fill: colour,
      y: top + (h * (palette.length - 1 - k)) / palette.length, height: h / palette.length + 0.5 }, svg));
    for (const share of [0, 0.5, 1]) {
      const y = top + h * (1 - share) + (share === 1 ? 9 : share === 0 ? 0 : 4);
      node("text", { x: width - right + 28, y }, svg, Number((low + share * (high - low)).toPrecision(3)));
    }
  };
  model.on("shown", draw);
  let before = 0;
  new ResizeObserver(() => {
    if (place.clientWidth && place.clientWidth !== before) { before = place.clientWidth; draw(); }
  }).observe(place);
  return root;
}
