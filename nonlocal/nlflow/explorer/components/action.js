// A button, and the file that pressing it may bring.
export function render({ model }) {
  const root = document.createElement("div");
  root.className = "nl-action";
  root.innerHTML = `<button></button>`;
  const button = root.querySelector("button");
  const show = () => {
    button.textContent = model.label;
    button.classList.toggle("primary", model.primary);
  };
  button.addEventListener("click", () => model.send_msg("pressed"));
  model.on(["label", "primary"], show);
  model.on("file", () => {
    const bytes = Uint8Array.from(atob(model.file.content), (letter) => letter.charCodeAt(0));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([bytes]));
    link.download = model.file.name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
  show();
  return root;
}
