// Pictures beside each other; the first two, where there is something to compare, in one frame with a divider.
const BLINK = 700;  // milliseconds

const plain = (root) => {
  const one = document.createElement("figure");
  one.innerHTML = `<img><figcaption></figcaption>`;
  root.append(one);
};

const compared = (root) => {
  const one = document.createElement("figure");
  one.innerHTML = `<div class="frame"><img><img class="above"><div class="line"></div>
    <span class="tag left"></span><span class="tag right"></span></div><figcaption></figcaption>
    <div class="tools"><label>divider <input type="range" class="divider" min="0" max="100" value="50"></label>
    <button class="blink" aria-pressed="false">Blink</button></div>`;
  const frame = one.querySelector(".frame"), divider = one.querySelector(".divider"), button = one.querySelector("button");
  let timer, blinking = false;
  divider.addEventListener("input", () => frame.style.setProperty("--cut", `${divider.value}%`));
  button.addEventListener("click", () => {
    blinking = divider.disabled = !blinking;
    button.setAttribute("aria-pressed", String(blinking));
    button.textContent = blinking ? "Swipe" : "Blink";
    frame.classList.toggle("blink", blinking);
    frame.classList.remove("first");
    clearInterval(timer);
    if (blinking) timer = setInterval(() => frame.classList.toggle("first"), BLINK);
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
};

export function render({ model }) {
  const root = document.createElement("div");
  root.className = "views";
  let built = "";
  const show = () => {
    const { items, compare, serial } = model.shown;
    if (built !== `${items.length} ${compare}`) {
      built = `${items.length} ${compare}`;
      root.replaceChildren();
      if (compare) compared(root);
      items.slice(compare ? 2 : 0).forEach(() => plain(root));
    }
    root.querySelectorAll("img").forEach((image, k) => {
      // What stays while settings move is sent once, apart from what changes.
      image.src = items[k].src || model.still[items[k].name] || "";
      image.alt = items[k].alt;
    });
    const captions = compare ? [items[0], ...items.slice(2)] : items;
    root.querySelectorAll("figcaption").forEach((one, k) => { one.textContent = captions[k].caption; });
    root.querySelectorAll(".tag").forEach((one, k) => { one.textContent = items[k].name; });
    root.dataset.serial = serial;  // the pictures are on the screen, for those who wait for it
  };
  model.on(["still", "shown"], show);
  show();
  return root;
}
