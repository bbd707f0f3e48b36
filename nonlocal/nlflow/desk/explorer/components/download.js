// A button, and the file that the server sends when it is pressed.
export function render({ model }) {
  const button = document.createElement("button");
  const show = () => { button.textContent = model.shown.label; };
  button.addEventListener("click", () => model.send_msg("pressed"));
  model.on("shown", show);
  model.on("msg:custom", ({ name, content }) => {
    const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([bytes]));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
  show();
  return button;
}
