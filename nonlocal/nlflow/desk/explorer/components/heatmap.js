// Numbers by row and column as colours, with the scale beside them and the number of a cell where the pointer is.
const draw = ({ title, xlabel, ylabel, values, names, low, high, palette, height }, place) => {
  const columns = values.length, rows = values[0].length, shades = palette.length;
  const { svg, width, left, top, w, h, axes } = framed(place, { xlabel, ylabel, height }, title, 40, 66);
  const shade = (v) => palette[Math.min(shades - 1, Math.floor(((v - low) / (high - low)) * shades))];
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
  axes();
  palette.forEach((colour, k) => node("rect", { x: width - 54, width: 12, fill: colour,
    y: top + (h * (shades - 1 - k)) / shades, height: h / shades + 0.5 }, svg));
  for (const share of [0, 0.5, 1]) {
    const y = top + h * (1 - share) + (share === 1 ? 9 : share === 0 ? 0 : 4);
    node("text", { x: width - 38, y }, svg, Number((low + share * (high - low)).toPrecision(3)));
  }
};

export const render = ({ model }) => figure(model, draw);
