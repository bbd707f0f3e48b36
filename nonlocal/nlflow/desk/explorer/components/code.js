// The texts that compute what is seen, and buttons that copy them.
export function render({ model }) {
  const root = document.createElement("div");
  root.className = "nl-code";
  root.innerHTML = `<div class="row"><button>Copy as Python</button><button>Copy as command</button>
    <span class="said" role="status"></span></div><p class="note"></p><details><summary>Show the texts</summary>
    <pre class="python" tabindex="0" aria-label="Python"></pre>
    <pre class="command" tabindex="0" aria-label="command"></pre></details>`;
  const said = root.querySelector(".said"), names = ["python", "command"];
  const buttons = root.querySelectorAll("button");
  buttons.forEach((button, k) => button.addEventListener("click", async () => {
    const refused = "the browser refuses to copy: select the text below";
    if (!await copied(model.shown[names[k]], said, `${button.textContent.replace("Copy as ", "")} copied`, refused))
      root.querySelector("details").open = true;
  }));
  const show = () => {
    names.forEach((name, k) => {
      root.querySelector(`pre.${name}`).textContent = model.shown[name];
      buttons[k].disabled = !model.shown[name];  // nothing is computed yet
    });
    root.querySelector(".note").textContent = model.shown.note;
    said.textContent = "";
  };
  model.on("shown", show);
  show();
  return root;
}
