// Pictures beside each other; the first two, where there is something to compare, in one frame with a divider.
export function render({ model }) {
  const root = document.createElement("div");
  root.className = "views";
  let frame, timer, cut = 50, blinking = false;
  const figure = (item) => {
    const one = document.createElement("figure");
    one.innerHTML = `<img><figcaption></figcaption>`;
    root.append(one);
    return one;
  };
  const compared = () => {
    const one = document.createElement("figure");
    one.innerHTML = `<div class="frame"><img class="below"><img class="above"><div class="line"></div>
      <span class="tag left"></span><span class="tag right"></span></div><figcaption></figcaption>
      <div class="tools"><label>divider <input type="range" class="divider" min="0" max="100" value="50"></label>
      <button class="blink" aria-pressed="false">Blink</button></div>`;
    frame = one.querySelector(".frame");
    const divider = one.querySelector(".divider");
    divider.addEventListener("input", () => { cut = divider.value; frame.style.setProperty("--cut", `${cut}%`); });
    const button = one.querySelector(".blink");
    button.addEventListener("click", () => {
      blinking = !blinking;
      button.setAttribute("aria-pressed", String(blinking));
      button.textContent = blinking ? "Swipe" : "Blink";
      divider.disabled = blinking;
      frame.classList.toggle("blink", blinking);
      clearInterval(timer);
      if (blinking) timer = setInterval(() => frame.classList.toggle("first"), 700);
      else frame.classList.remove("first");
    });
    const drag = (event) => {
      if (blinking || event.buttons !== 1) return;
      const box = frame.getBoundingClientRect();
      divider.value = (100 * (event.clientX - box.left)) / box.width;
      divider.dispatchEvent(new Event("input"));
      event.preventDefault();
    };
    frame.addEventListener("pointerdown", drag);
    frame.addEventListener("pointermove", drag);
    root.append(one);
    return one;
  };
  // What stays while settings move is sent once, apart from what changes.
  const source = (item) => item.src || model.still[item.name] || "";
  let built = "";
  const show = () => {
    const wanted = `${model.shown.items.length} ${model.shown.compare}`;
    if (wanted !== built) {
      root.replaceChildren();
      if (model.shown.compare) compared();
      model.shown.items.slice(model.shown.compare ? 2 : 0).forEach(figure);
      built = wanted;
    }
    const figures = [...root.children];
    const rest = model.shown.items.slice(model.shown.compare ? 2 : 0);
    if (model.shown.compare) {
      const [below, above] = model.shown.items;
      const one = figures.shift();
      one.querySelector(".below").src = source(below);
      one.querySelector(".above").src = source(above);
      one.querySelector(".below").alt = below.alt;
      one.querySelector(".above").alt = above.alt;
      one.querySelector(".left").textContent = below.name;
      one.querySelector(".right").textContent = above.name;
      one.querySelector("figcaption").textContent = below.caption;
    }
    figures.forEach((one, k) => {
      one.querySelector("img").src = source(rest[k]);
      one.querySelector("img").alt = rest[k].alt;
      one.querySelector("figcaption").textContent = rest[k].caption;
    });
    // When the pictures are on the screen, for those who wait for it.
    root.dataset.serial = model.shown.serial;
  };
  model.on(["still", "shown"], show);
  show();
  return root;
}
