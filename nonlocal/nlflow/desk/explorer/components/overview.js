// The whole picture, small, and the part of it that is shown; a click moves the part.
export function render({ model }) {
  const root = document.createElement("div");
  root.className = "overview";
  root.innerHTML = `<div class="whole" title="click to show another part"><img alt="the whole picture" draggable="false">
    <div class="mark"></div></div>`;
  const [whole] = root.children, [image, mark] = whole.children;
  const show = () => {
    const { src, place } = model.shown;
    root.hidden = !src;
    if (!src) return;
    image.src = src;
    ["top", "left", "height", "width"].forEach((name, k) => { mark.style[name] = `${place[k] * 100}%`; });
  };
  whole.addEventListener("click", (event) => {
    const box = whole.getBoundingClientRect();
    model.send_msg({ y: (event.clientY - box.top) / box.height, x: (event.clientX - box.left) / box.width });
  });
  model.on("shown", show);
  show();
  return root;
}
