// The texts that compute what is seen.
export function render({ model }) {
  const root = document.createElement("div");
  root.className = "nl-code";
  root.innerHTML = `<div class="row"><button class="python">Copy as Python</button>
    <button class="command">Copy as command</button><span class="said" role="status"></span></div>
    <p class="note"></p><details><summary>Show the texts</summary><pre class="python" tabindex="0"
    aria-label="Python"></pre><pre class="command" tabindex="0" aria-label="command"></pre></details>`;
  const said = root.querySelector(".said"), details = root.querySelector("details");
  const copy = async (text, name) => {
    try {
      await navigator.clipboard.writeText(text);
      said.textContent = `${name} copied`;
    } catch {
      details.open = true;
      said.textContent = "the browser refuses to copy: select the text below";
    }
  };
  root.querySelector("button.python").addEventListener("click", () => copy(model.shown.python, "Python"));
  root.querySelector("button.command").addEventListener("click", () => copy(model.shown.command, "command"));
  const show = () => {
    root.querySelector("pre.python").textContent = model.shown.python;
    root.querySelector("pre.command").textContent = model.shown.command;
    root.querySelector(".note").textContent = model.shown.note;
    said.textContent = "";
  };
  model.on("shown", show);
  show();
  return root;
}
