// What drawings share: an element with its attributes and its text, at the end of its parent; a figure that is drawn
// anew when its content or its width changes; what `draw` returns gets the moments of the player, see player.js.
const NS = "http://www.w3.org/2000/svg";

const node = (name, attributes, parent, text) => {
  const one = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
  if (text !== undefined) one.textContent = text;
  parent.append(one);
  return one;
};

// The room of a drawing of a width: its SVG, and the place of the axes in it.
const framed = (place, { xlabel, ylabel, height }, told, left, right) => {
  const width = Math.max(place.clientWidth, 160), top = 6, w = width - left - right, h = height - top - 40;
  const svg = node("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": told }, place);
  const axes = () => {
    node("path", { d: `M${left} ${top}V${top + h}H${left + w}`, class: "axis" }, svg);
    node("text", { x: left + w / 2, y: height - 6, "text-anchor": "middle" }, svg, xlabel);
    node("text", { transform: `translate(12 ${top + h / 2}) rotate(-90)`, "text-anchor": "middle" }, svg, ylabel);
  };
  return { svg, width, left, top, w, h, axes };
};

const figure = (model, draw) => {
  const root = document.createElement("figure");
  root.className = "chart";
  root.innerHTML = `<figcaption></figcaption><div class="legend"></div><div class="place"></div>`;
  const [caption, legend, place] = root.children;
  let width = 0, run = () => {};
  const again = () => {
    caption.textContent = model.shown.title;
    legend.replaceChildren();
    place.replaceChildren();
    // On a narrow page a drawing leaves room for what moves it.
    const most = innerWidth < 800 ? Math.max(0.28 * innerHeight, 140) : Infinity;
    const height = Math.min(model.shown.height, most);
    if (model.shown.empty) {  // no axes around what is not there
      place.innerHTML = `<p class="empty"></p>`;
      place.firstChild.style.height = `${height}px`;
      place.firstChild.textContent = model.shown.empty;
      run = () => {};
      return;
    }
    run = draw({ ...model.shown, height }, place, legend) ?? (() => {});
    if (document.nlMoment) run(document.nlMoment);
  };
  model.on("shown", again);
  document.addEventListener("nl-moment", (event) => run(event.detail));
  new ResizeObserver(() => {
    if (place.clientWidth && place.clientWidth !== width) { width = place.clientWidth; again(); }
  }).observe(place);
  return root;
};
