// Pictures beside each other; the first two, where there is something to compare, in one frame with a divider.
// All show the same place: they are moved and made larger together.
const BLINK = 700, MOST = 64, STEP = 1.5, DOUBLE = 3, REACH = 18;
// Milliseconds; screen pixels a pixel; how much larger by a press of +, and by a double click; pixels.

const lens = (name) => `<div class="frame" tabindex="0" role="group" aria-keyshortcuts="+ - 0 ArrowLeft ArrowRight"
  title="drag to move; +, −, two fingers or Ctrl and the wheel to zoom; a double click enlarges or fits">${name}</div><figcaption></figcaption>`;
const plain = (item) => `<figure>${lens(item.size ? "<canvas role='img'></canvas>" : "<img>")}</figure>`;
const compared = `<figure class="main">${lens(`<img><div class="above"><img></div><div class="line"></div>
  <span class="tag left"></span><span class="tag right"></span>`)}</figure>`;
const tools = `<div class="tools"><span class="zoom" role="group" aria-label="zoom"><button data-do="out" aria-label="zoom out">−</button>
  <button data-do="in" aria-label="zoom in">+</button><button data-do="fit">Fit</button>
  <button data-do="true" title="a pixel of the picture is a pixel of the page">1:1</button>
  <output aria-live="polite"></output></span>
  <select class="which" aria-label="picture"></select>
  <span class="two"><label>divider <input type="range" class="divider" min="0" max="100" value="50"></label>
  <button class="blink" aria-pressed="false">Blink</button></span></div>`;

const within = (value, low, high) => Math.min(Math.max(value, low), high);

export function render({ model }) {
  const root = document.createElement("div");
  root.className = "views";
  root.innerHTML = `${tools}<div class="row"></div>`;
  const row = root.querySelector(".row"), divider = root.querySelector(".divider"), blink = root.querySelector(".blink");
  const which = root.querySelector(".which");
  const zoomed = root.querySelector("output"), fingers = new Map();
  // The place that is shown: how much larger than what fits, and what lies in the middle, as shares of the picture.
  let built = "", opened, timer, blinking = false, zoom = 1, x = 0.5, y = 0.5;

  const measure = () => {
    const frame = [...row.querySelectorAll(".frame")].find((one) => one.clientWidth);  // one that is seen
    const image = frame && frame.querySelector("img, canvas");
    const width = image && (image.naturalWidth ?? image.width);
    return width ? frame.clientWidth / width : 0;
  };
  const place = () => {
    const fit = measure();
    if (!fit) return;
    zoom = within(zoom, Math.min(1, 1 / fit), Math.max(MOST / fit, 1));
    const half = Math.min(0.5, 0.5 / zoom);
    [x, y] = [within(x, half, 1 - half), within(y, half, 1 - half)];
    row.style.setProperty("--move", `translate(${(0.5 - x * zoom) * 100}%, ${(0.5 - y * zoom) * 100}%) scale(${zoom})`);
    row.classList.toggle("fine", fit * zoom < 1);
    row.classList.toggle("near", zoom > 1);
    zoomed.textContent = `${Number((fit * zoom * 100).toPrecision(3))} %`;
  };
  // Make it larger, with the same thing under a point of the frame.
  const larger = (factor, px = 0.5, py = 0.5) => {
    const before = zoom;
    zoom *= factor;
    const fit = measure();
    zoom = within(zoom, Math.min(1, 1 / fit), Math.max(MOST / fit, 1));
    x += (px - 0.5) * (1 / before - 1 / zoom);
    y += (py - 0.5) * (1 / before - 1 / zoom);
    place();
  };
  // Move what is seen, in shares of the frame.
  const move = (right, down) => { x -= right / zoom; y -= down / zoom; place(); };
  const acts = {
    in: () => larger(STEP), out: () => larger(1 / STEP), true: () => larger(1 / (measure() * zoom)),
    fit: () => { [zoom, x, y] = [1, 0.5, 0.5]; place(); },
  };
  const keys = { "+": acts.in, "=": acts.in, "-": acts.out, 0: acts.fit };
  const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const cut = (value) => { divider.value = value; divider.dispatchEvent(new Event("input")); };

  const listen = (frame) => {
    const shares = (event) => {
      const box = frame.getBoundingClientRect();
      return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height, box];
    };
    let cutting = false;
    const line = () => frame.querySelector(".line") && !blinking;
    frame.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;  // the page is scrolled
      event.preventDefault();
      larger(Math.exp(-event.deltaY / 300), ...shares(event));
    }, { passive: false });
    frame.addEventListener("dblclick", (event) => { if (zoom > 1) acts.fit(); else larger(DOUBLE, ...shares(event)); });
    frame.addEventListener("keydown", (event) => {
      const arrow = arrows[event.key];
      if (keys[event.key]) keys[event.key]();
      else if (arrow && zoom > 1) move(-0.1 * arrow[0], -0.1 * arrow[1]);
      else if (arrow && arrow[0] && line()) cut(Number(divider.value) + 5 * arrow[0]);
      else return;
      event.preventDefault();
    });
    frame.addEventListener("pointerdown", (event) => {
      const [px, , box] = shares(event);
      fingers.set(event.pointerId, [event.clientX, event.clientY]);
      cutting = line() && fingers.size === 1 && (zoom <= 1 || Math.abs(px * 100 - divider.value) * box.width < REACH * 100);
      if (cutting) cut(px * 100);
      frame.setPointerCapture(event.pointerId);
    });
    frame.addEventListener("pointermove", (event) => {
      const before = fingers.get(event.pointerId);
      if (!before) return;
      const [px, py, box] = shares(event), now = [event.clientX, event.clientY];
      const other = [...fingers].find(([id]) => id !== event.pointerId);
      fingers.set(event.pointerId, now);
      if (other) {  // two fingers: their distance, and what lies between them goes along
        const [a, b] = other[1], far = ([c, d]) => Math.hypot(c - a, d - b);
        const middle = ([c, d]) => [((c + a) / 2 - box.left) / box.width, ((d + b) / 2 - box.top) / box.height];
        const [from, to] = [middle(before), middle(now)];
        larger(far(now) / Math.max(far(before), 1), ...from);
        move(to[0] - from[0], to[1] - from[1]);
      } else if (cutting) {
        cut(px * 100);
      } else {
        move((now[0] - before[0]) / box.width, (now[1] - before[1]) / box.height);
      }
    });
    for (const end of ["pointerup", "pointercancel"]) frame.addEventListener(end, (event) => fingers.delete(event.pointerId));
  };

  root.querySelectorAll("[data-do]").forEach((one) => one.addEventListener("click", acts[one.dataset.do]));
  divider.addEventListener("input", () => row.style.setProperty("--cut", `${divider.value}%`));
  blink.addEventListener("click", () => {
    blinking = divider.disabled = !blinking;
    blink.setAttribute("aria-pressed", String(blinking));
    blink.textContent = blinking ? "Swipe" : "Blink";
    row.classList.toggle("blink", blinking);
    row.classList.remove("first");
    clearInterval(timer);
    if (blinking) timer = setInterval(() => row.classList.toggle("first"), BLINK);
  });
  // On a narrow page one picture is seen at a time.
  const choose = () => {
    row.querySelectorAll("figure").forEach((one, k) => one.classList.toggle("chosen", k === which.selectedIndex));
    place();
  };
  which.addEventListener("change", choose);
  new ResizeObserver(place).observe(row);

  // Pictures that run: grey levels of a moment, on a canvas.
  const run = ({ values }) => row.querySelectorAll("canvas").forEach((canvas) => {
    const item = model.shown.items[[...row.querySelectorAll("img, canvas")].indexOf(canvas)];
    const levels = values(item.field), [rows, columns] = item.size;
    if (levels.length !== rows * columns) return;  // of the signal before
    const pixels = new Uint32Array(levels.length);
    levels.forEach((level, k) => { pixels[k] = 0xff000000 | (level * 0x010101); });
    const image = new ImageData(new Uint8ClampedArray(pixels.buffer), columns, rows);
    canvas.getContext("2d").putImageData(image, 0, 0);
  });
  document.addEventListener("nl-moment", (event) => run(event.detail));

  const show = () => {
    const { items, compare, serial, source, coarse } = model.shown;
    if (opened !== source) { opened = source; acts.fit(); }  // another file is seen whole
    const form = `${items.map((one) => Boolean(one.size))} ${compare}`;
    if (built !== form) {
      built = form;
      row.innerHTML = (compare ? compared : "") + items.slice(compare ? 2 : 0).map(plain).join("");
      row.querySelectorAll(".frame").forEach(listen);
      row.classList.toggle("compare", compare);
      root.querySelector(".two").hidden = !compare;
      const names = items.map((one) => one.name);
      if (compare) names.splice(0, 2, `${names[0]} | ${names[1]}`);
      which.replaceChildren(...names.map((name) => new Option(name)));
      which.hidden = names.length < 2;
      choose();
    }
    root.hidden = items.length === 0;
    row.querySelectorAll("img, canvas").forEach((image, k) => {
      if (items[k].size) {
        image.setAttribute("aria-label", items[k].alt);
        [image.height, image.width] = items[k].size;
        return;
      }
      // What stays while settings move is sent once, apart from what changes.
      const src = items[k].src || model.still[items[k].name] || "";
      if (image.getAttribute("src") !== src) image.src = src;  // else it would be decoded anew
      image.alt = items[k].alt;
      image.draggable = false;
      if (k === 0) image.onload ||= () => {
        const shape = image.naturalWidth / image.naturalHeight;
        row.style.setProperty("--shape", shape);
        row.classList.toggle("broad", shape > 1.7);
        place();
      };
    });
    const captions = compare ? [items[0], ...items.slice(2)] : items;
    row.querySelectorAll("figcaption").forEach((one, k) => { one.textContent = captions[k].caption; });
    row.querySelectorAll(".frame").forEach((one, k) => one.setAttribute("aria-label", captions[k].alt));
    row.querySelectorAll(".tag").forEach((one, k) => { one.textContent = items[k].name + (coarse && k === 1 ? ", coarse" : ""); });
    if (document.nlMoment) run(document.nlMoment);
    root.dataset.coarse = coarse;
    root.dataset.serial = serial;  // the pictures are on the screen, for those who wait for it
  };
  model.on(["still", "shown"], show);
  show();
  return root;
}
