// The bar of tabs: buttons that arrow keys go through, as the pattern for tabs of the ARIA practices has it.
export function render({ model }) {
  const root = document.createElement("div");
  root.className = "tabs";
  root.setAttribute("role", "tablist");
  const buttons = model.shown.names.map((name, number) => {
    const button = document.createElement("button");
    button.textContent = name;
    button.setAttribute("role", "tab");
    button.addEventListener("click", () => choose(number));
    root.append(button);
    return button;
  });
  const mark = (number) => buttons.forEach((button, k) => {
    button.setAttribute("aria-selected", String(k === number));
    button.tabIndex = k === number ? 0 : -1;
  });
  const choose = (number) => {
    mark(number);
    model.send_msg(number);
  };
  root.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const next = (buttons.findIndex((button) => button.tabIndex === 0) + move + buttons.length) % buttons.length;
    buttons[next].focus();
    choose(next);
  });
  mark(model.shown.first);
  return root;
}
