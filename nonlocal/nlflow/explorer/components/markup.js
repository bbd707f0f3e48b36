// A piece of HTML, whose words the server has escaped.
export function render({ model }) {
  const root = document.createElement("div");
  const show = () => { root.innerHTML = model.shown; };
  model.on("shown", show);
  show();
  return root;
}
