// A number: a slider with its value, and a box for "chosen", where the program chooses it.
// The page owns the value while the user moves it. Every move has a serial number, and what comes back from the server
// is taken only if there was no later move.
export function render({ model }) {
  const root = document.createElement("div");
  root.className = "nl-knob";
  root.dataset.name = model.spec.name;
  root.innerHTML = `<div class="name"><span><span class="text"></span> <span class="unit"></span></span><output></output>
    <input type="range"></div><label class="chosen"
    title="chosen by the program, from the noise"><input type="checkbox"> chosen</label>`;
  const range = root.querySelector("input[type=range]");
  const box = root.querySelector("input[type=checkbox]");
  const output = root.querySelector("output");
  let serial = 0;
  const write = () => {
    output.textContent = Number(range.value).toFixed(model.spec.digits);
    range.setAttribute("aria-valuetext", `${output.textContent} ${model.spec.unit}`);
  };
  const send = () => model.send_msg({ value: Number(range.value), chosen: box.checked, serial: ++serial });
  const limits = () => {
    root.querySelector(".text").textContent = model.spec.label;
    root.querySelector(".unit").textContent = model.spec.unit;
    root.querySelector(".chosen").style.display = model.spec.choosable ? "" : "none";
    Object.assign(range, { min: model.spec.low, max: model.spec.high, step: model.spec.step });
    range.setAttribute("aria-label", `${model.spec.label} ${model.spec.unit}`);
    box.setAttribute("aria-label", `${model.spec.label}: chosen by the program`);
  };
  const show = () => {
    range.disabled = box.disabled = model.shown.disabled;
    root.classList.toggle("off", model.shown.disabled);
    if (model.shown.serial < serial) return;
    range.value = model.shown.value;
    box.checked = model.shown.chosen;
    write();
  };
  range.addEventListener("input", () => { box.checked = false; write(); send(); });
  box.addEventListener("change", send);
  model.on("spec", () => { limits(); show(); });
  model.on("shown", show);
  limits();
  show();
  return root;
}
