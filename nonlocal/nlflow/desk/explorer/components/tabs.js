// The bar of tabs: buttons that arrow keys go through, as the pattern for tabs of the ARIA practices has it.
// And a notice when the server has gone: nothing on the page answers then.
const GONE = "The server has gone: nothing on this page is computed any more. Start `nonlocal explore` again where it ran, \
then reload this page.";

const watch = (page) => page.on_event("connection_lost", () => {
  if (document.querySelector(".nl-gone")) return;
  const notice = document.createElement("div");
  notice.className = "nl-gone";
  notice.setAttribute("role", "alert");
  notice.style.cssText = "position:fixed; inset:0 0 auto 0; z-index:9; padding:12px 20px; background:#a3160b; color:#fff; \
    font:600 15px/1.45 system-ui, sans-serif";
  notice.textContent = GONE;
  document.body.append(notice);
});

export function render({ model, view }) {
  watch(view.model.document);
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
