// A file from the user's disk: chosen, or dropped on the button.
export function render({ model }) {
  const root = document.createElement("div");
  const { name, label, hint, accept, limit } = model.shown;
  root.className = "drop";
  root.dataset.name = name;
  root.innerHTML = `<label><span></span><input type="file"></label><p class="hint"></p>`;
  root.querySelector("span").textContent = label;
  root.querySelector(".hint").textContent = hint;
  root.querySelector(".hint").hidden = !hint;
  const input = root.querySelector("input");
  input.accept = accept;
  const send = (file) => {
    if (!file) return;
    if (file.size > limit) {
      model.send_msg({ name: file.name, size: file.size });
      return;
    }
    const reader = new FileReader();
    reader.onload = () => model.send_msg({ name: file.name, content: reader.result.split(",", 2)[1] || "" });
    reader.onerror = () => model.send_msg({ name: file.name });
    reader.readAsDataURL(file);
  };
  input.addEventListener("change", () => { send(input.files[0]); input.value = ""; });
  root.addEventListener("dragover", (event) => { event.preventDefault(); root.classList.add("over"); });
  root.addEventListener("dragleave", () => root.classList.remove("over"));
  root.addEventListener("drop", (event) => {
    event.preventDefault();
    root.classList.remove("over");
    send(event.dataTransfer.files[0]);
  });
  return root;
}
