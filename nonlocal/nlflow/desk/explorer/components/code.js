// The texts that compute what is seen, and buttons that copy them.
export function render({ model }) {
  const root = document.createElement("div");
  root.className = "nl-code";
  root.innerHTML = `<div class="row"><button>Copy as Python</button><button>Copy as command</button>
    <span class="said" role="status"></span></div><p class="note"></p><details><summary>Show the texts</summary>
    <pre class="python" tabindex="0" aria-label="Python"></pre>
    <pre class="command" tabindex="0" aria-label="command"></pre></details>`;
  const said = root.querySelector(".said"), names = ["python", "command"];
  root.querySelectorAll("button").forEach((button, k) => button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(model.shown[names[k]]);
      said.textContent = `${button.textContent.replace("Copy as ", "")} copied`;
    } catch {
      root.querySelector("details").open = true;
      said.textContent = "the browser refuses to copy: select the text below";
    }
  }));
  const show = () => {
    for (const name of names) root.querySelector(`pre.${name}`).textContent = model.shown[name];
    root.querySelector(".note").textContent = model.shown.note;
    said.textContent = "";
  };
  model.on("shown", show);
  show();
  return root;
}
