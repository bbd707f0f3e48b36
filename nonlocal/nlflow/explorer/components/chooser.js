// One of a few words.
export function render({ model }) {
  const root = document.createElement("div");
  root.className = "nl-chooser";
  root.dataset.name = model.name_of;
  root.innerHTML = `<label><span></span><select></select></label>`;
  const select = root.querySelector("select");
  const fill = () => {
    root.querySelector("span").textContent = model.label;
    select.replaceChildren(...Object.entries(model.options).map(([value, text]) => new Option(text, value)));
    select.value = model.shown.value;
  };
  select.addEventListener("change", () => model.send_msg(select.value));
  model.on("options", fill);
  model.on("shown", () => { select.value = model.shown.value; });
  fill();
  return root;
}
