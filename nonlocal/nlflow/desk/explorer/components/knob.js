// A number: a slider, a field with its value, and a box for "automatic", where the program chooses it.
// The page owns the value while the user moves it. Every move has a number, and a value from the server is shown only
// if the server knew the last move.
const PAUSE = 50;  // milliseconds at least between two moves that are sent while the slider is dragged

export function render({ model }) {
  const root = document.createElement("div");
  root.className = "nl-knob";
  root.dataset.name = model.shown.name;
  root.innerHTML = `<div class="name"><span><span class="text"></span> <span class="unit"></span></span>
    <input type="number"></div><div class="number"><input type="range"><label class="automatic"
    title="the program takes the value from the file"><input type="checkbox"> automatic</label></div>`;
  const find = (selector) => root.querySelector(selector);
  const range = find("input[type=range]"), box = find("input[type=checkbox]"), field = find("input[type=number]");
  let move = 0, sent = -PAUSE, due = 0;
  // The slider stands at the nearest of its steps; the field has the number itself, with four digits.
  // What is not computed yet has no number: a word stands in its place.
  const write = (value, word = "") => {
    field.value = word ? "" : String(Number(value.toPrecision(4)));
    field.placeholder = word;
    root.classList.toggle("unknown", word !== "");
    range.setAttribute("aria-valuetext", word || `${field.value} ${model.shown.unit}`);
  };
  const number = () => (field.value === "" ? model.shown.value : Number(field.value));
  const send = () => {
    clearTimeout(due);
    [sent, due] = [performance.now(), 0];
    model.send_msg({ value: number(), automatic: box.checked, move });
  };
  const moved = () => { move++; send(); };
  const dragged = () => { move++; due ||= setTimeout(send, Math.max(sent + PAUSE - performance.now(), 0)); };
  const show = () => {
    const { label, unit, low, high, step, value, word, automatic, optional, whole, disabled } = model.shown;
    find(".text").textContent = label;
    find(".unit").textContent = unit;
    find(".automatic").style.display = optional ? "" : "none";
    Object.assign(range, { min: low, max: high, step, disabled });
    Object.assign(field, { min: low, max: high, step: whole ? step : "any", disabled });
    range.setAttribute("aria-label", `${label} ${unit}`);
    field.setAttribute("aria-label", `${label} ${unit}, as a number`);
    box.setAttribute("aria-label", `${label}: automatic`);
    box.disabled = disabled;
    root.classList.toggle("off", disabled);
    if (model.shown.move < move) return;
    range.value = value;
    box.checked = automatic;
    write(value, word);
  };
  range.addEventListener("input", () => { box.checked = false; write(Number(range.value)); dragged(); });
  field.addEventListener("change", () => {
    if (!field.checkValidity() || field.value === "") { field.reportValidity(); write(model.shown.value, model.shown.word); return; }
    box.checked = false;
    range.value = field.value;
    moved();
  });
  box.addEventListener("change", moved);
  model.on("shown", show);
  show();
  return root;
}
