// What is going on, how far it is, and a way to end it.
export function render({ model }) {
  const root = document.createElement("div");
  root.className = "nl-status";
  root.innerHTML = `<span class="text" role="status" aria-live="polite"></span>
    <progress max="1" aria-label="share done" hidden></progress><button class="cancel" hidden>Cancel</button>`;
  const [text, bar, cancel] = root.children;
  let timer;
  const show = () => {
    const { words, kind, share, serial } = model.shown;
    text.textContent = words;
    text.classList.toggle("error", kind === "error");
    Object.assign(root.dataset, { kind, serial });
    clearTimeout(timer);
    if (kind !== "busy") { bar.hidden = cancel.hidden = true; return; }
    bar.value = share;
    // What is done at once needs neither bar nor button.
    timer = setTimeout(() => { bar.hidden = cancel.hidden = false; }, bar.hidden ? 250 : 0);
  };
  cancel.addEventListener("click", () => model.send_msg("cancel"));
  model.on("shown", show);
  show();
  return root;
}
