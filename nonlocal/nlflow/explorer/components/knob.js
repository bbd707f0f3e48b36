// A number: a slider with its value, and a box for "chosen", where the program chooses it.
// The page owns the value while the user moves it. Every move has a number, and a value from the server is shown only
// if the server knew the last move.
export function render({ model }) {
  const root = document.createElement("div");
  root.className = "nl-knob";
  root.dataset.name = model.shown.name;
  root.innerHTML = `<div class="name"><span><span class="text"></span> <span class="unit"></span></span><output></output>
    <input type="range"></div><label class="chosen"
    title="chosen by the program, from the noise"><input type="checkbox"> chosen</label>`;
  const find = (selector) => root.querySelector(selector);
  const range = find("input[type=range]"), box = find("input[type=checkbox]"), output = find("output");
  let move = 0;
  const write = () => {
    const decimals = model.shown.step.toFixed(6).replace(/0+$/, "").split(".")[1].length;
    output.textContent = Number(range.value).toFixed(decimals);
    range.setAttribute("aria-valuetext", `${output.textContent} ${model.shown.unit}`);
  };
  const send = () => model.send_msg({ value: Number(range.value), chosen: box.checked, move: ++move });
  const show = () => {
    const { label, unit, low, high, step, choosable, disabled } = model.shown;
    find(".text").textContent = label;
    find(".unit").textContent = unit;
    find(".chosen").style.display = choosable ? "" : "none";
    Object.assign(range, { min: low, max: high, step, disabled });
    range.setAttribute("aria-label", `${label} ${unit}`);
    box.setAttribute("aria-label", `${label}: chosen by the program`);
    box.disabled = disabled;
    root.classList.toggle("off", disabled);
    if (model.shown.move < move) return;
    range.value = model.shown.value;
    box.checked = model.shown.chosen;
    write();
  };
  range.addEventListener("input", () => { box.checked = false; write(); send(); });
  box.addEventListener("change", send);
  model.on("shown", show);
  show();
  return root;
}
